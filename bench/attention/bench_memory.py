"""What attention of every kind keeps for its backward, and its peak memory, for every peer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bench.catalogue import ATTENTION_CASES, AnyCase, peers_of
from bench.harness import counters
from bench.harness.checked import attempt, one_call
from bench.harness.peers import Peer


@dataclass(frozen=True)
class MemoryBenchmark:
    """A peer on a case."""

    case: AnyCase
    name: str

    @property
    def peer(self) -> Peer:
        """How the peer is built and called."""
        return peers_of(self.case)[self.name]


def rows() -> Iterator[Any]:
    """Every peer on every case."""
    for case in ATTENTION_CASES:
        for name in peers_of(case):
            marks = pytest.mark.benchmark(group=f"{case.name} memory")
            yield pytest.param(
                MemoryBenchmark(case, name), marks=marks, id=f"{case.name}-memory-{name}"
            )


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_memory(row, benchmark, checked, unmeasured, seconds_left):
    case = row.case
    with attempt(unmeasured, seconds_left, case, row.name, what="memory", ours=row.peer.ours):
        function, _, sets = checked.peer(case, row.name)
        with row.peer.context():
            # One round: its time is no result, but makes the row part of the file.
            count = partial(counters.kept_for_backward, function, sets[0].leaves)
            kept = benchmark.pedantic(count)
            both = partial(one_call("both", function), sets[0])
            peak = case.device == "cuda" and counters.peak_memory(both)
    benchmark.extra_info.update(
        case=case.name,
        peer=row.name,
        ours=row.peer.ours,
        layout=row.peer.layout,
        shape=case.facts(),
        kept_bytes=kept._asdict(),
        tokens=case.key_rows,
        peak_memory_bytes=peak or None,
    )
