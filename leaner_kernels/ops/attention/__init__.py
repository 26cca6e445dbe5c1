"""Softmax attention for many heads and short sequences, with its statistics from the same pass.

Limits of the kernels: head dimension 1 to 128, because one tile of K and of V must fit on chip; the
last axis contiguous, because loads are vectors along it. PyTorch's function takes wider heads.
"""

from collections.abc import Sequence

from torch import Tensor

from .. import _hooks
from .._checks import (
    ANY_HEAD_DIM,
    MAX_HEAD_DIM,
    autocast,
    check_device,
    check_scale,
)
from ..statistics import AttentionStats
from . import fast_path, operators
from .call import (
    check_packed,
    check_params,
    check_query_key_value,
    check_softcap,
    draw_seed,
    four_axes,
)
from .causal_bias import plain_mask
from .explain import Explanation, Route, explain
from .fast_path import with_fast_path
from .jagged import attention_jagged, is_jagged
from .library import (
    faster_library,
    library_attention,
    long_attention,
    transformed,
    wide_attention,
)
from .varlen import attention_varlen, attention_varlen_with_stats

__all__ = [
    "AttentionStats",
    "Explanation",
    "Route",
    "attention",
    "attention_qkvpacked",
    "attention_qkvpacked_with_stats",
    "attention_varlen",
    "attention_varlen_with_stats",
    "attention_with_stats",
    "explain",
]


@with_fast_path(fast_path.ATTENTION)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Softmax attention, argument for argument PyTorch's ``scaled_dot_product_attention``.

    Args:
        query: (B, H, N, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous; D of at least 1. Without ``key_lengths`` also (N, D),
            (H, N, D) and (..., B, H, N, D): what is before H becomes one axis, by a copy where
            the strides leave no view. Or, with key and value, a nested tensor (B, H, j, D) of the
            jagged layout, which goes to ``attention_varlen``: without mask and lengths.
        key: (B, Hkv, M, D), axes, dtype and device as ``query``; Hkv = H, or a divisor of H with
            ``enable_gqa``.
        value: (B, Hkv, M, D), as ``key``.
        attn_mask: boolean (True is seen) or, in float32 or the dtype of ``query``, added to the
            float32 scores as it is; broadcastable to (B, H, N, M). An additive mask may require a
            gradient, which has its dtype and takes a float32 buffer of (B, H, N, M) on a GPU;
            values below -1e38 hide there, as -inf does.
            Of PyTorch's ``CausalBias`` the variant counts, and no memory is read: one of the lower
            right must be of (N, M), and N unlike M makes a boolean mask of it.
        dropout_p: probability of dropping a probability, in [0, 1).
        is_causal: row i sees columns 0 to i; not together with ``attn_mask``.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.
        enable_gqa: let H / Hkv query heads share each key and value head.
        key_lengths: (B,) integers, or a list of ints, each in [1, M]; keys at or past a length are
            hidden, and NaN there changes nothing. All but int32 is converted. On a GPU the values
            of a tensor are not read back to be checked: one outside the range, cut to 32 bits, acts
            as the nearest end.
        softcap: bounds the scores, as flash-attention's: ``softcap * tanh(scale * QK^T / softcap)``
            before the mask; 0 for none, else from 1e-30 to 1e30. On the CPU with all scores in
            memory, on a GPU by the kernels that take any length.

    Returns:
        The shape, layout and dtype of ``query``; a row that sees no key is zero.

    Raises:
        ValueError: a shape, dtype, stride or device outside the list above; it is a RuntimeError
            too, which PyTorch's function raises.

    Any size but D may be 0. Tensors (B, N, H, D), as flash-attention has them, go in as
    ``x.transpose(1, 2)``, without a copy; where keys are as many as queries, no error tells.

    On a GPU, self-attention without mask, lengths and dropout is dispatched to PyTorch's function
    at the lengths where ``library.toml`` says that it is faster. Its gradients are not bitwise
    deterministic; with PyTorch's deterministic algorithms on, every call stays here and is. Heads
    wider than 128 go to PyTorch's function on every device, with one warning for each head
    dimension; nested tensors stay limited to 128. ``explain`` tells which implementation a call
    runs.

    Unlike PyTorch's function it refuses a last axis with gaps, values whose D or heads
    are not the keys', sizes of 1 to be broadcast between query and key, other nested tensors,
    a dropout of 1 and a scale that is not finite or no number.
    Under torch.func it has derivatives of any order and both modes on every device, the second and
    those in forward mode with all scores in memory. Autograd alone finds second ones only where the
    kernels compute, as ``attention_with_stats(...).out`` always lets them: libraries have none.

    On the CPU a call with a gradient whose additive mask has a row of nothing but finite numbers
    below -1e3, and in compiled code any with a gradient and an additive mask, has all scores in
    memory: PyTorch's fused backward is wrong there, by as much as the count of keys.

    Numerics: float32 scores, softmax and sums; probabilities rounded to ``query.dtype`` before V.
    Source: Vaswani et al. 2017, eq. 1 (arXiv:1706.03762); online softmax after Milakov and
    Gimelshein 2018 (arXiv:1805.02867).
    """
    if is_jagged(query):
        others = {"attn_mask": attn_mask, "key_lengths": key_lengths, "softcap": softcap or None}
        params = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        params["dropout_p"] = dropout_p
        return attention_jagged(attention_varlen, query, key, value, others, **params)
    attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
    if isinstance(query, Tensor) and query.dim() != 4:
        four = four_axes(query, key, value, attn_mask, key_lengths)
        params = dropout_p, is_causal, scale, enable_gqa
        return attention(*four, *params, softcap=softcap).view(query.shape)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    check_params(dropout_p, is_causal, enable_gqa)
    key_lengths = check_query_key_value(
        query, key, value, attn_mask, is_causal, enable_gqa, key_lengths, None, ANY_HEAD_DIM
    )
    scale, softcap = check_scale(scale), check_softcap(softcap)
    if query.shape[-1] > MAX_HEAD_DIM:
        params = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return wide_attention(query, key, value, *params, key_lengths, softcap)
    if (watcher := _hooks.current) is not None:
        params = attn_mask, dropout_p, is_causal, scale, enable_gqa
        named = {"key_lengths": key_lengths, "softcap": softcap}
        out = watcher.attend(None, query, key, value, *params, **named)
        if out is not None:
            return out
    if query.device.type != "cuda" and not transformed(query):
        params = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return library_attention(query, key, value, *params, key_lengths, softcap)
    rows, cols = query.shape[2], key.shape[2]
    others = attn_mask, key_lengths, dropout_p, softcap
    if faster_library((query, key, value), rows, cols, is_causal, scale, *others) is not None:
        return long_attention(query, key, value, is_causal, scale, enable_gqa)
    seed = draw_seed(dropout_p, query.device)
    return operators.ATTENTION.forward(
        query, key, value, attn_mask, key_lengths, seed, dropout_p, is_causal, scale, softcap
    )[0]


@with_fast_path(fast_path.PACKED)
def attention_qkvpacked(
    qkv: Tensor,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Self-attention straight from one projection; the backward writes one packed gradient.

    Args:
        qkv: (B, N, 3, H, D), float32, float16 or bfloat16 (on the CPU also float64), last axis
            contiguous; D of at least 1, above 128 by PyTorch's function.
        key_lengths: as in ``attention``: (B,), each in [1, N]; keys at or past a length are hidden.
        dropout_p: probability of dropping a probability, in [0, 1).
        is_causal: row i sees columns 0 to i.
        scale: multiplies the scores; ``D ** -0.5`` when omitted.

    Returns:
        (B, N, H, D), contiguous, in ``qkv.dtype``.

    Raises:
        ValueError: a shape, dtype, stride or device outside the list above.

    Numerics, source and what goes to a library: as ``attention``.
    """
    (qkv,) = autocast(qkv)
    key_lengths = check_packed(qkv, key_lengths, None, ANY_HEAD_DIM)
    check_params(dropout_p, is_causal)
    scale = check_scale(scale)
    rows, params = qkv.shape[1], (None, dropout_p, is_causal, scale)
    if qkv.shape[-1] > MAX_HEAD_DIM:
        out = wide_attention(*_separate(qkv), *params, False, key_lengths, 0.0)
        return out.transpose(1, 2).contiguous()
    if (watcher := _hooks.current) is not None:
        out = watcher.attend(None, *_separate(qkv), *params, key_lengths=key_lengths)
        if out is not None:
            return out.transpose(1, 2).contiguous()
    if qkv.device.type != "cuda" and not transformed(qkv):
        out = library_attention(*_separate(qkv), *params, False, key_lengths)
        return out.transpose(1, 2).contiguous()
    if faster_library((qkv,), rows, rows, is_causal, scale, key_lengths, dropout_p) is not None:
        out = long_attention(*_separate(qkv), is_causal, scale, enable_gqa=False)
        return out.transpose(1, 2).contiguous()
    seed = draw_seed(dropout_p, qkv.device)
    return operators.QKVPACKED.forward(qkv, key_lengths, seed, dropout_p, is_causal, scale)[0]


def _separate(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value (B, H, N, D): the split whose backward is one copy, a stack."""
    query, key, value = qkv.unbind(2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def attention_qkvpacked_with_stats(
    qkv: Tensor,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    sample: Tensor | None = None,
) -> AttentionStats:
    """``attention_qkvpacked``, with the statistics of ``attention_with_stats``.

    Args:
        qkv: (B, N, 3, H, D), as in ``attention_qkvpacked``.
        key_lengths: as in ``attention_qkvpacked``.
        dropout_p: as in ``attention_qkvpacked``.
        is_causal: as in ``attention_qkvpacked``.
        scale: as in ``attention_qkvpacked``.
        sample: as in ``attention_with_stats``.

    Returns:
        AttentionStats, whose ``out`` is (B, N, H, D).

    Raises:
        ValueError: a shape, dtype, stride or device outside the list above.
    """
    (qkv,) = autocast(qkv)
    key_lengths = check_packed(qkv, key_lengths, sample)
    check_params(dropout_p, is_causal)
    scale = check_scale(scale)
    check_device(qkv.device)
    seed = draw_seed(dropout_p, qkv.device)
    *results, _ = operators.QKVPACKED.with_stats(
        qkv, key_lengths, seed, sample, dropout_p, is_causal, scale
    )
    stats = AttentionStats(*results)
    return stats if sample is not None else stats._replace(heads=None)


def attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    sample: Tensor | None = None,
) -> AttentionStats:
    """``attention``, with statistics of every head and the outputs of sampled batch entries.

    Args:
        query: (B, H, N, D), as in ``attention``; D from 1 to 128.
        key: (B, Hkv, M, D), as in ``attention``.
        value: (B, Hkv, M, D), as in ``attention``.
        attn_mask: as in ``attention``.
        dropout_p: as in ``attention``.
        is_causal: as in ``attention``.
        scale: as in ``attention``.
        enable_gqa: as in ``attention``.
        key_lengths: as in ``attention``.
        softcap: as in ``attention``; ``max_logit``, ``lse`` and ``entropy`` are of the scores that
            enter the softmax, so no ``max_logit`` without a mask is above it.
        sample: (S,) int32 on the device of ``query``: the batch entries whose heads are captured.
            A negative index leaves its slot of ``heads`` unwritten; on a GPU so does one past the
            batch, which the CPU refuses.

    Returns:
        AttentionStats: see there for shapes and units; of jagged nested tensors as from
            ``attention_varlen_with_stats``, with jagged out (B, H, j, D) and lse (B, H, j).

    Raises:
        ValueError: a shape, dtype, stride or device outside the list above.

    Derivatives of any order, on every device: those after the first, and forward mode, compute in
    PyTorch, with all scores in memory. No statistic has one. In compiled code forward mode is
    ``torch.func.jvp``: a bare ``torch.autograd.forward_ad.dual_level`` loses the tangent.

    Numerics: as ``attention``; for ``heads`` the probabilities enter the product with V as the sum
    of two float16 or three bfloat16 numbers, and the float32 sum is stored, so that the condition
    number of a half-precision model can be read off them (docs/kappa.md).
    """
    if is_jagged(query):
        others = {"attn_mask": attn_mask, "key_lengths": key_lengths, "softcap": softcap or None}
        params = {
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "sample": sample,
        }
        params["dropout_p"] = dropout_p
        return attention_jagged(attention_varlen_with_stats, query, key, value, others, **params)
    attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    check_params(dropout_p, is_causal, enable_gqa)
    key_lengths = check_query_key_value(
        query, key, value, attn_mask, is_causal, enable_gqa, key_lengths, sample
    )
    params = dropout_p, is_causal, check_scale(scale), check_softcap(softcap)
    check_device(query.device)
    seed = draw_seed(dropout_p, query.device)
    *results, _ = operators.ATTENTION.with_stats(
        query, key, value, attn_mask, key_lengths, seed, sample, *params
    )
    stats = AttentionStats(*results)
    return stats if sample is not None else stats._replace(heads=None)
