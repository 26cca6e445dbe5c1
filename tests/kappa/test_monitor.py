"""KappaMonitor: what a training loop sees of its attention blocks."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from leaner_kernels import KappaMonitor, condition_number, gaussian_condition_number
from leaner_kernels.nn import ManyHeadAttention, evenly_spaced

FIELDS = {
    "step", "layer", "kappa", "kappa_gaussian", "sigma_max", "sigma_min", "resolved", "entropy",
    "max_logit", "prob_norm", "head_norm", "heads", "head_dim", "tokens",
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = ManyHeadAttention(12, num_heads=4, head_dim=8)
        self.second = nn.Sequential(ManyHeadAttention(12, num_heads=2, head_dim="split"))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            x = x + checkpoint(self.first, x, use_reentrant=False)
        else:
            x = x + self.first(x)
        return x + self.second(x)


def batch() -> Tensor:
    return torch.randn(6, 9, 12, generator=torch.Generator().manual_seed(1))


def test_rows_describe_every_layer() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=1, samples=3)
    assert monitor.layers == ["first", "second.0"]
    monitor.begin(7)
    model(batch()).sum().backward()
    rows = monitor.end()
    assert [row["layer"] for row in rows] == monitor.layers
    assert all(row.keys() == FIELDS for row in rows)
    assert [(r["step"], r["heads"], r["head_dim"], r["tokens"]) for r in rows] == [
        (7, 4, 8, 9),
        (7, 2, 6, 9),
    ]
    assert rows[0]["kappa_gaussian"] == gaussian_condition_number(9, 32)


def test_kappa_is_that_of_the_concatenated_heads() -> None:
    model, x = Model(), batch()
    monitor = KappaMonitor(model, every=1, samples=3)
    monitor.begin(0)
    model(x)
    row = monitor.end()[0]
    captured: list[Tensor] = []
    handle = model.first.proj.register_forward_pre_hook(lambda _, inputs: captured.append(*inputs))
    model(x)
    handle.remove()
    each = condition_number(captured[0][[0, 2, 4]].detach())
    assert row["kappa"] == pytest.approx(each.kappa.log().mean().exp().item(), rel=1e-3)
    assert row["sigma_max"] == pytest.approx(each.sigma_max.mean().item(), rel=1e-5)


def test_only_every_nth_step_is_sampled() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=3)
    counts = []
    for step in range(7):
        monitor.begin(step)
        model(batch())
        counts.append(len(monitor.end()))
    assert counts == [2, 0, 0, 2, 0, 0, 2]
    assert model.first.capture_samples == 0
    assert model.first.captured is None


def test_sampling_changes_no_result() -> None:
    model, x = Model(), batch()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    actual = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    monitor.end()
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b)


def test_recomputed_activations_count_once() -> None:
    rows = []
    for recompute in (False, True):
        model = Model(recompute)
        monitor = KappaMonitor(model, every=1)
        monitor.begin(0)
        model(batch()).sum().backward()
        rows.append(monitor.end())
    assert rows[0] == rows[1]


def test_the_newest_forward_of_a_step_counts() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=1)
    results = []
    for inputs in ([batch()], [10 * batch(), batch()]):
        monitor.begin(0)
        for x in inputs:
            model(x).sum().backward()
        results.append(monitor.end())
    assert results[0] == results[1]


def test_rows_are_appended_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "kappa.jsonl"
    path.write_text('{"step": -1}\n')
    written = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    model = Model()
    monitor = KappaMonitor(model, every=1, path=path, writer=Writer())
    monitor.begin(0)
    model(batch())
    rows = monitor.end()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": -1}, *rows]
    assert ("kappa/first", rows[0]["kappa"], 0) in written
    assert len(written) == 6


def test_an_unresolved_kappa_is_no_number() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    model(batch()[:, :1].expand(-1, 9, -1))
    row = monitor.end()[0]
    assert row["kappa"] is None
    assert row["resolved"] is False
    assert row["entropy"] == pytest.approx(math.log(9))


def test_compiled_models_are_sampled() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    rows = []
    for step in range(3):
        monitor.begin(step)
        compiled(batch()).sum().backward()
        rows.append(monitor.end())
    assert [len(r) for r in rows] == [2, 0, 2]
    eager = KappaMonitor(model, every=1)
    eager.begin(0)
    model(batch())
    for actual, expected in zip(rows[0], eager.end()):
        assert actual["kappa"] == pytest.approx(expected["kappa"], rel=1e-3)


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper], ids=["compile", "checkpoint"])
def test_wrapped_attention_is_found_once(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    model.first = wrap(model.first)
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    model(batch()).sum().backward()
    assert len(monitor.end()) == len(monitor.layers) == 2


def test_samples_are_spread_over_the_batch() -> None:
    assert evenly_spaced(10, 4, torch.device("cpu")).tolist() == [0, 2, 5, 7]
    assert evenly_spaced(3, 8, torch.device("cpu")).tolist() == [0, 1, 2]


def test_a_layer_that_did_not_run_is_named() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=1)
    monitor.begin(3)
    model.first(batch())
    with pytest.raises(RuntimeError, match=r"second\.0 ran no forward .* step 3"):
        monitor.end()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KappaMonitor(Model(), every=0), "at least 1, got 0 and 4"),
        (lambda: KappaMonitor(Model(), samples=0), "at least 1, got 50 and 0"),
        (lambda: KappaMonitor(Model(), path="no/such/folder"), "got 'no/such/folder'"),
        (lambda: KappaMonitor(nn.Linear(3, 3)), "Linear has no attention module"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
