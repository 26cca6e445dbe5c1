"""Trips: the files of ours that a call of attention goes through, on the route of a GPU.

python -m tests.trips NAME prints one as JSON, in a process of its own: what other tests have
imported or cached changes nothing.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple
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

    sample = torch.tensor([0], dtype=torch.int32)
    short, vit = (4, 4, 64, 64), (128, 16, 197, 64)
    cases: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "plain": (lk.attention, separate(*vit)),
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
    "attention, first": partial(attention, "plain", 0),
    "attention, further shape": partial(attention, "plain", 1),
    "attention, repeated": partial(attention, "plain", 2),
    "attention, repeated, statistics": partial(attention, "statistics", 2),
}


if __name__ == "__main__":
    found = TRIPS[sys.argv[1]]()
    sys.stderr.write(json.dumps(found) + "\n")
