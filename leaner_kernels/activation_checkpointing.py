"""Selective activation checkpointing: recompute everything for the backward but attention."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ._ops import ops
from .ops.transforms import DECLARATIONS

_aten = torch.ops.aten

MUST_SAVE: tuple[Any, ...] = (
    *(
        getattr(ops, name + suffix).default
        for name in DECLARATIONS
        for suffix in ("", "_with_stats")
    ),
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
)
"""Forwards of the attention operators, those of this library and PyTorch's fused ones.

For lists of operators to save that exist already, such as a training framework's.
"""


def checkpoint_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what ``MUST_SAVE`` returns, recompute what other operators return.

    For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, which calls it::

        contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    An attention operator then runs once in a step, at the cost of its output and of one float32
    number a row and head, and ``KappaMonitor`` has the same rows as without checkpointing. It works
    under ``torch.compile`` too; code compiled without checkpointing never recomputes these
    operators, since PyTorch recomputes by itself only cheap ones of its own.
    """
    save = operator in _SAVED
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


_SAVED = frozenset(MUST_SAVE)
