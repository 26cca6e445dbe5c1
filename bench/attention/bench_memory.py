"""What attention of every kind keeps for its backward, and its peak memory, for every peer."""

from functools import partial

from bench.catalogue import ATTENTION_CASES, peers_of
from bench.harness import counters
from bench.harness.checked import Row, attempt, each_row, one_call


@each_row(
    Row(case, name, "memory", ours=peer.ours)
    for case in ATTENTION_CASES
    for name, peer in peers_of(case).items()
)
def test_memory(row, benchmark, checked, unmeasured, seconds_left):
    case, peer = row.case, peers_of(row.case)[row.name]
    with attempt(unmeasured, seconds_left, row):
        function, _, sets = checked.peer(case, row.name)
        with peer.context():
            # One round: its time is no result, but makes the row part of the file.
            count = partial(counters.kept_for_backward, function, sets[0].leaves)
            kept = benchmark.pedantic(count)
            both = partial(one_call("both", function), sets[0])
            peak = case.device == "cuda" and counters.peak_memory(both)
    benchmark.extra_info.update(
        layout=peer.layout,
        kept_bytes=kept._asdict(),
        tokens=case.key_rows,
        peak_memory_bytes=peak or None,
        **row.facts(),
    )
