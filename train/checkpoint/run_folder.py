"""The run folder: choose it, lock it, and check whether a run may continue in it.

A run in the folder that ``--out`` names is continued by the command that began it. torchrun with
``--max-restarts`` continues runs too, and therefore needs ``--out``.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from torch import distributed as dist

from leaner_kernels.monitor.run_files import open_own
from train.checkpoint.checkpointer import newest_first
from train.config.flags import Settings
from train.loop.parallel import DistributedContext

# Settings that must be equal: they determine tensor shapes and the items of a step.
_SAME = (
    *("model", "heads", "depth", "head_dim", "mlp_ratio"),
    *("data", "batch_size", "batch_size_warmup", "seed", "ema", "kappa_penalty"),
)
# Settings with the location of data, which may move: its digests are compared instead.
_WHERE = ("data", "validation", "tokenizer")
# With steps of different sizes, the items of a step also depend on the length of the run.
_SAME_IN_A_BATCH_SIZE_WARMUP = ("accum", "epochs", "tokens")


def choose_folder(name: str, settings: Settings, world: DistributedContext) -> Path:
    """Return the folder of a run, created by rank 0; it must not hold another run.

    Args:
        name: name of the run, for a folder in ``runs/`` where no ``out`` is given.
        settings: settings of the run.
        world: the processes, each of which must call this.

    Raises:
        ValueError: ``out`` holds a finished run, without ``--resume auto``, or the checkpoint that
            ``resume`` names; torchrun may restart a run without ``out``; or the folder cannot be
            made. On every rank.
    """

    def choose() -> Path:
        try:
            return _choose_folder(name, settings)
        except OSError as error:
            raise ValueError(_cannot_be_used(Path(settings.out or "runs"), error)) from None

    return _from_main_process(world, choose)


def _from_main_process(world: DistributedContext, make: Callable[[], Any]) -> Any:
    """Return the result of rank 0 on every rank, or raise its ValueError on every rank."""
    answer: list[Any] = [None, None]
    if world.rank == 0:
        try:
            answer[0] = make()
        except ValueError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0, group=world.host_group)
    made, error = answer
    if error is not None:
        raise ValueError(error)
    return made


@contextmanager
def lock_folder(folder: Path, world: DistributedContext) -> Iterator[None]:
    """Keep other launches out of a run's folder.

    Args:
        folder: folder of the run.
        world: the processes, each of which must call this.

    Raises:
        ValueError: on every rank, if another launch that is still running uses it.
    """
    with ExitStack() as stack:

        def lock() -> None:
            # The lock belongs to the process, not to the file: data workers do not inherit it, and
            # it ends with the process.
            try:
                file = stack.enter_context(open_own(folder / ".lock", "ab"))
            except OSError as error:
                raise ValueError(_cannot_be_used(folder, error)) from None
            _lock(file, folder)

        _from_main_process(world, lock)
        yield


def _lock(file: IO[bytes], folder: Path) -> None:
    # Do not use flock: data workers would inherit it, and hold it for a while after a kill.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"{folder} is in use by another run: give another --out, or wait for that run to end"
        ) from None
    except OSError:  # a file system without locks
        pass


def _cannot_be_used(folder: Path, error: OSError) -> str:
    return f"--out {folder} cannot be used: {error.strerror}: {error.filename}"


def check_ranks_agree(identity: Mapping[str, str], world: DistributedContext) -> None:
    """Check that all ranks found the same data; each must call this.

    Raises:
        ValueError: on every rank, if something differs on a rank.
    """
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, dict(identity), group=world.host_group)
    for rank, theirs in enumerate(every):
        for name, digest in every[0].items():
            if theirs.get(name) != digest:
                raise ValueError(f"{name} is not the same on rank {rank} as on rank 0")


def begun_run(name: str, settings: Settings) -> Path | None:
    """Return the folder of the run that continues with these settings, or None for a new run.

    Args:
        name: name of the run, as ``choose_folder`` takes it.
        settings: settings of the run.
    """
    folder = _folder_in_runs(name, settings) if settings.out is None else Path(settings.out)
    if newest_first(folder / "checkpoints"):
        return folder
    if settings.resume in ("none", "auto"):
        return None
    return Path(settings.resume).resolve().parent.parent


def check_compatible(
    path: Path, train_state: Mapping[str, Any], settings: Settings, identity: Mapping[str, str]
) -> None:
    """Check that a run with these settings can continue from a checkpoint.

    Args:
        path: path of the checkpoint, for the message.
        train_state: state of the checkpoint, with its settings and identity.
        settings: current settings.
        identity: current identity, as in ``Task``.

    Raises:
        ValueError: if a setting differs that must be equal, or the data has changed.
    """
    saved = train_state["settings"]
    now = json.loads(json.dumps(settings.as_json()))
    same = _SAME + settings.SAME_AFTER_RESUME
    if settings.batch_size_warmup:
        same += _SAME_IN_A_BATCH_SIZE_WARMUP
    before = train_state.get("identity")
    if not isinstance(before, dict):  # saved by a version without an identity
        before = {}
    compared = bool(identity) and before.keys() == identity.keys()
    for name in same:
        if compared and name in _WHERE:
            continue
        if name in saved and saved[name] != now[name]:  # an earlier version may lack the flag
            raise ValueError(
                f"--resume {path} was saved with --{name.replace('_', '-')} {saved[name]}, got "
                f"{now[name]}: give the saved value"
            )
    for name, digest in identity.items():
        if before.get(name, digest) != digest:
            raise ValueError(
                f"--resume {path}: {name} has changed since the run began: restore it, or give "
                "another --out"
            )


def _choose_folder(name: str, settings: Settings) -> Path:
    """Return the given folder, or the next free one in ``runs/``; with "auto", the newest."""
    if settings.out is None:
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
            raise ValueError("--max-restarts needs --out, the folder in which a restart goes on")
        folder = _folder_in_runs(name, settings)
    else:
        folder = Path(settings.out)
        finished = (folder / "summary.json").exists()
        back = Path(settings.resume).resolve().parent == (folder / "checkpoints").resolve()
        if (finished or back) and settings.resume != "auto":
            kind = "a finished run" if finished else "this checkpoint's own run"
            raise ValueError(f"--out {folder} holds {kind}: give --resume auto or another --out")
    if not settings.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _folder_in_runs(name: str, settings: Settings) -> Path:
    ends = (path.name.removeprefix(f"{name}-") for path in Path("runs").glob(f"{name}-*"))
    newest = max((int(end) for end in ends if end.isdecimal()), default=0)
    return Path("runs") / f"{name}-{max(newest, 1) if settings.resume == 'auto' else newest + 1}"
