"""The examples run as their README says, on a CPU, and print what they are there to show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# What a reader would look for in each one's output.
SHOWS = {
    "accelerate_kappa.py": r"(?ms)^step 20: loss \d.*^encoder\.layers\.1\.self_attn +8x4 +12 +\d",
    "fast_inference.py": r"(?m)^ +compiled .* \d\.\de-0[5-9]\n +package .* \d\.\de-0[5-9]$",
    "monitor_kappa.py": r"(?m)^layers\.1\.self_attn +12x64 +197 +\d.* recomputed$",
    "qk_clip.py": r"(?m)^ +15 +\d\.\d+ +(?:[89]|\d\d)\.\d +\d\.\d+ +[2-5]\.\d$",
    "timm_drop_in.py": r"(?ms)^ +blocks\.11\.attn +\d.*^undone: <class 'timm\.",
    "transformers_drop_in.py": r"(?m)^  model\.layers\.3\.self_attn: .*kappa \d.*\(same pass\)$",
}
SMALLER = {
    "accelerate_kappa.py": ["--steps", "21"],
    "fast_inference.py": ["--seconds", "0.05"],
    "qk_clip.py": ["--steps", "16", "--threshold", "3"],
}


def test_every_example_is_listed_and_tried():
    found = sorted(path.name for path in EXAMPLES.glob("*.py"))
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text("utf-8"), re.M)
    assert found == sorted(listed) == sorted(SHOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWS)
def test_an_example_runs_and_shows_what_it_promises(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / name), *SMALLER.get(name, [])]
    environment = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(SHOWS[name], run.stdout), run.stdout
