"""Theorem 3.2 as an experiment: kappa of Gaussian heads against its prediction.

    python -m leaner_kernels.kappa.theorem
    python -m leaner_kernels.kappa.theorem --tokens 128 --head-dim 32 --heads 1,4,24 --out plot.png

Heads with independent Gaussian entries are drawn, (N, d) each; their concatenation goes through
``condition_number`` and is compared with ``gaussian_condition_number``. Three conventions:

- widen: d is fixed, so the width h * d grows with the heads and crosses N;
- split: the width is fixed and divided among the heads, so the prediction does not depend on h;
- edge: heads of width 1, one more in each row, to resolve the neighbourhood of h * d = N.

At h * d = N the prediction is infinite and the measured kappa is not: for a square Gaussian matrix
of size N, P(kappa / N < x) tends to exp(-2 / x - 2 / x^2) and E log kappa to log N + 1.537. The
mean of kappa is infinite there, so rows hold the median and the geometric mean.

Sources: arXiv:2505.20802, theorem 3.2; Edelman 1988, "Eigenvalues and condition numbers of random
matrices", SIAM J. Matrix Anal. Appl. 9(4).
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from . import condition_number, gaussian_condition_number

# The x at which exp(-2 / x - 2 / x^2) is one half.
SQUARE_MEDIAN = (1 + math.sqrt(1 + 2 * math.log(2))) / math.log(2)
SQUARE_LOG_MEAN = 1.537
HEADS = 1, 2, 3, 4, 6, 8, 12, 16, 18


class TheoremRow(NamedTuple):
    """Measured and predicted kappa of ``heads`` h of width ``head_dim`` d, together ``width``.

    Of the draws, ``geometric_mean`` is inf if one was not resolved, ``low`` and ``high`` are the
    tenth and the ninetieth percentile.
    """

    convention: str
    heads: int
    head_dim: int
    width: int
    predicted: float
    median: float
    geometric_mean: float
    low: float
    high: float


def measure(
    tokens: int, head_dim: int, heads: Sequence[int], seeds: int = 32, split_width: int = 768
) -> list[TheoremRow]:
    """Measure kappa of Gaussian heads: rows of "widen", of "split", of "edge".

    Raises:
        ValueError: ``tokens`` below 2, another count below 1, or more heads than ``split_width``.
    """
    least = {"tokens": (tokens, 2), "head_dim": (head_dim, 1), "seeds": (seeds, 1)}
    for name, (value, allowed) in least.items():
        if value < allowed:
            raise ValueError(f"{name} must be at least {allowed}, got {value}")
    if min(heads) < 1 or max(heads) > split_width:
        counts = ",".join(map(str, heads))
        raise ValueError(f"heads must be counts from 1 to the split width {split_width}: {counts}")
    # Widths around N are closer together where they are closer to it.
    steps = (0, 1, 2, 4, 8, 16, 32, 64, 128)
    around = {tokens + sign * round(step * tokens / 256) for step in steps for sign in (-1, 1)}
    edge = sorted(width for width in around | {tokens - 1, tokens + 1} if width >= 1)
    choices = [("widen", h, head_dim) for h in heads]
    choices += [("split", h, split_width // h) for h in heads]
    choices += [("edge", width, 1) for width in edge]
    return [measure_one(*choice, tokens, seeds) for choice in choices]


def measure_one(convention: str, heads: int, head_dim: int, tokens: int, seeds: int) -> TheoremRow:
    """Measure kappa of one choice of heads; the same draws for the same sizes."""
    generator = torch.Generator().manual_seed(tokens * 1_000_003 + heads * 1_009 + head_dim)
    sizes = seeds, heads, tokens, head_dim
    drawn = torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")
    kappa = condition_number(drawn.transpose(1, 2).flatten(2)).kappa
    # Not interpolated: between a number and an infinity there is nothing to interpolate.
    low, high = (kappa.quantile(q, interpolation="nearest").item() for q in (0.1, 0.9))
    return TheoremRow(
        convention,
        heads,
        head_dim,
        heads * head_dim,
        gaussian_condition_number(tokens, heads * head_dim),
        median(kappa.tolist()),
        kappa.log().mean().exp().item(),
        low,
        high,
    )


def table(rows: Sequence[TheoremRow], tokens: int, seeds: int) -> str:
    """Return the rows as text."""
    lines = [f"N = {tokens} tokens, {seeds} draws a row; 10% and 90% are percentiles of the draws"]
    columns = "{:<6} {:>5} {:>8} {:>6} {:>10} {:>10} {:>10} {:>10} {:>8}"
    names = ("heads", "head_dim", "width", "predicted", "median", "10%", "90%")
    lines.append(columns.format("", *names, ""))
    for row in rows:
        numbers = (f"{n:.4g}" for n in (row.predicted, row.median, row.low, row.high))
        finite = math.isfinite(row.predicted)
        error = f"{row.median / row.predicted - 1:+.0%}" if finite else "blow-up"
        lines.append(columns.format(*row[:4], *numbers, error))
    lines += [
        f"{row.convention} at h * d = N: median {row.median:.4g}, of a large square matrix "
        f"{SQUARE_MEDIAN * tokens:.4g}; geometric mean {row.geometric_mean:.4g}, of a large one "
        f"{math.exp(SQUARE_LOG_MEAN) * tokens:.4g}"
        for row in rows
        if row.width == tokens
    ]
    return "\n".join(map(str.rstrip, lines))


def draw(rows: Sequence[TheoremRow], tokens: int, path: Path) -> None:
    """Draw measured and predicted kappa over the width and over the heads, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 3, sharey=True), ("widen", "edge", "split")):
        _draw_one(axes, kind, [row for row in rows if row.convention == kind], tokens)
    figure.savefig(path, dpi=110, format="png")


def _draw_one(axes: Any, kind: str, rows: list[TheoremRow], tokens: int) -> None:
    over = "heads" if kind == "split" else "width"
    places = [getattr(row, over) for row in rows]
    lines = {row.heads: row.predicted for row in rows}
    if over == "width":
        widths = range(min(*places, tokens), max(*places, tokens) + 1)
        lines = {width: gaussian_condition_number(tokens, width) for width in widths}
        axes.axvline(tokens, color="black", ls=":", lw=1, label=f"h·d = N = {tokens}")
        limit = f"median at h·d = N: {SQUARE_MEDIAN:.2f} N"
        axes.plot(tokens, SQUARE_MEDIAN * tokens, "rx", label=limit)
    axes.plot(*zip(*sorted(lines.items())), color="black", lw=1, label="predicted")
    spread = [[row.median - row.low for row in rows], [row.high - row.median for row in rows]]
    spread = [[x if math.isfinite(x) else math.nan for x in side] for side in spread]
    measured = "measured: median, 10% to 90%"
    axes.errorbar(places, [row.median for row in rows], spread, fmt=".", label=measured)
    scale = "log" if kind == "widen" else "linear"
    axes.set(title=kind, xlabel=over, xscale=scale, ylabel="condition number κ", yscale="log")
    axes.legend(fontsize=8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and draw the plot that ``--out`` names."""
    parser = argparse.ArgumentParser(
        prog="python -m leaner_kernels.kappa.theorem",
        description="Condition number of Gaussian heads against theorem 3.2 of arXiv:2505.20802.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=197, help="rows N of each head")
    add("--head-dim", type=int, default=64, help="width d of the widened heads")
    counts = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    add("--heads", type=counts, default=HEADS, help="counts, with commas")
    add("--seeds", type=int, default=32, help="draws for each row")
    add("--split-width", type=int, default=768, help="fixed width that is divided")
    add("--out", type=Path, help="PNG to draw")
    options = parser.parse_args(arguments)
    sizes = options.tokens, options.head_dim, options.heads, options.seeds, options.split_width
    try:
        rows = measure(*sizes)
    except ValueError as error:
        parser.error(str(error))
    if options.out is not None:
        draw(rows, options.tokens, options.out)
    sys.stdout.write(table(rows, options.tokens, options.seeds) + "\n")


if __name__ == "__main__":
    main()
