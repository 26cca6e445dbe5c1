"""From how many tokens on is a library faster? Written where ``attention`` looks it up.

    python -m bench.crossover bench/results/20*.json

derives ``leaner_kernels/ops/attention/library.toml`` from the GPU rows of forward and backward
together: for each compute capability, head dimension and causal or not, the least N from which on,
at every N measured, a backend of PyTorch or flash-attn beats our kernel by the margin. Of several
rules that fit a call, the one with the largest ``min_tokens`` holds. Nothing is written without GPU
rows to compare, and no rule where no library wins. Rules for what was not measured stay.
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Rule(NamedTuple):
    """From ``min_tokens`` on, ``backend`` is the fastest measured; ``source`` is the file."""

    capability: int
    head_dim: int
    causal: bool
    min_tokens: int
    backend: str
    source: str


class _Key(NamedTuple):
    capability: int
    head_dim: int
    causal: bool


# By tokens and case: the seconds of each backend as a part of ours, and the file they are from.
Compared = dict[int, dict[str, tuple[dict[str, float], str]]]


def compare(results: Sequence[dict[str, Any]]) -> dict[_Key, Compared]:
    """Gather the graph rows of whole self-attention in half precision; the newest run counts.

    Args:
        results: of ``frames.read``.
    """
    found: dict[_Key, Compared] = {}
    for data in sorted(results, key=lambda data: data["datetime"]):
        rows = frames.timed([data])
        rows = rows[(rows["kind"] == "attention") & (rows["stage"] == "both")]
        for name, peers in rows[rows["mode"] == "graph"].groupby("case", sort=False):
            facts, medians = data["cases"][name], dict(zip(peers["peer"], peers["median"]))
            whole = facts.get("rows") == facts.get("tokens")
            whole &= not (facts.get("padded") or facts.get("lengths"))
            if not whole or facts["dtype"] == "float32" or OURS not in medians:
                continue
            capability = data["machine_info"]["gpu"]["compute_capability"].replace(".", "")
            key = _Key(int(capability), facts["head_dim"], facts["causal"])
            parts = {
                backend: medians[peer] / medians[OURS]
                for peer, backend in BACKENDS.items()
                if peer in medians
            }
            source = f"bench/results/{data['file']}"
            by_tokens = found.setdefault(key, {})
            by_tokens.setdefault(facts["tokens"], {})[str(name)] = parts, source
    return found


def rules(compared: dict[_Key, Compared]) -> list[Rule]:
    """Derive the rules, in order."""
    return [rule for key in sorted(compared) for rule in _rules_of(key, compared[key])]


def _rules_of(key: _Key, by_tokens: Compared) -> list[Rule]:
    """Walk down from the most tokens for as long as some backend wins every case."""
    found: list[Rule] = []
    for tokens in sorted(by_tokens, reverse=True):
        cases = [parts for parts, _ in by_tokens[tokens].values()]
        worst = {
            backend: max(parts.get(backend, math.inf) for parts in cases)
            for backend in BACKENDS.values()
        }
        backend = min(worst, key=worst.__getitem__)
        if worst[backend] * MARGIN > 1:
            break
        source = next(iter(by_tokens[tokens].values()))[1]
        if found and found[0].backend == backend:
            found[0] = found[0]._replace(min_tokens=tokens, source=source)
        else:
            found.insert(0, Rule(*key, tokens, backend, source))
    return found


def toml(found: Iterable[Rule]) -> str:
    """Render the rules."""
    lines = [HEAD]
    for rule in found:
        lines += [
            "[[rule]]",
            f"capability = {rule.capability}",
            f"head_dim = {rule.head_dim}",
            f"causal = {str(rule.causal).lower()}",
            f"min_tokens = {rule.min_tokens}",
            f'backend = "{rule.backend}"',
            f'source = "{rule.source}"',
            "",
        ]
    return "\n".join(lines)


def unmeasured(path: Path, compared: dict[_Key, Compared]) -> list[Rule]:
    """Return the rules that the file holds already, without those that a measurement replaces."""
    if not path.exists():
        return []
    present = [Rule(**rule) for rule in tomllib.loads(path.read_text("utf-8")).get("rule", [])]
    return [rule for rule in present if _Key(*rule[:3]) not in compared]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files, write the rules."""
    parser = argparse.ArgumentParser(prog="python -m bench.crossover", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files written by bench/")
    parser.add_argument("-o", "--output", type=Path, default=LIBRARY)
    options = parser.parse_args(arguments)
    compared = compare([frames.read(path) for path in options.results])
    if not compared:
        raise SystemExit(f"no {OURS} measured on a GPU, forward and backward: nothing is written")
    found = sorted([*rules(compared), *unmeasured(options.output, compared)])
    options.output.write_text(toml(found), "utf-8")
    sys.stdout.write(f"{options.output}: {len(found)} rules\n")


if __name__ == "__main__":
    main()
