"""Which kernel of softmax attention runs a shape, and with which tile.

The rules are data (``leaner_kernels.ops._tiles``). A shape that no rule of a kernel takes is left
to those that walk over keys, of which ``default.toml`` has a tile for every call.
"""

from typing import Any

from torch import Tensor

from leaner_kernels.ops import _tiles
from leaner_kernels.ops._tiles import Tile, block_dim

HOPPER, AMPERE = (90,), (80, 86, 87, 89)  # what the kernels in Gluon are written for
SHORT_TOKENS = 256  # the most that a backward has whose programs own a head
ENOUGH_PROGRAMS = 264  # two for each of an H200's 132 SMs
LEAST_SCALE = 1e-30


def cut(keys: int, largest: int) -> tuple[tuple[int, int], ...]:
    """Return (start, size) of segments that hold the keys: powers of two, 16 to ``largest``.

    >>> cut(197, 128)
    ((0, 128), (128, 64), (192, 16))
    """
    segments, start = [], 0
    while start < keys:
        left = keys - start
        size = 16
        while size * 2 <= min(left, largest):
            size *= 2
        # One segment half empty beats two: each costs its own products and reductions.
        if size < left and size * 2 <= largest and left > size + size // 2:
            size *= 2
        segments.append((start, size))
        start += size
    return tuple(segments)


def features(
    attn_mask: Tensor | None,
    seed: Tensor | None,
    query: Tensor,
    *others: Tensor,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> frozenset[str]:
    """Return what a call asks for beyond causal or shortened rows: it takes registers.

    ``odd`` is a head dimension that does not fill its tile; ``unaligned`` is one, or a stride of
    the ``query`` or ``others``, that is no multiple of 16: rows are then not known to start where
    16 bytes can be copied at once. ``scale`` is one that is not positive, or not a number that
    float32 can hold: the maximum of a row cannot be found before it is scaled.
    """
    dim = query.shape[-1]
    strides = (stride for t in (query, *others) for stride in t.stride()[:-1])
    wanted = {
        "mask": attn_mask is not None,
        "dropout": seed is not None,
        "softcap": softcap != 0,
        "scale": scale < LEAST_SCALE,
        "odd": dim != block_dim(dim),
        "unaligned": dim % 16 != 0 or any(stride % 16 for stride in strides),
    }
    return frozenset(name for name, present in wanted.items() if present)


def short(kernel: str, query: Tensor, tokens: int, features: frozenset[str]) -> Tile | None:
    """Return the tile of a short-sequence kernel; ``tokens`` is the longer of rows and keys.

    ``BLOCK`` is rows of a tile in the forward and keys of a tile in the backward. What stays on
    chip is cut into segments of at most ``largest_segment`` for the most ``tokens`` that the rule
    takes, so that a rule is one kernel to compile and not one for each length.
    """
    rule = _find(kernel, query, tokens, features)
    return None if rule is None else rule["tile"].replace(tokens=rule["tokens"])


def hopper(kernel: str, query: Tensor, key: Tensor, features: frozenset[str]) -> Tile | None:
    """Return the tile of a kernel that is written for Hopper alone, whose tiles are 64 rows.

    ``IN_REGISTERS`` keeps a tile of Q in the backward, then of K, in registers, so that more
    programs fit on an SM; with a tail in columns it stays in shared memory. ``PAIRED``
    passes two tiles of rows over the keys together in the forward; without a tail in
    columns, mask or dropout.
    """
    return _in_gluon(kernel, HOPPER, query, key, features)


def ampere(kernel: str, query: Tensor, key: Tensor, features: frozenset[str]) -> Tile | None:
    """Return the tile of a kernel that is written for Ampere and Ada alone.

    ``BLOCK`` is the rows of a tile, or its keys, 16 or 32 of a warp; ``STEP`` how many keys, or
    rows, it sees at a time.
    """
    return _in_gluon(kernel, AMPERE, query, key, features)


def _in_gluon(
    kernel: str, gpus: tuple[int, ...], query: Tensor, key: Tensor, features: frozenset[str]
) -> Tile | None:
    batch, heads, tokens, _ = query.shape
    if _tiles.capability(query.device) not in gpus or key.shape[2] != tokens:
        return None
    # A program each, a few heads would leave most of a GPU idle. Other kernels spread a head over
    # several, all but the backward of short ones.
    spread = tokens > SHORT_TOKENS or not kernel.endswith("backward")
    if spread and batch * heads < ENOUGH_PROGRAMS:
        return None
    if key.shape[1] != heads:
        features |= {"shared"}
    rule = _find(kernel, query, tokens, features)
    return None if rule is None else rule["tile"]


def multihead(kernel: str, query: Tensor, key: Tensor, features: frozenset[str]) -> Tile | None:
    """Return the tile of a multihead kernel: heads of a program, rows and columns of a head's."""
    rows, cols = (block_dim(t.shape[2]) for t in (query, key))
    rule = _find(kernel, query, max(rows, cols), features)
    return None if rule is None else rule["tile"].replace(ROWS=rows, COLS=cols)


def warp_multihead(
    kernel: str, query: Tensor, key: Tensor, features: frozenset[str]
) -> Tile | None:
    """Return the tile of a kernel whose warps own heads, at most ``HEADS`` of them."""
    gpus = *AMPERE, *HOPPER
    if _tiles.capability(query.device) not in gpus or key.shape != query.shape:
        return None
    rule = _find(kernel, query, query.shape[2], features)
    return None if rule is None else rule["tile"]


def online(kernel: str, query: Tensor, features: frozenset[str]) -> Tile:
    """Return the tile of a kernel that walks over any length: query rows and key columns."""
    rule = _find(kernel, query, 0, features)
    assert rule is not None, (kernel, query.shape, features)
    return rule["tile"]


def _find(
    kernel: str, query: Tensor, tokens: int, features: frozenset[str]
) -> dict[str, Any] | None:
    return _tiles.find_rule(
        "attention",
        kernel,
        query.device,
        element_size=query.element_size(),
        dim=block_dim(query.shape[-1]),
        tokens=tokens,
        features=features,
    )
