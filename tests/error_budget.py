"""The one numerical criterion: no more than twice the error that PyTorch itself makes."""

import torch
from torch import Tensor


def assert_within_budget(
    actual: Tensor, same_dtype: Tensor | tuple[Tensor, ...], exact: Tensor
) -> None:
    """Assert that ``actual`` is as close to ``exact`` as PyTorch's own arithmetic, twice over.

    Args:
        actual: what is judged, any shape; its dtype sets the rounding that is allowed.
        same_dtype: what plain PyTorch makes of the same inputs in their dtype; of several ways it
            has (eager, its fused attention), the one with the largest error counts.
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
