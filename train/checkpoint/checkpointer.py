"""Write checkpoints atomically while training continues.

A checkpoint is a folder ``step-00000100``: the state after 100 optimizer steps. It holds the
tensors, one safetensors file per rank (``shards.py``), ``state.json``, and ``manifest.json`` with
the size and SHA-256 of every file. It is written as ``.step-00000100``, synced to disk and then
renamed, so that a kill at any moment leaves the earlier checkpoints unchanged. All ranks must share
a file system. Nothing here depends on a clock. A checkpoint may be damaged or malicious. It holds
only tensors and JSON, which are checked against the manifest and never executed.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.monitor.run_files import is_row, open_own, read_own, sync
from train.checkpoint.shards import (
    Part,
    cause,
    load_tensors,
    ordered,
    part_of,
    pieces_of_shard,
    short,
    write_synced,
)
from train.checkpoint.staging import Staged, Staging
from train.loop.optimizer import ShardAdamW, moments
from train.loop.parallel import DistributedContext


def checkpoint_name(step: int) -> str:
    """Return the name of the folder for the state after this many steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number of steps in the name of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, intact or not."""
    return sorted(folder.glob("step-" + "[0-9]" * 8), reverse=True)


def find_damage(path: Path, *, contents: bool = True) -> str | None:
    """Describe the damage of a checkpoint in a few words; return None if every byte is right.

    Neither the checkpoint nor a file in it may be a link.

    Args:
        path: path of the checkpoint.
        contents: read all files; otherwise only their sizes are compared.
    """
    if path.is_symlink():
        return "is a link, and links in a run folder are not followed"
    try:
        manifest = path / "manifest.json"
        files = json.loads(read_own(manifest))["files"]
        # Open only files that exist here, never a name that the manifest invents.
        names = {file.name for file in path.iterdir()} - {manifest.name}
        if missing := sorted((files.keys() | {"state.json"}) - names):
            return f"{missing[0]}: No such file or directory"
        for name in sorted(names):
            if name not in files:
                # A reader would load every tensor file that it finds.
                if name.endswith((".safetensors", "state.json")):
                    return f"{name} is not in manifest.json"
                continue
            expected, status = files[name], (path / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != expected["bytes"]:
                return f"{name} has {status.st_size} bytes instead of {expected['bytes']}"
            if contents and _sha256(path / name) != expected["sha256"]:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror or error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "manifest.json is not readable"
    return None


def newest_intact(path: Path, flag: str) -> Path:
    """Return the path of a checkpoint, given its own path or that of a run: its newest intact one.

    Every byte of it is read once. An error names the flag that gave the path.

    Raises:
        ValueError: if it is damaged, or there is none.
    """
    damages = []
    # A link that the user gives is followed.
    for candidate in newest_first(path / "checkpoints") or [path.resolve()]:
        damage = find_damage(candidate)
        if damage is None:
            return candidate
        damages.append(f"{candidate}: {damage}")
    raise ValueError(f"{flag} must be an intact checkpoint or a run with one, got {damages[0]}")


def _sha256(path: Path) -> str:
    with open_own(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The keys that state.json must have. Others may be absent: older versions did not write them.
_DETAILS = {
    "step": lambda value: type(value) is int and value >= 0,
    "ranks": lambda value: type(value) is int and value >= 1,
    "settings": lambda value: isinstance(value, dict),
}
_OPTIONAL = {
    "skipped": lambda value: type(value) is int and value >= 0,
    "resumed_at": lambda value: isinstance(value, list) and all(type(s) is int for s in value),
    "bad_samples": lambda value: isinstance(value, list) and all(isinstance(b, str) for b in value),
    "unfinished": lambda value: value is None or is_row(value, ("loss", "throughput")),
}


def read_train_state(path: Path) -> dict[str, Any]:
    """Return the training state that a checkpoint has besides tensors: step, settings, ranks, ...

    Raises:
        ValueError: if ``state.json`` was not written by a run.
        OSError: it cannot be read.
    """
    try:
        train_state = json.loads(read_own(path / "state.json"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path / 'state.json'} is not JSON") from None
    if not isinstance(train_state, dict):
        raise ValueError(f"{path / 'state.json'} must be an object, got {short(train_state)}")
    optional = {name: fits for name, fits in _OPTIONAL.items() if name in train_state}
    for name, fits in (_DETAILS | optional).items():
        if not fits(train_state.get(name)):
            raise ValueError(
                f"{path / 'state.json'} has an invalid {name}, got {short(train_state.get(name))}: "
                "resume from another checkpoint"
            )
    return train_state


# The prefix of a checkpoint while a new one of the same step replaces it.
_REPLACED = ".replaced-"


class Checkpointer:
    """The checkpoints of one run; leaving it as a context waits for the one being written.

    Every rank calls every method, in the same order.

    Args:
        folder: folder of the checkpoints; created by the first save.
        world: the processes.
        keep: how many of the newest to keep, at least 1.
        log: shows one line to the user.

    Attributes:
        begun_step: step of the checkpoint whose save began last, or from which the run resumed if
            it is in the folder; else None. Known on every rank.
        saved_step: the same for checkpoints that are complete on disk; known only on rank 0.
        staging: memory for a copy of the state.
    """

    def __init__(
        self, folder: Path, world: DistributedContext, *, keep: int, log: Callable[[str], None]
    ):
        self.folder, self.world, self.keep, self.log = folder, world, keep, log
        self.begun_step: int | None = None
        self.saved_step: int | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.staging = Staging(world.device, world.local_size, log)

    def __enter__(self):
        return self

    def __exit__(self, *_exception: object):
        self.staging.stop()
        # Wait even if training failed: the checkpoint being written is from before the failure.
        self.wait()

    def prepare(self, model: nn.Module, optimizer: ShardAdamW, average: dict[str, Tensor]) -> None:
        """Allocate memory for a copy of the state in the background, to shorten the first save."""
        parts = self._own(model, optimizer, average)
        self.staging.begin(sum(part.local.nbytes for part in parts.values()))

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: ShardAdamW,
        average: dict[str, Tensor],
        train_state: dict[str, Any],
    ) -> None:
        """Copy the state now and write it in the background; if there is no memory, write it now.

        If writing fails, log it in one line, remove the incomplete checkpoint, and continue.

        Args:
            step: optimizer steps done.
            model: sharded by FSDP2, or not.
            optimizer: of its parameters.
            average: the running average of the weights, by name; or empty.
            train_state: further state to keep, as JSON types.
        """
        self.wait()
        if self.world.rank == 0 and self.saved_step is not None and not os.path.exists(self.folder):
            self.log(f"{self.folder} was deleted with its checkpoints; it is created again")
        train_state = train_state | {
            "step": step,
            "ranks": self.world.size,
            "torch": torch.__version__,
        }
        parts = self._own(model, optimizer, average)
        staged = self.staging.copy([part.local for part in parts.values()])
        if staged is None and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self._pending = self._writer.submit(self._write, step, parts, staged, train_state)
        self.begun_step = step
        if staged is None:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete or has failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _own(
        self, model: nn.Module, optimizer: ShardAdamW, average: dict[str, Tensor]
    ) -> dict[str, Part]:
        """Return the parts that this rank writes, in the order of its file."""
        parts = self._parts(model, optimizer, average) | self._random_parts()
        return ordered({name: part for name, part in parts.items() if part.owned})

    def _parts(
        self, model: nn.Module, optimizer: ShardAdamW, average: dict[str, Tensor]
    ) -> dict[str, Part]:
        """Return this rank's parts of all tensors, by their names in a checkpoint."""
        rank = self.world.rank
        own = {name: part_of(tensor, rank) for name, tensor in model.state_dict().items()}
        parts = {f"model.{name}": part for name, part in own.items()}
        for name, moment in moments(optimizer).items():
            state = f"optimizer.state.{name}"
            parts[f"{state}.step"] = part_of(moment["step"], rank)
            for kind in ("exp_avg", "exp_avg_sq"):
                parts[f"{state}.{kind}"] = own[name]._replace(local=moment[kind])
        for name, tensor in average.items():
            parts[f"average.{name}"] = own[name]._replace(local=part_of(tensor).local)
        return parts

    def _random_parts(self) -> dict[str, Part]:
        """Return the state of this rank's global generators, which no other rank holds."""
        state = _random_state(self.world.device)
        return {f"random.{self.world.rank}.{name}": part_of(t) for name, t in state.items()}

    def _write(
        self,
        step: int,
        parts: dict[str, Part],
        staged: Staged | None,
        train_state: dict[str, Any],
    ) -> None:
        """Write this rank's file; rank 0 publishes the checkpoint when all ranks are done."""
        partial, group = self.folder / f".{checkpoint_name(step)}", self.world.host_group
        name = f"shard-{self.world.rank + 1:05}-model-00001-of-00001.safetensors"
        files: dict[str, Any] = {}
        error = None
        if self.world.rank == 0:
            _remove(partial)
        dist.barrier(group)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            body = None if staged is None else staged.wait()
            files[name] = _write_new(partial / name, pieces_of_shard(parts, body))
        except OSError as failure:
            error = cause(failure)
        written: list[Any] = [None] * self.world.size
        dist.all_gather_object(written, (files, error), group=group)
        if self.world.rank == 0:
            self._seal(partial, step, train_state, written)

    def _seal(
        self, partial: Path, step: int, train_state: dict[str, Any], written: list[Any]
    ) -> None:
        try:
            files: dict[str, Any] = {}
            for of_rank, error in written:
                if error is not None:
                    raise OSError(error)
                files |= of_rank
            files["state.json"] = _write_new(partial / "state.json", _json(train_state))
            _write_new(partial / "manifest.json", _json({"files": files}))
            _sync(partial)
            self._put_in_place(partial, self.folder / checkpoint_name(step))
        except OSError as error:
            _remove(partial)
            self.log(f"checkpoint of step {step} not saved, training goes on: {cause(error)}")
            return
        self.saved_step = step
        # Folders that cannot be removed now are tried again after the next save.
        with suppress(OSError):
            self._remove_old(step)

    def _put_in_place(self, partial: Path, final: Path) -> None:
        replaced = self.folder / f"{_REPLACED}{final.name}"
        _remove(replaced)
        if os.path.lexists(final):
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            with suppress(OSError):
                replaced.rename(final)
            raise
        _sync(self.folder)
        _remove(replaced)

    def _remove_old(self, step: int) -> None:
        whole = 0
        # Newer ones remain from before a resume from an older checkpoint: leave them alone.
        for path in newest_first(self.folder):
            if step_of(path) > step:
                continue
            if whole < self.keep:
                # An incomplete checkpoint must not displace a complete one. Compare only sizes:
                # hashing would read every checkpoint at each save.
                whole += find_damage(path, contents=False) is None
                continue
            removed = path.with_name(f".removed-{path.name}")
            # A kill during the removal must not leave half a checkpoint under its name.
            _remove(removed)
            path.rename(removed)
            _remove(removed)

    def find(self, resume: str) -> Path | None:
        """Choose the checkpoint to continue from, and verify every byte of it.

        Args:
            resume: "none", "auto", or the path of the checkpoint to begin with. If the folder has
                checkpoints, the newest intact one is taken in any case.

        Returns:
            Its path; None to start anew.

        Raises:
            ValueError: if the given checkpoint is damaged, if all in the folder are damaged, or if
                a rank does not see it.
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
        """Remove checkpoints that a kill left half written or half removed."""
        for leftover in self.folder.glob(".*step-*"):
            final = leftover.with_name(leftover.name.removeprefix(_REPLACED))
            lost = leftover != final and not os.path.lexists(final)
            if lost and leftover.is_dir() and not leftover.is_symlink():
                # The run was killed before the new one replaced it.
                with suppress(OSError):
                    leftover.rename(final)
            else:
                _remove(leftover)

    def _check_that_all_see(self, path: Path) -> None:
        try:
            mine = read_own(path / "manifest.json"), None
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
        own = newest_first(self.folder)
        if not own and resume not in ("none", "auto"):
            path = Path(resume)
            damage = find_damage(path.resolve())  # a link that the user names is followed
            if damage is not None:
                raise ValueError(f"--resume must be auto or an intact checkpoint: {path}: {damage}")
            return path
        damaged = []
        for path in own:
            damage = find_damage(path)
            if damage is None:
                return path
            damaged.append(f"{path.name}: {damage}")
            self.log(f"skipped damaged checkpoint {damaged[-1]}")
        if damaged:
            raise ValueError(
                f"no intact checkpoint in {self.folder}: give another --out, or delete the folder"
            )
        return None

    def load(
        self, path: Path, model: nn.Module, optimizer: ShardAdamW, average: dict[str, Tensor]
    ) -> None:
        """Put a checkpoint's state into the model, optimizer, average and random generators.

        If the number of ranks has changed, the generators are left unchanged.

        Raises:
            ValueError: if it was saved from another model, or was not written by a run.
        """
        train_state = read_train_state(path)
        parts = self._parts(model, optimizer, average)
        random_parts: dict[str, Part] = {}
        if train_state["ranks"] == self.world.size:
            random_parts = self._random_parts()
        elif self.world.rank == 0:
            saved = train_state["ranks"]
            self.log(f"resuming on {self.world.size} ranks from a checkpoint of {saved} ranks")
        load_tensors(path, parts | random_parts, self.world.host_group)
        if random_parts:
            _set_random_state(
                {name.rpartition(".")[2]: part.local for name, part in random_parts.items()}
            )


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of PyTorch's global generators in this process."""
    state = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _remove(path: Path) -> None:
    """Remove a folder and its contents, or only a link; ignore what cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        with suppress(OSError):
            path.unlink()


def _write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    with open_own(path, "xb") as file:
        return write_synced(file, pieces)


def _json(value: dict[str, Any]) -> list[bytes]:
    return [json.dumps(value, indent=1).encode()]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
