"""What attention of every kind keeps for its backward, and its peak memory, for every peer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bench.catalogue import ATTENTION_CASES, AnyCase, peers_of
from bench.harness import counters
from bench.harness.checked import first_line, need_gpu, one_call
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer


@dataclass(frozen=True)
class Row:
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
            yield pytest.param(Row(case, name), marks=marks, id=f"{case.name}-memory-{name}")


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_memory(row, benchmark, checked, unmeasured, seconds_left):
    need_gpu(row.case.device)
    case = {"case": row.case.name}
    if seconds_left <= 0:
        reason = "memory: the time of --bench-seconds was spent"
        unmeasured("not run", reason, **case, peer="every peer left")
    try:
        function, _, sets = checked.peer(row.case, row.name)
        with row.peer.context():
            # One round: its time is no result, but makes the row part of the file.
            count = partial(counters.kept_for_backward, function, sets[0].leaves)
            kept = benchmark.pedantic(count)
            both = partial(one_call("both", function), sets[0])
            peak = row.case.device == "cuda" and counters.peak_memory(both)
    except AbsentError as absent:
        unmeasured("absent", str(absent), **case, peer=row.name)
    except WrongError as wrong:
        unmeasured("wrong", str(wrong), **case, peer=row.name)
    except REFUSALS as error:
        if row.peer.ours:
            raise
        unmeasured("absent", f"refuses memory: {first_line(error)}", **case, peer=row.name)
    benchmark.extra_info.update(
        case,
        peer=row.name,
        ours=row.peer.ours,
        layout=row.peer.layout,
        shape=row.case.facts(),
        kept_bytes=kept._asdict(),
        tokens=row.case.key_rows,
        peak_memory_bytes=peak or None,
    )
