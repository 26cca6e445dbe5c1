"""The hook that intercepts calls of attention outside the modules of ``leaner_kernels.nn``.

``KappaMonitor`` sets ``current`` for the steps that it samples, and only then: in any other step a
call costs one comparison with None.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn


class AttentionHook(Protocol):
    """Computes attention in place of the function that was called, and keeps statistics."""

    def attend(
        self,
        owner: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        key_lengths: Tensor | None = None,
        softcap: float = 0.0,
        attends: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Return what ``leaner_kernels.attention`` returns for the same arguments, (B, H, N, D).

        Or None, where this call is not traced, and the caller is to compute it itself.

        Args:
            owner: the module that calls; None where the caller has no module, and then it is the
                innermost one whose forward is running.
            query: this and all others as in ``leaner_kernels.attention``.
            key: as there.
            value: as there.
            attn_mask: as there.
            dropout_p: as there.
            is_causal: as there.
            scale: as there.
            enable_gqa: as there.
            key_lengths: as there.
            softcap: as there.
            attends: computes the result in other steps, where that is not ``attention`` of these
                arguments; then it does on the CPU in this one too, and its shape is returned.
        """
        ...


current: AttentionHook | None = None
# The attribute in which an adapter keeps which calls of a module fall back to others, and why.
FALLBACK = "_attention_fallback"
