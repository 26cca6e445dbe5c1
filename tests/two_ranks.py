"""Two processes of one gloo group, each of which runs ``work`` of a test module."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def found_by(module: str, folder: Path, seconds: float = 180) -> list[dict[str, Any]]:
    """Run ``module.work(rank, folder)`` in both, which writes ``folder / "{rank}.json"``.

    Returns:
        What the files hold, by rank.
    """
    code = (
        f"import pathlib, sys; from {module} import work; "
        "work(int(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
