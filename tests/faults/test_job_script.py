"""The job script for SLURM, with commands that note how they were called instead of SLURM's."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.train.launch import ROOT, finish

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"


@pytest.fixture
def slurm(tmp_path):
    """Start the job script where ``srun`` does what is asked, in a run's folder."""
    calls = tmp_path / "calls"
    commands = {
        "srun": """case "$PLAN" in
            finish) mkdir -p "$OUT" && touch "$OUT/summary.json" ;;
            refuse) exit 2 ;;
            crash) mkdir -p "$OUT/checkpoints/step-00000008"; exit 1 ;;
            esac""",
        "scontrol": 'if [ "$1" = show ]; then printf "node-a\nnode-b\n"; fi',
        "squeue": 'echo "$STATE"',
    }
    (tmp_path / "bin").mkdir()
    for name, does in commands.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{does}\n')
        command.chmod(0o755)

    def begin(plan: str, state: str = "RUNNING") -> tuple[subprocess.Popen, Path, Path]:
        out = tmp_path / "run"
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OUT": str(out)}
        environment |= {
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "node-[a-b]",
        }
        environment |= {"PLAN": plan, "STATE": state}
        process = subprocess.Popen(
            ["bash", str(SCRIPT), "train/vit.py", "--lr", "1"],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return process, out, calls

    return begin


def test_the_job_script_starts_torchrun_on_all_nodes_and_ends_with_a_finished_run(slurm):
    process, out, calls = slurm("finish")
    done = finish(process)
    assert (done.returncode, done.stderr) == (0, "")
    show, srun = calls.read_text().splitlines()
    assert show == "scontrol show hostnames node-[a-b]"
    assert "--nnodes=2 --nproc-per-node=gpu" in srun
    assert "--rdzv-endpoint=node-a:29500 --rdzv-id=7-0" in srun
    assert srun.endswith(f"train/vit.py --lr 1 --out {out} --resume auto")
    # Requeued by someone after it was finished: there is nothing to do.
    done = finish(slurm("refuse")[0])
    assert (done.returncode, done.stdout) == (0, f"{out} is finished\n")
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("plan", "state", "status", "requeued"),
    [
        ("crash", "RUNNING", 0, True),  # further than before
        ("refuse", "RUNNING", 2, False),
        ("crash", "COMPLETING", 1, False),  # cancelled by its owner
        ("crash", "", 1, False),
    ],
)
def test_the_job_script_requeues_what_may_get_further_and_nothing_else(
    slurm, plan, state, status, requeued
):
    process, _, calls = slurm(plan, state)
    done = finish(process)
    assert done.returncode == status, done.stderr
    assert ("scontrol requeue 7" in calls.read_text()) == requeued
