"""Grids, tiles and buffers of the window kernels: what the operators run on a GPU."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._epilogue import NUM_SUMS, join
from .._launch_cache import Launch, LaunchCache, MapView, check_tile, layout
from .._tiles import Tile, Tiles, block_dim
from .backward import TILES as BACKWARD_TILES
from .backward import window_bwd_kernel
from .forward import CAPTURE_TILES, window_fwd_kernel
from .forward import TILES as FORWARD_TILES
from .tiled_backward import TILES as TILED_BACKWARD_TILES
from .tiled_backward import window_bwd_cols_kernel, window_bwd_rows_kernel

_forward_cache = LaunchCache(("qkv_view", "out_ptr", "lse_ptr"))
_statistics_cache = LaunchCache(("qkv_view", "out_ptr", "lse_ptr"), scratch="parts_ptr")
_capture_cache = LaunchCache(("qkv_view", "out_ptr", "sample_ptr"))
_backward_cache = LaunchCache(("qkv_view", "do_view", "dqkv_ptr"))
_TILED = "qkv_view", "do_view", "dqkv_ptr", "lse_ptr", "delta_ptr"
_tiled_caches = {name: LaunchCache(_TILED) for name in ("rows", "cols")}


class QkvView(NamedTuple):
    """A packed map as kernels take it: from q, K is ``stride_k`` away and V ``stride_v``."""

    ptr: Tensor
    stride_b: int
    stride_y: int
    stride_x: int
    stride_k: int
    stride_v: int
    stride_h: int


def forward(
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    out: Tensor,
    lse: Tensor,
    stats: Tensor | None,
    heads: Tensor | None,
    sample: Tensor | None,
) -> None:
    """Fill ``out`` (B, Y, X, H, D), ``lse`` (B, H, Y, X) and any ``stats`` (STATISTICS, B, H)."""
    (qkv,) = inputs
    if stats is None or heads is None:
        tensors, kind = (qkv, out, lse), _kind(qkv, params)
        if not _forward_cache.run(kind, tensors):
            launch = _forward(qkv, params, out_ptr=out, lse_ptr=lse)
            _forward_cache.start(kind, launch, tensors)
        return
    _statistics(qkv, params, out, lse, stats)
    if sample is not None and sample.shape[0] > 0:
        capture(qkv, params, heads, sample)


def capture(qkv: Tensor, params: tuple[Any, ...], heads: Tensor, sample: Tensor) -> None:
    """Fill heads (S, Y * X, H * D) float32 of the maps that ``sample`` (S,) int32 names."""
    sample = sample.contiguous()
    _capture_cache.launch(
        _kind(qkv, params, len(sample)),
        (qkv, heads, sample),
        lambda: _forward(qkv, params, "capture", out_ptr=heads, sample_ptr=sample),
    )


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    lse: Tensor,
    grads: Sequence[Tensor],
) -> None:
    """Fill dqkv (B, Y, X, 3, H, D)."""
    (qkv,), (dqkv,) = inputs, grads
    tile = choose(BACKWARD_TILES, qkv, params[:2])
    if tile is None:
        _tiled_backward(grad, qkv, params, lse, dqkv)
        return
    tensors, kind = (qkv, grad, dqkv), _kind(qkv, params, grad.stride(), grad.dtype)
    if _backward_cache.run(kind, tensors):
        return
    arguments = _shared(qkv, params) | _gradients(grad, dqkv)
    arguments |= {"BLOCK": tile["ROWS"], **tile.options}
    launch = Launch(window_bwd_kernel, (_windows(qkv, params),), arguments)
    _backward_cache.start(kind, launch, tensors)


def _tiled_backward(
    grad: Tensor, qkv: Tensor, params: tuple[Any, ...], lse: Tensor, dqkv: Tensor
) -> None:
    tensors = qkv, grad, dqkv, lse, torch.empty_like(lse)
    kind = _kind(qkv, params, grad.stride(), grad.dtype)

    def prepare(kernel: Any, name: str) -> Launch:
        tile = choose(TILED_BACKWARD_TILES, qkv, params[:2])
        assert tile is not None
        owned = tile["ROWS" if name == "rows" else "COLS"]
        grid = (_windows(qkv, params) * _parts(params, owned),)
        arguments = _shared(qkv, params) | _gradients(grad, dqkv) | tile.arguments
        return Launch(kernel, grid, arguments | dict(zip(_TILED[3:], tensors[3:])))

    for kernel, name in ((window_bwd_rows_kernel, "rows"), (window_bwd_cols_kernel, "cols")):
        _tiled_caches[name].launch(kind, tensors, partial(prepare, kernel, name))


def _statistics(
    qkv: Tensor, params: tuple[Any, ...], out: Tensor, lse: Tensor, stats: Tensor
) -> None:
    """Fill ``out``, ``lse`` and ``stats`` (STATISTICS, B, H)."""
    batch, y, x, _, heads, _ = qkv.shape

    def prepare() -> Launch:
        tile = choose(FORWARD_TILES, qkv, params[:2])
        assert tile is not None
        parts = _windows(qkv, params) // (batch * heads) * _parts(params, tile["ROWS"])
        of_tiles = lse.new_empty(batch, heads, parts, NUM_SUMS)
        return _forward(qkv, params, "statistics", out_ptr=out, lse_ptr=lse, parts_ptr=of_tiles)

    parts = _statistics_cache.launch(_kind(qkv, params), (qkv, out, lse), prepare)
    assert parts is not None
    join(parts, stats, y * x)


def choose(tiles: Tiles, qkv: Tensor, window: tuple[int, int]) -> Tile | None:
    """Return a kernel's tile, cut to the window; None where the kernel does not take the call."""
    tokens = window[0] * window[1]
    size, dim = qkv.element_size(), block_dim(qkv.shape[-1])
    rule = tiles.find(qkv.device, size=size, dim=dim, tokens=tokens)
    block = block_dim(tokens)
    return None if rule is None else rule.tile.at_most(ROWS=block, COLS=block)


def _forward(
    qkv: Tensor,
    params: tuple[Any, ...],
    *features: str,
    out_ptr: Tensor,
    lse_ptr: Tensor | None = None,
    parts_ptr: Tensor | None = None,
    sample_ptr: Tensor | None = None,
) -> Launch:
    """Return the launch that attends; ``features`` may be statistics or capture.

    ``out_ptr`` is (B, Y, X, H, D), or heads (S, Y * X, H * D) of the sampled maps.
    """
    tiles = CAPTURE_TILES if "capture" in features else FORWARD_TILES
    tile = choose(tiles, qkv, params[:2])
    assert tile is not None
    maps = out_ptr.shape[0]
    arguments = _shared(qkv, params) | {
        "out_ptr": out_ptr,
        "lse_ptr": lse_ptr,
        "parts_ptr": parts_ptr,
        "sample_ptr": sample_ptr,
        "B": qkv.shape[0],
        "STATS": "statistics" in features,
        "CAPTURE": "capture" in features,
        **tile.arguments,
    }
    grid = (_windows(qkv, params, maps) * _parts(params, tile["ROWS"]),)
    return Launch(window_fwd_kernel, grid, arguments)


def _shared(qkv: Tensor, params: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments that every kernel takes."""
    _, y, x, _, heads, dim = qkv.shape
    rows, cols, scale = params
    stride_b, stride_y, stride_x, part, stride_h, _ = qkv.stride()
    # Offsets are 64-bit, but for that of the next pixel of dqkv.
    check_tile("pixels of qkv's gradient", 2, 3 * heads * dim)
    return {
        # Doubled here, and not in the kernels, where it might not fit 32 bits.
        "qkv_view": QkvView(qkv, stride_b, stride_y, stride_x, part, 2 * part, stride_h),
        "H": heads,
        "windows_y": y // rows,
        "windows_x": x // cols,
        "scale": scale,
        "WINDOW_Y": rows,
        "WINDOW_X": cols,
        "D": dim,
        "BLOCK_D": block_dim(dim),
    }


def _gradients(grad: Tensor, dqkv: Tensor) -> dict[str, Any]:
    return {"do_view": MapView(grad, *grad.stride()[:4]), "dqkv_ptr": dqkv}


def _windows(qkv: Tensor, params: tuple[Any, ...], maps: int | None = None) -> int:
    """Return how many heads of windows there are, in the whole batch or in so many maps."""
    batch, y, x, _, heads, _ = qkv.shape
    return (batch if maps is None else maps) * (y // params[0]) * (x // params[1]) * heads


def _parts(params: tuple[Any, ...], owned: int) -> int:
    """Return how many programs share a head of a window."""
    return -(-params[0] * params[1] // owned)


def _kind(qkv: Tensor, params: tuple[Any, ...], *others: Hashable) -> Hashable:
    """Return what sets calls apart beside the addresses of their tensors."""
    return qkv.device.index, layout(qkv), params, *others
