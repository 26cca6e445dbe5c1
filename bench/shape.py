"""Time attention on this device, for one shape or for the shapes of README's table.

    python -m bench.shape --paper                  # README's table on this GPU, in two minutes
    python -m bench.shape 128,16,197,64            # batch, heads, tokens, head dimension
    python -m bench.shape 128,16,512,32 --causal --float16
    ncu --profile-from-start off python -m bench.shape --profile vit_base

Every row is compared with float64 before it is timed. Times are microseconds: the median of at
least ten rounds, which replay a CUDA graph on a GPU and call from Python on a CPU. "Forward" keeps
the tensors that the backward needs, as in training. A ratio says how many times as fast as
PyTorch's (or timm's) default a row is. ``--json FILE`` writes the measurements as a result of the
benchmarks, which ``python -m bench.report FILE`` prints. ``--profile`` times nothing. It runs the
forward and backward of cases of bench/attention/cases.py once under a profiler, with our kernels
and with PyTorch's; compilation and warm-up are not profiled.
"""

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.attention.cases import CASES, AttentionCase
from bench.attention.catalogue import HEADLINE, LABELS, ON_GPU, facts_of, peers_of, problem_of
from bench.attention.gate import AttentionProblem
from bench.catalogue import DEFAULTS, size
from bench.harness import clock, command, machine
from bench.harness.checked import Current, first_line, one_call, unmeasured_lines
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer
from leaner_kernels import explain

DIRECTIONS = {"both": "forward and backward", "forward": "forward"}
PROFILED = (
    *("leaner_kernel", "leaner_packed", "sdpa"),
    *("leaner_varlen", "torch_varlen"),  # of sequences of different lengths
)
# Names of a case's public function among its peers.
PUBLIC = "leaner_attention", "leaner_varlen", "leaner"
# Of README's table: ours, and what PyTorch and timm bring along, without torch.compile.
PAPER_PEERS = (
    *PUBLIC,
    "leaner_kernel",
    *("timm", "eager", "eager_padded", "torch_varlen"),
    *("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"),
    *("sdpa_padded", "sdpa_cudnn_padded", "sdpa_efficient_padded"),
)
# About 66 peers in two directions at 0.3 s each, compiling ten shapes, and float64 references.
PAPER_SECONDS, PAPER_BUDGET = 110.0, 0.1


class Measurements:
    """The measurements of cases, in the form of every benchmark's JSON.

    Attributes:
        cases: the facts of each case, by name.
        entries: one for each peer, case and direction.
        unmeasured: which peer has no number in a case, and why.
    """

    def __init__(self) -> None:
        """Start without a case."""
        self.cases: dict[str, dict[str, Any]] = {}
        self.entries: list[dict[str, Any]] = []
        self.unmeasured: list[dict[str, str]] = []

    def measure(
        self, case: Any, names: Container[str], budget: float = 0.15, deadline: float = math.inf
    ) -> None:
        """Check and time peers of a case in each direction.

        Args:
            case: one of ``ATTENTION_CASES``, or a case with the same fields.
            names: names of the peers.
            budget: about how many seconds to time a peer in a direction.
            deadline: of ``time.monotonic``, after which nothing more is measured.
        """
        self.cases[case.name] = case.facts()
        current = Current(peers_of, problem_of)
        for name, peer in peers_of(case).items():
            for direction in DIRECTIONS if name in names else ():
                if time.monotonic() >= deadline:
                    reason = f"{direction}: the time of --seconds was spent"
                    self._leave_out(case, name, "not run", reason)
                    continue
                try:
                    self.entries.append(_entry(current, case, name, direction, budget))
                except (AbsentError, WrongError, *REFUSALS) as error:
                    self._leave_out(case, name, *_why_not(error, peer, direction))

    def _leave_out(self, case: Any, name: str, status: str, reason: str) -> None:
        entry = {"case": case.name, "peer": name, "status": status, "reason": reason}
        if entry not in self.unmeasured:
            self.unmeasured.append(entry)

    def medians(self, case: Any, direction: str) -> dict[str, float]:
        """Return seconds by peer, the fastest first."""
        group = [entry for entry in self.entries if entry["group"] == _group(case, direction)]
        times = {entry["name"]: entry["stats"]["median"] for entry in group}
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def write(self, path: Path) -> None:
        """Write a result that ``bench.frames`` reads."""
        head = command.origin() | {"cases": self.cases, "unmeasured": self.unmeasured}
        command.write(path, self.entries, "benchmarks", **head)


def _group(case: Any, direction: str) -> str:
    return f"{case.name} {direction} {clock.MODES[case.device][0]}"


def _entry(current: Current, case: Any, name: str, direction: str, budget: float) -> dict[str, Any]:
    """Check a peer, time it in a direction, and return its entry of a result."""
    function, budget_used, sets = current.peer(case, name)
    peer, mode = peers_of(case)[name], clock.MODES[case.device][0]
    with peer.context():
        times = clock.sample(one_call(direction, function), sets, case.device, budget)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    info = {"case": case.name, "peer": name, "ours": peer.ours}
    info |= facts_of(case, peer.layout, direction, mode, budget_used, median)
    stats = {"median": median, "iqr": high - low, "min": min(times), "rounds": len(times)}
    group = _group(case, direction)
    return command.rounded({"group": group, "name": name, "extra_info": info, "stats": stats})


def _why_not(error: Exception, peer: Peer, direction: str) -> tuple[str, str]:
    """Return the status and the reason of a peer that got no number."""
    if isinstance(error, AbsentError):
        return "absent", str(error)
    if isinstance(error, WrongError):
        return "wrong", str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "absent", f"{direction}: the GPU's memory does not suffice"
    if peer.ours:
        return "wrong", f"{direction}: {type(error).__name__}: {first_line(error)}"
    return "absent", f"refuses {direction}: {first_line(error)}"


def routes(case: Any) -> tuple[str, str | None]:
    """Return what the public function runs forward and backward: "our kernel" for an operator."""
    if not isinstance(case, AttentionCase):
        return "our kernel", "our kernel"
    shapes = [(case.batch, case.heads, n, case.head_dim) for n in (case.rows, case.tokens)]
    options: dict[str, Any] = {"is_causal": case.causal, "window_size": case.window_size}
    if case.ragged:
        shapes = [(case.query_rows, case.heads, case.head_dim)] * 2
        ends = case.offsets(torch.device(case.device))
        options |= {"cu_seqlens": ends, "max_seqlen": case.tokens}
    query, key = (torch.empty(shape, dtype=case.dtype, device=case.device) for shape in shapes)
    forward, backward = explain(query, key, key, backward=True, **options)
    return forward.implementation, backward and backward.implementation


def shape_table(case: AttentionCase, measured: Measurements) -> str:
    """Return every peer of a case: its time and its ratio in each direction, and who wins."""
    times = {direction: measured.medians(case, direction) for direction in DIRECTIONS}
    names = list(dict.fromkeys(name for group in times.values() for name in group))
    columns, winners = {"peer": names}, []
    for direction, words in DIRECTIONS.items():
        group, default = times[direction], default_of(times[direction])
        columns[f"{words}, µs"] = [microseconds(group.get(name)) for name in names]
        columns[f"× {default}, {direction}"] = [ratio(group, default, name) for name in names]
        # Only peers that begin with separate q, k and v: a fused projection needs other copies.
        apart = (name for name in group if peers_of(case)[name].layout != "packed")
        if first := next(apart, ""):
            times_faster = ratio(group, default, first) or "?"
            winners.append(
                f"{words}: {first} is fastest, {times_faster} times as fast as {default}"
            )
    columns["what it is"] = [peers_of(case)[name].about for name in names]
    forward, backward = routes(case)
    lines = *winners, f"attention runs {forward} forward and {backward} backward in training"
    table = command.table([*columns], [*zip(*columns.values(), strict=True)])
    return table + "".join(f"{line}\n" for line in lines)


def paper_table(cases: Sequence[Any], measured: Measurements, direction: str) -> str:
    """Return a row for each case: the times of our public function and of PyTorch."""
    headers = ["attention", "B·H·N·D", "ours, µs", "default, µs", "× as fast", "fastest other, µs"]
    rows = []
    for case in cases:
        times = measured.medians(case, direction)
        default, public = default_of(times), next((name for name in PUBLIC if name in times), "")
        others = [name for name in times if not peers_of(case)[name].ours]
        forward, backward = routes(case)
        ours, faster = microseconds(times.get(public)), ratio(times, default, public)
        dispatched = forward in ("sdpa", "varlen_attn")
        if dispatched:
            ours = (
                f"PyTorch ({microseconds(times.get('leaner_kernel')) or 'own kernel not measured'})"
            )
            # PyTorch's default is what runs.
            faster = "1" if forward == "sdpa" else faster
        contest = [*others[:1], *([public] if public and not dispatched else [])]
        winner = min(contest, key=times.__getitem__, default="")
        rows.append(
            [
                LABELS.get(case.name, case.name),
                size(case.facts()),
                ours,
                f"{microseconds(times.get(default))} {default}".strip(),
                faster,
                f"{microseconds(times[others[0]])} {others[0]}" if others else "",
                "ours" if winner == public else winner,
                forward
                if direction == "forward" or forward == backward
                else f"{forward}, {backward}",
            ]
        )
    return command.table([*headers, "winner", "attention runs"], rows)


def default_of(times: Mapping[str, float]) -> str:
    """Return the measured default peer, which everybody has, or ""."""
    return next((name for name in DEFAULTS if name in times), "")


def microseconds(seconds: float | None) -> str:
    """Return a time for a table, "" for None."""
    if seconds is None:
        return ""
    return f"{1e6 * seconds:,.1f}" if seconds < 1e-4 else f"{1e6 * seconds:,.0f}"


def ratio(times: Mapping[str, float], default: str, name: str) -> str:
    """Return how many times as fast as the default a peer is; nothing if either has no time."""
    if default not in times or name not in times:
        return ""
    return f"{times[default] / times[name]:.3g}"


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
    """Run the command line.

    Raises:
        SystemExit: the arguments cannot be used, or a GPU is needed and there is none, in one line;
            with status 1, a peer was wrong.
    """
    by_name = {case.name: case for case in CASES if case.device == "cuda"}
    parser = command.parser("bench.shape", __doc__)
    parser.add_argument(
        "shape", nargs="?", help="batch,heads,tokens,head_dim, such as 128,16,197,64"
    )
    parser.add_argument(
        "--paper",
        action="store_true",
        help="measure README's table on this GPU in about two minutes: our kernels, PyTorch's "
        "default and its fastest other backend, in training and in the forward alone",
    )
    parser.add_argument("--causal", action="store_true", help="measure SHAPE with a causal mask")
    dtypes = parser.add_mutually_exclusive_group()
    dtypes.add_argument(
        "--float16", action="store_true", help="measure SHAPE in float16 (bfloat16)"
    )
    dtypes.add_argument(
        "--float32", action="store_true", help="measure SHAPE in float32 (bfloat16)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no new measurement after this many seconds, and list those left out "
        f"({PAPER_SECONDS:.0f} with --paper or on a CPU; otherwise no limit)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the measurements to FILE, for python -m bench.report FILE; name it "
        "DATE-GPU-shape.json, such as 2026-12-01-a100-shape.json, to add it to bench/results",
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        choices=by_name,
        metavar="CASE",
        help=f"run cases under a profiler instead: {', '.join(by_name)}",
    )
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.shape, options.paper, options.profile))) != 1:
        parser.error("give one of SHAPE, --paper and --profile")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent} is not a folder")
    command.need_pytorchs_attention("bench.shape")
    if options.profile:
        command.need_gpu("bench.shape --profile")
        profile([by_name[name] for name in options.profile])
        return
    measured, seconds = Measurements(), options.seconds
    if seconds is None:
        seconds = math.inf if torch.cuda.is_available() and not options.paper else PAPER_SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.paper:
            command.need_gpu("bench.shape --paper")
            cases = [ON_GPU[name] for name in HEADLINE]
            sys.stdout.writelines(paper(cases, measured, seconds))
        else:
            case = shape_case(parser, options)
            deadline = time.monotonic() + seconds
            measured.measure(case, peers_of(case), deadline=deadline)
            sys.stdout.write(f"{device_line(case.device)}\n\n{shape_table(case, measured)}")
    sys.stdout.writelines(f"{line}\n" for line in unmeasured_lines(measured.unmeasured))
    if options.json:
        measured.write(options.json)
    if any(entry["status"] == "wrong" for entry in measured.unmeasured):
        raise SystemExit(1)


def paper(cases: Sequence[Any], measured: Measurements, seconds: float) -> Iterator[str]:
    """Measure cases, and yield the device and a table for each direction."""
    deadline = time.monotonic() + seconds
    for case in cases:
        sys.stderr.write(f"{case.name}: {size(case.facts())}\n")
        measured.measure(case, PAPER_PEERS, PAPER_BUDGET, deadline)
    yield f"{device_line(cases[0].device)}\n"
    for direction, words in DIRECTIONS.items():
        yield f"\n{words}:\n\n{paper_table(cases, measured, direction)}"
    yield "\nours: what our public function runs; where it calls PyTorch, our own kernel's time is "
    yield "in parentheses\ndefault: PyTorch's scaled_dot_product_attention, or timm's code\n"


def device_line(device: str) -> str:
    """Return the device and the versions of torch and Triton that the times are for."""
    name = torch.cuda.get_device_name() if device == "cuda" else machine.cpu()["model"]
    versions = machine.versions()
    packages = "torch", "triton", "leaner_kernels"
    return ", ".join([name, *(f"{package} {versions[package]}" for package in packages)])


def shape_case(parser: argparse.ArgumentParser, options: argparse.Namespace) -> AttentionCase:
    """Return the case that a command line describes, or end with its parser's error."""
    try:
        sizes = [*map(int, options.shape.split(","))]
        batch, heads, tokens, head_dim = sizes
    except ValueError:
        parser.error(f"shape must be four integers, batch,heads,tokens,head_dim: {options.shape}")
    if min(sizes) < 1:
        parser.error(f"every size must be at least 1: {options.shape}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # threads wait for each other where another process is busy
    dtype = torch.float16 if options.float16 else torch.bfloat16
    dtype = torch.float32 if options.float32 else dtype
    name = "x".join(map(str, sizes)) + "_causal" * options.causal
    shape = batch, heads, tokens, head_dim
    return AttentionCase(name, device, *shape, dtype, causal=options.causal)


if __name__ == "__main__":
    main()
