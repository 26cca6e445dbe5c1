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
        """Return what ``leaner_kernels.attention`` returns for the same arguments, (B, H, N, D).

        Or None, where this call is not traced, and the caller is to compute it itself.

        Args:
            owner: the module that calls; None where the caller has no module, and then it is the
                innermost one whose forward is running.
            query: (B, H, N, D), as in ``leaner_kernels.attention``.
            key: as there.
            value: as there.
            params: those after ``value``, as there.
            attends: computes the result in other steps, where that is not ``attention`` of these
                arguments; then it does on the CPU in this one too, and its shape is returned.
            named: ``key_lengths`` (B,) int32 and ``softcap``, as there.
        """
        ...


current: AttentionHook | None = None
# The attribute in which an adapter keeps which calls of a module fall back to others, and why.
FALLBACK = "_attention_fallback"
