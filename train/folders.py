"""Where a run keeps what it writes."""

from pathlib import Path
from typing import Any

from torch import distributed as dist

from train.flags import Settings
from train.parallel import World


def choose_folder(name: str, settings: Settings, world: World) -> Path:
    """Return the folder of a run, made by rank 0, which must not hold another run."""
    answer: list[Any] = [None, None]
    if world.rank == 0:
        try:
            answer[0] = _choose_folder(name, settings)
        except (ValueError, OSError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0, group=world.host_group)
    folder, error = answer
    if error is not None:
        raise ValueError(error)
    return folder


def _choose_folder(name: str, settings: Settings) -> Path:
    """Return the folder given, or the next free one in ``runs/``; "auto" takes up the newest."""
    if settings.out is not None:
        folder = Path(settings.out)
        holds_a_run = (folder / "checkpoints").exists() or (folder / "metrics.jsonl").exists()
        if holds_a_run and settings.resume != "auto":
            raise ValueError(f"--out {folder} holds a run: give --resume auto or another --out")
    else:
        numbers = (p.name.removeprefix(f"{name}-") for p in Path("runs").glob(f"{name}-*"))
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        number = max(newest, 1) if settings.resume == "auto" else newest + 1
        folder = Path("runs") / f"{name}-{number}"
    if not settings.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    return folder
