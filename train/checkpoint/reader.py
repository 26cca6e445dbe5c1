"""Reading checkpoints that may be damaged, or made to do harm: tensors and JSON, nothing is run.

What a checkpoint is made of is told in save.py.
"""

import hashlib
import json
import pickle
import re
import stat
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

# What DCP's .metadata may name: its own records of tensors and files, sizes and dtypes.
_RECORDS = {
    "torch": {"Size", *(name for name, v in vars(torch).items() if isinstance(v, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}

# What the pickle module raises for bytes that are no pickle.
_NO_PICKLE = (
    *(
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
    ),
    *(TypeError, ValueError, OverflowError),
)


def checkpoint_name(step: int) -> str:
    """Return the name of the folder that holds the state after so many steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return how many steps a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step-"))


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, intact or not."""
    return sorted(folder.glob("step-" + "[0-9]" * 8), reverse=True)


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of every file of a folder, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        }
    }


def find_damage(path: Path, *, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint in a few words, or None when every byte is right.

    Args:
        path: of the checkpoint.
        contents: read all files; otherwise only their sizes are compared.
    """
    try:
        manifest = path / "manifest.json"
        if not stat.S_ISREG(manifest.stat().st_mode):
            return "manifest.json is no file"
        files = json.loads(manifest.read_bytes())["files"]
        if not _is_a_checkpoints(files):
            return "manifest.json is not readable"
        for name, expected in files.items():
            status = (path / name).stat()
            # Opening a pipe would wait for ever.
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is no file"
            if status.st_size != expected["bytes"]:
                return f"{name} has {status.st_size} bytes instead of {expected['bytes']}"
            if contents and _sha256(path / name) != expected["sha256"]:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror or error}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return "manifest.json is not readable"
    return None


def _is_a_checkpoints(files: Any) -> bool:
    """Whether a manifest's files are what a checkpoint has, each in it, with a size and digest."""
    return (
        isinstance(files, dict)
        and {"state.json", ".metadata"} <= files.keys()
        and any(name.endswith(".distcp") for name in files)
        and all(map(_is_plain, files))
        and all(
            isinstance(entry, dict)
            and type(entry.get("bytes")) is int
            and isinstance(entry.get("sha256"), str)
            and re.fullmatch("[0-9a-f]{64}", entry["sha256"])
            for entry in files.values()
        )
    )


def _is_plain(name: Any) -> bool:
    """Whether it is the name of a file that stays in the folder it is looked for in."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# What state.json must hold. Anything else may be absent: an older version did not write it.
_DETAILS = {
    "step": lambda value: type(value) is int and value >= 0,
    "ranks": lambda value: type(value) is int and value >= 1,
    "settings": lambda value: isinstance(value, dict),
}


def read_details(path: Path) -> dict[str, Any]:
    """Return what a checkpoint was saved with beside its tensors: step, settings, ranks, ...

    Raises:
        ValueError: ``state.json`` is not what a run writes.
        OSError: it cannot be read.
    """
    try:
        details = json.loads((path / "state.json").read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path / 'state.json'} is not JSON") from None
    if not isinstance(details, dict):
        raise ValueError(f"{path / 'state.json'} must be an object, got {_short(details)}")
    for name, fits in _DETAILS.items():
        if not fits(details.get(name)):
            raise ValueError(
                f"{path / 'state.json'} must have {name} as a run writes it, "
                f"got {_short(details.get(name))}"
            )
    return details


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def cause(error: BaseException) -> str:
    """Return the first rank's own words, in one line, out of what DCP makes of them."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return " ".join(str(error).split()) or type(error).__name__


class _Unpickler(pickle.Unpickler):
    """Reads the records that DCP keeps about its files, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint's tensors; its metadata may name nothing but DCP's own records.

    DCP itself reads the tensors' files with ``torch.load(weights_only=True)``.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self.folder = path

    @cached_property
    def metadata(self) -> Metadata:
        """The records of all tensors.

        Raises:
            pickle.UnpicklingError: they are something else.
            OSError: they cannot be read.
        """
        with (self.folder / ".metadata").open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except _NO_PICKLE as error:
                raise pickle.UnpicklingError(f".metadata is not readable: {error}") from None
        if not _is_of_tensors(metadata):
            raise pickle.UnpicklingError(".metadata does not list tensors and their files")
        return metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata; DCP's own method would unpickle anything."""
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata


def _is_of_tensors(metadata: Any) -> bool:
    """Whether it is metadata that lists tensors alone, in files beside it."""
    fields = vars(metadata) if type(metadata) is Metadata else {}
    tensors, files = fields.get("state_dict_metadata"), fields.get("storage_data")
    return (
        isinstance(tensors, dict)
        and isinstance(files, dict)
        and all(isinstance(name, str) for name in tensors)
        and all(type(tensor) is TensorStorageMetadata for tensor in tensors.values())
        and all(type(vars(tensor).get("size")) is torch.Size for tensor in tensors.values())
        and all(type(index) is MetadataIndex for index in files)
        and all(type(file) is _StorageInfo for file in files.values())
        and all(_is_plain(vars(file).get("relative_path")) for file in files.values())
    )


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Loads tensors alone."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raise ValueError: what is no tensor would be unpickled."""
        # The base class unpickles these with no limits; every entry of ours is a tensor.
        raise ValueError(f"{read_item.dest_index.fqn} must be a tensor, got pickled bytes")
