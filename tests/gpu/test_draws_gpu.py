"""A GPU's tests draw their numbers on the CPU, so that bounds seen to hold there hold for the same.

Neither a rehearsal nor the CPU's tests would notice another generator, but a GPU that is rented.
"""

import re
from pathlib import Path

import pytest

from tests.backends import CPU

TESTS = Path(__file__).resolve().parents[1]
RANDOM = r"torch\.rand\w*\([^()]*(\([^()]*\)[^()]*)*"
# What no file of a folder may have; tests/ops draws on other devices too.
DRAWN = {
    "gpu": re.compile(RANDOM + r"device=|\.(normal|uniform)_\("),
    "ops": re.compile(RANDOM + r'device="cuda"'),
}


@pytest.mark.backends(CPU)
def test_no_test_draws_numbers_on_a_gpu_but_those_of_large_tensors() -> None:
    for folder, drawn in DRAWN.items():
        for file in (TESTS / folder).glob("test_*.py"):
            if file.name not in ("test_large_tensors_gpu.py", Path(__file__).name):
                assert not drawn.search(file.read_text("utf-8")), file.name
