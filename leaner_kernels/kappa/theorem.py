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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import condition_number, gaussian_condition_number

# The x at which exp(-2 / x - 2 / x^2) is one half.
SQUARE_MEDIAN = (1 + math.sqrt(1 + 2 * math.log(2))) / math.log(2)
SQUARE_LOG_MEAN = 1.537


class TheoremRow(NamedTuple):
    """Measured and predicted kappa of one choice of heads.

    ``heads`` h of width ``head_dim`` d (for "split" the fixed width over h, rounded down) make
    ``width`` h * d. Of the seeds, ``median`` is the mean of the middle two of an even count,
    ``geometric_mean`` is inf if one was not resolved, ``low`` and ``high`` are the tenth and the
    ninetieth percentile. ``predicted`` is ``gaussian_condition_number(tokens, width)``.
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


def draw_heads(tokens: int, heads: int, head_dim: int, seeds: int) -> Tensor:
    """Return (seeds, N, h * d) float32 heads with independent N(0, 1) entries, side by side.

    The same ones for the same sizes.
    """
    generator = torch.Generator().manual_seed(tokens * 1_000_003 + heads * 1_009 + head_dim)
    size = seeds, heads, tokens, head_dim
    drawn = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.transpose(1, 2).flatten(2)


def measure(
    tokens: int = 197,
    head_dim: int = 64,
    heads: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 18),
    seeds: int = 32,
    split_width: int = 768,
) -> list[TheoremRow]:
    """Measure kappa of Gaussian heads: rows of "widen", of "split", of "edge".

    Raises:
        ValueError: ``tokens`` below 2, another count below 1, or more heads than ``split_width``.
    """
    least = {"tokens": (tokens, 2), "head_dim": (head_dim, 1), "seeds": (seeds, 1)}
    for name, (value, allowed) in least.items():
        if value < allowed:
            raise ValueError(f"{name} must be at least {allowed}, got {value}")
    if not heads or min(heads) < 1 or max(heads) > split_width:
        counts = ",".join(map(str, heads))
        raise ValueError(f"heads must be counts from 1 to the split width {split_width}: {counts}")
    choices = [("widen", h, head_dim) for h in heads]
    choices += [("split", h, split_width // h) for h in heads]
    choices += [("edge", width, 1) for width in edge_widths(tokens)]
    return [measure_one(*choice, tokens, seeds) for choice in choices]


def measure_one(convention: str, heads: int, head_dim: int, tokens: int, seeds: int) -> TheoremRow:
    """Measure kappa of one choice of heads: a row of ``measure``, where the arguments are named."""
    kappa = condition_number(draw_heads(tokens, heads, head_dim, seeds)).kappa
    # Not interpolated: between a number and an infinity there is nothing to interpolate.
    low, high = (kappa.quantile(q, interpolation="nearest").item() for q in (0.1, 0.9))
    return TheoremRow(
        convention,
        heads,
        head_dim,
        heads * head_dim,
        gaussian_condition_number(tokens, heads * head_dim),
        _median(kappa).item(),
        kappa.log().mean().exp().item(),
        low,
        high,
    )


def _median(values: Tensor) -> Tensor:
    """Of an even count the mean of the two in the middle."""
    ordered = values.sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def edge_widths(tokens: int) -> list[int]:
    """Return widths around N, closer together where they are closer to it, N among them."""
    steps = (0, 1, 2, 4, 8, 16, 32, 64, 128)
    around = {tokens + sign * round(step * tokens / 256) for step in steps for sign in (-1, 1)}
    return sorted(width for width in around | {tokens - 1, tokens + 1} if width >= 1)


def table(rows: Iterable[TheoremRow], tokens: int, seeds: int) -> Iterator[str]:
    """Render rows as lines of text."""
    yield f"N = {tokens} tokens, {seeds} draws a row; 10% and 90% are percentiles over the draws"
    columns = "{:<6} {:>5} {:>8} {:>6} {:>10} {:>10} {:>10} {:>10} {:>8}"
    yield columns.format(
        "", "heads", "head_dim", "width", *("predicted", "median", "10%", "90%"), ""
    )
    for row in rows:
        cells = (_number(v) for v in (row.predicted, row.median, row.low, row.high))
        off = row.median / row.predicted - 1
        error = f"{off:+.0%}" if math.isfinite(row.predicted) else "blow-up"
        yield columns.format(row.convention, row.heads, row.head_dim, row.width, *cells, error)
    for row in rows:
        if row.width == tokens:
            yield (
                f"{row.convention} at h * d = N: median {_number(row.median)}, for a large square "
                f"matrix {SQUARE_MEDIAN:.3f} N = {_number(SQUARE_MEDIAN * tokens)}; geometric mean "
                f"{_number(row.geometric_mean)}, exp(log N + {SQUARE_LOG_MEAN}) = "
                f"{_number(math.exp(SQUARE_LOG_MEAN) * tokens)}"
            )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def draw(rows: Iterable[TheoremRow], tokens: int, path: Path) -> None:
    """Draw measured and predicted kappa over the width and over the heads, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    rows = list(rows)
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


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and draw the plot that ``--out`` names."""
    parser = argparse.ArgumentParser(
        prog="python -m leaner_kernels.kappa.theorem",
        description="Condition number of Gaussian heads against theorem 3.2 of arXiv:2505.20802.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, heads = parser.add_argument, [1, 2, 3, 4, 6, 8, 12, 16, 18]
    add("--tokens", type=int, default=197, help="rows N of each head")
    add("--head-dim", type=int, default=64, help="width d of the widened heads")
    add("--heads", type=_counts, default=heads, help="counts, with commas")
    add("--seeds", type=int, default=32, help="draws for each row")
    add("--split-width", type=int, default=768, help="fixed width that is divided")
    add("--out", type=Path, help="PNG to draw")
    options = parser.parse_args(arguments)
    try:
        rows = measure(
            options.tokens, options.head_dim, options.heads, options.seeds, options.split_width
        )
    except ValueError as error:
        parser.error(str(error))
    if options.out is not None:
        draw(rows, options.tokens, options.out)
    sys.stdout.writelines(
        f"{line.rstrip()}\n" for line in table(rows, options.tokens, options.seeds)
    )


if __name__ == "__main__":
    main()
