"""Read the JSON files of bench/results into data frames, and render them as Markdown."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.catalogue import DEFAULTS, size

RESULTS = Path(__file__).parent / "results"
# What is compared with each other: peers of a case in a stage that are called alike, and that start
# alike: from one projection, or from q, k and v apart.
KEY = ["on", "kind", "case", "start", "stage", "mode"]
RIGHT = 1e-3  # the error of κ at 10⁶ above which a library's time is compared with nothing
# What only some benchmarks record.
OPTIONAL = (
    *("ours", "error_mild", "error_hard", "own", "peak_memory_bytes", "joules", "copy_fraction"),
    *("images_per_s", "tokens_per_s", "joules_per_image", "joules_per_token", "batch"),
    *("printed_memory_gb", "every", "seconds_without", "overhead", "overhead_iqr"),
)
TEXT = [*KEY, "peer", "size", "op", "row", "variant", "triton"]


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
    """Return the newest row of every peer, a column for whatever benchmarks record.

    Times are in seconds, memory is in bytes; ``own``, which a backward keeps, is of one token or
    image.

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
    return frame.drop_duplicates([*KEY, "peer"], keep="last", ignore_index=True)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | list | dict | bool)


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
    compiled = "compiled" if peer.endswith("_compiled") else "eager"
    row["mode"] = compiled if kind in ("model", "language") else extra.get("mode", "")
    if "kept_bytes" in extra:
        row["own"] = extra["kept_bytes"] / facts["batch"] / facts.get("sequence", 1)
    return row | {"size": size(facts)}


def standings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return our fastest row of every comparison, and how it stands against the others.

    Args:
        frame: of ``timed``.

    Returns:
        Columns that end in ``_default`` and ``_best`` are those of what everybody has, and of the
        fastest row that is not ours; ``times_default`` and ``times_best`` say how many times less
        time ours takes, and ``versus`` also names the best.
    """
    rows = frame[frame["median"].notna()].sort_values("median", kind="stable")
    right = rows["error_hard"].isna() | (rows["error_hard"] <= RIGHT)
    default = rows[rows["peer"].isin(DEFAULTS)].sort_values(
        "peer", key=lambda peers: peers.map(DEFAULTS.index), kind="stable"
    )
    ours = rows[rows["ours"]].drop_duplicates(KEY)
    for some, name in ((default, "default"), (rows[~rows["ours"] & right], "best")):
        others = some.drop_duplicates(KEY).set_index(KEY).add_suffix(f"_{name}")
        ours = ours.merge(others, left_on=KEY, right_index=True, how="left").copy()
        ours[f"times_{name}"] = ours[f"median_{name}"] / ours["median"].where(ours["median"] > 0)
    best = ours["peer_best"].astype(object).fillna("").astype(str)
    ours["versus"] = (words(ours["times_best"]) + " " + best).str.strip()
    return frame.drop_duplicates(KEY)[KEY].merge(ours, on=KEY)


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
