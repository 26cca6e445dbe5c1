"""Argument checks of the public functions; each error is one line that shows the offending value.

``checked_dense``, ``checked_packed`` and ``checked_varlen`` return the arguments of their operator,
without a seed.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_ROW_STRIDE,
    NO_WINDOW,
    ArgumentError,
    autocast,
    check_layout,
    check_sample,
    check_scale,
    check_tensor,
    checked_lengths,
    described,
    has_values,
    int32_of,
    shown,
    to_device,
)
from .call import Call, PackedArguments, VarlenArguments

# Kernels use 32-bit offsets within a tile of 256 by 128 mask elements.
MAX_MASK_STRIDE = 2**22 - 1
# The starts of sequences are int32.
MAX_SEQLEN = 2**31 - 1
_ROWS = {3: 0, 4: 2, 5: 1}  # the axis of rows, by the number of axes
MASK_AND_CAUSAL = "attn_mask and is_causal=True cannot be combined: make attn_mask causal instead"


def checked_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_lengths: Any = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = NO_WINDOW,
    sample: Tensor | None = None,
    max_head_dim: int,
) -> Call:
    """Return the call, without a seed; raise ValueError for one that kernels cannot compute."""
    attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
    if attn_mask is not None:
        _, attn_mask = autocast(query, attn_mask)
    check_params(dropout_p, is_causal, enable_gqa, window_size)
    _check_three(query, key, value, ("B", "H", "N", "D"), max_head_dim)
    (batch, heads, rows, dim), (key_batch, key_heads, cols, key_dim) = query.shape, key.shape
    if (batch, dim) != (key_batch, key_dim):
        raise ArgumentError(
            f"query and key must agree in B and D, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    _check_heads(heads, key_heads, enable_gqa, (rows, cols))
    if attn_mask is not None:
        _check_mask(attn_mask, query, (batch, heads, rows, cols))
        if is_causal:
            raise ArgumentError(MASK_AND_CAUSAL)
    if sample is not None:
        check_sample(sample, batch, query.device)
    window_left, window_right = window_size
    return Call(
        query,
        key,
        value,
        attn_mask,
        key_lengths=checked_lengths(key_lengths, batch, cols, query.device),
        seed=None,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=check_scale(scale),
        softcap=check_softcap(softcap),
        window_left=window_left,
        window_right=window_right,
    )


def checked_packed(
    qkv: Tensor,
    *,
    dropout_p: float,
    key_lengths: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    sample: Tensor | None = None,
    max_head_dim: int,
) -> PackedArguments:
    """Return the arguments, without a seed; raise ValueError unless qkv is (B, N, 3, H, D)."""
    check_tensor("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ArgumentError(f"qkv must be (B, N, 3, H, D), got {tuple(qkv.shape)}")
    _check_layout("qkv", qkv, max_head_dim)
    batch, tokens, *_ = qkv.shape
    if sample is not None:
        check_sample(sample, batch, qkv.device)
    lengths = checked_lengths(key_lengths, batch, tokens, qkv.device)
    check_params(dropout_p, is_causal, False, window_size)
    window_left, window_right = window_size
    return PackedArguments(
        qkv,
        key_lengths=lengths,
        seed=None,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=check_scale(scale),
        window_left=window_left,
        window_right=window_right,
    )


def checked_varlen(
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
    sample: Tensor | None = None,
) -> VarlenArguments:
    """Return the arguments, without a seed; raise ValueError unless they agree."""
    check_params(dropout_p, is_causal, enable_gqa, window_size)
    _check_three(query, key, value, ("T", "H", "D"))
    (rows, heads, dim), (cols, key_heads, key_dim) = query.shape, key.shape
    if dim != key_dim:
        raise ArgumentError(
            f"query and key must agree in D, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    _check_heads(heads, key_heads, enable_gqa)
    if (cu_seqlens_k is None) != (max_seqlen_k is None):
        raise ArgumentError(
            "cu_seqlens_k and max_seqlen_k go together, got "
            f"{'no ' if cu_seqlens_k is None else ''}cu_seqlens_k and max_seqlen_k={max_seqlen_k}"
        )
    if cu_seqlens_k is None and rows != cols:
        raise ArgumentError(
            f"key must have the {rows} tokens of query unless cu_seqlens_k is given, got {cols}"
        )
    starts = key_starts = _checked_starts("", cu_seqlens, max_seqlen, rows, query.device)
    if cu_seqlens_k is not None:
        key_starts = _checked_starts("_k", cu_seqlens_k, max_seqlen_k, cols, query.device)
        if key_starts.shape != starts.shape:
            raise ArgumentError(
                f"cu_seqlens_k must have {starts.shape[0]} entries as cu_seqlens has, "
                f"got {key_starts.shape[0]}"
            )
    if sample is not None:
        check_sample(sample, starts.shape[0] - 1, query.device)
    window_left, window_right = window_size
    return VarlenArguments(
        query,
        key,
        value,
        starts,
        key_starts,
        seed=None,
        max_seqlen=max_seqlen,
        max_seqlen_k=max_seqlen if max_seqlen_k is None else max_seqlen_k,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=check_scale(scale),
        window_left=window_left,
        window_right=window_right,
    )


def four_axes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_lengths: object
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Reshape inputs of any rank >= 2 to (B, H, N, D).

    Raises:
        ValueError: if ranks or outer axes differ, or ``key_lengths`` are given, which need a B.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        _check_dense(name, t)
        if t.dim() != query.dim() or t.dim() < 2 or t.shape[:-3] != query.shape[:-3]:
            other = "" if t is query else f" with a {name} {tuple(t.shape)}"
            raise ArgumentError(f"query must be (B, H, N, D), got {tuple(query.shape)}{other}")
    if key_lengths is not None:
        raise ArgumentError(f"key_lengths need a query (B, H, N, D), got {tuple(query.shape)}")
    rank, outer = query.dim(), query.shape[:-3]
    if rank < 4:
        query, key, value = (t[(None,) * (4 - rank)] for t in (query, key, value))
        return query, key, value, attn_mask
    if isinstance(attn_mask, Tensor) and attn_mask.dim() > 3:
        _check_dense("attn_mask", attn_mask)
        shape = (1,) * (rank - attn_mask.dim()) + tuple(attn_mask.shape)
        if len(shape) != rank or any(m not in (1, s) for m, s in zip(shape, outer)):
            raise ArgumentError(
                f"attn_mask must broadcast to (..., H, N, M) with outer axes {tuple(outer)}, "
                f"got {tuple(attn_mask.shape)}"
            )
        attn_mask = attn_mask.expand(*outer, *shape[-3:]).flatten(0, -4)
    return query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), attn_mask


def check_params(
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
) -> None:
    """Raise ValueError for an invalid dropout, a flag that is not boolean, or an invalid window."""
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p must be in [0, 1), got {shown(dropout_p)}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool | torch.SymBool):
            raise ArgumentError(f"{name} must be True or False, got {shown(flag)}")
    if window_size is NO_WINDOW:
        return
    both = window_size if isinstance(window_size, tuple | list) else ()
    # The kernels count columns in 32 bits.
    if len(both) != 2 or any(type(n) is not int or not -1 <= n <= MAX_SEQLEN for n in both):
        raise ArgumentError(
            f"window_size must be (left, right), each -1 for no limit, got {shown(window_size)}"
        )


def check_softcap(softcap: float) -> float:
    """Return the softcap; raise ValueError unless it is 0 or from 1e-30 to 1e30."""
    number = isinstance(softcap, int | float | torch.SymInt | torch.SymFloat)
    if not number or isinstance(softcap, bool) or not (softcap == 0 or 1e-30 <= softcap <= 1e30):
        raise ArgumentError(
            f"softcap must be 0 (disabled) or from 1e-30 to 1e30, got {shown(softcap)}"
        )
    return float(softcap)


def _check_three(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axes: tuple[str, ...],
    max_head_dim: int = MAX_HEAD_DIM,
) -> None:
    rank = len(axes)
    for name, t in (("query", query), ("key", key), ("value", value)):
        _check_dense(name, t)
        if t.dim() != rank:
            raise ArgumentError(f"{name} must be ({', '.join(axes)}), got {tuple(t.shape)}")
        if t is not query and (t.dtype != query.dtype or t.device != query.device):
            raise ArgumentError(
                f"{name} must be {query.dtype} on {query.device} as query is, "
                f"got {t.dtype} on {t.device}"
            )
        _check_layout(name, t, max_head_dim)
    if key.shape != value.shape:
        raise ArgumentError(
            "key and value must have the same shape, "
            f"got {tuple(key.shape)} and {tuple(value.shape)}"
        )


def _check_dense(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_nested:
        if isinstance(t, Tensor) and t.is_nested:
            raise ArgumentError(
                f"{name} must not be nested: attention_varlen takes varlen sequences"
            )
        check_tensor(name, t)


def _check_heads(
    heads: int, key_heads: int, enable_gqa: bool, tokens: tuple[int, int] | None = None
) -> None:
    if heads != key_heads and (not enable_gqa or key_heads == 0 or heads % key_heads):
        hint = ""
        # Compare only here: torch.export turns every comparison of sizes into a constraint.
        if tokens is not None and heads > tokens[0] == tokens[1]:
            # More heads than tokens suggest the layout of another library.
            hint = "; (B, N, H, D), as flash-attention's, becomes (B, H, N, D) by .transpose(1, 2)"
        raise ArgumentError(
            f"key has {key_heads} heads for {heads} query heads: the counts must be equal or, "
            f"with enable_gqa=True, divide (enable_gqa={enable_gqa}){hint}"
        )


def _checked_starts(
    suffix: str, given: Any, longest: int | None, num_tokens: int, device: torch.device
) -> Tensor:
    name = f"cu_seqlens{suffix}"
    starts = int32_of(name, given)
    check_tensor(name, starts)
    if starts.dim() != 1 or starts.shape[0] < 1 or starts.dtype != torch.int32:
        raise ArgumentError(f"{name} must be (S + 1,) integers, got {described(given)}")
    if starts.device != device and isinstance(given, Tensor):
        raise ArgumentError(f"{name} must be on {device} as query is, got {starts.device}")
    if not isinstance(longest, int | torch.SymInt) or longest < 0:
        raise ArgumentError(
            f"max_seqlen{suffix} must be an int of at least 0, got {shown(longest)}"
        )
    # A data-dependent size must not be compared while compiling.
    if not torch.compiler.is_compiling() and longest > MAX_SEQLEN:
        raise ArgumentError(
            f"max_seqlen{suffix} must be at most {MAX_SEQLEN}, got {shown(longest)}"
        )
    if not has_values(starts):
        return to_device(starts, device)
    values = starts.tolist()
    lengths = [stop - start for start, stop in pairwise(values)]
    if min(lengths, default=0) < 0:
        raise ArgumentError(f"{name} must not decrease, got a sequence of {min(lengths)} tokens")
    if values[0] < 0 or values[-1] > num_tokens:
        raise ArgumentError(
            f"{name} must stay in [0, {num_tokens}], got {values[0]} to {values[-1]}"
        )
    if max(lengths, default=0) > longest:
        raise ArgumentError(
            f"max_seqlen{suffix} must be at least the length of the longest sequence, "
            f"{max(lengths)}, got {longest}"
        )
    return to_device(starts, device)


def _check_layout(name: str, t: Tensor, max_head_dim: int = MAX_HEAD_DIM) -> None:
    strides, dim = t.stride(), t.shape[-1]
    if t.dtype not in DTYPES or not 1 <= dim <= max_head_dim or strides[-1] != 1:
        check_layout(name, t, max_head_dim)
    apart = strides[_ROWS[len(strides)]]
    if apart > MAX_ROW_STRIDE:
        raise ArgumentError(
            f"{name} must have rows at most {MAX_ROW_STRIDE} elements apart, got {apart}"
        )


def _check_mask(mask: Tensor, query: Tensor, scores: tuple[int, int, int, int]) -> None:
    check_tensor("attn_mask", mask)
    wide = mask.dtype == torch.float32  # with any query, as in PyTorch's function
    if not (wide or mask.dtype in (torch.bool, query.dtype)) or mask.device != query.device:
        wider = "" if query.dtype == torch.float32 else "torch.float32 or "
        raise ArgumentError(
            f"attn_mask must be bool or {wider}{query.dtype} on {query.device}, "
            f"got {mask.dtype} on {mask.device}"
        )
    shape = tuple(mask.shape)
    padded = (1,) * (4 - len(shape)) + shape
    if len(padded) != 4 or any(m not in (1, s) for m, s in zip(padded, scores, strict=True)):
        raise ArgumentError(f"attn_mask must broadcast to (B, H, N, M) = {scores}, got {shape}")
    if any(stride > MAX_MASK_STRIDE for stride in mask.stride()[-2:]):
        raise ArgumentError(
            f"attn_mask must have strides up to {MAX_MASK_STRIDE} along its last two axes, "
            f"got {mask.stride()}"
        )


# --- PyTorch's CausalBias: a mask whose variant counts, not its memory ----------------------------


def is_causal_bias(attn_mask: object) -> bool:
    """Return whether a mask is PyTorch's ``CausalBias``; importing that would import a compiler."""
    return hasattr(attn_mask, "seq_len_q")


def plain_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool]:
    """Return a mask and ``is_causal`` in place of a CausalBias; anything else as it is.

    (None, True) stands for an upper left bias of any size and a lower right one with N = M, a
    boolean (N, M) mask, on every rank if ``query`` is a DTensor, for others. Raise ValueError if a
    lower right bias is not (N, M), or ``is_causal`` is set too.
    """
    if not is_causal_bias(attn_mask):
        return attn_mask, is_causal
    if is_causal:
        raise ArgumentError(MASK_AND_CAUSAL)
    bias: Any = attn_mask
    if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() > 1 for t in (query, key)):
        return None, False  # The checks that follow report these.
    rows, cols = query.shape[-2], key.shape[-2]
    if bias.variant.name == "UPPER_LEFT":
        return None, True
    if (bias.seq_len_q, bias.seq_len_kv) != (rows, cols):
        raise ArgumentError(
            f"attn_mask must be a lower right bias of (N, M) = {(rows, cols)}, "
            f"got one of {(bias.seq_len_q, bias.seq_len_kv)}"
        )
    if rows == cols:
        return None, True
    return _triangle(rows, cols, cols - rows, query.device), False


def _triangle(rows: int, cols: int, past: int, device: torch.device) -> Tensor:
    """Return a boolean mask (rows, cols) in which row i sees columns 0 to i + past."""
    return torch.ones(rows, cols, dtype=torch.bool, device=device).tril(past)
