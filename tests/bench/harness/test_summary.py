"""What a run prints when it ends."""

from bench.harness import summary


def row(case, peer, rounds=10, group=None, shape=None, **info):
    info = {"case": case, "peer": peer, "shape": {"device": "cpu"} | (shape or {}), **info}
    return {"group": group or case, "name": "test", "rounds": rounds, "extra_info": info}


def test_what_only_counts_memory_is_not_timed():
    assert [summary.is_timed(row("a", "b", rounds=rounds)) for rounds in (1, 2)] == [False, True]


def test_an_original_and_its_lean_variant_are_compared_and_groups_keep_their_order():
    rows = [
        row("z_lean", "leaner", group="z_lean training", shape={"variant": "lean"}),
        row("a", "eager", group="a both wall"),
        row("z_original", "timm", group="z_original training", shape={"variant": "original"}),
    ]
    named = [(name, [row["name"] for row in rows]) for name, rows in summary.groups(rows)]
    assert named == [
        ("z training", ["leaner, lean", "timm, original"]),
        ("a forward and backward", ["eager"]),
    ]


def test_the_monitor_s_row_says_what_it_adds_to_a_step():
    ((_, (named,)),) = summary.groups([row("s", "every=10", overhead=0.051, overhead_iqr=0.02)])
    assert named["name"] == "KappaMonitor every=10: +5% a step, IQR 2%"


def test_memory_has_a_unit_and_a_row_without_it_is_left_out():
    kept = {"inputs": 3000, "out": 1000, "own": 2}
    rows = [
        row("a", "eager", rounds=1, kept_bytes=kept, peak_memory_bytes=None),
        row("model", "timm", kept_bytes=2_500_000, peak_memory_bytes=3_100_000_000),
        row("model", "one_step", rounds=1, peak_memory_bytes=12_345),
        row("model", "one_step", rounds=1, peak_memory_bytes=None),
        row("a", "timed", peak_memory_bytes=5),
    ]
    assert summary.memory_lines(rows) == [
        "case   peer      kept for the backward  neither input nor output     peak",
        "a      eager                      4 kB                       2 B        -",
        "model  timm                     2.5 MB                         -   3.1 GB",
        "model  one_step                      -                         -  12.3 kB",
    ]
    without_peak = summary.memory_lines(rows[:1])
    assert without_peak[0] == "case  peer   kept for the backward  neither input nor output"
    assert summary.memory_lines(rows[3:]) == []


def test_attention_on_a_cpu_is_pytorch_s_and_on_a_gpu_ours():
    for peer, device, expected in (
        ("leaner_packed", "cpu", True),
        ("leaner_attention", "cuda", False),
        ("leaner_stats", "cpu", False),
    ):
        rows = [row("a", "sdpa"), row("a", peer, shape={"device": device})]
        assert summary.has_sdpa_on_a_cpu(rows) == expected


def test_unmeasured_rows_take_a_line_for_each_reason_and_wrong_ones_come_first():
    entries = [
        *({"case": f"c{n}", "peer": "liger", "status": "absent", "reason": "no"} for n in (1, 2)),
        {"case": "c1", "peer": "quack", "status": "absent", "reason": "no"},
        {"case": "c1", "peer": "eager", "status": "wrong", "reason": "off by 3"},
        *({"case": f"c{n}", "peer": "all", "status": "not run", "reason": "?"} for n in range(8)),
    ]
    assert [*summary.unmeasured_lines(entries)] == [
        "WRONG    eager in c1: off by 3",
        "absent   liger, quack (3 times): no",
        "not run  rows of c0, c1, c2, c3, c4, c5 and 2 more: the time of --bench-seconds was spent",
    ]
