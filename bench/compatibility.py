"""Data frames of what the tests of adapters recorded and of other projects' tests.

``bench.report`` fills the tables of docs/compatibility.md with them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

# A part of a message that does not have the advice itself -> what to do.
INSTEAD = {
    "head dimension up to 128": "call PyTorch's function",
    "contiguous along its last axis": "call `.contiguous()` on it",
    "key and value must have one shape": "repeat heads, or pad with zeros and give `scale`",
    "head dimension of at least 1": "leave the call out",
    "must agree in B and D": "`expand` the smaller one",
    "with a key of 4 axes": "`expand` to the same axes",
    "with enable_gqa=True, divide": "`enable_gqa=True`",
    "dropout_p must be in [0, 1)": "zeros: nothing is kept",
    "got tensor": "`scale.item()`",
    "scale must be a finite number": "a finite scale",
    "must not be nested": "`attention_varlen`",
    "the difference of two softmaxes": "timm's own",
    "share their projections": "timm's own",
    "is a subclass of timm": "call `attention` in its forward",
    "head_dim must be in [1, 128]": "narrower heads",
    "computes its attention itself": "its own attention",
    "no dropout of these probabilities": "`attn_drop_rate=0`",
    "at most 64 channels": "narrower heads",
}
COLUMNS = (
    *("on", "library", "family", "architecture", "case", "dtype", "status", "error", "budget"),
    *("note", "test"),
)


def facts(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return what each test found (``tests/compatibility_record.py``), of a machine's last run."""
    newest = {}
    for data in sorted(results, key=lambda data: data["datetime"]):
        rows = [
            {"on": data["names"][row["device"]], **row} for row in data.get("compatibility", ())
        ]
        newest |= {rows[0]["on"]: rows} if rows else {}
    return pd.DataFrame([row for rows in newest.values() for row in rows], columns=[*COLUMNS])


def equal(found: pd.DataFrame) -> pd.DataFrame:
    """Return each class with the cases in which it was equal, and its largest error.

    Dtypes in which the same cases were equal share a row.
    """
    rows = found[found["status"] == "equal"].copy()
    share = (rows["error"].astype(float) / rows["budget"].astype(float)).fillna(-1)
    rows["share"] = share
    rows["worst"] = [f"{part:.0%} ({case})" for part, case in zip(share, rows["case"])]
    rows = rows.sort_values("share", ascending=False, kind="stable")
    of_class = ["library", "family", "architecture", "on"]
    worst = {"share": ("share", "first"), "worst": ("worst", "first")}
    by_dtype = rows.groupby([*of_class, "dtype"], sort=False).agg(
        cases=("case", lambda cases: "; ".join(sorted(set(cases)))), note=("note", _once), **worst
    )
    by_dtype = by_dtype.reset_index().sort_values("share", ascending=False, kind="stable")
    together = by_dtype.groupby([*of_class, "cases"], sort=False).agg(
        dtypes=("dtype", lambda dtypes: ", ".join(sorted(dtypes))), note=("note", _once), **worst
    )
    together = together.reset_index().sort_values([*of_class, "cases"], ignore_index=True)
    together["worst"] = together["worst"].where(together["share"] >= 0, "")
    return together.assign(architecture="`" + together["architecture"] + "`")


def _once(notes: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(part for note in notes for part in note.split("; ") if part))


def refused(found: pd.DataFrame) -> pd.DataFrame:
    """Return what is refused or left as it was, once, with the message and what to do instead."""
    rows = found[found["status"] != "equal"]
    rows = rows.drop_duplicates(["library", "family", "architecture", "case", "note"])
    return rows.assign(
        architecture=rows["architecture"].map(code),
        message=rows["note"].map(code),
        instead=rows["note"].map(instead),
    )


def code(text: str) -> str:
    """Return a message as code."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def instead(message: str) -> str:
    """Return what to do where a message was raised: its own advice, or else ours, or nothing."""
    for words, verb in (("does not support: ", ""), ("; use ", "use ")):
        _, found, advice = message.rpartition(words)
        if found:
            return verb + advice
    return next((advice for words, advice in INSTEAD.items() if words in message), "")


def speed(timed: pd.DataFrame) -> pd.DataFrame:
    """Return each timed model of a library, a column for each figure and each attention.

    ``library`` is its own attention, ``leaner`` ours, ``leaner_kappa`` ours with κ sampled.
    """
    rows = timed[timed["kind"] == "adapter"].copy()
    rows["model"] = [op.removeprefix(f"{of} ") for op, of in zip(rows["op"], rows["library"])]
    rows["pass"] = rows["stage"].replace("both", "forward and backward")
    index = ["on", "library", "model", "size", "pass"]
    wide = rows.pivot(index=index, columns="peer", values=["median", "iqr", "peak_memory_bytes"])
    wide = wide.reindex(list(dict.fromkeys(rows[index].itertuples(index=False, name=None))))
    wide.columns = ["_".join(key) for key in wide.columns]
    return wide.rename_axis(index).reset_index()


def peers(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return what the cases of each group of other projects' tests came to."""
    rows = pd.DataFrame(
        [row for data in results for row in data.get("peers", ())],
        columns=["source", "group", "outcome", "why", "cases"],
    )
    rows["reason"] = rows["cases"].astype(str) + ": " + rows["why"]
    by = rows.groupby(["source", "group"], sort=False)
    found = by["cases"].sum().to_frame()
    for outcome in ("equal", "refused", "different"):
        here = rows[rows["outcome"] == outcome].groupby(["source", "group"])
        found[outcome] = (
            here["cases"].sum() if outcome == "equal" else here["reason"].agg("; ".join)
        )
    return found.fillna({"equal": 0}).reset_index()
