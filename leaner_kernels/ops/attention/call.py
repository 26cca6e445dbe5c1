"""The call of softmax attention, as kernels and the reference get it, and kernel arguments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch_cache import LARGEST_OFFSET, MAX_ROWS, View, check_tile
from .._tiles import block_dim
from ..route import Results

# With smaller or negative scales, scores are scaled before the maximum is taken.
LEAST_SCALE = 1e-30


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
        window_left: row i sees columns from i + M - N - window_left on; -1 is no bound.
        window_right: row i sees columns to i + M - N + window_right; -1 is no bound.
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
    window_left: int = -1
    window_right: int = -1
    sequences: "Sequences | None" = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @property
    def visibility(self) -> dict[str, Any]:
        """Return the parameters that hide scores, as ``reference.visible`` takes them."""
        return {
            "is_causal": self.is_causal,
            "window_left": self.window_left,
            "window_right": self.window_right,
        }

    @property
    def is_plain(self) -> bool:
        """Return whether only the scale and a causal mask change the scores, without dropout."""
        masked = self.attn_mask is not None or self.key_lengths is not None
        return not (masked or self.hides_by_position or self.dropout_p or self.softcap)

    @property
    def hides_by_position(self) -> bool:
        """Return whether a window hides keys; ``is_causal`` apart."""
        return max(self.window_left, self.window_right) >= 0

    @property
    def batch(self) -> int:
        """Return the number of batch entries, or sequences."""
        sequences = self.sequences
        return self.query.shape[0] if sequences is None else sequences.starts.shape[0] - 1

    @property
    def rows(self) -> int:
        """Return N, or the upper bound of a varlen batch."""
        return self.query.shape[2] if self.sequences is None else self.sequences.rows

    @property
    def cols(self) -> int:
        """Return M, or the upper bound of a varlen batch."""
        return self.key.shape[2] if self.sequences is None else self.sequences.cols

    def profile(self, grad: Tensor | None = None) -> "Profile":
        """Return the properties that determine the kernel and tile of a call.

        ``padded_dim`` is a head dimension that does not fill its tile. ``unaligned`` is a head
        dimension, or a stride of the operands or of ``grad``, that is not a multiple of 16: rows
        may then start where 16 bytes cannot be copied at once. ``scale`` is a scale that
        is not positive, or that float32 cannot hold: the maximum of a row must then be taken after
        scaling. ``shared`` are key heads that several query heads share.
        """
        heads, dim = self.query.shape[1], self.query.shape[-1]
        present = {
            "mask": self.attn_mask is not None,
            "dropout": self.seed is not None,
            "softcap": self.softcap != 0,
            "scale": self.scale is not None and self.scale < LEAST_SCALE,
            "window": self.hides_by_position,
            "varlen": self.sequences is not None,
            "shared": heads != self.key.shape[1],
            "padded_dim": dim != block_dim(dim),
            "unaligned": dim % 16 != 0 or any(map(_is_unaligned, self.operands)),
        }
        features = frozenset(name for name, is_present in present.items() if is_present)
        with_grad = features
        if grad is not None and _is_unaligned(grad):
            with_grad = features | {"unaligned"}
        return Profile(self.rows, self.cols, self.batch, heads, features, with_grad)


def _is_unaligned(t: Tensor) -> bool:
    return any(stride % 16 for stride in t.stride()[:-1])


class Profile(NamedTuple):
    """What decides which kernel and tile a call gets.

    Attributes:
        rows: N, or the upper bound of a varlen batch.
        cols: M, likewise.
        batch: entries, or sequences.
        heads: number of heads of the query.
        features: of the operands, what a kernel must support beyond causal or shortened rows.
        with_grad: the same of the operands and the gradient of the output.
    """

    rows: int
    cols: int
    batch: int
    heads: int
    features: frozenset[str]
    with_grad: frozenset[str]


class PackedArguments(NamedTuple):
    """The arguments of ``attention_qkvpacked``: ``qkv`` (B, N, 3, H, D), others as in ``Call``."""

    qkv: Tensor
    key_lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    window_left: int = -1
    window_right: int = -1


class BiasedArguments(NamedTuple):
    """``PackedArguments`` of a projection, with the bias (3 * H * D,) that it contains already."""

    qkv: Tensor
    bias: Tensor
    key_lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    window_left: int = -1
    window_right: int = -1


class VarlenArguments(NamedTuple):
    """The arguments of ``attention_varlen``: tensors (T, H, D), starts (S + 1,), bounds."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    seed: Tensor | None
    max_seqlen: int
    max_seqlen_k: int
    dropout_p: float
    is_causal: bool
    scale: float | None
    window_left: int = -1
    window_right: int = -1


# Names and schema types of the operators' tensors and numbers, in the order of their arguments.
_SEPARATE = {"query": "Tensor", "key": "Tensor", "value": "Tensor"}
TENSORS = {**_SEPARATE, "attn_mask": "Tensor?", "key_lengths": "Tensor?", "seed": "Tensor?"}
_PACKED = {"key_lengths": "Tensor?", "seed": "Tensor?"}
PACKED_TENSORS = {"qkv": "Tensor", **_PACKED}
BIASED_TENSORS = {"qkv": "Tensor", "bias": "Tensor", **_PACKED}
VARLEN_TENSORS = {
    **_SEPARATE,
    "cu_seqlens": "Tensor",
    "cu_seqlens_k": "Tensor",
    "seed": "Tensor?",
}
_SCORES = {"dropout_p": "float", "is_causal": "bool", "scale": "float?"}
_VISIBILITY = {"window_left": "int", "window_right": "int"}
NUMBERS = {**_SCORES, "softcap": "float", **_VISIBILITY}
PACKED_NUMBERS = {**_SCORES, **_VISIBILITY}
VARLEN_NUMBERS = {"max_seqlen": "SymInt", "max_seqlen_k": "SymInt", **_SCORES, **_VISIBILITY}


# Sums of a head: dq of each of four warps and of a tail, dv of each warp. Those of dk are 0, since
# the gradients of the scores of a row add up to 0.
QUERY_SLOTS, BIAS_SLOTS = 5, 9


class Gradients(NamedTuple):
    """The buffers that a backward fills.

    Attributes:
        dq: (B, H, N, D); in a varlen batch (T, H, D).
        dk: (B, Hkv, M, D); in a varlen batch (Tk, Hkv, D).
        dv: as ``dk``.
        ds: (B, H, N, M) float32, the gradient of the scores under an additive mask, zero on entry.
        bias_sums: (B, BIAS_SLOTS, H, D) float32, for kernels that have a ``bias_ptr``: sums over
            tokens of ``dq`` in the first ``QUERY_SLOTS``, of ``dv`` in the others.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds: Tensor | None = None
    bias_sums: Tensor | None = None


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
    """Return the factor of the products of queries and keys."""
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
    """Return, by name, the arguments of a Triton kernel that a call determines.

    ``tensors`` are (B, H, N, D), or (T, H, D) in a varlen batch; the key ``x`` names the argument
    ``x_view``. ``others`` are more arguments.
    """
    query, key, mask, sequences = call.query, call.key, call.attn_mask, call.sequences
    heads, dim, rows, cols = query.shape[1], query.shape[-1], call.rows, call.cols
    mask_view, mask_kind = MaskView(None, 0, 0, 0, 0), "none"
    if mask is not None:
        mask = mask.expand(call.batch, heads, rows, cols)
        mask_kind = "boolean" if mask.dtype == torch.bool else "additive"
        mask = mask.view(torch.uint8) if mask_kind == "boolean" else mask
        mask_view = MaskView(mask, *mask.stride())
    tensors = {"q": query, "k": key, "v": call.value, **tensors}
    arguments = {
        **{f"{name}_view": view_of(name, t) for name, t in tensors.items()},
        "mask_view": mask_view,
        # A copy only if strided: kernels index it with stride 1.
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
        "window_left": None if call.window_left < 0 else call.window_left,
        "window_right": None if call.window_right < 0 else call.window_right,
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
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():  # the interpreter supports only Triton's
        _adapt_to_gluon(call, arguments)
    wanted = *kernel.arg_names, "enable_fp_fusion"
    return {name: value for name, value in arguments.items() if name in wanted}


def forward_arguments(kernel: Any, call: Call, results: Results) -> dict[str, Any]:
    """Return the arguments of a forward kernel, by name; see ``kernel_arguments``."""
    return kernel_arguments(
        kernel,
        call,
        {"out": results.out},
        max_log_sum_ptr=results.max_log_sum,
        lse_ptr=results.lse,
        stats_ptr=results.stats,
    )


def backward_arguments(
    kernel: Any, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> dict[str, Any]:
    """Return the arguments of a backward kernel, by name; see ``kernel_arguments``."""
    return kernel_arguments(
        kernel,
        call,
        {"do": grad, "out": saved.out, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv},
        max_log_sum_ptr=saved.max_log_sum,
        lse_ptr=saved.lse if saved.max_log_sum is None else None,
        ds_ptr=gradients.ds,
        bias_ptr=gradients.bias_sums,
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
