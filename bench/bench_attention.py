"""Softmax attention, forward, backward and both, against every peer."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import clock, counters, machine
from bench.cases import CASES, DIRECTIONS, Case
from bench.gate import Inputs, Problem, WrongError
from bench.peers import PEERS, REFUSALS, AbsentError, Peer

# How long one row is timed. Hundreds of rows on a GPU must fit in minutes.
SECONDS = {"cpu": 0.1, "cuda": 0.15}


@dataclass(frozen=True)
class Row:
    """One number: a peer on a case, in one direction, timed in one way."""

    case: Case
    direction: str
    mode: str
    name: str
    clock: clock.Clock

    @property
    def peer(self) -> Peer:
        """How the peer is built and called."""
        return PEERS[self.name]


def rows() -> Iterator[Any]:
    """Peers follow each other within a case, so that a drifting clock rate favours none."""
    for case in CASES:
        for direction in DIRECTIONS:
            for mode in clock.MODES[case.device]:
                for name in PEERS:
                    row = Row(case, direction, mode, name, clock.clock_for(case.device))
                    group = f"{case.name} {direction} {mode}"
                    marks = pytest.mark.benchmark(timer=row.clock, group=group, disable_gc=True)
                    yield pytest.param(row, marks=marks, id=f"{group} {name}".replace(" ", "-"))


class Checked:
    """The problem of the case at hand, every peer after its gate, and every row measured."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.peers: dict[tuple[Case, str], Any] = {}
        self.measured: list[tuple[Row, dict[str, Any]]] = []

    def use(self, case: Case, copies: int) -> Problem:
        """Return the problem of a case; the memory of the case before is freed first."""
        if self.problem is None or self.problem.case != case:
            self.problem = None
            self.problem = Problem(case, torch.device(case.device), copies)
        return self.problem

    def peer(self, row: Row) -> tuple[Callable[..., Tensor], float, list[Inputs]]:
        """Return a function, how much of its error budget it used, and inputs; or raise why not."""
        device = torch.device(row.case.device)
        copies = clock.copies_beyond_cache(row.case.bytes("forward"), device)
        problem, key = self.use(row.case, copies), (row.case, row.name)
        if key not in self.peers:
            try:
                self.peers[key] = self._check(row, problem)
            except (AbsentError, WrongError, *REFUSALS) as error:
                self.peers[key] = error
        if isinstance(self.peers[key], Exception):
            raise self.peers[key]
        return *self.peers[key], problem.inputs(row.peer.layout)

    def _check(self, row: Row, problem: Problem) -> tuple[Callable[..., Tensor], float]:
        with warnings.catch_warnings(record=True) as warned, row.peer.context():
            warnings.simplefilter("always")
            try:
                function = row.peer.build(row.case, problem.device)
                return function, max(problem.check(row.peer, function).values())
            except REFUSALS as error:
                if row.peer.ours:
                    raise
                # PyTorch warns of the reason and then raises that there is no kernel.
                reasons = [first_line(error), *(first_line(w.message) for w in warned)]
                raise AbsentError(f"refuses the case: {' '.join(reasons)[:300]}") from None

    def name_kernels(self) -> None:
        """Add the kernels that each measured row ran to its ``extra_info``.

        After everything is timed, because a profiler stays attached and slows what follows.
        """
        for row, info in self.measured:
            function, _ = self.peers[row.case, row.name]
            inputs = self.use(row.case, copies=1).inputs(row.peer.layout)[0]
            call = one_call(row.direction, function)
            with row.peer.context():
                if row.direction == "backward":
                    inputs = function(*inputs.leaves), inputs
                info["kernels"] = counters.kernel_names(partial(call, inputs), row.case.device)


def first_line(error: Exception | Warning | str) -> str:
    """Return what an error says, without the place inside PyTorch that it says it from."""
    text = str(error).split("(Triggered internally")[0].strip()
    return (text or type(error).__name__).splitlines()[0][:200]


@pytest.fixture(scope="session")
def checked() -> Iterator[Checked]:
    state = Checked()
    yield state
    state.name_kernels()


def one_call(direction: str, function: Callable[..., Tensor]) -> Callable[[Any], Any]:
    """Return a call of one direction; ``backward`` takes (output, inputs), the others inputs.

    Forward runs with gradients enabled and keeps what its backward needs, as in training.
    """
    grad = torch.autograd.grad
    return {
        "forward": lambda given: function(*given.leaves),
        "backward": lambda done: grad(done[0], done[1].leaves, done[1].grad, retain_graph=True),
        "both": lambda given: grad(function(*given.leaves), given.leaves, given.grad),
    }[direction]


def measure(row: Row, benchmark: Any, function: Callable[..., Tensor], sets: list[Any]) -> None:
    """Time one row, and add what it cost to the benchmark's ``extra_info``."""
    captured = row.mode == "graph"
    call = one_call(row.direction, function)
    if captured:
        torch.cuda.synchronize()  # the inputs were made on another stream
    stream = torch.cuda.stream(clock.capture_stream()) if captured else nullcontext()
    with row.peer.context(), stream:
        if row.direction == "backward":
            sets = [(function(*given.leaves), given) for given in sets]
        run_round = clock.record(
            benchmark, row.clock, row.mode, call, sets, SECONDS[row.case.device]
        )
        info = benchmark.extra_info
        if row.case.device == "cuda":
            info["clocks_mhz"] = machine.Gpu(0).clocks_mhz
        if row.mode == "eager":
            info["peak_memory_bytes"] = counters.peak_memory(partial(call, sets[0]))
        if captured and row.direction == "both":
            info["joules"] = counters.joules_per_call(run_round, row.clock.calls, machine.Gpu(0))
    info["calls_per_round"], info["input_sets"] = row.clock.calls, len(sets)


def roof(case: Case, direction: str, seconds: float) -> dict[str, float]:
    """Return the useful work of a call, its rates, and what part they are of measured ceilings."""
    num_bytes, flops = case.bytes(direction), case.flops(direction)
    bandwidth = machine.copy_bandwidth(case.device)
    rate = machine.matrix_rate(case.device, case.dtype)
    return {
        "bytes": num_bytes,
        "flops": flops,
        "exps": case.exps(direction),
        "gb_per_s": num_bytes / seconds / 1e9,
        "tflop_per_s": flops / seconds / 1e12,
        "copy_gb_per_s": bandwidth / 1e9,
        "copy_fraction": num_bytes / seconds / bandwidth,
        "matrix_tflop_per_s": rate / 1e12,
        "matrix_fraction": flops / seconds / rate,
    }


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_attention(row, benchmark, checked, unmeasured, seconds_left):
    if row.case.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")
    case = {"case": row.case.name}
    if seconds_left <= 0:
        reason = f"{row.direction} {row.mode}: the time of --bench-seconds was spent"
        unmeasured("not run", reason, **case, peer="every peer left")
    try:
        function, budget_used, sets = checked.peer(row)
        measure(row, benchmark, function, sets)
    except AbsentError as absent:
        unmeasured("absent", str(absent), **case, peer=row.name)
    except WrongError as wrong:
        unmeasured("wrong", str(wrong), **case, peer=row.name)
    except REFUSALS as error:
        if row.peer.ours:
            raise
        reason = f"refuses {row.direction} {row.mode}: {first_line(error)}"
        unmeasured("absent", reason, **case, peer=row.name)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        case,
        peer=row.name,
        ours=row.peer.ours,
        layout=row.peer.layout,
        direction=row.direction,
        mode=row.mode,
        shape=row.case.facts(),
        budget_used=budget_used,
        **roof(row.case, row.direction, benchmark.stats.stats.median),
    )
    if row.mode != "graph":  # a graph replays the kernels of the eager row
        checked.measured.append((row, benchmark.extra_info))
