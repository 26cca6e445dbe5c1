"""A GPU that is not there: of Triton everything runs but its compiler and its launcher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from leaner_kernels.ops import _tiles

# Of a number that no real one has: what caches keep of it is for no other.
GPU = torch.device("cuda", 99)


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
