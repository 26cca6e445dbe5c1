"""Measure the time, memory and energy of a run, and its fraction of the device's peak."""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from train.loop.parallel import DistributedContext

# Dense bfloat16 matrix products per second on the data sheet, by a part of the device's name; the
# first that fits. Two operations per multiply-add, as MFU counts them.
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "L40S": 362e12,
    "A100": 312e12,
    "A6000": 155e12,
    "RTX 4090": 165e12,
}

# Largest and smallest number of steps over which the share of waiting is computed.
_NEWEST, _LEAST = 50, 10


class Meter:
    """Measure the time of steps, and of waiting for data in them.

    A step covers its data, computation and kappa, not evaluations or copies of checkpoints. The
    first step after the start is left out, because it compiles and fills caches.

    Args:
        world: the processes.
        flops_per_item: matrix-product FLOPs of one item's forward and backward.
        bf16: whether they run in bfloat16.

    Attributes:
        waiting: share of the time of the newest steps that this rank waited for data; 0 in the
            first few.
    """

    def __init__(self, world: DistributedContext, *, flops_per_item: int, bf16: bool):
        self.world, self.flops_per_item = world, flops_per_item
        self.peak = _peak(world.device) if bf16 else None
        self._energy = _energy_reader(world.device)
        self._energy_before = self._energy()
        self._started = time.perf_counter()
        self._steps = self._items = 0
        self._seconds = self._waited = 0.0
        self._newest: deque[tuple[float, float]] = deque(maxlen=_NEWEST)
        self.waiting = 0.0

    @contextmanager
    def step(self, items: int) -> Iterator[dict[str, float]]:
        """Time one step of ``items`` items over all ranks.

        Yields:
            A dictionary: the step adds to "data_wait" (seconds), and afterwards it has the
            "throughput" (items per second).
        """
        timing = {"throughput": 0.0, "data_wait": 0.0}
        began = time.perf_counter()
        yield timing
        seconds = time.perf_counter() - began
        timing["throughput"] = items / seconds
        if self._steps:
            self._items += items
            self._seconds += seconds
            self._waited += timing["data_wait"]
            self._newest.append((seconds, timing["data_wait"]))
            if len(self._newest) >= _LEAST:
                all_seconds, waited = map(sum, zip(*self._newest))
                self.waiting = waited / all_seconds
        self._steps += 1

    def totals(self) -> dict[str, Any]:
        """Return the totals over all ranks, None if unknown. Collective."""
        used, kind = _peak_memory(self.world.device)
        energy = self._energy()
        joules = float("nan") if energy is None else energy - self._energy_before
        sums = torch.tensor([joules, self._waited, self._seconds], dtype=torch.float64)
        most = torch.tensor([used], dtype=torch.int64)
        dist.all_reduce(sums, group=self.world.host_group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.world.host_group)
        joules, waited, seconds = sums.tolist()
        throughput = self._items / self._seconds if self._seconds else None
        has_mfu = throughput is not None and self.peak is not None
        return {
            "seconds": time.perf_counter() - self._started,
            "throughput": throughput,
            "mfu": throughput * self.flops_per_item / (self.peak * self.world.size)
            if has_mfu
            else None,
            "peak_memory_bytes": int(most.item()),
            "peak_memory_kind": kind,
            "energy_joules": None if joules != joules else joules,
            "data_wait_share": waited / seconds if seconds else None,
        }


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), None)


def _peak_memory(device: torch.device) -> tuple[int, str]:
    """Return the peak memory of this process in bytes, and the kind of memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated on the GPU"
    # Kilobytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident in one process"


def _energy_reader(device: torch.device) -> Callable[[], float | None]:
    """Return a function that reads the device's energy counter in joules, or None without one."""
    if device.type != "cuda":
        return lambda: None
    try:
        import pynvml
    except ImportError:
        return lambda: None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return lambda: None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
