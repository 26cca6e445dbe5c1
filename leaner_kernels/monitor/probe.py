"""A forward in eval mode between training steps, and what its rows come to."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

MEANS = "arithmetic_mean", "geometric_mean"


def layer_means(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of kappa over the layers of each step.

    They are of the layers with a kappa. Layers that are "not resolved" have a larger one than can
    be told, so where there are some both means are lower bounds: look at ``not_resolved`` first.

    Args:
        rows: of ``KappaMonitor``.

    Returns:
        By step, in the order of the rows: step; layers, how many have a kappa; not_resolved, how
        many have none for that reason; arithmetic_mean and geometric_mean, None without a layer.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    means = []
    for step, of_step in steps.items():
        kappas = [row["kappa"] for row in of_step if row.get("kappa") is not None]
        means.append(
            {
                "step": step,
                "layers": len(kappas),
                "not_resolved": sum(row.get("reason") == "not resolved" for row in of_step),
                "arithmetic_mean": math.fsum(kappas) / len(kappas) if kappas else None,
                "geometric_mean": statistics.geometric_mean(kappas) if kappas else None,
            }
        )
    return means


def merge_batches(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row per layer for the rows that each of several batches gave."""
    by_layer: dict[str, list[dict[str, Any]]] = {}
    for rows in batches:
        for row in rows:
            by_layer.setdefault(row["layer"], []).append(row)
    return [rows[0] if len(rows) == 1 else _merged(rows) for rows in by_layer.values()]


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(rows[0])
    for key in merged:
        values = [row[key] for row in rows]
        if key in ("step", "layer", "heads", "head_dim", "source"):
            continue
        if key == "reason":
            merged[key] = next((value for value in values if value is not None), None)
        elif key == "resolved":
            merged[key] = all(values)
        elif None in values:
            merged[key] = None
        elif key in ("tokens", "columns"):
            merged[key] = round(math.fsum(values) / len(values))
        elif key.startswith("kappa"):
            merged[key] = statistics.geometric_mean(values)
        elif key == "head_norms":
            heads = zip(*values)
            merged[key] = [None if None in of else math.fsum(of) / len(of) for of in heads]
        else:
            extreme = {"max_logit": max, "entropy_min": min}.get(key)
            merged[key] = extreme(values) if extreme else math.fsum(values) / len(values)
    return merged


def run_forward(
    model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any] | None = None
) -> None:
    """Call the model with a batch, as ``measure`` describes it."""
    if forward is not None:
        forward(model, batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, and leave the model and random generators as they were."""
    modes = [(module, module.training) for module in model.modules()]
    peaks = [(m, m.peak_logit) for m in model.modules() if hasattr(m, "peak_logit")]
    used = {t.device for t in (*model.parameters(), *model.buffers())}
    devices = [device for device in used if device.type == "cuda"]
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            # Not with train(), which would also set the parts of a module in eval mode.
            for module, training in modes:
                module.training = training
            for module, peak in peaks:
                module.peak_logit = peak
            reshard(model)


def reshard(model: Any) -> None:
    """Free what FSDP2 gathered: without a backward the root keeps copies, which would go stale."""
    # By its name: the import takes long, and only sharded models need it.
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        model.reshard()
