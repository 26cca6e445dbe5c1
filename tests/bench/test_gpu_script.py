"""`bench/gpu.sh`: refusals, and its stages with a python3 that pretends."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.test_compatibility import FOUND
from tests.bench.test_report import RESULT

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench/gpu.sh"
# Answers for each stage as told by the environment; with REPORT=real the report is the real one.
PRETEND = """#!/usr/bin/env bash
echo "python3 $*" >>"$CALLS"
for argument; do
  case $argument in --benchmark-json=*) cp "$RESULT" "${argument#*=}" ;; esac
  case $argument in --compat-results=*) cp "$COMPATIBILITY" "${argument#*=}" ;; esac
done
case $* in
  -) exit "${HAS_GPU:-0}" ;;
  *bench.report* | *bench.compatibility*)
    if [ "${REPORT:-}" = real ]; then exec "$PYTHON" "$@"; fi ;;
  *tests/gpu*) exit "${TESTS:-0}" ;;
  *"(flex or compiled)"*) exit "${COMPILED:-0}" ;;
esac
"""
TOOLS = ("bash", "cat", "cp", "date", "dirname", "env", "mkdir", "rm", "tee", "timeout", "wc")


def run(script, *arguments, path=os.environ["PATH"], **environment):
    return subprocess.run(
        ["bash", script, *arguments],
        env=os.environ | {"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_is_valid_and_executable():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_without_a_folder_it_refuses():
    done = run(SCRIPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bench/gpu.sh: give the folder to write into: bench/gpu.sh OUTDIR [CASES]\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_refuses_in_one_line(tmp_path):
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run(SCRIPT, str(tmp_path / "out"), path=path)
    assert (done.returncode, done.stdout) == (2, "")
    expected = r"bench/gpu.sh: torch \S+ sees no CUDA GPU: nothing to measure\n"
    assert re.fullmatch(expected, done.stderr)


def test_a_missing_package_is_named(tmp_path):
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool))
    # -I and -S hide every installed package from the interpreter.
    (tmp_path / "python3").write_text(f'#!/bin/bash\nexec "{sys.executable}" -I -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    done = run(SCRIPT, str(tmp_path / "out"), path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("torch, triton, pytest, pytest_benchmark, hypothesis\n")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def checkout(tmp_path):
    """A copy without git, with a GPU test and with python3 that pretends."""
    copy = tmp_path / "checkout"
    for folder in ("bench", "tests/gpu", "leaner_kernels/csrc", "bin"):
        (copy / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, copy / "bench")
    (copy / "tests/gpu/test_kernels.py").touch()
    (copy / "bin/python3").write_text(PRETEND)
    (copy / "bin/python3").chmod(0o755)
    for tool in TOOLS:
        (copy / "bin" / tool).symlink_to(shutil.which(tool))
    return copy


def pretend(checkout, tmp_path, *arguments, **environment):
    result = tmp_path / "result.json"
    result.write_text(json.dumps(RESULT))
    compatibility = tmp_path / "compatibility.json"
    compatibility.write_text(json.dumps(FOUND))
    return run(
        checkout / "bench/gpu.sh",
        str(tmp_path / "out"),
        *arguments,
        path=str(checkout / "bin"),
        CALLS=str(tmp_path / "calls"),
        RESULT=str(result),
        COMPATIBILITY=str(compatibility),
        PYTHON=sys.executable,
        PYTHONPATH=str(ROOT),
        **environment,
    )


def test_stages_run_in_order_of_value_and_end_with_a_table(checkout, tmp_path):
    done = pretend(checkout, tmp_path, REPORT="real")
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text()
    stages = re.findall(r"pytest .* (bench --benchmark-disable|tests/gpu|bench.*-k.*)", calls)
    assert [stage.split("-k ")[-1] for stage in stages] == [
        "bench --benchmark-disable",
        "one_step and not cpu_",
        "tests/gpu",
        "not cpu_ and not one_step and not flex and not compiled",
        "not cpu_ and not one_step and (flex or compiled)",
    ]
    assert "native library: nothing to build" in done.stdout
    assert "equal: 1 cases of 1 families" in done.stdout
    *_, table, wrong = done.stdout.splitlines()
    assert "leaner_attention" in table
    assert wrong == "WRONG: vit_base eager: off by 3"


def test_some_cases_are_measured_without_the_tests(checkout, tmp_path):
    # Of which nothing is compiled: pytest then leaves with 5.
    done = pretend(checkout, tmp_path, "lra or text", COMPILED="5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled: none of the cases asked for" in done.stdout
    calls = (tmp_path / "calls").read_text()
    assert "tests/gpu" not in calls
    assert "tests/gpu: left out" in done.stdout
    assert "one step of every row: left out" in done.stdout
    assert "bench_models.py" not in calls
    stages = re.findall(r"pytest .* bench --benchmark-only.* -k (.*)", calls)
    assert stages == [
        "(lra or text) and not cpu_ and not one_step and not flex and not compiled",
        "(lra or text) and not cpu_ and not one_step and (flex or compiled)",
    ]


def test_everything_is_written_in_few_flat_files(checkout, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "bench.log").write_text("of a run before")
    pretend(checkout, tmp_path)
    names = {path.name for path in out.iterdir() if path.is_file()}
    assert len(list(out.iterdir())) == len(names) <= 8
    written = {"compatibility.json", "bench.json", "steps.json", "compiled.json", "environment.txt"}
    assert written | {"summary.txt"} <= names
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    assert "of a run before" not in (out / "bench.log").read_text()


def test_a_failed_test_is_the_exit_status_and_stops_nothing(checkout, tmp_path):
    done = pretend(checkout, tmp_path, TESTS="3")
    assert done.returncode == 1
    assert "tests/gpu: FAILED with status 3" in done.stdout
    assert "benchmarks: passed" in done.stdout
    assert "bench.report --short" in (tmp_path / "calls").read_text()


def test_a_source_without_cmake_is_left_out_and_said(checkout, tmp_path):
    (checkout / "leaner_kernels/csrc/solver.cu").touch()
    done = pretend(checkout, tmp_path)
    assert "native library: not built, cmake or nvcc is not on PATH" in done.stdout
    assert done.returncode == 0


SANITIZER = """#!/usr/bin/env bash
echo "compute-sanitizer $*" >>"$CALLS"
[ "$2" != "${FINDS:-nothing}" ] || exit 9
while [ "$1" != env ]; do shift; done
exec "$@"
"""


def test_each_tool_of_the_sanitizer_checks_the_native_library(checkout, tmp_path):
    (checkout / "tests/gpu/test_native_kappa.py").touch()
    (checkout / "bin/compute-sanitizer").write_text(SANITIZER)
    (checkout / "bin/compute-sanitizer").chmod(0o755)
    done = pretend(checkout, tmp_path, FINDS="racecheck")
    assert done.returncode == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    tools = [line.split()[2] for line in calls if line.startswith("compute-sanitizer")]
    assert tools == ["memcheck", "racecheck", "synccheck"]
    checked = [line for line in calls if line.endswith("tests/gpu/test_native_kappa.py")]
    assert len(checked) == 5  # the sanitizer, and the tests that two of its tools ran
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in checked[0]
    assert not any("CACHING" in line for line in checked[2:])
    assert "compute-sanitizer memcheck: passed" in done.stdout
    assert "compute-sanitizer racecheck: FAILED with status 9" in done.stdout
    assert "compute-sanitizer synccheck: passed" in done.stdout
    assert "benchmarks: passed" in done.stdout


@pytest.mark.skipif(
    os.path.exists("/usr/local/cuda/bin/compute-sanitizer"), reason="the script finds the real one"
)
def test_without_the_sanitizer_the_summary_says_so(checkout, tmp_path):
    (checkout / "tests/gpu/test_native_kappa.py").touch()
    done = pretend(checkout, tmp_path)
    assert "compute-sanitizer: not run, it is not on PATH" in done.stdout
    assert done.returncode == 0


def test_it_ends_before_nine_minutes():
    text = SCRIPT.read_text()
    total = int(re.search(r"^total=(\d+)", text, re.MULTILINE)[1])
    killed_after = int(re.search(r"--kill-after=(\d+)", text)[1])
    assert total + killed_after <= 9 * 60 - 10
