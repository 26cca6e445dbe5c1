"""Store tensors in safetensors files: one file per rank, or one for the whole model.

The file of a rank says in its metadata where its parts begin, in the words of
``torch.distributed.checkpoint`` (DCP), whose HuggingFaceStorageReader reads it too. Any number of
ranks can read what any other number wrote. A file is written from the tensors' own memory, one
after another: in one piece it would take as much memory again, and hold the interpreter for
seconds.
"""

import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch import distributed as dist

from leaner_kernels.monitor.run_files import sync

# By their names in safetensors.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Of a tensor: every axis doubles the corners that tiles() counts.
_AXES = 8

# Raised for a file that is no safetensors, or whose entries are not a run's.
_NOT_OURS = (
    *(SafetensorError, OSError, ValueError, LookupError, TypeError),
    *(RuntimeError, ArithmeticError),
)


class Part(NamedTuple):
    """What this process holds of a tensor.

    Attributes:
        local: the part.
        size: size of the whole tensor.
        offsets: where the part begins in it.
        owned: whether this process is the one that writes the part.
    """

    local: Tensor
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    owned: bool


class Piece(NamedTuple):
    """Where a part of a saved tensor is."""

    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Saved(NamedTuple):
    """A tensor of a checkpoint."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]


def part_of(tensor: Tensor, rank: int = 0) -> Part:
    """Return this process's part of a tensor: all of it, unless it is a DTensor.

    Args:
        tensor: sharded, or the same on all ranks.
        rank: rank of this process. Of several that hold the same, the first writes it.
    """
    tensor = tensor.detach()
    size = tuple(tensor.shape)
    if not _is_sharded(tensor):
        return Part(tensor, size, (0,) * len(size), rank == 0)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    places = zip(mesh.get_coordinate(), placements)
    first = all(place == 0 for place, placement in places if not placement.is_shard())
    return Part(tensor.to_local(), size, tuple(offsets), first)


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Of one that is sharded, every rank must call this."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def copy_part(part: Part, whole: Tensor) -> None:
    """Copy the part of a whole tensor that a process holds."""
    ends = map(sum, zip(part.offsets, part.local.shape))
    part.local.copy_(whole[tuple(map(slice, part.offsets, ends))])


def _is_sharded(tensor: Tensor) -> bool:
    # There is no DTensor where nobody imported its module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def in_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return names of tensors in the order of a file: every tensor is aligned to its dtype."""
    return sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))


def pieces_of_file(
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: its header, then the memory of one tensor after another.

    Args:
        layout: dtype and shape of every tensor, by name.
        tensors: their bytes in the same order, on the host: of these dtypes and shapes, or cut in
            another way; each is taken when it is due.
        metadata: text by name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def ordered(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return parts in the order of a file."""
    return {name: parts[name] for name in in_order({n: p.local.dtype for n, p in parts.items()})}


def pieces_of_shard(
    parts: Mapping[str, Part], body: Iterable[Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the file of one rank.

    Args:
        parts: its parts of the state.
        body: a copy of the parts' bytes in the order of ``ordered``, on the host; without one, the
            parts are read, each when it is due.
    """
    parts = ordered(parts)
    layout = {name: (part.local.dtype, part.local.shape) for name, part in parts.items()}
    offsets = {name: {"saved_offsets": part.offsets} for name, part in parts.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    if body is None:
        body = (part.local.cpu() for part in parts.values())
    return pieces_of_file(layout, body, metadata)


def write_synced(file: IO[bytes], pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file to disk; return its size and its SHA-256, computed while writing."""
    digest, size = hashlib.sha256(), 0
    # Hashing takes about as long as writing, and both leave the interpreter to other threads.
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing:
        hashed = None
        for piece in pieces:
            if hashed is not None:
                hashed.result()  # so that no more than two pieces are held
            hashed = hashing.submit(digest.update, piece)
            file.write(piece)
            size += len(piece)
        file.flush()
        sync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def saved_tensors(path: Path) -> dict[str, Saved]:
    """Return the shape, dtype and place of a checkpoint's tensors, by name.

    Raises:
        ValueError: if its files were not written by a run, or cannot be read.
    """
    try:
        return _index(path)
    except _NOT_OURS as error:
        raise ValueError(f"cannot load {path}: {cause(error)}") from None


def load_tensors(
    path: Path, parts: Mapping[str, Part], group: dist.ProcessGroup | None = None
) -> None:
    """Fill this process's parts of tensors from a checkpoint; ignore other tensors in it.

    Args:
        path: path of the checkpoint.
        parts: by name in the checkpoint.
        group: group of the processes that call this together, so that all raise the error of one;
            None if this process reads alone.

    Raises:
        ValueError: if the checkpoint lacks a tensor of that name, shape and dtype, or cannot be
            read.
    """
    errors: list[str | None] = [None]
    try:
        _load(_index(path), parts)
    except _NOT_OURS as error:
        errors[0] = cause(error)
    if group is not None:
        mine, errors = errors[0], [None] * group.size()
        dist.all_gather_object(errors, mine, group=group)
    for error in errors:
        if error is not None:
            raise ValueError(f"cannot load {path}: {error}")


def _index(path: Path) -> dict[str, Saved]:
    tensors: dict[str, Saved] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            info = (opened.metadata() or {}).get("DCP_SHARDING_INFO")
            offsets = None if info is None else json.loads(info)
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), DTYPES[part.get_dtype()]
                begin = [0] * len(shape) if offsets is None else offsets[name]["saved_offsets"]
                if not isinstance(begin, list) or any(type(offset) is not int for offset in begin):
                    raise ValueError(
                        f"the offsets of {short(name)} must be a list of whole numbers, got "
                        f"{short(begin)}"
                    )
                tensor = tensors.setdefault(name, Saved((), dtype, []))
                if tensor.dtype != dtype:
                    raise ValueError(f"the shards of {short(name)} differ in dtype")
                tensor.pieces.append(Piece(file, tuple(begin), shape))
    for name, tensor in tensors.items():
        ends = zip(*(map(sum, zip(piece.offsets, piece.sizes)) for piece in tensor.pieces))
        size = tuple(map(max, ends))
        # Elements that no shard writes would keep the previous contents of the memory.
        if not tiles(size, tensor.pieces):
            raise ValueError(f"the shards of {short(name)} leave a gap or overlap")
        tensors[name] = tensor._replace(size=size)
    return tensors


def tiles(size: Sequence[int], pieces: Iterable[Piece]) -> bool:
    """Return whether pieces cover every element of a tensor once.

    The indicator function of a box is fixed by its corners, counted with alternating signs; those
    of the pieces must add up to those of the tensor.

    Args:
        size: size of the tensor.
        pieces: with offsets and sizes, in any order.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in (
        *((1, piece.offsets, piece.sizes) for piece in pieces),
        (-1, (0,) * len(size), size),
    ):
        if len(offsets) != len(size) or len(sizes) != len(size) or len(size) > _AXES:
            return False
        for ends in product((0, 1), repeat=len(size)):
            corner = tuple(o + n * e for o, n, e in zip(offsets, sizes, ends))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


@torch.no_grad()
def _load(saved: Mapping[str, Saved], parts: Mapping[str, Part]) -> None:
    shared: dict[Path, list[tuple[str, Piece, Part]]] = {}
    for name, part in parts.items():
        if name not in saved:
            raise ValueError(f"the checkpoint has no tensor {short(name)}")
        size, dtype, pieces = saved[name]
        if dtype != part.local.dtype:
            raise ValueError(
                f"{short(name)} must be {part.local.dtype} as in the model, got {dtype}"
            )
        if size != part.size:
            raise ValueError(
                f"{short(name)} must have shape {part.size} as in the model, got {size}"
            )
        for piece in pieces:
            shared.setdefault(piece.file, []).append((name, piece, part))
    for file, reads in shared.items():
        with safe_open(file, framework="pt") as opened:
            for name, piece, part in reads:
                begins = [*map(max, piece.offsets, part.offsets)]
                saved_ends = map(sum, zip(piece.offsets, piece.sizes))
                own_ends = map(sum, zip(part.offsets, part.local.shape))
                ends = [*map(min, saved_ends, own_ends)]
                if all(begin < end for begin, end in zip(begins, ends)):
                    read = opened.get_slice(name)[_within(begins, ends, piece.offsets)]
                    part.local[_within(begins, ends, part.offsets)].copy_(read)


def _within(
    begins: Iterable[int], ends: Iterable[int], offsets: Iterable[int]
) -> tuple[slice, ...]:
    return tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, offsets))


def short(value: Any) -> str:
    """Return a value for a message, in 40 characters at most."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def cause(error: BaseException) -> str:
    """Return the words of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
