"""`pytest bench/` itself, on a small case, with one peer broken on purpose."""

import getpass
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import conftest
from bench.attention.cases import CASES
from bench.attention.peers import PEERS, peers_of
from bench.catalogue import FIRST, IN_ORDER, ONE_OF_EACH

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SELECT = (
    "cpu_digits-forward or vit_base-forward-graph or cpu_kappa_2048x64-gram "
    "or cpu_kappa_2048x64-leaner or cpu_outlook-forward or cpu_model_vit_lean"
)
OF_ONE_LENGTH = {*peers_of(CASES[0])}
BREAK = """
from bench.attention.peers import PEERS, Peer, _eager

def build(case, device):
    function = _eager(case, device)
    return lambda q, k, v: 1.01 * function(q, k, v)

PEERS["eager"] = Peer(build, about="Off by a percent")
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
    result = folder / "result.json"
    select = ["-p", "break_eager", "-k", SELECT]
    done = run("--benchmark-only", f"--benchmark-json={result}", *select, folder=folder)
    return SimpleNamespace(done=done, path=result, data=json.loads(result.read_text()))


def rows_of(finished, case):
    entries = finished.data["benchmarks"]
    return [entry["extra_info"] for entry in entries if entry["extra_info"]["case"] == case]


def test_a_wrong_peer_fails_the_run_and_has_no_number(finished):
    assert finished.done.returncode == 1
    assert "eager" not in {row["peer"] for row in rows_of(finished, "cpu_digits")}
    wrong = [entry for entry in finished.data["unmeasured"] if entry["status"] == "wrong"]
    assert [(entry["case"], entry["peer"]) for entry in wrong] == [("cpu_digits", "eager")]
    assert "out is off by" in wrong[0]["reason"]
    assert wrong[0]["reason"] in finished.done.stdout
    assert "Traceback" not in finished.done.stdout


def test_no_peer_is_dropped_silently(finished):
    measured = {row["peer"] for row in rows_of(finished, "cpu_digits")}
    assert {"leaner_attention", "leaner_packed", "leaner_stats_sampled", "sdpa_math"} <= measured
    missing = finished.data["unmeasured"]
    absent = {entry["peer"] for entry in missing if entry["case"] == "cpu_digits"}
    assert measured | absent == OF_ONE_LENGTH
    assert all(entry["reason"] for entry in missing)
    for name in absent:
        assert name in finished.done.stdout.split("not measured")[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its cases are measured")
def test_without_a_gpu_its_cases_are_deselected_in_one_line(finished):
    said = {line for line in finished.done.stdout.splitlines() if "no CUDA device" in line}
    (line,) = said
    assert re.fullmatch(r"[\d,]+ GPU rows deselected: .*run bench/gpu.sh OUTDIR STAGE", line)
    assert "SKIPPED" not in finished.done.stdout


def test_a_row_says_what_it_measured(finished):
    (info,) = (row for row in rows_of(finished, "cpu_digits") if row["peer"] == "sdpa_flash")
    assert (info["direction"], info["mode"], info["ours"]) == ("forward", "wall", False)
    assert info["bytes"] == 4 * 2 * 4 * 64 * (4 * 16 + 1)
    assert info["flops"] == 4 * 2 * 4 * 64**2 * 16
    assert info["copy_fraction"] > 0
    assert info["matrix_fraction"] > 0
    assert 0 < info["budget_used"] <= 1
    assert {"leaner", "leaner_stats", "timm", "eager"} <= {
        row["peer"] for row in rows_of(finished, "cpu_outlook")
    }


def test_other_subjects_are_rows_of_the_same_file(finished):
    rows = {row["peer"]: row for row in rows_of(finished, "cpu_kappa_2048x64")}
    assert rows.keys() == {"leaner_condition_number", "gram_eigvalsh"}
    assert all(info["error_mild"] < info["error_hard"] < 1e-3 for info in rows.values())
    assert finished.data["cases"]["cpu_kappa_2048x64"]["cols"] == 64
    rows = {(row["stage"], row["peer"]): row for row in rows_of(finished, "cpu_model_vit_lean")}
    peers = "leaner", "timm", "timm_leaner"
    stages = "training", "inference", "one_image"
    assert rows.keys() == {(stage, peer) for stage in stages for peer in peers}
    assert all(info["images_per_s"] > 0 for info in rows.values())
    kept = [rows["training", peer]["kept_bytes"] for peer in ("leaner", "timm")]
    assert 0 < kept[0] <= kept[1]


def test_the_file_says_where_it_is_from_without_host_or_path(finished):
    data, text = finished.data, finished.path.read_text()
    assert data["machine_info"]["versions"]["torch"] == torch.__version__
    assert data["commit_info"].keys() == {"id", "dirty", "source", "kernels"}
    assert all("data" not in entry["stats"] for entry in data["benchmarks"])
    assert str(ROOT) not in text
    assert not any(f'"{name}"' in text for name in (platform.node(), getpass.getuser()))


def test_a_table_is_titled_by_case_and_size_and_ordered_by_its_first_column(finished):
    title = "cpu_digits 2·4·64·16 float32 forward wall"
    table = finished.done.stdout.split(f"benchmark {title!r}")[1].split("\n\n")[0]
    assert re.search(r"^Name .* Median +IQR +Min +Rounds$", table, re.MULTILINE)
    rows = re.findall(r"^(\w+) +([\d,.]+) \(([\d,.]+)\)", table, re.MULTILINE)
    medians = [float(median.replace(",", "")) for _, median, _ in rows]
    assert len(rows) > 5
    assert medians == sorted(medians)
    assert rows[0][2] == "1.0"
    # Files of results keep the name of the group alone.
    assert "cpu_digits forward wall" in {entry["group"] for entry in finished.data["benchmarks"]}
    assert title not in finished.path.read_text()


def test_a_legend_has_a_sentence_for_every_peer_of_the_tables_and_no_other(finished):
    legend = finished.done.stdout.split("what the rows are")[1].split("not measured")[0]
    assert "(2.00) beside a time: twice the least" in legend
    peers = {entry["extra_info"]["peer"] for entry in finished.data["benchmarks"]}
    assert {*re.findall(r"^(\w+): \w", legend, re.MULTILINE)} == peers
    assert f"\nleaner_kernel: {PEERS['leaner_kernel'].about}\n" in legend


@pytest.mark.parametrize(
    ("keyword", "line"),
    [
        (
            "vit_bse",
            "no case and no peer is named vit_bse; the nearest are vit_base, vit_base_fp16,",
        ),
        ("bert and (flashattn_2 or sdpaa)", "is named flashattn_2, sdpaa; the nearest are flash_"),
        ("cpu_digits-bth", "no case and no peer is named bth; the nearest are both"),
        ("qqqq", "no case and no peer is named qqqq; bench/README.md lists all names"),
        ("cpu_digits and cpu_vit-BOTH", "selects nothing that is measured here; bench/README.md"),
    ],
)
def test_a_keyword_that_selects_nothing_names_what_is_near(keyword, line):
    names = ["both", "forward", *(case.name for case in IN_ORDER), *OF_ONE_LENGTH]
    said = conftest.nothing_selected(keyword, names)
    assert said.startswith(f"-k {keyword!r} selects nothing that is measured here")
    assert line in said
    assert said.endswith("bench/README.md lists all names")
    assert "\n" not in said


def test_a_run_that_selects_nothing_ends_with_that_line():
    done = run("--benchmark-only", "-k", "cpu_digts")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    (line,) = {said for said in done.stdout.splitlines() if said.startswith("-k ")}
    assert "no case and no peer is named cpu_digts; the nearest are cpu_digits" in line


@pytest.mark.parametrize(
    ("missing", "command", "line"),
    [
        (
            "torch",
            ["pytest", "bench"],
            r"bench needs torch, which \S+python\S* lacks: run it in .*",
        ),
        ("torch", ["bench.shape"], r"bench needs torch, which \S+python\S* lacks: run it in .*"),
        ("pandas", ["bench.report"], "bench.report needs pandas: pip install --group bench"),
        ("tabulate", ["bench.report"], "bench.report needs tabulate: pip install --group bench"),
        (
            "scipy",
            ["studies.page"],
            "studies need scipy: in the checkout, pip install -e . --group .*",
        ),
        ("rich", ["train.vit"], "train needs the package rich: .*"),
    ],
)
def test_a_command_that_lacks_a_package_says_so_in_one_line(missing, command, line):
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv = {command!r};"
        " runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(f"{line}\n", done.stderr)


def test_pytest_benchmark_groups_the_rows_of_the_file(finished):
    tool = Path(sys.executable).with_name("pytest-benchmark")
    command = [tool, "compare", finished.path, "--group-by=param:row"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    rows = {entry["param"] for entry in finished.data["benchmarks"]}
    assert set(re.findall(r"benchmark 'row=(.*?)'", done.stdout)) == rows


# The third row stops the run in its first round, when pytest-benchmark has no time of it yet.
STOP = """
import os
import signal
import time

from bench.harness import clock

# What started the tests in the background may have had it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
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
    rows = [entry["extra_info"]["peer"] for entry in json.loads(result.read_text())["benchmarks"]]
    assert len(rows) == 2
    assert all(re.search(rf"^{row} .* \d+$", done.stdout, re.MULTILINE) for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU everything is measured")
def test_without_a_gpu_and_a_selection_a_few_telling_rows_of_the_cpu_are_measured():
    done = run("--collect-only", "-q")
    ids = re.findall(r"\[(.*)\]$", done.stdout, re.MULTILINE)
    assert 50 < len(ids) < 150
    cases = {"_".join(row.split("-")[0].split("_")[:3]) for row in ids}
    cases |= {row.split("-")[0] for row in ids}
    kinds = "kappa_197x1024", "vit_step", "model_vit", "language_gpt2", "nystrom", "vit", "ragged"
    assert cases >= {f"cpu_{kind}" for kind in kinds}
    assert not [row for row in ids if row.endswith("compiled")]
    assert "this is an overview, on one thread" in done.stdout


def test_a_folder_or_a_time_limit_measures_all_that_it_selects():
    for args, seconds in ((["bench/kappa"], None), (["bench"], 9.0)):
        option = SimpleNamespace(keyword="", markexpr="", bench_seconds=seconds)
        params = SimpleNamespace(dir=ROOT)
        config = SimpleNamespace(args=args, option=option, invocation_params=params)
        assert not conftest.is_overview(config)


def test_cases_with_goals_come_first_and_names_choose_one_case():
    names = [case.name for case in IN_ORDER]
    assert tuple(names[: len(FIRST)]) == FIRST
    assert set(ONE_OF_EACH) <= set(FIRST)
    assert len(names) == len(set(names))
    assert all(case.name.startswith("cpu_") == (case.device == "cpu") for case in IN_ORDER)


@pytest.mark.slow
def test_time_that_is_spent_is_stated():
    done = run("--benchmark-only", "--bench-seconds=0", "-k", "cpu_digits-both")
    assert done.returncode == 0
    assert "the time of --bench-seconds was spent" in done.stdout
    assert f"{len(OF_ONE_LENGTH)} skipped" in done.stdout
