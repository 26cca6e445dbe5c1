"""The report: pages as committed, what is not in the committed results, and refusals."""

import copy
import json
import re
from pathlib import Path

import pytest

from bench import frames, report

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
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    rows = [[cell.strip("| ") for cell in row] for row in rows]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_what_was_not_measured_is_listed_and_what_is_wrong_is_first(tables):
    assert [tuple(row.values()) for row in tables("unmeasured")] == [
        ("WRONG", "eager in vit_base", "off by 3"),
        ("absent", "xformers in vit_base", "not there"),
    ]


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
