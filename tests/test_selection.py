"""A run of pytest that could run none of the tests that it selected is red."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
# A file of each folder, so that little is collected.
INTERPRETED = "tests/interpreter/test_offset_limits.py"
COMPILED = "tests/compiled/test_command.py"
AOT = "tests/aot/test_products.py"


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit status of pytest and its last line."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_XDIST", "TRITON_INTERPRET", "LEANER_EXECUTE"))
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout.splitlines() or [done.stderr])[-1]


@pytest.mark.parametrize(
    ("path", "environment", "command", "workers"),
    [
        (INTERPRETED, {}, "pytest tests/interpreter --backend interpreter -k 'not nothing'", "2"),
        (COMPILED, {}, "pytest tests/compiled --backend executed -k 'not nothing'", "0"),
        (AOT, {"TRITON_INTERPRET": "1"}, "pytest tests/aot --backend cpu -k 'not nothing'", "0"),
    ],
    ids=["interpreter", "compiled", "aot"],
)
def test_a_folder_that_needs_another_process_fails_the_run(path, environment, command, workers):
    others = [] if "TRITON_INTERPRET" in environment else ["tests/test_names.py"]
    status, line = run(path, *others, "-k", "not nothing", "-n", workers, **environment)
    assert status == 1
    assert line.startswith("FAILED: no test of tests/")
    assert line.endswith(f": {command}")


@pytest.mark.parametrize(
    ("options", "environment"),
    [(("--backend", "interpreter"), {}), ((), {"TRITON_INTERPRET": "1"})],
    ids=["option", "environment"],
)
def test_a_folder_whose_tests_run_is_green(options, environment):
    status, line = run(INTERPRETED, *options, **environment)
    assert status == 0
    assert " passed" in line


@pytest.mark.parametrize(
    ("backend", "environment"),
    [("gpu", {"CUDA_VISIBLE_DEVICES": ""}), ("cpu", {"LEANER_EXECUTE": "1"})],
)
def test_a_backend_that_the_process_cannot_have_is_refused(backend, environment):
    status, _ = run(INTERPRETED, "--backend", backend, **environment)
    assert status == pytest.ExitCode.USAGE_ERROR
