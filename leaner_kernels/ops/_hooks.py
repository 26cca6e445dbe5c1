"""The hooks that intercept calls of attention outside the modules of ``leaner_kernels.nn``.

``KappaMonitor`` sets ``current``, whose ``attend`` is that of ``monitor.trace.CallTrace``, for the
steps that it samples, and only then: in any other step a call costs one comparison with None.
``operators`` is set likewise, and asked by the operators of PyTorch that ours replace. Compiled
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
# Replacements of PyTorch's operators that are in force.
replacements: weakref.WeakSet[Any] = weakref.WeakSet()
_untraced = threading.local()


def is_untraced() -> bool:
    """Whether calls in this thread are part of one that is traced as a whole, or not at all."""
    return getattr(_untraced, "active", False)


def untraced() -> AbstractContextManager[None]:
    """Have ``KappaMonitor`` overlook the calls of attention that this thread makes inside."""
    # Compiled code runs without a monitor, and could not read what belongs to a thread.
    return nullcontext() if current is None else _overlooked()


@contextmanager
def _overlooked() -> Iterator[None]:
    before, _untraced.active = is_untraced(), True
    try:
        yield
    finally:
        _untraced.active = before
