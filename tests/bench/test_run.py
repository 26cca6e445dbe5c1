"""`pytest bench/` itself, on a small case, with one peer broken on purpose."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import conftest
from bench.attention.cases import CASES
from bench.attention.peers import peers_of
from bench.catalogue import FIRST, IN_ORDER, ONE_OF_EACH, OVERVIEW

ROOT = Path(__file__).resolve().parents[2]
SELECT = (
    "cpu_digits-forward or cpu_digits-memory or vit_base-forward-graph or cpu_kappa_2048x64-gram "
    "or cpu_kappa_2048x64-leaner or cpu_outlook-forward or cpu_model_vit_lean"
)
OF_ONE_LENGTH = {*peers_of(CASES[0])}
BREAK = """
from bench.attention.peers import PEERS, Peer, _eager

def build(case, device):
    function = _eager(case, device)
    return lambda q, k, v: 1.01 * function(q, k, v)

PEERS["eager"] = Peer(build)
"""


def run(*arguments, folder=ROOT):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "bench", *arguments]
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    # Among parallel workers it would take itself for one of them, and measure nothing.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment |= {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "break_eager.py").write_text(BREAK)
    result = folder / "a/new/folder/result.json"
    select = ["-p", "break_eager", "-k", SELECT]
    done = run("--benchmark-only", f"--benchmark-json={result}", *select, folder=folder)
    return SimpleNamespace(done=done, path=result, data=json.loads(result.read_text()))


@pytest.mark.slow
def test_a_wrong_peer_fails_the_run_and_has_no_number(finished):
    assert finished.done.returncode == 1
    rows = [entry["extra_info"] for entry in finished.data["benchmarks"]]
    assert "eager" not in {row["peer"] for row in rows if row["case"] == "cpu_digits"}
    wrong = [entry for entry in finished.data["unmeasured"] if entry["status"] == "wrong"]
    assert [(entry["case"], entry["peer"]) for entry in wrong] == [("cpu_digits", "eager")]
    assert "out is off by" in wrong[0]["reason"]
    assert wrong[0]["reason"] in finished.done.stdout
    assert "Traceback" not in finished.done.stdout


def test_no_peer_is_dropped_silently(finished):
    rows = [entry["extra_info"] for entry in finished.data["benchmarks"]]
    rows = [row for row in rows if row["case"] == "cpu_digits"]
    measured = {row["peer"] for row in rows}
    assert measured == {row["peer"] for row in rows if "kept_bytes" in row}
    assert {"leaner_attention", "leaner_packed", "leaner_stats_sampled", "sdpa_math"} <= measured
    missing = finished.data["unmeasured"]
    absent = {entry["peer"] for entry in missing if entry["case"] == "cpu_digits"}
    assert measured | absent == OF_ONE_LENGTH
    assert all(entry["reason"] for entry in missing)
    for name in absent:
        assert name in finished.done.stdout.split("not measured")[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its cases are measured")
def test_without_a_gpu_its_cases_are_deselected_in_one_line(finished):
    lines = finished.done.stdout.splitlines()
    said = {line for line in lines if "no CUDA device" in line}
    (line,) = said
    assert re.fullmatch(r"[\d,]+ GPU rows deselected: .*run bench/gpu.sh OUTDIR STAGE", line)
    assert "vit_base" not in finished.done.stdout.replace("cpu_vit", "")
    assert "SKIPPED" not in finished.done.stdout


def test_a_row_says_what_it_measured(finished):
    info, stats = next(
        (entry["extra_info"], entry["stats"])
        for entry in finished.data["benchmarks"]
        if entry["extra_info"]["peer"] == "sdpa_flash" and "mode" in entry["extra_info"]
    )
    assert (info["case"], info["direction"], info["mode"]) == ("cpu_digits", "forward", "wall")
    assert info["bytes"] == 4 * 2 * 4 * 64 * (4 * 16 + 1)
    assert info["flops"] == 4 * 2 * 4 * 64**2 * 16
    assert info["exps"] == 2 * 4 * 64**2
    assert info["gb_per_s"] == pytest.approx(info["bytes"] / stats["median"] / 1e9, rel=1e-4)
    copied = info["gb_per_s"] / info["copy_gb_per_s"]
    assert info["copy_fraction"] == pytest.approx(copied, rel=1e-4)
    multiplied = info["tflop_per_s"] / info["matrix_tflop_per_s"]
    assert info["matrix_fraction"] == pytest.approx(multiplied, rel=1e-4)
    assert 0 < info["budget_used"] <= 1
    assert any("flash_attention_for_cpu_backward" in name for name in info["kernels"])
    assert stats["rounds"] >= 10
    assert stats["q1"] <= stats["median"] <= stats["q3"]


def test_memory_is_a_row_of_the_same_file(finished):
    rows = {
        entry["extra_info"]["peer"]: entry["extra_info"]
        for entry in finished.data["benchmarks"]
        if "kept_bytes" in entry["extra_info"]
    }
    tensor = 2 * 4 * 64 * 16 * 4
    flash = rows["sdpa_flash"]
    assert flash["kept_bytes"] == {"inputs": 3 * tensor, "out": tensor, "own": tensor // 16}
    assert (flash["tokens"], flash["peak_memory_bytes"]) == (2 * 64, None)
    assert rows["sdpa_math"]["kept_bytes"]["own"] > 2 * 4 * 64 * 64 * 4  # the probabilities


def test_memory_is_printed_in_bytes_and_not_as_a_time(finished):
    out = finished.done.stdout
    times, memory = out.split("= memory =")
    assert re.search(r"^cpu_digits +sdpa_flash +133 kB +2.05 kB$", memory, re.MULTILINE)
    tables = re.findall(r"benchmark '(.*)': (\d+) tests", times)
    assert ("cpu_digits forward", str(times.count("sdpa_flash "))) not in tables
    assert "cpu_digits forward" in dict(tables)
    assert "cpu_digits memory" not in dict(tables)
    assert "one_step" not in times


def test_the_table_says_that_attention_on_a_cpu_is_pytorch_s(finished):
    assert finished.done.stdout.count("On a CPU, attention is PyTorch's SDPA") == 1


def test_condition_numbers_are_rows_of_the_same_file(finished):
    rows = {
        entry["extra_info"]["peer"]: (entry["extra_info"], entry["stats"])
        for entry in finished.data["benchmarks"]
        if entry["extra_info"].get("kind") == "kappa"
    }
    assert rows.keys() == {"leaner_condition_number", "gram_eigvalsh"}
    for info, stats in rows.values():
        assert (info["case"], info["mode"], info["bytes"]) == (
            "cpu_kappa_2048x64",
            "wall",
            4 * 2048 * 64 * 4,
        )
        assert info["error_mild"] < info["error_hard"] < 1e-3
        assert stats["rounds"] >= 10
        assert 0 < info["copy_fraction"] < 1
    assert finished.data["cases"]["cpu_kappa_2048x64"]["cols"] == 64


def test_operators_of_vision_models_are_rows_of_the_same_file(finished):
    rows = [entry["extra_info"] for entry in finished.data["benchmarks"]]
    rows = {row["peer"]: row for row in rows if row["case"] == "cpu_outlook"}
    assert {"leaner", "leaner_stats", "leaner_stats_sampled", "timm", "eager"} <= rows.keys()
    # value and out of 2 * 196 * 64, and 2 * 49 * 4 * 81 logits, float32.
    assert rows["leaner"]["bytes"] == 4 * (2 * 2 * 196 * 64 + 2 * 49 * 4 * 81)
    assert finished.data["cases"]["cpu_outlook"]["op"] == "outlook"


def test_models_are_rows_of_the_same_file(finished):
    entries = [e for e in finished.data["benchmarks"] if "model" in e["extra_info"]["case"]]
    rows = {(e["extra_info"].get("stage"), e["extra_info"]["peer"]): e for e in entries}
    images = {"training": 2, "inference": 2, "one_image": 1}
    stages = {(stage, peer) for stage in images for peer in ("leaner", "timm", "timm_leaner")}
    assert rows.keys() == {*stages, (None, "one_step")}
    for key in stages:
        info, stats = rows[key]["extra_info"], rows[key]["stats"]
        assert info["images_per_s"] == pytest.approx(images[key[0]] / stats["median"], rel=1e-4)
        assert 0 <= info["budget_used"] <= 1
        assert ("kept_bytes" in info) == (key[0] == "training")
    kept = [rows["training", peer]["extra_info"]["kept_bytes"] for peer in ("leaner", "timm")]
    assert 0 < kept[0] <= kept[1]
    step = rows[None, "one_step"]["extra_info"]
    # The first guess of a model with random weights: the logarithm of ten classes.
    assert step["loss"] == pytest.approx(2.3, abs=0.5)
    assert step["printed_memory_gb"] == 101.6
    assert finished.data["cases"]["cpu_model_vit_lean"]["variant"] == "lean"


def test_a_row_that_is_not_described_is_left_out():
    described = SimpleNamespace(extra_info={"case": "a", "shape": {}})
    benchmarks = [SimpleNamespace(extra_info={"clocks_mhz": 1}), described]
    conftest.pytest_benchmark_generate_json(benchmarks)
    assert benchmarks == [described]


def test_results_may_be_written_twice_as_with_benchmark_save(tmp_path):
    conftest.pytest_configure(here := config(tmp_path))
    info = {"case": "a", "shape": {"device": "cpu"}}
    for _ in range(2):
        output = {"benchmarks": [{"extra_info": info, "stats": {"data": [1.0]}}]}
        conftest.pytest_benchmark_update_json(here, output)
        assert output["cases"] == {"a": {"device": "cpu"}}
        assert output["benchmarks"][0]["extra_info"] == {"case": "a"}


# The third row stops the run in its first round, when pytest-benchmark has no time of it yet.
STOP = """
import os
import signal
import time

from bench.harness import checked, clock

rows = 0
record = clock.record

def stop(benchmark, *args):
    global rows
    rows += 1
    if rows < 3:
        return record(benchmark, *args)
    # Whichever thread the system gives the signal to, the main one is still in this row.
    benchmark.pedantic(lambda: (os.kill(os.getpid(), signal.{name}), time.sleep(5)))

clock.record = stop
checked.Checked.name_kernels = lambda self: print("kernels are named")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_prints_and_saves_what_was_measured(name, tmp_path):
    (tmp_path / "stop_here.py").write_text(STOP.format(name=name))
    select = "cpu_digits-forward and (sdpa_flash or sdpa_math or eager)"
    result = tmp_path / "result.json"
    options = "--benchmark-only", f"--benchmark-json={result}", "-s", "-k", select
    done = run("-p", "stop_here", *options, folder=tmp_path)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert "benchmark 'cpu_digits forward': 2 tests" in done.stdout
    rows = [entry["extra_info"]["peer"] for entry in json.loads(result.read_text())["benchmarks"]]
    assert len(rows) == 2
    assert all(re.search(rf"^{row} .* \d+$", done.stdout, re.MULTILINE) for row in rows)
    assert f"{result}   (python -m bench.report" in done.stdout
    assert "kernels are named" not in done.stdout
    assert not result.with_suffix(".jsonl").exists()  # of the rows until they are saved


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_line_for_each_row(tmp_path):
    (tmp_path / "stop_here.py").write_text(STOP.format(name="SIGKILL"))
    select = "cpu_digits-forward and (sdpa_flash or sdpa_math or eager)"
    result = tmp_path / "result.json"
    options = "--benchmark-only", f"--benchmark-json={result}", "-k", select
    done = run("-p", "stop_here", *options, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL
    lines = (tmp_path / "result.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["extra_info"]["peer"] for row in rows}) == 2
    assert all(row["stats"]["median"] > 0 for row in rows)


def test_a_second_sigterm_kills():
    before = signal.getsignal(signal.SIGTERM)
    running = conftest.pytest_runtestloop()
    next(running)
    handler = signal.getsignal(signal.SIGTERM)
    assert handler != before
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(StopIteration):
        running.send(None)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU everything is measured")
def test_without_a_gpu_and_a_selection_a_few_telling_rows_of_the_cpu_are_measured():
    done = run("--collect-only", "-q")
    ids = re.findall(r"\[(.*)\]$", done.stdout, re.MULTILINE)
    assert 80 < len(ids) < 150
    assert all(row.startswith("cpu_") for row in ids)
    places = [[re.fullmatch(pattern, row) is not None for pattern in OVERVIEW] for row in ids]
    assert all(any(column) for column in zip(*places, strict=True))
    first = [row.index(True) for row in places]
    assert first == sorted(first)
    assert "this is an overview, on one thread" in done.stdout


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        (["bench/"], {}, True),
        (["bench"], {"bench_seconds": 9.0}, False),
        (["bench"], {"keyword": "kappa"}, False),
        (["bench"], {"markexpr": "one_of_each"}, False),
        (["bench/kappa"], {}, False),
        (["bench", "bench/kappa/bench_kappa.py::test_kappa[a]"], {}, False),
        (["tests", "bench"], {}, False),
    ],
)
def test_any_selection_and_any_time_limit_measures_all_that_it_selects(args, options, expected):
    assert conftest.is_overview(config(ROOT, args=args, **options)) == expected


@pytest.mark.slow
def test_the_rows_of_a_case_run_together():
    done = run("--collect-only", "-q", "-k", "(cpu_digits or cpu_ragged) and padded or sdpa_math")
    found = [line.split("[")[1].split("-")[0] for line in done.stdout.splitlines() if "[" in line]
    together = [name for name, _ in groupby(found)]
    there = [case for case in CASES if case.device == "cpu" or torch.cuda.is_available()]
    assert len(together) == len(set(together)) > len(there)
    assert found[0] == there[0].name
    assert "test_memory[cpu_digits-memory-sdpa_math]" in done.stdout


def test_the_file_is_small_and_says_where_it_is_from(finished):
    data = finished.data
    assert data["machine_info"]["versions"]["torch"] == torch.__version__
    assert data["machine_info"]["cpu"]["model"]
    assert data["commit_info"].keys() == {"id", "dirty", "source"}
    assert data["cases"]["cpu_digits"]["dtype"] == "float32"
    assert all("data" not in entry["stats"] for entry in data["benchmarks"])
    text = finished.path.read_text()
    assert len(text) < 3000 * (len(data["benchmarks"]) + 2)
    assert str(ROOT) not in text
    assert f'"{platform.node()}"' not in text


def test_pytest_benchmark_reads_its_own_format(finished):
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(finished.path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=finished.path.parent)
    assert done.returncode == 0, done.stderr
    assert "cpu_digits-forward-wall-sdpa" in done.stdout


@pytest.mark.slow
def test_time_that_is_spent_is_stated():
    done = run("--benchmark-only", "--bench-seconds=0", "-k", "cpu_digits-both")
    assert done.returncode == 0
    assert "not run  rows of cpu_digits: the time of --bench-seconds was spent" in done.stdout
    assert f"{len(OF_ONE_LENGTH)} skipped" in done.stdout


@pytest.mark.slow
def test_without_pytest_benchmark_one_line_says_so():
    done = run("-p", "no:benchmark", "--benchmark-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    lines = (done.stdout + done.stderr).split("\n")
    assert [line for line in lines if line] == [
        "ERROR: bench needs pytest-benchmark: pip install --group bench"
    ]


def config(folder, args=("bench",), **options):
    defaults = {"benchmark_columns": None, "benchmark_disable": False, "benchmark_json": None}
    defaults |= {"reportchars": "a", "keyword": "", "markexpr": "", "bench_seconds": None}
    return SimpleNamespace(
        stash={},
        rootpath=folder,
        args=args,
        invocation_params=SimpleNamespace(args=args, dir=folder),
        option=SimpleNamespace(**defaults | options),
    )


def test_results_go_to_an_ignored_folder_by_default(tmp_path):
    conftest.pytest_configure(here := config(tmp_path))
    path = here.stash[conftest.RESULTS]
    assert path.parent == tmp_path / "build/bench"
    assert path.parent.is_dir()
    assert path.suffix == ".json"
    assert "build/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("number", [1, 2])
def test_every_pytest_benchmark_writes_the_default_file(number, tmp_path):
    conftest.pytest_configure(here := config(tmp_path))
    results = here.option.benchmark_json
    assert not here.stash[conftest.RESULTS].exists()
    # Versions from 5.3 on; those before, to which the option is an open file.
    with open(results, "wb") if number == 1 else results as file:
        file.write(b"written")
    assert here.stash[conftest.RESULTS].read_text() == "written"


def test_a_file_of_any_pytest_benchmark_is_left_as_it_is(tmp_path):
    path = tmp_path / "mine.json"
    with path.open("wb") as file:
        for representation in (path, str(path), file):
            conftest.pytest_configure(here := config(tmp_path, benchmark_json=representation))
            assert here.option.benchmark_json is representation
            assert here.stash[conftest.RESULTS] == path


def test_columns_on_the_command_line_are_kept(tmp_path):
    # Before pytest-benchmark 5.3 the option is never empty.
    conftest.pytest_configure(here := config(tmp_path, benchmark_columns=["min", "outliers"]))
    assert here.option.benchmark_columns == conftest.COLUMNS
    asked = ["bench", "--benchmark-columns=min"]
    conftest.pytest_configure(here := config(tmp_path, asked, benchmark_columns=["min"]))
    assert here.option.benchmark_columns == ["min"]


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file/result.json"
    with pytest.raises(pytest.UsageError, match=r"--benchmark-json=.*file/result.json") as refused:
        conftest.pytest_configure(config(tmp_path, benchmark_json=path))
    assert "\n" not in str(refused.value)


def test_cases_with_goals_come_first_in_the_order_of_their_names():
    names = [case.name for case in IN_ORDER]
    assert tuple(names[: len(FIRST)]) == FIRST
    assert set(ONE_OF_EACH) <= set(FIRST)
    assert len(names) == len(set(names))
