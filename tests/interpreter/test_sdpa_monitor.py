"""KappaMonitor of compiled models of others, whose attention our kernels compute in the graph."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

from leaner_kernels import KappaMonitor
from leaner_kernels.monitor import operators, trace
from leaner_kernels.ops import _hooks
from leaner_kernels.ops.attention import aten
from tests.replaced_operators import behind_sdpa

sdpa = nn.functional.scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, heads: int = 2, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = sdpa(q, k, v, is_causal=self.is_causal)
        return x + self.proj(out.transpose(1, 2).reshape(batch, rows, 32))


def plain(*heads: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(h, is_causal=h == 4) for h in heads or (2, 4))).half()


X = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(1)).half()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert _hooks.current is _hooks.operators is None
    assert not _hooks.replacements


def step(monitor: KappaMonitor, number: int, model: nn.Module, *inputs: Tensor) -> list[dict]:
    model.zero_grad()
    monitor.begin(number)
    for x in inputs or (X,):
        model(x).float().square().sum().backward()
    return monitor.end()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_same_rows(actual: list[dict], expected: list[dict], source: str = "same pass") -> None:
    assert [row["layer"] for row in actual] == [row["layer"] for row in expected]
    for row, other in zip(actual, expected, strict=True):
        assert row["source"] == source
        for name in ("heads", "head_dim", "tokens", "columns", "reason"):
            assert row[name] == other[name], name
        for name in ("kappa", "sigma_max", "effective_rank", "entropy", "max_logit", "head_norms"):
            assert row[name] == pytest.approx(other[name], rel=0.02), name


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_rows_come_from_the_compiled_graph_as_it_is(backend: str) -> None:
    model = plain()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with behind_sdpa() as below:
        monitor = KappaMonitor(model, every=2, samples=3)
        eager = step(monitor, 0, compiled)
        assert [row["source"] for row in eager] == ["recomputed"] * 2
        assert not step(monitor, 1, compiled)
        expected, before = gradients(model), dict(counters["stats"])
        with mock.patch.object(Attention, "forward", side_effect=AssertionError):  # it is compiled
            rows = step(monitor, 2, compiled)
        assert_same_rows(rows, eager)
        assert counters["stats"] == before
        assert all(map(torch.equal, gradients(model), expected))
        assert not below
        assert len(step(monitor, 4, compiled)) == 2
        assert counters["stats"] == before


def test_a_graph_may_be_compiled_in_a_sampled_step() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        before = counters["stats"]["unique_graphs"]
        assert_same_rows(step(monitor, 1, compiled), eager)
        assert counters["stats"]["unique_graphs"] == before + 1


def test_a_model_of_timm_compiled_in_parts() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**sizes, num_classes=3).half()
    images = torch.randn(2, 3, 32, 32).half()
    model.blocks[0].compile(backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1)
        eager = step(monitor, 0, model, images)
        rows = step(monitor, 1, model, images)
    assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn"]
    assert_same_rows(rows, eager)


def test_eager_models_are_measured_once_by_the_function_mode() -> None:
    model = plain()
    with behind_sdpa(), mock.patch.object(aten.route, "forward_on_gpu") as captures:
        monitor = KappaMonitor(model, every=1)
        for number in range(3):
            rows = step(monitor, number, model)
            assert [row["source"] for row in rows] == ["recomputed"] * 2
    assert not captures.called


def test_nothing_is_measured_twice_in_the_graph() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    measure = mock.Mock(wraps=trace.attention_statistics)
    with behind_sdpa(), mock.patch.object(trace, "attention_statistics", measure):
        monitor = KappaMonitor(model, every=1)
        step(monitor, 0, compiled)
        assert measure.call_count == 2
        monitor.begin(1)
        assert _hooks.current is None  # which compiled code reads
        compiled(X)
        assert len(monitor.end()) == 2
    assert measure.call_count == 2


def test_calls_that_are_left_to_pytorch_are_recomputed_in_the_graph() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    torch.use_deterministic_algorithms(False)  # they rule out libraries
    with behind_sdpa(75) as below:
        monitor = KappaMonitor(model, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        rows = step(monitor, 1, compiled)
    assert below
    # The stand-ins return empty tensors, which the second layer sees.
    assert_same_rows(rows[:1], eager[:1], "recomputed")


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_captured_call_has_the_results_of_any_other(dropout_p: float) -> None:
    q, k, v = torch.randn(3, 2, 2, 20, 16).half()
    watch = mock.Mock()
    watch.sample.return_value = torch.tensor([1], dtype=torch.int32)
    results = []
    with behind_sdpa():
        for hook in (None, watch):
            torch.manual_seed(3)
            with mock.patch.object(_hooks, "operators", hook):
                forward = torch.ops.aten._scaled_dot_product_cudnn_attention
                out, lse, *_, seed, offset, _ = forward(q, k, v, None, True, dropout_p)
            backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
            saved = out, lse, seed, offset, None, None, None, 20, 20, dropout_p, False
            results.append((out, lse, *backward(q, q, k, v, *saved)))
    assert watch.capture.call_args.args[0].heads.shape == (1, 20, 32)
    for plain_result, captured in zip(*results, strict=True):
        assert torch.equal(plain_result, captured)


def test_padded_heads_are_measured_without_the_padding() -> None:
    model = plain(2)
    compiled = torch.compile(model, backend="aot_eager")

    def padded(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        q, k, v = (nn.functional.pad(t, (0, 8)) for t in (q, k, v))
        return real(q, k, v, scale=16**-0.5, **options)[..., :16]

    real = sdpa
    # As PyTorch's function does on a GPU, below the function mode.
    with behind_sdpa(), mock.patch.object(trace, "_sdpa", real):
        monitor = KappaMonitor(model, every=1, samples=3)
        calls = monitor._trace.operators
        eager = step(monitor, 0, compiled)
        with mock.patch.dict(globals(), sdpa=padded):
            torch._dynamo.reset()
            for call in calls._order:
                call.kind = (2, 24)
            rows = step(monitor, 1, compiled)
    assert_same_rows(rows, eager)


def test_several_forwards_of_a_step_and_longer_sequences() -> None:
    model = plain(2, 2)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    longer = torch.randn(3, 25, 32).half()
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        step(monitor, 0, compiled, X, X)
        rows = step(monitor, 1, compiled, X, X, longer)
        alone = KappaMonitor(model, every=1, samples=3)
        expected = step(alone, 0, model, longer)
    assert [row["tokens"] for row in rows] == [25, 25]
    for row, other in zip(rows, expected):
        assert row["kappa"] == pytest.approx(other["kappa"], rel=0.02)


@pytest.mark.parametrize("inside", [False, True])
def test_recomputed_activations_count_once(inside: bool) -> None:
    model = plain(2, 2)
    blocks = list(model) if inside else [torch.compile(b, backend="aot_eager") for b in model]

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    compiled = torch.compile(forward, backend="aot_eager") if inside else forward
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        rows = []
        for number in range(2):
            monitor.begin(number)
            compiled(X.clone().requires_grad_()).float().square().sum().backward()
            rows.append(monitor.end())
    assert_same_rows(rows[1], rows[0])


def test_two_models_keep_their_rows_apart() -> None:
    models = plain(2, 4), plain(4, 2, 2)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    with behind_sdpa():
        monitors = [KappaMonitor(model, every=1, samples=3) for model in models]
        alone = [step(m, 0, c) for m, c in zip(monitors, compiled)]
        for number in (1, 2):
            for monitor in monitors:
                monitor.begin(number)
            for model in compiled:
                model(X).sum().backward()
            for monitor, expected in zip(monitors, alone):
                assert_same_rows(monitor.end(), expected, "recomputed")
        for monitor, model, expected in zip(monitors, compiled, alone):
            assert_same_rows(step(monitor, 3, model), expected)


def test_a_monitor_that_begins_after_the_forward_of_another() -> None:
    models = plain(2, 4), plain(4, 2, 2)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    with behind_sdpa():
        monitors = [KappaMonitor(model, every=1, samples=3) for model in models]
        alone = [step(m, 0, c) for m, c in zip(monitors, compiled)]
        for monitor, model in zip(monitors, compiled):
            monitor.begin(1)
            model(X)
        assert_same_rows(monitors[0].end(), alone[0])
        assert_same_rows(monitors[1].end(), alone[1], "recomputed")


def test_another_model_in_the_step_has_no_rows() -> None:
    model, teacher = plain(), plain(2)
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        rows = []
        for number in range(2):
            monitor.begin(number)
            compiled(teacher(X)).sum().backward()
            rows.append(monitor.end())
    assert_same_rows(rows[1], rows[0])


class AsksIfCompiled(Attention):
    """As models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        options: dict = {"is_causal": True, "enable_gqa": True}
        k, v = k[:, :1], v[:, :1]
        if torch.compiler.is_compiling():
            options = {"attn_mask": torch.ones(20, 20, dtype=torch.bool).tril()}
            k, v = k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)
        return x + self.proj(sdpa(q, k, v, **options).transpose(1, 2).flatten(2))


def test_masks_and_key_heads_may_differ_from_those_in_eager_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(AsksIfCompiled(), AsksIfCompiled()).half()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        assert_same_rows(step(monitor, 1, compiled), eager)


class SideBySide(nn.Module):
    """Two layers of one input, the second perhaps of other heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.left, self.right = Attention(2), Attention(heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


@pytest.mark.parametrize(("heads", "source"), [(2, "recomputed"), (4, "same pass")])
@pytest.mark.parametrize("monitored", [True, False])
def test_calls_that_a_compiler_may_swap_are_traced_eagerly(
    heads: int, source: str, monitored: bool
) -> None:
    torch.manual_seed(0)
    model = SideBySide(heads).half()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model if monitored else model.left, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        assert_same_rows(step(monitor, 1, compiled), eager, source)


def test_without_gradients_nothing_shows_the_order() -> None:
    model = plain(2, 2)
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa(), torch.no_grad():
        monitor = KappaMonitor(model, every=1, samples=3)
        for number in range(2):
            monitor.begin(number)
            compiled(X)
            assert {row["source"] for row in monitor.end()} == {"recomputed"}
    with behind_sdpa():
        step(monitor, 2, compiled)
        with torch.no_grad():
            monitor.begin(3)
            compiled(X)
            assert {row["source"] for row in monitor.end()} == {"same pass"}


def test_restored_operators_end_the_capture_and_the_monitor_goes_on() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    monitor = KappaMonitor(model, every=1, samples=3)
    with behind_sdpa():
        eager = step(monitor, 0, compiled)
        step(monitor, 1, compiled)
    assert_same_rows(step(monitor, 2, compiled), eager, "recomputed")
    with behind_sdpa():
        step(monitor, 3, compiled)
        assert_same_rows(step(monitor, 4, compiled), eager)


def test_calls_of_other_sizes_are_named_by_their_order_with_one_warning() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        step(monitor, 0, compiled)
        monitor.begin(1)
        model[0](X)
        compiled(X)
        with pytest.warns(UserWarning, match="it made 3 instead of 2") as warned:
            rows = monitor.end()
        assert len(warned) == 1
        measured = [row["layer"] for row in rows if row["kappa"]]
        assert measured == ["call 0", "call 1", "call 2"]
        rows = step(monitor, 2, compiled)  # eager again, without a warning
        assert [row["layer"] for row in rows if row["kappa"]] == ["0", "1"]


def test_calls_of_swapped_heads_are_never_named_by_the_other() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        step(monitor, 0, compiled)
        model[0].heads, model[1].heads = 4, 2
        with pytest.warns(UserWarning, match="named by their order"):
            rows = step(monitor, 1, compiled)
    assert [row["layer"] for row in rows if row["kappa"]] == ["call 0", "call 1"]


def test_a_replaced_module_is_traced_eagerly_again() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        step(monitor, 0, compiled)
        model[1] = plain(8)[0]
        assert [r["source"] for r in step(monitor, 1, compiled)] == ["recomputed"] * 2
        rows = step(monitor, 2, compiled)
    assert [(r["heads"], r["source"]) for r in rows] == [(2, "same pass"), (8, "same pass")]


def test_a_step_without_calls_says_why_in_one_line() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        monitor.begin(1)
        with pytest.warns(UserWarning, match="replayed CUDA graphs .* run no Python") as warned:
            rows = monitor.end()
        assert "\n" not in str(warned[0].message)
        assert {row["reason"] for row in rows} == {"no call of several queries"}
        assert_same_rows(step(monitor, 2, compiled), eager, "recomputed")


def test_where_graphs_are_replayed_sampled_steps_run_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import cudagraph_trees

    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    manager = mock.Mock(tree_manager=object())
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        monkeypatch.setitem(cudagraph_trees.local.tree_manager_containers, 0, manager)
        assert operators._replays_graphs()
        assert_same_rows(step(monitor, 1, compiled), eager, "recomputed")


def test_an_error_and_cancel_leave_no_hook() -> None:
    model = plain()
    compiled = torch.compile(model, backend="aot_eager")
    with behind_sdpa():
        monitor = KappaMonitor(model, every=1, samples=3)
        eager = step(monitor, 0, compiled)
        monitor.begin(1)
        compiled(X)
        monitor.cancel()
        assert _hooks.operators is None
        assert_same_rows(step(monitor, 2, compiled), eager)
