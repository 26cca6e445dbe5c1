"""Every command answers ``--help``, and does nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "bench", "studies", "models", "train", "leaner_kernels/monitor"
# One process, in which modules that all commands import are imported once.
ASK = """
import contextlib, io, json, runpy, sys, time

answers = {}
for name in sys.argv[1:]:
    said, sys.argv = io.StringIO(), [name, "--help"]
    sys.modules.pop(name, None)  # what another imported is run anew
    began = time.process_time()
    status = None
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            status = error.code
    answers[name] = status, said.getvalue(), time.process_time() - began
print(json.dumps(answers))
"""


def commands() -> list[str]:
    """Return the modules that ``python -m`` runs."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    own = [
        path for path in paths if "__main__" in path.read_text("utf-8") or path.stem == "__main__"
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in own}
    return sorted(name.removesuffix(".__main__") for name in names - {"train.export"})


@pytest.mark.slow
def test_every_command_answers_help_within_ten_seconds_and_writes_nothing(tmp_path):
    names = commands()
    assert {"bench.training", "bench.harness.machine", "studies.page", "train.vit"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    answers = json.loads(done.stdout)
    assert {name for name, (status, *_) in answers.items() if status not in (0, None)} == set()
    assert {
        name for name, (_, said, _) in answers.items() if not said.startswith("usage: ")
    } == set()
    # Beside the first, which imports torch, with room for a slow machine.
    assert {name for name, (*_, seconds) in answers.items() if seconds > 10} == set()
    assert [*tmp_path.iterdir()] == []
