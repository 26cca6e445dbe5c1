"""Softmax attention for many heads and short sequences, with its statistics from the same pass.

Limits of the kernels: the head dimension is 1 to 128, because one tile of K and of V must fit on
chip; the last axis is contiguous, because loads are vectors along it. PyTorch's function computes
wider heads.

A call passes through ``checks``, ``op``, ``dispatch`` and ``kernels``, in this order.
On a GPU, a call with the signature of an earlier one goes directly to ``ops.route``, which launches
the same kernel again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _hooks, _tiles
from .._checks import (
    ANY_HEAD_DIM,
    MAX_HEAD_DIM,
    ArgumentError,
    autocast,
    check_device,
    check_tensor,
)
from .._launch_cache import Signature, signature_of
from ..route import compute, repeat, stats_of
from ..statistics import AttentionStats
from . import op
from .checks import (
    NO_WINDOW,
    checked_dense,
    checked_packed,
    checked_varlen,
    four_axes,
    plain_mask,
)
from .explain import Explanation, Route, check_assumed_capability, explain_call

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
    window_size: tuple[int, int] = NO_WINDOW,
) -> Tensor:
    """Compute softmax attention with the arguments of PyTorch's ``scaled_dot_product_attention``.

    Args:
        query: (B, H, N, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous; D of at least 1. Without ``key_lengths`` also (N, D),
            (H, N, D) and (..., B, H, N, D): the axes before H are flattened into one, with a copy
            if the strides do not allow a view.
        key: (B, Hkv, M, D), axes, dtype and device as ``query``; Hkv = H, or a divisor of H with
            ``enable_gqa``.
        value: (B, Hkv, M, D), as ``key``.
        attn_mask: boolean (True is visible) or additive, in float32 or the dtype of ``query``,
            added unchanged to the float32 scores; broadcastable to (B, H, N, M). An additive
            mask may require a gradient, which has its dtype and needs a float32 buffer of
            (B, H, N, M) on a GPU; there, values below -1e38 hide a key, as -inf does.
            PyTorch's ``CausalBias`` is recognised by its variant, and its memory is not read: a
            lower right bias must be (N, M), and becomes a boolean mask unless N = M.
        dropout_p: probability of dropping a probability, in [0, 1).
        is_causal: row i sees columns 0 to i; not together with ``attn_mask``.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.
        enable_gqa: let H / Hkv query heads share each key and value head.
        key_lengths: (B,) integers, or a list of ints, each in [1, M]; keys at or past a length are
            hidden, and NaN there changes nothing. Other integer dtypes are converted to int32. On a
            GPU, the values of a tensor are not read back for a check: one outside the range, cut to
            32 bits, is clamped.
        softcap: bounds the scores, as in flash-attention: ``softcap * tanh(scale * QK^T /
            softcap)`` before the mask; 0 disables it, otherwise from 1e-30 to 1e30. The CPU then
            keeps all scores in memory, and a GPU uses the kernels for any length.
        window_size: (left, right), flash-attention's sliding window: row i sees the columns from
            ``i + M - N - left`` to ``i + M - N + right``; -1 means no limit. A GPU then uses the
            kernels for any length.

    Returns:
        A tensor with the shape, layout and dtype of ``query``; rows without a visible key are zero.

    Raises:
        ValueError: if a shape, dtype, stride or device is not supported. The exception is also a
            RuntimeError, which PyTorch's function raises.

    Every dimension except D may be zero. Tensors (B, N, H, D), the layout of flash-attention, are
    passed as ``x.transpose(1, 2)``, without a copy. If keys and queries are equally many, a missing
    transpose raises no error.

    On a GPU, self-attention without mask, lengths and dropout is dispatched to PyTorch's function
    where ``library.toml`` records or predicts that it is faster, in float32 at every length. Its
    gradients are not bitwise deterministic. With PyTorch's deterministic algorithms enabled, every
    call uses our kernels, and its gradients are deterministic. Heads wider than 128 are dispatched
    to PyTorch's function on every device, with one warning per head dimension. So is every call
    that it can compute on a GPU before compute capability 8.0; before 7.5, the others raise an
    error. ``explain`` reports which implementation a call runs.

    Unlike PyTorch's function, this one rejects a last axis that is not contiguous, values whose D
    or number of heads differs from the keys', sizes of 1 to be broadcast between query and key,
    nested tensors, a dropout of 1, and a scale that is not a finite number.

    Under torch.func, derivatives of any order and in both modes work on every device; second
    derivatives and forward mode keep all scores in memory. With autograd alone, second derivatives
    work on the CPU, and on a GPU in float32 or if our kernels compute the call, as
    ``attention_with_stats(...).out`` ensures: libraries do not provide them.

    On the CPU, two kinds of calls that need a gradient keep all scores in memory: those whose
    additive mask has a row of finite numbers below -1e3 only, and, in compiled code, those with any
    additive mask. PyTorch's fused backward is wrong there by up to a factor of the number of keys.

    Numerics: float32 scores, softmax and sums; probabilities rounded to ``query.dtype`` before V.
    In float32 our kernels multiply as IEEE 754 says. PyTorch's memory-efficient kernel adds three
    TF32 products for each, with a relative error of about 2^-21.
    Source: Vaswani et al. 2017, eq. 1 (arXiv:1706.03762); online softmax after Milakov and
    Gimelshein 2018 (arXiv:1805.02867).
    """
    return compute_dense(
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        key_lengths=key_lengths,
        softcap=softcap,
        window_size=window_size,
    )


def attention_qkvpacked(
    qkv: Tensor,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
) -> Tensor:
    """Compute self-attention from a packed projection; the backward writes one packed gradient.

    Args:
        qkv: (B, N, 3, H, D), float32, float16 or bfloat16 (on the CPU also float64), last axis
            contiguous; D of at least 1. PyTorch's function computes D above 128.
        key_lengths: as in ``attention``: (B,), each in [1, N]; keys at or past a length are hidden.
        dropout_p: probability of dropping a probability, in [0, 1).
        is_causal: row i sees columns 0 to i.
        scale: multiplies the scores; ``D ** -0.5`` when omitted.
        window_size: as in ``attention``.

    Returns:
        (B, N, H, D), contiguous, in ``qkv.dtype``.

    Raises:
        ValueError: if a shape, dtype, stride or device is not supported.

    Numerics, source and dispatch to libraries: as ``attention``.
    """
    return compute_packed(
        qkv,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
    )


def attention_qkvpacked_with_stats(
    qkv: Tensor,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    sample: Tensor | None = None,
) -> AttentionStats:
    """Compute ``attention_qkvpacked`` with the statistics of ``attention_with_stats``.

    Arguments and errors are those of ``attention_qkvpacked``, with D from 1 to 128; ``sample`` is
    as in ``attention_with_stats``.

    Returns:
        AttentionStats, whose ``out`` is (B, N, H, D).
    """
    return compute_packed(
        qkv,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        with_stats=True,
        sample=sample,
    )


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
    window_size: tuple[int, int] = NO_WINDOW,
    sample: Tensor | None = None,
) -> AttentionStats:
    """Compute ``attention`` with statistics of every head, and capture heads of sampled entries.

    Arguments and errors are those of ``attention`` (query (B, H, N, D), D from 1 to 128), and
    ``sample``: (S,) int32 on the device of ``query``, the batch entries whose heads are captured. A
    negative index leaves its slot of ``heads`` unwritten. So does an index past the batch on a GPU;
    the CPU rejects it. With a ``softcap``, ``max_logit``, ``lse`` and ``entropy`` describe the
    scores that enter the softmax, so that without a mask ``max_logit`` is at most ``softcap``.

    Returns:
        AttentionStats: see there for shapes and units.

    The output has derivatives of any order on every device: those after the first, and forward
    mode, are computed by PyTorch with all scores in memory. Statistics are not differentiable. In
    compiled code, use ``torch.func.jvp`` for forward mode: a bare
    ``torch.autograd.forward_ad.dual_level`` loses the tangent.

    Numerics: as ``attention``. For ``heads``, the probabilities enter the product with V as the sum
    of two float16 or three bfloat16 numbers, and the float32 sum is stored, so that it yields the
    condition number of a half-precision model (docs/kappa.md).
    """
    return compute_dense(
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        key_lengths=key_lengths,
        softcap=softcap,
        window_size=window_size,
        with_stats=True,
        sample=sample,
    )


# --- Varlen batches -------------------------------------------------------------------------------


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
) -> Tensor:
    """Compute softmax attention within each sequence of a varlen batch, without padding.

    Args:
        query: (T, H, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous, such as a view of a (T, 3, H, D) projection; D from 1
            to 128.
        key: (Tk, Hkv, D), dtype and device of ``query``; Hkv = H, or a divisor of H with
            ``enable_gqa``. Tk = T unless ``cu_seqlens_k`` is given.
        value: (Tk, Hkv, D), as ``key``.
        cu_seqlens: (S + 1,) integers, or a list of ints: the start of each sequence, and the end of
            the last one; not decreasing, in [0, T]. A sequence may be empty, and S may be 0. Other
            integer dtypes are converted to int32. On a GPU, the values of a tensor are not read
            back for a check: no value leads to an access outside the tensors.
        max_seqlen: at least the length of the longest sequence; rows of a sequence past it are
            neither computed nor written.
        cu_seqlens_k: (S + 1,), the sequences of the keys, if they differ.
        max_seqlen_k: as ``max_seqlen``, for the keys; together with ``cu_seqlens_k``.
        dropout_p: probability of dropping a probability, in [0, 1).
        is_causal: row i of a sequence sees its columns 0 to i.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.
        enable_gqa: let H / Hkv query heads share each key and value head.
        window_size: as in ``attention``, N and M of each sequence.

    Returns:
        (T, H, D), contiguous, in ``query.dtype``. Tokens outside every sequence, their gradients,
        and the rows of a sequence without keys are zero.

    Raises:
        ValueError: if a shape, dtype, stride, device or sequence is not supported.

    On a GPU, self-attention without dropout is dispatched to PyTorch's ``varlen_attn`` if
    ``library.toml`` records that it is faster at the mean length, T / S. Its gradients are not
    bitwise deterministic, and it has no second derivatives. With deterministic algorithms, under
    torch.func, in float32 and before compute capability 8.0, every call uses our kernels.

    Rows and columns are counted from the start of their sequence, also in the mask of dropout:
    sequence i gets the same mask as entry i of a batch in ``attention`` on a GPU. Second
    derivatives and forward mode are computed by PyTorch, one sequence after the other, and read
    ``cu_seqlens`` back to the host.

    Numerics and source: as ``attention``.
    """
    return compute_varlen(
        query,
        key,
        value,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_size=window_size,
    )


def attention_varlen_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    sample: Tensor | None = None,
) -> AttentionStats:
    """Compute ``attention_varlen`` with statistics of every head of every sequence.

    Arguments and errors are those of ``attention_varlen``, and ``sample``: (slots,) int32 on the
    device of ``query``, the sequences whose heads are captured. A negative index leaves its slot of
    ``heads`` unwritten. So does an index past the sequences on a GPU; the CPU rejects it.

    Returns:
        AttentionStats: out (T, H, D); lse (H, T), -inf outside every sequence; max_logit, entropy,
            prob_norm and head_norm (S, H), which are -inf, 0, 0 and 0 for an empty sequence; heads
            (slots, max_seqlen, H * D), zero past the end of a sequence, None without ``sample``.

    Numerics: as ``attention_with_stats``.
    """
    return compute_varlen(
        query,
        key,
        value,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_size=window_size,
        with_stats=True,
        sample=sample,
    )


# --- A call: repeated if there was one of its signature, or else checked --------------------------
#
# ``deterministic`` keeps a call from libraries whose gradients are not bitwise deterministic.


def compute_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key_lengths: Any,
    softcap: float,
    window_size: tuple[int, int],
    with_stats: bool = False,
    sample: Tensor | None = None,
    deterministic: bool = False,
) -> Any:
    under_autocast, compiling = torch._C._is_any_autocast_enabled(), torch.compiler.is_compiling()
    if under_autocast or compiling:
        query, key, value = autocast(query, key, value)
    numbers = dropout_p, is_causal, scale, enable_gqa, softcap
    kind = "attention", with_stats, deterministic, *numbers
    signature = None
    monitor = None if with_stats else _hooks.current
    # The checks may cast a mask: kernels then read another address than the caller's.
    casts_mask = under_autocast and attn_mask is not None
    if monitor is None and not casts_mask and not compiling:
        tensors = query, key, value, attn_mask, key_lengths
        signature = signature_of((*tensors, sample), kind, window_size, eager=True)
        if signature is not None and (results := repeat(op.Dense, signature, tensors, sample)):
            if with_stats:
                return stats_of(results, sample)
            out, *_ = results
            return out
    params = {
        "dropout_p": dropout_p,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "window_size": window_size,
    }
    if isinstance(query, Tensor) and query.dim() != 4 and not with_stats:
        attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
        four = four_axes(query, key, value, attn_mask, key_lengths)
        out = compute_dense(
            *four,
            is_causal=is_causal,
            key_lengths=None,
            deterministic=deterministic,
            **params,
        )
        return out.view(query.shape)
    call = checked_dense(
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        key_lengths=key_lengths,
        sample=sample,
        max_head_dim=MAX_HEAD_DIM if with_stats else ANY_HEAD_DIM,
        **params,
    )
    if monitor is not None and query.shape[-1] <= MAX_HEAD_DIM:
        out = monitor.attend(
            None,
            *call.operands,
            call.attn_mask,
            is_causal=call.is_causal,
            key_lengths=call.key_lengths,
            **params,
        )
        if out is not None:
            return out
    if call.key_lengths is not key_lengths and not casts_mask:
        tensors = query, key, value, attn_mask, call.key_lengths
        signature = signature_of((*tensors, sample), kind, window_size)
    return _first(op.Dense, signature, call, with_stats, sample, deterministic, enable_gqa)


def compute_packed(
    qkv: Tensor,
    *,
    key_lengths: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window_size: tuple[int, int],
    with_stats: bool = False,
    sample: Tensor | None = None,
    deterministic: bool = False,
) -> Any:
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        (qkv,) = autocast(qkv)
    kind = "attention_qkvpacked", with_stats, deterministic, dropout_p, is_causal, scale
    signature = None
    monitor = None if with_stats else _hooks.current
    if monitor is None and not compiling:
        tensors = qkv, key_lengths
        signature = signature_of((*tensors, sample), kind, window_size, eager=True)
        if signature is not None and (results := repeat(op.Packed, signature, tensors, sample)):
            if with_stats:
                return stats_of(results, sample)
            out, *_ = results
            return out
    params = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "window_size": window_size,
    }
    arguments = checked_packed(
        qkv,
        key_lengths=key_lengths,
        sample=sample,
        max_head_dim=MAX_HEAD_DIM if with_stats else ANY_HEAD_DIM,
        **params,
    )
    if monitor is not None and qkv.shape[-1] <= MAX_HEAD_DIM:
        separate = op.split_qkv(qkv)
        out = monitor.attend(None, *separate, key_lengths=arguments.key_lengths, **params)
        if out is not None:
            return out.transpose(1, 2).contiguous()
    if arguments.key_lengths is not key_lengths:
        signature = signature_of((qkv, arguments.key_lengths, sample), kind, window_size)
    return _first(op.Packed, signature, arguments, with_stats, sample, deterministic)


def compute_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Any,
    max_seqlen: int,
    cu_seqlens_k: Any,
    max_seqlen_k: int | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int],
    with_stats: bool = False,
    sample: Tensor | None = None,
    deterministic: bool = False,
) -> Any:
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        query, key, value = autocast(query, key, value)
    key_starts = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    tensors = query, key, value, cu_seqlens, key_starts
    kind = (
        "attention_varlen",
        with_stats,
        deterministic,
        enable_gqa,
        cu_seqlens_k is None,
        max_seqlen,
        max_seqlen_k,
        dropout_p,
        is_causal,
        scale,
    )
    signature = None
    if not compiling:
        signature = signature_of((*tensors, sample), kind, window_size, eager=True)
        if signature is not None and (results := repeat(op.Varlen, signature, tensors, sample)):
            if with_stats:
                return stats_of(results, sample)
            out, *_ = results
            return out
    arguments = checked_varlen(
        query,
        key,
        value,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_size=window_size,
        sample=sample,
    )
    if arguments.cu_seqlens is not cu_seqlens or arguments.cu_seqlens_k is not key_starts:
        tensors = query, key, value, arguments.cu_seqlens, arguments.cu_seqlens_k
        signature = signature_of((*tensors, sample), kind, window_size)
    return _first(op.Varlen, signature, arguments, with_stats, sample, deterministic)


def _first(
    operator: type[op.SoftmaxAttention],
    signature: Signature | None,
    arguments: Any,
    with_stats: bool,
    sample: Tensor | None,
    deterministic: bool,
    enable_gqa: bool = False,
) -> Any:
    """Return the result of a checked call; one with a signature is repeated from then on."""
    if with_stats or operator is op.Varlen:
        first, *_ = arguments
        check_device(first.device)
    if not with_stats:
        return op.compute_plain(operator, signature, arguments, enable_gqa, deterministic)
    results = compute(operator, signature, arguments, with_stats=True, sample=sample)
    return stats_of(results, sample)


# --- Which implementation a call runs -------------------------------------------------------------


def explain(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = NO_WINDOW,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    max_seqlen: int = 0,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    stats: bool = False,
    backward: bool | None = None,
    capability: int | None = None,
) -> Explanation:
    """Return which implementation a call runs, forward and backward, and why; run nothing.

    The arguments of the call are those of ``attention``, with (B, H, N, D) and other ranks, not
    nested; of ``attention_qkvpacked``, a projection (B, N, 3, H, D) alone; or, with ``cu_seqlens``,
    of ``attention_varlen``, (T, H, D). Tensors may be on the meta device: only shapes and strides
    are read. The other arguments are:

    - stats: whether the call is to a function ``_with_stats``.
    - backward: whether a backward follows; by default, whether autograd would record the call.
    - capability: explain the call for a GPU of this compute capability (90 for 9.0), whatever the
      device of the tensors.

    Returns:
        Explanation, which prints as one line.

    Raises:
        ValueError: if the call itself would raise one, or does not have one of the arguments.
    """
    check_tensor("query", query)
    check_assumed_capability(capability)
    if (key is None) != (value is None):
        raise ArgumentError(
            "give key and value, or neither with a fused projection, got one of them"
        )
    operator: Any = op.Dense if cu_seqlens is None else op.Varlen
    operator = op.Packed if key is None else operator
    others: dict[str, Any] = {}
    if operator is not op.Dense:
        others = {"attn_mask": attn_mask, "softcap": softcap}
        others |= (
            {"enable_gqa": enable_gqa, "cu_seqlens": cu_seqlens}
            if operator is op.Packed
            else {"key_lengths": key_lengths}
        )
    for name, other in others.items():
        if isinstance(other, Tensor) or other not in (None, 0, False):
            raise ArgumentError(f"{operator.name} does not accept {name}")
    params: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "window_size": window_size,
    }
    max_head_dim = MAX_HEAD_DIM if stats else ANY_HEAD_DIM
    with _tiles.assume(capability):
        inputs: Any = autocast(*(t for t in (query, key, value) if t is not None))
        if operator is op.Varlen:
            params |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            params |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
            arguments: Any = checked_varlen(*inputs, **params, enable_gqa=enable_gqa)
        elif operator is op.Packed:
            arguments = checked_packed(
                *inputs, **params, key_lengths=key_lengths, max_head_dim=max_head_dim
            )
        else:
            four: Any = (*inputs, attn_mask)
            if query.dim() != 4:
                any_axes: Any = (*inputs, attn_mask, key_lengths)
                four = four_axes(*any_axes)
            arguments = checked_dense(
                *four,
                **params,
                enable_gqa=enable_gqa,
                key_lengths=key_lengths,
                softcap=softcap,
                max_head_dim=max_head_dim,
            )
        return explain_call(operator, arguments, stats, backward)
