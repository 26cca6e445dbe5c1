"""Fill the tables of README.md, docs/faster.md and docs/results.md from bench/results.

``python -m bench.report`` rewrites what stands between the pages' markers and draws
docs/results.png; ``--check`` only compares the pages. With files named, their tables go to standard
output. A table is a function of this file: measured rows in, cells under their headings out.
"""

import json
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import pandas as pd
    import tabulate  # noqa: F401 - of pandas' Markdown
except ModuleNotFoundError as missing:
    raise SystemExit(f"bench.report needs {missing.name}: pip install --group bench") from None

from bench import frames
from bench.attention.catalogue import HEADLINE, LABELS
from bench.harness import command
from bench.networks.modes import whose
from leaner_kernels.ops.attention.dispatch import find_rule_of_library

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = frames.RESULTS, ROOT / "docs"
PAGES = {
    "README": ROOT / "README.md",
    **{name: DOCS / f"{name}.md" for name in ("faster", "results")},
}
# Lean over original: of a column of ``frames.timed``, and of which peer's.
RATIOS = {
    "time": ("median", "leaner"),
    "time, compiled": ("median", "leaner_compiled"),
    "time of transformers": ("median", "transformers"),
    "kept": ("own", "leaner"),
    "peak": ("peak_memory_bytes", "leaner"),
    "peak of timm": ("peak_memory_bytes", "timm"),
    "as printed": ("printed_memory_gb", ""),
}
# Of our peers in benchmarks those that always run our own kernels, by the case's operator.
OWN_KERNELS = "leaner_kernel", "leaner_varlen", "leaner"
DISPATCHED = "dispatched"  # a row of PyTorch's that stands for ours
# Our peers with statistics, and the headings of their costs.
COSTS = {
    "leaner_stats": "with statistics",
    "leaner_stats_sampled": "with a capture of 4 entries",
    "leaner_stats_unsampled": "in a step without a capture",
}
STEPS = {"vit_base": "ViT-B", "crammed_bert": "Crammed BERT", "gpt2_tinystories": "GPT-2"}
NOT_MEASURED, NO_RUN = "not measured", "no run of both"
WIDTH = 120  # of a line of Markdown
CELL = 25  # most words of a cell
# Of PyTorch's message where a peer leaves one backend enabled: the backends that it disabled.
DISABLED = re.compile(r" [\w ]+ kernel not used because: [\w ]+ has been runtime disabled\.")
OUTSIDE = 1.25  # a prediction that is further off where it was measured is not shown
BLOCK = re.compile(
    r"(<!-- (\w+), written by python -m bench\.report -->\n)(?:\n(?:\|.*\n)+(?:\n(?:>.*\n)+)?)?"
)


def pivot(cells: pd.DataFrame, by: Sequence[pd.Series], index: int) -> pd.DataFrame:
    """Put cells of rows that differ in ``by`` alone next to each other.

    Args:
        cells: of which the first ``index`` columns lead a row.
        by: what differs, whose values go ahead of a heading.
        index: how many columns lead.
    """
    if cells.empty:
        return cells
    lead = [*cells.columns[:index]]
    cells[lead] = cells[lead].astype(object).fillna("")
    names = [f"_{number}" for number in range(len(by))]
    cells = cells.assign(**dict(zip(names, by)))
    wide = cells.pivot_table(index=lead, columns=names, sort=False, aggfunc="first")
    order = list(dict.fromkeys(key[1:] for key in wide.columns))
    wide = wide[sorted(wide.columns, key=lambda key: order.index(key[1:]))]
    wide.columns = [" ".join((*key[1:], key[0])).strip() for key in wide.columns]
    return wide.reset_index()


def peer_comparison(timed: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return attention on a GPU as a user meets it, forward and backward, and forward alone.

    Ours is what ``attention`` runs: where a rule dispatches a case to PyTorch, PyTorch's.
    """
    rows = timed[(timed["kind"] == "attention") & ~timed["cpu"] & timed["case"].isin(LABELS)]
    rows = rows[rows["stage"].isin(["both", "forward"]) & (rows["mode"] == "graph")]
    rows = rows[(rows["start"] == "") & (rows["peer"].isin(OWN_KERNELS) | ~rows["ours"])]
    calls = ["on", "case", "stage"]
    kernels = frames.ranking(rows).set_index(calls)
    called = frames.ranking(_as_called(rows)).set_index(calls)
    called = called[called["median_best"].notna() & called["ours"]]
    # An operator that only one has.
    for name in ("median", "run", "own_time", "times", "joules", "peer"):
        default, best = called[f"{name}_default"], called[f"{name}_best"]
        called[f"{name}_default"] = default.astype(best.dtype).fillna(best)
    called = called.sort_index(
        level="case", key=lambda cases: cases.map([*LABELS].index), kind="stable"
    )
    times = frames.words(1e6 * kernels["median"].reindex(called.index))
    dispatched = called["peer"] == DISPATCHED
    table = pd.DataFrame(
        {
            "attention, forward + backward": called.index.get_level_values("case").map(LABELS),
            "B·H·N·D": called["size"]
            .str.replace(",(?! w)", "", regex=True)
            .str.replace(" bfloat16", ""),
            "ours, µs": times.where(~dispatched, "PyTorch's (" + times + ")"),
            "PyTorch or timm, µs": _microseconds(called, "default"),
            "× as fast": _times(called, "default"),
            "fastest other, µs": _microseconds(called, "best"),
            "× the fastest": _times(called, "best"),
            "ours, mJ": _two_digits(1e3 * called["joules"]),
            "PyTorch or timm, mJ": _two_digits(1e3 * called["joules_default"]),
        },
        called.index,
    )
    tables = []
    for stage in ("both", "forward"):
        here = called.index.get_level_values("stage") == stage
        rows = table[here].droplevel("stage")
        if stage == "forward":
            rows = _of_forward(rows, table.droplevel("stage"))
        tables.append(_noted(rows, called[~dispatched & here]))
    both, forward = (_on(rows, rows.index.get_level_values("on")) for rows in tables)
    return both, forward


def _of_forward(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of forwards, with a row for each case that was measured in any stage."""
    names = table[~table.index.duplicated()].iloc[:, :2]
    names = names.rename(columns={names.columns[0]: "attention, forward"})
    return names.join(rows.iloc[:, 2:7]).fillna(NOT_MEASURED)


def _on(table: pd.DataFrame, gpus: Sequence[str]) -> pd.DataFrame:
    """Return a table with a column that names the GPU, where there are several."""
    if len({*gpus}) > 1:
        table.insert(0, "on", [*gpus])
    return table


def _of_one_gpu(rows: pd.DataFrame, gpus: pd.Series | pd.Index) -> pd.DataFrame:
    """Return the rows of the GPU that has most of them, for the first page."""
    return rows[gpus == gpus.value_counts().idxmax()] if len(rows) else rows


def _as_called(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with PyTorch's as ours where ``attention`` dispatches a case to it."""
    here = _dispatched(rows)
    library = rows[here & (rows["peer"] == "sdpa")].assign(ours=True, peer=DISPATCHED)
    return pd.concat([rows[~(here & rows["ours"])], library]).sort_index(kind="stable")


def _dispatched(rows: pd.DataFrame) -> pd.Series:
    """Return which rows are of a call that ``attention`` dispatches to PyTorch."""
    calls = [*zip(rows["on"], rows["case"], rows["stage"])]
    routed = {call for call, row in zip(calls, rows.to_dict("records")) if _is_dispatched(row)}
    return pd.Series([call in routed for call in calls], rows.index, dtype=bool)


def _is_dispatched(row: Mapping[str, Any]) -> bool:
    """Whether ``attention`` calls PyTorch's on a case of ``leaner_kernel``."""
    if row["peer"] != "leaner_kernel" or row.get("window", 0) > 0:
        return False
    capability = int(row["capability"].replace(".", ""))
    rule = find_rule_of_library(
        capability,
        varlen=False,
        causal=bool(row["causal"]),
        backward=row["stage"] != "forward",
        head_dim=int(row["head_dim"]),
        tokens=int(row["tokens"]),
        programs=int(row["batch"] * row["heads"]),
        float32=row["dtype"] == "float32",
    )
    return rule is not None


def _microseconds(rows: pd.DataFrame, end: str) -> list[str]:
    """Return microseconds of the default or the best, with ours where their run is another."""
    cells = []
    for row in rows.to_dict("records"):
        time, run, ours = (row[f"{name}_{end}"] for name in ("median", "run", "own_time"))
        words = frames.number(1e6 * time)
        peer = row[f"peer_{end}"]
        words += f" {peer}" if end == "best" or peer not in frames.DEFAULTS else ""
        if pd.notna(time) and run != row["run"] and pd.notna(ours):
            words += f" (ours {frames.number(1e6 * ours)})"
        cells.append(words)
    return cells


def _times(rows: pd.DataFrame, end: str) -> pd.Series:
    """Return how many times as fast ours is as the default or the best."""
    return frames.words(rows[f"times_{end}"]).where(rows[f"times_{end}"].notna(), NO_RUN)


def headline(table: pd.DataFrame) -> pd.DataFrame:
    """Return the part of the first table of ``peer_comparison`` for README, of one GPU."""
    notes = table.attrs
    table = _of_one_gpu(table, table.index.get_level_values("on")).drop(
        columns="on", errors="ignore"
    )
    rows = table.iloc[:, 0].isin([LABELS[case] for case in HEADLINE])
    table = table[rows].iloc[:, :7]
    table.attrs = notes
    return table


def _steps(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of whole training steps on a GPU, with items a second."""
    rows = timed[timed["kind"].isin(["model", "language"]) & ~timed["cpu"]]
    rows = rows[(rows["stage"] == "training") & rows["row"].isin(STEPS)]
    return rows.sort_values("row", key=lambda names: names.map([*STEPS].index), kind="stable")


def _rate(rows: pd.DataFrame, end: str = "") -> pd.Series:
    """Return images or tokens a second."""
    return rows[f"images_per_s{end}"].fillna(rows[f"tokens_per_s{end}"])


def _named(rates: pd.Series, rows: pd.DataFrame) -> pd.Series:
    """Return rates with the name of what ran, unless it is this project's own model."""
    names = rows["peer"].map(whose).replace(["leaner", ""], None)
    return frames.words(rates) + (" " + names).fillna("")


def _two_digits(values: pd.Series) -> pd.Series:
    return frames.words(values.map(lambda value: float(f"{value:.2g}"), na_action="ignore"))


def steps(timed: pd.DataFrame) -> pd.DataFrame:
    """Return whole training steps on a GPU in every mode that any side was measured in."""
    rows = frames.ranking(_steps(timed))
    rows = rows.sort_values("variant", key=lambda names: names != "original", kind="stable")
    rows = rows.sort_values("row", key=lambda names: names.map([*STEPS].index), kind="stable")
    rate, other = _rate(rows), _rate(rows, "_best")
    theirs = frames.words(other) + " " + rows["peer_best"].fillna("").map(whose)
    table = pd.DataFrame(
        {
            "training step": rows["row"].map(STEPS) + ", " + rows["variant"],
            "called": rows["mode"],
            "ours, a second": _named(rate, rows).where(rate.notna(), NOT_MEASURED),
            "fastest other": theirs.where(other.notna(), NOT_MEASURED),
            "times as fast": _times(rows, "best").where(rate.notna() & other.notna(), ""),
            "ours, peak GB": frames.words(1e-9 * rows["peak_memory_bytes"]),
            "other, peak GB": frames.words(1e-9 * rows["peak_memory_bytes_best"]),
            "ours, TFLOP": frames.words(1e-12 * rows["flops"]),
            "other, TFLOP": frames.words(1e-12 * rows["flops_best"]),
            "ours, J a step": _two_digits(rows["joules"]),
            "other, J a step": _two_digits(rows["joules_best"]),
        }
    )
    return _noted(_on(table, rows["on"]), rows[rows["ours"]])


def fastest_steps(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest mode of each side of a training step, for the first page."""
    rows = _steps(timed)
    rows = frames.newest(_of_one_gpu(rows, rows["on"]))
    rows = rows.assign(rate=_rate(rows))
    cells, own = [], []
    for (row, variant), group in rows.groupby(["row", "variant"], sort=False):
        ours, theirs = (
            group[group["ours"] == side].sort_values("median").head(1).to_dict("records")
            for side in (True, False)
        )
        own += ours
        one_run = ours and theirs and ours[0]["run"] == theirs[0]["run"]
        cells.append(
            {
                "training step": f"{STEPS[row]}, {variant}",
                "ours, a second": _fastest_cell(ours),
                "fastest other": _fastest_cell(theirs),
                "times as fast": ours[0]["rate"] / theirs[0]["rate"] if one_run else NO_RUN,
                "TFLOP a step, ours / other": " / ".join(
                    frames.number(1e-12 * side[0]["flops"]) if side else NOT_MEASURED
                    for side in (ours, theirs)
                ),
            }
        )
    return _noted(pd.DataFrame(cells), pd.DataFrame(own, columns=rows.columns))


def _fastest_cell(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return NOT_MEASURED
    owner = whose(rows[0]["peer"])
    owner = "" if owner == "leaner" else f" {owner},"
    return f"{frames.number(rows[0]['rate'])}{owner} {rows[0]['mode']}"


def _noted(table: pd.DataFrame, ours: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a note of which of our rows were measured on earlier kernels."""
    earlier = ours[ours["earlier"]]
    if len(earlier):
        days = " to ".join(sorted({min(earlier["date"]), max(earlier["date"])}))
        some = "" if len(earlier) == len(ours) else f": {len(earlier)} of {len(ours)} rows"
        table.attrs["note"] = f"Measured on earlier kernels, {days}{some}."
    over = int(ours.get("over_limit", pd.Series()).sum())
    if over:
        text = f"{over} rows imply more than the board's power limit and show no energy."
        table.attrs["note"] = f"{table.attrs.get('note', '')} {text}".strip()
    return table


def statistics_cost(timed: pd.DataFrame) -> pd.DataFrame:
    """Return what statistics and captures add to a pass, both timed in one run.

    Plain is what ``attention`` runs: PyTorch's, where it dispatches a call without statistics.
    """
    rows = timed[(timed["kind"] == "attention") & ~timed["cpu"] & (timed["mode"] == "graph")]
    rows = rows[(rows["start"] == "") & (rows["stage"] != "backward")]
    own, here = rows["peer"].isin(OWN_KERNELS), _dispatched(rows)
    plain = own.where(~here, rows["peer"] == "sdpa")
    named = rows["peer"].replace("leaner_varlen_stats", "leaner_stats").mask(plain, "plain")
    rows = rows.assign(peer=named, library=here)[plain | (rows["ours"] & ~own)]
    calls = ["on", "case", "size", "stage"]
    wide = rows.pivot_table("median", [*calls, "run"], "peer", sort=False, aggfunc="first").reindex(
        columns=["plain", *COSTS]
    )
    wide = wide[wide["plain"].notna() & wide[[*COSTS]].notna().any(axis="columns")]
    facts = rows.drop_duplicates([*calls, "run"]).set_index([*calls, "run"])
    wide = (
        wide.join(facts[["earlier", "date", "library"]])
        .reset_index()
        .drop_duplicates(calls, keep="last")
    )
    whose_plain = wide["library"].map({True: " sdpa", False: ""})
    table = wide[calls[1:]].assign(**{"plain, µs": frames.words(1e6 * wide["plain"]) + whose_plain})
    for peer, heading in COSTS.items():
        added = 100 * (wide[peer] / wide["plain"] - 1)
        table[heading] = [f"{value:+.0f}%" if pd.notna(value) else "" for value in added]
    table["case"] = [LABELS.get(case, case) for case in table["case"]]
    table = table.rename(columns={"case": "attention", "stage": "pass"})
    return _noted(_on(table, wide["on"]), wide)


def crossover(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return how many times as fast as PyTorch's our kernels are, by length and head dimension."""
    # ``programs`` is batch x heads, 0 for many.
    rows = pd.DataFrame([{"float32": False, "programs": 0} | row for row in result["rows"]])
    kinds = ["kind", "causal", "float32", "programs", "head_dim"]
    tables = []
    for stage in ("both", "forward"):
        times = rows[f"library_{stage}"] / rows[f"ours_{stage}"]
        wide = rows.assign(times=times).pivot_table("times", kinds, "tokens").sort_index()
        tables.append(wide.assign(stage=stage).reset_index())
    table = pd.concat(tables, ignore_index=True)
    table["attention"] = table["kind"] + table["causal"].map({True: ", causal", False: ""})
    table["attention"] += table["float32"].map({True: ", float32", False: ""})
    few = table["programs"].map(lambda programs: f", {programs} heads" if programs else "")
    table["attention"] += few
    table["pass"] = table["stage"].map({"both": "forward + backward", "forward": "forward"})
    lengths = sorted(name for name in table if isinstance(name, int))
    table = table.rename(columns={"head_dim": "D"})[["attention", "pass", "D", *lengths]]
    made = {"earlier": frames.is_earlier(result), "date": result["datetime"][:10]}
    return _noted(table.rename(columns=str).astype({"D": str}), pd.DataFrame([made]))


def host(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the time that the host needs to issue small calls."""
    table = pd.DataFrame(rows)
    return pd.DataFrame(
        {
            "call": table["call"],
            "pass": table["pass"],
            "ours, µs": table["ours_us"],
            "PyTorch, µs": table["pytorch_us"],
            "ours / PyTorch": table["ours_us"] / table["pytorch_us"],
        }
    )


def runs(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return what each file was made with: date, commit, hardware, driver and versions."""
    rows = []
    for data in results:
        info, commit = data["machine_info"], data["commit_info"]
        hardware = [data["names"]["cuda"] or data["names"]["cpu"]]
        hardware += [f"{info['cpu']['cores']} cores", f"{info['cpu']['torch_threads']} threads"]
        if gpu := info["gpu"]:
            hardware += [f"{gpu['count']} × {gpu['memory_bytes'] / 2**30:.0f} GiB"]
            hardware += [f"power limit {gpu['power_limit_watts']} W"]
            hardware += [f"{name} clock {mhz} MHz" for name, mhz in gpu["clocks_mhz"].items()]
        rows.append(
            {
                "file": data["file"],
                "date": data["datetime"][:10],
                "commit": (commit["id"] or "none")[:12] + " with changes" * bool(commit["dirty"]),
                "note": commit.get("note", ""),
                "source": commit["source"],
                "hardware": ", ".join(hardware),
                "versions": ", ".join(f"{k} {v}" for k, v in info["versions"].items() if v),
            }
        )
    columns = ["file", "date", "commit", "note", "source", "hardware", "versions"]
    return pd.DataFrame(rows, columns=columns)


def attention(ranked: pd.DataFrame) -> pd.DataFrame:
    """Return our best row of each pass of attention, from q, k and v or from one projection."""
    rows = ranked[(ranked["kind"] == "attention") & ranked["ours"]]
    cells = pd.DataFrame(
        {
            "on": rows["on"],
            "case": rows["case"],
            "from": rows["start"],
            "size": rows["size"],
            "called": rows["mode"],
            "µs": frames.words(1e6 * rows["median"]) + " " + rows["peer"],
            "IQR, %": 100 * rows["iqr"] / rows["median"],
            "copy, %": 100 * rows["copy_fraction"],
            "× default": _marked(rows, "default"),
            "× best peer": rows["versus_best"],
        }
    )
    return _noted(pivot(cells, [rows["stage"]], 5), rows)


def _marked(rows: pd.DataFrame, end: str) -> pd.Series:
    """Return how many times as fast ours is, with an asterisk where the run is another."""
    elsewhere = (rows[f"run_{end}"] != rows["run"]) & rows[f"times_{end}"].notna()
    return frames.words(rows[f"times_{end}"]) + elsewhere.map({True: "*", False: ""})


def kappa(ranked: pd.DataFrame) -> pd.DataFrame:
    """Return condition numbers next to the libraries' singular values."""
    rows = ranked[(ranked["kind"] == "kappa") & ranked["ours"]]
    table = pd.DataFrame(
        {
            "on": rows["on"],
            "case": rows["case"],
            "size": rows["size"],
            "called": rows["mode"],
            "ms": 1e3 * rows["median"],
            "IQR, ms": 1e3 * rows["iqr"],
            "× svdvals": _marked(rows, "default"),
            "× best library": rows["versus_best"],
            "error at 10³": rows["error_mild"],
            "at 10⁶": rows["error_hard"],
        }
    )
    return _noted(table, rows)


def monitor(ranked: pd.DataFrame) -> pd.DataFrame:
    """Return training steps with and without the monitor."""
    rows = ranked[ranked["kind"] == "step"]
    cells = pd.DataFrame(
        {
            "on": rows["on"],
            "case": rows["case"],
            "size": rows["size"],
            "ms without": 1e3 * rows["seconds_without"],
            "with": 1e3 * rows["median"],
            "overhead, %": 100 * rows["overhead"],
            "IQR, %": 100 * rows["overhead_iqr"],
        }
    )
    return _noted(pivot(cells, [rows["stage"]], 3), rows)


def models(ranked: pd.DataFrame) -> pd.DataFrame:
    """Return training and inference of rows of the paper next to timm's and transformers'."""
    rows = ranked[ranked["kind"].isin(["model", "language"]) & ranked["ours"]]
    cells = pd.DataFrame(
        {
            "on": rows["on"],
            "row": rows["row"],
            "batch": rows["batch"],
            "called": rows["mode"],
            "a second": _named(_rate(rows), rows),
            "IQR, %": 100 * rows["iqr"] / rows["median"],
            "× best peer": rows["versus_best"],
            "kept, kB": rows["own"] / 1e3,
            "peak, GB": rows["peak_memory_bytes"] / 1e9,
        }
    )
    return _noted(pivot(cells, [rows["variant"], rows["stage"]], 4), rows)


def lean(timed: pd.DataFrame) -> pd.DataFrame:
    """Return lean over original of each row of the paper, both of one run.

    Small rows of a CPU are not of the paper.
    """
    rows = timed[(timed["variant"] != "") & ~timed["case"].str.startswith("cpu_")]
    rows = rows[rows["stage"].isin(["training", ""])]
    ratios, used = {}, []
    for name, (column, peer) in RATIOS.items():
        here = rows[rows["peer"] == peer] if peer else rows
        sides = here.pivot_table(column, ["on", "row", "run"], "variant", sort=False)
        if {"lean", "original"} <= {*sides.columns}:
            ratio = (sides["lean"] / sides["original"]).dropna()
            ratios[name] = ratio.groupby(level=["on", "row"], sort=False).last()
            used.append(here[here["run"].isin(ratio.index.get_level_values("run"))])
    table = pd.concat(ratios, axis="columns").reset_index() if ratios else pd.DataFrame()
    ours = pd.concat(used or [rows])
    return _noted(table.reindex(columns=["on", "row", *RATIOS]), ours[ours["ours"]])


def unmeasured(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return by status and reason which peers were not measured; wrong ones come first."""
    rows = [entry for data in results for entry in data.get("unmeasured", ())]
    frame = pd.DataFrame(rows, columns=["status", "reason", "peer", "case"]).drop_duplicates()
    frame["status"] = frame["status"].replace("wrong", "WRONG")  # which also sorts first
    frame["reason"] = [_shortened(reason) for reason in frame["reason"]]
    frame = frame.drop_duplicates()
    cases = frame.groupby(["status", "reason", "peer"], sort=False)["case"].agg(list).reset_index()
    cases["where"] = [
        f"{peer} in {', '.join(names) if len(names) < 3 or status == 'WRONG' else len(names)}"
        for status, peer, names in zip(cases["status"], cases["peer"], cases["case"])
    ]
    causes = cases.groupby(["status", "reason"], sort=False)["where"].agg("; ".join).reset_index()
    return causes.sort_values("status", kind="stable").rename(columns={"where": "peers and cases"})[
        ["status", "peers and cases", "reason"]
    ]


def _shortened(reason: str) -> str:
    """Return the reason of a row that was not measured in the words that a cell may have.

    The file of the run keeps the whole message.
    """
    words = DISABLED.sub("", reason).split(" ")
    return " ".join(words if len(words) <= CELL else [*words[: CELL - 1], "…"])


def training(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return what ``bench.training`` measured, with the median ratio and its range."""
    return pd.DataFrame(
        {
            "measured": row["measured"],
            "unit": row["unit"],
            "ours": row["ours"],
            "theirs": row["theirs"],
            "whose": row["peer"],
            "ours / theirs": statistics.median(row["ratios"]),
            "of each turn": " to ".join(frames.number(end(row["ratios"])) for end in (min, max)),
        }
        for row in rows
    )


def predictions(name: str) -> pd.DataFrame:
    """Return the rows of a file of ``bench.gpu_model --json``."""
    content = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    rows = pd.DataFrame(content["rows"])
    return rows.assign(triton=content["versions"]["triton"])


def own_kernels(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the passes of our own kernels alone, from q, k and v apart or as vision has them."""
    rows = timed[timed["peer"].isin(OWN_KERNELS) & (timed["mode"] == "graph")]
    return frames.newest(rows.assign(gpu=rows["on"].str.removeprefix("NVIDIA ")))


def predicted(timed: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return predictions for the cases of the first page that are not measured.

    A case whose passes together are far off on a GPU that measured them is left out.
    """
    by = ["gpu", "case", "stage"]
    own = own_kernels(timed)
    passes = own[own["stage"] != "both"]
    both = own[own["stage"] == "both"].set_index(by[:2])["median"]
    passes_predicted = rows[rows["stage"].isin(["forward", "backward"])]
    error = passes_predicted.groupby(by[:2])["predicted"].sum(min_count=2) / both
    off = error[(error > OUTSIDE) | (error < 1 / OUTSIDE)].index.get_level_values("case")
    measured = pd.MultiIndex.from_frame(passes[by])
    left = rows[rows["case"].isin(LABELS) & ~rows["case"].isin(off)]
    left = left[~pd.MultiIndex.from_frame(left[by]).isin(measured)]
    times = frames.words(1e6 * left["predicted"]).replace("", "unknown")
    cells = pd.DataFrame({"case": left["case"], "": times})
    return pivot(cells, [left["gpu"], left["stage"]], 1)


def gather(paths: Sequence[Path] = ()) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the tables of each page, of these files or else of bench/results.

    Raises:
        SystemExit: a file cannot be read, is no result, or none has a measured row, in one line.
    """
    results = [frames.read(path) for path in paths or sorted(RESULTS.glob("20*.json"))]
    timed = frames.timed(results)
    if timed.empty:
        raise SystemExit("no measured rows in " + ", ".join(map(str, paths)))
    ranked = frames.ranking(timed)
    tables = {
        "runs": runs(results),
        "attention": attention(ranked),
        "kappa": kappa(ranked),
        "monitor": monitor(ranked),
        "models": models(ranked),
        "lean": lean(timed),
        "unmeasured": unmeasured(results),
    }
    front, forward = peer_comparison(timed)
    faster = {
        "steps": steps(timed),
        "front": front,
        "forward": forward,
        "statistics": statistics_cost(timed),
    }
    first = {"headline": headline(front), "fastest": fastest_steps(timed)}
    pages = {"README": first, "faster": faster, "results": tables}
    if not paths:
        training_parts, lengths, calls = (
            json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
            for name in ("training-cpu", "crossover-h200", "host-h200")
        )
        faster["host"] = host(calls["rows"])
        tables |= {
            "crossover": crossover(lengths),
            "training": training(training_parts["rows"]),
            "predicted": predicted(timed, predictions("predictions")),
        }
    return pages


def render(table: pd.DataFrame) -> str:
    """Return a table as Markdown without the columns that no row has, nothing without a row."""
    if table.empty:
        return ""
    text = frames.markdown(table.replace("", None).dropna(axis="columns", how="all"))
    if "note" not in table.attrs:
        return text
    note = textwrap.fill(
        table.attrs["note"],
        WIDTH,
        initial_indent="> ",
        subsequent_indent="> ",
        break_on_hyphens=False,
    )
    return f"{text}\n\n{note}"


def insert_tables(text: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return a page with the table below each marker rendered anew."""

    def block(marker: re.Match[str]) -> str:
        table = render(tables[marker[2]])
        return f"{marker[1]}\n{table}\n" if table else marker[1]

    return BLOCK.sub(block, text)


def draw(path: Path) -> None:
    """Draw how many times as fast as PyTorch's default attention is, forward and backward."""
    results = [frames.read(result) for result in sorted(RESULTS.glob("20*.json"))]
    ranked = frames.ranking(frames.timed(results))
    rows = ranked[(ranked["kind"] == "attention") & (ranked["stage"] == "both")]
    rows = rows[(rows["mode"] == "graph") & ~rows["cpu"] & rows["ours"]]
    rows = rows.dropna(subset="times_default")
    # The names of the tables; a bar names its GPU only if there are several.
    names = rows["case"].replace(LABELS) + rows["start"].map({"packed": ", packed"}).fillna("")
    gpus = sorted({*rows["on"]})
    if len(gpus) > 1:
        names += " (" + rows["on"] + ")"
    bars = rows.set_axis(names)["times_default"].sort_values()
    colors = ["tab:orange" if times >= 1 else "tab:red" for times in bars]
    # From 1: the axis is logarithmic.
    axes = (bars - 1).plot.barh(figsize=(8, 1 + 0.25 * len(bars)), color=colors, left=1)
    axes.axvline(1, color="black", lw=1)
    for place, times in enumerate(bars):
        axes.annotate(
            f"{frames.number(times)}×",
            (times, place),
            (3 if times >= 1 else -3, 0),
            textcoords="offset points",
            ha="left" if times >= 1 else "right",
            va="center",
        )
    label = "times as fast as PyTorch or timm; red: our kernel is slower, and is not called"
    axes.set(xscale="log", xlim=(0.3, 2 * bars.max()), ylabel="", xlabel=label)
    axes.set_title(f"attention, forward and backward, bfloat16 ({', '.join(gpus)})", fontsize=11)
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if tick < 2 * bars.max()]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.figure.savefig(path, dpi=80, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write what it requests."""
    parser = command.parser("bench.report", __doc__)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        help="result files of bench/ to print the tables of, instead of filling the pages",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check that the pages are up to date, and write nothing",
    )
    options = parser.parse_args(arguments)
    pages = gather(options.results)
    if options.results:
        tables = [(name, render(t)) for page in pages.values() for name, t in page.items()]
        sys.stdout.writelines(f"### {name}\n\n{text}\n\n" for name, text in tables if text)
        return
    for page, path in PAGES.items():
        text = path.read_text("utf-8")
        filled = insert_tables(text, pages[page])
        if options.check and filled != text:
            raise SystemExit(f"{path.name} is out of date: run python -m bench.report")
        if not options.check:
            path.write_text(filled, "utf-8")
    if not options.check:
        draw(DOCS / "results.png")


if __name__ == "__main__":
    main()
