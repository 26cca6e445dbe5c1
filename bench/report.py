"""Fill the tables of docs/results.md, docs/compatibility.md and docs/resources.md from JSON.

``python -m bench.report`` reads bench/results, rewrites what stands between the pages' markers and
draws docs/results.png; ``--check`` only compares the pages. With files named, their tables go to
standard output. bench/tables.toml lists the tables and the goals.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench import compatibility, frames, predict

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "bench" / "results", ROOT / "docs"
DECLARED = tomllib.loads((ROOT / "bench" / "tables.toml").read_text("utf-8"))
PAGES = {
    "README": ROOT / "README.md",
    **{name: ROOT / "docs" / f"{name}.md" for name in ("results", "compatibility", "resources")},
}
COMMITTED = "20*.json", "compatibility-*.json", "peers-*.json"
TRAINED = "demo-*.json", "language-*.json", "listops-*.json"
# Lean over original: of a column of ``frames.timed``, and of which peer's.
RATIOS = {
    "time": ("median", "leaner"),
    "compiled": ("median", "leaner_compiled"),
    "kept": ("own", "leaner"),
    "peak": ("peak_memory_bytes", "leaner"),
    "one_step": ("peak_memory_bytes", "one_step"),
    "timm": ("peak_memory_bytes", "timm"),
    "transformers": ("median", "transformers"),
    "printed": ("printed_memory_gb", ""),
}
BLOCK = re.compile(r"(<!-- ([\w ]+), written by python -m bench\.report -->\n)(?:\n(?:\|.*\n)+)?")
Frames = dict[str, pd.DataFrame]


def gather(paths: Sequence[Path] = ()) -> Frames:
    """Return every frame that a table may name, of these files or else of bench/results.

    Raises:
        SystemExit: a file cannot be read or is no result, in one line.
    """
    committed = not paths
    paths = paths or sorted(path for form in COMMITTED for path in RESULTS.glob(form))
    results = [frames.read(path) for path in paths]
    timed = frames.timed(results)
    standing = frames.standings(timed)
    standing["best"] = frames.words(1e6 * standing["median"]) + " " + standing["peer"]
    kept = frames.standings(timed[timed["kind"] == "memory"], "own")
    kept["kept"] = frames.words(kept["own"]) + " " + kept["peer"]
    standing = standing.merge(
        kept[["on", "case", "kept", "versus", "peak_memory_bytes"]],
        on=["on", "case"],
        how="left",
        suffixes=("", "_kept"),
    )
    facts = compatibility.facts(results)
    predicted = predict.frame(predict.predictions() if predict.PREDICTIONS.exists() else [])
    found = {
        "timed": timed,
        "standing": standing,
        "front": frames.front(timed),
        "steps": frames.steps(timed),
        "kept": kept,
        "lean": frames.lean_over_original(timed, RATIOS),
        "differs": _once(timed.dropna(subset="differs"), ["peer"], "differs", "; "),
        "kernels": _kernels(timed[~timed["cpu"]]),
        "runs": frames.runs([data for data in results if "benchmarks" in data]),
        "tests": frames.runs([data for data in results if "benchmarks" not in data]),
        "unmeasured": frames.unmeasured(results),
        "equal": compatibility.equal(facts),
        "refused": compatibility.refused(facts),
        "speed": compatibility.speed(timed),
        "peers": compatibility.peers(results),
        "fit": _fit(timed, predicted),
    }
    if committed:
        found |= {"predicted": _cells(timed, predicted), "trained": _trained(), **_others()}
    return found | {"goals": pd.DataFrame(_goals(found))}


def _kernels(timed: pd.DataFrame) -> pd.DataFrame:
    rows = timed.dropna(subset="kernels")
    names = [", ".join(f"`{name}`" for name in names) for names in rows["kernels"]]
    return _once(rows.assign(kernels=names), ["on", "peer", "kernels"], "case", ", ")


def _once(rows: pd.DataFrame, by: list[str], column: str, separator: str) -> pd.DataFrame:
    """Join what a column holds in each group, each word once."""
    groups = rows.groupby(by, sort=False)[column]
    return groups.agg(lambda words: separator.join(dict.fromkeys(words))).reset_index()


def _fit(timed: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Join what our kernels took on a GPU with what was predicted for it.

    Where the machine code that ran was predicted too (``predict.calibration``), that counts, with
    what the model made of it before it was recalibrated.
    """
    by = ["gpu", "case", "stage"]
    before, now = (predict.calibration(path) for path in (predict.BEFORE, predict.CALIBRATION))
    now = now.merge(before[[*by, "predicted"]], on=by, how="left", suffixes=("", "_before"))
    measured = predict.own_kernels(timed)[[*by, "triton", "median"]]
    same = measured.merge(now, on=[*by, "triton"])
    newest = measured.drop(columns="triton").merge(predicted, on=by)
    rows = pd.concat([same, newest]).drop_duplicates(by, ignore_index=True)
    return rows.assign(
        off=rows["predicted"] / (1e6 * rows["median"]) - 1,
        off_before=rows["predicted_before"] / (1e6 * rows["median"]) - 1,
    )


def _cells(timed: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Return predictions of what is not measured, a cell for each.

    In brackets is what FlashAttention 2 takes as a multiple. Only its cases are shown.
    """
    by = ["gpu", "case", "stage"]
    measured = pd.MultiIndex.from_frame(predict.own_kernels(timed)[by])
    compared = predicted.loc[predicted["times_peer"] > 0, "case"]
    left = predicted[
        predicted["case"].isin(compared) & ~pd.MultiIndex.from_frame(predicted[by]).isin(measured)
    ]
    times, ratios = (frames.words(left[name]) for name in ("predicted", "times_peer"))
    cells = times.replace("", predict.UNKNOWN) + (" (" + ratios + ")").replace(" ()", "")
    return left.assign(cell=cells)


def _trained() -> pd.DataFrame:
    """Return the summaries of training runs, beside the accuracy that the paper prints."""
    from models import papers

    rows = []
    for path in sorted(path for form in TRAINED for path in RESULTS.glob(form)):
        data = json.loads(path.read_text("utf-8"))
        for name, run in {path.name: data}.items() if "depth" in data else data.items():
            row = papers.ROWS.get(("nystromformer_listops", path.stem.removeprefix("listops-")))
            seconds = run.get("seconds_of_each", [None])
            paper = row and row.printed["accuracy"]
            rows.append({**run, "file": name, "paper": paper, "slowest": max(seconds)})
    return pd.DataFrame(rows)


def _others() -> Frames:
    """Return frames of committed files in formats of their own."""
    files = "kappa_accuracy", "resources"
    accuracy, table = (json.loads((RESULTS / f"{name}.json").read_text()) for name in files)
    spectra = pd.DataFrame.from_dict(accuracy["kind"] | accuracy["all"], "index")
    measured = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("training-*.json"))]
    cores = "{model}, {cores} cores".format
    rows = [
        {"on": f"CPU: {cores(**result['machine']['cpu'])}", "commit": result["commit"]["id"], **row}
        for result in measured
        for row in result["training"]
    ]
    return {
        "training": pd.DataFrame(rows),
        "accuracy": spectra.rename_axis("spectrum").reset_index(),
        "resources": frames.resources(table["rows"]),
    }


def _goals(found: Frames) -> Iterator[dict[str, Any]]:
    """Yield each goal that applies to what was measured, and whether it is met."""
    for goal in DECLARED["goal"]:
        frame = found.get(goal.get("frame", "standing"), pd.DataFrame())
        at_least = "least" in goal
        bound = goal["least" if at_least else "most"]
        if frame.empty:
            continue
        rows = _with(frame, goal["rows"], goal["value"], bound).query(goal["rows"], engine="python")
        rows = rows.assign(
            on=rows.get("on", ""),
            goal=[goal["text"].format(**row) for row in rows.to_dict("records")],
            value=rows.eval(goal["value"], engine="python"),
            bound=rows.eval(bound, engine="python"),
        ).dropna(subset=["value", "bound"])
        best = rows.sort_values(["value", "bound"], ascending=not at_least, kind="stable")
        best = best.drop_duplicates(["on", "goal"]).sort_index()
        for row in best.itertuples():
            met = row.value >= row.bound if at_least else row.value <= row.bound
            verdict = "met" if met else "**missed**"
            measured = frames.number(row.value)
            yield {"on": row.on, "goal": row.goal, "measured": measured, "verdict": verdict}


def _with(frame: pd.DataFrame, *expressions: str) -> pd.DataFrame:
    """Add the columns that expressions name and no row has."""
    names = set(re.findall(r"(?<![.\w'])[a-zA-Z_]\w*", " ".join(expressions)))
    known = {"and", "or", "not", "in"} | {*frame.columns}
    return frame.assign(**dict.fromkeys(sorted(names - known), float("nan")))


def render(table: Mapping[str, Any], found: Frames, more: str = "") -> str:
    """Return a table of bench/tables.toml as Markdown, nothing without a row.

    ``more`` narrows its rows further.
    """
    frame = found.get(table["frame"], pd.DataFrame())
    columns = dict(column.partition(": ")[::2] for column in table["columns"])
    expressions = {heading: expression or heading for heading, expression in columns.items()}
    for rows in filter(None, (table.get("rows"), more)):
        frame = frame if frame.empty else frame.query(rows, engine="python")
    if frame.empty:
        return ""
    frame = _with(frame, *expressions.values())
    cells = pd.DataFrame(
        {
            heading: frame[e] if e in frame else frame.eval(e, engine="python")
            for heading, e in expressions.items()
        }
    )
    if beside := table.get("beside"):
        index = [*expressions][: table["index"]]
        cells[index] = cells[index].astype(object).fillna("")
        cells[beside] = frame[beside].to_numpy()
        cells = cells.pivot_table(index=index, columns=beside, sort=False, aggfunc="first")
        # All of one value of ``beside`` together.
        order = list(dict.fromkeys(key[1:] for key in cells.columns))
        cells = cells[sorted(cells.columns, key=lambda key: order.index(key[1:]))]
        cells.columns = [
            " ".join((*key[1:], key[0])).removesuffix(" cell") for key in cells.columns
        ]
        cells = cells.reset_index()
    return frames.markdown(cells.replace("", None).dropna(axis="columns", how="all"))


def fill(text: str, tables: Mapping[str, Mapping[str, Any]], found: Frames) -> str:
    """Return a page with the table below each marker rendered anew.

    A second word of a marker names the library of the rows.
    """

    def block(marker: re.Match[str]) -> str:
        name, _, library = marker[2].partition(" ")
        more = f"library == '{library}'" if library else ""
        table = render(tables[name], found, more)
        return f"{marker[1]}\n{table}\n" if table else marker[1]

    return BLOCK.sub(block, text)


def draw(standing: pd.DataFrame, path: Path) -> None:
    """Draw how many times as fast as PyTorch's default attention is, forward and backward."""
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
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of bench/ or of tests")
    parser.add_argument("--check", action="store_true", help="compare the pages, write nothing")
    options = parser.parse_args(arguments)
    found = gather(options.results)
    if options.results:
        tables = [(n, render(t, found)) for page in PAGES for n, t in DECLARED[page].items()]
        if not any(len(found[name]) for name in ("timed", "equal", "refused", "peers")):
            raise SystemExit("no measured row in " + ", ".join(map(str, options.results)))
        sys.stdout.writelines(f"### {name}\n\n{text}\n\n" for name, text in tables if text)
        return
    for page, path in PAGES.items():
        text = path.read_text("utf-8")
        filled = fill(text, DECLARED[page], found)
        if options.check and filled != text:
            raise SystemExit(f"{path.name} is out of date: run python -m bench.report")
        if not options.check:
            path.write_text(filled, "utf-8")
    if not options.check:
        draw(found["standing"], DOCS / "results.png")


if __name__ == "__main__":
    main()
