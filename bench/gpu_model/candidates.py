"""Variants of kernels that no GPU has timed yet, and that no call uses by default.

    python -m bench.tune --candidates            # compare each with the shipped code on this GPU
    python -m bench.gpu_model vit_base --only statistics --candidate NAME     # predict one

A candidate that wins on a GPU moves from this list to the tables that it names. A candidate that
loses is deleted with its code; docs/LOG.md keeps the numbers.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from bench.gpu_model.launches import changed_rules
from leaner_kernels.ops import route
from leaner_kernels.ops._tiles import ANY, Rule
from leaner_kernels.ops.attention import kernels
from leaner_kernels.ops.attention.kernels import Limits

# "module" is a ManyHeadAttention, forward and backward, from its input.
DIRECTIONS = "forward", "statistics", "capture", "backward", "module"
_ORDERS = {
    "forward": kernels.FORWARD,
    "statistics": kernels.STATISTICS,
    "backward": kernels.BACKWARD,
}


class Candidate(NamedTuple):
    """A variant of the shipped code for one direction of some cases.

    Attributes:
        name: unique.
        direction: one of ``DIRECTIONS``.
        cases: names of cases of the benchmark.
        tiles: by the name of a table, the constants and options that replace those of its tiles.
        kernels: by the name of a table, the limits of a kernel that is tried before all others of
            its direction. Its file is found by this name, as that of a kernel that ships.
        settings: by dotted name, the values that replace variables of modules.
    """

    name: str
    direction: str
    cases: tuple[str, ...]
    tiles: Mapping[str, Mapping[str, Any]] = {}
    kernels: Mapping[str, Limits] = {}
    settings: Mapping[str, Any] = {}

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Make every call use this candidate, and clear the cached launches before and after."""

        def change(table: str, row: Rule | None) -> Rule | None:
            return row and replace(row, tile=row.tile.replace(**self.tiles.get(table, {})))

        with ExitStack() as stack:
            stack.enter_context(changed_rules(change))
            for kernel, limits in self.kernels.items():
                order = _ORDERS[kernel.rsplit("_", 1)[1]]
                others = {name: row for name, row in order.items() if name != kernel}
                stack.enter_context(mock.patch.dict(order, {kernel: limits} | others, clear=True))
            for target, value in self.settings.items():
                stack.enter_context(mock.patch(target, value))
            route.plans.clear()
            stack.callback(route.plans.clear)
            yield


_HOPPER = kernels.FORWARD["hopper_forward"]._replace(many_heads_from=ANY)
_TMA_CASES = "vit_base", "vit_large", "bert", "gpt2_512", "vit_384", "long_1024"
# The warp-specialised kernels, instead of ``hopper``, ``hopper_resident`` and ``hopper_long``.
TMA = tuple(
    Candidate(f"tma_{direction}", direction, _TMA_CASES, kernels={kernel: _HOPPER})
    for direction, kernel in (
        ("forward", "hopper_tma_forward"),
        ("statistics", "hopper_tma_forward_statistics"),
        ("backward", "hopper_tma_backward"),
    )
)
_WINDOWS = "davit_stage1", "davit_stage3", "gpt2_64"
CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        *TMA,
        # The one tile of up to 64 tokens without a loop, in fewer registers.
        Candidate("one_tile_forward", "forward", _WINDOWS, {"short_forward": {"ONE_TILE": True}}),
        Candidate(
            "one_tile_statistics",
            "statistics",
            _WINDOWS,
            {"short_forward_statistics": {"ONE_TILE": True}},
        ),
        Candidate(
            "one_tile_backward", "backward", _WINDOWS, {"short_backward": {"ONE_TILE": True}}
        ),
        # Sums of a head stay within threads and are reduced once, together.
        Candidate(
            "partial_statistics",
            "statistics",
            ("vit_base", "vit_large", "vit_huge", "bert"),
            {"hopper_forward_statistics": {"PARTIAL": True}},
        ),
        # Two tiles of rows together, as in the forward of such calls.
        Candidate(
            "paired_statistics",
            "statistics",
            ("gpt2_512",),
            {"hopper_forward_statistics": {"PARTIAL": True, "PAIRED": True, "maxnreg": 168}},
        ),
        # A capture on a stream of its own, beside the forward with statistics.
        Candidate(
            "capture_beside",
            "capture",
            ("vit_base", "vit_large", "bert", "gpt2_64", "gpt2_512", "davit_stage1", "tnt"),
            settings={"leaner_kernels.ops.route.CAPTURES_BESIDE": True},
        ),
        # The heads that are left for a sixth turn of the GPU have four programs each.
        Candidate(
            "split_last_heads", "backward", ("gpt2_512",), {"hopper_backward": {"RESIDENT": 3}}
        ),
        # The gradient of the projection's bias from the backward of attention.
        Candidate(
            "qkv_bias",
            "module",
            ("vit_base", "vit_large", "bert"),
            settings={"leaner_kernels.ops.attention.biased.ENABLED": True},
        ),
        # Six programs on an SM instead of five, for 8 bytes of stack.
        Candidate(
            "tnt_registers", "forward", ("tnt",), {"warp_multihead_forward": {"maxnreg": 80}}
        ),
    )
}
