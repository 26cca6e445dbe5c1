"""Measure the memory, the energy and the FLOPs of one call."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bench.harness.machine import Gpu

# By shapes: PyTorch's counter leaves out the attention kernel that it calls on a CPU.
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CPU_FLOPS = {
    _CPU_ATTENTION: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    _CPU_ATTENTION_BACKWARD: lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4]),
}
ENERGY_SECONDS = 0.5  # long against the tens of milliseconds between two updates of the counter


def kept_for_backward(function: Callable[[], Tensor], parameters: Iterable[Tensor] = ()) -> int:
    """Run a forward; return the bytes that autograd saved, each storage once and whole.

    ``parameters`` do not count, because they exist anyway.
    """
    kept: dict[int, int] = {}
    alive = []  # a freed tensor could pass its address on to another storage

    def pack(saved: Tensor) -> Tensor:
        alive.append(saved)
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        function()
    for parameter in parameters:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def flops(call: Callable[[], Any]) -> int:
    """Return the FLOPs of a call, backward included: of matrix products, convolutions, attention.

    A multiplication and its addition are two. Scores that a mask hides count.
    """
    with FlopCounterMode(display=False, custom_mapping=CPU_FLOPS) as counter:
        call()
    return counter.get_total_flops()


def peak_memory(call: Callable[[], Any]) -> int:
    """Return the peak of GPU bytes that a call allocated in addition to existing ones."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def energy(run_round: Callable[[], Any], calls: int, gpu: Gpu) -> dict[str, float]:
    """Return the energy of one call, idle power included, and the time that it was measured for.

    Rounds follow each other for at least ``ENERGY_SECONDS``, between two movements of NVML's total
    energy counter.

    Args:
        run_round: makes ``calls`` calls on the current stream.
        calls: number of calls of a round.
        gpu: that runs them.

    Returns:
        ``joules`` of a call and ``energy_seconds``; nothing if the counter is missing or stands.
    """
    last = gpu.energy_joules
    if last is None:
        return {}
    first, rounds, began = None, 0, time.perf_counter()
    while time.perf_counter() - began < 4 * ENERGY_SECONDS:
        run_round()
        torch.cuda.synchronize()
        rounds += 1
        reading, now = gpu.energy_joules, time.perf_counter()
        if reading == last:
            continue
        last = reading
        if first is None:
            first, rounds = (reading, now), 0
        elif now - first[1] >= ENERGY_SECONDS:
            joules = (reading - first[0]) / (rounds * calls)
            return {"joules": joules, "energy_seconds": now - first[1]}
    return {}
