"""The rehearsal of tests/gpu: what it pretends, and that its list names tests that exist."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="a rehearsal runs kernels in Triton's interpreter")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests/gpu"
LIST = tomllib.loads((FOLDER / "not_rehearsed.toml").read_text("utf-8"))


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_list_names_tests_and_constants_that_exist_with_a_reason():
    tests, constants = set(), set()
    for file in FOLDER.glob("test_*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                tests.add(f"{file.name}::{node.name}")
            if isinstance(node, ast.Assign):
                constants |= {(file.name, n.id) for n in ast.walk(node) if isinstance(n, ast.Name)}
    for entry in LIST["left_out"]:
        assert len(entry["reason"]) > 20, entry
        for name in entry["tests"]:
            assert name.partition("[")[0] in tests, name
    smaller = {(file, name) for file, values in LIST["smaller"].items() for name in values}
    assert smaller <= constants


def test_no_test_draws_numbers_on_a_gpu_but_those_of_large_tensors():
    drawn = re.compile(r"torch\.rand\w*\([^()]*(\([^()]*\)[^()]*)*device=|\.(normal|uniform)_\(")
    for file in FOLDER.glob("test_*.py"):
        if file.name != "test_large_tensors_gpu.py":
            assert not drawn.search(file.read_text("utf-8")), file.name


PRETENDED = """
import torch
from tests.gpu import rehearsal
rehearsal.begin()
from leaner_kernels import attention
from leaner_kernels.ops.attention import launch

torch.manual_seed(0)
here, there = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16, device="cuda")
assert there.is_cuda and not there.cpu().is_cuda and (there.cpu() != here).any()
assert torch.equal(here.cuda().cpu(), here)

def refused(call, words):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

refused(lambda: here + there, "is on the CPU")
torch.cuda.set_sync_debug_mode("error")
refused(lambda: there.sum().item(), "synchronizing")
refused(there.cpu, "synchronizing")
torch.cuda.set_sync_debug_mode("default")

launched, forward, backward = [], launch.forward, launch.backward
launch.forward = lambda *args: (launched.append("forward"), forward(*args))
launch.backward = lambda *args: (launched.append("backward"), backward(*args))
module = torch.nn.Linear(16, 16).cuda()
out = attention(module(there), there, there)
out.sum().backward()
assert out.is_cuda and module.weight.grad.is_cuda and launched == ["forward", "backward"]
attention(here, here, here)
assert len(launched) == 2
"""


@pytest.mark.slow
def test_a_tensor_on_the_gpu_goes_to_the_kernels_and_mixes_with_none_of_the_cpu():
    done = python("-c", PRETENDED)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_one_case_of_every_test_that_is_not_listed_runs():
    done = python("-m", "pytest", "tests/gpu", "--rehearse", "bodies", "--collect-only", "-q")
    ran = re.findall(r"^tests/gpu/(\w+\.py::\w+)", done.stdout, re.MULTILINE)
    listed = {name for entry in LIST["left_out"] for name in entry["tests"] if "[" not in name}
    written = {
        f"{file.name}::{name}"
        for file in FOLDER.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    assert len(ran) == len(set(ran))
    assert set(ran) == written - listed


COMPILED = """
import pytest
import torch

@pytest.mark.parametrize("case", "abcdefghijkl")
def test_one_function(case):
    def call(x):
        return x + ord(case)
    assert torch.compile(call, fullgraph=True, backend="eager")(torch.zeros(())) == ord(case)
"""


@pytest.mark.slow
def test_cases_of_a_test_may_compile_one_function_more_often_than_pytorch_would(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "not_rehearsed.toml"):
        (tmp_path / "tests" / name).write_text((FOLDER / name).read_text("utf-8"))
    (tmp_path / "tests/test_new.py").write_text(COMPILED)
    done = python("-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout


@pytest.mark.slow
def test_a_skip_of_what_is_not_listed_fails(tmp_path):
    (tmp_path / "gpu").mkdir()
    for name in ("conftest.py", "not_rehearsed.toml"):
        (tmp_path / "gpu" / name).write_text((FOLDER / name).read_text("utf-8"))
    (tmp_path / "gpu/test_new.py").write_text(
        "import pytest\n\ndef test_new():\n    pytest.skip('needs 40 GiB')\n"
    )
    done = python(
        "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path / "gpu"), "--rehearse=all"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "skipped, and not listed" in done.stdout
