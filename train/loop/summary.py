"""Summarise the results of a run, and average those of several runs."""

import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from leaner_kernels.monitor.files import write_file
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
        run: which.
        totals: what it cost, of ``Meter.totals``.
        held_out: the scores of the held-out items, with names that begin so.
        test: those of the test items.
        finished: what ``Task.finish`` returned.
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
        "bad_samples": len(run.bad_samples.known),
        "resumed_at": run.progress.resumed_at,
    }


def best_of(run: Run) -> dict[str, Any]:
    """Return the step of the best weights and what they reached; nothing where there are none."""
    if run.best.step is None:
        return {}
    return {"best_step": run.best.step} | {f"best_{n}": v for n, v in run.best.scores.items()}


def sum_up(summaries: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write ``summary.json`` of runs that differ by their seed, and print their means.

    It has what all runs have alike, and of each measure on held-out and test items the mean, its
    standard error, and the value of each.

    Args:
        summaries: of each run, at least two.
        folder: of all runs.
    """
    runs = list(summaries.values())
    first = runs[0]
    measures = [name for name, value in first.items() if _measures(name, value)]
    whole: dict[str, Any] = {
        name: value
        for name, value in first.items()
        if name not in (*measures, "settings") and all(run.get(name) == value for run in runs)
    }
    whole["seeds"] = len(runs)
    lines = [f"{first['model']}, {len(runs)} seeds"]
    for name in measures:
        values = [run[name] for run in runs]
        # A measure that was not finite is None in a summary that was read again.
        known = all(value is not None and math.isfinite(value) for value in values)
        mean = statistics.fmean(values) if known else None
        error = statistics.stdev(values) / math.sqrt(len(values)) if known else None
        whole |= {name: mean, f"{name}_standard_error": error, f"{name}_of_each": values}
        if name != "seconds":
            lines.append(f"{_said(name, mean)}, standard error {_number(name, error)}")
    lines += [_said(name, share) for name, share in whole.items() if name.startswith("baseline_")]
    write_file(folder / "summary.json", json.dumps(whole, indent=1) + "\n")
    sys.stdout.write("\n".join([*lines, f"written to {folder}"]) + "\n")


def _measures(name: str, value: Any) -> bool:
    return name == "seconds" or (
        name.startswith(("held_out_", "best_held_out_", "test_"))
        and (value is None or isinstance(value, float))
    )


def _said(name: str, value: float | None) -> str:
    return f"{name.replace('_', ' ').replace('held out', 'held-out')}: {_number(name, value)}"


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    share = name.startswith("baseline_") or "accuracy" in name or "top5" in name
    return f"{value:.2%}" if share else f"{value:.4g}"
