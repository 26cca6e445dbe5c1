"""The hook that intercepts calls of attention outside the modules of ``leaner_kernels.nn``.

``KappaMonitor`` sets ``current`` for the steps that it samples, and only then: in any other step a
call costs one comparison with None.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn


class AttentionHook(Protocol):
    """Computes attention in place of the function that was called, and keeps statistics."""

    def attend(
        self,
        owner: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *params: Any,
        attends: Callable[[], Tensor] | None = None,
        **named: Any,
    ) -> Tensor | None:
        """Return what ``leaner_kernels.attention`` returns for the same arguments.

        Or None, where this call is not traced, and the caller is to compute it itself. ``owner`` is
        the module that calls; with None it is the innermost one whose forward is running.
        ``attends`` computes the result in other steps, where that is not ``attention`` of these
        arguments; then it does on the CPU in this one too, and its shape is returned.
        """
        ...


current: AttentionHook | None = None
# The attribute in which an adapter keeps which calls of a module fall back to others, and why.
FALLBACK = "_attention_fallback"
