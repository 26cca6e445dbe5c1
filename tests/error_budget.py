"""The one numerical criterion: no more than twice the error that correct arithmetic makes.

What correct arithmetic makes is drawn, not computed once on the machine at hand. One computation in
the kernel's dtype may be right to the last bit on one processor and off by three roundings on the
next, since a BLAS picks its routines by the processor; an honest kernel then fails where luck was
good. ``peers_of`` runs the reference in float64, every operation off by a random rounding of the
dtype (``random_rounding.py``), several times and in each formulation that is allowed, and the worst
draw counts. In float64 the order of summation does not show: the allowance is the same everywhere.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.random_rounding import RandomRounding

DRAWS = 4


def assert_within_budget(
    actual: Tensor, same_dtype: Tensor | tuple[Tensor, ...], exact: Tensor
) -> None:
    """Assert that ``actual`` is as close to ``exact`` as correct arithmetic, twice over.

    Args:
        actual: what is judged, any shape; its dtype sets the rounding that is allowed.
        same_dtype: what correct arithmetic makes of the same inputs: the draws of ``peers_of``, or
            what plain PyTorch computes in their dtype, where it is large enough to leave nothing
            to luck. The one with the largest error counts.
        exact: the reference in float64.

    Where ``exact`` is infinite (the lse of a row that sees no key) the others must equal it.
    """
    peers = same_dtype if isinstance(same_dtype, tuple) else (same_dtype,)
    eps = torch.finfo(actual.dtype).eps
    actual, exact, *peers = (t.detach().to("cpu", torch.float64) for t in (actual, exact, *peers))
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    infinite = exact.isinf()
    assert torch.equal(actual[infinite], exact[infinite]), "infinities differ"
    actual, exact, *peers = (t[~infinite] for t in (actual, exact, *peers))
    if exact.numel() == 0:
        return
    rounding = eps * exact.abs().max()
    budget = 2 * (max((peer - exact).abs().max() for peer in peers) + rounding)
    error = (actual - exact).abs().max()
    assert error <= budget, f"error {error:.3g} is past the budget {budget:.3g}"


def by_layer(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the gradients of a layer: one that is 0 in exact arithmetic has no scale of its own."""
    layers: dict[str, list[Tensor]] = {}
    for name, result in results.items():
        layers.setdefault(".".join(name.split(".")[:2]), []).append(result.flatten())
    return {name: torch.cat(parts) for name, parts in layers.items()}


def peers_of(
    runs: Sequence[Callable[[], dict[str, Tensor]]],
    dtype: torch.dtype,
    float32: Collection[str] = (),
    units: float = 0.5,
) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic in ``dtype`` may make of it.

    Args:
        runs: the reference in float64, in each formulation that is allowed; called several times.
        dtype: of the arithmetic.
        float32: names of results that are rounded once from float32 sums, or not at all.
        units: in the last place by which an operation is off at most.
    """

    def draws(dtype: torch.dtype) -> list[dict[str, Tensor]]:
        found = []
        for seed, run in product(range(DRAWS), runs):
            with RandomRounding(dtype, seed, units):
                found.append(run())
        return found

    same_dtype = draws(dtype)
    wide = draws(torch.float32) if float32 and dtype != torch.float32 else same_dtype
    return {
        name: tuple(draw[name] for draw in (wide if name in float32 else same_dtype))
        for name in same_dtype[0]
    }


def assert_all_within_budget(
    found: dict[str, Tensor], peers: dict[str, tuple[Tensor, ...]], exact: dict[str, Tensor]
) -> None:
    """Assert that each result, all of them or some, is within the budget, and name what is not."""
    assert found
    for name, actual in found.items():
        try:
            assert_within_budget(actual, peers[name], exact[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_computes(
    actual: dict[str, Tensor], reference: Callable[[torch.dtype], dict[str, Tensor]]
) -> None:
    """Assert that every result is as close as correct arithmetic, twice over.

    Args:
        actual: results of one floating-point dtype, that of a whole model or module.
        reference: computes them in a dtype. Its draws have functions of a library, off by up to a
            unit, and beside them counts what it makes in the dtype of ``actual``: some sums of
            PyTorch's, as those of a LayerNorm's gradients, are worse.
    """
    (dtype,) = {t.dtype for t in actual.values()}
    plain = reference(dtype)
    with sdpa_kernel(SDPBackend.MATH):  # draws see its steps
        peers = peers_of((lambda: reference(torch.float64),), dtype, units=1)
        exact = reference(torch.float64)
    assert actual.keys() == exact.keys()
    peers = {name: (plain[name], *drawn) for name, drawn in peers.items()}
    assert_all_within_budget(actual, peers, exact)
