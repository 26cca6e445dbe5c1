"""Read the JSON files of bench/results into data frames, and render them as Markdown."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from bench.catalogue import DEFAULTS, size
from bench.harness import digest
from bench.networks.modes import mode_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
# These are compared with each other: peers of one case and stage that are called in the same way
# and start from the same tensors, which are one projection or separate q, k and v.
KEY = ["on", "kind", "case", "start", "stage", "mode"]
RIGHT = 1e-3  # a library with a larger error of κ at 10⁶ is no peer
SPREAD = 1.03  # between two runs of one kernel
ENERGY_SECONDS = 0.5  # energy that was measured for less is not shown
# The folders of kernels that a row runs, by its operator or its kind.
FOLDERS = {
    "kappa": ("csrc",),
    "window": ("window",),
    "outlook": ("outlook",),
    "cross_covariance": ("covariance",),
    "channel": ("covariance",),
    "attention": ("attention",),
    "nystrom": ("attention",),
    "step": ("attention", "csrc"),
    "model": ("attention", "covariance", "outlook", "window"),
    "language": ("attention",),
}
# What only some benchmarks record.
OPTIONAL = (
    *("ours", "earlier", "error_mild", "error_hard", "own", "peak_memory_bytes", "copy_fraction"),
    *("images_per_s", "tokens_per_s", "flops", "batch", "joules", "over_limit"),
    *("printed_memory_gb", "every", "seconds_without", "overhead", "overhead_iqr"),
)
TEXT = [*KEY, "run", "date", "peer", "size", "op", "row", "variant", "triton"]


def read(path: Path) -> dict[str, Any]:
    """Return a result of bench/, as JSON has it.

    Raises:
        SystemExit: the file cannot be read, is no such result, or is of a run in which a test
            failed; in one line.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        info = data["machine_info"]
        data["names"] = {"cpu": f"CPU: {info['cpu']['model']}"}
        data["names"]["cuda"] = info["gpu"] and info["gpu"]["name"]
        if data.get("failed"):
            raise SystemExit(
                f"{path}: cannot be published, these tests failed: {', '.join(data['failed'])}"
            )
        _ = data["benchmarks"], data["datetime"], data["commit_info"]["source"]
        return data | {"file": path.name}
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a result of bench/ ({error!r})") from None


def timed(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of every run, the newest run last, with a column for each recorded field.

    Times are in seconds, memory is in bytes; ``own``, which a backward keeps, is of one token or
    image. ``run`` names the file, ``earlier`` tells that its kernels are not today's.

    Raises:
        SystemExit: an entry lacks what every benchmark records, in one line.
    """
    rows = []
    for data in sorted(results, key=lambda data: data["datetime"]):
        for entry in data["benchmarks"]:
            try:
                rows.append(_row(entry, data))
            except (KeyError, TypeError) as error:
                message = f"{data['file']}: not a result of bench/ ({error!r})"
                raise SystemExit(message) from None
    columns = dict.fromkeys([*TEXT, "median", "iqr", *OPTIONAL])
    frame = pd.DataFrame(rows, columns=[*columns, *sorted(set().union(*rows) - columns.keys())])
    numbers = [name for name in frame if not frame[name].map(_is_text).any()]
    frame = frame.astype({name: float for name in numbers if name not in TEXT})
    frame[TEXT] = frame[TEXT].astype(object).fillna("").astype(str)
    frame["ours"] = frame["ours"].eq(True)
    frame["cpu"] = frame["on"].str.startswith("CPU")
    frame["earlier"] = frame["earlier"].eq(True)
    return frame.drop_duplicates([*KEY, "peer", "run"], keep="last", ignore_index=True)


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the newest row of every peer."""
    return frame.drop_duplicates([*KEY, "peer"], keep="last", ignore_index=True)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | list | dict | bool)


def is_earlier(data: Mapping[str, Any], folders: Sequence[str] = ("attention",)) -> bool:
    """Return whether a result's kernels of some folders are not today's."""
    kernels, today = data["commit_info"].get("kernels", {}), _kernels_today()
    return any(kernels.get(folder) != today[folder] for folder in folders)


@cache
def _kernels_today() -> dict[str, str]:
    return digest.kernels(ROOT)


def _row(entry: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    extra, stats = entry["extra_info"], entry["stats"]
    facts, peer = data["cases"][extra["case"]], extra["peer"]
    kind = extra.get("kind", "attention")
    row = facts | {"median": stats.get("median"), "iqr": stats.get("iqr")} | extra
    info = data["machine_info"]
    row |= {"on": data["names"][facts["device"]], "kind": kind}
    row["triton"] = info["versions"].get("triton")
    row["capability"] = (info["gpu"] or {}).get("compute_capability")
    packed = "rows" in facts and extra.get("layout") == "packed"  # softmax attention alone has both
    row["start"] = "packed" if packed else ""
    stage = {"step": peer, "language": "training"}.get(kind, "")
    row["stage"] = extra.get("stage", extra.get("direction", stage))
    whole = kind in ("model", "language")
    row["mode"] = mode_of(peer) if whole else extra.get("mode", "")
    if "kept_bytes" in extra:
        row["own"] = extra["kept_bytes"] / facts["batch"] / facts.get("sequence", 1)
    row |= _energy(extra, stats, info["gpu"] or {})
    row["earlier"] = is_earlier(data, FOLDERS.get(facts.get("op", kind), FOLDERS["model"]))
    return row | {"size": size(facts), "run": data["file"], "date": data["datetime"][:10]}


def _energy(
    extra: Mapping[str, Any], stats: Mapping[str, Any], gpu: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the joules of a call, unless they were measured too briefly or imply too much power.

    ``over_limit`` marks a row that implies more than the board's power limit.
    """
    joules, limit = extra.get("joules"), gpu.get("power_limit_watts")
    if not joules or extra.get("energy_seconds", 0) < ENERGY_SECONDS:
        return {"joules": None}
    over = bool(limit and stats.get("median") and joules / stats["median"] > limit)
    return {"joules": None if over else joules, "over_limit": float(over)}


def ranking(frame: pd.DataFrame, key: Sequence[str] = KEY) -> pd.DataFrame:
    """Return our fastest row of every comparison, and how it stands against the others.

    Both times of a ratio come from one run. Ours is of the newest run that ran today's kernels or
    also timed what everybody has. The default and the best other are of that run too, if it has
    them; otherwise they are of the newest run that has them, compared with our time in that run. A
    peer that only another run timed is the best if it took less time by more than the spread
    between runs.

    Args:
        frame: of ``timed``.
        key: the columns that tell comparisons apart.

    Returns:
        A row for each comparison, without ``median`` where ours was not timed. Columns that end in
        ``_default`` and ``_best`` are those of what everybody has, and of the fastest row that is
        not ours. ``own_time_`` and one of these ends is our time in their run, ``times_`` says how
        many times less time ours took there, and ``versus_`` also names the peer, with an asterisk
        if that run is not the one of our row.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in frame[frame["median"].notna()].to_dict("records"):
        groups.setdefault(tuple(row[name] for name in key), []).append(row)
    table = [_rank(rows) for rows in groups.values()]
    ends = "default", "best"
    columns = [*frame, *(f"{name}_{end}" for end in ends for name in frame)]
    columns += [f"{name}_{end}" for end in ends for name in ("own_time", "times", "versus")]
    flags = dict.fromkeys(("ours", "cpu", "earlier"), bool)
    return pd.DataFrame(table, columns=columns).astype(flags)


def _rank(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of ``ranking`` of one comparison, whose newest run comes last."""
    ours = [row for row in rows if row["ours"]]
    others = [row for row in rows if not row["ours"] and not row["error_hard"] > RIGHT]
    usual = [row for row in rows if row["peer"] in DEFAULTS]
    wanted = [row for row in ours if row["run"] in _runs(usual) or not row["earlier"]]
    compared = [row for row in ours if row["run"] in _runs(others)]
    run = next((some[-1]["run"] for some in (wanted, compared, ours, others) if some), "")
    found = _fastest(_of(run, ours)) or _without_ours(rows[-1])
    here = _of(run, others)
    best = _fastest(here)
    for peer in dict.fromkeys(row["peer"] for row in others):
        rival = _fastest(_comparable([row for row in others if row["peer"] == peer], ours, run))
        if not best or rival["median"] * SPREAD < best["median"]:
            best = rival
    default = min(
        _comparable(usual, ours, run), key=lambda row: DEFAULTS.index(row["peer"]), default={}
    )
    for end, theirs in (("default", default), ("best", best)):
        if not theirs:
            continue
        own_time = _fastest(_of(theirs["run"], ours)).get("median")
        times = theirs["median"] / own_time if own_time else None
        elsewhere = "*" if theirs["run"] != run else ""
        found |= {f"{name}_{end}": value for name, value in theirs.items()}
        found |= {f"own_time_{end}": own_time, f"times_{end}": times}
        found[f"versus_{end}"] = f"{number(times)} {theirs['peer']}{elsewhere}".strip()
    return found


def _runs(rows: list[dict[str, Any]]) -> list[str]:
    """Return the runs of rows, the newest last."""
    return list(dict.fromkeys(row["run"] for row in rows))


def _of(run: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["run"] == run]


def _comparable(
    rows: list[dict[str, Any]], ours: list[dict[str, Any]], run: str
) -> list[dict[str, Any]]:
    """Return the rows of this run, otherwise of the newest that timed ours too, or the newest."""
    shared = [name for name in _runs(rows) if name in _runs(ours)]
    newest = (shared or _runs(rows) or [""])[-1]
    return _of(run, rows) or _of(newest, rows)


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(min(rows, key=lambda row: row["median"], default={}))


def _without_ours(row: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a comparison's case, without measurements."""
    measured = "median", "iqr", *(set(OPTIONAL) - {"batch", "ours", "earlier"})
    return row | dict.fromkeys(measured) | {"ours": False, "peer": ""}


def number(value: Any) -> str:
    """Format a number with three significant digits or more, nothing without one."""
    if isinstance(value, str):
        return value
    if value is None or pd.isna(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def words(values: pd.Series) -> pd.Series:
    """Format every number of a column."""
    return pd.Series([number(value) for value in values], values.index, dtype=str)


def markdown(frame: pd.DataFrame) -> str:
    """Return a table without an index, columns of numbers to the right."""
    right = [not frame[name].map(_is_text).any() for name in frame]
    cells = frame.map(number).replace(r"\|", r"\\|", regex=True)
    text = cells.to_markdown(
        index=False,
        disable_numparse=True,
        colalign=["right" if numeric else "left" for numeric in right],
    )
    # Without padding: a cell that grows changes its own line alone.
    text = re.sub(r" {2,}(?=\|)|(?<=\|) {2,}", " ", text)
    return re.sub(r"(:?)-{3,}(:?)", r"\1--\2", text)
