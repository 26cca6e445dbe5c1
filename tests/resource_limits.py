"""Limits of what a compiled launch may take: its GPU's, and those of the committed table."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from bench import resources
from bench.gpu_model.compile_ahead import GPUS, spill_faults

# Registers that a kernel may take beyond the committed table before the check fails.
SLACK = 16


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row's name."""
    return tuple(row[name] for name in resources.KEYS)


def faults(row: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """Return what is wrong with a row: in itself, and against a table that has its GPU."""
    shared = GPUS[row["capability"]].shared_per_program
    found = []
    found += spill_faults(row["stack"], row["looped_spills"])
    if row["shared"] > shared:
        found.append(f"{row['shared']} bytes of shared memory, {shared} are there")
    elif row["programs_per_sm"] < 1:
        found.append("an SM cannot hold one program")
    if row["capability"] in resources.IN_TABLE and table["versions"]["triton"] == version("triton"):
        limit = next((line for line in table["rows"] if key(line) == key(row)), None)
        if limit is None:
            found.append("not in the table: python -m bench.resources --write")
        else:
            found += _worse(row, limit)
    where = f"{row['case']} {row['launch']} on sm_{row['capability']}, {row['kernel']}"
    return [f"{where}: {fault}" for fault in found]


def _worse(row: dict[str, Any], limit: dict[str, Any]) -> Iterator[str]:
    if row["registers"] > limit["registers"] + SLACK:
        yield f"{row['registers']} registers, the table has {limit['registers']}"
    if row["programs_per_sm"] < limit["programs_per_sm"]:
        yield f"{row['programs_per_sm']} programs fit, the table has {limit['programs_per_sm']}"
