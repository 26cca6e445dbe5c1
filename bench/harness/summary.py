"""What a run prints when it ends: a table of times, one of memory, and what was not measured."""

from collections.abc import Iterator, Sequence
from typing import Any

# Peers that are PyTorch's own attention where no kernel of ours runs.
SDPA_ON_A_CPU = "leaner_attention", "leaner_packed", "leaner_padded"
SDPA_LINE = (
    "On a CPU, attention is PyTorch's SDPA: rows of leaner_attention, leaner_packed and "
    "leaner_padded compare PyTorch with itself."
)
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
LISTED = 6  # cases that a line names


def is_timed(row: dict[str, Any]) -> bool:
    """Whether the time of a row is a result: a single round only counts memory or checks a loss."""
    return row["rounds"] > 1


def groups(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of pytest-benchmark's table by what is compared, in the order of the run.

    Rows are named for their peer. An original and its lean variant are one group.
    """
    compared: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        info = row["extra_info"]
        variant, name, group = info["shape"].get("variant"), info["peer"], row["group"]
        if variant:
            name, group = f"{name}, {variant}", group.replace(f"_{variant}", "")
        if "overhead" in info:
            spread = f"{info['overhead']:+.0%} a step, IQR {info['overhead_iqr']:.0%}"
            name = f"KappaMonitor {name}: {spread}"
        group = group.removesuffix(" wall").replace(" both", " forward and backward")
        compared.setdefault(group, []).append(row | {"name": name})
    return list(compared.items())


def memory_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of what rows keep for their backward, and of their peak memory.

    Columns without a number are left out; there is no line where no row counted memory.
    """
    cells = []
    for row in rows:
        info = row["extra_info"]
        kept, peak = info.get("kept_bytes"), info.get("peak_memory_bytes")
        if kept is None and (peak is None or is_timed(row)):
            continue
        own = kept["own"] if isinstance(kept, dict) else None
        total = sum(kept.values()) if isinstance(kept, dict) else kept
        cells.append((info["case"], info["peer"], _size(total), _size(own), _size(peak)))
    if not cells:
        return []
    names = "case", "peer", "kept for the backward", "neither input nor output", "peak"
    columns = [column for column in zip(names, *cells, strict=True) if {*column[1:]} != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if place > 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in zip(*columns, strict=True)
    ]


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    scales = ((size, unit) for size, unit in UNITS if num_bytes >= size)
    size, unit = next(scales, (1, "B"))
    return f"{num_bytes / size:.3g} {unit}"


def unmeasured_lines(entries: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield each wrong peer, then a line for each reason, then one for what found no time."""
    for entry in entries:
        if entry["status"] == "wrong":
            yield f"WRONG    {entry['peer']} in {entry['case']}: {entry['reason']}"
    absent: dict[str, list[str]] = {}
    for entry in entries:
        if entry["status"] == "absent":
            absent.setdefault(entry["reason"], []).append(entry["peer"])
    for reason, peers in absent.items():
        times = f" ({len(peers)} times)" if len(peers) > len({*peers}) else ""
        yield f"absent   {', '.join(dict.fromkeys(peers))}{times}: {reason}"
    left = dict.fromkeys(entry["case"] for entry in entries if entry["status"] == "not run")
    if left:
        more = f" and {len(left) - LISTED} more" if len(left) > LISTED else ""
        names = ", ".join([*left][:LISTED])
        yield f"not run  rows of {names}{more}: the time of --bench-seconds was spent"


def has_sdpa_on_a_cpu(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a row of our attention on a CPU was timed, which is PyTorch's."""
    return any(
        row["extra_info"]["peer"] in SDPA_ON_A_CPU and row["extra_info"]["shape"]["device"] == "cpu"
        for row in rows
    )
