"""Which kernel runs a shape, and with which tile: data by architecture, read from ``tuned/``.

Each file lists rules for the kernels; the first that fits wins, and a shape that none fits runs
the kernels that walk over keys and take any length. Nothing is searched when a user's model takes
its first step. ``python -m bench.tune`` measures candidates on a GPU and prints the rules that won
there.
"""

import tomllib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ShortTile(NamedTuple):
    """A tile of the short-sequence kernels.

    ``tokens`` is the most that it takes: what stays on chip is cut into segments of at most
    ``largest_segment`` for so many, so that a rule is one kernel to compile and not one for each
    length. ``BLOCK`` is rows of a tile in the forward and keys of a tile in the backward.
    ``maxnreg`` set to all 255 registers keeps ptxas from spilling a few of them to fit one more
    program beside.
    """

    tokens: int
    BLOCK: int
    largest_segment: int
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The launch options, by name."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Start and size of each segment."""
        return cut(self.tokens, self.largest_segment)


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


class MultiheadTile(NamedTuple):
    """Heads of a program, and rows and columns of a head's tile of scores."""

    HEADS: int
    ROWS: int
    COLS: int
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None


class WarpMultiheadTile(NamedTuple):
    """The most heads of a warp, and the warps of a program."""

    HEADS: int
    num_warps: int
    maxnreg: int | None = None


class HopperTile(NamedTuple):
    """Registers that the kernels for Hopper leave a thread, whose tiles are always 64 rows.

    ``IN_REGISTERS`` keeps a tile of Q in the backward, then of K, in registers, so that more
    programs fit on an SM; with a tail in columns it stays in shared memory. ``PAIRED``
    passes two tiles of rows over the keys together in the forward; without a tail in
    columns, mask or dropout.
    """

    maxnreg: int | None = None
    IN_REGISTERS: bool = False
    PAIRED: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The launch options, by name."""
        return {"num_warps": 4, "maxnreg": self.maxnreg}


class AmpereTile(NamedTuple):
    """A tile of the kernels for Ampere and Ada.

    ``BLOCK`` is the rows of a tile, or its keys, 16 or 32 of a warp; ``STEP`` how many keys, or
    rows, it sees at a time.
    """

    STEP: int
    maxnreg: int | None = None
    num_warps: int = 4
    BLOCK: int = 64

    @property
    def options(self) -> dict[str, Any]:
        """The launch options, by name."""
        return {"num_warps": self.num_warps, "maxnreg": self.maxnreg}


ARCHITECTURES = 80, 86, 90
HOPPER, AMPERE = (90,), (80, 86, 87, 89)  # what the kernels in Gluon are written for
SHORT_TOKENS = 256  # the most that a backward has whose programs own a head
ENOUGH_PROGRAMS = 264  # two for each of an H200's 132 SMs
LEAST_SCALE = 1e-30


def capability(device: torch.device) -> int:
    """Return 10 * major + minor of a GPU, or of the newest that is tuned for, without one."""
    if device.type != "cuda":
        return ARCHITECTURES[-1]
    # A constant to torch.compile, which get_device_capability is not.
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor


def architecture(capability: int) -> int:
    """Return the tuned architecture whose limits a GPU keeps: shared memory, above all.

    GPUs for desks and laptops (8.6, 8.9, 12.x) have 99 KiB for a program, the others 163 or more.
    """
    if capability in (86, 87, 89) or capability >= 120:
        return 86
    return 90 if capability >= 90 else 80


@cache
def rules(architecture: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of each kernel on one architecture."""
    file = resources.files(str(__package__)) / "tuned" / f"sm_{architecture}.toml"
    return tomllib.loads(file.read_text("utf-8"))


def features(
    attn_mask: Tensor | None,
    seed: Tensor | None,
    query: Tensor,
    *others: Tensor,
    softcap: float = 0.0,
) -> frozenset[str]:
    """Return what a call asks for beyond causal or shortened rows: it takes registers.

    ``odd`` is a head dimension that does not fill its tile; ``unaligned`` is one, or a stride of
    the ``query`` or ``others``, that is no multiple of 16: rows are then not known to start where
    16 bytes can be copied at once.
    """
    dim = query.shape[-1]
    strides = (stride for t in (query, *others) for stride in t.stride()[:-1])
    wanted = {
        "mask": attn_mask is not None,
        "dropout": seed is not None,
        "softcap": softcap != 0,
        "odd": dim != block_dim(query),
        "unaligned": dim % 16 != 0 or any(stride % 16 for stride in strides),
    }
    return frozenset(name for name, present in wanted.items() if present)


def short(
    kernel: str, query: Tensor, tokens: int, features: frozenset[str], scale: float
) -> ShortTile | None:
    """Return the tile of a short-sequence kernel; ``tokens`` is the longer of rows and keys."""
    # The maximum of a row is found before it is scaled, by a number that float32 can hold.
    if scale < LEAST_SCALE:
        return None
    rule = _find(kernel, query, tokens, features)
    return None if rule is None else ShortTile(rule["tokens"], **rule["tile"])


def hopper(
    kernel: str, query: Tensor, key: Tensor, features: frozenset[str], scale: float
) -> HopperTile | None:
    """Return the tile of a kernel that is written for Hopper alone."""
    rule = _in_gluon(kernel, HOPPER, query, key, features, scale)
    return None if rule is None else HopperTile(**rule["tile"])


def ampere(
    kernel: str, query: Tensor, key: Tensor, features: frozenset[str], scale: float
) -> AmpereTile | None:
    """Return the tile of a kernel that is written for Ampere and Ada alone."""
    rule = _in_gluon(kernel, AMPERE, query, key, features, scale)
    return None if rule is None else AmpereTile(**rule["tile"])


def _in_gluon(
    kernel: str,
    gpus: tuple[int, ...],
    query: Tensor,
    key: Tensor,
    features: frozenset[str],
    scale: float,
) -> dict[str, Any] | None:
    batch, heads, tokens, _ = query.shape
    if scale < LEAST_SCALE or capability(query.device) not in gpus or key.shape[2] != tokens:
        return None
    # A program each, a few heads would leave most of a GPU idle. Other kernels spread a head over
    # several, all but the backward of short ones.
    spread = tokens > SHORT_TOKENS or not kernel.endswith("backward")
    if spread and batch * heads < ENOUGH_PROGRAMS:
        return None
    if key.shape[1] != heads:
        features |= {"shared"}
    return _find(kernel, query, tokens, features)


def multihead(
    kernel: str, query: Tensor, key: Tensor, features: frozenset[str]
) -> MultiheadTile | None:
    """Return the tile of a multihead kernel."""
    rows, cols = (max(16, power_of_2(t.shape[2])) for t in (query, key))
    rule = _find(kernel, query, max(rows, cols), features)
    return None if rule is None else MultiheadTile(ROWS=rows, COLS=cols, **rule["tile"])


def warp_multihead(
    kernel: str, query: Tensor, key: Tensor, features: frozenset[str], scale: float
) -> WarpMultiheadTile | None:
    """Return the tile of a kernel whose warps own heads."""
    gpus = *AMPERE, *HOPPER
    if scale < LEAST_SCALE or capability(query.device) not in gpus or key.shape != query.shape:
        return None
    rule = _find(kernel, query, query.shape[2], features)
    return None if rule is None else WarpMultiheadTile(**rule["tile"])


def tiled(kernel: str, query: Tensor, features: frozenset[str]) -> dict[str, int] | None:
    """Return the tile of a kernel that walks over any length; None where it has its own."""
    rule = _find(kernel, query, 0, features)
    return None if rule is None else rule["tile"]


def block_dim(query: Tensor) -> int:
    """Return the head dimension of the tile: a power of two, at least 16."""
    return max(16, power_of_2(query.shape[-1]))


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def _find(
    kernel: str, query: Tensor, tokens: int, features: frozenset[str]
) -> dict[str, Any] | None:
    # In float32 base-2 exponents cost accuracy.
    if query.element_size() != 2:
        return None
    gpu = capability(query.device)
    if gpu < ARCHITECTURES[0]:
        return None
    return _first_rule(architecture(gpu), kernel, block_dim(query), tokens, features)


@cache
def _first_rule(
    architecture: int, kernel: str, dim: int, tokens: int, features: frozenset[str]
) -> dict[str, Any] | None:
    for rule in rules(architecture).get(kernel, ()):
        fits = rule["dim"] == dim and rule.get("above", -1) < tokens <= rule.get("tokens", tokens)
        if fits and features <= set(rule["with"]):
            return rule
    return None
