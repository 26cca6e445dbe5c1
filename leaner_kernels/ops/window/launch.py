"""Grids, tiles and buffers of the window kernels: what the operators run on a GPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._epilogue import NUM_SUMS, join
from .._launch import launch
from .._launch_cache import MapView, check_tile
from .._tiles import Tile, Tiles, block_dim
from ..operator import Results
from .backward import TILED_TILES as TILED_BACKWARD_TILES
from .backward import TILES as BACKWARD_TILES
from .backward import window_bwd_cols_kernel, window_bwd_kernel, window_bwd_rows_kernel
from .forward import CAPTURE_TILES, window_fwd_kernel
from .forward import TILES as FORWARD_TILES


class QkvView(NamedTuple):
    """A packed map as kernels take it: from q, K is ``stride_k`` away and V ``stride_v``."""

    ptr: Tensor
    stride_b: int
    stride_y: int
    stride_x: int
    stride_k: int
    stride_v: int
    stride_h: int


def forward(inputs: tuple, params: tuple, results: Results) -> None:
    """Fill ``out`` (B, Y, X, H, D), ``lse`` (B, H, Y, X) and any ``stats`` (STATISTICS, B, H)."""
    (qkv,), (out, lse, stats, heads, sample) = inputs, results
    if stats is None:
        attend(qkv, params, out, lse)
        return
    batch, y, x, _, num_heads, _ = qkv.shape
    tile = _tile(FORWARD_TILES, qkv, params[:2])
    parts = y * x // (params[0] * params[1]) * _parts(params, tile["ROWS"])
    of_tiles = lse.new_empty(batch, num_heads, parts, NUM_SUMS)
    attend(qkv, params, out, lse, of_tiles)
    join(of_tiles, stats, y * x)
    if sample is not None:
        attend(qkv, params, heads, sample=sample)


def attend(
    qkv: Tensor,
    params: tuple[Any, ...],
    out: Tensor,
    lse: Tensor | None = None,
    parts: Tensor | None = None,
    sample: Tensor | None = None,
) -> None:
    """Fill ``out``, ``lse`` and any ``parts``, or heads (S, Y * X, H * D) of sampled maps."""

    def prepare() -> Any:
        tile = _tile(FORWARD_TILES if sample is None else CAPTURE_TILES, qkv, params[:2])
        arguments = _shared(qkv, params) | {
            "B": qkv.shape[0],
            "STATS": parts is not None,
            "CAPTURE": sample is not None,
            **tile.arguments,
        }
        return (_windows(qkv, params, len(out)) * _parts(params, tile["ROWS"]),), arguments

    tensors = {"qkv_view": qkv, "out_ptr": out, "lse_ptr": lse}
    tensors |= {"parts_ptr": parts, "sample_ptr": sample}
    launch(window_fwd_kernel, tensors, params, prepare)


def backward(grad: Tensor, inputs: tuple, params: tuple, lse: Tensor, grads: list) -> None:
    """Fill dqkv (B, Y, X, 3, H, D)."""
    (qkv,), (dqkv,) = inputs, grads
    windows = _windows(qkv, params, len(qkv))
    whole = choose(BACKWARD_TILES, qkv, params[:2])

    def prepare(owned: str) -> Any:
        arguments = _shared(qkv, params) | {"do_view": MapView(grad, *grad.stride()[:4])}
        if whole is not None:
            return (windows,), arguments | {"BLOCK": whole["ROWS"], **whole.options}
        tile = _tile(TILED_BACKWARD_TILES, qkv, params[:2])
        return (windows * _parts(params, tile[owned]),), arguments | tile.arguments

    tensors = {"qkv_view": qkv, "do_view": grad, "dqkv_ptr": dqkv}
    if whole is not None:
        launch(window_bwd_kernel, tensors, params, lambda: prepare(""))
        return
    tensors |= {"lse_ptr": lse, "delta_ptr": torch.empty_like(lse)}
    launch(window_bwd_rows_kernel, tensors, params, lambda: prepare("ROWS"))
    launch(window_bwd_cols_kernel, tensors, params, lambda: prepare("COLS"))


def choose(tiles: Tiles, qkv: Tensor, window: tuple[int, int]) -> Tile | None:
    """Return a kernel's tile, cut to the window; None where the kernel does not take the call."""
    tokens = window[0] * window[1]
    size, dim = qkv.element_size(), block_dim(qkv.shape[-1])
    rule = tiles.find(qkv.device, size=size, dim=dim, tokens=tokens)
    block = block_dim(tokens)
    return None if rule is None else rule.tile.at_most(ROWS=block, COLS=block)


def _tile(tiles: Tiles, qkv: Tensor, window: tuple[int, int]) -> Tile:
    tile = choose(tiles, qkv, window)
    assert tile is not None
    return tile


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


def _windows(qkv: Tensor, params: tuple[Any, ...], maps: int) -> int:
    """Return how many heads of windows so many maps have."""
    _, y, x, _, heads, _ = qkv.shape
    return maps * (y // params[0]) * (x // params[1]) * heads


def _parts(params: tuple[Any, ...], owned: int) -> int:
    """Return how many programs share a head of a window."""
    return -(-params[0] * params[1] // owned)
