"""The scripts for two nodes, SLURM's and plain torchrun's, on two nodes that are this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.launch import ROOT, SCRIPT, TINY, finish, free_port, wait_for

RUN = [SCRIPT, *TINY, "--ckpt-every", "2", "--eval-every", "0", "--keep", "99"]
STEPS = ["--steps", "60"]
PLAIN = ROOT / "examples" / "two_nodes.sh"
SLURM = ROOT / "examples" / "slurm" / "train.sbatch"
# What SLURM does, as far as the job script needs it, with each node a process of this machine.
COMMANDS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
        "$@" & echo $! >> "$NODES_FILE"; "$@" & echo $! >> "$NODES_FILE"; wait; wait""",
    "scontrol": """if [ "$1" = show ]; then printf "127.0.0.1\\n127.0.0.1\\n"
        else echo "$*" >> "$CALLS"; fi""",
    "squeue": "echo RUNNING",
    "scancel": 'kill -TERM $(cat "$NODES_FILE")',
}


@pytest.fixture
def launch(full, tmp_path):
    """Start a script with the environment of its node or job."""
    (tmp_path / "bin").mkdir()
    for name, does in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/bash\n{does}\n")
        command.chmod(0o755)
    port, started = free_port(), []

    def start(script: Path, out: Path, **own: str) -> subprocess.Popen:
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RANKS": "1",
            "PORT": str(port),
            "OUT": str(out),
            "NODES_FILE": str(tmp_path / "nodes"),
            "CALLS": str(tmp_path / "calls"),
        }
        process = subprocess.Popen(
            ["bash", str(script), *RUN, *STEPS],
            env=environment | own,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


def saved(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08}"


def assert_finished(out: Path, said: str) -> None:
    """Both nodes took part, and the run went on where it was stopped."""
    assert "resumed from" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert min(summary["resumed_at"]) >= 4


def test_plain_torchrun_trains_on_two_nodes_and_the_same_command_goes_on(launch, tmp_path):
    out = tmp_path / "run"
    nodes = [launch(PLAIN, out, HEAD="localhost") for _ in range(2)]
    wait_for(saved(out, 4).exists, nodes[0])
    for process in nodes:
        process.terminate()
    for process in nodes:
        finish(process)
    assert not (out / "summary.json").exists()
    done = [finish(node) for node in [launch(PLAIN, out, HEAD="localhost") for _ in range(2)]]
    assert [node.returncode for node in done] == [0, 0], done[0].stderr + done[1].stderr
    assert_finished(out, done[0].stdout + done[1].stdout)
    assert not [*tmp_path.glob("run_*")], "torchrun's own files, which the id would lead here"


def test_a_job_of_two_nodes_saves_at_its_end_is_requeued_and_finishes(launch, tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    out, calls = tmp_path / "run", tmp_path / "calls"
    process = launch(SLURM, out, **job)
    wait_for(saved(out, 4).exists, process)
    process.terminate()
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{out} is not finished: requeued\n")
    assert calls.read_text() == "requeue 7\n"
    (tmp_path / "nodes").unlink()
    done = finish(launch(SLURM, out, **job, SLURM_RESTART_COUNT="1"))
    assert done.returncode == 0, done.stderr
    assert f"{out} is finished" in done.stdout
    assert_finished(out, done.stdout)
    assert calls.read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("script", "given", "missing"),
    [
        (PLAIN, {"OUT": "runs/a"}, "HEAD: must"),
        (PLAIN, {"HEAD": "a"}, "OUT: must"),
        (SLURM, {}, "OUT: must be the folder of the run"),
    ],
)
def test_a_script_needs_to_be_passed_the_head_and_the_folder(script, given, missing):
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=given)
    assert done.returncode != 0
    assert missing in done.stderr
