"""Copy a state to the host, so that training continues while the copy is written.

The first use of new memory takes much longer than a copy, because the system clears every page. So
a thread allocates the memory after the first step of a run, in segments with pauses between. A save
that comes before the end of this stops the thread, and allocates the rest itself.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes. PyTorch rounds pinned memory up to a power of two.
SEGMENT = 16 * 2**20
_PIECE = 4 * 2**20
_PAGE = 4096
# Pauses of the thread, in multiples of its working time: when a CPU trains, no core is idle.
_REST, _REST_BESIDE_GPU = 9, 3
_THREAD = "checkpoint memory"


class Staged(NamedTuple):
    """A copy on the host.

    Attributes:
        body: uint8, the bytes of all tensors, one after another.
        device: where the tensors are.
        event: of CUDA, after the copies; None on a CPU, where they are done.
    """

    body: Sequence[Tensor]
    device: torch.device
    event: torch.Event | torch.cuda.Event | None = None

    def wait(self) -> Sequence[Tensor]:
        """Return the bytes once all of them are there, in any thread."""
        if self.event is not None:
            with _on(self.device):
                self.event.synchronize()
        return self.body


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current in this thread: a new thread would create a context on the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Staging:
    """Memory on the host for a copy of a state, kept from one save to the next.

    Args:
        device: where the state is. The copy of a GPU's state is in pinned memory.
        local_size: processes on this machine; each takes as much memory.
        log: shows one line to the user.
    """

    def __init__(self, device: torch.device, local_size: int, log: Callable[[str], None]):
        self._device, self._local_size, self._log = device, local_size, log
        self._pinned = device.type == "cuda"
        self._segments: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._has_warned = False

    def begin(self, size: int) -> None:
        """Start to allocate memory for this many bytes in a thread, if there is enough."""
        if self._thread is None and self._fits(size * self._local_size):
            self._thread = threading.Thread(target=self._run, args=(size,), name=_THREAD)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self.join()

    def join(self) -> None:
        """Wait until the thread has allocated all of the memory."""
        if self._thread is not None:
            self._thread.join()

    def copy(self, tensors: Sequence[Tensor]) -> Staged | None:
        """Copy tensors one after another, without gaps; None if there is no memory for it.

        Copies from a GPU are only enqueued, on the current stream, so that they precede the next
        changes by training.

        Args:
            tensors: in descending order of the bytes of an element, so that each is aligned.
        """
        self.stop()
        size = sum(tensor.nbytes for tensor in tensors)
        if not self._fits(self._missing(size) * self._local_size):
            return None
        while self._missing(size):
            if not self._add_segment(size):
                return None
        segments = iter(self._segments)
        free = torch.empty(0, dtype=torch.uint8)
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            while flat.numel():
                if not free.numel():
                    free = next(segments)
                count = min(flat.numel(), free.numel() // flat.itemsize)
                end = count * flat.itemsize
                free[:end].view(flat.dtype).copy_(flat[:count], non_blocking=True)
                free, flat = free[end:], flat[count:]
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
        return Staged([*self._first(size)], self._device, event)

    def _first(self, size: int) -> Iterator[Tensor]:
        """Yield the first bytes of the memory."""
        for segment in self._segments:
            if size <= 0:
                return
            yield segment[:size]
            size -= segment.numel()

    def _missing(self, size: int) -> int:
        return max(0, size - sum(segment.numel() for segment in self._segments))

    def _run(self, size: int) -> None:
        with _on(self._device):
            self._take_slowly(size)

    def _take_slowly(self, size: int) -> None:
        """Allocate the memory and write to every page, until the thread is told to end."""
        rest = _REST_BESIDE_GPU if self._device.type == "cuda" else _REST
        began = time.perf_counter()
        while self._missing(size) and self._add_segment(size):
            for piece in self._segments[-1].split(_PIECE):
                if not self._pinned:
                    piece[::_PAGE].zero_()  # one thread, without the interpreter
                if self._stopping.wait(rest * (time.perf_counter() - began)):
                    return
                began = time.perf_counter()

    def _add_segment(self, size: int) -> bool:
        """Allocate a segment; return whether there was memory for it."""
        # Use whole pages, so that no element of any dtype crosses the end of a segment.
        pages = -(-min(SEGMENT, self._missing(size)) // _PAGE)
        try:
            segment = torch.empty(pages * _PAGE, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            words = " ".join(str(error).split())
            if not self._pinned:
                self._warn(f"the host has no memory for a copy of the state ({words}): {_WAITS}")
                return False
            self._pinned = False
            self._log(f"no pinned memory, so that checkpoints pause training longer: {words}")
            return self._add_segment(size)
        self._segments.append(segment)
        return True

    def _fits(self, size: int) -> bool:
        available = available_memory()
        if not size or available is None or size <= available:
            return True
        self._warn(
            f"a copy of the state takes {size / 1e9:.1f} GB of this machine's memory, and "
            f"{available / 1e9:.1f} GB are available: {_WAITS}"
        )
        return False

    def _warn(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._log(line)


_WAITS = "training waits while a checkpoint is written"


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate, or None if unknown."""
    try:
        system = Path("/proc/meminfo").read_text()
        groups = Path("/proc/self/cgroup").read_text()
        fields = dict(line.split(":", 1) for line in system.splitlines())
        available = [1024 * int(fields["MemAvailable"].split()[0])]
    except (OSError, LookupError, ValueError):
        return None
    root = Path("/sys/fs/cgroup")
    for line in groups.splitlines():
        number, _, name = line.split(":", 2)
        if number != "0":  # version 1
            continue
        group = root / name.lstrip("/")
        # Each enclosing control group has a limit of its own.
        folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
        available += [free for free in map(_free_of_group, folders) if free is not None]
    return min(available)


def _free_of_group(folder: Path) -> int | None:
    """Return the bytes that a control group may still allocate, or None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The system drops cached files when memory is short.
        files = int(stat["inactive_file"]) + int(stat["active_file"])
        return None if limit == "max" else int(limit) - used + files
    except (OSError, LookupError, ValueError):
        return None
