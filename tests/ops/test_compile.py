"""Every operator in one compiled graph for all sizes, and exported: as modules call them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.export import Dim, export

import leaner_kernels as lk
from leaner_kernels.ops.attention import dispatch
from tests.backends import GPU
from tests.error_budget import assert_within_budget

HEADS, DIM, WIDTH = 3, 4, 6
SIZES = (2, 5), (7, 9)
Size = tuple[int, int]


def separate(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def measured(stats: lk.AttentionStats) -> Tensor:
    assert stats.heads is not None
    return stats.out + stats.heads.mean() + stats.entropy.mean() + stats.max_logit.amax()


def first(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def varlen(qkv: Tensor) -> Tensor:
    batch, tokens = qkv.shape[:2]
    starts = tokens * torch.arange(batch + 1, dtype=torch.int32, device=qkv.device)
    q, k, v = qkv.flatten(0, 1).unbind(1)
    stats = lk.attention_varlen_with_stats(q, k, v, starts, tokens, sample=first(q))
    return measured(stats).view(batch, tokens, HEADS, DIM)


def window(qkv: Tensor) -> Tensor:
    return measured(lk.window_attention_with_stats(qkv, 2, sample=first(qkv)))


def outlook(qkv: Tensor) -> Tensor:
    value, pixels, _ = qkv.unbind(3)
    tiles = pixels.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 5, 2, 4, 6)
    logits = tiles.flatten(4, 5)  # as many places as D has elements
    stats = lk.outlook_attention_with_stats(
        value, logits, kernel_size=2, stride=2, padding=0, sample=first(qkv)
    )
    return measured(stats)


# Each: what it does to qkv (B, N, 3, H, D), N a multiple of 8, or (B, Y, X, 3, H, D).
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: lk.attention(*separate(x), is_causal=True),
    "attention_with_stats": lambda x: measured(
        lk.attention_with_stats(*separate(x), sample=first(x))
    ),
    "attention_qkvpacked_with_stats": lambda x: measured(
        lk.attention_qkvpacked_with_stats(x, sample=first(x))
    ),
    "varlen": varlen,
    "cross_covariance": lambda x: measured(
        lk.cross_covariance_attention_with_stats(x, x.new_ones(HEADS), sample=first(x))
    ),
    "channel": lambda x: measured(lk.channel_attention_with_stats(x, sample=first(x))),
    "nystrom": lambda x: measured(
        lk.nystrom_attention_with_stats(*separate(x), 4, sample=first(x))
    ),
    "window": window,
    "outlook": outlook,
}


class Layer(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, DIM))
        return self.call(qkv)


def tokens_of(name: str, size: Size) -> Tensor:
    batch, blocks = size
    cols = (4,) if name in ("window", "outlook") else ()
    return torch.randn(batch, 8 * blocks, *cols, WIDTH)


def library_call(
    packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradient, eager and compiled whole, of a call that PyTorch takes.

    Raises:
        AssertionError: it was not one graph, or one of ours computed it.
    """
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.use_deterministic_algorithms(False)  # which PyTorch's gradients are not
    rule = dispatch.Rule(256, None, "a test")
    monkeypatch.setattr(dispatch, "find_rule_of_library", lambda *_, **call: rule)

    def run(qkv: Tensor) -> Tensor:
        return lk.attention_qkvpacked(qkv) if packed else lk.attention(*separate(qkv))

    counter = CompileCounterWithBackend("aot_eager")
    qkv = torch.randn(2, 300, 3, 2, 64).to(device, torch.bfloat16).requires_grad_()
    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend=counter)):
        out = call(qkv)
        found.append([out, *torch.autograd.grad(out.float().square().mean(), qkv)])
    (graph,) = counter.graphs
    called = {str(node.target) for node in graph.graph.nodes}
    assert any("scaled_dot_product_attention" in name for name in called), called
    assert not any("leaner_kernels" in name for name in called), called
    return found[0], found[1]


@pytest.mark.parametrize("name", CALLS)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_compiled_graph_serves_all_sizes(name: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    layer = Layer(CALLS[name])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in SIZES:
        x = tokens_of(name, size)
        expected, actual = layer(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        grads = [
            torch.autograd.grad(t.square().sum(), layer.parameters()) for t in (actual, expected)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", CALLS)
def test_an_exported_layer_runs_at_another_size(name: str) -> None:
    torch.manual_seed(0)
    layer = Layer(CALLS[name])
    dims = {0: Dim("batch"), 1: 8 * Dim("blocks")}
    program = export(layer, (tokens_of(name, SIZES[0]),), dynamic_shapes=(dims,))
    x = tokens_of(name, SIZES[1])
    torch.testing.assert_close(program.module()(x), layer(x))


def test_autocast_inside_a_compiled_function() -> None:
    torch.compiler.reset()
    layer = Layer(CALLS["attention_with_stats"])

    @torch.autocast("cpu", torch.bfloat16)
    def run(x: Tensor) -> Tensor:
        return layer(x)

    x = tokens_of("attention_with_stats", SIZES[0])
    expected, actual = run(x), torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(actual, expected)
    assert all(
        torch.equal(a, e)
        for a, e in zip(
            *(torch.autograd.grad(t.sum(), layer.parameters()) for t in (actual, expected))
        )
    )


def test_gradients_of_each_example_compile() -> None:
    torch.compiler.reset()
    q = torch.randn(3, 2, 4, 5, 6)

    def loss(q: Tensor) -> Tensor:
        return lk.attention_with_stats(q, q, q).out.square().sum()

    run = torch.vmap(torch.func.grad(loss))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), run(q))


# --- On a GPU: what Inductor tunes and replays as CUDA graphs -------------------------------------

# The first runs warm up and record; the others replay.
STEPS = 5


def results(layer: Layer, run: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the parameters, copied out of a graph's memory."""
    torch.compiler.cudagraph_mark_step_begin()
    out = run(x)
    grads = torch.autograd.grad(out.square().mean(), list(layer.parameters()))
    return [t.detach().clone() for t in (out, *grads)]


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("name", CALLS)
def test_replayed_graphs_give_what_eager_gives(name: str, mode: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    layer = Layer(CALLS[name]).to("cuda", torch.bfloat16)
    exact_layer = copy.deepcopy(layer).to("cpu", torch.float64)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(STEPS):
        x = tokens_of(name, SIZES[0]).to("cuda", torch.bfloat16)
        exact = results(exact_layer, exact_layer, x.cpu().double())
        for actual, eager, wanted in zip(
            results(layer, compiled, x), results(layer, layer, x), exact, strict=True
        ):
            assert_within_budget(actual, eager, wanted)
    # A graph that cannot be captured would run without a word.
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_a_call_that_goes_to_a_library_is_one_compiled_graph(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.testing.assert_close(*library_call(packed, "cuda", monkeypatch))
