"""Measure the error of kappa where ``condition_number`` calls it resolved.

Random batches of float32 matrices, as hard as they come, up to 65,536 long, through torch's path;
the truth comes from a QR decomposition and the singular values of R, in float64, or from how a
matrix was made: some are exactly singular. Errors are of kappa, relative; ``units`` is the error of
the smallest squared singular value in float64's rounding units of the largest.

    python -m bench.kappa.accuracy > bench/results/kappa_accuracy.json
"""

import itertools
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from bench.harness import command, machine
from leaner_kernels import condition_number
from leaner_kernels.kappa.reference import EPS

SINGULAR = ("equal rows", "a sum of rows")
KINDS = (
    *("one small", "graded", "half small", "one large", "Gaussian", "token mean"),
    *("nearly equal rows", *SINGULAR),
)
MATRICES, DEEPEST = 100_000, 65_536
# Sizes, min(N, M): most are log-uniform up to the first, one draw in LARGE_EVERY up to the second.
SIZES, LARGE_EVERY = (128, 1024), 30
NUMBERS, BATCH = 1 << 20, 128  # of a batch, at most: what is deep comes in small batches


@dataclass(frozen=True)
class Draw:
    """A batch of matrices, (B, N, M) float32, and (B,) what is known of each.

    Attributes:
        kind: one of KINDS.
        lengths: (B,) int32, or None: how many rows count.
        sigma_max: the largest singular value.
        sigma_min: the smallest, 0 where the matrix is singular by its making.
    """

    kind: str
    a: Tensor
    lengths: Tensor | None
    sigma_max: Tensor
    sigma_min: Tensor


def allowed_units(size: int) -> float:
    """Return the error that docs/kappa.md states, in rounding units of sigma_max squared."""
    return 18 * max(1.0, size / 128) ** 0.5


def limit(size: int) -> float:
    """Return the kappa up to which it is resolved by docs/kappa.md."""
    return (50 * EPS * max(1.0, size / 128) ** 0.5) ** -0.5


def draw(seed: int, deepest: int = DEEPEST, numbers: int = NUMBERS) -> Draw:
    """Return the batch of a seed."""
    choice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kind = choice.choice(KINDS)
    large = choice.random() * LARGE_EVERY < 1 and numbers == NUMBERS
    low, high = SIZES if large else (3 if kind in SINGULAR else 1, SIZES[0])
    size = _log_uniform(choice, low, high)
    # The large ones are slow enough.
    depth = _log_uniform(choice, size, 4 * size if large else deepest)
    batch = max(1, min(BATCH, (4 * numbers if large else numbers) // (size * depth)))
    # Most of them where it gets difficult.
    exponents = (5.5, 7.5) if choice.random() < 0.75 else (0.0, 5.5)
    kappa = 10 ** torch.empty(batch, 1, dtype=torch.float64).uniform_(
        *exponents, generator=generator
    )
    a = make(kind, size, depth, kappa, generator)
    if choice.random() < 0.5:
        a = a.mT.contiguous()
    lengths = None
    if choice.random() < 0.25 and kind not in SINGULAR:
        lengths = torch.randint(
            1, a.shape[-2] + 1, (batch,), generator=generator, dtype=torch.int32
        )
    return Draw(kind, a, lengths, *truth(kind, a, lengths))


def _log_uniform(choice: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(choice.uniform(math.log(low), math.log(high + 1)))))


def make(kind: str, size: int, depth: int, kappa: Tensor, generator: torch.Generator) -> Tensor:
    """Return (B, size, depth) float32 of about this kappa, (B, 1), where the kind has one."""
    batch = len(kappa)
    if kind == "a sum of rows":
        # Of so few bits that the sum is exact; all positive, so that rounding has one direction.
        a = torch.randint(1 << 20, 1 << 21, (batch, size, depth), generator=generator).float()
        a[:, -1] = (a[:, 0] + a[:, 1]) / 2
        return a
    a = torch.randn(batch, size, depth, generator=generator)
    if kind == "equal rows":
        a[:, size // 2] = a[:, 0]
    elif kind == "nearly equal rows":
        other = (size - 1) // 2
        a[:, -1] = a[:, other] + (a[:, -1] / kappa).float() if size > 1 else a[:, -1]
    elif kind == "token mean":
        a = torch.randn(batch, 1, depth, generator=generator) + (a / kappa[..., None]).float()
    elif kind != "Gaussian":
        sigma = torch.ones(batch, size, dtype=torch.float64)
        if kind == "one small":
            sigma[:, -1:] = 1 / kappa
        elif kind == "half small":
            sigma[:, size // 2 :] = 1 / kappa
        elif kind == "one large":
            sigma[:, 1:] = 1 / kappa
        else:
            sigma = kappa ** -torch.linspace(0, 1, size, dtype=torch.float64)
        across = torch.linalg.qr(a.mT.double()).Q.mT
        turned = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
        a = ((torch.linalg.qr(turned).Q * sigma[:, None]) @ across).float()
    return a


def truth(kind: str, a: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest singular value of (B, N, M) of a kind, (B,) each."""
    a = a.double()
    size, last = min(a.shape[-2:]), torch.full((len(a), 1), min(a.shape[-2:]) - 1)
    if lengths is not None:
        a = a.masked_fill((torch.arange(a.shape[-2]) >= lengths[:, None])[..., None], 0)
        last = (lengths.long().clamp(max=size) - 1)[:, None]
    tall = a.mT if a.shape[-2] < a.shape[-1] else a
    sigma = torch.linalg.svdvals(torch.linalg.qr(tall, mode="r").R)
    smallest = sigma.gather(-1, last)[:, 0]
    return sigma[:, 0], torch.zeros_like(smallest) if kind in SINGULAR else smallest


def measure(batch: Draw) -> pd.DataFrame:
    """Return a row for each matrix: what was found, its relative error, and its error in units."""
    size, depth = sorted(batch.a.shape[1:])
    found = condition_number(batch.a, lengths=batch.lengths)
    true = batch.sigma_max / batch.sigma_min
    apart = (found.sigma_min**2 - batch.sigma_min**2).abs() / batch.sigma_max**2
    # Below that, the truth itself is not right to so many units.
    units = (apart / EPS).where(true > 100, 0)
    columns = {
        "resolved": found.resolved,
        "singular": batch.sigma_min == 0,
        "hidden": ~found.resolved & (true < 0.8 * limit(size)),
        "true": true,
        "error": (found.kappa / true - 1).abs(),
        "units": units,
        "allowed": units / allowed_units(size),
    }
    rows = pd.DataFrame({name: column.numpy() for name, column in columns.items()})
    return rows.assign(
        all="all",
        kind=batch.kind,
        size=_bin(size, (16, 64, 128, 256, 512, 1024)),
        depth=_bin(depth, (256, 1024, 4096, 16384, 65536)),
    )


def summary(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return what was found of the matrices of one kind, or size, or depth.

    Args:
        rows: of ``measure``.
        by: ``all``, ``kind``, ``size`` or ``depth``.

    Returns:
        matrices: how many.
        resolved: of them.
        singular: exactly singular ones.
        singular_resolved: of them; one would be a lie.
        hidden: not resolved though kappa is under 0.8 of the stated limit.
        units: the largest error of sigma_min squared, in rounding units of sigma_max squared, where
            kappa is above 100.
        allowed: the largest share of what docs/kappa.md allows that such an error took.
        to_1e5, to_1e6, to_3e6: largest relative error of a resolved kappa up to so much.
        any: wherever it is resolved.
    """
    for name, most in {"to_1e5": 1e5, "to_1e6": 1e6, "to_3e6": 3e6, "any": math.inf}.items():
        counted = rows["resolved"] & (rows["true"] <= most)
        rows = rows.assign(**{name: rows["error"].where(counted, 0.0)})
    rows = rows.assign(matrices=1, singular_resolved=rows["singular"] & rows["resolved"])
    groups = rows.groupby(by, sort=False)
    counts = groups[["matrices", "resolved", "singular", "singular_resolved", "hidden"]].sum()
    return counts.join(groups[["units", "allowed", "to_1e5", "to_1e6", "to_3e6", "any"]].max())


def study(seeds: Iterator[int], matrices: int) -> pd.DataFrame:
    """Return the rows of ``measure`` of at least so many matrices."""
    found: list[pd.DataFrame] = []
    while sum(map(len, found)) < matrices:
        found.append(measure(draw(next(seeds))))
    return pd.concat(found, ignore_index=True)


def _bin(number: int, edges: Sequence[int]) -> str:
    return f"up to {next(edge for edge in edges if number <= edge)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write JSON."""
    parser = command.parser("bench.kappa.accuracy", __doc__)
    parser.add_argument(
        "--matrices",
        type=int,
        default=MATRICES,
        help="minimum number of matrices to measure (%(default)s)",
    )
    wanted = parser.parse_args(arguments).matrices
    rows = study(itertools.count(), wanted)
    result = {
        "machine": machine.cpu(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        **{by: summary(rows, by).to_dict("index") for by in ("all", "kind", "size", "depth")},
    }
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
