"""One call of softmax attention: what it may be given, and its operands as kernels take them.

Each refusal is one line that shows what arrived.
"""

from collections.abc import Hashable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import (
    MAX_HEAD_DIM,
    MAX_ROW_STRIDE,
    ArgumentError,
    check_layout,
    check_sample,
    check_tensor,
    checked_lengths,
    described,
    has_values,
    int32_of,
    moved,
    shown,
)
from .._launch_cache import View, check_tile, layout
from .._tiles import Rule, Tile, Tiles, block_dim

LEAST_SCALE = 1e-30

# Inside a tile of 256 by 128 mask elements the kernels count in 32 bits.
MAX_MASK_STRIDE = 2**22 - 1
# The starts of sequences are int32.
MAX_SEQLEN = 2**31 - 1
_ROWS = {3: 0, 4: 2, 5: 1}  # which axis is the rows', by how many there are
MASK_AND_CAUSAL = "attn_mask and is_causal=True exclude each other: put both in the mask"


def check_query_key_value(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    key_lengths: Any,
    sample: Tensor | None = None,
    max_head_dim: int = MAX_HEAD_DIM,
) -> Tensor | None:
    """Return the lengths as int32; raise ValueError unless all fits, and is what kernels run."""
    _check_three(query, key, value, ("B", "H", "N", "D"), max_head_dim)
    (batch, heads, rows, dim), (key_batch, key_heads, cols, key_dim) = query.shape, key.shape
    if (batch, dim) != (key_batch, key_dim):
        raise ArgumentError(
            f"query and key must agree in B and D, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    # So many heads of so few tokens are another library's tokens and heads.
    turned = "; (B, N, H, D), as flash-attention's, becomes (B, H, N, D) by .transpose(1, 2)"
    turned = turned if heads > rows == cols else ""
    _check_heads(heads, key_heads, enable_gqa, turned)
    if attn_mask is not None:
        _check_mask(attn_mask, query, (batch, heads, rows, cols))
        if is_causal:
            raise ArgumentError(MASK_AND_CAUSAL)
    if sample is not None:
        check_sample(sample, batch, query.device)
    return checked_lengths(key_lengths, batch, cols, query.device)


def four_axes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (B, H, N, D) for what has fewer axes or more: of size 1, or folded into B.

    Raises:
        ValueError: no such shapes, or ``key_lengths``, for which there is no B.
    """
    _check_dense("query", query)
    rank, outer = query.dim(), query.shape[:-3]
    for name, t in (("query", query), ("key", key), ("value", value)):
        _check_dense(name, t)
        if t.dim() != rank or rank < 2:
            axes = "" if t is query else f" with a {name} of {t.dim()} axes"
            raise ArgumentError(f"query must be (B, H, N, D), got {tuple(query.shape)}{axes}")
        if t.shape[:-3] != outer:
            raise ArgumentError(
                f"{name} must have the outer axes of query, {tuple(outer)}, got {tuple(t.shape)}"
            )
    if key_lengths is not None:
        raise ArgumentError(f"key_lengths need a query (B, H, N, D), got {tuple(query.shape)}")
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


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Any,
    max_seqlen: int,
    cu_seqlens_k: Any,
    max_seqlen_k: int | None,
    enable_gqa: bool,
    sample: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return both starts as int32; raise ValueError unless (T, H, D) tensors and sequences fit."""
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
    starts, key_starts = _checked_starts("", cu_seqlens, max_seqlen, rows, query.device), None
    if cu_seqlens_k is not None:
        key_starts = _checked_starts("_k", cu_seqlens_k, max_seqlen_k, cols, query.device)
        if key_starts.shape != starts.shape:
            raise ArgumentError(
                f"cu_seqlens_k must have {starts.shape[0]} entries as cu_seqlens has, "
                f"got {key_starts.shape[0]}"
            )
    if sample is not None:
        check_sample(sample, starts.shape[0] - 1, query.device)
    return starts, key_starts


def check_packed(
    qkv: Tensor, key_lengths: Any, sample: Tensor | None = None, max_head_dim: int = MAX_HEAD_DIM
) -> Tensor | None:
    """Return the lengths as int32; raise ValueError unless (B, N, 3, H, D) and all else fit."""
    check_tensor("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ArgumentError(f"qkv must be (B, N, 3, H, D), got {tuple(qkv.shape)}")
    _check_layout("qkv", qkv, max_head_dim)
    if sample is not None:
        check_sample(sample, qkv.shape[0], qkv.device)
    return checked_lengths(key_lengths, qkv.shape[0], qkv.shape[1], qkv.device)


def check_params(dropout_p: float, is_causal: bool, enable_gqa: bool = False) -> None:
    """Raise ValueError unless a dropout of ``dropout_p`` leaves something and flags are flags."""
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p must be in [0, 1), got {shown(dropout_p)}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool | torch.SymBool):
            raise ArgumentError(f"{name} must be True or False, got {shown(flag)}")


def check_softcap(softcap: float) -> float:
    """Return the softcap; raise ValueError unless it is 0 or a number whose inverse is one too."""
    number = isinstance(softcap, int | float | torch.SymInt | torch.SymFloat)
    if not number or isinstance(softcap, bool) or not (softcap == 0 or 1e-30 <= softcap <= 1e30):
        raise ArgumentError(
            f"softcap must be 0, for none, or from 1e-30 to 1e30, got {shown(softcap)}"
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
            f"key and value must have one shape, got {tuple(key.shape)} and {tuple(value.shape)}"
        )


def _check_dense(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_nested:
        if isinstance(t, Tensor) and t.is_nested:
            raise ArgumentError(
                f"{name} must not be nested: attention_varlen takes varlen sequences"
            )
        check_tensor(name, t)


def _check_heads(heads: int, key_heads: int, enable_gqa: bool, hint: str = "") -> None:
    if heads != key_heads and (not enable_gqa or key_heads == 0 or heads % key_heads):
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
    # A size that only the data tell must not be asked about while compiling.
    if not torch.compiler.is_compiling() and longest > MAX_SEQLEN:
        raise ArgumentError(
            f"max_seqlen{suffix} must be at most {MAX_SEQLEN}, got {shown(longest)}"
        )
    if not has_values(starts):
        return moved(starts, device)
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
            f"max_seqlen{suffix} must be the length of the longest sequence or more, "
            f"got {longest} for {max(lengths)}"
        )
    return moved(starts, device)


def _check_layout(name: str, t: Tensor, max_head_dim: int = MAX_HEAD_DIM) -> None:
    check_layout(name, t, max_head_dim)
    strides = t.stride()
    apart = strides[_ROWS[len(strides)]]
    if apart > MAX_ROW_STRIDE:
        raise ArgumentError(
            f"{name} must have rows at most {MAX_ROW_STRIDE} elements apart, got {apart}"
        )


def _check_mask(mask: Tensor, query: Tensor, scores: tuple[int, int, int, int]) -> None:
    check_tensor("attn_mask", mask)
    wide = mask.dtype == torch.float32  # beside any query, as PyTorch's function takes it
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


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return (1,) int64 from PyTorch's generator of the device, or None without dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)


class Call(NamedTuple):
    """The operands and parameters of one call, checked.

    Attributes:
        query: (B, H, N, D); in a varlen batch (T, H, D).
        key: (B, Hkv, M, D); in a varlen batch (Tk, Hkv, D).
        value: as ``key``.
        attn_mask: boolean or additive, broadcastable to (B, H, N, M).
        key_lengths: (B,) int32.
        seed: (1,) int64, where there is dropout.
        dropout_p: probability of dropping a probability.
        is_causal: row i sees columns 0 to i.
        scale: multiplies the scores.
        softcap: bounds the scores; 0 for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    softcap: float = 0.0


def new_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    softcap: float = 0.0,
) -> Call:
    """Return the call of these, with the default of a scale of None."""
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    tensors = query, key, value, attn_mask, key_lengths, seed
    return Call(*tensors, dropout_p, is_causal, factor, softcap)


def counted(call: Call) -> Call:
    """Return the call with lengths that lie side by side, as the kernels count them."""
    lengths = call.key_lengths
    return call if lengths is None else call._replace(key_lengths=lengths.contiguous())


def kind_of(call: Call, *others: Hashable) -> Hashable:
    """Return what sets calls apart, for the launch cache, beside the addresses of their tensors."""
    query = call.query
    return (
        query.device.index,
        query.dtype,
        query.shape,
        call.key.shape,
        query.stride(),
        call.key.stride(),
        call.value.stride(),
        layout(call.attn_mask),
        call.key_lengths is None,
        call.seed is None,
        *call[6:],
        *others,
    )


# --- What kernels are given of a call -------------------------------------------------------------


class MaskView(NamedTuple):
    """A mask as kernels take it: strides of batch entry, head, query row and key."""

    ptr: Tensor | None
    stride_b: Any
    stride_h: Any
    stride_n: Any
    stride_m: Any


class Sequences(NamedTuple):
    """A varlen batch: where its sequences start, and how long the longest may be.

    ``starts`` and ``key_starts`` are (S + 1,) int32, contiguous, on the device; sequence i of the
    queries owns the tokens from ``starts[i]`` to before ``starts[i + 1]``.
    """

    starts: Tensor
    key_starts: Tensor
    rows: int
    cols: int


def shared_arguments(call: Call, sequences: Sequences | None = None) -> dict[str, Any]:
    """Return the arguments by name that every attention kernel takes.

    With ``sequences``, query, key and value are (T, H, D), of a varlen batch.
    """
    query, key, value, attn_mask, key_lengths, seed, dropout_p, is_causal, scale, softcap = call
    heads, dim = query.shape[1], query.shape[-1]
    if sequences is None:
        batch, rows, cols = query.shape[0], query.shape[2], key.shape[2]
    else:
        batch, rows, cols = len(sequences.starts) - 1, sequences.rows, sequences.cols
    mask_view, mask_kind = MaskView(None, 0, 0, 0, 0), "none"
    if attn_mask is not None:
        mask = attn_mask.expand(batch, heads, rows, cols)
        mask_kind = "boolean" if mask.dtype == torch.bool else "additive"
        mask = mask.view(torch.uint8) if mask_kind == "boolean" else mask
        mask_view = MaskView(mask, *mask.stride())
    return {
        "q_view": view_of("q", query),
        "k_view": view_of("k", key),
        "v_view": view_of("v", value),
        "mask_view": mask_view,
        # Free unless strided: the kernels count along it.
        "lengths_ptr": None if key_lengths is None else key_lengths.contiguous(),
        "seed_ptr": seed,
        "H": heads,
        "GROUP": heads // key.shape[1],
        "N": rows,
        "M": cols,
        "scale": scale,
        "keep_scale": 1 / (1 - dropout_p),
        "threshold": int(dropout_p * 2**31),
        "D": dim,
        "BLOCK_D": block_dim(dim),
        "CAUSAL": is_causal,
        "MASK": mask_kind,
        # Else the maximum of a row is found before it is scaled, by a number that float32 can hold.
        "SCALED": mask_kind == "additive" or softcap != 0 or scale < LEAST_SCALE,
        # Triton 3.10 turns multiply-add fusion off by default.
        "enable_fp_fusion": True,
    }


def online_tile(tiles: Tiles, call: Call, *others: str, varlen: bool) -> Tile:
    """Return the tile of a kernel that walks over any length; ``others`` are features too."""
    query, key, value, attn_mask, _, seed, _, _, scale, softcap = call
    wanted = features(attn_mask, seed, query, key, value, softcap=softcap, scale=scale)
    found = find_rule(tiles, query, 0, wanted.union(others, ["varlen"] * varlen))
    assert found is not None, (tiles.name, query.shape, wanted)
    return found.tile


def sequence_arguments(query: Tensor, key: Tensor, sequences: Sequences | None) -> dict[str, Any]:
    """Return the arguments by name that place the sequences of a varlen batch, None without."""
    names = "starts_ptr", "key_starts_ptr", "TOKENS", "KEY_TOKENS"
    if sequences is None:
        return dict.fromkeys(names)
    values = sequences.starts, sequences.key_starts, query.shape[0], key.shape[0]
    return dict(zip(names, values, strict=True))


# Of every attention kernel: those of a call, then those of ``sequence_tensors``.
CALL_POINTERS = (
    *("q_view", "k_view", "v_view", "mask_view", "lengths_ptr", "seed_ptr"),
    *("starts_ptr", "key_starts_ptr"),
)


def sequence_tensors(sequences: Sequences | None) -> tuple[Tensor | None, Tensor | None]:
    """Return where the sequences of a varlen batch start, None without."""
    return (None, None) if sequences is None else (sequences.starts, sequences.key_starts)


def sequence_kind(sequences: Sequences | None) -> tuple[int, int, int] | None:
    """Return what sets sequences apart, for the launch cache, beside where they start."""
    if sequences is None:
        return None
    return len(sequences.starts), sequences.rows, sequences.cols


def view_of(name: str, t: Tensor) -> View:
    """Return a tensor as the kernels take it.

    In a varlen batch (T, H, D) an entry is found by its first row: its stride is that of a row.

    Raises:
        ValueError: rows so far apart that 32 bits do not reach across a tile. The callers' tensors
            were checked; those of results have rows as far apart as all heads are wide.
    """
    axis = 2 if t.dim() == 4 else 0
    view = View(t, t.stride(0), t.stride(1), t.stride(axis))
    check_tile(f"rows of {name}", t.shape[axis], view.stride_n)
    return view


# --- Tiles: a table beside each kernel (``ops._tiles``) -------------------------------------------


def features(
    attn_mask: Tensor | None,
    seed: Tensor | None,
    query: Tensor,
    *others: Tensor,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> frozenset[str]:
    """Return what a call needs beyond causal or shortened rows: it takes registers.

    ``padded_dim`` is a head dimension that does not fill its tile; ``unaligned`` is one, or a
    stride of the ``query`` or ``others``, that is no multiple of 16: rows are then not known to
    start where 16 bytes can be copied at once. ``scale`` is one that is not positive, or not a
    number that float32 can hold: the maximum of a row cannot be found before it is scaled.
    """
    dim = query.shape[-1]
    strides = (stride for t in (query, *others) for stride in t.stride()[:-1])
    wanted = {
        "mask": attn_mask is not None,
        "dropout": seed is not None,
        "softcap": softcap != 0,
        "scale": scale < LEAST_SCALE,
        "padded_dim": dim != block_dim(dim),
        "unaligned": dim % 16 != 0 or any(stride % 16 for stride in strides),
    }
    return frozenset(name for name, present in wanted.items() if present)


def find_rule(tiles: Tiles, query: Tensor, tokens: int, features: frozenset[str]) -> Rule | None:
    """Return the first rule of a table that takes a call, None where none does."""
    return tiles.find(
        query.device,
        size=query.element_size(),
        dim=block_dim(query.shape[-1]),
        tokens=tokens,
        features=features,
    )
