"""Sum up the results of a run."""

import shlex
import sys
from collections.abc import Mapping
from typing import Any

import torch

from train.loop import parallel
from train.loop.setup import Run


def summary_of(
    run: Run,
    totals: Mapping[str, Any],
    held_out: Mapping[str, float],
    test: Mapping[str, float],
    finished: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the summary of a run.

    Args:
        run: the run.
        totals: its costs, from ``Meter.totals``.
        held_out: scores of the held-out items, whose names begin with "held_out_".
        test: scores of the test items.
        finished: result of ``Task.finish``.
    """
    task, settings, schedule = run.task, run.settings, run.schedule
    summary = {
        "command": shlex.join(sys.argv),
        **task.facts,
        "data": settings.data,
        "steps": schedule.steps,
        "epochs": schedule.epochs_before(schedule.steps),
        "batch_size": settings.batch_size,
        "ranks": run.world.size,
        "device": parallel.device_name(run.world),
        "precision": "bf16" if parallel.uses_bf16(settings.precision, run.world) else "fp32",
        "torch": torch.__version__,
        **totals,
    }
    if task.tokens_per_item is not None and totals["throughput"] is not None:
        summary["tokens_per_second"] = totals["throughput"] * task.tokens_per_item
    return {
        **summary,
        "unit": task.unit,
        **held_out,
        **best_of(run),
        **test,
        **finished,
        "bad_samples": len(run.bad_samples.messages),
        "resumed_at": run.progress.resumed_at,
    }


def best_of(run: Run) -> dict[str, Any]:
    """Return the step and scores of the best weights, or nothing if there are none."""
    if run.best.step is None:
        return {}
    return {"best_step": run.best.step} | {f"best_{n}": v for n, v in run.best.scores.items()}
