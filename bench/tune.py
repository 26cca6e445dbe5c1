"""Time candidate tiles of the kernels on this GPU, and print the rules that won.

    python -m bench.tune [--case vit_base ...] [--json FILE]
    python -m bench.tune --candidates [NAME ...] [--case vit_base ...] [--json FILE]

For every case of the benchmark (sequences of one length) its kernels are tried with the shipped
tile and with neighbouring tiles. Each candidate is compiled, compared with the shipped one, and
timed together with the other launches of its direction, by CUDA-graph replay over inputs larger
than the L2 cache. A candidate never wins if it spills in an innermost loop, if the GPU refuses it,
or if it computes another result; it is listed with the reason. The rules are printed in the form of
the tables next to the kernels. The JSON file has every timing, losers included.

With ``--candidates`` the variants in ``bench.gpu_model.candidates`` are timed instead. Each is
compared with the shipped code by the same rules, and a line prints both times.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.attention.catalogue import ON_GPU
from bench.gpu_model import launches
from bench.gpu_model.candidates import CANDIDATES, Candidate
from bench.gpu_model.compile_ahead import recorded
from bench.gpu_model.launches import AnyCase
from bench.gpu_model.machine_code import disassemble
from bench.harness import clock, command
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops import _tiles, route
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops._tiles import Rule, Tile, rule

SAMPLES = 4  # batch entries that a capture records
TOLERANCE = 2.0**-6  # of the largest element: two tiles sum in different orders, in half precision


class Trial(NamedTuple):
    """A tile of a kernel on a case: microseconds, or the reason why it has none."""

    kernel: str
    case: str
    tile: dict[str, int]
    microseconds: float | None
    registers: int | None
    reason: str = ""


class Comparison(NamedTuple):
    """A candidate and the shipped code: microseconds, or the reason why the candidate has none."""

    candidate: str
    case: str
    direction: str
    ships: float
    microseconds: float | None
    registers: int | None
    reason: str = ""

    def __str__(self) -> str:
        start = f"{self.case} {self.direction}: {self.ships} us, {self.candidate}"
        if self.microseconds is None:
            return f"{start} {self.reason}"
        return f"{start} {self.microseconds} us ({self.microseconds / self.ships - 1:+.1%})"


class Measured(NamedTuple):
    """A direction of a case: seconds or a reason for their absence, and its results."""

    seconds: float | None
    registers: int | None
    reason: str = ""
    results: Sequence[Tensor] = ()


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
        sample: the batch entries that a capture records.
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
        self.sample = torch.arange(SAMPLES, dtype=torch.int32, device=device)
        self.sets = []
        with gathering():
            for _ in range(clock.copies_beyond_cache(case.bytes("forward"), device)):
                inputs = launches.filled(self.call.inputs, device, generator)
                out, saved = self.call.attend(*inputs, *self.call.params)
                grad = torch.empty_like(out).normal_(generator=generator)
                self.sets.append((inputs, grad, out, saved))

    def run(self, direction: str, tensors: tuple[Any, ...]) -> list[Tensor]:
        """Run a direction, one of ``candidates.DIRECTIONS``, and return what it computes."""
        inputs, grad, *results = tensors
        if direction == "forward":
            return [self.call.attend(*inputs, *self.call.params)[0]]
        if direction == "module":
            out, *_ = results
            x = out.transpose(1, 2).flatten(2).requires_grad_()
            wanted = x, *self.module.parameters()
            return list(torch.autograd.grad(self.module(x).sum(), wanted))
        if direction == "backward":
            return [t for t in self.call.gradients(grad, inputs, *results) if t.numel()]
        sample = self.sample if direction == "capture" else None
        out, lse, stats, heads, *_ = self.call.with_stats(*inputs, sample, *self.call.params)
        return [out, lse, *stats.unbind(), *([heads] if heads.numel() else [])]

    @cached_property
    def module(self) -> ManyHeadAttention:
        """The module of attention with the sizes of the case."""
        _, heads, _, dim = self.call.inputs[0].shape
        device = self.sample.device
        return ManyHeadAttention(heads * dim, heads, dim, device=device, dtype=self.case.dtype)

    @contextmanager
    def trying(self, kernel: str = "", tile: Any = ()) -> Iterator[list[Any]]:
        """Give a kernel another tile; gather what Triton compiled for each launch."""

        def change(name: str, row: Rule | None) -> Rule | None:
            return row and replace(row, tile=Tile.of(**tile)) if name == kernel else row

        with launches.changed_rules(change), gathering() as compiled:
            yield compiled


@contextmanager
def gathering() -> Iterator[list[Any]]:
    """Forget the launches of calls before and after; gather what Triton compiled for each."""
    compiled: list[Any] = []
    start = Launch.start

    def gather(launch: Launch) -> Any:
        compiled.append(start(launch))
        return compiled[-1]

    route.plans.clear()
    with mock.patch.object(Launch, "start", gather):
        yield compiled
    route.plans.clear()


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


def direction_of(kernel: str) -> str:
    """Return the direction of a kernel of a plain call, by the name of its table."""
    return "backward" if "backward" in kernel else "forward"


def measure(
    problem: TileProblem,
    direction: str,
    setting: AbstractContextManager[list[Any]],
    truth: Sequence[Tensor],
) -> Measured:
    """Compile, compare and time a direction of a case under a setting, which gathers launches."""
    registers = None
    try:
        with setting as compiled:
            results = problem.run(direction, problem.sets[0])
            torch.cuda.synchronize()
            registers = max(getattr(one, "n_regs", 0) for one in compiled)
            for one in compiled:
                if getattr(one, "n_spills", 0) and disassemble(one.asm["cubin"]).looped_spills():
                    raise RuntimeError("spills in a loop")
            for result, expected in zip(results, truth, strict=bool(truth)):
                error = (result.float() - expected.float()).abs().max()
                if not error <= TOLERANCE * expected.float().abs().max():
                    raise RuntimeError(f"off by {error:.3g}")
            seconds = clock.timed(partial(problem.run, direction), problem.sets, "cuda")
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        return Measured(None, registers, reason)
    return Measured(seconds, registers, results=results)


def tune(problem: TileProblem) -> Iterator[Trial]:
    """Yield a trial for every candidate of every kernel that takes the case."""
    for kernel, row in problem.rules.items():
        truth: Sequence[Tensor] = ()
        for tile in around(row.tile):
            found = measure(problem, direction_of(kernel), problem.trying(kernel, tile), truth)
            truth = truth or found.results
            time = None if found.seconds is None else round(found.seconds * 1e6, 2)
            yield Trial(kernel, problem.case.name, tile, time, found.registers, found.reason)


@contextmanager
def _with(candidate: Candidate) -> Iterator[list[Any]]:
    with candidate.selected(), gathering() as compiled:
        yield compiled


def compare(problem: TileProblem, candidates: Sequence[Candidate]) -> Iterator[Comparison]:
    """Yield each candidate for the case with the shipped code, which is timed again before each."""
    for candidate in candidates:
        direction = candidate.direction
        ships = measure(problem, direction, gathering(), ())
        if ships.seconds is None:
            raise SystemExit(f"bench.tune: {problem.case.name} {direction}: {ships.reason}")
        found = measure(problem, direction, _with(candidate), ships.results)
        yield Comparison(
            candidate.name,
            problem.case.name,
            direction,
            ships=round(ships.seconds * 1e6, 2),
            microseconds=None if found.seconds is None else round(found.seconds * 1e6, 2),
            registers=found.registers,
            reason=found.reason,
        )


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
    parser.add_argument(
        "--candidates",
        nargs="*",
        choices=list(CANDIDATES),
        metavar="NAME",
        help="time these variants instead of tiles; without a NAME all of them: "
        f"{', '.join(CANDIDATES)}",
    )
    parser.add_argument("--json", type=Path, help="write every timing to this file")
    options = parser.parse_args(arguments)
    command.need_gpu("bench.tune")
    trials: list[Trial | Comparison] = []
    for name in options.case:
        if options.candidates is not None:
            wanted = [CANDIDATES[n] for n in options.candidates or CANDIDATES]
            wanted = [candidate for candidate in wanted if name in candidate.cases]
            if not wanted:
                continue
            for comparison in compare(TileProblem(takes[name], torch.device("cuda")), wanted):
                sys.stdout.write(f"{comparison}\n")
                trials.append(comparison)
            continue
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
