"""What one call costs beside time: kernels, memory, energy."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from bench.harness.machine import Gpu

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


class Kept(NamedTuple):
    """Bytes that a forward keeps for its backward.

    Attributes:
        inputs: of them, memory of the inputs, which what computed them may keep anyway.
        out: of them, memory of the output, which what follows may keep anyway.
        own: the rest: memory that lives for this backward alone.
    """

    inputs: int
    out: int
    own: int


def kept_for_backward(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], parameters: Iterable[Tensor] = ()
) -> Kept:
    """Run a forward and count the memory that autograd saved, each storage once and whole.

    ``parameters`` count as nothing: they are there anyway.
    """
    kept: dict[int, int] = {}
    alive = []  # what is freed could lend its address to another storage

    def pack(saved: Tensor) -> Tensor:
        alive.append(saved)
        kept.update(storages(saved))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        out = function(*inputs)
    for parameter in parameters:
        for address in storages(parameter):
            kept.pop(address, None)
    of_out = storages(out).keys()
    of_inputs = {address for tensor in inputs for address in storages(tensor)}
    parts = {"inputs": 0, "out": 0, "own": 0}
    for address, size in kept.items():
        part = "inputs" if address in of_inputs else "out" if address in of_out else "own"
        parts[part] += size
    return Kept(**parts)


def storages(tensor: Tensor) -> dict[int, int]:
    """Return address and bytes of the memory under a tensor, of a jagged one under its values."""
    storage = (tensor.values() if tensor.is_nested else tensor).untyped_storage()
    return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}


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
