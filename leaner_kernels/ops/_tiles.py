"""Tiles are data: the rules in each operator's ``tuned/`` say which tile a kernel gets.

``sm_*.toml`` hold the rules for GPUs that keep the limits of one of ``ARCHITECTURES``;
``default.toml`` those for any GPU, which come after them. A file lists rules for each kernel, and
the first that fits a call wins:

    forward = [
      { bytes = 2, dim = 64, above = 64, tokens = 208, with = ["padded_dim"], tile = { BLOCK_M = 64, num_warps = 4 } },
    ]

``bytes`` (of an element; 2 where it is left out) and ``dim`` (the head dimension of the tile; any) are
those of the call, whose tokens, or landmarks, are more than ``above`` (-1) and at most ``tokens``
(without end), and which brings no feature that is not in ``with`` (none). Each operator defines what its
features are. ``tile`` holds constants of the kernel, and the options of its launch.

Nothing is searched when a user's model takes its first step. ``python -m bench.tune`` times candidates on
a GPU and prints the rules that won there.
"""  # noqa: E501

import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

OPTIONS = "num_warps", "num_stages", "maxnreg"
ARCHITECTURES = 80, 86, 90  # tuned for: tests and tables compile what ships for each
ENOUGH_PROGRAMS = 264  # two for each of an H200's 132 SMs


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
    """Return the tuned architecture whose limits a GPU keeps: shared memory, above all.

    GPUs for desks and laptops (8.6, 8.9, 12.x) have 99 KiB for a program, the others 163 or more.
    Those before 8.0 have the default rules alone.
    """
    if capability in (86, 87, 89) or capability >= 120:
        return 86
    if capability >= 90:
        return 90
    return 80 if capability >= 80 else None


@cache
def rules(operator: str, name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of each kernel in one file of an operator, none where there is no file."""
    file = resources.files(str(__package__)) / operator / "tuned" / f"{name}.toml"
    if not file.is_file():
        return {}
    kernels = tomllib.loads(file.read_text("utf-8"))
    return {
        kernel: [rule | {"tile": Tile.of(**rule["tile"])} for rule in found]
        for kernel, found in kernels.items()
    }


def find_rule(
    operator: str,
    kernel: str,
    device: torch.device,
    *,
    element_size: int,
    dim: int = 0,
    tokens: int = 0,
    features: frozenset[str] = frozenset(),
) -> dict[str, Any] | None:
    """Return the first rule that fits a call, None where none does."""
    gpu = architecture(capability(device))
    return _first_rule(operator, gpu, kernel, element_size, dim, tokens, features)


def find_tile(operator: str, kernel: str, device: torch.device, **call: Any) -> Tile:
    """Return the tile of a kernel whose rules take every call.

    Raises:
        LookupError: no rule fits, which is a fault of the data.
    """
    rule = find_rule(operator, kernel, device, **call)
    if rule is None:
        raise LookupError(f"no rule in {operator}/tuned gives {kernel} a tile for {call}")
    return rule["tile"]


@cache
def _first_rule(
    operator: str,
    architecture: int | None,
    kernel: str,
    element_size: int,
    dim: int,
    tokens: int,
    features: frozenset[str],
) -> dict[str, Any] | None:
    for file in (f"sm_{architecture}", "default"):
        for rule in rules(operator, file).get(kernel, ()):
            alike = rule.get("bytes", 2) == element_size and rule.get("dim", dim) == dim
            inside = rule.get("above", -1) < tokens <= rule.get("tokens", tokens)
            if alike and inside and features.issubset(rule.get("with", ())):
                return rule
    return None


def block_dim(dim: int) -> int:
    """Return the head dimension of the tile: a power of two, at least the 16 of a product."""
    return max(16, power_of_2(dim))


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()
