"""Time candidate tiles of the kernels on the GPU at hand, and print the rules that won.

    python -m bench.tune [--case vit_base ...] [--json FILE]

For every case of softmax attention (``bench/attention/cases.py``; half precision, one length), of
the operators of vision and of Nyström attention, and every kernel that takes it, each candidate is
compiled, compared with the first, and timed by CUDA-graph replay over inputs that outgrow the
L2 cache, with all launches of its direction. A candidate that spills in an innermost loop, that the
GPU refuses or that computes something else is listed with the reason and never wins. The rules are
printed as they stand in the tables beside the kernels; the JSON keeps every timing, losers
included.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.attention.cases import CASES, AttentionCase
from bench.attention.operators import OPERATOR_CASES
from bench.attention.vision_cases import VISION_CASES
from bench.gpu_model import launches
from bench.gpu_model.compile_ahead import recorded
from bench.gpu_model.launches import AnyCase
from bench.gpu_model.machine_code import looped_spills
from bench.harness import clock, machine
from leaner_kernels.ops import _tiles
from leaner_kernels.ops._tiles import Rule, Tile, block_dim, rule

ROUNDS = 20
TOLERANCE = 2.0**-6  # of the largest element: two tiles sum in different orders, in half precision


class Trial(NamedTuple):
    """A tile of a kernel on a case: microseconds, or the reason why it has none."""

    kernel: str
    case: str
    tile: dict[str, int]
    microseconds: float | None
    registers: int | None
    reason: str = ""


def candidates(kernel: str, case: AttentionCase) -> Iterator[dict[str, int]]:
    """Yield the tiles worth a try."""
    if kernel.startswith("warp_multihead"):
        for heads, warps in product((1, 2, 4, 8), (1, 2, 4, 8)):
            yield {"HEADS": heads, "num_warps": warps}
        return
    if kernel.startswith("hopper"):
        for registers in ({}, {"maxnreg": 128}, {"maxnreg": 168}, {"maxnreg": 255}):
            yield {"num_warps": 4, **registers}
        if kernel == "hopper_backward":
            yield {"IN_REGISTERS": True, "num_warps": 4, "maxnreg": 168}
        return
    if kernel.startswith("ampere"):
        warps = (2, 64), (4, 64), (4, 128), (8, 128)
        steps = (16, 32) if kernel.endswith("backward") else (32, 64)
        for step, registers, (count, block) in product(steps, (128, 168, 255), warps):
            yield {"STEP": step, "BLOCK": block, "num_warps": count, "maxnreg": registers}
        return
    if kernel.startswith("online"):
        for rows, cols, warps, stages in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2)):
            if rows * cols <= 64 * 128:
                tile = {"BLOCK_M": rows, "BLOCK_N": cols, "num_warps": warps, "num_stages": stages}
                yield from (tile, tile | {"maxnreg": 168}, tile | {"maxnreg": 255})
        return
    blocks, segments = (16, 32, 64, 128), (32, 64, 128, 256)
    for block, segment, warps, stages in product(blocks, segments, (4, 8, 16), (1, 2)):
        if segment < max(64, 2 * case.tokens) and block * segment <= 128 * 128:
            tile = {"BLOCK": block, "largest_segment": segment}
            yield tile | {"num_warps": warps, "num_stages": stages}


def kernels(case: AttentionCase) -> list[str]:
    """Return which kernels take a case."""
    longest = max(case.rows, case.tokens)
    alike = case.rows == case.tokens
    in_pairs = longest <= 16 and alike and case.head_dim <= 64 and case.head_dim % 2 == 0
    families = ["warp_multihead"] * in_pairs + ["short"] * (longest <= 512)
    names = [f"{family}_{way}" for family in families for way in ("forward", "backward")]
    in_gluon = 64 < longest <= 1024 and alike
    names += ["hopper_forward", "hopper_resident_backward", "hopper_backward"] * in_gluon
    names += ["ampere_forward", "ampere_backward"] * in_gluon
    return names + ["online_forward", "online_backward"] * (longest > 256)


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest trial that has a time."""
    timed = [trial for trial in trials if trial.microseconds is not None]
    return min(timed, key=lambda trial: trial.microseconds or 0.0, default=None)


def rule_of(kernel: str, case: AttentionCase) -> dict[str, Any]:
    """Return the keywords of a rule, without its tile, for a case of softmax attention."""
    dim = block_dim(case.head_dim)
    wanted = {"padded_dim": dim != case.head_dim, "unaligned": case.head_dim % 16 != 0}
    tokens = {} if kernel.startswith("online") else {"tokens": max(case.rows, case.tokens)}
    return {"dim": dim, **tokens, "takes": tuple(n for n, present in wanted.items() if present)}


def keywords(row: Rule) -> dict[str, Any]:
    """Return the keywords of a rule, without its tile."""
    given = {"dim": row.dim, "tokens": row.tokens, "size": row.size, "gpus": row.gpus}
    default = asdict(rule())
    given = {name: value for name, value in given.items() if value != default[name]}
    return given | {"takes": tuple(sorted(row.takes))}


def line(numbers: dict[str, Any]) -> str:
    """Render a rule as it stands in its table."""
    inside = ", ".join(f"{n}={value!r}" for n, value in numbers.items() if value != ())
    return f"    rule({inside}),"


class TileRun(NamedTuple):
    """What one set of tensors was launched with, what Triton compiled, and what was written."""

    launches: list[Any]
    compiled: list[Any]
    results: list[Tensor]

    def again(self) -> None:
        """Launch again."""
        for launch in self.launches:
            launch.start()


@contextmanager
def forced(operator: str, kernel: str, row: Rule) -> Iterator[None]:
    """Give a kernel the tile of a rule; of softmax attention it is the one that runs."""
    of_attention = operator == "attention"
    direction = kernel.rpartition("_")[2]

    def change(name: str, found: Rule | None) -> Rule | None:
        if name == kernel:
            return row if of_attention else found and replace(found, tile=row.tile)
        if not of_attention or not name.endswith(direction):
            return found
        if name.startswith("online"):  # takes what the others refuse
            raise RuntimeError(f"{kernel} does not take the case on this GPU")
        return None

    # However few heads there are, every kernel is tried.
    fewest = 0 if kernel.startswith(("hopper", "ampere")) else _tiles.ENOUGH_PROGRAMS
    with launches.changed_rules(change), mock.patch.object(_tiles, "ENOUGH_PROGRAMS", fewest):
        yield


class TileProblem:
    """One case, on several sets of tensors that are drawn for each run.

    Attributes:
        rules: what the data says, or would say, of each kernel that takes the case.
        tiles: the candidates for each kernel.
    """

    def __init__(self, case: AnyCase, device: torch.device) -> None:
        """Find which kernels take the case."""
        self.case, self.device, self.call = case, device, launches.call_of(case)
        self.copies = clock.copies_beyond_cache(case.bytes("forward"), device)
        if isinstance(case, AttentionCase):
            self.operator = "attention"
            self.rules = {kernel: rule_of(kernel, case) for kernel in kernels(case)}
            self.tiles = {kernel: list(candidates(kernel, case)) for kernel in self.rules}
        else:
            self.operator = launches.folder_of(case.op)
            shipped = self._shipped()
            self.rules = {kernel: keywords(row) for kernel, row in shipped.items()}
            self.tiles = {kernel: around(row.tile) for kernel, row in shipped.items()}

    def _shipped(self) -> dict[str, Rule]:
        """Return the rule that each kernel of the forward and the backward follows on the GPU."""
        found: dict[str, Rule] = {}

        def note(name: str, row: Rule | None) -> Rule | None:
            if row is not None:
                found[name] = row
            return row

        call, gpu = self.call, _tiles.capability(self.device)
        with (
            launches.changed_rules(note),
            mock.patch.object(_tiles, "capability", return_value=gpu),
            recorded(),
        ):
            out, lse = call.attend(*call.inputs, *call.params)
            call.gradients(out, call.inputs, out, lse)
        return found

    def runs(self, kernel: str, tile: dict[str, Any]) -> list[TileRun]:
        """Return what the kernel's direction was launched with, on each set of tensors."""
        with forced(self.operator, kernel, rule(**self.rules[kernel], **tile)):
            return [self._run("backward" in kernel, seed) for seed in range(self.copies)]

    def _run(self, backward: bool, seed: int) -> TileRun:
        from leaner_kernels.ops._launch_cache import Launch

        call, generator = self.call, torch.Generator(self.device).manual_seed(seed)
        inputs = launches.filled(call.inputs, self.device, generator)
        started, compiled = [], []

        def first(launch: Launch, *_: Any, **_named: Any) -> None:
            started.append(launch)
            compiled.append(launch.start())  # and nothing to keep

        with mock.patch.object(Launch, "first", first):
            out, saved = call.attend(*inputs, *call.params)
            if not backward:
                return TileRun(started, compiled, [out])
            started.clear()
            compiled.clear()
            grad = torch.empty_like(out).normal_(generator=generator)
            grads = call.gradients(grad, inputs, out, saved)
        return TileRun(started, compiled, [t for t in grads if t.numel()])

    def rule(self, trial: Trial) -> str:
        """Render a winner as a line of its table."""
        return line(self.rules[trial.kernel] | trial.tile)


def around(tile: Tile) -> list[dict[str, Any]]:
    """Return a tile, and those of half or twice its sizes and warps, other stages, registers."""
    sizes = {
        name: [size, size // 2, 2 * size]
        for name, size in tile.constexprs.items()
        if type(size) is int
    }
    options = tile.options
    warps = {options["num_warps"], max(1, options["num_warps"] // 2), 2 * options["num_warps"]}
    found = [tile.arguments]
    for *numbers, count, stages, registers in product(
        *sizes.values(), sorted(warps), (1, 2, 3), (None, 255)
    ):
        other = tile.constexprs | dict(zip(sizes, numbers))
        other |= {"num_warps": count, "num_stages": stages}
        other |= {} if registers is None else {"maxnreg": registers}
        if min(numbers) >= 16 and other not in found:
            found.append(other)
    return found


def try_tile(
    problem: TileProblem,
    kernel: str,
    tile: dict[str, Any],
    truth: list[Tensor] | None,
) -> tuple[Trial, list[Tensor] | None]:
    """Compile, compare and time one tile; also return what it computed."""
    name, registers = problem.case.name, None
    try:
        runs = problem.runs(kernel, tile)
        torch.cuda.synchronize()
        results = [t.clone() for t in runs[0].results]
        registers = max(getattr(one, "n_regs", 0) for one in runs[0].compiled)
        for one in runs[0].compiled:
            if getattr(one, "n_spills", 0) and looped_spills(one.asm["cubin"]):
                return Trial(kernel, name, tile, None, registers, "spills in a loop"), None
        for result, expected in zip(results, truth or (), strict=bool(truth)):
            error = (result.float() - expected.float()).abs().max()
            if not error <= TOLERANCE * expected.float().abs().max():
                return Trial(kernel, name, tile, None, registers, f"off by {error:.3g}"), None
        timer = clock.Clock("cuda")
        calls = timer.calls = 4 * len(runs)
        run = clock.graph_round(TileRun.again, runs, calls)
        seconds = clock.seconds(run, timer, ROUNDS)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        return Trial(kernel, name, tile, None, registers, reason), None
    return Trial(kernel, name, tile, round(seconds * 1e6, 2), registers), results


def tune(problem: TileProblem) -> Iterator[Trial]:
    """Yield a trial for every candidate of every kernel that takes the case."""
    for kernel, tiles in problem.tiles.items():
        truth: list[Tensor] | None = None
        for tile in tiles:
            trial, results = try_tile(problem, kernel, tile, truth)
            truth = truth or results
            yield trial


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, tune and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    every: tuple[AnyCase, ...] = *CASES, *VISION_CASES, *OPERATOR_CASES
    takes = {
        case.name: case
        for case in every
        if case.device == "cuda"
        and not (
            isinstance(case, AttentionCase) and (case.padded or case.lengths or not kernels(case))
        )
    }
    parser.add_argument("--case", nargs="+", choices=list(takes), default=list(takes))
    parser.add_argument("--json", type=Path, help="keep every timing there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench.tune: torch sees no CUDA GPU: nothing to time")
    trials: list[Trial] = []
    for name in options.case:
        problem = TileProblem(takes[name], torch.device("cuda"))
        found = list(tune(problem))
        trials += found
        for kernel in dict.fromkeys(trial.kernel for trial in found):
            winner = best([trial for trial in found if trial.kernel == kernel])
            if winner is not None:
                sys.stdout.write(f"# {name}: {winner.microseconds} us\n{kernel}\n")
                sys.stdout.write(problem.rule(winner) + "\n")
    if options.json is not None:
        facts = {"machine": machine.facts(), "commit": machine.commit()}
        trials_json = [trial._asdict() for trial in trials]
        options.json.write_text(json.dumps(facts | {"trials": trials_json}, indent=1) + "\n")


if __name__ == "__main__":
    main()
