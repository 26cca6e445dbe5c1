"""The report: pages as committed, what is not in the committed results, and refusals."""

import copy
import json
import re
from pathlib import Path

import pytest

from bench import frames, report
from bench.attention.catalogue import LABELS
from bench.harness import digest

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "device": "cuda",
    "batch": 128,
    "heads": 16,
    "rows": 197,
    "tokens": 197,
    "head_dim": 64,
    "dtype": "bfloat16",
    "causal": False,
    "padded": False,
    "lengths": [],
}
INFO = {
    "versions": {"torch": "2.11.0", "driver": "580.1", "flash-attn": None},
    "cpu": {"model": "A processor", "cores": 8, "torch_threads": 4},
    "gpu": {
        "name": "A GPU",
        "count": 1,
        "compute_capability": "9.0",
        "memory_bytes": 2**37,
        "power_limit_watts": 700,
        "clocks_mhz": {"sm": 1980},
    },
}


def of_kind(kind, case, peer, median, **extra):
    info = {"kind": kind, "case": case, "peer": peer, "ours": peer.startswith(("leaner", "every"))}
    return {"extra_info": info | extra, "stats": {"median": median, "iqr": median / 100}}


def row(peer, median, direction="forward", mode="graph", case="vit_base", **extra):
    extra |= {"direction": direction, "mode": mode, "copy_fraction": 0.655}
    return of_kind("attention", case, peer, median, **extra)


RESULT = {
    "machine_info": INFO,
    "commit_info": {"id": "0123456789abcdef", "dirty": False, "source": "feed"},
    "datetime": "2026-01-02T00:00:00",
    "cases": {"vit_base": SHAPE, "cpu_vit": {**SHAPE, "device": "cpu", "causal": True}},
    "benchmarks": [
        row("sdpa", 200e-6),
        row("leaner_attention", 80e-6),
        row("leaner_stats", 250e-6),
        row("sdpa_cudnn", 100e-6),
        row("sdpa", 300e-6, "both", "eager"),
        row("leaner_attention", 1.5e-3, "both", joules=0.0125),
    ],
    "unmeasured": [
        {"case": "vit_base", "peer": "xformers", "status": "absent", "reason": "not there"},
        {"case": "vit_base", "peer": "eager", "status": "wrong", "reason": "off by 3"},
    ],
}


SHAPE_OF_KAPPA = {"device": "cuda", "dtype": "float32", "batch": 96, "rows": 197, "cols": 1024}


def kappa(peer, median, hard=1e-5):
    case = "kappa_197x1024"
    return of_kind("kappa", case, peer, median, mode="eager", error_mild=4e-11, error_hard=hard)


@pytest.fixture
def write(tmp_path):
    def write(name="gpu.json", **changes):
        path = tmp_path / name
        data = copy.deepcopy(RESULT)
        data["cases"]["kappa_197x1024"] = SHAPE_OF_KAPPA
        path.write_text(json.dumps(data | changes))
        return path

    return write


@pytest.fixture
def tables(write):
    """Return the cells of a table of results, of these rows alone, by heading."""

    def tables(name, *rows):
        found = report.gather([write(**({"benchmarks": list(rows)} if rows else {}))])
        return cells(report.render(found["results"][name]))

    return tables


def cells(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_what_was_not_measured_is_listed_and_what_is_wrong_is_first(tables):
    assert [tuple(row.values()) for row in tables("unmeasured")] == [
        ("WRONG", "eager in vit_base", "off by 3"),
        ("absent", "xformers in vit_base", "not there"),
    ]


def test_a_long_reason_loses_the_backends_that_a_peer_disabled_and_is_cut(write):
    backends = ("Flash", "cuDNN")
    disabled = " ".join(
        f"{name} attention kernel not used because: {name} attention has been runtime disabled."
        for name in backends
    )
    long = " ".join(f"word{n}" for n in range(30))
    rows = [
        {"case": "vit_base", "peer": "sdpa", "status": "absent", "reason": reason}
        for reason in (f"no kernel. {disabled} head_dim is 10", long)
    ]
    found = report.gather([write(unmeasured=rows)])["results"]["unmeasured"]
    first, second = (row["reason"] for row in cells(report.render(found)))
    assert first == "no kernel. head_dim is 10"
    assert second == " ".join(long.split()[:24]) + " …"


def test_condition_numbers_compare_with_svdvals_and_with_the_best_that_is_right(tables):
    rows = (
        kappa("leaner_condition_number", 0.4e-3),
        kappa("svdvals", 60e-3, hard=6e-3),
        kappa("gram_eigvalsh", 3.2e-3),
        # Fast, and no number where attention needs one: not what a speed is compared with.
        kappa("float32_trick", 1e-5, hard=float("inf")),
    )
    (found,) = tables("kappa", *rows)
    assert (found["ms"], found["× svdvals"]) == ("0.4", "150")
    assert found["× best library"] == "8 gram_eigvalsh"
    assert (found["error at 10³"], found["at 10⁶"]) == ("4e-11", "1e-05")


def run(write, name, day, *rows, kernels=None):
    commit = RESULT["commit_info"] | {"kernels": kernels or {}}
    when = f"2026-01-{day:02}T00:00:00"
    return write(name, benchmarks=list(rows), datetime=when, commit_info=commit)


def test_both_times_of_a_ratio_come_from_one_run(write):
    """The peer of the first run met a slower kernel of ours; both are of that run."""
    first = run(
        write, "1.json", 1, row("leaner_kernel", 2e-3, "both"), row("flash_attn_4", 1e-3, "both")
    )
    second = run(write, "2.json", 2, row("leaner_kernel", 1e-3, "both"), row("sdpa", 3e-3, "both"))
    (cell,) = cells(report.render(report.gather([first, second])["faster"]["front"]))
    assert (cell["ours, µs"], cell["PyTorch or timm, µs"], cell["× as fast"]) == (
        *("1,000", "3,000"),
        "3",
    )
    assert cell["fastest other, µs"] == "1,000 flash_attn_4 (ours 2,000)"
    assert cell["× the fastest"] == "0.5"
    # A peer within the spread between runs does not replace that of the run.
    first = run(
        write, "1.json", 1, row("leaner_kernel", 2e-3, "both"), row("flash_attn_4", 2.95e-3, "both")
    )
    (cell,) = cells(report.render(report.gather([first, second])["faster"]["front"]))
    assert (cell["fastest other, µs"], cell["× the fastest"]) == ("3,000 sdpa", "3")


def test_a_call_that_one_gpu_dispatches_stays_ours_on_another(write):
    """Heads of 64 and 577 tokens: PyTorch's on an H200, by rule, and ours on an A100."""
    rows = [
        row("leaner_kernel", 2e-3, "both", case="vit_384"),
        row("sdpa", 1e-3, "both", case="vit_384"),
    ]
    cases = {"vit_384": SHAPE | {"rows": 577, "tokens": 577}}
    gpu = INFO["gpu"] | {"name": "A100", "compute_capability": "8.0"}
    second = write("2.json", benchmarks=rows, cases=cases, machine_info=INFO | {"gpu": gpu})
    first = write("1.json", benchmarks=rows, cases=cases)
    table = cells(report.render(report.gather([first, second])["faster"]["front"]))
    found = {row["on"]: (row["ours, µs"], row["× as fast"]) for row in table}
    assert found == {"A GPU": ("PyTorch's (2,000)", "1"), "A100": ("2,000", "0.5")}


def test_rows_of_several_gpus_are_named_and_the_first_page_shows_one(write):
    rows = row("leaner_kernel", 1e-3, "both"), row("sdpa", 3e-3, "both")
    first = run(write, "1.json", 1, *rows)
    gpu = INFO["gpu"] | {"name": "Another GPU"}
    second = write("2.json", benchmarks=list(rows), machine_info=INFO | {"gpu": gpu})
    pages = report.gather([first, second])
    found = cells(report.render(pages["faster"]["front"]))
    assert [row["on"] for row in found] == ["A GPU", "Another GPU"]
    (cell,) = cells(report.render(pages["README"]["headline"]))
    assert "on" not in cell


def test_times_of_two_runs_have_no_ratio(write):
    first = run(write, "1.json", 1, row("sdpa", 3e-3, "both"))
    second = run(write, "2.json", 2, row("leaner_kernel", 1e-3, "both"))
    (cell,) = cells(report.render(report.gather([first, second])["faster"]["front"]))
    assert (cell["ours, µs"], cell["PyTorch or timm, µs"]) == ("1,000", "3,000")
    assert cell["× as fast"] == cell["× the fastest"] == "no run of both"


def step(peer, median, row_of_paper="gpt2_tinystories", **extra):
    case = f"language_{row_of_paper}_original"
    return of_kind("language", case, peer, median, tokens_per_s=8192 / median, **extra)


STEP = {
    "device": "cuda",
    "dtype": "bfloat16",
    "row": "gpt2_tinystories",
    "variant": "original",
    "batch": 128,
}


def test_a_mode_that_only_another_library_ran_is_printed(write):
    rows = step("leaner", 0.02), step("transformers", 0.04), step("transformers_compiled", 0.01)
    path = write(benchmarks=rows, cases={"language_gpt2_tinystories_original": STEP})
    pages = report.gather([path])
    found = {row["called"]: row for row in cells(report.render(pages["faster"]["steps"]))}
    assert found["eager"]["times as fast"] == "2"
    assert found["compiled"]["ours, a second"] == "not measured"
    assert found["compiled"]["fastest other"] == "819,200 transformers"
    (fastest,) = cells(report.render(pages["README"]["fastest"]))
    assert fastest["ours, a second"] == "409,600 eager"
    assert (fastest["fastest other"], fastest["times as fast"]) == (
        "819,200 transformers, compiled",
        "0.5",
    )


def test_a_formula_that_stands_for_pytorchs_or_timms_code_is_named(write):
    case = "davit_channel3"
    rows = [
        row(peer, time, "both", case=case) for peer, time in (("leaner", 1e-4), ("eager", 7e-4))
    ]
    path = write(benchmarks=list(rows), cases={case: SHAPE})
    (cell,) = cells(report.render(report.gather([path])["faster"]["front"]))
    assert cell["PyTorch or timm, µs"] == "700 eager"


def test_a_row_of_timms_model_with_our_attention_is_named(write):
    case, rates = "model_vit_base_original", {"leaner": 300.0, "timm_leaner": 310.0, "timm": 200.0}
    rows = [
        of_kind("model", case, peer, 128 / rate, images_per_s=rate, stage="training")
        for peer, rate in rates.items()
    ]
    for entry in rows:
        entry["extra_info"]["ours"] = entry["extra_info"]["peer"] != "timm"
    path = write(benchmarks=rows, cases={case: STEP | {"row": "vit_base"}})
    pages = report.gather([path])
    (found,) = cells(report.render(pages["faster"]["steps"]))
    assert (found["ours, a second"], found["fastest other"]) == ("310 timm_leaner", "200 timm")
    (fastest,) = cells(report.render(pages["README"]["fastest"]))
    assert fastest["ours, a second"] == "310 timm_leaner, eager"
    (row,) = cells(report.render(pages["results"]["models"]))
    assert row["original training a second"] == "310 timm_leaner"


def test_a_table_says_which_rows_ran_earlier_kernels(write):
    today = digest.kernels(ROOT)
    rows = row("leaner_kernel", 1e-3, "both"), row("sdpa", 3e-3, "both")
    new = run(write, "1.json", 1, *rows, kernels=today)
    old = run(write, "2.json", 1, *rows, kernels=today | {"attention": "0"})
    front = report.gather([new])["faster"]["front"]
    assert "earlier kernels" not in report.render(front)
    front = report.gather([old])["faster"]["front"]
    assert report.render(front).endswith("> Measured on earlier kernels, 2026-01-01.")
    # What the run of a condition number depends on is something else.
    path = run(write, "3.json", 1, kappa("leaner_condition_number", 1), kernels=today)
    assert "earlier" not in report.render(report.gather([path])["results"]["kappa"])


def test_energy_is_shown_if_measured_long_enough_and_within_the_boards_limit(write):
    def front(**extra):
        rows = row("leaner_kernel", 1e-3, "both", **extra), row("sdpa", 3e-3, "both")
        return report.render(report.gather([write(benchmarks=rows)])["faster"]["front"])

    (cell,) = cells(front(joules=0.5123, energy_seconds=0.5))
    assert cell["ours, mJ"] == "510"
    assert "mJ" not in front(joules=0.5)
    above = front(joules=0.8, energy_seconds=0.5)  # in a millisecond: 800 W of 700
    assert "mJ" not in above
    assert "1 rows imply more than the board's power limit and show no energy" in above


def test_statistics_are_compared_with_the_plain_pass_of_their_run(write):
    first = run(write, "1.json", 1, row("leaner_kernel", 1e-3), row("leaner_stats", 1.5e-3))
    second = run(
        write, "2.json", 2, row("leaner_kernel", 1e-4), row("leaner_stats_sampled", 1.7e-4)
    )
    found = report.gather([first, second])["faster"]["statistics"]
    (cell,) = cells(report.render(found))
    assert (cell["plain, µs"], cell["with a capture of 4 entries"]) == ("100", "+70%")
    assert "with statistics" not in cell
    (cell,) = cells(report.render(report.gather([first])["faster"]["statistics"]))
    assert cell["with statistics"] == "+50%"


def test_statistics_are_compared_with_pytorchs_where_a_plain_call_is_dispatched(write):
    rows = [
        row(peer, time, case="long_1024")
        for peer, time in (("leaner_kernel", 4e-4), ("sdpa", 3e-4), ("leaner_stats", 4.2e-4))
    ]
    path = write(benchmarks=rows, cases={"long_1024": SHAPE | {"rows": 1024, "tokens": 1024}})
    (cell,) = cells(report.render(report.gather([path])["faster"]["statistics"]))
    assert (cell["plain, µs"], cell["with statistics"]) == ("300 sdpa", "+40%")


def test_predictions_that_are_far_off_where_measured_are_left_out(write):
    timed = frames.timed([frames.read(write(benchmarks=[row("leaner_kernel", 1e-3, "both")]))])
    passes = [("forward", 5e-4), ("backward", 5e-4)]

    def predicted(scale):
        rows = [
            {"gpu": gpu, "case": "vit_base", "stage": stage, "predicted": scale * seconds}
            for gpu in ("A GPU", "another")
            for stage, seconds in passes
        ]
        return report.predicted(timed, report.pd.DataFrame(rows))

    assert len(predicted(1.2)) == 1
    assert predicted(1.6).empty
    assert predicted(0.7).empty


def test_committed_predictions_meet_what_was_measured():
    """Every pass of our own kernels on the H200 on that day, in the machine code that ran then."""
    paths = sorted(frames.RESULTS.glob("2026-11-26-*.json"))
    measured = report.own_kernels(frames.timed([frames.read(path) for path in paths]))
    by = ["gpu", "case", "stage", "triton"]
    rows = measured[[*by, "median"]].merge(report.predictions("calibration"), on=by)
    assert len(rows) == 22
    assert (rows["predicted"] / rows["median"] - 1).abs().max() < 0.1


# Pages and the command.


def test_files_that_are_named_are_printed_and_no_page_is_touched(write, capsys, monkeypatch):
    monkeypatch.setattr(report, "DOCS", None)
    report.main([str(write())])
    out = capsys.readouterr().out
    assert "### attention\n\n| on | case |" in out
    assert "| WRONG | eager in vit_base | off by 3 |" in out
    assert "### trained" not in out  # of bench/results, not of this file
    assert "### predicted" not in out


def test_a_page_that_is_out_of_date_is_named(tmp_path, monkeypatch):
    pages = {page: tmp_path / path.name for page, path in report.PAGES.items()}
    for page, path in pages.items():
        text = report.PAGES[page].read_text("utf-8")
        path.write_text(text.replace("| NVIDIA H200 |", "| another |"), "utf-8")
    monkeypatch.setattr(report, "PAGES", pages)
    with pytest.raises(SystemExit, match=r"\w+.md is out of date: run python -m bench"):
        report.main(["--check"])
    monkeypatch.setattr(report, "draw", lambda _: None)
    report.main([])
    report.main(["--check"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a result of bench/"),
        ('{"machine_info": {}}', "not a result of bench/"),
        (json.dumps({**RESULT, "cases": {}}), "not a result of bench/"),
        (json.dumps(RESULT | {"failed": ["tests/a.py::test_b"]}), "failed: tests/a.py::test_b"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message) as refused:
        report.main([str(path)])
    assert path.name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_to_report_is_refused(write, tmp_path):
    with pytest.raises(SystemExit, match=r"no measured rows in .*empty.json"):
        report.main([str(write("empty.json", benchmarks=[]))])
    with pytest.raises(SystemExit, match=r"nowhere.json: No such file"):
        report.main([str(tmp_path / "nowhere.json")])


# What is committed.


def test_the_committed_pages_are_filled_from_the_committed_results():
    report.main(["--check"])


def fastest_of(cell):
    """Return the microseconds of the fastest peer of a row of the tables of attention."""
    shown = (cell[f"{name}, µs"] for name in ("PyTorch or timm", "fastest other"))
    return min(float(time.split()[0].replace(",", "")) for time in shown)


def test_every_measured_peer_that_is_faster_than_ours_is_on_a_page():
    """In the direction in which tables can flatter: from the files to the pages."""
    timed = frames.timed([frames.read(path) for path in frames.RESULTS.glob("20*.json")])
    newest = frames.newest(timed[timed["median"].notna() & ~timed["cpu"]])
    page = (report.DOCS / "faster.md").read_text("utf-8")
    both, forward, steps = (
        cells(page.partition(f"<!-- {name},")[2].partition("<!--")[0])
        for name in ("front", "forward", "steps")
    )
    tables = {"both": both, "forward": forward}
    looked_at = set()
    for (kind, case, stage, start), rows in newest.groupby(["kind", "case", "stage", "start"]):
        rivals = rows[~rows["ours"] & ~(rows["median"] >= rows[rows["ours"]]["median"].min())]
        for rival in rivals.to_dict("records"):
            if kind == "attention" and stage in tables and start == "":
                (line,) = (line for line in tables[stage] if LABELS[case] in line.values())
                shown = fastest_of(line)
                assert shown <= 1e6 * rival["median"] * frames.SPREAD, (case, rival["peer"])
            elif kind in ("model", "language") and stage == "training":
                name = f"{report.STEPS[rival['row']]}, {rival['variant']}", rival["mode"]
                (line,) = (line for line in steps if tuple(line.values())[:2] == name)
                assert frames.number(rates(rival)) in line["fastest other"], (case, rival["peer"])
            else:
                continue
            looked_at.add((kind, stage))
    assert {("attention", "both"), ("attention", "forward")} <= looked_at
    assert ("language", "training") in looked_at


def rates(row):
    return row["images_per_s"] if row["images_per_s"] > 0 else row["tokens_per_s"]


def test_every_ratio_of_the_committed_results_is_of_one_run():
    timed = frames.timed([frames.read(path) for path in frames.RESULTS.glob("20*.json")])
    ours = timed[timed["ours"]].groupby([*frames.KEY, "run"])["median"].min()
    table = frames.ranking(timed)
    compared = 0
    for row in table.to_dict("records"):
        for end in ("default", "best"):
            if not row[f"times_{end}"] > 0:
                continue
            compared += 1
            mine = ours[(*(row[name] for name in frames.KEY), row[f"run_{end}"])]
            assert row[f"times_{end}"] == row[f"median_{end}"] / mine
    assert compared > 100


def test_a_case_with_a_forward_alone_is_in_the_table_of_forwards():
    timed = frames.timed([frames.read(path) for path in frames.RESULTS.glob("20*.json")])
    both, forward = report.peer_comparison(timed[timed["stage"] == "forward"])
    assert both.empty
    assert {LABELS["vit_base"], LABELS["text"]} <= {*forward["attention, forward"]}


def test_every_table_has_a_place_on_its_page():
    found = report.gather()
    for page, path in report.PAGES.items():
        named = {name for _, name in report.BLOCK.findall(path.read_text("utf-8"))}
        assert named == found[page].keys()


def test_every_picture_of_the_documentation_is_shown():
    pages = [*report.DOCS.glob("*.md"), ROOT / "README.md"]
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", "".join(p.read_text("utf-8") for p in pages))
    pictures = {path.name for path in report.DOCS.rglob("*.png")}
    assert pictures == {Path(name).name for name in shown}


def test_lengths_of_few_heads_and_float32_are_rows_of_their_own():
    times = {"ours_forward": 1.0, "ours_both": 1.0, "library_forward": 2.0, "library_both": 3.0}
    shape = {"kind": "dense", "head_dim": 64, "causal": False, "tokens": 197, **times}
    rows = [shape, shape | {"programs": 16, "library_both": 0.5}, shape | {"float32": True}]
    result = {"rows": rows, "datetime": "2026-01-01T00:00:00", "commit_info": {}}
    found = {
        (row["attention"], row["pass"]): row["197"]
        for row in cells(report.render(report.crossover(result)))
    }
    assert found[("dense", "forward + backward")] == "3"
    assert found[("dense, 16 heads", "forward + backward")] == "0.5"
    assert found[("dense, float32", "forward")] == "2"
