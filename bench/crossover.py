"""From how many tokens on is a library faster? Written where ``attention`` looks it up.

    python -m bench.crossover bench/results/20*.json

derives ``leaner_kernels/ops/attention/library.toml`` from the GPU rows of forward and backward
together: for each compute capability, head dimension and causal or not, the least N from which on,
at every N measured, a backend of PyTorch or flash-attn beats our kernel by the margin. Of several
rules that fit a call, the one with the largest ``min_tokens`` holds. Nothing is written without GPU
rows to compare, and no rule where no library wins. Rules for what was not measured stay.
"""

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from bench import frames

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "leaner_kernels" / "ops" / "attention" / "library.toml"
OURS = "leaner_kernel"  # not leaner_attention, which follows the rules that are here derived
BACKENDS = {"sdpa_cudnn": "cudnn", "sdpa_flash": "flash", "flash_attn_2": "flash_attn"}
MARGIN = 1.05  # as many times faster, at the least: a tie is not worth another code path
HEAD = """\
# Where a library is faster than the kernels of this folder, forward and backward together.
# Written by `python -m bench.crossover`: a rule names the measurement that it rests on, or is
# "predicted" and not measured.
"""


KEY = ["capability", "head_dim", "causal"]
COLUMNS = [*KEY, "min_tokens", "backend", "source"]


def compare(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Gather the graph rows of whole self-attention in half precision; the newest run counts.

    Args:
        results: of ``frames.read``.

    Returns:
        A row for each case with its ``KEY``, ``tokens`` and file, and by backend its seconds as a
        part of ours, infinite where it was not measured.
    """
    rows = pd.concat([frames.timed([data]) for data in sorted(results, key=itemgetter("datetime"))])
    rows = rows[(rows["kind"] == "attention") & (rows["stage"] == "both")]
    rows = rows[(rows["mode"] == "graph") & (rows["dtype"] != "float32")]
    of_case = [*KEY, "tokens", "case", "file"]
    rows = rows.reindex(columns=[*of_case, "rows", "padded", "lengths", "peer", "median"])
    rows = rows[rows["rows"] == rows["tokens"]].dropna(subset="capability")
    rows = rows[~rows["padded"].astype(bool) & ~rows["lengths"].astype(bool)]
    rows["capability"] = rows["capability"].map(lambda version: int(version.replace(".", "")))
    rows[["head_dim", "tokens"]] = rows[["head_dim", "tokens"]].astype(int)
    wide = rows.pivot(index=of_case, columns="peer", values="median")
    wide = wide.reindex(columns=[OURS, *BACKENDS]).dropna(subset=OURS).rename(columns=BACKENDS)
    parts = wide.div(wide.pop(OURS), axis="index").fillna(math.inf).reset_index()
    newest = {data["file"]: data["datetime"] for data in results}
    parts = parts.sort_values("file", key=lambda files: files.map(newest), kind="stable")
    return parts.drop_duplicates([*KEY, "tokens", "case"], keep="last")


def rules(compared: pd.DataFrame) -> pd.DataFrame:
    """Walk down from the most tokens for as long as some backend wins every case."""
    found = []
    for key, cases in compared.groupby(KEY):
        worst = cases.groupby("tokens")[[*BACKENDS.values()]].max().sort_index(ascending=False)
        wins = (worst.min(axis=1) * MARGIN <= 1).cumprod().astype(bool)
        best = worst.idxmin(axis=1)[wins]
        for tokens, backend in best[best != best.shift(-1)].items():
            source = cases[cases["tokens"] == tokens]["file"].iloc[0]
            found.append((*key, tokens, backend, f"bench/results/{source}"))
    return pd.DataFrame(found, columns=COLUMNS)


def toml(found: pd.DataFrame) -> str:
    """Render the rules."""
    rules = found.to_dict("records")
    tables = ("".join(f"{k} = {json.dumps(v)}\n" for k, v in rule.items()) for rule in rules)
    return "\n".join([HEAD, *(f"[[rule]]\n{table}" for table in tables)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files, write the rules."""
    parser = argparse.ArgumentParser(prog="python -m bench.crossover", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files written by bench/")
    parser.add_argument("-o", "--output", type=Path, default=LIBRARY)
    options = parser.parse_args(arguments)
    compared = compare([frames.read(path) for path in options.results])
    if compared.empty:
        raise SystemExit(f"no {OURS} measured on a GPU, forward and backward: nothing is written")
    present = tomllib.loads(options.output.read_text("utf-8")) if options.output.exists() else {}
    kept = pd.DataFrame(present.get("rule", []), columns=COLUMNS)
    measured = pd.MultiIndex.from_frame(compared[KEY])
    kept = kept[~pd.MultiIndex.from_frame(kept[KEY]).isin(measured)]
    found = pd.concat([rules(compared), kept]).sort_values(COLUMNS)
    options.output.write_text(toml(found), "utf-8")
    sys.stdout.write(f"{options.output}: {len(found)} rules\n")


if __name__ == "__main__":
    main()
