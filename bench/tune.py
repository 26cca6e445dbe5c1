"""Time candidate tiles of the attention kernels on the GPU at hand, and print the rules that won.

    python -m bench.tune [--case vit_base ...] [--json FILE]

For every case (``bench/attention/cases.py``; half precision, one length) and every kernel whose
tiles are data, each candidate is compiled, compared with the tile that ships, and timed by
CUDA-graph replay over inputs that outgrow the L2 cache. A candidate that spills in an innermost
loop, that the GPU refuses or that computes something else is listed with the reason and never
wins. The rules are printed as they stand in ``leaner_kernels/ops/attention/tuned/``; the JSON keeps
every timing, losers included.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.attention.cases import CASES, Case
from bench.gpu_model.machine_code import looped_spills
from bench.harness import clock, machine
from leaner_kernels.ops.attention.tiles import power_of_2

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


def candidates(kernel: str, case: Case) -> Iterator[dict[str, int]]:
    """Yield the tiles worth a try."""
    if kernel.startswith("multihead"):
        for heads, warps in product((1, 2, 4, 8), (1, 2, 4, 8)):
            if warps <= 2 * heads:
                yield {"HEADS": heads, "num_warps": warps}
        return
    if kernel.startswith("warp_multihead"):
        for heads, warps in product((1, 2, 4, 8), (1, 2, 4, 8)):
            yield {"HEADS": heads, "num_warps": warps}
        return
    if kernel.startswith("hopper"):
        yield from ({}, {"maxnreg": 128}, {"maxnreg": 168}, {"maxnreg": 255})
        if kernel.endswith("backward"):
            yield {"maxnreg": 168, "IN_REGISTERS": True}
        return
    if kernel.startswith("ampere"):
        warps = (2, 64), (4, 64), (4, 128), (8, 128)
        steps = (16, 32) if kernel.endswith("backward") else (32, 64)
        for step, registers, (count, block) in product(steps, (128, 168, 255), warps):
            yield {"STEP": step, "maxnreg": registers, "num_warps": count, "BLOCK": block}
        return
    if kernel.startswith("tiled"):
        for rows, cols, warps, stages in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2)):
            if rows * cols <= 64 * 128:
                tile = {"BLOCK_M": rows, "BLOCK_N": cols, "num_warps": warps, "num_stages": stages}
                yield from (tile, tile | {"maxnreg": 168}, tile | {"maxnreg": 255})
        return
    blocks, segments = (16, 32, 64, 128), (32, 64, 128, 256)
    for block, segment, warps, stages in product(blocks, segments, (4, 8, 16), (1, 2)):
        if segment < max(64, 2 * case.tokens) and block * segment <= 128 * 128:
            tile = {"BLOCK": block, "largest_segment": segment, "num_warps": warps}
            yield tile | {"num_stages": stages} if stages > 1 else tile


def kernels(case: Case) -> list[str]:
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
    return names + ["tiled_backward"] * (longest > 256)


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest trial that has a time."""
    timed = [trial for trial in trials if trial.microseconds is not None]
    return min(timed, key=lambda trial: trial.microseconds or 0.0, default=None)


def rule(trial: Trial, case: Case) -> str:
    """Render a winner as a line of ``tuned/sm_*.toml``."""
    dim = max(16, power_of_2(case.head_dim))
    tile = ", ".join(f"{name} = {json.dumps(value)}" for name, value in trial.tile.items())
    wanted = {"odd": dim != case.head_dim, "unaligned": case.head_dim % 16 != 0}
    features = json.dumps([name for name, present in wanted.items() if present])
    tokens = max(case.rows, case.tokens)
    longest = "" if trial.kernel.startswith("tiled") else f"tokens = {tokens}, "
    return f"  {{ dim = {dim}, {longest}with = {features}, tile = {{ {tile} }} }},"


class Problem:
    """The tensors of one case, several sets of them."""

    def __init__(self, case: Case, device: torch.device) -> None:
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
            short_backward,
            warp_multihead,
        )
        from leaner_kernels.ops.attention.kernels import short_forward as forward
        from leaner_kernels.ops.attention.kernels.scores import Tiles
        from leaner_kernels.ops.attention.tiles import (
            AMPERE,
            HOPPER,
            AmpereTile,
            HopperTile,
            MultiheadTile,
            ShortTile,
            WarpMultiheadTile,
            capability,
        )

        family = kernel.removesuffix("_forward").removesuffix("_backward")
        gpus = {"hopper": HOPPER, "ampere": AMPERE, "warp_multihead": AMPERE + HOPPER}.get(family)
        if gpus and capability(self.sets[0][0].device) not in gpus:
            raise RuntimeError(f"for compute capability {' and '.join(map(str, gpus))} alone")
        found = []
        tokens = max(self.case.rows, self.case.tokens)
        for q, k, v, grad in self.sets:
            call = Call(q, k, v, None, None, None, 0.0, self.case.causal, self.case.scale)
            out = operators.new_out(q)
            max_log_sum = operators.new_max_log_sum(q)
            gradients = [torch.empty_like(t) for t in (q, k, v)]
            if kernel.startswith("multihead"):
                axes = (max(16, power_of_2(t.shape[2])) for t in (q, k))
                chosen = MultiheadTile(ROWS=next(axes), COLS=next(axes), **tile)
                if kernel.endswith("forward"):
                    launch = multihead.prepare_forward(chosen, call, out, max_log_sum, None)
                else:
                    launch = multihead.prepare_backward(chosen, grad, call, *gradients, None)
            elif kernel.startswith("warp_multihead"):
                chosen = WarpMultiheadTile(**tile)
                if kernel.endswith("forward"):
                    launch = warp_multihead.prepare_forward(chosen, call, out, max_log_sum, None)
                else:
                    launch = warp_multihead.prepare_backward(chosen, grad, call, *gradients)
            elif kernel.endswith("forward"):
                if kernel.startswith("hopper"):
                    chosen = HopperTile(**tile)
                    launch = hopper_forward.prepare(chosen, call, out, max_log_sum, None)
                elif kernel.startswith("ampere"):
                    chosen = AmpereTile(**tile)
                    launch = ampere_forward.prepare(chosen, call, out, max_log_sum, None)
                else:
                    chosen = ShortTile(tokens, **tile)
                    launch = forward.prepare(chosen, call, out, max_log_sum, None)
            else:
                scores = q.float() @ k.float().mT
                if self.case.causal:
                    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                    scores.masked_fill_(hidden, float("-inf"))
                largest = scores.amax(-1, keepdim=True)
                scores = self.case.scale * (scores - largest)
                sums = scores.logsumexp(-1, keepdim=True)
                max_log_sum.copy_(torch.cat((largest, sums), dim=-1))
                out.copy_(scores.softmax(-1) @ v.float())
                saved = grad, call, out, max_log_sum, *gradients
                if kernel.startswith("hopper"):
                    launch = hopper_backward.prepare(HopperTile(**tile), *saved)
                elif kernel.startswith("ampere"):
                    launch = ampere_backward.prepare(AmpereTile(**tile), *saved)
                elif kernel.startswith("tiled"):
                    launch = online_backward.prepare(*saved, None, tiles=Tiles(**tile))
                else:
                    chosen = ShortTile(tokens, **tile)
                    launch = short_backward.prepare(chosen, *saved, None)
            found.append(launch)
        return found


def written(launch: Any) -> list[Tensor]:
    """Return the tensors that a launch writes, less what the backward needs of its rows."""
    names = ("dq_view", "dk_view", "dv_view") if "dq_view" in launch.arguments else ("out_view",)
    return [launch.arguments[name].ptr for name in names]


def try_tile(
    problem: Problem, kernel: str, tile: dict[str, int], truth: list[Tensor] | None
) -> tuple[Trial, list[Tensor] | None]:
    """Compile, compare and time one tile; also return what it computed."""
    name, registers = problem.case.name, None
    try:
        launches = problem.launches(kernel, tile)
        compiled = launches[0].start()
        torch.cuda.synchronize()
        registers = getattr(compiled, "n_regs", None)
        if getattr(compiled, "n_spills", 0) and looped_spills(compiled.asm["cubin"]):
            return Trial(kernel, name, tile, None, registers, "spills in a loop"), None
        results = [t.clone() for t in written(launches[0])]
        for result, expected in zip(results, truth or (), strict=bool(truth)):
            error = (result.float() - expected.float()).abs().max()
            if not error <= TOLERANCE * expected.float().abs().max():
                return Trial(kernel, name, tile, None, registers, f"off by {error:.3g}"), None
        timer = clock.CudaClock()
        calls = timer.calls = 4 * len(launches)
        run = clock.graph_round(lambda launch: launch.start(), launches, calls)
        seconds = clock.seconds(run, timer, ROUNDS)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        return Trial(kernel, name, tile, None, registers, reason), None
    return Trial(kernel, name, tile, round(seconds * 1e6, 2), registers), results


def tune(case: Case, device: torch.device) -> Iterator[Trial]:
    """Yield a trial for every candidate of every kernel that takes the case."""
    problem = Problem(case, device)
    for kernel in kernels(case):
        truth: list[Tensor] | None = None
        for tile in candidates(kernel, case):
            trial, results = try_tile(problem, kernel, tile, truth)
            truth = truth or results
            yield trial


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, tune and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    takes = {
        case.name: case
        for case in CASES
        if case.device == "cuda" and not case.padded and not case.lengths and kernels(case)
    }
    parser.add_argument("--case", nargs="+", choices=list(takes), default=list(takes))
    parser.add_argument("--json", type=Path, help="keep every timing there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench.tune: torch sees no CUDA GPU: nothing to time")
    trials: list[Trial] = []
    for name in options.case:
        found = list(tune(takes[name], torch.device("cuda")))
        trials += found
        for kernel in dict.fromkeys(trial.kernel for trial in found):
            winner = best([trial for trial in found if trial.kernel == kernel])
            if winner is not None:
                sys.stdout.write(f"# {name}: {winner.microseconds} us\n{kernel}\n")
                sys.stdout.write(rule(winner, takes[name]) + "\n")
    if options.json is not None:
        facts = {"machine": machine.facts(), "commit": machine.commit()}
        trials_json = [trial._asdict() for trial in trials]
        options.json.write_text(json.dumps(facts | {"trials": trials_json}, indent=1) + "\n")


if __name__ == "__main__":
    main()
