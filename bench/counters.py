"""What one call costs beside time: kernels, memory, energy."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.machine import Gpu

ENERGY_SECONDS = 0.5  # long against the tens of milliseconds between two updates of the counter
LONGEST_NAME = 100


def kernel_names(call: Callable[[], Any], device_type: str) -> list[str]:
    """Return the distinct kernels that one call runs, in order; on the CPU attention operators."""
    on_gpu = device_type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, acc_events=True) as profiled:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    names = [event.name for event in profiled.events() if event.device_type == wanted]
    if not on_gpu:
        names = [name for name in names if "attention" in name]
    return list(dict.fromkeys(name[:LONGEST_NAME] for name in names))


def peak_memory(call: Callable[[], Any]) -> int:
    """Return the most bytes of the GPU that one call held beside what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def joules_per_call(run_round: Callable[[], Any], calls: int, gpu: Gpu) -> float | None:
    """Return the energy of one call, idle power included, over half a second; None without NVML."""
    start, began, rounds = gpu.energy_joules, time.perf_counter(), 0
    if start is None:
        return None
    while time.perf_counter() - began < ENERGY_SECONDS:
        run_round()
        torch.cuda.synchronize()
        rounds += 1
    return (gpu.energy_joules - start) / (rounds * calls)
