"""Sizes that a graph leaves open: as few graphs as PyTorch's function makes, D among the sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from leaner_kernels import (
    attention,
    attention_varlen,
    attention_with_stats,
    nystrom_attention,
)
from leaner_kernels.ops.attention import attention_qkvpacked

Function = Callable[..., Tensor]
SDPA = F.scaled_dot_product_attention
# (B, H, N, M, D): all five change, and none is 1 or equal to another at first.
SIZES = ((2, 3, 5, 7, 11), (3, 4, 6, 13, 16), (4, 5, 9, 9, 8), (6, 7, 33, 20, 24), (8, 8, 8, 8, 8))


def with_stats(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention_with_stats(q, k, v, **options).out


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_qkvpacked(torch.stack([t.transpose(1, 2) for t in (k, k, v)], dim=2))


def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts, *tokens = torch.arange(2), *(t[0].transpose(0, 1) for t in (q, k, v))
    rows, cols = ((starts * t.shape[0]).int() for t in tokens[:2])
    sizes = {"cu_seqlens_k": cols, "max_seqlen_k": k.shape[2]}
    return attention_varlen(*tokens, rows, q.shape[2], **sizes)


OURS = {"attention": attention, "statistics": with_stats, "packed": packed, "varlen": varlen}


def graphs(function: Function, *, grad: bool = False) -> int:
    """Return how many graphs are made after the first size, each of whose results is checked."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if grad else "eager")
    compiled = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
    made = []
    for batch, heads, rows, cols, dim in SIZES:
        shapes = (batch, heads, rows, dim), *[(batch, heads, cols, dim)] * 2
        tensors = [torch.randn(shape, requires_grad=grad) for shape in shapes]
        out, expected = compiled(*tensors), function(*tensors)
        torch.testing.assert_close(out, expected)
        if grad:
            both = [
                torch.autograd.grad(t.square().sum(), tensors[1:], allow_unused=True)
                for t in (out, expected)
            ]
            torch.testing.assert_close(*both)
        made.append(counter.frame_count)
    return made[-1] - made[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_one_graph_serves_all_sizes(name: str, grad: bool) -> None:
    assert graphs(OURS[name], grad=grad) == graphs(SDPA, grad=grad) == 0


class AttentionCall(nn.Module):
    """A call as a module, which export takes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v)


@pytest.mark.parametrize("name", OURS)
def test_an_exported_call_takes_any_head_dimension(name: str) -> None:
    q = torch.randn(2, 3, 6, 8)
    sizes = ({3: Dim("dim", min=2, max=100)},) * 3
    function = OURS[name]
    program = export(AttentionCall(function), (q, q + 1, q - 1), dynamic_shapes=sizes)
    x = torch.randn(2, 3, 6, 20)
    torch.testing.assert_close(program.module()(x, x + 1, x - 1), function(x, x + 1, x - 1))


SHAPE = 3, 4, 16, 8  # (B, H, N, D)


def nystrom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nystrom_attention(q, k, v, 4)


# A varlen batch here is made of the first entry alone.
AXES = [(name, axis) for name in (*OURS, "nystrom") for axis in range(name == "varlen", 4)]


@pytest.mark.parametrize(("name", "axis"), AXES)
def test_an_exported_call_takes_every_size_from_two_on(name: str, axis: int) -> None:
    """No check that only words an error message limits a size, such as tokens to be as heads."""
    function = nystrom if name == "nystrom" else OURS[name]
    # The landmarks of Nyström attention divide its tokens.
    step, least = (4, 8) if (name, axis) == ("nystrom", 2) else (1, 2)
    size = step * Dim("size", min=2, max=100)
    q = torch.randn(SHAPE)
    program = export(AttentionCall(function), (q, q + 1, q - 1), dynamic_shapes=({axis: size},) * 3)
    few = torch.randn(*SHAPE[:axis], least, *SHAPE[axis + 1 :])
    torch.testing.assert_close(program.module()(few, few, few), function(few, few, few))


def test_more_heads_than_tokens_are_still_explained_where_head_counts_differ() -> None:
    q, k = torch.randn(2, 16, 4, 8), torch.randn(2, 8, 4, 8)
    with pytest.raises(ValueError, match=r"becomes \(B, H, N, D\) by .transpose\(1, 2\)"):
        attention(q, k, k)


@pytest.mark.parametrize("ours", [attention, with_stats])
def test_a_scale_may_be_made_of_a_size(ours: Function) -> None:
    def call(function: Function, q: Tensor, k: Tensor) -> Tensor:
        return function(q, k, k, scale=k.shape[2] ** -0.5)

    torch._dynamo.reset()
    compiled = torch.compile(partial(call, ours), backend="eager", dynamic=True, fullgraph=True)
    for rows, cols in ((6, 5), (4, 9), (3, 12)):
        q, k = torch.randn(2, 3, rows, 8), torch.randn(2, 3, cols, 8)
        torch.testing.assert_close(compiled(q, k), call(SDPA, q, k))
