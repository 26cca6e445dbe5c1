"""Which modules of ours capture, and for whom: several monitors may sample one module at a time."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

# Of each module that captures, how many samples each monitor wants.
_WANTED: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()


def can_capture(module: nn.Module) -> bool:
    """Whether a module is one of ours, as an adapter's is until ``undo``."""
    return "capture_samples" in vars(module)


class Arms:
    """The captures of one monitor.

    Args:
        modules: those of ``leaner_kernels.nn`` in a model.
        samples: batch entries that each captures; where several monitors want some, the most.
    """

    def __init__(self, modules: Iterable[Any], samples: int) -> None:
        self.modules, self.samples = list(modules), samples

    def arm(self) -> None:
        """Capture from now on; what was captured for this monitor alone is forgotten."""
        for module in filter(can_capture, self.modules):
            wanted = _WANTED.setdefault(module, {})
            if wanted.keys() <= {id(self)}:
                module.captured = None
            wanted[id(self)] = self.samples
            module.capture_samples = max(wanted.values())

    def disarm(self) -> None:
        """Capture no more, unless for others, and let go of what was captured; harmless twice."""
        for module in self.modules:
            wanted = _WANTED.get(module, {})
            if wanted.pop(id(self), None) is None or not can_capture(module):
                continue
            module.capture_samples = max(wanted.values(), default=0)
            if not wanted:
                module.captured = None
