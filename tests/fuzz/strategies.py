"""What the fuzzers call the public functions with.

A ``FuzzCase`` is plain data, small to print, and makes its tensors on any device, so that the CPU
and a GPU can be given the same calls.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "inside", "permuted", "expanded", "padded")
# What a kernel may be given and still be held to the error budget.
VALUES = ("normal", "small", "large", "equal", "zeros", "whole", "far apart", "subnormal")
EXTREMES = (math.nan, math.inf, -math.inf, "greatest", "least")
# Around tiles and warps, and far from them.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 49, 63, 64, 65)
DIMS = (1, 2, 3, 5, 8, 10, 15, 16, 17, 31, 32, 33, 48, 63, 64)
WIDE_DIMS = (*DIMS, 65, 80, 127, 128)


class Block(NamedTuple):
    """A floating-point tensor to be made.

    Attributes:
        shape: of the tensor.
        dtype: its dtype.
        layout: "plain", contiguous; "inside" a larger block, from an element that is not aligned;
            "permuted", outer axes the other way round in memory; "expanded", one axis of stride 0;
            "padded", rows with a gap behind; "gaps", a last axis of stride 2.
        values: one of ``VALUES``.
        seed: of its random numbers.
        extreme: written into the middle of the last entry of the first axis; None for nothing.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "plain"
    values: str = "normal"
    seed: int = 0
    extreme: float | str | None = None

    def make(self, device: str = "cpu", guard: float = math.nan) -> Tensor:
        """Return the tensor; all memory around it, and between its rows, holds ``guard``."""
        if device == "meta":
            return self.place(torch.empty(self.shape, dtype=self.dtype, device=device), guard)
        generator = torch.Generator().manual_seed(self.seed)
        numbers = fill(self.values, self.shape, self.dtype, generator)
        if self.extreme is not None:
            limits = torch.finfo(self.dtype)
            named = {"greatest": limits.max, "least": limits.min}
            last = numbers[-1].view(-1)
            last[last.numel() // 2] = named.get(self.extreme, self.extreme)
        return self.place(numbers.to(device, self.dtype), guard)

    def place(self, numbers: Tensor, guard: float) -> Tensor:
        """Return ``numbers`` in the layout asked for."""
        rank = numbers.dim()
        if self.layout == "plain" or self.shape == () or 0 in self.shape:
            return numbers
        axes, sizes, offset = list(range(rank)), list(self.shape), [0] * rank
        if self.layout == "expanded":
            # The longest axis but the last, or what a mask has.
            axis = max(range(max(rank - 1, 1)), key=lambda i: self.shape[i])
            return numbers.narrow(axis, 0, 1).clone().expand(self.shape)
        if self.layout == "permuted":
            axes = [*reversed(range(rank - 1)), rank - 1]
        if self.layout == "gaps":
            sizes[-1] *= 2
        larger = [sizes[axis] for axis in axes]
        if self.layout == "inside":
            larger, offset = [n + 2 for n in larger], [1] * rank
        elif self.layout != "gaps":
            larger[-1] += 3
        block = numbers.new_full(larger, guard)
        for axis, size in enumerate(sizes[a] for a in axes):
            block = block.narrow(axis, offset[axis], size)
        view = block.permute([axes.index(axis) for axis in range(rank)])
        if self.layout == "gaps":
            view = view[..., ::2]
        return view.copy_(numbers)


class Mask(NamedTuple):
    """A boolean mask to be made, True with a probability; ``hidden`` hides the first row too."""

    shape: tuple[int, ...]
    seed: int = 0
    share: float = 0.7
    hidden: bool = False
    layout: str = "plain"

    def make(self, device: str = "cpu", guard: float = math.nan) -> Tensor:
        """Return the mask; what lies around it is True for a ``guard`` that is not zero."""
        generator = torch.Generator().manual_seed(self.seed)
        seen = torch.rand(self.shape, generator=generator) < self.share
        if self.hidden:
            seen[..., :1, :] = False
        block = Block(self.shape, torch.bool, self.layout)
        return block.place(seen.to(device), bool(guard))


class Whole(NamedTuple):
    """Whole numbers to be made; ``strided`` puts other numbers between them.

    ``dtype`` is that of a tensor, or ``list``.
    """

    values: tuple[int, ...]
    dtype: Any = torch.int32
    strided: bool = False

    def make(self, device: str = "cpu", guard: float = math.nan) -> Any:
        """Return the tensor, (n,), or the list."""
        if self.dtype is list:
            return list(self.values)
        numbers = torch.tensor(self.values, dtype=self.dtype, device=device)
        if not self.strided:
            return numbers
        between = torch.full((2 * len(numbers) + 1,), 12345 if guard else -7, dtype=self.dtype)
        return between.to(device)[1::2].copy_(numbers)


class FuzzCase(NamedTuple):
    """A call of a public function.

    Attributes:
        function: its name in ``leaner_kernels``.
        arguments: by name; each a number, or a recipe with ``make(device, guard)``.
    """

    function: str
    arguments: dict[str, Any]

    def make(self, device: str = "cpu", guard: float = math.nan) -> dict[str, Any]:
        """Return the arguments of the call."""
        return {
            name: value.make(device, guard) if hasattr(value, "make") else value
            for name, value in self.arguments.items()
        }


def fill(
    values: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return random numbers, float64, of one kind; those of a float16 stay within its range."""
    normal = torch.randn(shape, dtype=torch.float64, generator=generator)
    if values == "small":
        return normal * 1e-3
    if values == "large":
        return normal * 12
    if values == "equal":
        return torch.full(shape, 0.75, dtype=torch.float64)
    if values == "zeros":
        return torch.zeros(shape, dtype=torch.float64)
    if values == "whole":
        return normal.mul(2).round()
    if values == "far apart":
        wide = 2 if dtype == torch.float16 else 4
        scales = torch.randn(shape, dtype=torch.float64, generator=generator)
        return normal * torch.exp2(wide * scales)
    if values == "subnormal":
        return normal * torch.finfo(dtype).tiny / 8
    return normal


Draw = Callable[..., Any]


class Limits(NamedTuple):
    """What to draw from: ``dtypes``, token counts, head dimensions, layouts and values."""

    dtypes: tuple[torch.dtype, ...] = FLOATS
    sizes: tuple[int, ...] = SIZES
    dims: tuple[int, ...] = WIDE_DIMS
    layouts: tuple[str, ...] = LAYOUTS
    values: tuple[str, ...] = VALUES


def _block(draw: Draw, limits: Limits, dtype: torch.dtype, shape: tuple[int, ...]) -> Block:
    return Block(
        shape,
        dtype,
        draw(st.sampled_from(limits.layouts)),
        draw(st.sampled_from(limits.values)),
        draw(st.integers(0, 9)),
    )


def _some(draw: Draw, strategy: st.SearchStrategy[Any]) -> Any:
    """Draw from a strategy in one of two cases, and None in the other."""
    return draw(st.none() | strategy)


_SCALES = st.sampled_from([0.0, -0.3, 0.1, 1.0, 2, 1e-6])
_SOFTCAPS = st.sampled_from([0.0, 0, 50.0, 1, 0.1, 1e-6, 1e30])


def _lengths(draw: Draw, batch: int, most: int) -> Whole | None:
    numbers = st.lists(st.integers(1, most), min_size=batch, max_size=batch)
    values = _some(draw, numbers)
    return None if values is None else _integers(draw, tuple(values))


def _integers(draw: Draw, values: tuple[int, ...]) -> Whole:
    dtype = draw(st.sampled_from([torch.int32, torch.int32, torch.int64, torch.int16, list]))
    return Whole(values, dtype, strided=draw(st.booleans()))


def _sample(draw: Draw, batch: int) -> Whole | None:
    values = _some(draw, st.lists(st.integers(-2, batch - 1), max_size=3))
    return None if values is None else Whole(tuple(values), strided=draw(st.booleans()))


def _mask(
    draw: Draw, limits: Limits, dtype: torch.dtype, shape: tuple[int, ...]
) -> Mask | Block | None:
    kind = draw(st.sampled_from(["none", "none", "seen", "added"]))
    if kind == "none":
        return None
    kept = draw(st.integers(0 if kind == "added" else 1, len(shape)))
    sizes = tuple(draw(st.sampled_from([1, n])) for n in shape[len(shape) - kept :])
    layout = draw(st.sampled_from(limits.layouts)) if sizes else "plain"
    if kind == "seen":
        hidden = len(sizes) > 1 and draw(st.booleans())
        share = draw(st.sampled_from([0.7, 0.0, 1.0]))
        return Mask(sizes, draw(st.integers(0, 9)), share, hidden, layout)
    return _block(draw, limits, draw(st.sampled_from([dtype, torch.float32])), sizes)._replace(
        layout=layout
    )


def _attention(draw: Draw, limits: Limits, any_rank: bool = True) -> dict[str, Any]:
    dtype, dim = draw(st.sampled_from(limits.dtypes)), draw(st.sampled_from(limits.dims))
    batch, kv_heads, group = (draw(st.integers(1, 3)) for _ in range(3))
    rows, cols = (draw(st.sampled_from(limits.sizes)) for _ in range(2))
    outer: tuple[int, ...] = (batch,)
    lengths = _lengths(draw, batch, cols)
    if any_rank and lengths is None:
        outer = draw(st.sampled_from([(batch,), (batch,), (), (2, batch)]))
    heads = kv_heads * group
    mask = _mask(draw, limits, dtype, (*outer, heads, rows, cols))
    return {
        "query": _block(draw, limits, dtype, (*outer, heads, rows, dim)),
        "key": _block(draw, limits, dtype, (*outer, kv_heads, cols, dim)),
        "value": _block(draw, limits, dtype, (*outer, kv_heads, cols, dim)),
        "attn_mask": mask,
        "is_causal": mask is None and draw(st.booleans()),
        "scale": _some(draw, _SCALES),
        "enable_gqa": group > 1 or draw(st.booleans()),
        "key_lengths": lengths,
        "softcap": draw(_SOFTCAPS),
    }


def _packed(draw: Draw, limits: Limits) -> dict[str, Any]:
    batch, tokens = draw(st.integers(1, 3)), draw(st.sampled_from(limits.sizes))
    return {
        "qkv": _qkv(draw, limits, (batch, tokens)),
        "key_lengths": _lengths(draw, batch, tokens),
        "is_causal": draw(st.booleans()),
        "scale": _some(draw, _SCALES),
    }


def _qkv(draw: Draw, limits: Limits, outer: tuple[int, ...]) -> Block:
    dtype, dim = draw(st.sampled_from(limits.dtypes)), draw(st.sampled_from(limits.dims))
    return _block(draw, limits, dtype, (*outer, 3, draw(st.integers(1, 3)), dim))


def _varlen(draw: Draw, limits: Limits) -> dict[str, Any]:
    dtype, dim = draw(st.sampled_from(limits.dtypes)), draw(st.sampled_from(limits.dims))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    count = draw(st.integers(1, 4))
    some = st.lists(st.sampled_from((0, *limits.sizes)), min_size=count, max_size=count)

    def sequences() -> tuple[Whole, int, int]:
        lengths = draw(some)
        starts = _integers(draw, tuple(accumulate(lengths, initial=before)))
        return starts, max(1, *lengths) + draw(st.integers(0, 3)), before + sum(lengths) + after

    starts, longest, rows = sequences()
    rows = max(rows, 1)
    cols, crossed = rows, {}
    if draw(st.booleans()):
        key_starts, key_longest, cols = sequences()
        cols = max(cols, 1)
        crossed = {"cu_seqlens_k": key_starts, "max_seqlen_k": key_longest}
    return {
        "query": _block(draw, limits, dtype, (rows, kv_heads * group, dim)),
        "key": _block(draw, limits, dtype, (cols, kv_heads, dim)),
        "value": _block(draw, limits, dtype, (cols, kv_heads, dim)),
        "cu_seqlens": starts,
        "max_seqlen": longest,
        **crossed,
        "is_causal": draw(st.booleans()),
        "scale": _some(draw, _SCALES),
        "enable_gqa": group > 1 or draw(st.booleans()),
    }


def _cross_covariance(draw: Draw, limits: Limits) -> dict[str, Any]:
    qkv = _qkv(draw, limits, (draw(st.integers(1, 3)), draw(st.sampled_from(limits.sizes))))
    heads = qkv.shape[3]
    temperature = Block(
        draw(st.sampled_from([(heads,), (heads, 1, 1)])),
        draw(st.sampled_from(limits.dtypes)),
        "plain",
        draw(st.sampled_from(["normal", "whole", "zeros"])),
    )
    eps = draw(st.sampled_from([1e-12, 1e-15, 1e-3, 2.0, 5]))
    return {"qkv": qkv, "temperature": temperature, "eps": eps}


def _channel(draw: Draw, limits: Limits) -> dict[str, Any]:
    qkv = _qkv(draw, limits, (draw(st.integers(1, 3)), draw(st.sampled_from(limits.sizes))))
    return {"qkv": qkv, "scale": _some(draw, _SCALES)}


def _window(draw: Draw, limits: Limits) -> dict[str, Any]:
    window = tuple(draw(st.sampled_from([n for n in limits.sizes if n <= 9])) for _ in range(2))
    size = tuple(n * draw(st.integers(1, 3)) for n in window)
    square = window[0] == window[1] and draw(st.booleans())
    return {
        "qkv": _qkv(draw, limits, (draw(st.integers(1, 2)), *size)),
        "window_size": window[0] if square else window,
        "scale": _some(draw, _SCALES),
    }


def _outlook(draw: Draw, limits: Limits) -> dict[str, Any]:
    dtype, dim = draw(st.sampled_from(limits.dtypes)), draw(st.sampled_from(limits.dims))
    kernel = draw(st.sampled_from([1, 2, 3, 3, 4, 5, 7]))
    stride, padding = draw(st.integers(1, min(kernel, 4))), draw(st.integers(0, kernel - 1))
    least = max(1, kernel - 2 * padding)
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    y, x = (draw(st.integers(least, least + 6)) for _ in range(2))
    windows = tuple((n + 2 * padding - kernel) // stride + 1 for n in (y, x))
    return {
        "value": _block(draw, limits, dtype, (batch, y, x, heads, dim)),
        "logits": _block(draw, limits, dtype, (batch, *windows, heads, kernel**2, kernel**2)),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "scale": _some(draw, _SCALES),
    }


def _nystrom(draw: Draw, limits: Limits) -> dict[str, Any]:
    dtype, dim = draw(st.sampled_from(limits.dtypes)), draw(st.sampled_from(limits.dims))
    landmarks = draw(st.sampled_from([n for n in limits.sizes if n <= 33]))
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = landmarks * draw(st.integers(2, 4))
    shape = batch, heads, tokens, dim
    # Three softmaxes and an iterated inverse: of scores far apart the rounding has no bound.
    calm = limits._replace(values=tuple(set(limits.values) & {"normal", "small", "equal", "zeros"}))
    calm = calm._replace(values=tuple(sorted(calm.values)))
    return {name: _block(draw, calm, dtype, shape) for name in ("query", "key", "value")} | {
        "num_landmarks": landmarks,
        "scale": _some(draw, _SCALES),
        "key_lengths": _lengths(draw, batch, tokens),
        "iterations": draw(st.sampled_from([1, 2, 6])),
        "init": draw(st.sampled_from(["matrix", "batch"])),
    }


_ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": _attention,
    "attention_qkvpacked": _packed,
    "attention_varlen": _varlen,
    "cross_covariance_attention": _cross_covariance,
    "channel_attention": _channel,
    "window_attention": _window,
    "outlook_attention": _outlook,
    "nystrom_attention": _nystrom,
}
FUNCTIONS = *_ARGUMENTS, *(f"{name}_with_stats" for name in _ARGUMENTS)


@st.composite
def valid_cases(draw: Draw, function: str, limits: Limits = Limits()) -> FuzzCase:  # noqa: B008
    """Draw a call that must work."""
    build = _ARGUMENTS[function.removesuffix("_with_stats")]
    if function in _ARGUMENTS:
        return FuzzCase(function, build(draw, limits))
    made = build(draw, limits, any_rank=False) if build is _attention else build(draw, limits)
    starts = made.get("cu_seqlens")
    entries = len(starts.values) - 1 if starts else next(iter(made.values())).shape[0]
    return FuzzCase(function, made | {"sample": _sample(draw, entries)})
