"""Launch a kernel, or repeat an earlier launch of it on other tensors of the same layout."""

from collections.abc import Callable, Hashable
from typing import Any

from . import _tiles
from ._launch_cache import MAX_CACHED, CachedLaunch, Launch, residues

_entries: dict[Hashable, CachedLaunch] = {}


def launch(
    kernel: Any,
    tensors: dict[str, Any],
    numbers: tuple[Any, ...],
    prepare: Callable[[], tuple[tuple[int, ...], dict[str, Any]]],
) -> None:
    """Launch ``kernel``; ask ``prepare`` only where no launch alike came before.

    Args:
        kernel: a function of Triton.
        tensors: its pointers by name, None where it has none; the first is a tensor.
        numbers: all that ``prepare`` goes by, beside the layouts of ``tensors``.
        prepare: returns the grid and the kernel's other arguments; a view replaces its tensor.

    Raises:
        ValueError: if Triton does not compile for the GPU.
    """
    pointers = (*tensors.values(),)
    # A launcher takes an address without asking the driver whose memory it is, as of tensors.
    addresses = [0 if t is None else t.data_ptr() for t in pointers]
    layouts = (None if t is None else (t.shape, t.stride(), t.dtype) for t in pointers)
    device = pointers[0].device  # the first one is there
    key = id(kernel), device.index, numbers, residues(addresses), *layouts
    entry = _entries.get(key)
    if entry is not None:
        entry.run(addresses)
        return
    _tiles.check_capability(device)
    grid, arguments = prepare()
    entry = Launch(kernel, grid, {**tensors, **arguments}).first(tuple(tensors))
    if entry is not None:  # nothing repeats a launch in Triton's interpreter
        if len(_entries) >= MAX_CACHED:
            _entries.clear()
        _entries[key] = entry
