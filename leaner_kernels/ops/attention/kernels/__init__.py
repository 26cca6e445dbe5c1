"""The kernels of softmax attention, in Triton and Gluon, and the calls that each supports.

A forward and a backward each, by the number of tokens: ``warp_multihead`` (a warp owns heads),
``short`` (a program owns a head, K and V on chip, and so ``hopper`` and ``ampere`` for these
architectures) and ``online`` (any length). A call gets the first kernel whose limits it keeps and
whose table of tiles, in the kernel's file, has a rule for it; ``online`` computes all others.
"""

from typing import NamedTuple

from ..._tiles import ANY

MAX_ENTRIES = 65_535 - 128  # a grid's second axis, less the spare programs of a varlen batch


class Limits(NamedTuple):
    """The requirements of a kernel that its table of tiles does not state.

    Attributes:
        family: the ``kernels`` of the GPUs that it is for, or None for all that have tiles.
        free: features that cost it no registers, so that no rule lists them.
        gluon: whether it is written in Gluon: operands of one dtype, aligned to 16 bytes, and
            within 32-bit offsets.
        pairs: whether rows must consist of 32-bit words.
        most_entries: the largest batch.
        least_tokens: the smallest number of rows.
        most_tokens: the largest number of rows.
        square_from: the number of tokens from which there must be as many keys as rows.
        many_heads_from: the number of rows from which batch x heads must fill the GPU, because a
            program owns a head; the kernels for any length spread a head over several programs.
        fenced_dropout: whether dropout needs a Triton that keeps operands ahead of their fences.
    """

    family: str | None = None
    free: frozenset[str] = frozenset()
    gluon: bool = False
    pairs: bool = False
    most_entries: int = ANY
    least_tokens: int = 0
    most_tokens: int = ANY
    square_from: int = ANY
    many_heads_from: int = ANY
    fenced_dropout: bool = False


_WARP = Limits(gluon=True, pairs=True, most_tokens=16, square_from=0)
# Beyond 64 tokens, the row of a class token would leave most of a tile to padding.
_SHORT = Limits(free=frozenset({"shared"}), square_from=65)
_AMPERE = Limits(
    family="ampere",
    gluon=True,
    most_entries=MAX_ENTRIES,
    least_tokens=65,
    square_from=0,
    many_heads_from=0,
)
_HOPPER = _AMPERE._replace(family="hopper")

# Kernels by the names of their tables, in order of preference.
FORWARD = {
    "warp_multihead_forward": _WARP,
    "hopper_forward": _HOPPER,
    "ampere_forward": _AMPERE,
    "short_forward": _SHORT,
}
STATISTICS = {
    "warp_multihead_forward_statistics": _WARP,
    "hopper_forward_statistics": _HOPPER,
    "ampere_forward_statistics": _AMPERE,
    "hopper_long_forward_statistics": _HOPPER,
    "short_forward_statistics": _SHORT,
}
# Up to 256 rows a backward owns a head, however few the heads are. No rule lists shared heads: only
# ``online`` sums the gradients of a key head over its query heads.
_HOPPER_BACKWARD = _HOPPER._replace(many_heads_from=257, fenced_dropout=True)
BACKWARD = {
    "warp_multihead_backward": _WARP,
    "hopper_resident_backward": _HOPPER_BACKWARD,
    "hopper_backward": _HOPPER_BACKWARD,
    "ampere_backward": _AMPERE._replace(many_heads_from=257),
    "short_backward": Limits(square_from=65),
}
# Those that sum the gradients over tokens, for the bias of a projection.
SUMS_BIAS = frozenset({"hopper_resident_backward"})
