"""Our kernels behind ``torch.nn.functional.scaled_dot_product_attention``, for a whole process.

PyTorch has a registry of attention kernels from other libraries. Importing ``leaner_kernels`` adds
the name "leaner" to it, and changes nothing else. To use our kernels, activate them:

    import leaner_kernels
    torch.nn.attention.activate_flash_attention_impl("leaner")

From then on they compute the calls of ``scaled_dot_product_attention`` on CUDA in any model, eager
or compiled, without a change to the model. ``torch.nn.attention.restore_flash_attention_impl()``
undoes this, also in graphs that were compiled in between, and ``use_sdpa`` does both.

What stays as it is:

- PyTorch chooses among its backends (flash, cuDNN, memory-efficient, math) as before, and
  ``sdpa_kernel`` and the enable flags apply. Whichever of the fused ones it chooses, our kernels
  compute the calls on which they are the faster by the rules of ``leaner_kernels.explain``.
- Every other call goes to the kernel that PyTorch chose, with the same arguments. Among these are
  long sequences, float32, head dimensions above 128 and scales that are not positive. A causal mask
  is ours only if there are as many keys as queries.
- Autograd, autocast, ``torch.func``, activation checkpointing and FLOP counts are PyTorch's.

Limits:

- Activate and restore while no other thread computes attention.
- Run a backward before ``restore_flash_attention_impl``, or inside ``use_sdpa``. PyTorch's kernels
  cannot repeat the dropout of ours, and cuDNN's may read the log-sum-exp in another order. A
  warning says if calls still wait for their backward. Our kernels cannot repeat PyTorch's dropout
  either: run such a backward before you activate.
- AOTInductor and ``torch.compile(options={"cpp_wrapper": True})`` call PyTorch's kernels
  directly. They bypass every kernel of this registry.
- ROCm is not supported.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from ..ops import _hooks
from ..ops.attention.sdpa import passing

NAME = "leaner"
_lock = threading.Lock()
_users = 0  # open blocks of use_sdpa, in all threads
_before: str | None = None  # the implementation that was active when the first block began


@contextmanager
def use_sdpa() -> Iterator[None]:
    """Compute ``scaled_dot_product_attention`` on CUDA by our kernels inside a ``with`` block.

    The effect is that of ``torch.nn.attention.activate_flash_attention_impl("leaner")``, for all
    threads. At the end of the outermost block, in any thread, the implementation that was active
    before is active again.

    Raises:
        RuntimeError: PyTorch was built for ROCm.
    """
    global _users, _before
    _refuse_rocm()  # before PyTorch restores the active implementation
    with _lock:
        if _users == 0:
            _before = current_flash_attention_impl()
            if _before != NAME:
                _activate(NAME)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _before != current_flash_attention_impl():
                _activate(_before)


def _activate(name: str | None) -> None:
    """Activate an implementation; None restores PyTorch's own."""
    if name is not None:
        activate_flash_attention_impl(name)
    elif current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def _refuse_rocm() -> None:
    if torch.version.hip is not None:
        raise RuntimeError("leaner_kernels does not support ROCm: PyTorch's kernels remain")


class Handle:
    """The replacement of PyTorch's operators, until ``remove`` is called.

    Args:
        dispatch_key: of the kernels to replace; tests use "CPU".
    """

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        _refuse_rocm()
        # Not at the top, so that importing the package costs nothing.
        from ..ops.attention import aten
        from .sdpa_operators import OPERATORS

        aten.forget()
        self._unfinished, self._lock = aten.unfinished, threading.Lock()
        self._library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, compute in OPERATORS.items():
                name = f"aten::{name}"
                # A build without CUDA has no kernel that could be called.
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key):
                    below = torch.library.get_kernel(name, dispatch_key)
                    options = {"with_keyset": True, "allow_override": True}
                    self._library.impl(name, _over(below, compute), dispatch_key, **options)
        _hooks.replacements.add(self)

    def remove(self) -> None:
        """Let PyTorch's kernels compute again. A second call does nothing."""
        with self._lock:
            library, self._library = self._library, None
            if library is None:
                return
            if count := self._unfinished():
                warnings.warn(
                    f"attention calls without a backward pass: {count}. Run the backward before "
                    "PyTorch's kernels are restored, or its gradients may be wrong",
                    stacklevel=4,
                )
            _hooks.replacements.discard(self)
            library._destroy()


def _over(below: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that computes the calls that are ours, and forwards all others."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        results = None if passing.on else compute(*args, **kwargs)
        return below.call_boxed(keyset, *args, **kwargs) if results is None else results

    return kernel


def register() -> None:
    """Add "leaner" to PyTorch's registry. Nothing is replaced until it is activated."""
    register_flash_attention_impl(NAME, register_fn=Handle)
