"""Profile training steps of a whole model: the time of every kernel, as a table and as JSON.

    python -m bench.networks.profile_steps model_vit_base_lean leaner_compiled --json profile.json

Cases and peers have the names of the results of bench/networks. torch.profiler records steps after
a warm-up. On a CPU nothing is compiled, and the table has PyTorch's operators instead of kernels.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.harness import clock, command
from bench.harness.peers import AbsentError
from bench.harness.steps import Training
from bench.networks.cases import PAPER_CASES
from bench.networks.gate import models_of, peers_of

STEPS, WARMUP = 3, 5
PRINTED = 30  # rows
CASES = {case.name: case for case in PAPER_CASES}


def by_kernel(training: Training, steps: int = STEPS) -> list[dict[str, Any]]:
    """Profile steps of a model that has warmed up.

    Args:
        training: what takes the steps.
        steps: how many are profiled, after one that sets the profiler up.

    Returns:
        A row for each kernel, the longest first: its name, how often it runs in a step, the
        microseconds that all of these take, and their share of all kernels' time.
    """
    on_gpu = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    for count in (1, steps):  # the first profile of a process sets the profiler up
        with profile(activities=activities) as run:
            for _ in range(count):
                training.step()
            if on_gpu:
                torch.cuda.synchronize()
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = []
    for event in run.key_averages():
        # An annotation spans the kernels that it names, which have rows of their own.
        if event.device_type != device or event.is_user_annotation:
            continue
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        rows.append(
            {"kernel": event.key, "calls": event.count / steps, "microseconds": total / steps}
        )
    everything = sum(row["microseconds"] for row in rows)
    for row in rows:
        row["share"] = row["microseconds"] / everything
    return sorted(rows, key=lambda row: -row["microseconds"])


def measure(case: str, peer: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Check a model, warm it up and profile it.

    Args:
        case: of ``PAPER_CASES``.
        peer: a row of its training.

    Returns:
        The rows of ``by_kernel``, and what they are of: ``microseconds_per_step`` is measured
        without the profiler, and what it exceeds all kernels by is time between kernels.

    Raises:
        AbsentError: the peer is not installed, or it is to be compiled on a CPU.
    """
    models = models_of(CASES[case])
    models.check(peer)
    training = models.training(peer)
    for _ in range(WARMUP):
        training.step()
    seconds = clock.seconds(training.step, clock.Clock(training.device.type), rounds=10)
    rows = by_kernel(training)
    facts = {"case": case, "peer": peer, "shape": CASES[case].facts(), "steps": STEPS}
    return rows, facts | {"microseconds_per_step": 1e6 * seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command.parser("bench.networks.profile_steps", __doc__)
    parser.add_argument(
        "case", metavar="CASE", help="row of the paper, such as model_vit_base_lean"
    )
    parser.add_argument("peer", metavar="PEER", help="library and mode, such as leaner_compiled")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all kernels to FILE as JSON"
    )
    flags = parser.parse_args(arguments)
    if flags.case not in CASES:
        parser.error(f"CASE must be one of {', '.join(CASES)}, got {flags.case}")
    case = CASES[flags.case]
    if flags.peer not in peers_of(case):
        parser.error(f"PEER must be one of {', '.join(peers_of(case))}, got {flags.peer}")
    if case.device == "cuda":
        command.need_gpu("bench.networks.profile_steps")
    try:
        rows, facts = measure(flags.case, flags.peer)
    except AbsentError as absent:
        raise SystemExit(f"{flags.peer} in {flags.case}: {absent}") from None
    kernels = sum(row["microseconds"] for row in rows)
    for row in rows[:PRINTED]:
        sys.stdout.write(
            f"{row['microseconds']:10.1f} µs  {row['share']:6.1%}  {row['calls']:7.1f} calls  "
            f"{row['kernel'][:60]}\n"
        )
    sys.stdout.write(
        f"{kernels:10.1f} µs in {len(rows)} kernels; a step without the profiler takes "
        f"{facts['microseconds_per_step']:.1f} µs\n"
    )
    if flags.json:
        command.write(flags.json, rows, **command.origin(), **facts)


if __name__ == "__main__":
    main()
