"""Writes docs/studies.md and its plots from the recorded results.

python -m studies.page
"""

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from studies import printed_memory, printed_tables, theorem_gap
from studies.runner import RESULTS, ROOT, table
from studies.study import Claim, Study, judged

PAGE = ROOT / "docs" / "studies.md"
STUDIES = ("kappa_against_heads", "kappa_and_loss")

_TOP = """# Studies

What the paper says ([arXiv:2505.20802](https://arxiv.org/abs/2505.20802)), tried at a small scale.
Each study's question, claims and rule were committed before its results. `python -m studies.NAME`
repeats one; `--scale paper -- --data /data/imagenet` does it at full size, where there are GPUs.

A claim *holds* if its one-sided p, corrected after Holm over the claims of its study, is below 0.05
and the 95% interval of the effect (bootstrap over seeds) is above 0. It *fails* if the interval is
below 0. Else it is *undecided*. Written by `python -m studies.page`.
"""

_PRIOR = """## Prior work

- Brown, Zhao, Shumailov and Mullins 2022, "Wide Attention Is The Way Forward For Transformers?"
  ([arXiv:2210.00640](https://arxiv.org/abs/2210.00640)): one wide layer of attention did as well as
  deep models on four language tasks. More heads and less depth without κ: what the studies of κ and
  the loss should be read against.
- Hrycej, Bermeitinger and Handschuh 2022, "Number of Attention Heads vs Number of
  Transformer-Encoders in Computer Vision" ([arXiv:2209.07221](https://arxiv.org/abs/2209.07221)):
  the same two numbers varied on small images.
- Bhojanapalli, Yun, Rawat, Reddi and Kumar 2020, "Low-Rank Bottleneck in Multi-head Attention
  Models" ([arXiv:2002.07028](https://arxiv.org/abs/2002.07028)): heads narrower than the sequence
  is long cannot express every attention. In the arms that split a fixed width κ falls nevertheless.
- Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?"
  ([arXiv:1905.10650](https://arxiv.org/abs/1905.10650)): after training most heads can be removed.
  κ is of the heads together and says nothing of which of them are needed.
- "The Effect of Attention Head Count on Transformer Approximation"
  ([arXiv:2510.06662](https://arxiv.org/abs/2510.06662)): bounds on what too few heads can
  approximate; a reason for more heads that has nothing to do with conditioning.
"""


def text() -> str:
    """Return the page."""
    parts = [_TOP]
    for name in STUDIES:
        study: Study = importlib.import_module(f"studies.{name}").STUDY
        found = read(name)
        if found is not None:
            parts.append(_section(study, found))
    gap = read(theorem_gap.NAME)
    if gap is not None:
        parts.append(theorem_gap.section(gap))
    parts.append(printed_tables.section())
    sizes = read(printed_memory.NAME)
    if sizes is not None:
        parts.append(printed_memory.section(sizes))
    parts.append(_PRIOR)
    return "\n".join(parts)


def read(name: str) -> dict[str, Any] | None:
    """Return the recorded results of a study, if there are some."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _section(study: Study, found: dict[str, Any]) -> str:
    scale = study.scales[found["scale"]]
    arms = len({run["arm"] for run in found["runs"]})
    seconds = [run["seconds"] for run in found["runs"]]
    machine = found["machine"]
    again = sorted(RESULTS.glob(f"{study.name}-from-*.json"))
    reruns = [_rerun(json.loads(path.read_text()), found) for path in again]
    mean = sum(seconds) / len(seconds)
    ran = (
        f"{arms} arms of {found['seeds']} seeds, `train/{scale.script} {' '.join(scale.flags)}`: "
        f"{len(seconds)} runs, {machine['jobs']} at once, {mean:.0f} s each on one core of "
        f"{machine['processor']}; commit {found['commit']['hash'][:12]}, "
        f"torch {found['versions']['torch']}"
    )
    parts = [
        f"## {study.question}",
        f"**Claimed.** {study.claims}",
        f"**Measured.** {study.metric}",
        f"**Run.** {ran}.",
        f"**Rule.** {study.rule}",
        table(_claims(found), "github"),
        f"![{study.axes[1]} against {study.axes[0]}](images/study-{study.name}.png)",
        _by_arm(study, found),
        *reruns,
        f"**Not shown.** {study.not_shown}",
    ]
    return "\n\n".join(parts) + "\n"


def _claims(found: dict[str, Any]) -> list[Claim]:
    return [Claim(**claim) for claim in found["claims"]]


def _by_arm(study: Study, found: dict[str, Any]) -> str:
    """Return the means of each arm as a table."""
    rows = []
    for arm in study.scales[found["scale"]].arms:
        own = [run for run in found["runs"] if run["arm"] == arm.name]
        kappas = sorted(run["kappa"] for run in own)
        losses = [run["held_out_loss"] for run in own]
        above = "over " if any(run["unresolved"] for run in own) else ""
        spread = f"{above}{kappas[0]:.3g} to {kappas[-1]:.3g}"
        middle = f"{above}{kappas[len(kappas) // 2]:.3g}"
        accuracy = sum(run["held_out_accuracy"] for run in own) / len(own)
        loss = sum(losses) / len(losses)
        rows.append(
            (arm.name, f"{own[0]['params']:,}", middle, spread, f"{loss:.4f}", f"{accuracy:.2%}")
        )
    headers = ("arm", "parameters", "κ, median", "κ, seeds", "held-out loss", "accuracy")
    return tabulate(rows, headers, "github", disable_numparse=True)


def _rerun(other: dict[str, Any], found: dict[str, Any]) -> str:
    """Return how the verdicts of other seeds compare."""
    one, two = ({c.claim: v for c, _, v in judged(_claims(each))} for each in (found, other))
    differ = [f"{c}: {one[c]}, then {two[c]}" for c in two if one[c] != two[c]]
    alike = f"{len(two) - len(differ)} of {len(two)} verdicts are the same"
    return f"**Again** with seeds from {other['first_seed']}: " + "; ".join([alike, *differ]) + "."


def draw(study: Study, found: dict[str, Any], path: Path) -> None:
    """Draw every run, and the geometric mean of each arm, by group."""
    import matplotlib

    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    arms = [arm for arm in study.scales[found["scale"]].arms if arm.group != "null"]
    for number, group in enumerate(dict.fromkeys(arm.group for arm in arms)):
        own = [arm for arm in arms if arm.group == group]
        means = []
        for arm in own:
            values = [r[study.measure] for r in found["runs"] if r["arm"] == arm.name]
            axes.plot([arm.x] * len(values), values, ".", color=f"C{number}", alpha=0.4)
            means.append(np.exp(np.log(values).mean()))
        axes.plot([arm.x for arm in own], means, "o-", color=f"C{number}", label=group)
    if study.doubling:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(study.axes[0])
    axes.set_ylabel(study.axes[1])
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the plots."""
    argparse.ArgumentParser(prog="python -m studies.page", description=__doc__).parse_args(argv)
    for name in STUDIES:
        found = read(name)
        if found is not None:
            study = importlib.import_module(f"studies.{name}").STUDY
            draw(study, found, PAGE.parent / "images" / f"study-{name}.png")
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
