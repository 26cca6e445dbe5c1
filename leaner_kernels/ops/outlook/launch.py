"""How the kernels of outlook attention are launched: grids, tiles, arguments."""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from .._launch import launch
from .._launch_cache import LARGEST_OFFSET, MapView
from .._tiles import Tile, Tiles, power_of_2
from ..operator import Results
from .backward import TILES as BACKWARD_TILES
from .backward import _outlook_bwd_kernel
from .forward import TILES as FORWARD_TILES
from .forward import _outlook_fwd_kernel
from .reference import num_windows


class LogitsView(NamedTuple):
    """Logits as kernels take them: strides of entry, window's row and column, head and place."""

    ptr: Tensor
    stride_b: int
    stride_y: int
    stride_x: int
    stride_h: int
    stride_a: int


def forward(inputs: tuple, params: tuple, results: Results) -> None:
    """Fill ``out`` (B, Y, X, H, D), ``lse`` (B, H, y, x, K * K), any ``stats`` and ``heads``."""
    attend(inputs, params, *results[:3])
    if results.sample is not None:
        attend(inputs, params, results.heads, sample=results.sample)


def attend(
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    out: Tensor,
    lse: Tensor | None = None,
    stats: Tensor | None = None,
    sample: Tensor | None = None,
) -> None:
    """Fill ``out``, ``lse`` and any ``stats`` (statistics, B, H), or heads (S, Y * X, H * D)."""

    def prepare() -> Any:
        arguments = shared_arguments(inputs, params)
        tile = choose(FORWARD_TILES, arguments, inputs[0])
        # With statistics one program owns a head, so that its sums are complete, in one order.
        parts = 1 if stats is not None else -(-arguments["CELLS"] // tile["BLOCK"])
        arguments |= {"PARTS": parts, **tile.arguments}
        return (len(out) * arguments["H"] * parts,), arguments

    tensors = {"v_view": inputs[0], "logits_view": inputs[1], "out_ptr": out, "lse_ptr": lse}
    tensors |= {"stats_ptr": stats, "sample_ptr": sample}
    launch(_outlook_fwd_kernel, tensors, params, prepare)


def backward(grad: Tensor, inputs: tuple, params: tuple, lse: Tensor, grads: list) -> None:
    """Fill dvalue (B, Y, X, H, D) and dlogits (B, y, x, H, K * K, K * K), both contiguous."""
    # Inside a batch entry offsets are 32-bit: of a view of something larger they would not fit.
    extent = sum((size - 1) * stride for size, stride in zip(grad.shape[1:], grad.stride()[1:]))
    if extent > LARGEST_OFFSET:
        grad = grad.contiguous()

    def prepare() -> Any:
        arguments = shared_arguments(inputs, params)
        tile = choose(BACKWARD_TILES, arguments, inputs[0], grad)
        windows = arguments["WINDOWS_Y"] * arguments["WINDOWS_X"]
        window_parts = -(-windows // tile["BLOCK"])
        parts = window_parts + -(-arguments["CELLS"] // tile["BLOCK"])
        arguments |= {
            "do_view": MapView(grad, *grad.stride()[:4]),
            "WINDOW_PARTS": window_parts,
            "PARTS": parts,
            "BLOCK_COLS": power_of_2(arguments["K"] ** 2),
            **tile.arguments,
        }
        return (len(grad) * arguments["H"] * parts,), arguments

    tensors = {"v_view": inputs[0], "logits_view": inputs[1], "do_view": grad, "lse_ptr": lse}
    tensors |= dict(zip(("dv_ptr", "dlogits_ptr"), grads))
    launch(_outlook_bwd_kernel, tensors, params, prepare)


def shared_arguments(inputs: tuple[Tensor, ...], params: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments by name that both kernels take."""
    value, logits = inputs
    *window, scale = params
    kernel_size, stride, padding = window
    _, y, x, heads, dim = value.shape
    windows = [num_windows(size, (kernel_size, stride, padding)) for size in (y, x)]
    # Cells start where the first window starts, and hold the map and all windows.
    ends = [
        max(size, (count - 1) * stride - padding + kernel_size)
        for size, count in zip((y, x), windows)
    ]
    cells = [-(-(end + padding) // stride) for end in ends]
    return {
        "v_view": MapView(value, *value.stride()[:4]),
        "logits_view": LogitsView(logits, *logits.stride()[:5]),
        "B": value.shape[0],
        "H": heads,
        "Y": y,
        "X": x,
        "WINDOWS_Y": windows[0],
        "WINDOWS_X": windows[1],
        "CELLS_X": cells[1],
        "CELLS": cells[0] * cells[1],
        "scale": scale,
        "K": kernel_size,
        "STRIDE": stride,
        "PADDING": padding,
        "REACH": -(-kernel_size // stride),
        "PLACES": places(kernel_size, stride),
        "D": dim,
        "BLOCK_D": power_of_2(dim),
        # Triton 3.10 turns multiply-add fusion off by default.
        "enable_fp_fusion": True,
    }


@cache
def places(kernel_size: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Return the place of each pixel of a cell, in rows, in each window that can hold it; -1: none.

    Windows come in the order of the kernels: the cell's own, then those that start before it.
    """
    reach = -(-kernel_size // stride)

    def place(a_y: int, a_x: int) -> int:
        return a_y * kernel_size + a_x if max(a_y, a_x) < kernel_size else -1

    cell = list(product(range(stride), repeat=2))
    return tuple(
        tuple(place(y + t_y * stride, x + t_x * stride) for y, x in cell)
        for t_y, t_x in product(range(reach), repeat=2)
    )


def choose(tiles: Tiles, arguments: dict[str, Any], *pixels: Tensor) -> Tile:
    """Return the tile for loads of ``pixels``; ``BLOCK`` is cells or windows of a program.

    There are no more windows than threads, or Triton moves what it holds of them through shared
    memory.
    """
    wanted = {
        "padded_dim": arguments["D"] != arguments["BLOCK_D"],
        # Triton tells alignment by what is a multiple of 16.
        "unaligned": any(stride % 16 for t in pixels for stride in t.stride()[:-1]),
        "wide": arguments["K"] > 3,
    }
    tile = tiles.tile(
        pixels[0].device,
        size=pixels[0].element_size(),
        features=frozenset(name for name, present in wanted.items() if present),
    )
    crowding = power_of_2(arguments["STRIDE"] ** 2) // 4 or 1
    block = tile["ELEMENTS"] // (arguments["BLOCK_D"] * crowding)
    return Tile({"BLOCK": max(1, min(64, block)), "HELD": tile["HELD"]}, tile.options)
