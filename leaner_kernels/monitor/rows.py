"""One row of a layer, of the values that ``measure.Layout.unpack`` names."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from leaner_kernels.kappa import gaussian_condition_number
from leaner_kernels.monitor.measure import AFTER, BEFORE, CHANGED, HEADS, MEASURED, NOT_RUN, REFUSED

# What a row has as it was measured.
_COPIED = (
    *("sigma_max", "sigma_min", "entropy", "entropy_min", "max_logit", "prob_norm", "head_norm"),
    *("effective_rank", "stable_rank"),
)
# What a writer is given of each row.
WRITTEN = (
    *("kappa", "kappa_before_skip", "kappa_after_skip", "entropy", "entropy_min", "max_logit"),
    *("head_norm", "effective_rank", "stable_rank"),
)
_REASONS = {
    NOT_RUN: "no call of several queries",
    CHANGED: "other heads than in the first sampled step",
    REFUSED: "a call that cannot be looked at",
}


class Layer(NamedTuple):
    """What the rows of a layer have in common; ``columns`` of the tokens where a module knows."""

    heads: int
    head_dim: int
    columns: Callable[[int], int] | None = None


def row(
    step: int, name: str, layer: Layer, values: dict[str, Any], dtype: torch.dtype, source: str
) -> dict[str, Any]:
    """Return the row of one layer and step, as ``KappaMonitor`` documents it."""
    heads, head_dim, columns = layer
    resolved = math.isfinite(values["worst"][HEADS])
    limit = 4 / torch.finfo(dtype).eps
    reason = _REASONS.get(values["status"])
    if columns is not None and values["status"] == NOT_RUN:
        reason = "not run"
    tokens = places = gaussian = None
    if values["status"] == MEASURED:
        tokens = round(values["tokens"])
        places = round(values["columns"]) if columns is None else columns(tokens)
        gaussian = _finite(gaussian_condition_number(tokens, heads * head_dim))
        if not resolved:
            reason = "not resolved" if math.isfinite(values["sigma_max"]) else "not finite"

    def near_skip(matrix: int) -> float | None:
        return values["kappa"][matrix] if values["worst"][matrix] <= limit else None

    return {
        "step": step,
        "layer": name,
        "kappa": values["kappa"][HEADS] if resolved else None,
        "reason": reason,
        "kappa_gaussian": gaussian,
        "resolved": resolved,
        **{key: _finite(values[key]) for key in _COPIED},
        "head_norms": [_finite(norm) for norm in values["head_norms"]],
        "kappa_before_skip": near_skip(BEFORE),
        "kappa_after_skip": near_skip(AFTER),
        "heads": heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "columns": places,
        "source": source,
    }


def _finite(value: float) -> float | None:
    # JSON has no infinity and no nan.
    return value if math.isfinite(value) else None
