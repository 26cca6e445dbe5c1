"""Empty batches: results and gradients of the shapes that calls of some size have."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaner_kernels import attention, attention_varlen, attention_with_stats
from leaner_kernels.ops import route
from leaner_kernels.ops.attention import (
    attention_qkvpacked,
    attention_qkvpacked_with_stats,
    attention_varlen_with_stats,
    op,
)

Call = Callable[..., Any]
# Of (B, H, N, D) and (B, H, M, D): no batch, no heads, no rows, no keys, nothing of either.
SIZES = ((0, 3, 7, 9), (2, 0, 7, 9), (2, 3, 0, 9), (2, 3, 7, 0), (2, 3, 0, 0))
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.5},
    "grouped": {"enable_gqa": True},
    "a scale": {"scale": -0.3},
}


def leaves(*shapes: Sequence[int]) -> list[Tensor]:
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def shapes_of(function: Call, tensors: list[Tensor], *rest: Any, **params: Any) -> list[Any]:
    """Return the shapes of all results and gradients, in which nothing but zeros may be."""
    result = function(*tensors, *rest, **params)
    out, *stats = result if isinstance(result, tuple) else (result,)
    gradients = torch.autograd.grad(out.sum(), tensors)
    for t in (out, *gradients):
        assert not t.any()
    assert [g.shape for g in gradients] == [t.shape for t in tensors]
    return [out.shape, *(None if t is None else t.shape for t in stats)]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_of_nothing_is_as_pytorchs(sizes: tuple[int, ...], name: str) -> None:
    batch, heads, rows, cols = sizes
    tensors = leaves((batch, heads, rows, 8), *[(batch, heads, cols, 8)] * 2)
    out = F.scaled_dot_product_attention(*tensors, **PARAMS[name])
    assert shapes_of(attention, tensors, **PARAMS[name]) == [out.shape]
    per_head = [(batch, heads)] * 5
    assert shapes_of(attention_with_stats, tensors, **PARAMS[name]) == [
        out.shape,
        (batch, heads, rows),
        *per_head,
        None,
    ]


@pytest.mark.parametrize("shape", [(0, 7, 3, 2, 8), (2, 0, 3, 2, 8), (2, 7, 3, 0, 8)], ids=str)
def test_packed_attention_of_nothing(shape: tuple[int, ...]) -> None:
    batch, rows, _, heads, dim = shape
    out = (batch, rows, heads, dim)
    assert shapes_of(attention_qkvpacked, leaves(shape)) == [out]
    assert shapes_of(attention_qkvpacked_with_stats, leaves(shape))[0] == out


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("starts", "longest"), [([0], 0), ([0, 0, 0], 0), ([0, 0], 3)])
def test_no_sequences_and_empty_ones(tokens: int, starts: list[int], longest: int) -> None:
    tensors = leaves(*[(tokens, 2, 8)] * 3)
    sequences = torch.tensor(starts, dtype=torch.int32), longest
    assert shapes_of(attention_varlen, tensors, *sequences) == [(tokens, 2, 8)]
    out, lse, *per_head, _ = shapes_of(attention_varlen_with_stats, tensors, *sequences)
    assert (out, lse) == ((tokens, 2, 8), (2, tokens))
    assert per_head == [(len(starts) - 1, 2)] * 5


def test_on_a_gpu_nothing_is_launched_of_nothing() -> None:
    empty, some = torch.randn(0, 3, 7, 8), torch.randn(2, 3, 7, 8)
    none = some[:, :, :0]
    params = 0.0, False, None, -1, -1
    capped = 0.0, False, None, 0.0, -1, -1
    for q, k in ((empty, empty), (some, none), (none, some)):
        out, rows = route.forward_on_gpu(op.Dense, False, q, k, k, None, None, None, *capped)
        assert out.shape == q.shape
        arguments = q, k, k, *(None,) * 4, *capped
        assert len(route.forward_on_gpu(op.Dense, True, *arguments)) == 5
        saved = q, k, k, None, None, None, out, rows
        dq, dk, dv, _ = route.backward_on_gpu(op.Dense, q, *saved, *capped, False)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)
    tokens, starts = torch.randn(4, 3, 8), torch.zeros(1, dtype=torch.int32)
    arguments, params = (tokens, tokens, tokens, starts, starts, None), (0, 0, *params)
    out, rows = route.forward_on_gpu(op.Varlen, False, *arguments, *params)
    assert not out.any()
    for t in route.backward_on_gpu(op.Varlen, tokens, *arguments, out, rows, *params):
        assert t.shape == tokens.shape
        assert not t.any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_empty_additive_mask_has_an_empty_gradient(sizes: tuple[int, ...]) -> None:
    batch, heads, rows, cols = sizes
    tensors = leaves((batch, heads, rows, 8), *[(batch, heads, cols, 8)] * 2, sizes)
    for function in (attention, attention_with_stats):
        assert shapes_of(function, tensors)[0] == (batch, heads, rows, 8)
