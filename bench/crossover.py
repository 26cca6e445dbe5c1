"""Write the rules that dispatch `attention` to PyTorch where it was measured to be faster.

    python -m bench.crossover FILE...    # of bench.crossover_sweep, all of one GPU

replaces the rules of that GPU in ``leaner_kernels/ops/attention/library.toml``: for dense and
varlen calls, causal or not, alone or with a backward, and every head dimension, the runs of
measured lengths at which PyTorch wins by more than the spread between two runs. A run that reaches
the longest has no end. Between a length that PyTorch wins and the next that it loses, ours is
called.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "leaner_kernels" / "ops" / "attention" / "library.toml"
SPREAD = 1.03  # two runs of one kernel differ by as much


def read(paths: Sequence[Path]) -> tuple[int, list[dict[str, Any]]]:
    """Return the capability of the GPU and the rows of all files.

    Raises:
        SystemExit: a file cannot be read, is no sweep, or is of another GPU, in one line.
    """
    rows, gpus = [], set()
    for path in paths:
        try:
            table = json.loads(path.read_text("utf-8"))
            gpus.add(table["machine_info"]["gpu"]["compute_capability"])
            rows += table["rows"]
        except OSError as error:
            raise SystemExit(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not written by bench.crossover_sweep ({error!r})") from None
    if len(gpus) > 1:
        raise SystemExit(f"all files must be of one GPU, got compute capabilities {sorted(gpus)}")
    return int(gpus.pop().replace(".", "")), rows


def ranges(times: dict[int, float]) -> list[list[int]]:
    """Return [first, last] of each run of lengths that PyTorch wins; 0 is no end.

    Args:
        times: how many times as long PyTorch takes as ours, by length.
    """
    lengths = sorted(times)
    runs = []
    for wins, run in groupby(lengths, key=lambda length: times[length] * SPREAD < 1):
        found = list(run)
        if wins:
            runs.append([found[0], 0 if found[-1] == lengths[-1] else found[-1]])
    return runs


def rules(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a rule for each kind of call and head dimension that was measured."""
    for kind, causal, direction in product(("dense", "varlen"), (False, True), ("forward", "both")):
        alike = [row for row in rows if (row["kind"], row["causal"]) == (kind, causal)]
        for dim in sorted({row["head_dim"] for row in alike}):
            times = {
                row["tokens"]: row[f"library_{direction}"] / row[f"ours_{direction}"]
                for row in alike
                if row["head_dim"] == dim
                and None not in (row[f"library_{direction}"], row[f"ours_{direction}"])
            }
            yield {
                "varlen": kind == "varlen",
                "causal": causal,
                "backward": direction == "both",
                "head_dim": dim,
                "tokens": ranges(times),
            }


def section(capability: int, source: str, found: Sequence[dict[str, Any]]) -> str:
    """Render the rules of a GPU as ``library.toml`` has them."""
    lines = ["[[gpus]]", f"capabilities = [{capability}]", f'source = "{source}"', "rules = ["]
    for rule in found:
        fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in rule.items())
        lines.append(f"  {{ {fields} }},")
    return "\n".join([*lines, "]", ""])


def without(part: str, capability: int) -> str:
    """Return a section without a GPU that now has one of its own, empty if it was the only one."""
    gpus = tomllib.loads(part)["gpus"][0]["capabilities"]
    left = [gpu for gpu in gpus if gpu != capability]
    if gpus and not left:
        return part.partition("\n]\n")[2].strip()  # a comment on the next section
    return part.replace(f"capabilities = {gpus}", f"capabilities = {left}", 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files, write the rules."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.crossover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of bench.crossover_sweep")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=LIBRARY,
        help="file of rules to update (leaner_kernels/ops/attention/library.toml)",
    )
    options = parser.parse_args(arguments)
    capability, rows = read(options.results)
    source = ", ".join(f"bench/results/{path.name}" for path in options.results)
    text = options.output.read_text("utf-8")
    new = section(capability, source, list(rules(rows)))
    sections = re.split(r"(?m)^(?=\[\[gpus\]\])", text)
    kept = [other for part in sections[1:] if (other := without(part, capability))]
    parts = (part.strip() for part in (sections[0], new, *kept))
    options.output.write_text("\n\n".join(parts) + "\n", "utf-8")
    sys.stdout.write(f"{options.output}: rules of compute capability {capability} written\n")


if __name__ == "__main__":
    main()
