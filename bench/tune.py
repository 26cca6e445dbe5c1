"""Time candidate tiles of the kernels on the GPU at hand, and print the rules that won.

    python -m bench.tune [--case vit_base ...] [--json FILE]

For every case of softmax attention (``bench/attention/cases.py``; half precision, one length), of
the operators of vision and of Nyström attention, and every kernel that takes it, each candidate is
compiled, compared with the first, and timed by CUDA-graph replay over inputs that outgrow the
L2 cache: a kernel of softmax attention alone, of the others with the launches of its direction. A
candidate that spills in an innermost loop, that the GPU refuses or that computes something else is
listed with the reason and never wins. The rules are printed as they stand in
``leaner_kernels/ops/*/tuned/``; the JSON keeps every timing, losers included.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.attention.cases import CASES, AttentionCase
from bench.attention.operators import OPERATOR_CASES, OperatorCase
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.gpu_model.compile_ahead import recorded
from bench.gpu_model.launches import AnyCase, folder_of, operator_of, registered_call
from bench.gpu_model.machine_code import looped_spills
from bench.harness import clock, machine
from leaner_kernels.ops import _tiles
from leaner_kernels.ops._tiles import Tile, block_dim

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
    if kernel.startswith("multihead"):
        for heads, warps in product((1, 2, 4, 8), (1, 2, 4, 8)):
            if warps <= 2 * heads:
                yield {"HEADS": heads, "num_warps": warps, "num_stages": 1}
        return
    if kernel.startswith("warp_multihead"):
        for heads, warps in product((1, 2, 4, 8), (1, 2, 4, 8)):
            yield {"HEADS": heads, "num_warps": warps}
        return
    if kernel.startswith("hopper"):
        for registers in ({}, {"maxnreg": 128}, {"maxnreg": 168}, {"maxnreg": 255}):
            yield {"num_warps": 4, **registers}
        if kernel.endswith("backward"):
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
    in_pairs = longest <= 16 and alike and case.head_dim <= 32 and case.head_dim % 2 == 0
    families = ["warp_multihead"] * in_pairs + ["multihead"] * (longest <= 64)
    families += ["short"] * (longest <= 512)
    names = [f"{family}_{way}" for family in families for way in ("forward", "backward")]
    in_gluon = 64 < longest <= 1024 and alike
    gpus = ("hopper", "ampere") * in_gluon
    names += [f"{gpu}_{way}" for gpu in gpus for way in ("forward", "backward")]
    return names + ["online_forward", "online_backward"] * (longest > 256)


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest trial that has a time."""
    timed = [trial for trial in trials if trial.microseconds is not None]
    return min(timed, key=lambda trial: trial.microseconds or 0.0, default=None)


def rule(trial: Trial, case: AttentionCase) -> str:
    """Render a winner of softmax attention as a line of ``tuned/sm_*.toml``."""
    dim = block_dim(case.head_dim)
    wanted = {"padded_dim": dim != case.head_dim, "unaligned": case.head_dim % 16 != 0}
    tokens = {} if trial.kernel.startswith("online") else {"tokens": max(case.rows, case.tokens)}
    features = [name for name, present in wanted.items() if present]
    return line({"dim": dim, **tokens, "with": features, "tile": trial.tile})


def line(rule: dict[str, Any]) -> str:
    """Render a rule as it stands in the data."""

    def inline(value: Any) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        inside = ", ".join(f"{name} = {inline(entry)}" for name, entry in value.items())
        return f"{{ {inside} }}"

    return f"  {inline(rule)},"


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
def forced(operator: str, kernel: str, tile: Tile) -> Iterator[None]:
    """Give a kernel another tile wherever a rule fits."""
    find = _tiles._first_rule

    def found(*call: Any) -> dict[str, Any] | None:
        rule = find(*call)
        chosen = rule is not None and (call[0], call[2]) == (operator, kernel)
        return rule | {"tile": tile} if chosen else rule

    with mock.patch.object(_tiles, "_first_rule", found):
        yield


class TileProblem:
    """The tensors of one case, several sets of them."""

    def __init__(self, case: AttentionCase, device: torch.device) -> None:
        """Draw q, k, v and the gradient of the output."""
        self.case = case
        copies = clock.copies_beyond_cache(case.bytes("forward"), device)
        self.sets = [self._draw(device, seed) for seed in range(copies)]

    def _draw(self, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        case, generator = self.case, torch.Generator(device).manual_seed(seed)
        sizes = [(case.batch, n, case.heads, case.head_dim) for n in (case.rows, case.tokens)]
        shapes = sizes[0], sizes[1], sizes[1], sizes[0]
        return tuple(
            torch.randn(shape, device=device, generator=generator).to(case.dtype).transpose(1, 2)
            for shape in shapes
        )

    def launches(self, kernel: str, tile: dict[str, int]) -> list[Any]:
        """Return a launch for each set of tensors; results are in ``written(launch)``."""
        from leaner_kernels.ops.attention import operators
        from leaner_kernels.ops.attention.call import Call
        from leaner_kernels.ops.attention.kernels import (
            ampere_backward,
            ampere_forward,
            hopper_backward,
            hopper_forward,
            multihead,
            online_backward,
            online_forward,
            short_backward,
            short_forward,
            warp_multihead,
        )
        from leaner_kernels.ops.attention.launch import AMPERE, HOPPER

        family = kernel.removesuffix("_forward").removesuffix("_backward")
        gpus = {"hopper": HOPPER, "ampere": AMPERE, "warp_multihead": AMPERE + HOPPER}.get(family)
        if gpus and _tiles.capability(self.sets[0][0].device) not in gpus:
            raise RuntimeError(f"for compute capability {' and '.join(map(str, gpus))} alone")
        found = []
        for q, k, v, grad in self.sets:
            call = Call(q, k, v, None, None, None, 0.0, self.case.causal, self.case.scale)
            out = operators.new_out(q)
            max_log_sum = operators.new_max_log_sum(q)
            gradients = [torch.empty_like(t) for t in (q, k, v)]
            saved = grad, call, out, max_log_sum, *gradients
            results = call, out, max_log_sum
            if kernel.endswith("backward") and "multihead" not in kernel:
                self._attend(*results)
            # Those of short sequences and of whole heads are cut for the tokens and rows of a call.
            rows, cols = (block_dim(t.shape[2]) for t in (q, k))
            sizes = {
                "multihead": {"ROWS": rows, "COLS": cols},
                "short": {"tokens": max(self.case.rows, self.case.tokens)},
            }
            chosen = Tile.of(**sizes.get(family, {}), **tile)
            with forced("attention", kernel, chosen):
                launch = {
                    "multihead_forward": partial(multihead.prepare_forward, chosen, *results, None),
                    "multihead_backward": partial(
                        multihead.prepare_backward, chosen, grad, call, *gradients, None
                    ),
                    "warp_multihead_forward": partial(
                        warp_multihead.prepare_forward, chosen, *results, None
                    ),
                    "warp_multihead_backward": partial(
                        warp_multihead.prepare_backward, chosen, grad, call, *gradients
                    ),
                    "short_forward": partial(short_forward.prepare, chosen, *results, None),
                    "short_backward": partial(short_backward.prepare, chosen, *saved, None),
                    "hopper_forward": partial(hopper_forward.prepare, chosen, *results, None),
                    "hopper_backward": partial(hopper_backward.prepare, chosen, *saved, None),
                    "ampere_forward": partial(ampere_forward.prepare, chosen, *results, None),
                    "ampere_backward": partial(ampere_backward.prepare, chosen, *saved, None),
                    "online_forward": partial(online_forward.prepare, *results),
                    "online_backward": partial(online_backward.prepare, *saved, None),
                }[kernel]()
            found.append(launch)
        return found

    def _attend(self, call: Any, out: Tensor, max_log_sum: Tensor) -> None:
        """Write what a backward reads of its forward."""
        scores = call.query.float() @ call.key.float().mT
        if self.case.causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores.masked_fill_(hidden, float("-inf"))
        largest = scores.amax(-1, keepdim=True)
        scores = self.case.scale * (scores - largest)
        sums = scores.logsumexp(-1, keepdim=True)
        max_log_sum.copy_(torch.cat((largest, sums), dim=-1))
        out.copy_(scores.softmax(-1) @ call.value.float())

    def kernels(self) -> dict[str, list[dict[str, Any]]]:
        """Return the candidates for each kernel that takes the case."""
        return {kernel: list(candidates(kernel, self.case)) for kernel in kernels(self.case)}

    def runs(self, kernel: str, tile: dict[str, Any]) -> list[TileRun]:
        """Return what each set of tensors was launched with."""
        launches = self.launches(kernel, tile)
        return [TileRun([one], [one.start()], written(one)) for one in launches]

    def rule(self, trial: Trial) -> str:
        """Render a winner as a line of the data."""
        return rule(trial, self.case)


class OperatorProblem:
    """One case of another operator."""

    def __init__(self, case: VisionCase | OperatorCase, device: torch.device) -> None:
        """Find which kernels take the case; tensors are drawn for each run."""
        self.case, self.device = case, device
        self.operator = operator_of(case)
        self.folder = folder_of(case.op)
        self.copies = clock.copies_beyond_cache(case.bytes("forward"), device)
        self.rules = self._rules()

    def _rules(self) -> dict[str, dict[str, Any]]:
        """Return the rule that each kernel of the forward and the backward follows on the GPU."""
        found: dict[str, dict[str, Any]] = {}
        find = _tiles._first_rule

        def noted(*call: Any) -> dict[str, Any] | None:
            rule = find(*call)
            if rule is not None:
                found[call[2]] = rule
            return rule

        call = registered_call(*self.operator)
        gpu = _tiles.capability(self.device)
        with (
            mock.patch.object(_tiles, "_first_rule", noted),
            mock.patch.object(_tiles, "capability", return_value=gpu),
            recorded(),
        ):
            out, lse = call.attend(*call.inputs, *call.params)
            call.backward(out, *call.inputs, out, lse, *call.params)
        return found

    def kernels(self) -> dict[str, list[dict[str, Any]]]:
        """Return the candidates for each kernel: the tile that ships, and those around it."""
        return {kernel: around(rule["tile"]) for kernel, rule in self.rules.items()}

    def runs(self, kernel: str, tile: dict[str, Any]) -> list[TileRun]:
        """Return what the kernel's direction was launched with, on each set of tensors."""
        with forced(self.folder, kernel, Tile.of(**tile)):
            return [self._run("backward" in kernel, seed) for seed in range(self.copies)]

    def _run(self, backward: bool, seed: int) -> TileRun:
        from leaner_kernels.ops._launch_cache import LaunchCache

        _, on_gpu, shapes, params = self.operator
        generator = torch.Generator(self.device).manual_seed(seed)
        launches, compiled = [], []

        def launch(cache: Any, _kind: Any, _tensors: Any, prepare: Any) -> Tensor | None:
            launches.append(one := prepare())
            compiled.append(one.start())
            return one.arguments.get(cache._scratch)

        def empty(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device)

        inputs = tuple(empty(t).normal_(generator=generator) for t in shapes)
        call = registered_call(*self.operator)
        with recorded():
            out, lse = map(empty, call.attend(*shapes, *params))
        forward = partial(on_gpu.forward, inputs, params, out, lse, None, None)
        results = [out]
        if backward:
            forward()
            grad = torch.empty_like(out).normal_(generator=generator)
            dense = partial(torch.empty_like, memory_format=torch.contiguous_format)
            results = [dense(t) for t in inputs]
        with (
            mock.patch.object(LaunchCache, "run", return_value=False),
            mock.patch.object(LaunchCache, "launch", launch),
        ):
            if backward:
                on_gpu.backward(grad, inputs, params, lse, tuple(results))
            else:
                forward()
        return TileRun(launches, compiled, results)

    def rule(self, trial: Trial) -> str:
        """Render a winner as a line of the data."""
        return line(self.rules[trial.kernel] | {"tile": trial.tile})


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


def written(launch: Any) -> list[Tensor]:
    """Return the tensors that a launch writes, less what the backward needs of its rows."""
    names = ("dq_view", "dk_view", "dv_view") if "dq_view" in launch.arguments else ("out_view",)
    return [launch.arguments[name].ptr for name in names]


def try_tile(
    problem: TileProblem | OperatorProblem,
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
        timer = clock.CudaClock()
        calls = timer.calls = 4 * len(runs)
        run = clock.graph_round(TileRun.again, runs, calls)
        seconds = clock.seconds(run, timer, ROUNDS)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        return Trial(kernel, name, tile, None, registers, reason), None
    return Trial(kernel, name, tile, round(seconds * 1e6, 2), registers), results


def problem_of(case: AnyCase, device: torch.device) -> TileProblem | OperatorProblem:
    """Return the tensors of a case."""
    return (TileProblem if isinstance(case, AttentionCase) else OperatorProblem)(case, device)


def tune(problem: TileProblem | OperatorProblem) -> Iterator[Trial]:
    """Yield a trial for every candidate of every kernel that takes the case."""
    for kernel, tiles in problem.kernels().items():
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
        problem = problem_of(takes[name], torch.device("cuda"))
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
