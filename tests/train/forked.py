"""Two ranks that one process forks: what they need is imported once, which takes seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.train.launch import ROOT, free_port


def on_two_ranks(module: str, folder: Path) -> list[Any]:
    """Run ``module.work(rank, folder)`` on two ranks, on the CPU, as ``init_distributed`` needs it.

    Returns:
        What both return, as JSON, by rank.
    """
    code = "import sys; from tests.train.forked import fork; "
    code += f"from {module} import work; fork(work, sys.argv[1])"
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=os.environ | own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def fork(work: Callable[[int, Path], Any], folder: str) -> None:
    """Do the work as rank 0, and as rank 1 in a fork of this process."""
    torch.cuda.is_available = lambda: False
    # A rank may lose sight of the folder; what it returns is written where it was.
    place = os.open(folder, os.O_RDONLY)
    child = os.fork()
    rank = int(child == 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    answer = json.dumps(work(rank, Path(folder))).encode()
    file = os.open(f"{rank}.json", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=place)
    os.write(file, answer)
    if rank == 0:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
