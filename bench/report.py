"""Fill the tables of README.md, docs/faster.md and docs/results.md from bench/results.

``python -m bench.report`` rewrites what stands between the pages' markers and draws
docs/results.png; ``--check`` only compares the pages. With files named, their tables go to standard
output. A table is a function of this file: measured rows in, cells under their headings out.
"""

import json
import re
import statistics
import sys
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
STEPS = {"vit_base": "ViT-B", "crammed_bert": "Crammed BERT", "gpt2_tinystories": "GPT-2"}
BLOCK = re.compile(r"(<!-- (\w+), written by python -m bench\.report -->\n)(?:\n(?:\|.*\n)+)?")


def beside(cells: pd.DataFrame, by: Sequence[pd.Series], index: int) -> pd.DataFrame:
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


def front(timed: pd.DataFrame) -> pd.DataFrame:
    """Return attention on a GPU as a user meets it, forward and backward.

    Ours is what ``attention`` runs: where a rule dispatches a case to PyTorch, PyTorch's.
    """
    rows = timed[(timed["kind"] == "attention") & (timed["stage"] == "both") & ~timed["cpu"]]
    rows = rows[(rows["mode"] == "graph") & (rows["start"] == "") & rows["case"].isin(LABELS)]
    rows = frames.standings(rows[rows["peer"].isin(OWN_KERNELS) | ~rows["ours"]])
    rows = rows[rows["median_best"].notna()]
    rows = rows.sort_values("case", key=lambda cases: cases.map([*LABELS].index), kind="stable")
    default = rows["median_default"].fillna(rows["median_best"])
    joules = rows["joules_default"].where(rows["median_default"].notna(), rows["joules_best"])
    to_library = pd.Series(map(_is_dispatched, rows.to_dict("records")), rows.index, dtype=bool)
    ours, times = rows["median"].where(~to_library, default), frames.words(1e6 * rows["median"])
    return pd.DataFrame(
        {
            "attention, forward + backward": rows["case"].map(LABELS),
            "B·H·N·D": rows["size"].str.replace(",", "").str.replace(" bfloat16", ""),
            "ours, µs": times.where(~to_library, "PyTorch's (" + times + ")"),
            "PyTorch or timm, µs": frames.words(1e6 * default),
            "× as fast": frames.words(default / ours),
            "fastest other, µs": frames.words(1e6 * rows["median_best"]) + " " + rows["peer_best"],
            "× the fastest": frames.words(rows["median_best"] / ours),
            "ours, mJ": frames.words(1e3 * rows["joules"].where(~to_library, joules)),
            "PyTorch or timm, mJ": frames.words(1e3 * joules),
        }
    )


def _is_dispatched(row: Mapping[str, Any]) -> bool:
    """Whether ``attention`` calls PyTorch's on a case of ``leaner_kernel``."""
    if row["peer"] != "leaner_kernel":
        return False
    capability = int(row["capability"].replace(".", ""))
    sizes = int(row["head_dim"]), int(row["tokens"])
    return bool(find_rule_of_library(capability, False, bool(row["causal"]), True, *sizes))


def headline(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the rows and columns of ``front`` that the first page shows."""
    table = front(timed)
    rows = table.iloc[:, 0].isin([LABELS[case] for case in HEADLINE])
    return table[rows].iloc[:, :7]


def steps(timed: pd.DataFrame) -> pd.DataFrame:
    """Return whole training steps on a GPU beside the fastest of others, for the first page."""
    rows = timed[timed["kind"].isin(["model", "language"]) & ~timed["cpu"]]
    rows = rows[(rows["stage"] == "training") & rows["row"].isin(STEPS)]
    rows = rows.assign(
        rate=rows["images_per_s"].fillna(rows["tokens_per_s"]),
        of_item=rows["joules_per_image"].fillna(rows["joules_per_token"]),
    )
    rows = frames.standings(rows[rows["peer"].str.startswith("leaner") | ~rows["ours"]])
    rows = rows[rows["rate_best"].notna()].sort_values("mode", kind="stable")
    rows = rows.sort_values("row", key=lambda names: names.map([*STEPS].index), kind="stable")
    peer = rows["peer_best"].str.removesuffix("_compiled")
    return pd.DataFrame(
        {
            "training step": rows["row"].map(STEPS) + ", " + rows["variant"],
            "called": rows["mode"],
            "ours, a second": frames.words(rows["rate"]),
            "fastest other": frames.words(rows["rate_best"]) + " " + peer,
            "times as fast": frames.words(rows["rate"] / rows["rate_best"]),
            "ours, peak GB": frames.words(1e-9 * rows["peak_memory_bytes"]),
            "other, peak GB": frames.words(1e-9 * rows["peak_memory_bytes_best"]),
            "ours, mJ for each": frames.words(1e3 * rows["of_item"]),
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
        changed = " with changes" if commit["dirty"] else ""
        changed += f" ({commit['note']})" if "note" in commit else ""
        rows.append(
            {
                "file": data["file"],
                "date": data["datetime"][:10],
                "commit": (commit["id"] or "none")[:12] + changed,
                "source": commit["source"],
                "hardware": ", ".join(hardware),
                "versions": ", ".join(f"{k} {v}" for k, v in info["versions"].items() if v),
            }
        )
    return pd.DataFrame(rows, columns=["file", "date", "commit", "source", "hardware", "versions"])


def attention(standing: pd.DataFrame) -> pd.DataFrame:
    """Return our best row of each pass of attention, from q, k and v or from one projection."""
    rows = standing[standing["kind"] == "attention"]
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
            "× default": rows["times_default"],
            "× best peer": rows["versus"],
        }
    )
    return beside(cells, [rows["stage"]], 5)


def kappa(standing: pd.DataFrame) -> pd.DataFrame:
    """Return condition numbers beside libraries' singular values."""
    rows = standing[standing["kind"] == "kappa"]
    return pd.DataFrame(
        {
            "on": rows["on"],
            "case": rows["case"],
            "size": rows["size"],
            "called": rows["mode"],
            "ms": 1e3 * rows["median"],
            "IQR, ms": 1e3 * rows["iqr"],
            "× svdvals": rows["times_default"],
            "× best library": rows["versus"],
            "error at 10³": rows["error_mild"],
            "at 10⁶": rows["error_hard"],
        }
    )


def monitor(standing: pd.DataFrame) -> pd.DataFrame:
    """Return training steps with and without the monitor."""
    rows = standing[standing["kind"] == "step"]
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
    return beside(cells, [rows["stage"]], 3)


def models(standing: pd.DataFrame) -> pd.DataFrame:
    """Return training and inference of rows of the paper beside timm's and transformers'."""
    rows = standing[standing["kind"].isin(["model", "language"])]
    cells = pd.DataFrame(
        {
            "on": rows["on"],
            "row": rows["row"],
            "batch": rows["batch"],
            "called": rows["mode"],
            "a second": rows["images_per_s"].fillna(rows["tokens_per_s"]),
            "IQR, %": 100 * rows["iqr"] / rows["median"],
            "× best peer": rows["versus"],
            "kept, kB": rows["own"] / 1e3,
            "mJ": 1e3 * rows["joules_per_image"].fillna(rows["joules_per_token"]),
            "peak, GB": rows["peak_memory_bytes"] / 1e9,
        }
    )
    return beside(cells, [rows["variant"], rows["stage"]], 4)


def lean(timed: pd.DataFrame) -> pd.DataFrame:
    """Return lean over original of each row of the paper; the small ones of a CPU are not of it."""
    rows = timed[(timed["variant"] != "") & ~timed["case"].str.startswith("cpu_")]
    rows = rows[rows["stage"].isin(["training", ""])]
    ratios = {}
    for name, (column, peer) in RATIOS.items():
        here = rows[rows["peer"] == peer] if peer else rows
        sides = here.pivot_table(column, ["on", "row"], "variant", sort=False)
        if {"lean", "original"} <= {*sides.columns}:
            ratios[name] = sides["lean"] / sides["original"]
    table = pd.concat(ratios, axis="columns").reset_index() if ratios else pd.DataFrame()
    return table.reindex(columns=["on", "row", *RATIOS])


def unmeasured(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return by status and reason which peers were not measured, what was wrong first."""
    rows = [entry for data in results for entry in data.get("unmeasured", ())]
    frame = pd.DataFrame(rows, columns=["status", "reason", "peer", "case"]).drop_duplicates()
    frame["status"] = frame["status"].replace("wrong", "WRONG")  # which also sorts first
    cases = frame.groupby(["status", "reason", "peer"], sort=False)["case"].agg(list).reset_index()
    cases["where"] = [
        f"{peer} in {', '.join(names) if len(names) < 3 or status == 'WRONG' else len(names)}"
        for status, peer, names in zip(cases["status"], cases["peer"], cases["case"])
    ]
    causes = cases.groupby(["status", "reason"], sort=False)["where"].agg("; ".join).reset_index()
    return causes.sort_values("status", kind="stable").rename(columns={"where": "peers and cases"})[
        ["status", "peers and cases", "reason"]
    ]


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
    rows = rows[rows["stage"].isin(["forward", "backward"])]
    return rows.assign(gpu=rows["on"].str.removeprefix("NVIDIA "))


def predicted(timed: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return predictions of what is not measured, of the cases of the first page."""
    by = ["gpu", "case", "stage"]
    measured = pd.MultiIndex.from_frame(own_kernels(timed)[by])
    left = rows[rows["case"].isin(LABELS) & ~pd.MultiIndex.from_frame(rows[by]).isin(measured)]
    times = frames.words(1e6 * left["predicted"]).replace("", "unknown")
    cells = pd.DataFrame({"case": left["case"], "": times})
    return beside(cells, [left["gpu"], left["stage"]], 1)


def gather(paths: Sequence[Path] = ()) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the tables of each page, of these files or else of bench/results.

    Raises:
        SystemExit: a file cannot be read, is no result, or none has a measured row, in one line.
    """
    results = [frames.read(path) for path in paths or sorted(RESULTS.glob("20*.json"))]
    timed = frames.timed(results)
    if timed.empty:
        raise SystemExit("no measured rows in " + ", ".join(map(str, paths)))
    standing = frames.standings(timed)
    tables = {
        "runs": runs(results),
        "attention": attention(standing),
        "kappa": kappa(standing),
        "monitor": monitor(standing),
        "models": models(standing),
        "lean": lean(timed),
        "unmeasured": unmeasured(results),
    }
    pages = {
        "README": {"headline": headline(timed)},
        "faster": {"steps": steps(timed), "front": front(timed)},
        "results": tables,
    }
    if not paths:
        measured = json.loads((RESULTS / "training-cpu.json").read_text("utf-8"))["rows"]
        tables |= {
            "training": training(measured),
            "predicted": predicted(timed, predictions("predictions")),
        }
    return pages


def render(table: pd.DataFrame) -> str:
    """Return a table as Markdown without the columns that no row has, nothing without a row."""
    if table.empty:
        return ""
    return frames.markdown(table.replace("", None).dropna(axis="columns", how="all"))


def fill(text: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return a page with the table below each marker rendered anew."""

    def block(marker: re.Match[str]) -> str:
        table = render(tables[marker[2]])
        return f"{marker[1]}\n{table}\n" if table else marker[1]

    return BLOCK.sub(block, text)


def draw(path: Path) -> None:
    """Draw how many times as fast as PyTorch's default attention is, forward and backward."""
    results = [frames.read(result) for result in sorted(RESULTS.glob("20*.json"))]
    standing = frames.standings(frames.timed(results))
    rows = standing[(standing["kind"] == "attention") & (standing["stage"] == "both")]
    rows = rows[(rows["mode"] == "graph") & ~rows["cpu"]].dropna(subset="times_default")
    names = rows["case"] + rows["start"].map(lambda start: f", {start}" if start else "")
    bars = rows.set_axis(names + " (" + rows["on"] + ")")["times_default"].sort_values()
    colors = ["tab:orange" if times >= 1 else "tab:red" for times in bars]
    # From 1: the axis is logarithmic.
    axes = (bars - 1).plot.barh(figsize=(8, 1 + 0.25 * len(bars)), color=colors, left=1)
    axes.axvline(1, color="black", lw=1)
    axes.bar_label(axes.containers[0], [f" {frames.number(times)}" for times in bars])
    label = "times as fast as PyTorch or timm, forward and backward; red: our kernel loses"
    axes.set(xscale="log", xlim=(0.3, 2 * bars.max()), ylabel="", xlabel=label)
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
        filled = fill(text, pages[page])
        if options.check and filled != text:
            raise SystemExit(f"{path.name} is out of date: run python -m bench.report")
        if not options.check:
            path.write_text(filled, "utf-8")
    if not options.check:
        draw(DOCS / "results.png")


if __name__ == "__main__":
    main()
