"""flash-attention's functions by its names: signatures, layouts and refusals.

That they compute what flash-attention does is in tests/peers/test_flash_attention.py.
"""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels.adapters import flash_attn

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
# As in flash_attn/flash_attn_interface.py, version 2.8; *args are those of the function before.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_kvpacked_func": "q, kv, *args, **options",
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        f"{COMMON}, block_table=None"
    ),
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, *args, **options",
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_flash_attentions(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    plainly = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(map(str, plainly)) == SIGNATURES[name]


@pytest.mark.parametrize("rest", [{}, {"softcap": 5.0}, {"causal": True, "softmax_scale": 0.3}])
def test_a_packed_projection_gives_what_its_parts_give(rest: dict[str, Any]) -> None:
    qkv = randn(2, 5, 3, 4, 8)
    packed = flash_attn.flash_attn_qkvpacked_func(qkv, **rest)
    torch.testing.assert_close(packed, flash_attn.flash_attn_func(*qkv.unbind(2), **rest))
    assert packed.is_contiguous()


@pytest.mark.parametrize("window_size", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alone", [True, False])
def test_sequences_of_a_varlen_batch_are_attended_one_by_one(
    alone: bool, causal: bool, window_size: tuple[int, int]
) -> None:
    starts = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    ends = starts if alone else torch.tensor([0, 3, 9, 13], dtype=torch.int32)
    q, k, v = (randn(13, 4, 8, seed=i) for i in range(3))
    rest = {"causal": causal, "window_size": window_size}
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts, ends, 7, 7, **rest)
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(ends.tolist()), strict=True):
        one = flash_attn.flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **rest)
        torch.testing.assert_close(out[a:b], one[0])
    if alone:
        qkv = torch.stack([q, k, v], 1)
        same = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 7, **rest)
        torch.testing.assert_close(same, out)


def test_log_sum_exp_comes_with_the_output() -> None:
    q, k, v = (randn(2, 5, 4, 8, seed=i) for i in range(3))
    out, lse, probs = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, k, v))
    assert probs is None
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    _, side_by_side, _ = flash_attn.flash_attn_varlen_func(
        *flat, starts, starts, 5, 5, return_attn_probs=True
    )
    torch.testing.assert_close(side_by_side, lse.transpose(0, 1).flatten(1))


def test_what_is_not_computed_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    q = randn(1, 5, 4, 8)
    dense = {
        "alibi_slopes are not supported": {"alibi_slopes": torch.ones(4)},
        "deterministic=True needs": {"deterministic": True},
        "return_attn_probs excludes dropout": {"return_attn_probs": True, "dropout_p": 0.1},
    }
    for message, rest in dense.items():
        with pytest.raises(ValueError, match=f"^{message}.*$"):
            flash_attn.flash_attn_func(q, q, q, **rest)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    for message, rest in {
        "softcap of a varlen batch is not supported, got 5.0": {"softcap": 5.0},
        "block_table is not supported": {"block_table": pages},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}.*$"):
            flash_attn.flash_attn_varlen_func(*[q[0]] * 3, starts, starts, 5, 5, **rest)
