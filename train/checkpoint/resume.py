"""Whether a run may go on where another one ended."""

import json
from pathlib import Path
from typing import Any

from torch import distributed as dist

from train.config.flags import BUDGETS, Settings
from train.loop.parallel import World

# What both must share: the tensors' shapes, and which items a step takes.
_SAME = (
    *("model", "heads", "depth", "head_dim", "mlp_ratio", "control"),
    *("data", "batch_size", "batch_size_warmup", "seed", "ema", "kappa_penalty"),
)
# Steps of different sizes: which items one takes follows from the length of the run too.
_SAME_IN_A_BATCH_SIZE_WARMUP = ("accum", "epochs", "tokens")


def check_that_it_fits(path: Path, saved: dict[str, Any], settings: Settings) -> None:
    """Check that a run with these settings can go on from a checkpoint.

    Args:
        path: of the checkpoint, for the message.
        saved: the settings that it was saved with.
        settings: of now.

    Raises:
        ValueError: one differs that must not.
    """
    now = json.loads(json.dumps(settings.as_json()))
    same = _SAME + settings.SAME_AFTER_RESUME
    if settings.batch_size_warmup:
        same += _SAME_IN_A_BATCH_SIZE_WARMUP
    for name in same:
        if name not in saved:  # by a version without such a flag
            continue
        if saved[name] != now[name]:
            raise ValueError(
                f"--resume {path} needs --{name.replace('_', '-')} {saved[name]} as it was "
                f"saved with, got {now[name]}"
            )


def summary_if_finished(settings: Settings, world: World) -> dict[str, Any] | None:
    """Return the summary of a run that was as long, of the same model on the same data.

    Every rank calls it, and has rank 0's answer.
    """
    answer = [_summary_if_finished(settings) if world.rank == 0 else None]
    dist.broadcast_object_list(answer, src=0, group=world.host_group)
    return answer[0]


def _summary_if_finished(settings: Settings) -> dict[str, Any] | None:
    try:
        done = json.loads((Path(settings.out) / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    now = json.loads(json.dumps(settings.as_json()))
    same = (*BUDGETS, *_SAME, *settings.SAME_AFTER_RESUME)
    then = now | done["settings"]  # of a version with fewer flags
    return done if all(then[name] == now[name] for name in same) else None
