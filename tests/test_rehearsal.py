"""The rehearsal of tests/gpu: what it pretends, and that its list names tests that exist."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="a rehearsal runs kernels in Triton's interpreter")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests/gpu"
LIST = tomllib.loads((FOLDER / "not_rehearsed.toml").read_text("utf-8"))


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
