"""The functions of flash-attention on our kernels: a model needs one changed import.

    from leaner_kernels.adapters.flash_attn import flash_attn_func  # was: from flash_attn

Signatures and layout, (B, N, H, D), are those of flash-attention 2, whose package is not needed. As
there, causality is aligned to the last row and the last key. CPUs and float32 are supported too.
ALiBi, a paged cache and a softcap of a varlen batch are not supported and raise a ValueError.
``flash_attn_with_kvcache`` is not provided: importing it raises an ImportError that names libraries
for decoding. The log-sum-exp of a row without a visible key is -inf; that of flash-attention is
inf.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import removed
from ..ops._checks import NO_WINDOW
from ..ops.attention import compute_dense, compute_packed, compute_varlen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of q (B, N, H, D), k and v (B, M, Hkv, D), where Hkv divides H.

    Arguments are those of flash-attention: with ``causal``, row i sees columns 0 to ``i + M - N``.
    ``alibi_slopes`` are not supported. With ``deterministic``, our kernels compute also the calls
    that ``attention`` dispatches to PyTorch, whose gradients are not deterministic. With
    ``return_attn_probs``, which excludes dropout, the result is (out, log-sum-exp (B, H, N), None).

    Returns:
        (B, N, H, D), contiguous if ``q`` is; rows without a visible key are zero.

    Raises:
        ValueError: for unsupported arguments, or if ``leaner_kernels.attention`` raises one; with
            ``deterministic`` on a GPU, also for a call with a gradient that only PyTorch computes
            (D above 128, compute capability below 7.5), unless
            ``torch.use_deterministic_algorithms(True)`` was called.
    """
    _require("B, N, H, D", 4, q=q)
    _require("B, M, Hkv, D", 4, k=k, v=v)
    _refuse(alibi_slopes, return_attn_probs and dropout_p)
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    result = compute_dense(
        query,
        key,
        value,
        None,
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
        key_lengths=None,
        softcap=softcap,
        **_masks(causal, window_size, square=q.shape[1] == k.shape[1]),
        with_stats=return_attn_probs,
        deterministic=deterministic,
    )
    if return_attn_probs:
        return result.out.transpose(1, 2), result.lse, None
    return result.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute self-attention of a packed projection (B, N, 3, H, D), with a packed gradient.

    Other arguments, results and errors are those of ``flash_attn_func``.
    """
    _require("B, N, 3, H, D", 5, packed=3, qkv=qkv)
    if softcap or return_attn_probs:
        others = dropout_p, softmax_scale, causal, window_size, softcap
        rest = alibi_slopes, deterministic, return_attn_probs
        query, key, value = qkv.unbind(2)
        return flash_attn_func(query, key, value, *others, *rest)
    _refuse(alibi_slopes)
    return compute_packed(
        qkv,
        key_lengths=None,
        dropout_p=dropout_p,
        scale=softmax_scale,
        **_masks(causal, window_size),
        deterministic=deterministic,
    )


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """Compute attention with packed keys and values (B, M, 2, Hkv, D).

    Other arguments, results and errors are those of ``flash_attn_func``.
    """
    _require("B, M, 2, Hkv, D", 5, packed=2, kv=kv)
    key, value = kv.unbind(2)
    return flash_attn_func(q, key, value, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Compute attention within each sequence of a varlen batch; q and the result are (T, H, D).

    ``k`` and ``v`` are (Tk, Hkv, D). ``cu_seqlens_q`` (S + 1,) int32 contains the start of each
    sequence of ``q`` and the end of the last one; ``max_seqlen_q`` is at least the length of the
    longest. ``cu_seqlens_k`` and ``max_seqlen_k`` are the same for ``k``; pass the same tensors for
    self-attention. The other arguments are those of ``flash_attn_func``, applied to each sequence;
    the log-sum-exp is (H, T).

    Raises:
        ValueError: for a softcap or a block_table, or if ``flash_attn_func`` or
            ``leaner_kernels.attention_varlen`` raises one.
    """
    _require("T, H, D", 3, q=q)
    _require("Tk, Hkv, D", 3, k=k, v=v)
    _refuse(alibi_slopes, return_attn_probs and dropout_p)
    if softcap:
        raise ValueError(f"softcap of a varlen batch is not supported, got {softcap}")
    if block_table is not None:
        raise ValueError("block_table is not supported: keys must be packed, not paged")
    alone = cu_seqlens_q is cu_seqlens_k
    result = compute_varlen(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens_q,
        max_seqlen=max_seqlen_q,
        cu_seqlens_k=None if alone else cu_seqlens_k,
        max_seqlen_k=None if alone else max_seqlen_k,
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **_masks(causal, window_size, square=alone),
        with_stats=return_attn_probs,
        deterministic=deterministic,
    )
    return (result.out, result.lse, None) if return_attn_probs else result


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """Compute self-attention within each sequence of a packed projection (T, 3, H, D).

    Other arguments, results and errors are those of ``flash_attn_varlen_func``.
    """
    _require("T, 3, H, D", 4, packed=3, qkv=qkv)
    query, key, value = qkv.unbind(1)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(query, key, value, *lengths, *args, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    """Compute attention within each sequence with packed keys and values (Tk, 2, Hkv, D).

    Other arguments, results and errors are those of ``flash_attn_varlen_func``.
    """
    _require("Tk, 2, Hkv, D", 4, packed=2, kv=kv)
    key, value = kv.unbind(1)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, key, value, *lengths, *args, **options)


def _masks(causal: bool, window_size: tuple[int, int], square: bool = True) -> dict[str, Any]:
    """Translate causality and window to our arguments; ours align causality to the first key."""
    left, right = window_size
    if causal and square and left < 0:
        return {"is_causal": True, "window_size": NO_WINDOW}
    return {"is_causal": False, "window_size": (left, 0 if causal else right)}


def _require(axes: str, dims: int, packed: int = 0, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor without these axes; ``packed``: size of the third last."""
    for name, tensor in tensors.items():
        if tensor.dim() != dims or (packed and tensor.shape[-3] != packed):
            raise ValueError(f"{name} must be ({axes}), got {tuple(tensor.shape)}")


def _refuse(alibi_slopes: Tensor | None, dropped_probs: float | bool = False) -> None:
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes are not supported: add them to attention's attn_mask")
    if dropped_probs:
        raise ValueError("return_attn_probs excludes dropout: the dropout mask is not stored")


if not TYPE_CHECKING:  # where it would hide misspelt names
    __getattr__ = partial(removed.attribute, __name__)
