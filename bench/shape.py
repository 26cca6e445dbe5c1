"""Time attention of one shape: ours beside PyTorch's, each of its backends and flash-attn.

    python -m bench.shape 128,16,197,64            # batch, heads, tokens, head dimension
    python -m bench.shape 128,16,512,32 --causal --float16
    ncu --profile-from-start off python -m bench.shape --profile vit_base

Every row passes the correctness gate of the benchmarks first. Microseconds, the median of at least
ten rounds: on a GPU of a CUDA graph, on a CPU of calls from Python. ``--profile`` times nothing: it
runs cases of bench/attention/cases.py once under a profiler, forward and backward, of our kernels
and of PyTorch's; what compiles and warms up is not profiled.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.attention.cases import CASES, AttentionCase
from bench.attention.gate import AttentionProblem
from bench.attention.peers import peers_of
from bench.harness import clock, command
from bench.harness.checked import Current, one_call
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError

DIRECTIONS = "forward", "both"
PROFILED = (
    *("leaner_kernel", "leaner_packed", "sdpa"),
    *("leaner_varlen", "torch_varlen"),  # of sequences of different lengths
)


def rows(case: AttentionCase) -> Iterator[list[str]]:
    """Yield a row for each peer: its name, and microseconds in each direction or why not."""
    current = Current(peers_of, AttentionProblem)
    for name, peer in peers_of(case).items():
        times = []
        for direction in DIRECTIONS:
            try:
                function, _, sets = current.peer(case, name)
                with peer.context():
                    call = one_call(direction, function)
                    times.append(f"{1e6 * clock.timed(call, sets, case.device):,.1f}")
            except (AbsentError, WrongError, *REFUSALS) as error:
                absent = isinstance(error, AbsentError)
                times.append("absent" if absent else f"{type(error).__name__}: {error}"[:60])
        if set(times) != {"absent"}:
            yield [name, *times]


def profile(cases: Sequence[AttentionCase]) -> None:
    """Run our kernels and PyTorch's once under a profiler, forward and backward."""
    calls = []
    for case in cases:
        problem = AttentionProblem(case, torch.device("cuda"), copies=1)
        for name, peer in peers_of(case).items():
            if name not in PROFILED:
                continue
            try:
                function = peer.build(case, problem.device)
            except AbsentError as absent:
                sys.stderr.write(f"{case.name}, {name}: absent, {absent}\n")
                continue
            calls.append(partial(one_call("both", function), problem.inputs(peer.layout)[0]))
    for call in (*calls, *calls):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table.

    Raises:
        SystemExit: the shape cannot be read, or there is no GPU to profile on, in one line.
    """
    by_name = {case.name: case for case in CASES if case.device == "cuda"}
    parser = command.parser("bench.shape", __doc__)
    parser.add_argument(
        "shape", nargs="?", help="batch,heads,tokens,head_dim, such as 128,16,197,64"
    )
    parser.add_argument("--causal", action="store_true", help="mask future tokens")
    parser.add_argument("--float16", action="store_true", help="instead of bfloat16")
    parser.add_argument(
        "--profile",
        nargs="+",
        choices=by_name,
        metavar="CASE",
        help=f"run cases under a profiler instead: {', '.join(by_name)}",
    )
    options = parser.parse_args(arguments)
    if options.profile:
        command.need_gpu("bench.shape --profile")
        profile([by_name[name] for name in options.profile])
        return
    try:
        batch, heads, tokens, head_dim = map(int, (options.shape or "").split(","))
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
    from tabulate import tabulate

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    sys.stdout.write(tabulate(table, [name, "forward, µs", "forward and backward, µs"]) + "\n")


if __name__ == "__main__":
    main()
