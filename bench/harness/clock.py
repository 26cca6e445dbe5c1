"""Clocks and rounds for pytest-benchmark: a round makes many calls, a reading is seconds per call.

On a GPU the inputs of successive calls differ and together outgrow the L2 cache, so that a small
problem is measured against memory as in a model, where other layers come between.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

MODES = {"cpu": ("wall",), "cuda": ("graph", "eager")}
# For rows that are only called from Python.
FROM_PYTHON = {"cpu": "wall", "cuda": "eager"}
# Seconds to time a row of a kernel, and of a whole step: hundreds must fit in minutes.
SECONDS = {"cpu": 0.25, "cuda": 0.15}
STEP_SECONDS = {"cpu": 0.25, "cuda": 1.0}
ROUND_SECONDS = 0.005  # long against the microseconds that a round's first launch takes
MIN_ROUNDS, MAX_ROUNDS = 10, 50


class Clock:
    """Device time between two points of the current CUDA stream; host time for work on the CPU.

    Each benchmark has one of its own.

    Attributes:
        calls: how many calls a round makes; differences of readings are divided by it.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        """Start with rounds of one call."""
        self.calls, self.on_gpu = 1, device_type == "cuda"

    def __call__(self) -> Any:
        """Return a reading; the difference of two is seconds per call."""
        return Instant(self.calls) if self.on_gpu else time.perf_counter() / self.calls


class Instant:
    """A point of a CUDA stream; the difference of two is seconds per call."""

    def __init__(self, calls: int):
        """Mark the current stream."""
        self.calls = calls
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "Instant") -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3 / self.calls


def copies_beyond_cache(bytes_per_copy: int, device: torch.device) -> int:
    """Return how many sets of inputs outgrow twice the L2 cache; on the CPU one."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-2 * cache_bytes // bytes_per_copy))


def readings(function: Callable[[], Any], clock: Clock, rounds: int) -> list[float]:
    """Return the time of each round of ``function``, after one call to warm up."""
    function()
    times = []
    for _ in range(rounds):
        start = clock()
        function()
        times.append(clock() - start)
    return times


def seconds(function: Callable[[], Any], clock: Clock, rounds: int) -> float:
    """Return the median time of ``function``, after one call to warm up."""
    return statistics.median(readings(function, clock, rounds))


def eager_round(call: Callable[[Any], Any], sets: Sequence[Any], calls: int) -> Callable[[], None]:
    """Return a function that makes ``calls`` calls, over the sets one after another.

    The last result for each set stays alive, so that results rotate through memory as inputs do.
    """
    results: list[Any] = [None] * len(sets)
    turns = [turn % len(sets) for turn in range(calls)]

    def run() -> None:
        for turn in turns:
            results[turn] = call(sets[turn])

    return run


@cache
def capture_stream() -> torch.cuda.Stream:
    """Return the stream on which everything that a graph captures must have been prepared."""
    return torch.cuda.Stream()


def graph_round(call: Callable[[Any], Any], sets: Sequence[Any], calls: int) -> Callable[[], None]:
    """Return a function that replays ``eager_round`` from a CUDA graph: no launch overhead."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream()):
        eager_round(call, sets, calls)()
    return graph.replay


def rounds_of(
    clock: Clock, mode: str, call: Callable[[Any], Any], sets: Sequence[Any], budget: float
) -> tuple[Callable[[], Any], int]:
    """Return a round of calls over sets of inputs, and how many rounds to time.

    Args:
        clock: what times them; the round makes ``clock.calls`` calls.
        mode: one of ``MODES``; for ``graph``, ``capture_stream`` is current and made the sets.
        call: takes one of ``sets``.
        sets: inputs, used one after another.
        budget: about how many seconds to measure; no fewer than 10 rounds.
    """
    clock.calls = len(sets)
    once = seconds(eager_round(call, sets, len(sets)), clock, rounds=3)
    clock.calls = len(sets) * max(1, round(ROUND_SECONDS / once / len(sets)))
    run_round = (graph_round if mode == "graph" else eager_round)(call, sets, clock.calls)
    round_seconds = clock.calls * seconds(run_round, clock, rounds=1)
    return run_round, max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget / round_seconds)))


@contextmanager
def capturing(mode: str) -> Iterator[None]:
    """Make ``capture_stream`` current for ``graph``; for other modes nothing."""
    if mode != "graph":
        yield
        return
    torch.cuda.synchronize()  # captured kernels may use tensors of another stream
    with torch.cuda.stream(capture_stream()):
        yield


def sample(
    call: Callable[[Any], Any], sets: Sequence[Any], device_type: str, budget: float = 0.15
) -> list[float]:
    """Return the seconds of a call in each round: of a CUDA graph on a GPU, from Python on a CPU.

    Arguments are as in ``rounds_of``.
    """
    clock, mode = Clock(device_type), MODES[device_type][0]
    with capturing(mode):
        run_round, rounds = rounds_of(clock, mode, call, sets, budget)
        return readings(run_round, clock, rounds)


def timed(
    call: Callable[[Any], Any], sets: Sequence[Any], device_type: str, budget: float = 0.15
) -> float:
    """Return the median of ``sample``."""
    return statistics.median(sample(call, sets, device_type, budget))


def median(benchmark: Any) -> float:
    """Return the median of the recorded times; not a number with --benchmark-disable."""
    return benchmark.stats.stats.median if benchmark.stats else float("nan")


def record(benchmark: Any, clock: Clock, *timed: Any) -> Callable[[], Any]:
    """Let pytest-benchmark, whose timer is ``clock``, record ``rounds_of``; return the round."""
    run_round, rounds = rounds_of(clock, *timed)
    benchmark.pedantic(run_round, rounds=rounds, warmup_rounds=1)
    return run_round
