"""Which tile a kernel gets: the first rule that takes a call, in a table in the kernel's file.

    TILES = Tiles(
        "short_forward",
        rule(dim=64, tokens=64, BLOCK=64, largest_segment=64, num_warps=4),
        rule(dim=64, tokens=64, takes=("mask",), BLOCK=32, largest_segment=64, num_warps=8),
        num_stages=1,
    )

Nothing is searched when a user's model takes its first step. ``python -m bench.tune`` times candidates on
a GPU and prints the rules that won there.
"""  # noqa: E501

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

OPTIONS = "num_warps", "num_stages", "maxnreg"
ARCHITECTURES = 80, 86, 90  # tuned for: tests and tables compile what ships for each
ENOUGH_PROGRAMS = 264  # two for each of an H200's 132 SMs
ANY = 2**31


@dataclass(frozen=True)
class Tile:
    """Block sizes and other constants of a kernel, and the options that it is launched with.

    Without ``num_stages`` a kernel is none that Triton pipelines. ``maxnreg`` set to all 255
    registers keeps ptxas from spilling a few of them to fit one more program beside.
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
        """What a kernel is launched with, by name."""
        return self.constexprs | self.options

    def __getitem__(self, name: str) -> Any:
        """Return a constant of the kernel."""
        return self.constexprs[name]

    def replace(self, **numbers: Any) -> "Tile":
        """Return the tile with other constants or options."""
        return Tile.of(**self.arguments | numbers)

    def at_most(self, **sizes: int) -> "Tile":
        """Return the tile with blocks that are no larger than what they are of."""
        smaller = {name: size for name, size in sizes.items() if size < self[name]}
        return self.replace(**smaller) if smaller else self


@dataclass(frozen=True)
class Rule:
    """A row of a table: a tile, and the calls that get it.

    Those with at most ``dim`` of head dimension, rounded up as the tile has it, ``tokens`` (the
    longer of rows and keys; of Nyström attention landmarks) and ``size`` bytes of an element, with
    no features beyond ``takes``, on one of the architectures ``gpus``, None for any.
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
        """Return whether the rule takes a call on a GPU of an architecture."""
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
    """Return a rule; ``numbers`` are its tile."""
    return Rule(Tile.of(**numbers), dim, tokens, frozenset(takes), size, gpus)


class Tiles:
    """The table of a kernel: rules, tried in order, with ``numbers`` in every tile."""

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
        """Return the first rule that takes a call, None where none does."""
        gpu = architecture(capability(device))
        for row in self.rules:
            if row.fits(gpu, size, dim, tokens, features):
                return row
        return None

    def tile(self, device: torch.device, **call: Any) -> Tile:
        """Return the tile of a call that a rule takes; LookupError is a fault of the table."""
        row = self.find(device, **call)
        if row is None:
            raise LookupError(f"no rule gives {self.name} a tile for {call}")
        return row.tile


_thread = threading.local()


@contextmanager
def assume(capability: int | None) -> Iterator[None]:
    """Choose as on a GPU of this capability, in this thread; None changes nothing."""
    if capability is None:
        yield
        return
    before, _thread.capability = assumed(), capability
    try:
        yield
    finally:
        _thread.capability = before


def assumed() -> int | None:
    """Return the capability of ``assume``, None outside."""
    return None if torch.compiler.is_compiling() else getattr(_thread, "capability", None)


def capability(device: torch.device) -> int:
    """Return 10 * major + minor of a GPU; without one, 90."""
    if (gpu := assumed()) is not None:
        return gpu
    if device.type != "cuda":
        return 90
    # A constant to torch.compile, which get_device_capability is not.
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor


def architecture(capability: int) -> int | None:
    """Return the tuned architecture that a GPU is nearest to: its instructions, shared memory.

    Those for desks and laptops (8.6, 8.9, 12.x) have 99 KiB for a program, the others 163 or more.
    Datacentre GPUs after Hopper have no wgmma. GPUs before 8.0 have
    none.
    """
    if capability in (86, 87, 89) or capability >= 120:
        return 86
    if capability == 90:
        return 90
    return 80 if capability >= 80 else None


def block_dim(dim: int) -> int:
    """Return the head dimension of the tile: a power of two, at least the 16 of a product."""
    return max(16, power_of_2(dim))


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()
