"""The JSON files of bench/results as pandas data frames, and data frames as Markdown."""

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from leaner_kernels.ops.attention.dispatch import find_rule_of_library

RESULTS = Path(__file__).parent / "results"
# What is compared with each other: peers of a case in a stage that are called alike, and that start
# alike: from one projection, or from q, k and v apart.
KEY = ["on", "kind", "case", "start", "stage", "mode"]
# What everybody has without us, the first of these that was measured.
DEFAULTS = (
    *("timm", "timm_compiled", "sdpa", "sdpa_packed", "sdpa_padded", "svdvals", "logits_float32"),
    *("transformers", "transformers_compiled"),
)
RIGHT = 1e-3  # the error of κ at 10⁶ above which a library's time is compared with nothing
# What only some benchmarks record.
OPTIONAL = (
    *("ours", "kernels", "differs", "error_hard", "own", "peak_memory_bytes", "joules"),
    *("images_per_s", "tokens_per_s", "joules_per_image", "joules_per_token"),
    "printed_memory_gb",
)
TEXT = [*KEY, "peer", "size", "op", "row", "variant", "library", "triton"]
# Of the first page, in its order.
LABELS = {
    "vit_base": "ViT-B, 16 heads",
    "vit_large": "ViT-L, 30 heads",
    "bert": "Crammed BERT",
    "gpt2_64": "GPT-2, 64 tokens",
    "gpt2_512": "GPT-2, 512 tokens",
    "davit_stage1": "DaViT windows",
    "tnt": "TNT, inner",
    "navit": "NaViT, varlen",
    "text": "texts, varlen",
    "xcit_m": "XCiT-M",
    "volo_d3_outlook": "VOLO-d3, outlook",
    "davit_channel3": "DaViT channels",
    "vit_384": "ViT-B at 384 px",
    "long_1024": "1,024 tokens",
    "lra_2048": "2,048 tokens",
}
STEPS = {"vit_base": "ViT-B", "crammed_bert": "Crammed BERT", "gpt2_tinystories": "GPT-2"}
# Beside what a case's size says.
NO_SIZE = "device", "op", "row", "variant", "same", "library", "family", "padded", "pairs"


def read(path: Path) -> dict[str, Any]:
    """Return a result of bench/ or of tests that record, as JSON has it.

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
            raise SystemExit(f"{path}: not to be published, failed: {', '.join(data['failed'])}")
        if not {"benchmarks", "compatibility", "peers"} & data.keys():
            raise KeyError("benchmarks")
        _ = data["datetime"], data["commit_info"]["source"]
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
        for entry in data.get("benchmarks", ()):
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
    kept = extra.get("kept_bytes")
    kind = extra.get("kind", "memory" if kept else "attention")
    row = facts | {"median": stats.get("median"), "iqr": stats.get("iqr")} | extra
    row |= {"on": data["names"][facts["device"]], "kind": kind, "file": data["file"]}
    row |= {"capability": (data["machine_info"]["gpu"] or {}).get("compute_capability")}
    packed = "rows" in facts and extra.get("layout") == "packed"  # softmax attention alone has both
    row["start"] = "packed" if packed else ""
    row |= {"triton": data["machine_info"]["versions"].get("triton")}
    stage = {"step": peer, "language": "training"}.get(kind, "")
    row["stage"] = extra.get("stage", extra.get("direction", stage))
    compiled = "compiled" if peer.endswith("_compiled") else "eager"
    row["mode"] = compiled if kind in ("model", "language") else extra.get("mode", "")
    if isinstance(kept, dict):
        row |= {part: size / extra["tokens"] for part, size in kept.items()}
    elif kept is not None:
        row["own"] = kept / facts["batch"] / facts.get("sequence", 1) / (1 + facts.get("pairs", 0))
    return row | {"size": size(facts)}


def size(facts: dict[str, Any]) -> str:
    """Return the size of a case: B·H·N·D of attention, otherwise whatever it is described by.

    N is 1×197 where one query meets 197 keys, and 49…256 where sequences differ in length.
    """
    if "head_dim" in facts and "lengths" in facts:
        tokens = str(facts["tokens"])
        if facts["lengths"]:
            tokens = f"{min(facts['lengths'])}…{tokens}"
        elif facts["rows"] != facts["tokens"]:
            tokens = f"{facts['rows']}×{tokens}"
        kinds = [kind for kind in ("causal", "padded") if facts[kind]]
        heads = f"{facts['batch']}·{facts['heads']}·{tokens}·{facts['head_dim']}"
        return " ".join([heads, facts["dtype"], *kinds])
    if "size" in facts:
        return f"{facts['size']}, {facts['dtype']}"
    parts = {name: value for name, value in facts.items() if name not in (*NO_SIZE, "dtype")}
    words = (f"{name} {value}".replace("_", " ") for name, value in parts.items())
    return ", ".join([*words, facts["dtype"]])


def standings(frame: pd.DataFrame, by: str = "median") -> pd.DataFrame:
    """Return our best row of every comparison, and how it stands against the others.

    Args:
        frame: of ``timed``.
        by: the column of which less is better.

    Returns:
        ``times_default`` and ``times_best`` say how many times less it is than what everybody has,
        and than the best row that is not ours, which ``other`` names.
    """
    rows = frame[frame[by].notna()].sort_values(by, kind="stable")
    right = rows["error_hard"].isna() | (rows["error_hard"] <= RIGHT)
    default = rows[rows["peer"].isin(DEFAULTS)].sort_values(
        "peer", key=lambda peers: peers.map(DEFAULTS.index), kind="stable"
    )
    found = rows[rows["ours"]].drop_duplicates(KEY)
    for some, name in ((default, "default"), (rows[~rows["ours"] & right], "best")):
        others = some.drop_duplicates(KEY)[[*KEY, by, "peer"]]
        others = others.rename(columns={by: f"{by}_{name}", "peer": f"peer_{name}"})
        found = found.merge(others, on=KEY, how="left")
        found[f"times_{name}"] = found[f"{by}_{name}"] / found[by].where(found[by] > 0)
    order = frame.drop_duplicates(KEY)[KEY]
    found["other"] = found["peer_best"].astype(object).fillna("").astype(str)
    found["versus"] = (words(found["times_best"]) + " " + found["other"]).str.strip()
    return order.merge(found, on=KEY)


def front(timed: pd.DataFrame) -> pd.DataFrame:
    """Return attention on a GPU as a user meets it, forward and backward, for the first page.

    Ours is what ``attention`` runs: where a rule dispatches a case to PyTorch, PyTorch's.
    """
    rows = timed[(timed["kind"] == "attention") & (timed["stage"] == "both") & ~timed["cpu"]]
    rows = rows[(rows["mode"] == "graph") & (rows["start"] == "")]
    found = []
    for (on, case), here in rows.groupby(["on", "case"], sort=False):
        kernels = here[here["peer"].isin(["leaner_kernel", "leaner_varlen", "leaner"])]
        ours, others = (rows.nsmallest(1, "median") for rows in (kernels, here[~here["ours"]]))
        if case not in LABELS or ours.empty or others.empty:
            continue
        mine, best = ours.iloc[0], others.iloc[0]
        dispatched = mine["peer"] == "leaner_kernel" and find_rule_of_library(
            int(mine["capability"].replace(".", "")),
            *(False, bool(mine["causal"]), True, int(mine["head_dim"]), int(mine["tokens"])),
        )
        size = mine["size"].replace(", bfloat16", "").replace(" bfloat16", "")
        line = {"on": on, "label": LABELS[case], "size": size, "other": best["peer"]}
        for name, row in (("ours", mine), ("best", best)):
            line |= {name: number(1e6 * row["median"]), f"{name}_mj": scaled(1e3, row["joules"])}
        line["times"] = number(best["median"] / mine["median"])
        if dispatched:
            line |= {"ours": f"PyTorch's ({line['ours']})", "times": f"1 ({line['times']})"}
            line["ours_mj"] = line["best_mj"]
        found.append(line)
    order = list(LABELS.values())
    return pd.DataFrame(sorted(found, key=lambda line: order.index(line["label"])))


def steps(timed: pd.DataFrame) -> pd.DataFrame:
    """Return whole training steps on a GPU beside the fastest of others, for the first page."""
    rows = timed[timed["kind"].isin(["model", "language"]) & ~timed["cpu"]]
    rows = rows[(rows["stage"] == "training") & rows["row"].isin(STEPS)]
    rows = rows.assign(rate=rows["images_per_s"].fillna(rows["tokens_per_s"]))
    found = []
    for (on, row, mode), here in rows.groupby(["on", "row", "mode"], sort=False):
        for variant in ("original", "lean"):
            sides = here[here["variant"] == variant]
            ours = sides[sides["peer"].isin(["leaner", "leaner_compiled"])]
            others = sides[~sides["ours"]].nlargest(1, "rate")
            if ours.empty or others.empty:
                continue
            mine, best = ours.iloc[0], others.iloc[0]
            line = {"on": on, "label": f"{STEPS[row]}, {variant}", "mode": mode}
            line |= {"rate": number(mine["rate"]), "peak": scaled(1e-9, mine["peak_memory_bytes"])}
            energy = mine[["joules_per_image", "joules_per_token"]].dropna()
            line["mj"] = scaled(1e3, energy.iloc[0] if len(energy) else None)
            line |= {"best": f"{number(best['rate'])} {best['peer'].removesuffix('_compiled')}"}
            line |= {"times": number(mine["rate"] / best["rate"])}
            line |= {"best_peak": scaled(1e-9, best["peak_memory_bytes"])}
            found.append(line)
    return pd.DataFrame(found)


def lean_over_original(frame: pd.DataFrame, columns: dict[str, tuple[str, str]]) -> pd.DataFrame:
    """Return lean over original of each row of the paper; the small ones of a CPU are not of it.

    Args:
        frame: of ``timed``.
        columns: by the name of a ratio the column that it is of, and the peer.
    """
    rows = frame[(frame["variant"] != "") & ~frame["case"].str.startswith("cpu_")]
    rows = rows[rows["stage"].isin(["training", ""])]
    found = {}
    for name, (column, peer) in columns.items():
        here = rows[rows["peer"] == peer] if peer else rows
        sides = here.pivot_table(column, ["on", "row"], "variant", sort=False)
        if {"lean", "original"} <= {*sides.columns}:
            found[name] = sides["lean"] / sides["original"]
    ratios = pd.concat(found, axis="columns").reset_index() if found else pd.DataFrame()
    return ratios.reindex(columns=["on", "row", *columns])


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
    found = cases.groupby(["status", "reason"], sort=False)["where"].agg("; ".join).reset_index()
    return found.sort_values("status", kind="stable")


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


def resources(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return what the kernels of a name take on an architecture, at the worst of their launches."""
    frame = pd.DataFrame(rows)
    frame["kernels"] = frame["kernel"].str.strip("_").str.split("_").str[0]
    frame["pass"] = frame["kernel"].str.contains("bwd").map({True: "backward", False: "forward"})
    frame["gpu"] = "sm_" + frame["capability"].astype(str)
    by = frame.groupby(["kernels", "pass", "gpu"], sort=False)
    found = by.agg(registers=("registers", "max"), fewest=("programs_per_sm", "min"))
    found["spills"] = by["spills"].max().map(lambda spills: f", {spills} s" if spills else "")
    cells = found["registers"].astype(str) + " / " + found["fewest"].astype(str) + found["spills"]
    return cells.rename("cell").reset_index()


def training(content: dict[str, Any]) -> pd.DataFrame:
    """Return what ``bench.training`` measured, with the median ratio and its range."""
    rows = content["rows"]
    frame = pd.DataFrame(rows)
    frame["ratio"] = [statistics.median(row["ratios"]) if row["ratios"] else None for row in rows]
    frame["range"] = [
        f"{number(min(row['ratios']))} to {number(max(row['ratios']))}" if row["ratios"] else ""
        for row in rows
    ]
    return frame.drop(columns="ratios")


def number(value: Any) -> str:
    """Format a number with three significant digits or more, nothing without one."""
    if isinstance(value, str):
        return value
    if value is None or pd.isna(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def scaled(factor: float, value: Any) -> str:
    """Format a number times a factor, nothing without one."""
    return "" if pd.isna(value) else number(factor * value)


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
        colalign=["right" if each else "left" for each in right],
    )
    # Without padding: a cell that grows changes its own line alone.
    text = re.sub(r" {2,}(?=\|)|(?<=\|) {2,}", " ", text)
    return re.sub(r"(:?)-{3,}(:?)", r"\1--\2", text)
