"""Gluon, Triton's language of layouts, under one set of names; 3.6 and 3.9 differ in three.

``AVAILABLE`` is false if Triton has no Gluon, and in Triton's interpreter, which does not support
it: calls then use the kernels written in Triton. ``KEEPS_FENCES`` tells whether the operands that a
thread computes stay ahead of the fence of their wgmma: Triton 3.6 may sink them past it.
"""

from typing import Any

AVAILABLE = KEEPS_FENCES = True
try:
    from triton import knobs
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    AVAILABLE = KEEPS_FENCES = False
else:
    AVAILABLE = not knobs.runtime.interpret
    copy_async: Any = getattr(async_copy, "async_load", None)
    copy_async = copy_async or async_copy.async_copy_global_to_shared
    commit_copies, wait_copies = async_copy.commit_group, async_copy.wait_group
    load_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    store_tile: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier")  # noqa: B009
    # Public since 3.9; 3.6 has a private method.
    KEEPS_FENCES = hasattr(gl.shared_memory_descriptor, "reinterpret")
    _PUBLIC = gl.constexpr(KEEPS_FENCES)

    @gluon.jit
    def reinterpret(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Return a view of shared memory with another shape and layout."""
        if _PUBLIC:
            view = buffer.reinterpret(buffer.dtype, SHAPE, LAYOUT)
        else:
            view = buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)
        return view


__all__ = [
    "AVAILABLE",
    "KEEPS_FENCES",
    "TensorDescriptor",
    "barrier",
    "commit_copies",
    "copy_async",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "mma",
    "reinterpret",
    "store_tile",
    "tma",
    "wait_copies",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
