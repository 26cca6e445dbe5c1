"""Trips: the files of ours that a call goes through, and the modules that a script loads.

python -m tests.trips NAME prints one as JSON, in a process of its own: what other tests have
imported or cached changes nothing.
"""

import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

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
    """Return the trip of a later sampled step, from ``begin`` to its rows.

    The model goes the way of a GPU, and what it captures is measured on the CPU.
    """
    import torch

    from bench import host_time
    from leaner_kernels import KappaMonitor
    from leaner_kernels.nn import capture
    from models.vit import VisionTransformer

    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
    model = VisionTransformer(**sizes, embed_dim=32, depth=2, heads=4, head_dim=8).bfloat16()
    monitor, images = KappaMonitor(model, every=1, samples=2), torch.randn(4, 1, 8, 8).bfloat16()
    sample, rows = torch.tensor([0, 2], dtype=torch.int32), list[dict[str, Any]]()

    def step() -> None:
        monitor.begin(0)
        # A tensor for a GPU that is not there cannot be made.
        with host_time.gpu(), mock.patch.object(capture, "evenly_spaced", return_value=sample):
            model(images).sum().backward()
        rows.extend(monitor.end())

    # The first finds the modules of ours by the function mode, below which calls are not repeated.
    step()
    step()
    later = trip(step)
    assert [row["step"] for row in rows] == [0] * 6
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


def attention(name: str, turn: int) -> Trip:
    """Return the trip of a call of attention and its backward, on the route of a GPU.

    Args:
        name: of a case below.
        turn: 0 for the first call of the process, 1 for the first of a further shape, 2 for a call
            like one before.
    """
    import torch
    from torch import Tensor

    import leaner_kernels as lk
    from bench import host_time
    from leaner_kernels.ops.attention import op

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()

    def separate(*shape: int) -> list[Tensor]:
        return [leaf(*shape) for _ in range(3)]

    lengths, seen = torch.full((4,), 50, dtype=torch.int32), torch.ones(64, 64, dtype=torch.bool)
    starts, sample = (torch.tensor(n, dtype=torch.int32) for n in ([0, 100, 197], [0]))
    short, vit = (4, 4, 64, 64), (128, 16, 197, 64)
    cases: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "plain": (lk.attention, separate(*vit)),
        "lengths": (lambda *t: lk.attention(*t, key_lengths=lengths), separate(*short)),
        "mask": (lambda *t: lk.attention(*t, seen), separate(*short)),
        "dropout": (lambda *t: lk.attention(*t, dropout_p=0.1), separate(*short)),
        "window": (lambda *t: lk.attention(*t, window_size=(8, 0)), separate(*short)),
        "packed": (lk.attention_qkvpacked, [leaf(4, 64, 3, 4, 64)]),
        "varlen": (lambda *t: lk.attention_varlen(*t, starts, 100), separate(197, 4, 64)),
        "statistics": (
            lambda *t: lk.attention_with_stats(*t, sample=sample).out,
            separate(*short),
        ),
    }
    call, tensors = cases[name]

    def both(*given: Tensor) -> None:
        out = call(*given)
        torch.autograd.grad(out, given, torch.ones_like(out))

    seed = torch.zeros(1, dtype=torch.int64)
    with host_time.gpu(), mock.patch.object(op, "draw_seed", return_value=seed):
        if turn == 1:  # of the same kernels
            both(*separate(64, 16, 196, 64))
        elif turn == 2:
            both(*tensors)
        return trip(partial(both, *tensors))


TRIPS: dict[str, Callable[[], Trip]] = {
    "sampled step": sampled_step,
    "training": training,
    "attention, first": partial(attention, "plain", 0),
    "attention, further shape": partial(attention, "plain", 1),
    **{
        f"attention, repeated, {name}": partial(attention, name, 2)
        for name in ("plain", "lengths", "mask", "dropout", "window", "packed", "varlen")
    },
    "attention, repeated, statistics": partial(attention, "statistics", 2),
}


if __name__ == "__main__":
    found = TRIPS[sys.argv[1]]()
    sys.stderr.write(json.dumps(found) + "\n")
