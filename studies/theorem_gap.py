"""What does the Gaussian theorem miss of the heads of trained models?

python -m studies.theorem_gap
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tabulate import tabulate
from torch import Tensor, nn

from leaner_kernels import condition_number, gaussian_condition_number, head_report
from models.json_rows import json_rows
from studies import stats
from studies.kappa_against_heads import STUDY, TOKENS
from studies.runner import RESULTS, ROOT, table
from studies.study import Claim
from train import vit
from train.config import flags
from train.vit import ImageSettings

NAME = "theorem_gap"
QUESTION = "What does the Gaussian theorem miss of the heads of trained models?"
CLAIMED = (
    "Theorem 3.2 predicts κ for heads with independent standard Gaussian entries. Before the run "
    "we expected that κ of real heads is more than ten times larger. We expected the mean over "
    "tokens, which all rows of a head share, to explain most of the difference. The covariance of "
    "the features would explain most of the rest."
)
MEASURED = (
    "The heads of every layer of every model that `python -m studies.kappa_against_heads` "
    "trained, on 64 held-out items. There are four values of κ, each a geometric mean over items "
    "and layers. The first is that of the theorem. The second is that of Gaussian tokens with the "
    "measured covariance of the features. The third is that of the real heads after subtracting "
    "their mean over tokens, in the N − 1 directions that are left. The fourth is that of the "
    "real heads."
)
RULE = (
    "Means over the arms with h·d above N, where the theorem's prediction is finite, for each "
    "seed. Student's test and the interval over seeds are those of the other studies."
)
NOT_SHOWN = (
    "The models read 16 tokens. The study explains a large κ, but does not show that it does harm."
)
ITEMS = 64
STEPS = ("theorem", "covariance", "centred", "real")


def heads_of(model: nn.Module, items: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the heads of each layer side by side, (items, N, h * d), and h."""
    layers = model.attention_modules().values()
    for layer in layers:
        layer.capture_samples = len(items)
    with torch.no_grad():
        model(items)
    for layer in layers:
        yield layer.captured.heads, layer.num_heads
        layer.capture_samples, layer.captured = 0, None


def ladder(heads: Tensor) -> dict[str, float]:
    """Return log10 of κ of each of ``STEPS``, for heads (items, N, width) with width above N."""
    items, tokens, width = heads.shape
    a = heads.double()
    flat = a.reshape(-1, width)
    centred = flat - flat.mean(dim=0)
    # Rows with the covariance of the measured ones: Gaussian weights of the measured rows.
    weights = torch.randn(
        (items, tokens, len(flat)), generator=torch.Generator().manual_seed(0), dtype=a.dtype
    )
    drawn = weights @ centred / math.sqrt(len(flat) - 1)
    # An orthonormal basis of what the mean over tokens leaves.
    basis = torch.linalg.svd(torch.eye(tokens, dtype=a.dtype) - 1 / tokens)[0][:, :-1]
    return {
        "theorem": math.log10(gaussian_condition_number(tokens, width)),
        "covariance": _log_kappa(drawn),
        "centred": _log_kappa(basis.T @ a),
        "real": _log_kappa(a),
    }


def _log_kappa(matrices: Tensor) -> float:
    return condition_number(matrices).kappa.log10().mean().item()


def measure(folder: Path) -> dict[str, Any]:
    """Return the steps of a run's model, means over its layers, and its ``head_report``."""
    summary = json.loads((folder / "summary.json").read_text())
    fields = {field.name for field in dataclasses.fields(ImageSettings)}
    given = {k: v for k, v in summary["settings"].items() if k in fields and k != "out"}
    settings = dataclasses.replace(flags.parse("vit.py", "", [], ImageSettings), **given)
    task, _ = vit.make_task(settings)
    model = task.build()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.eval()
    keys = [(0, index) for index in range(ITEMS)]
    pixels = task.held_out.__getitems__(keys)[0]
    steps, reports = [], []
    for heads, count in heads_of(model, pixels):
        steps.append(ladder(heads))
        report = head_report(heads, count)
        apart = ~torch.eye(count, dtype=torch.bool)
        reports.append(
            {
                "mean_share": report.mean_share.mean().item(),
                "isotropy": (report.isotropy.mean() / report.isotropy_gaussian).item(),
                "correlation": (
                    report.correlation[..., apart].mean() / report.correlation_gaussian
                ).item()
                if count > 1
                else None,
            }
        )
    means = {step: float(np.mean([each[step] for each in steps])) for step in STEPS}
    said = {
        key: None if reports[0][key] is None else float(np.mean([each[key] for each in reports]))
        for key in reports[0]
    }
    return means | said


def decide(runs: Sequence[dict[str, Any]], arms: Sequence[str]) -> list[Claim]:
    """Test the three claims on runs of the arms."""
    theorem, covariance, centred, real = (
        stats.table(runs, arms, step).mean(axis=1) for step in STEPS
    )
    gap = real - theorem
    differences = {
        "κ of real heads is more than ten times the theorem's": (gap - 1, "decades past one"),
        "the mean over tokens is more than half of the gap": (real - centred - gap / 2, "decades"),
        "the covariance is more than half of what is left": (
            covariance - theorem - (centred - theorem) / 2,
            "decades",
        ),
    }
    return [
        Claim.of_seeds(words, x, stats.above_zero(x), unit)
        for words, (x, unit) in differences.items()
    ]


def section(found: dict[str, Any]) -> str:
    """Return the study's part of the page."""
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in found["runs"]):
        own = [run for run in found["runs"] if run["arm"] == arm]
        cells = [f"{10 ** np.mean([run[step] for run in own]):.3g}" for step in STEPS]
        share = np.mean([run["mean_share"] for run in own])
        isotropy = np.mean([run["isotropy"] for run in own])
        related = [run["correlation"] for run in own]
        times = "–" if None in related else f"{np.mean(related):.2f}"
        rows.append((arm, *cells, f"{share:.0%}", f"{isotropy:.2f}", times))
    names = ("theorem", "measured covariance", "real, centred", "real")
    headers = ("arm", *(f"κ: {name}" for name in names), "mean's share of ‖A‖²")
    headers += ("isotropy / Gaussian", "correlation / Gaussian")
    claims = [Claim(**claim) for claim in found["claims"]]
    parts = [
        f"## {QUESTION}",
        f"**Claimed.** {CLAIMED}",
        f"**Measured.** {MEASURED}",
        f"**Rule.** {RULE}",
        table(claims, "github"),
        tabulate(rows, headers, "github", disable_numparse=True),
        f"**Not shown.** {NOT_SHOWN}",
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models of the other study; see ``--help``."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{NAME}", description=QUESTION)
    runs = ROOT / "runs" / "studies" / STUDY.name
    parser.add_argument(
        "--runs",
        type=Path,
        default=runs,
        help=f"folder of the runs of studies.{STUDY.name} (runs/studies/{STUDY.name})",
    )
    parser.add_argument(
        "--record", action="store_true", help="write the results to studies/results"
    )
    args = parser.parse_args(argv)
    wide = [arm for arm in STUDY.scales["cpu"].arms if arm.group != "null" and _width(arm) > TOKENS]
    folders = [
        (arm, path) for arm in wide for path in sorted((args.runs / arm.name).glob("seed-*"))
    ]
    folders = [(arm, path) for arm, path in folders if (path / "summary.json").exists()]
    if not folders:
        parser.error(f"no runs in {args.runs}: run python -m studies.{STUDY.name} first")
    measured = [
        {"arm": arm.name, "seed": int(path.name.removeprefix("seed-")), **measure(path)}
        for arm, path in folders
    ]
    claims = decide(measured, [arm.name for arm in wide])
    found = {"runs": measured, "claims": [dataclasses.asdict(claim) for claim in claims]}
    if args.record:
        (RESULTS / f"{NAME}.json").write_text(json_rows(found))
    sys.stdout.write(table(claims) + "\n")


def _width(arm: Any) -> int:
    flag = dict(zip(arm.flags[::2], arm.flags[1::2]))
    return int(flag["--heads"]) * int(flag["--head-dim"])


if __name__ == "__main__":
    main()
