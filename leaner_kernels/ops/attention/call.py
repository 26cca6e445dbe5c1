"""The operands of one call of softmax attention, and what every kernel takes of them."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch_cache import LARGEST_OFFSET, MAX_ROWS, CachedLaunch, View, check_tile

LEAST_SCALE = 1e-30  # smaller ones, and negative, are multiplied in before a maximum is found


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
        scale: multiplies the scores; None for ``D ** -0.5``.
        softcap: bounds the scores; 0 for none.
        window: (left, right): row i sees columns i + M - N - left to i + M - N + right; -1 is no
            bound.
        sequences: where those of a varlen batch start.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)
    sequences: "Sequences | None" = None

    @property
    def batch(self) -> int:
        """How many batch entries, or sequences, there are."""
        sequences = self.sequences
        return self.query.shape[0] if sequences is None else sequences.starts.shape[0] - 1


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return (1,) int64 from PyTorch's generator of the device, or None without dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)


class Results(NamedTuple):
    """What a forward fills: ``out`` with the axes of the call's query, and float32 beside it.

    Attributes:
        out: (B, H, N, D); in a varlen batch (T, H, D).
        max_log_sum: (B, H, N, 2), (H, T, 2): of each row the largest score, and the log of what it
            loses. Where a row sees a key, the probabilities are exp(score - first - second). What a
            score is, the kernels say: scaled or not. Their sum would lose the second where the
            first is large, as in a row of nothing but -1e9 from a mask.
        lse: (B, H, N), (H, T); this and the others of calls with statistics alone.
        stats: (STATISTICS, B, H).
        heads: (S, N, H * D), of the S entries that ``sample`` names.
        sample: (S,) int32.
    """

    out: Tensor
    max_log_sum: Tensor
    lse: Tensor | None = None
    stats: Tensor | None = None
    heads: Tensor | None = None
    sample: Tensor | None = None


class Plan(NamedTuple):
    """What repeats a call: its launches, and what it allocates.

    Attributes:
        forward: fills the output and statistics, or parts of these.
        capture: fills heads, where some are sampled.
        out: shape and strides of the output.
        rows: those of max_log_sum, float32. Allocating with strides is the faster way.
        statistics: those of lse, stats and heads, float32; None without statistics.
        numbers: of the operator.
        present: how many of its tensors there are, up to the last.
        backward: launches, by the layouts of what the backward is given.
    """

    forward: CachedLaunch
    capture: CachedLaunch | None
    out: tuple[torch.Size, tuple[int, ...]]
    rows: tuple[torch.Size, tuple[int, ...]]
    statistics: list[tuple[torch.Size, tuple[int, ...]]] | None
    numbers: Sequence[Any]
    present: int
    backward: dict[Hashable, CachedLaunch]


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
    query, key, value, attn_mask, key_lengths, seed, dropout_p, is_causal, scale, softcap = call[
        :10
    ]
    heads, dim = query.shape[1], query.shape[-1]
    factor = dim**-0.5 if scale is None else scale
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
        "scale": factor,
        "keep_scale": 1 / (1 - dropout_p),
        "threshold": int(dropout_p * 2**31),
        "D": dim,
        "BLOCK_D": max(16, 1 << (dim - 1).bit_length()),  # as ``_tiles.block_dim``
        "CAUSAL": is_causal,
        "MASK": mask_kind,
        # Else the maximum of a row is found before it is scaled, by a number that float32 can hold.
        "SCALED": mask_kind == "additive" or softcap != 0 or factor < LEAST_SCALE,
        # Triton 3.10 turns multiply-add fusion off by default.
        "enable_fp_fusion": True,
    }


def sequence_arguments(query: Tensor, key: Tensor, sequences: Sequences | None) -> dict[str, Any]:
    """Return the arguments by name that place the sequences of a varlen batch, None without."""
    names = "starts_ptr", "key_starts_ptr", "TOKENS", "KEY_TOKENS"
    if sequences is None:
        return dict.fromkeys(names)
    values = sequences.starts, sequences.key_starts, query.shape[0], key.shape[0]
    return dict(zip(names, values, strict=True))


# Of every attention kernel: those of a call, then the starts of a varlen batch.
CALL_POINTERS = (
    *("q_view", "k_view", "v_view", "mask_view", "lengths_ptr", "seed_ptr"),
    *("starts_ptr", "key_starts_ptr"),
)


def view_of(name: str, t: Tensor) -> View:
    """Return a tensor as the kernels take it.

    In a varlen batch (T, H, D) an entry is found by its first row: its stride is that of a row.

    Raises:
        ValueError: rows so far apart that 32 bits do not reach across a tile. The callers' tensors
            were checked; those of results have rows as far apart as all heads are wide.
    """
    axis = 2 if t.dim() == 4 else 0
    view, rows = View(t, t.stride(0), t.stride(1), t.stride(axis)), min(t.shape[axis], MAX_ROWS)
    if (rows - 1) * view.stride_n > LARGEST_OFFSET:
        check_tile(f"rows of {name}", rows, view.stride_n)
    return view


# --- Of kernels in Gluon --------------------------------------------------------------------------

TILE = 64  # rows of a product


def hopper_tails(block_dim: int) -> tuple[int, ...]:
    """Return the sizes of tails: their products have a row for each dimension, 64 at least."""
    return (16, 32) if block_dim >= TILE else ()


def tiles_and_tail(tokens: int, tails: tuple[int, ...]) -> tuple[int, int]:
    """Return how many tiles of 64 hold the tokens, and the size of a tail after them, or 0.

    ``tails`` are the sizes, upwards, that are cheaper in columns of a product than as a tile.

    >>> tiles_and_tail(197, (16, 32)), tiles_and_tail(197, ()), tiles_and_tail(256, (16, 32))
    ((3, 16), (4, 0), (4, 0))
    """
    full, left = divmod(tokens, TILE)
    tail = next((size for size in tails if 0 < left <= size), 0)
    return (full, tail) if tail or not left else (full + 1, 0)


class GluonView(NamedTuple):
    """A ``View`` as kernels in Gluon take it.

    Its stride of rows is a constant. ``first`` is the token where a sequence of a varlen batch
    starts, which the kernel finds; before, and in other batches, it is None.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    first: Any


def arguments_of(kernel: Any, call: Call, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments by name of a kernel that are the call's, and those of other tensors.

    ``tensors`` are (B, H, N, D), in a varlen batch (T, H, D), by the name that their view begins
    with.
    """
    from .._gluon import gl

    arguments: dict[str, Any] = {"B": call.batch, **shared_arguments(call, call.sequences)}
    arguments |= sequence_arguments(call.query, call.key, call.sequences)
    arguments |= {f"{name}_view": view_of(name, t) for name, t in tensors.items()}
    for name in ("q", "k", "v", *tensors):
        ptr, stride_b, stride_h, stride_n = arguments[f"{name}_view"]
        view = GluonView(ptr, stride_b, stride_h, gl.constexpr(stride_n), None)
        arguments[f"{name}_view"] = view
    # Of a mask over keys, which each row shares, nothing is read along rows.
    mask = arguments["mask_view"]
    arguments["mask_view"] = mask._replace(stride_n=mask.stride_n or None)
    # An argument that nothing reads would still change how ptxas allocates registers.
    if call.attn_mask is None:
        arguments["mask_view"] = MaskView(*[None] * 5)
    if call.seed is None:
        arguments |= {"keep_scale": None, "threshold": None}
    wanted = *kernel.arg_names, "enable_fp_fusion"
    return {name: value for name, value in arguments.items() if name in wanted}
