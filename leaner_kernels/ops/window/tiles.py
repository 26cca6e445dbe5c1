"""Which tile a call takes: by kernel, bytes of an element and head dimension, whatever the GPU.

Held to zero spills on sm_80, sm_86 and sm_90 by tests/aot; chosen by what bench/gpu_model predicts
and by the residency of the compiled code, not yet timed.
"""

from typing import NamedTuple

from torch import Tensor


class Tiles(NamedTuple):
    """Rows and columns of a tile of scores, of one head of a window."""

    ROWS: int
    COLS: int
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        """The launch options, by name."""
        return {"num_warps": self.num_warps, "num_stages": 1}

    @property
    def arguments(self) -> dict[str, int]:
        """What a kernel that walks over tiles is launched with, by name."""
        return {"ROWS": self.ROWS, "COLS": self.COLS, **self.options}


# In half precision, a window of up to 64 tokens is one tile. A program has one head: Triton gives
# warps whole heads, of which several would compute the same one. Warps of a program; in the
# forward, with statistics or without, one for each 16 rows. In the backward the scores and their
# gradients take the registers of four warps.
WHOLE_TOKENS = 64
WHOLE = {
    "forward": {16: 4, 32: 4, 64: 4},
    "statistics": {16: 4, 32: 4, 64: 4},
    "capture": {16: 4, 32: 4, 64: 8},
    "backward": {16: 4, 32: 4, 64: 8},
}
# Any window, in tiles: by bytes of an element and head dimension.
TILED = {
    (2, 16): Tiles(32, 64, 4),
    (2, 32): Tiles(32, 64, 4),
    (2, 64): Tiles(32, 64, 8),
    (2, 128): Tiles(32, 32, 8),
    (4, 16): Tiles(32, 32, 8),
    (4, 32): Tiles(32, 32, 8),
    (4, 64): Tiles(16, 16, 4),
    (4, 128): Tiles(16, 16, 8),
}


def choose(kernel: str, qkv: Tensor, window: tuple[int, int]) -> Tiles | None:
    """Return the tile of a kernel; None for a backward in one launch that does not take the call.

    ``kernel`` is one of ``WHOLE``, or backward_rows or backward_cols, which take every call.
    """
    tokens, dim = window[0] * window[1], block_dim(qkv.shape[-1])
    block = max(16, power_of_2(tokens))
    if qkv.element_size() == 2 and tokens <= WHOLE_TOKENS and dim in WHOLE.get(kernel, ()):
        warps = WHOLE[kernel][dim]
        if kernel in ("forward", "statistics"):
            warps = min(warps, block // 16)
        return Tiles(block, block, warps)
    if kernel == "backward":
        return None
    tiles = TILED[qkv.element_size(), dim]
    return tiles._replace(ROWS=min(tiles.ROWS, block), COLS=min(tiles.COLS, block))


def block_dim(dim: int) -> int:
    """Return the head dimension of the tile: a power of two, at least 16."""
    return max(16, power_of_2(dim))


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()
