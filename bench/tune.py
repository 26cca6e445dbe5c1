"""Time candidate tiles of the kernels on the GPU at hand, and print the rules that won.

    python -m bench.tune [--case vit_base ...] [--json FILE]

For every case of the benchmark (sequences of one length), the kernels that it runs on the GPU are
tried with the tile that ships and those around it: each candidate is compiled, compared with the
first, and timed by CUDA-graph replay over inputs that outgrow the L2 cache, with all launches of
its direction. A candidate that spills in an innermost loop, that the GPU refuses or that computes
something else is listed with the reason and never wins. The rules are printed as they stand in the
tables beside the kernels; the JSON keeps every timing, losers included.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.attention.catalogue import ON_GPU
from bench.gpu_model import launches
from bench.gpu_model.compile_ahead import recorded
from bench.gpu_model.launches import AnyCase
from bench.gpu_model.machine_code import disassemble
from bench.harness import clock, command
from leaner_kernels.ops import _tiles
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops._tiles import Rule, Tile, rule

TOLERANCE = 2.0**-6  # of the largest element: two tiles sum in different orders, in half precision


class Trial(NamedTuple):
    """A tile of a kernel on a case: microseconds, or the reason why it has none."""

    kernel: str
    case: str
    tile: dict[str, int]
    microseconds: float | None
    registers: int | None
    reason: str = ""


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest trial that has a time."""
    timed = [trial for trial in trials if trial.microseconds is not None]
    return min(timed, key=lambda trial: trial.microseconds or 0.0, default=None)


def line(row: Rule, tile: dict[str, Any]) -> str:
    """Render a rule with another tile, as it stands in its table."""
    conditions = {"dim": row.dim, "tokens": row.tokens, "size": row.size, "gpus": row.gpus}
    default = asdict(rule())
    given = {name: value for name, value in conditions.items() if value != default[name]}
    given |= ({"takes": tuple(sorted(row.takes))} if row.takes else {}) | tile
    return f"    rule({', '.join(f'{name}={value!r}' for name, value in given.items())}),"


class TileProblem:
    """One case, on as many sets of tensors as outgrow the L2 cache.

    Attributes:
        rules: that each kernel of the forward and the backward follows on the GPU.
        sets: (inputs, output's gradient, output, what else the backward takes) of the tiles that
            ship.
    """

    def __init__(self, case: AnyCase, device: torch.device) -> None:
        """Find which kernels run the case, and draw its tensors."""
        self.case, self.call = case, launches.call_of(case)
        self.rules: dict[str, Rule] = {}

        def note(name: str, row: Rule | None) -> Rule | None:
            if row is not None:
                self.rules[name] = row
            return row

        gpu = _tiles.capability(device)
        with (
            launches.changed_rules(note),
            mock.patch.object(_tiles, "capability", return_value=gpu),
            recorded(),
        ):
            out, saved = self.call.attend(*self.call.inputs, *self.call.params)
            self.call.gradients(out, self.call.inputs, out, saved)
        generator = torch.Generator(device).manual_seed(0)
        self.sets = []
        with self.trying():  # the launch cache would keep the tiles that ship
            for _ in range(clock.copies_beyond_cache(case.bytes("forward"), device)):
                inputs = launches.filled(self.call.inputs, device, generator)
                out, saved = self.call.attend(*inputs, *self.call.params)
                grad = torch.empty_like(out).normal_(generator=generator)
                self.sets.append((inputs, grad, out, saved))

    def run(self, kernel: str, tensors: tuple[Any, ...]) -> list[Tensor]:
        """Run the direction that a kernel is of, and return its results."""
        inputs, grad, *results = tensors
        if "backward" not in kernel:
            return [self.call.attend(*inputs, *self.call.params)[0]]
        return [t for t in self.call.gradients(grad, inputs, *results) if t.numel()]

    @contextmanager
    def trying(self, kernel: str = "", tile: Any = ()) -> Iterator[list[Any]]:
        """Give a kernel another tile and keep no launch; gather what Triton compiled for each."""
        compiled: list[Any] = []

        def change(name: str, row: Rule | None) -> Rule | None:
            return row and replace(row, tile=Tile.of(**tile)) if name == kernel else row

        def first(launch: Launch, *_: Any, **_named: Any) -> None:
            compiled.append(launch.start())  # and nothing to keep

        with launches.changed_rules(change), mock.patch.object(Launch, "first", first):
            yield compiled


def around(tile: Tile) -> list[dict[str, Any]]:
    """Return a tile, and those of half or twice its sizes and warps, other stages, registers."""
    sizes = {
        name: [n for n in (size, size // 2, 2 * size) if n >= min(size, 16)]
        for name, size in tile.constexprs.items()
        if type(size) is int
    }
    options = tile.options
    warps = {options["num_warps"], max(1, options["num_warps"] // 2), 2 * options["num_warps"]}
    candidates = [tile.arguments]
    for *numbers, count, stages, registers in product(
        *sizes.values(), sorted(warps), (1, 2, 3), (None, 168, 255)
    ):
        other = tile.constexprs | dict(zip(sizes, numbers))
        other |= {"num_warps": count, "num_stages": stages}
        other |= {} if registers is None else {"maxnreg": registers}
        if other not in candidates:
            candidates.append(other)
    return candidates


def try_tile(
    problem: TileProblem,
    kernel: str,
    tile: dict[str, Any],
    truth: list[Tensor] | None,
) -> tuple[Trial, list[Tensor] | None]:
    """Compile, compare and time one tile; also return what it computed."""
    name, registers = problem.case.name, None
    try:
        with problem.trying(kernel, tile) as compiled:
            results = problem.run(kernel, problem.sets[0])
            torch.cuda.synchronize()
            registers = max(getattr(one, "n_regs", 0) for one in compiled)
            for one in compiled:
                if getattr(one, "n_spills", 0) and disassemble(one.asm["cubin"]).looped_spills():
                    raise RuntimeError("spills in a loop")
            for result, expected in zip(results, truth or (), strict=bool(truth)):
                error = (result.float() - expected.float()).abs().max()
                if not error <= TOLERANCE * expected.float().abs().max():
                    raise RuntimeError(f"off by {error:.3g}")
            seconds = clock.timed(partial(problem.run, kernel), problem.sets, "cuda")
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        return Trial(kernel, name, tile, None, registers, reason), None
    return Trial(kernel, name, tile, round(seconds * 1e6, 2), registers), results


def tune(problem: TileProblem) -> Iterator[Trial]:
    """Yield a trial for every candidate of every kernel that takes the case."""
    for kernel, row in problem.rules.items():
        truth: list[Tensor] | None = None
        for tile in around(row.tile):
            trial, results = try_tile(problem, kernel, tile, truth)
            truth = truth or results
            yield trial


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, tune and print."""
    parser = command.parser("bench.tune", __doc__)
    takes = {n: case for n, case in ON_GPU.items() if not getattr(case, "lengths", ())}
    parser.add_argument(
        "--case",
        nargs="+",
        choices=list(takes),
        default=list(takes),
        metavar="CASE",
        help=f"cases to tune (all): {', '.join(takes)}",
    )
    parser.add_argument("--json", type=Path, help="write every timing to this file")
    options = parser.parse_args(arguments)
    command.need_gpu("bench.tune")
    trials: list[Trial] = []
    for name in options.case:
        problem = TileProblem(takes[name], torch.device("cuda"))
        found = list(tune(problem))
        trials += found
        for kernel in dict.fromkeys(trial.kernel for trial in found):
            winner = best([trial for trial in found if trial.kernel == kernel])
            if winner is not None:
                sys.stdout.write(f"# {name}: {winner.microseconds} us\n{kernel}\n")
                sys.stdout.write(line(problem.rules[kernel], winner.tile) + "\n")
    if options.json is not None:
        command.write(options.json, [trial._asdict() for trial in trials], **command.origin())


if __name__ == "__main__":
    main()
