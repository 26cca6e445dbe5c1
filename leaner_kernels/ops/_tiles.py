"""Tables of tiles: a kernel runs with the first rule of its table that supports a call.

    TILES = Tiles(
        "short_forward",
        rule(dim=64, tokens=64, BLOCK=64, num_warps=4),
        rule(dim=64, tokens=64, takes=("mask",), BLOCK=32, num_warps=8),
        num_stages=1,
    )

No search runs in a user's first step. ``python -m bench.tune`` times candidates on a GPU and prints
the fastest rules.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ._checks import ArgumentError
from .gpus import GPU, GPUS, LEAST_CAPABILITY

OPTIONS = "num_warps", "num_stages", "maxnreg"
ENOUGH_PROGRAMS = 264  # two for each of the 132 SMs of an H200
ANY = 2**31


@dataclass(frozen=True)
class Tile:
    """Block sizes and other constants of a kernel, and its launch options.

    A tile without ``num_stages`` is of a kernel that Triton does not pipeline. ``maxnreg=255``
    stops ptxas from spilling registers to fit one more program on an SM.
    """

    constexprs: dict[str, Any]
    options: dict[str, int]

    @classmethod
    def of(cls, **numbers: Any) -> "Tile":
        """Return a tile of constants and options, by name."""
        options = {name: numbers.pop(name) for name in OPTIONS if name in numbers}
        return cls(numbers, options)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the constants and options of a launch, by name."""
        return self.constexprs | self.options

    def __getitem__(self, name: str) -> Any:
        """Return a constant of the kernel."""
        return self.constexprs[name]

    def replace(self, **numbers: Any) -> "Tile":
        """Return the tile with other constants or options."""
        return Tile.of(**self.arguments | numbers)

    def at_most(self, **sizes: int) -> "Tile":
        """Return the tile with blocks reduced to the given sizes."""
        smaller = {name: size for name, size in sizes.items() if size < self[name]}
        return self.replace(**smaller) if smaller else self


@dataclass(frozen=True)
class Rule:
    """A row of a table: a tile, and the calls that get it.

    A call matches if its head dimension, rounded up to that of the tile, is at most ``dim``; the
    larger of its numbers of rows and keys is at most ``tokens``;
    an element has at most ``size`` bytes; its features are among ``takes``; and the GPU is one of
    the architectures ``gpus``, or any if None.
    """

    tile: Tile
    dim: int
    tokens: int
    takes: frozenset[str]
    size: int
    gpus: tuple[int, ...] | None

    def fits(
        self, gpu: int | None, size: int, dim: int, tokens: int, features: frozenset[str]
    ) -> bool:
        """Return whether the rule supports a call on a GPU of an architecture."""
        return (
            (self.gpus is None or gpu in self.gpus)
            and size <= self.size
            and dim <= self.dim
            and tokens <= self.tokens
            and features <= self.takes
        )


def rule(
    *,
    dim: int = ANY,
    tokens: int = ANY,
    takes: tuple[str, ...] = (),
    size: int = 2,
    gpus: tuple[int, ...] | None = None,
    **numbers: Any,
) -> Rule:
    """Return a rule; ``numbers`` are the constants and options of its tile."""
    return Rule(Tile.of(**numbers), dim, tokens, frozenset(takes), size, gpus)


class Tiles:
    """The table of a kernel: rules in order of preference, with ``numbers`` in every tile."""

    def __init__(self, name: str, *rules: Rule, **numbers: Any) -> None:
        self.name = name
        self.rules = tuple(replace(row, tile=row.tile.replace(**numbers)) for row in rules)

    def find(
        self,
        device: torch.device,
        *,
        size: int,
        dim: int = 0,
        tokens: int = 0,
        features: frozenset[str] = frozenset(),
    ) -> Rule | None:
        """Return the first rule that supports a call, or None."""
        gpu = gpu_of(capability(device)).tiles
        for row in self.rules:
            if row.fits(gpu, size, dim, tokens, features):
                return row
        return None

    def tile(self, device: torch.device, **call: Any) -> Tile:
        """Return the tile of a supported call; a LookupError is a defect of the table."""
        row = self.find(device, **call)
        if row is None:
            raise LookupError(f"no rule gives {self.name} a tile for {call}")
        return row.tile


_thread = threading.local()


@contextmanager
def assume(capability: int | None) -> Iterator[None]:
    """Assume a GPU of this compute capability, in this thread; None changes nothing."""
    if capability is None:
        yield
        return
    before, _thread.capability = assumed(), capability
    try:
        yield
    finally:
        _thread.capability = before


def assumed() -> int | None:
    """Return the capability set by ``assume``, or None."""
    return None if torch.compiler.is_compiling() else getattr(_thread, "capability", None)


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU as 10 * major + minor; 90 without a GPU."""
    if (gpu := assumed()) is not None:
        return gpu
    # Fake tensors may name a GPU that is not there.
    if device.type != "cuda" or not torch.cuda.is_available():
        return 90
    # A constant for torch.compile, unlike get_device_capability.
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor


def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU; those of an H200 without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_capability(device: torch.device) -> None:
    """Raise ValueError for a GPU that Triton does not compile for."""
    if (gpu := capability(device)) < LEAST_CAPABILITY:
        raise ArgumentError(
            f"this call needs our kernels, which need a GPU of compute capability "
            f"{LEAST_CAPABILITY / 10} or newer, got {gpu / 10}"
        )


@cache
def gpu_of(capability: int) -> GPU:
    """Return the row of a GPU, given 10 * major + minor; unlisted ones get that of the one before.

    GPUs older than all in the table get its first row, which has no tuned tiles either.
    """
    listed = [known for known in GPUS if known <= capability]
    return GPUS[max(listed, default=LEAST_CAPABILITY)]


def block_dim(dim: int) -> int:
    """Return the head dimension of a tile: a power of two, at least 16, the depth of a product."""
    return max(16, power_of_2(dim))


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
