"""Start ``train/vit.py`` as a user would, on a model small enough for a test."""

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "train" / "vit.py")
# Two layers of two heads, and a data set of 44 batches.
TINY = ["--heads", "2", "--depth", "2", "--head-dim", "8", "--batch-size", "32"]
# Of the tensors of a checkpoint that one process saved.
SHARD = "shard-00001-model-00001-of-00001.safetensors"
TINY += ["--eval-every", "0", "--kappa-every", "2", "--workers", "0"]


def start(
    *args: object, torchrun: list[str] | None = None, before: str = "", gpu: bool = False
) -> subprocess.Popen:
    """Start the script.

    Args:
        *args: of the script.
        torchrun: arguments of torchrun; without them, the script runs alone.
        before: Python statements that a process alone runs first.
        gpu: whether it may use the GPUs of this machine.
    """
    words = [str(arg) for arg in args]
    if torchrun is not None:
        command = ["-m", "torch.distributed.run", *torchrun, SCRIPT, *words]
    elif before:
        run = f"import runpy, sys; sys.argv = {[SCRIPT, *words]!r}; {before}; "
        command = ["-c", run + f"runpy.run_path({SCRIPT!r}, run_name='__main__')"]
    else:
        command = [SCRIPT, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait for the script, which must not hang, and return what it said."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"hung: {process.communicate()}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def free_port() -> int:
    """Return a port that nobody listens at, and that no connection of another test is given.

    The kernel gives those away from 32768 on, at any moment until this one is bound.
    """
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            except OSError:
                continue
            return probe.getsockname()[1]


def torchrun(ranks: int) -> list[str]:
    """Return the arguments that start ``ranks`` processes, on a port that is free."""
    return ["--standalone", f"--nproc-per-node={ranks}"]


def run(*args: object, **how: object) -> subprocess.CompletedProcess:
    """Run the script, which must succeed."""
    done = finish(start(*args, **how))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def rows(path: Path) -> list[dict]:
    """Return the objects of a file of JSON lines, without what a clock measured."""
    clock = ("throughput", "tokens_per_second", "data_wait")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in clock} for row in lines]


def tensors_of(checkpoint: Path) -> dict[str, str]:
    """The digest of every tensor of a checkpoint, by its file and name."""
    digests = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                about = f"{tensor.dtype} {tensor.shape} ".encode()
                digests[f"{path.name} {name}"] = hashlib.sha256(
                    about + tensor.tobytes()
                ).hexdigest()
    return digests


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Return what the manifest of a checkpoint's files would say."""
    return {
        "files": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(checkpoint.iterdir())
        }
    }


def whole_tensors(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a checkpoint, whole, by name, of the model, the optimizer and the average."""
    import torch

    from train.checkpoint.shards import load_tensors, part_of, saved_tensors

    saved = saved_tensors(checkpoint).items()
    tensors = {name: torch.empty(tensor.size, dtype=tensor.dtype) for name, tensor in saved}
    load_tensors(checkpoint, {name: part_of(tensor) for name, tensor in tensors.items()})
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts


def assert_same_run(
    out: Path, whole: Path, last: str = "step-00000008", *, resumed: bool = True
) -> None:
    """Every figure and every bit of the weights, averages and moments is the same.

    And the run was resumed, unless it was not to be: one that began anew has the same bits too.
    """
    details = out / "summary.json"
    if not details.exists():
        details = out / "checkpoints" / last / "state.json"
    at = json.loads(details.read_text())["resumed_at"]
    assert (min(at, default=0) > 0) == resumed, at
    for name in ("metrics.jsonl", "kappa.jsonl"):
        assert rows(out / name) == rows(whole / name)
    assert tensors_of(out / "checkpoints" / last) == tensors_of(whole / "checkpoints" / last)


def wait_for(holds: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait until something holds while the process runs."""
    deadline = time.monotonic() + 90
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened for 90 s"
        time.sleep(0.01)


def pid_of_rank(rank: int, agent: int) -> int:
    """Return the process that an agent of torchrun started for a rank."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            parent = int((environment.parent / "stat").read_text().rpartition(")")[2].split()[1])
            variables = environment.read_bytes().split(b"\0")
        except OSError:  # another user's process, or one that has just ended
            continue
        if parent == agent and f"RANK={rank}".encode() in variables:
            return int(environment.parent.name)
    raise AssertionError(f"torchrun {agent} has no rank {rank}")
