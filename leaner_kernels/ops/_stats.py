"""What an attention operator tells about itself beside its output, and of which entries."""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionStats(NamedTuple):
    """What ``attention_with_stats`` returns; all but ``out`` is float32 and non-differentiable.

    The shapes below are those of ``attention``; the other operators say where theirs differ. From
    ``attention_varlen_with_stats``, with T tokens in S' sequences: out is (T, H, D), lse (H, T),
    the statistics (S', H) and heads (S, max_seqlen, H * D), zero past a sequence's end. An empty
    sequence has a max_logit of -inf and zeros.

    Attributes:
        out: (B, H, N, D), in the dtype of the query.
        lse: (B, H, N), log-sum-exp of each row of scores, in nats; -inf where a row sees no key.
        max_logit: (B, H), the largest visible score, scaled and with an additive mask included.
        entropy: (B, H), mean over rows of the entropy of P before dropout, in nats.
        prob_norm: (B, H), Frobenius norm of P before dropout.
        head_norm: (B, H), Frobenius norm of the head's output.
        heads: (S, N, H * D), the outputs of all heads side by side for the S sampled batch entries,
            as accurate as float32 products allow; None when nothing was sampled.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor
    prob_norm: Tensor
    head_norm: Tensor
    heads: Tensor | None


def evenly_spaced(batch: int, samples: int, device: torch.device) -> Tensor:
    """Return (min(samples, batch),) int32: batch entries spread over the batch."""
    samples = min(samples, batch)
    ends = torch.arange(0, samples * batch, batch, dtype=torch.int32, device=device)
    return ends // samples
