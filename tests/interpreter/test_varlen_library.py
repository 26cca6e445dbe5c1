"""Varlen calls that PyTorch computes: zeros, as ours, in what no sequence owns."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels import attention_varlen
from leaner_kernels.ops.attention import sdpa
from leaner_kernels.ops.attention.call import Call, Sequences
from leaner_kernels.ops.attention.sdpa import varlen_attention

TOKENS, HEADS, DIM = 40, 2, 16
STARTS = torch.tensor([3, 10, 10, 33], dtype=torch.int32)
OUTSIDE = (torch.arange(TOKENS) < 3) | (torch.arange(TOKENS) >= 33)


class _Spoil(torch.autograd.Function):
    """Leave what no sequence owns as memory may be, and its gradient too."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.masked_fill(OUTSIDE[:, None, None], float("nan"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.masked_fill(OUTSIDE[:, None, None], float("nan"))


def pytorchs(q: Tensor, k: Tensor, v: Tensor, *ends: Any, scale: Any, window_size: Any) -> Tensor:
    assert window_size in ((-1, 0), (-1, -1))
    q, k, v = (_Spoil.apply(t) for t in (q, k, v))
    starts, _, longest, _ = ends
    causal = window_size == (-1, 0)
    out = attention_varlen(q, k, v, starts, longest, is_causal=causal, scale=scale)
    return _Spoil.apply(out)


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_no_sequence_owns_is_zero(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_varlen_attn", lambda: pytorchs)
    torch.manual_seed(0)
    projection = torch.randn(TOKENS, 3, HEADS, DIM)
    grad = torch.randn(TOKENS, HEADS, DIM)
    results = []
    sequences = Sequences(STARTS, STARTS, 23, 23)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors, numbers = (query, key, value, None, None, None), (0.0, is_causal, 0.3)
        return varlen_attention(Call(*tensors, *numbers, sequences=sequences))

    ours = partial(attention_varlen, cu_seqlens=STARTS, max_seqlen=23, is_causal=is_causal)
    for call in (partial(ours, scale=0.3), theirs):
        leaf = projection.clone().requires_grad_()
        out = call(*leaf.unbind(1))
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert not results[1][0][OUTSIDE].any()
    assert not results[1][1][OUTSIDE].any()
