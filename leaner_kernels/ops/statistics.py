"""Per-head statistics of attention, in one table for all code that computes or reads them.

Operators fill a float32 buffer (len(STATISTICS), B, H) in the order of ``STATISTICS``, which also
is the order of the fields of ``AttentionStats``. The table defines how the monitor reduces each
statistic over batch entries, ranks and heads, and the columns of its rows, charts and tables.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


class AttentionStats(NamedTuple):
    """Results of ``attention_with_stats``; all but ``out`` are float32 and not differentiable.

    The shapes below are those of ``attention``; the other operators document differences. From
    ``attention_varlen_with_stats``, with T tokens in S' sequences, out is (T, H, D), lse (H, T),
    the statistics are (S', H) and heads (S, max_seqlen, H * D), zero past the end of a sequence. An
    empty sequence has a max_logit of -inf, and zeros for the others.

    Attributes:
        out: (B, H, N, D), in the dtype of the query.
        lse: (B, H, N), log-sum-exp of each row of scores, in nats; -inf without a visible key.
        max_logit: (B, H), the largest visible score, scaled and with an additive mask included.
        entropy: (B, H), mean over rows of the entropy of P before dropout, in nats.
        prob_norm: (B, H), Frobenius norm of P before dropout.
        head_norm: (B, H), Frobenius norm of the head's output.
        mean_row_max: (B, H), mean over rows of the largest visible score. Unlike max_logit it is
            robust to outliers; a row without a visible key counts as 0.
        heads: (S, N, H * D), the outputs of all heads side by side for the S sampled batch entries,
            with the accuracy of float32 products; None without ``sample``.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor
    prob_norm: Tensor
    head_norm: Tensor
    mean_row_max: Tensor
    heads: Tensor | None


class Statistic(NamedTuple):
    """A statistic of one batch entry and head, float32 (B, H).

    Attributes:
        name: field of ``AttentionStats``.
        unit: empty for a number without one.
        over_rows: reduction over blocks of rows of P; the norm of several is that of their norms.
        over_samples: reduction over batch entries. A maximum also spans all forwards of a step;
            otherwise the newest forward counts.
        over_ranks: reduction over the ranks that measured a layer.
    """

    name: str
    unit: str
    over_rows: Literal["mean", "max", "norm"]
    over_samples: Literal["mean", "max"]
    over_ranks: Literal["mean", "max"]


class Column(NamedTuple):
    """A column of ``KappaMonitor``'s rows: a statistic, reduced over the heads of a layer.

    Attributes:
        name: key of the row.
        statistic: name of the statistic.
        over_heads: the reduction; "each" keeps a list with one number per head.
        doc: meaning, as in the table of docs/kappa.md.
        written: whether TensorBoard and W&B get it.
        title: title of its chart on a page; without one it is neither drawn nor printed.
        caption: caption of that chart.
    """

    name: str
    statistic: str
    over_heads: Literal["mean", "min", "max", "each"]
    doc: str
    written: bool = False
    title: str = ""
    caption: str = ""


STATISTICS = (
    Statistic("max_logit", "logit", over_rows="max", over_samples="max", over_ranks="max"),
    Statistic("entropy", "nats", over_rows="mean", over_samples="mean", over_ranks="mean"),
    Statistic("prob_norm", "", over_rows="norm", over_samples="mean", over_ranks="mean"),
    Statistic("head_norm", "", over_rows="norm", over_samples="mean", over_ranks="mean"),
    Statistic("mean_row_max", "logit", over_rows="mean", over_samples="mean", over_ranks="mean"),
)
UNITS = {statistic.name: statistic.unit for statistic in STATISTICS}
COLUMNS = (
    Column(
        "entropy",
        "entropy",
        "mean",
        "entropy of the attention in nats, mean over heads",
        written=True,
        title="Entropy of attention",
    ),
    Column("entropy_min", "entropy", "min", "smallest entropy of a head", written=True),
    Column(
        "max_logit",
        "max_logit",
        "max",
        "the largest score",
        written=True,
        title="Largest attention score (logit)",
        caption="The score before the softmax; steady growth is a sign of unstable training",
    ),
    Column(
        "mean_row_max",
        "mean_row_max",
        "mean",
        "mean over rows of the largest score, mean over heads",
    ),
    Column("prob_norm", "prob_norm", "mean", "‖P‖_F, mean over heads"),
    Column("head_norm", "head_norm", "mean", "‖A_i‖_F, mean over heads", written=True),
    Column("head_norms", "head_norm", "each", "‖A_i‖_F of each head"),
)


def newest_statistics(
    stats: AttentionStats, before: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return the statistics of a forward, combined with those of forwards ``before`` in its step.

    They are (B, H) of this forward, or the maximum (H,) over the batch and all forwards.
    """
    statistics = {}
    for statistic in STATISTICS:
        values = getattr(stats, statistic.name)
        if statistic.over_samples == "max":
            values = values.amax(dim=0)
            if before is not None and before[statistic.name].shape == values.shape:
                values = values.maximum(before[statistic.name])
        statistics[statistic.name] = values
    return statistics


def statistic_of(captured: Any, name: str) -> Tensor:
    """Return a statistic of a capture as an attribute, for its ``__getattr__``."""
    # torch.compile looks up other names on a tuple that is still empty.
    if all(name != statistic.name for statistic in STATISTICS):
        raise AttributeError(f"{type(captured).__name__} has no attribute {name!r}")
    return captured.statistics[name]


def per_head(
    p: Tensor,
    s: Tensor,
    a: Tensor,
    rows: tuple[int, ...] = (2,),
    outputs: tuple[int, ...] = (2, 3),
) -> Tensor:
    """Compute the statistics (len(STATISTICS), B, H) by their definitions.

    Args:
        p: probabilities, whose last axis is that of keys.
        s: scores, of the same shape, with -inf for hidden keys.
        a: outputs of the heads.
        rows: axes of ``p`` along which the rows of a head lie.
        outputs: axes of ``a`` along which a head's output lies.
    """
    keys = (*rows, p.dim() - 1)
    count = max(math.prod([p.shape[axis] for axis in rows]), 1)
    row_max = largest(s, (p.dim() - 1,))
    return torch.stack(
        (
            largest(s, keys),
            torch.special.entr(p).sum(dim=keys) / count,
            frobenius(p, keys),
            frobenius(a, outputs),
            row_max.masked_fill(row_max < -1e38, 0).sum(dim=rows)
            / count,  # as biases hide on a GPU
        )
    )


def largest(t: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Return the maximum along axes; -inf if they are empty."""
    return t.amax(dim) if t.numel() else t.sum(dim).fill_(float("-inf"))


def frobenius(t: Tensor, dim: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Return the norm along axes, summed in float64: PyTorch adds float32 squares sequentially."""
    return torch.linalg.vector_norm(t, dim=dim, dtype=torch.float64).to(t.dtype)


def attention_stats(
    out: Tensor, lse: Tensor, per_head: Tensor, heads: Tensor | None
) -> AttentionStats:
    """Return the results of an operator by name.

    ``per_head`` is (len(STATISTICS), B, H), float32; the returned statistics are views of it.
    """
    return AttentionStats._make((out, lse, *per_head.unbind(), heads))


def evenly_spaced(batch: int, samples: int, device: torch.device) -> Tensor:
    """Return evenly spaced batch entries, (min(samples, batch),) int32."""
    samples = min(samples, batch)
    ends = torch.arange(0, samples * batch, batch, dtype=torch.int32, device=device)
    return ends // samples
