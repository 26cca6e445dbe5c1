"""Time attention of one shape: ours beside PyTorch's, each of its backends and flash-attn.

    python -m bench.shape 128,16,197,64            # batch, heads, tokens, head dimension
    python -m bench.shape 128,16,512,32 --causal --float16

Every row passes the correctness gate of the benchmarks first. Microseconds, the median of at least
ten rounds: on a GPU of a CUDA graph, on a CPU of calls from Python.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tabulate import tabulate

from bench.attention.cases import AttentionCase
from bench.attention.gate import AttentionProblem
from bench.attention.peers import peers_of
from bench.harness import clock
from bench.harness.checked import Checked, one_call
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError

DIRECTIONS = "forward", "both"


class Timed:
    """What ``clock.record`` passes its rounds to: it keeps their median."""

    def __init__(self, reading: clock.Clock):
        self.clock, self.seconds = reading, 0.0

    def pedantic(self, run_round: Any, rounds: int, warmup_rounds: int) -> None:
        """Time rounds."""
        for _ in range(warmup_rounds):
            run_round()
        self.seconds = clock.seconds(run_round, self.clock, rounds)


def microseconds(checked: Checked, case: AttentionCase, peer: str, direction: str) -> float:
    """Return how long a peer takes in one direction.

    Raises:
        AbsentError: the peer is not installed or does not support the case.
        WrongError: its result is outside the error budget.
    """
    function, _, sets = checked.peer(case, peer)
    mode = clock.MODES[case.device][0]
    stream = nullcontext()
    if mode == "graph":
        torch.cuda.synchronize()  # the inputs were made on another stream
        stream = torch.cuda.stream(clock.capture_stream())
    reading = clock.Clock(case.device)
    timed = Timed(reading)
    with peers_of(case)[peer].context(), stream:
        clock.record(timed, reading, mode, one_call(direction, function), sets, 0.15)
    return 1e6 * timed.seconds


def rows(case: AttentionCase) -> Iterator[list[str]]:
    """Yield a row for each peer: its name, and microseconds in each direction or why not."""
    checked = Checked(peers_of, AttentionProblem)
    for peer in peers_of(case):
        times = []
        for direction in DIRECTIONS:
            try:
                times.append(f"{microseconds(checked, case, peer, direction):,.1f}")
            except (AbsentError, WrongError, *REFUSALS) as error:
                absent = isinstance(error, AbsentError)
                times.append("absent" if absent else f"{type(error).__name__}: {error}"[:60])
        if set(times) != {"absent"}:
            yield [peer, *times]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table.

    Raises:
        SystemExit: the shape cannot be read, in one line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.shape",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", help="batch,heads,tokens,head_dim, such as 128,16,197,64")
    parser.add_argument("--causal", action="store_true", help="mask future tokens")
    parser.add_argument("--float16", action="store_true", help="instead of bfloat16")
    options = parser.parse_args(arguments)
    try:
        batch, heads, tokens, head_dim = map(int, options.shape.split(","))
    except ValueError:
        parser.error(f"shape must be four integers, batch,heads,tokens,head_dim: {options.shape}")
    if min(batch, heads, tokens, head_dim) < 1:
        parser.error(f"every size must be at least 1: {options.shape}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # threads wait for each other where another process is busy
    dtype = torch.float16 if options.float16 else torch.bfloat16
    case = AttentionCase(
        "shape", device, batch, heads, tokens, head_dim, dtype, causal=options.causal
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = list(rows(case))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    sys.stdout.write(tabulate(table, [name, "forward, µs", "forward and backward, µs"]) + "\n")


if __name__ == "__main__":
    main()
