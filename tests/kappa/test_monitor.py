"""KappaMonitor: the rows that a training loop gets of its attention blocks."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from leaner_kernels import (
    KappaMonitor,
    condition_report,
    gaussian_condition_number,
    singular_values,
)
from leaner_kernels.nn import ManyHeadAttention, evenly_spaced
from tests.wandb_runs import FakeRun

FIELDS = {
    "step", "layer", "kappa", "kappa_gaussian", "sigma_max", "sigma_min", "resolved", "entropy",
    "entropy_min", "max_logit", "mean_row_max", "prob_norm", "head_norm", "head_norms",
    "effective_rank", "stable_rank", "kappa_before_skip", "kappa_after_skip", "heads", "head_dim",
    "tokens", "columns", "source", "reason", "rank", "kappa_to_rank",
}  # fmt: skip


class Model(nn.Module):
    """Two layers of which only the first is given its residual."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = ManyHeadAttention(12, num_heads=4, head_dim=8)
        self.second = nn.Sequential(ManyHeadAttention(12, num_heads=2, head_dim="split"))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            x = x + checkpoint(self.first, x, skip=x, use_reentrant=False)
        else:
            x = x + self.first(x, skip=x)
        return x + self.second(x)


def batch() -> Tensor:
    return torch.randn(6, 9, 12, generator=torch.Generator().manual_seed(1))


def measured(model: nn.Module, *inputs: Tensor, **options: object) -> list[dict]:
    """The rows of one step with these micro-batches."""
    monitor = KappaMonitor(model, every=1, **options)
    monitor.begin(0)
    for x in inputs:
        model(x).sum().backward()
    return monitor.end()


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
    assert monitor.end() == monitor.flush() == []


def test_an_end_without_a_begin_is_refused() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=1)
    model(batch())
    with pytest.raises(RuntimeError, match=r"^end was called without begin: call begin\(step\)"):
        monitor.end()
    monitor.begin(0)
    model(batch())
    assert len(monitor.end()) == 2


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


def test_statistics_are_those_of_the_layer() -> None:
    model, x = Model(), batch()
    row = measured(model, x, samples=3)[0]
    module, norms, entropies = model.first, [], []
    q, k, v = module.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).detach()
    logits = q @ k.mT / 8**0.5
    p = logits.softmax(-1)
    entropies = torch.special.entr(p).sum(-1).mean(dim=(0, 2))
    norms = torch.linalg.matrix_norm(p @ v).mean(0)
    assert row["max_logit"] == pytest.approx(logits.max().item(), rel=1e-5)
    assert row["prob_norm"] == pytest.approx(torch.linalg.matrix_norm(p).mean().item(), rel=1e-5)
    assert row["entropy"] == pytest.approx(entropies.mean().item(), rel=1e-5)
    assert row["entropy_min"] == pytest.approx(entropies.min().item(), rel=1e-5)
    assert row["head_norms"] == pytest.approx(norms.tolist(), rel=1e-5)
    assert row["head_norm"] == pytest.approx(norms.mean().item(), rel=1e-5)
    report = condition_report((p @ v).transpose(1, 2).flatten(2)[[0, 2, 4]])
    assert row["effective_rank"] == pytest.approx(report.effective_rank.mean().item(), rel=1e-4)
    assert row["stable_rank"] == pytest.approx(report.stable_rank.mean().item(), rel=1e-4)


def kappa_by_svd(a: Tensor) -> float:
    sigma = singular_values(a)
    return (sigma[:, 0] / sigma[:, -1]).log().mean().exp().item()


def test_kappa_before_and_after_the_skip_connection() -> None:
    model, x = Model(), batch()
    with_skip, without = measured(model, x, samples=3)
    sample = [0, 2, 4]
    output = model.first(x).detach()[sample]
    assert with_skip["kappa_before_skip"] == pytest.approx(kappa_by_svd(output), rel=1e-3)
    after = kappa_by_svd(x[sample] + output)
    assert with_skip["kappa_after_skip"] == pytest.approx(after, rel=1e-3)
    assert without["kappa_before_skip"] is None
    assert without["kappa_after_skip"] is None


def test_kappa_around_the_skip_is_none_past_the_training_precision() -> None:
    # Tokens that are somewhat alike: the output's kappa is 17,000 and that after the skip 50.
    x = batch()[:, :1] + batch() / 3
    exact = measured(Model(), x)[0]
    assert exact["kappa_before_skip"] > 4 / torch.finfo(torch.float16).eps
    for dtype in (torch.bfloat16, torch.float16):
        row = measured(Model().to(dtype), x.to(dtype))[0]
        assert row["kappa_before_skip"] is None
        assert row["kappa_after_skip"] == pytest.approx(exact["kappa_after_skip"], rel=0.02)
        assert row["kappa"] == pytest.approx(exact["kappa"], rel=0.02)


def test_padded_rows_are_no_tokens() -> None:
    torch.manual_seed(0)
    module, x = ManyHeadAttention(12, num_heads=4, head_dim=8), batch()
    monitor = KappaMonitor(module, every=1, samples=6)
    rows = []
    for padding in (0.0, 1e3):
        lengths = torch.tensor([5, 9, 4, 5, 6, 7], dtype=torch.int32)
        padded = x.masked_fill((torch.arange(9) >= lengths[:, None])[..., None], padding)
        monitor.begin(0)
        module(padded, key_lengths=lengths, skip=padded)
        rows += monitor.end()
    alone = []
    for each, length in zip(x, lengths.tolist()):
        monitor.begin(0)
        module(each[None, :length], skip=each[None, :length])
        alone += monitor.end()
    for row in rows:
        assert row["tokens"] == 6
        for name in ("kappa", "kappa_before_skip", "kappa_after_skip"):
            expected = math.exp(sum(math.log(r[name]) for r in alone) / len(alone))
            assert row[name] == pytest.approx(expected, rel=1e-3)
        for name in ("sigma_min", "effective_rank", "stable_rank"):
            expected = sum(r[name] for r in alone) / len(alone)
            assert row[name] == pytest.approx(expected, rel=1e-3)


def test_recomputed_activations_count_once() -> None:
    assert measured(Model(), batch()) == measured(Model(recompute=True), batch())


def test_of_micro_batches_the_newest_counts_but_the_logit_is_the_largest() -> None:
    model = Model()
    large, alone = measured(model, 10 * batch()), measured(model, batch())
    both = measured(model, 10 * batch(), batch())
    for row, newest, other in zip(both, alone, large):
        assert row == newest | {"max_logit": other["max_logit"]}
        assert other["max_logit"] > newest["max_logit"]


class Scalars:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written[name, step] = value


def test_rows_are_appended_as_json_lines_and_given_to_writers(tmp_path: Path) -> None:
    path = tmp_path / "kappa.jsonl"
    path.write_text('{"step": -1}\n')
    scalars, run = Scalars(), FakeRun()
    rows = measured(Model(), batch(), path=path, writer=[scalars, run])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": -1}, *rows]
    assert scalars.written["kappa/first", 0] == rows[0]["kappa"]
    assert scalars.written["effective_rank/second.0", 0] == rows[1]["effective_rank"]
    assert ("kappa_after_skip/first", 0) in scalars.written
    assert ("kappa_after_skip/second.0", 0) not in scalars.written
    expected = {name: value for (name, _), value in scalars.written.items()} | {"kappa/step": 0}
    run.finish()
    assert run.rows == [expected]


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


@pytest.mark.parametrize(
    "wrap",
    [partial(torch.compile, backend="eager"), checkpoint_wrapper],
    ids=["compile", "checkpoint"],
)
def test_wrapped_attention_is_found_once(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    model.first = wrap(model.first)
    model = torch.compile(model)
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    model.get_submodule("_orig_mod")(batch()).sum().backward()
    assert [row["layer"] for row in monitor.end()] == ["first", "second.0"]


def test_samples_are_spread_over_the_batch() -> None:
    assert evenly_spaced(10, 4, torch.device("cpu")).tolist() == [0, 2, 5, 7]
    assert evenly_spaced(3, 8, torch.device("cpu")).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KappaMonitor(Model(), every=0), "at least 1, got 0 and 4"),
        (lambda: KappaMonitor(Model(), samples=0), "at least 1, got 50 and 0"),
        (lambda: KappaMonitor(Model(), path="no/such/folder"), "got 'no/such/folder'"),
        (lambda: KappaMonitor(Model(), writer="tb"), "must have add_scalar or log, got str"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
