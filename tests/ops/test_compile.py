"""Every operator in one compiled graph for all sizes, and exported: as modules call them."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

import leaner_kernels as lk
from tests.compile_cases import CALLS, SIZES, Layer, tokens_of


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
