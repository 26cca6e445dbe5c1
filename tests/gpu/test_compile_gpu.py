"""Compiled layers that Inductor tunes and replays as CUDA graphs, statistics inside."""

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.compile_cases import CALLS, SIZES, Layer, library_call, tokens_of
from tests.error_budget import assert_within_budget

DEVICE = "cuda"
# The first runs warm up and record; the others replay.
STEPS = 5


def results(layer: Layer, run: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the parameters, copied out of a graph's memory."""
    torch.compiler.cudagraph_mark_step_begin()
    out = run(x)
    grads = torch.autograd.grad(out.square().mean(), list(layer.parameters()))
    return [t.detach().clone() for t in (out, *grads)]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("name", CALLS)
def test_replayed_graphs_give_what_eager_gives(name: str, mode: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    layer = Layer(CALLS[name]).to(DEVICE, torch.bfloat16)
    exact_layer = copy.deepcopy(layer).to("cpu", torch.float64)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(STEPS):
        x = tokens_of(name, SIZES[0]).to(DEVICE, torch.bfloat16)
        exact = results(exact_layer, exact_layer, x.cpu().double())
        for actual, eager, wanted in zip(
            results(layer, compiled, x), results(layer, layer, x), exact, strict=True
        ):
            assert_within_budget(actual, eager, wanted)
    # A graph that cannot be captured would run without a word.
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_a_call_that_goes_to_a_library_is_one_compiled_graph(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.testing.assert_close(*library_call(packed, DEVICE, monkeypatch))
