"""Selective activation checkpointing: recompute everything for the backward but attention."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ._ops import ops
from .ops.route import OPERATORS

_aten = torch.ops.aten

MUST_SAVE: tuple[Any, ...] = (
    *(getattr(ops, name + suffix).default for name in OPERATORS for suffix in ("", "_with_stats")),
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
)
"""Forwards of the attention operators of this library, and PyTorch's fused ones.

Add them to an existing list of operators to save, such as that of a training framework.
"""


def checkpoint_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of operators in ``MUST_SAVE``, and recompute those of all others.

    Pass it to ``torch.utils.checkpoint.create_selective_checkpoint_contexts``::

        contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    An attention operator then runs once per step, at the cost of storing its output and one float32
    number per row and head, and ``KappaMonitor`` reports the same rows as without checkpointing.
    The policy works under ``torch.compile`` too. Compiled code without checkpointing never
    recomputes these operators, because PyTorch on its own recomputes only cheap built-in operators.
    """
    save = operator in _SAVED
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


_SAVED = frozenset(MUST_SAVE)
