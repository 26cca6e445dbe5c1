"""The hooks that intercept calls of attention outside the modules of ``leaner_kernels.nn``.

``KappaMonitor`` sets ``current``, whose ``attend`` is that of ``monitor.trace.CallTrace``, for the
steps that it samples, and only then: in any other step a call costs one comparison with None.
``operators`` is set in the same steps, and read by the operators that replace PyTorch's. Compiled
code does not depend on it.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

current: Any = None
# A ``monitor.operators.OperatorHook``.
operators: Any = None
# The active replacements of PyTorch's operators.
replacements: weakref.WeakSet[Any] = weakref.WeakSet()
_untraced = threading.local()


def is_untraced() -> bool:
    """Return whether this thread's calls are part of a traced call, or inside ``untraced``."""
    return getattr(_untraced, "active", False)


def untraced() -> AbstractContextManager[None]:
    """Make ``KappaMonitor`` ignore the attention calls that this thread makes in the block."""
    # Compiled code runs without a monitor, and could not read thread-local data.
    return nullcontext() if current is None else _overlooked()


@contextmanager
def _overlooked() -> Iterator[None]:
    before, _untraced.active = is_untraced(), True
    try:
        yield
    finally:
        _untraced.active = before
