"""Checkpoints that are whole or not there, written while training goes on.

A checkpoint is a folder ``step-00000100``: the state after 100 optimizer steps. It holds the
tensors as torch.distributed.checkpoint (DCP) writes them, ``state.json``, and ``manifest.json``
with the size and SHA-256 of every file, since DCP keeps no checksums. It is written as
``.step-00000100``, synced to disk and then renamed, so that a run killed at any moment leaves the
earlier ones as they were. The file ``latest`` then names it, for people and for tools; a resume
looks at the checkpoints themselves. All ranks must see the same file system.

No clock decides anything here, and nothing in a checkpoint is run when it is read: see reader.py.
"""

import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from train.checkpoint.reader import (
    Reader,
    TensorPlanner,
    cause,
    checkpoint_name,
    find_damage,
    manifest_of,
    newest_first,
    read_details,
    step_of,
)
from train.loop.parallel import World

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# What a checkpoint is called while the next one of the same step takes its place.
_REPLACED = ".replaced-"


class Checkpoints:
    """The checkpoints of one run; leaving it as a context waits for the one being written.

    Every rank calls every method, in the same order.

    Args:
        folder: where they are; made when the first is saved.
        world: the processes.
        keep: how many of the newest to keep, at least 1.
        say: shows one line to the user.

    Attributes:
        begun_step: step of the checkpoint that this run began to save last, or went on from if it
            is one of the folder's; else None. On every rank.
        saved_step: the same of those that are whole on disk, on rank 0 alone.
    """

    def __init__(self, folder: Path, world: World, *, keep: int, say: Callable[[str], None]):
        self.folder, self.world, self.keep, self.say = folder, world, keep, say
        self.begun_step: int | None = None
        self.saved_step: int | None = None
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_exception: object):
        # Also when training failed: the one on its way is from before that.
        self.wait()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        average: dict[str, Tensor],
        details: dict[str, Any],
    ) -> None:
        """Copy the state now and write it in the background.

        If it cannot be written, say so in one line, remove what was written of it, and go on.

        Args:
            step: optimizer steps done.
            model: sharded by FSDP2.
            optimizer: of its parameters.
            average: the running average of the weights, by name; or empty.
            details: what else to keep, as JSON types.
        """
        self.wait()
        if self.world.rank == 0 and self.saved_step is not None and not os.path.exists(self.folder):
            self.say(f"{self.folder} is gone with its checkpoints; it is made anew")
        partial = self.folder / f".{checkpoint_name(step)}"
        tensors, _ = _state(model, optimizer, average)
        tensors["random"] = {str(self.world.rank): _random_state(self.world.device)}
        written = dcp.async_save(
            tensors, storage_writer=_Writer(partial), process_group=self.world.host_group
        )
        if self.world.rank == 0:
            details = details | {"step": step, "ranks": self.world.size, "torch": torch.__version__}
            written = self._sealer.submit(self._seal, written, partial, step, details)
        self._pending, self.begun_step = written, step

    def wait(self) -> None:
        """Wait until the checkpoint being written is whole, or has failed."""
        if self._pending is not None:
            # A failure to write is on every rank at once, and rank 0 has told the user.
            with suppress(CheckpointException):
                self._pending.result()
            self._pending = None

    def _seal(self, written: Future, partial: Path, step: int, details: dict[str, Any]) -> None:
        try:
            written.result()
            _write_synced(partial / "state.json", details)
            _write_synced(partial / "manifest.json", manifest_of(partial))
            _sync(partial)
            self._put_in_place(partial, self.folder / checkpoint_name(step))
        except (CheckpointException, OSError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            self.say(f"checkpoint of step {step} not saved, training goes on: {cause(error)}")
            return
        self.saved_step = step
        self._point_to(checkpoint_name(step))
        # What cannot be removed now is tried again after the next save.
        with suppress(OSError):
            self._remove_old(step)

    def _put_in_place(self, partial: Path, final: Path) -> None:
        replaced = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            with suppress(OSError):
                replaced.rename(final)
            raise
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _point_to(self, name: str) -> None:
        partial = self.folder / ".latest"
        # The checkpoint is whole, whether or not this much can be written.
        with suppress(OSError):
            partial.write_text(name + "\n")
            partial.replace(self.folder / "latest")

    def _remove_old(self, step: int) -> None:
        whole = 0
        # Newer ones than this were left behind by a resume from an older one: not ours to judge.
        for path in newest_first(self.folder):
            if step_of(path) > step:
                continue
            if whole < self.keep:
                # One that has lost a file is no reason to remove one that has not.
                whole += find_damage(path, contents=False) is None
                continue
            removed = path.with_name(f".removed-{path.name}")
            # A kill while files go must not leave half a checkpoint under its name.
            shutil.rmtree(removed, ignore_errors=True)
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    def find(self, resume: str) -> Path | None:
        """Choose the checkpoint to continue from, reading every byte of it once.

        Args:
            resume: "none", "auto" for the newest that is intact, or the path of one.

        Returns:
            Its path; None to start anew.

        Raises:
            ValueError: the one asked for is damaged; with "auto", there are some and none is
                intact; a rank does not see it.
        """
        chosen: list[Any] = [None, None]
        if self.world.rank == 0:
            try:
                self._clear_leftovers()
                chosen[0] = self._choose(resume)
            except (ValueError, OSError) as error:
                chosen[1] = str(error)
        dist.broadcast_object_list(chosen, src=0, group=self.world.host_group)
        path, error = chosen
        if error is not None:
            raise ValueError(error)
        if path is not None:
            self._check_that_all_see(path)
            if path.parent == self.folder:
                self.begun_step = step_of(path)
                self.saved_step = self.begun_step if self.world.rank == 0 else None
        return path

    def _clear_leftovers(self) -> None:
        """Remove what a kill left half written or half removed."""
        for leftover in self.folder.glob(".*step-*"):
            final = leftover.with_name(leftover.name.removeprefix(_REPLACED))
            if leftover != final and not final.exists():
                # Killed before the new one took its place.
                with suppress(OSError):
                    leftover.rename(final)
            else:
                shutil.rmtree(leftover, ignore_errors=True)

    def _check_that_all_see(self, path: Path) -> None:
        try:
            mine = (path / "manifest.json").read_text(), None
        except OSError as error:
            mine = None, error.strerror
        every: list[Any] = [None] * self.world.size
        dist.all_gather_object(every, mine, group=self.world.host_group)
        for rank, (manifest, error) in enumerate(every):
            if error is not None:
                raise ValueError(f"--resume {path} cannot be read by rank {rank}: {error}")
            if manifest != every[0][0]:
                raise ValueError(f"--resume {path} is not the same on rank {rank} as on rank 0")

    def _choose(self, resume: str) -> Path | None:
        if resume == "none":
            return None
        if resume != "auto":
            path = Path(resume)
            damage = find_damage(path)
            if damage is not None:
                raise ValueError(f"--resume must be auto or an intact checkpoint: {path}: {damage}")
            return path
        damaged = []
        for path in newest_first(self.folder):
            damage = find_damage(path)
            if damage is None:
                return path
            damaged.append(f"{path.name}: {damage}")
            self.say(f"skipped damaged checkpoint {damaged[-1]}")
        if damaged:
            raise ValueError(f"--resume auto: no intact checkpoint in {self.folder}")
        return None

    def load(
        self, path: Path, model: nn.Module, optimizer: Optimizer, average: dict[str, Tensor]
    ) -> None:
        """Put a checkpoint's state into the model, optimizer, average and random generators.

        On another number of ranks than it was saved by, the generators are left as they are.

        Raises:
            ValueError: it was saved from another model.
        """
        details = read_details(path)
        tensors, optimizer_state = _state(model, optimizer, average)
        same_ranks = details["ranks"] == self.world.size
        if same_ranks:
            tensors["random"] = {str(self.world.rank): _random_state(self.world.device)}
        elif self.world.rank == 0:
            self.say(f"resuming on {self.world.size} ranks what {details['ranks']} ranks saved")
        try:
            dcp.load(
                tensors,
                storage_reader=Reader(path),
                planner=TensorPlanner(),
                process_group=self.world.host_group,
            )
        except (CheckpointException, pickle.UnpicklingError) as error:
            raise ValueError(f"--resume cannot load {path}: {cause(error)}") from None
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=optimizer_state,
            options=_FLAT,
        )
        if same_ranks:
            _set_random_state(tensors["random"][str(self.world.rank)])


def _state(
    model: nn.Module, optimizer: Optimizer, average: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every tensor to save, and the optimizer's whole state, which shares its tensors."""
    weights, optimizer_state = get_state_dict(model, optimizer, options=_FLAT)
    # The rest of the optimizer's state follows from the settings, and DCP would pickle it.
    moments = {k: v for k, v in optimizer_state.items() if isinstance(v, Tensor)}
    return {"model": weights, "optimizer": moments, "average": average}, optimizer_state


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this process's global generators as tensors."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    # Python and numpy draw Gaussians in pairs and keep the second: nan here where there is none.
    spare = [math.nan if gauss is None else gauss, cached if has_gauss else math.nan]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "numpy": torch.tensor([*keys.tolist(), position]),
        "spare_gaussians": torch.tensor(spare, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    gauss, cached = state["spare_gaussians"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position = state["numpy"].tolist()
    has_gauss = not math.isnan(cached)
    np.random.set_state(("MT19937", keys, position, int(has_gauss), cached if has_gauss else 0.0))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _write_synced(path: Path, value: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # The base class puts the path in, which is not where the checkpoint ends up.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            # torch.save covers what the disk said with a complaint about file positions.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
