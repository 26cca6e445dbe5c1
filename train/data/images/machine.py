"""What one process of a machine finds, and its others read from the same memory."""

import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from torch import distributed as dist

T = TypeVar("T")


def once_per_machine(make: Callable[[], T]) -> T:
    """Return what the first rank of this machine makes. Collective where ranks have been joined.

    NumPy's arrays in it are in a file, already removed, that all ranks of the machine map.

    Args:
        make: called on one rank; what it returns can be pickled.

    Raises:
        ValueError, OSError: ``make`` raised it, on this machine or another.
    """
    if not dist.is_initialized() or int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == 1:
        return make()
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    made: list[Any] = [None] * dist.get_world_size()
    with tempfile.NamedTemporaryFile() as file:
        dist.all_gather_object(made, _kept(make, file) if local == 0 else None)
        for error in made:
            if isinstance(error, Exception):
                raise error
        content, name, sizes = made[rank - local]
        mapped = np.memmap(name, np.uint8, "r") if sum(sizes) else np.empty(0, np.uint8)
        ends = np.cumsum(sizes)
        parts = [mapped[end - size : end] for size, end in zip(sizes, ends)]
        # Until all have opened the file, it keeps its name.
        dist.all_gather_object(made, None)
    return pickle.loads(content, buffers=parts)


def _kept(make: Callable[[], Any], file: Any) -> tuple[bytes, str, list[int]] | Exception:
    """Write the arrays of what is made to a file; return the rest, its name, and their sizes."""
    arrays: list[pickle.PickleBuffer] = []
    try:
        content = pickle.dumps(make(), 5, buffer_callback=arrays.append)
        sizes = [file.write(part.raw()) for part in arrays]
        file.flush()
    except (ValueError, OSError) as error:
        return error
    return content, file.name, sizes
