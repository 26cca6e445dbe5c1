"""Run attention once under a profiler, forward and backward, of our kernels and of PyTorch's.

    ncu --profile-from-start off python -m bench.launch_once CASE...

Cases are those of bench/attention/cases.py by name. What compiles and warms up is not profiled.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch

from bench.attention.cases import CASES
from bench.attention.gate import AttentionProblem
from bench.attention.peers import peers_of
from bench.harness.checked import one_call
from bench.harness.peers import AbsentError

PEERS = {False: ("leaner_kernel", "leaner_packed", "sdpa"), True: ("leaner_varlen", "torch_varlen")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run the cases.

    Raises:
        SystemExit: no case has a given name, or there is no GPU, in one line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.launch_once",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    by_name = {case.name: case for case in CASES if case.device == "cuda"}
    parser.add_argument(
        "cases",
        nargs="+",
        choices=by_name,
        metavar="CASE",
        help=f"cases to run: {', '.join(by_name)}",
    )
    names = parser.parse_args(arguments).cases
    if not torch.cuda.is_available():
        raise SystemExit("bench.launch_once needs a CUDA GPU, but torch finds none")
    calls = []
    for case in (by_name[name] for name in names):
        problem = AttentionProblem(case, torch.device("cuda"), copies=1)
        for name in PEERS[case.ragged]:
            peer = peers_of(case)[name]
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


if __name__ == "__main__":
    main()
