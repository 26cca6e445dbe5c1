"""Every operator in one compiled graph for all sizes, and exported: as modules call them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

import leaner_kernels as lk
from tests.compile_cases import CALLS, DIM, HEADS, SIZES, Layer, separate, tokens_of


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


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lk.attention_qkvpacked,
    "cross_covariance": lambda x: lk.cross_covariance_attention(x, torch.ones(HEADS)),
    "channel": lk.channel_attention,
    "nystrom": lambda x: lk.nystrom_attention(*separate(x), 4),
    "window": lambda x: lk.window_attention(x, 2),
    "outlook": lambda x: lk.outlook_attention(x[..., 0, :, :], x.new_ones(2, 40, 4, HEADS, 9, 9)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_autocast_narrows_what_a_function_takes_and_rounds_nothing_in_between(name: str) -> None:
    cols = (4,) if name in ("window", "outlook") else ()
    x = torch.randn(2, 40, *cols, 3, HEADS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        out = PLAIN[name](x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, PLAIN[name](x.bfloat16()))


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
