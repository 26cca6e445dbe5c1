"""Measure how long the host takes to issue attention, beside PyTorch's; no GPU needed.

    python -m bench.host_time              # without a GPU
    python -m bench.host_time --gpu FILE   # on one, real launches; FILE gets JSON

Without a GPU, ours: tensors of the CPU report a GPU as their device, so that the calls go the way
of a GPU, and of Triton all runs but its compiler and its launcher: what is timed is everything up
to it. PyTorch's: ``scaled_dot_product_attention`` on the same tensors on the CPU, whose one head of
8 tokens of 16 numbers leaves next to nothing to compute; on a GPU the same call allocates more and
launches. On a GPU both launch, and a round is timed until the host has issued it.

A forward and backward are eight calls in one graph, whose fixed cost they share. Microseconds a
call, the least of many rounds: other work on the machine only adds.
"""

import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import leaner_kernels
from bench.harness import command
from leaner_kernels.ops import _tiles

CALLS = 8
BATCH, HEADS, TOKENS, DIM = 1, 1, 8, 16
# Of a number that no real one has: what caches keep of it is for no other.
GPU = torch.device("cuda", 99)
PASSES = "forward, no gradient", "forward", "forward and backward"


class HostCase(NamedTuple):
    """A call of ours and PyTorch's, each with the shapes of the tensors that it takes."""

    name: str
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    torch_shapes: Sequence[tuple[int, ...]]


def cases() -> list[HostCase]:
    """Return what is timed."""
    split = [(BATCH, HEADS, TOKENS, DIM)] * 3
    packed = [(BATCH, TOKENS, 3, HEADS, DIM)]
    lengths = torch.full((BATCH,), TOKENS, dtype=torch.int32)
    seen = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    starts = torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32)

    def packed_torch(qkv: Tensor) -> Tensor:
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return sdpa(query, key, value).transpose(1, 2)

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return leaner_kernels.attention_varlen(query, key, value, starts, TOKENS // 2)

    tokens = [(TOKENS, HEADS, DIM)] * 3
    ours, ours_packed = leaner_kernels.attention, leaner_kernels.attention_qkvpacked
    with_lengths = partial(ours, key_lengths=lengths)
    with_mask = partial(sdpa, attn_mask=seen)
    return [
        HostCase("`attention_qkvpacked`", ours_packed, packed_torch, packed, packed),
        HostCase("`attention`", ours, sdpa, split, split),
        HostCase("`attention`, key_lengths", with_lengths, with_mask, split, split),
        HostCase("`attention_varlen`", varlen, sdpa, tokens, split),
    ]


def rounds_of(
    call: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Callable[[], Any]]:
    """Return, for each of ``PASSES``, what makes ``CALLS`` calls."""

    def new(grad: bool) -> list[list[Tensor]]:
        return [
            [torch.randn(s, dtype=torch.bfloat16, requires_grad=grad) for s in shapes]
            for _ in range(CALLS)
        ]

    plain, leaves = new(False), new(True)
    flat = [leaf for each in leaves for leaf in each]
    grads = [torch.randn_like(call(*each)) for each in plain]

    def forward(inputs: list[list[Tensor]]) -> Callable[[], Any]:
        return lambda: [call(*each) for each in inputs]

    def both() -> Any:
        return torch.autograd.grad(forward(leaves)(), flat, grads)

    return dict(zip(PASSES, (forward(plain), forward(leaves), both)))


@contextmanager
def driver(launcher: Callable[[Any], Callable[..., None]], device: int) -> Iterator[None]:
    """Let Triton compile nothing, and launch on a GPU that is not there.

    Args:
        launcher: takes a kernel's source, and returns what runs in the place of the kernel.
        device: the number of the GPU.
    """
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver as triton_driver

    def compile_nothing(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        kernel = CompiledKernel.__new__(CompiledKernel)
        kernel.src, kernel.metadata, kernel.module = source, None, object()
        kernel.name, kernel.hash, kernel.packed_metadata = source.fn.__name__, "", None
        kernel.function = source.hash()
        kernel._run = launcher(source)
        return kernel

    before = getattr(triton_driver, "_active", None)
    target = GPUTarget("cuda", 90, 32)
    properties = {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}
    # What a launch reads before its launcher.
    read = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda _: 0,
        utils=SimpleNamespace(get_device_properties=lambda _: properties),
    )
    triton_driver.set_active(read)
    try:
        # Plain functions: calls of a mock would be timed too.
        with (
            mock.patch.object(triton.compiler, "compile", compile_nothing),
            mock.patch.object(_tiles, "capability", lambda _: 90),  # noqa: PT008
        ):
            yield
    finally:
        triton_driver._active = before


@contextmanager
def gpu() -> Iterator[None]:
    """Let tensors report a GPU as their device, on which nothing runs."""
    with (
        driver(lambda _: lambda *_: None, GPU.index or 0),
        # A build for CPUs has none.
        mock.patch.object(torch._C, "_cuda_getDevice", lambda: GPU.index, create=True),  # noqa: PT008
        mock.patch.object(Tensor, "device", property(lambda _: GPU)),
        mock.patch.object(Tensor, "is_cuda", property(lambda _: True)),
        mock.patch.object(Tensor, "get_device", lambda _: GPU.index),  # noqa: PT008
    ):
        yield


def measure(seconds: float, real: bool = False) -> dict[tuple[str, str], tuple[float, float]]:
    """Return microseconds a call, ours and PyTorch's, by the case's name and the pass.

    Args:
        seconds: how long to measure.
        real: on the GPU that is there, rather than on tensors that only report one.
    """
    torch.set_num_threads(1)
    where = nullcontext if real else gpu
    with torch.device("cuda") if real else nullcontext():
        chosen = cases()
        torchs = {case.name: rounds_of(case.torchs, case.torch_shapes) for case in chosen}
        with where():
            ours = {case.name: rounds_of(case.ours, case.shapes) for case in chosen}
    least: dict[tuple[str, str], tuple[float, float]] = {}
    stop = time.perf_counter() + seconds
    while not least or time.perf_counter() < stop:
        for case in chosen:
            for kind in PASSES:
                theirs = _least(torchs[case.name][kind], real)
                with where():
                    own = _least(ours[case.name][kind], real)
                best = least.get((case.name, kind), (own, theirs))
                least[case.name, kind] = min(own, best[0]), min(theirs, best[1])
    return least


def _least(run: Callable[[], Any], real: bool = False) -> float:
    """Return microseconds a call: rounds are short, so that some are not interrupted."""
    times = []
    for _ in range(10):
        times.append(timeit.timeit(run, number=1))
        if real:  # what is queued would hold the next round up
            torch.cuda.synchronize()
    return 1e6 * min(times[2:]) / CALLS


def table(least: dict[tuple[str, str], tuple[float, float]]) -> str:
    """Return the table of ``measure``'s numbers, in Markdown."""
    from tabulate import tabulate

    lines = [
        (name, kind, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}")
        for (name, kind), (ours, theirs) in least.items()
    ]
    headers = "call", "pass", "ours, µs", "PyTorch's, µs", "ratio"
    return tabulate(lines, headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Run the command."""
    parser = command.parser("bench.host_time", __doc__)
    parser.add_argument(
        "--seconds", type=float, default=30, help="duration of the measurement in seconds (30)"
    )
    parser.add_argument(
        "--gpu", type=Path, metavar="FILE", help="measure on a GPU, and write the results to FILE"
    )
    args = parser.parse_args()
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA GPU, but torch finds none")
    least = measure(args.seconds, args.gpu is not None)
    sys.stdout.write(table(least) + "\n")
    if args.gpu:
        rows = [
            {"call": name, "pass": kind, "ours_us": ours, "pytorch_us": theirs}
            for (name, kind), (ours, theirs) in least.items()
        ]
        command.write(args.gpu, rows, **command.origin())


if __name__ == "__main__":
    main()
