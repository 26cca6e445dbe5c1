"""Trips: the files of ours that a call goes through, and the modules that a script loads.

python -m tests.trips NAME prints one as JSON, in a process of its own: what other tests have
imported or cached changes nothing.
"""

import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Trip(NamedTuple):
    """What a call goes through.

    Attributes:
        files: paths below the checkout, in the order of the first visit.
        returns: how often a file is entered again after another.
    """

    files: list[str]
    returns: int


def trip(run: Callable[[], object], folder: str = "leaner_kernels") -> Trip:
    """Return the files of a folder in which a Python call is made while ``run`` runs."""
    visits: list[str] = []
    prefix = f"{ROOT / folder}/"

    def note(frame: FrameType, event: str, _arg: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix) and visits[-1:] != [path]:
            visits.append(path)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    files = [str(Path(path).relative_to(ROOT)) for path in dict.fromkeys(visits)]
    return Trip(files, len(visits) - len(files))


def sampled_step() -> Trip:
    """Return the trip of a later sampled step, from ``begin`` to its rows."""
    import torch

    from leaner_kernels import KappaMonitor
    from models.vit import VisionTransformer

    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
    model = VisionTransformer(**sizes, embed_dim=32, depth=2, heads=4, head_dim=8)
    monitor, images = KappaMonitor(model, every=1, samples=2), torch.randn(4, 1, 8, 8)
    rows: list[dict[str, Any]] = []

    def step() -> None:
        monitor.begin(0)
        model(images).sum().backward()
        rows.extend(monitor.end())

    step()
    later = trip(step)
    assert [row["reason"] for row in rows] == [None] * 4
    return later


def training() -> Trip:
    """Return the modules of ours that a step of ``train/vit.py`` on digits loads."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train/vit.py", "--steps", "1", "--out", f"{folder}/run"]
        try:
            runpy.run_path(str(ROOT / "train/vit.py"), run_name="__main__")
        finally:
            loaded = {getattr(module, "__file__", None) for module in sys.modules.values()}
    ours = {path for path in loaded if path and path.startswith(f"{ROOT}/") and ".venv" not in path}
    return Trip(sorted(str(Path(path).relative_to(ROOT)) for path in ours - {__file__}), 0)


TRIPS: dict[str, Callable[[], Trip]] = {"sampled step": sampled_step, "training": training}


if __name__ == "__main__":
    found = TRIPS[sys.argv[1]]()
    sys.stderr.write(json.dumps(found) + "\n")
