"""The operands of a call of softmax attention, and the arguments that kernels share."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch_cache import LARGEST_OFFSET, MAX_ROWS, CachedLaunch, View, check_tile
from .._tiles import block_dim

LEAST_SCALE = 1e-30  # smaller and negative scales multiply scores before a maximum is taken


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
        """Return the number of batch entries, or sequences."""
        sequences = self.sequences
        return self.query.shape[0] if sequences is None else sequences.starts.shape[0] - 1


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return (1,) int64 from PyTorch's generator of the device, or None without dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)


class Results(NamedTuple):
    """The buffers that a forward fills: ``out``, with the axes of the query, and float32 tensors.

    Attributes:
        out: (B, H, N, D); in a varlen batch (T, H, D).
        max_log_sum: (B, H, N, 2), (H, T, 2): the largest score of each row, and the log of the sum
            of exponentials relative to it. For a row with a visible key, probabilities are
            exp(score - first - second); ``takes_scaled_maxima`` tells whether scores are scaled.
            The sum of the two would round away the second beside a large first, as in a row of -1e9
            only. None for calls that save ``lse`` alone.
        lse: (B, H, N), (H, T), in nats, of scaled scores. For a row without a visible key -inf, or,
            where it is saved alone, inf: the backward's probabilities are then 0.
        stats: (STATISTICS, B, H); this and the following only for calls with statistics.
        heads: (S, N, H * D), of the S entries that ``sample`` names.
        sample: (S,) int32.
    """

    out: Tensor
    max_log_sum: Tensor | None
    lse: Tensor | None = None
    stats: Tensor | None = None
    heads: Tensor | None = None
    sample: Tensor | None = None


class Gradients(NamedTuple):
    """The buffers that a backward fills.

    Attributes:
        dq: (B, H, N, D); in a varlen batch (T, H, D).
        dk: (B, Hkv, M, D); in a varlen batch (Tk, Hkv, D).
        dv: as ``dk``.
        ds: (B, H, N, M) float32, the gradient of the scores under an additive mask, zero on entry.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds: Tensor | None = None


class Plan(NamedTuple):
    """The record that repeats a call: its launches and allocations.

    Attributes:
        forward: fills the output and statistics, or parts of these.
        capture: fills heads, if some are sampled.
        out: shape and strides of the output.
        rows: those of max_log_sum, float32, or of an lse that is saved alone. Allocating with
            strides is faster.
        statistics: those of lse, stats and heads, float32; None without statistics.
        numbers: parameters of the operator.
        present: the number of its tensors, up to the last that is not None.
        backward: launches, by the layouts of the arguments of the backward.
    """

    forward: CachedLaunch
    capture: CachedLaunch | None
    out: tuple[torch.Size, tuple[int, ...]]
    rows: tuple[torch.Size, tuple[int, ...]]
    statistics: list[tuple[torch.Size, tuple[int, ...]]] | None
    numbers: Sequence[Any]
    present: int
    backward: dict[Hashable, CachedLaunch]


# --- Arguments of the kernels ---------------------------------------------------------------------


class MaskView(NamedTuple):
    """A mask and its strides of batch entry, head, query row and key."""

    ptr: Tensor | None
    stride_b: Any
    stride_h: Any
    stride_n: Any
    stride_m: Any


class Sequences(NamedTuple):
    """A varlen batch: the starts of its sequences, and upper bounds of their lengths.

    ``starts`` and ``key_starts`` are (S + 1,) int32, contiguous, on the device; sequence i of the
    queries owns the tokens from ``starts[i]`` to before ``starts[i + 1]``.
    """

    starts: Tensor
    key_starts: Tensor
    rows: int
    cols: int


def score_factor(call: Call) -> float:
    """Return what multiplies the products of queries and keys."""
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


def takes_scaled_maxima(call: Call) -> bool:
    """Return whether kernels scale scores before they take the maximum of a row.

    Otherwise the factor, which float32 can hold, multiplies the maximum.
    """
    mask = call.attn_mask
    additive = mask is not None and mask.dtype != torch.bool
    return additive or call.softcap != 0 or score_factor(call) < LEAST_SCALE


def kernel_arguments(
    kernel: Any, call: Call, tensors: dict[str, Tensor], **others: Any
) -> dict[str, Any]:
    """Return the arguments of a Triton kernel that a call determines, by name, of those it takes.

    ``tensors`` are (B, H, N, D), or (T, H, D) in a varlen batch; the key ``x`` names the argument
    ``x_view``. ``others`` are more arguments.
    """
    query, key, mask, sequences = call.query, call.key, call.attn_mask, call.sequences
    heads, dim = query.shape[1], query.shape[-1]
    if sequences is None:
        rows, cols = query.shape[2], key.shape[2]
    else:
        rows, cols = sequences.rows, sequences.cols
    mask_view, mask_kind = MaskView(None, 0, 0, 0, 0), "none"
    if mask is not None:
        mask = mask.expand(call.batch, heads, rows, cols)
        mask_kind = "boolean" if mask.dtype == torch.bool else "additive"
        mask = mask.view(torch.uint8) if mask_kind == "boolean" else mask
        mask_view = MaskView(mask, *mask.stride())
    left, right = call.window
    arguments = {
        **{f"{name}_view": view_of(name, t) for name, t in zip("qkv", call[:3])},
        **{f"{name}_view": view_of(name, t) for name, t in tensors.items()},
        "mask_view": mask_view,
        # No copy unless strided: kernels index it with stride 1.
        "lengths_ptr": None if call.key_lengths is None else call.key_lengths.contiguous(),
        "seed_ptr": call.seed,
        "starts_ptr": None if sequences is None else sequences.starts,
        "key_starts_ptr": None if sequences is None else sequences.key_starts,
        "B": call.batch,
        "H": heads,
        "GROUP": heads // key.shape[1],
        "N": rows,
        "M": cols,
        "TOKENS": None if sequences is None else query.shape[0],
        "KEY_TOKENS": None if sequences is None else key.shape[0],
        "scale": score_factor(call),
        "softcap": call.softcap or None,
        "window_left": None if left < 0 else left,
        "window_right": None if right < 0 else right,
        "keep_scale": 1 / (1 - call.dropout_p),
        "threshold": int(call.dropout_p * 2**31),
        "D": dim,
        "BLOCK_D": block_dim(dim),
        "CAUSAL": call.is_causal,
        "MASK": mask_kind,
        "SCALED": takes_scaled_maxima(call),
        # Triton 3.10 turns multiply-add fusion off by default.
        "enable_fp_fusion": True,
        **others,
    }
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():  # the interpreter has Triton's alone
        _adapt_to_gluon(call, arguments)
    wanted = *kernel.arg_names, "enable_fp_fusion"
    return {name: value for name, value in arguments.items() if name in wanted}


def forward_arguments(kernel: Any, call: Call, results: Results) -> dict[str, Any]:
    """Return the arguments of a forward kernel, by name; see ``kernel_arguments``."""
    max_log_sum, lse, stats = results[1:4]
    pointers = {"max_log_sum_ptr": max_log_sum, "lse_ptr": lse, "stats_ptr": stats}
    return kernel_arguments(kernel, call, {"out": results.out}, **pointers)


def backward_arguments(
    kernel: Any, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> dict[str, Any]:
    """Return the arguments of a backward kernel, by name; see ``kernel_arguments``."""
    dq, dk, dv, ds = gradients
    tensors = {"do": grad, "out": saved.out, "dq": dq, "dk": dk, "dv": dv}
    lse = saved.lse if saved.max_log_sum is None else None
    pointers = {"max_log_sum_ptr": saved.max_log_sum, "lse_ptr": lse, "ds_ptr": ds}
    return kernel_arguments(kernel, call, tensors, **pointers)


# The pointers of every attention kernel: operands of a call, then the starts of a varlen batch.
CALL_POINTERS = (
    *("q_view", "k_view", "v_view", "mask_view", "lengths_ptr", "seed_ptr"),
    *("starts_ptr", "key_starts_ptr"),
)


def view_of(name: str, t: Tensor) -> View:
    """Return a tensor with its strides, as kernels expect it.

    In a varlen batch (T, H, D), an entry is located by its first row: its stride is that of a row.

    Raises:
        ValueError: if 32-bit offsets do not reach across a tile. Inputs were checked before, but
            rows of results are as far apart as all heads together are wide.
    """
    axis = 2 if t.dim() == 4 else 0
    view, rows = View(t, t.stride(0), t.stride(1), t.stride(axis)), min(t.shape[axis], MAX_ROWS)
    if (rows - 1) * view.stride_n > LARGEST_OFFSET:
        check_tile(f"rows of {name}", rows, view.stride_n)
    return view


# --- Gluon kernels --------------------------------------------------------------------------------

TILE = 64  # rows of a product


def hopper_tails(block_dim: int) -> tuple[int, ...]:
    """Return the sizes of tails: their products have D rows, and wgmma needs at least 64."""
    return (16, 32) if block_dim >= TILE else ()


def tiles_and_tail(tokens: int, tails: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of tiles of 64 tokens, and the size of a tail after them, or 0.

    ``tails`` are the sizes, ascending, that cost less as columns of a product than as a tile.

    >>> tiles_and_tail(197, (16, 32)), tiles_and_tail(197, ()), tiles_and_tail(256, (16, 32))
    ((3, 16), (4, 0), (4, 0))
    """
    full, left = divmod(tokens, TILE)
    tail = next((size for size in tails if 0 < left <= size), 0)
    return (full, tail) if tail or not left else (full + 1, 0)


class GluonView(NamedTuple):
    """A ``View`` for Gluon kernels.

    Its row stride is a constant. ``first`` is the first token of a sequence of a varlen batch,
    which the kernel loads; until then, and in other batches, it is None.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    first: Any


def _adapt_to_gluon(call: Call, arguments: dict[str, Any]) -> None:
    """Replace what Gluon kernels expect in another form."""
    from .._gluon import gl

    for name, view in arguments.items():
        if isinstance(view, View):
            ptr, stride_b, stride_h, stride_n = view
            arguments[name] = GluonView(ptr, stride_b, stride_h, gl.constexpr(stride_n), None)
    # A mask over keys is shared by all rows: its row stride of 0 becomes None.
    mask = arguments["mask_view"]
    arguments["mask_view"] = mask._replace(stride_n=mask.stride_n or None)
    # An unused argument would still change how ptxas allocates registers.
    if call.attn_mask is None:
        arguments["mask_view"] = MaskView(*[None] * 5)
    if call.seed is None:
        arguments |= {"keep_scale": None, "threshold": None}
