"""Theorem 3.2 against drawn heads: where it holds, and by how much."""

import pytest
import torch

from leaner_kernels import condition_number, gaussian_condition_number


def median_kappa(heads: int, head_dim: int = 32, tokens: int = 128) -> float:
    torch.manual_seed(heads)
    return condition_number(torch.randn(32, tokens, heads * head_dim)).kappa.median().item()


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 24])
def test_kappa_follows_the_theorem_away_from_the_edge(heads: int) -> None:
    # Finite sizes stay below the limit of large ones: at N = 128 by about 9% at a ratio of 3/2.
    predicted = gaussian_condition_number(128, heads * 32)
    assert 0.88 * predicted < median_kappa(heads) < predicted


def test_more_heads_first_raise_kappa_and_then_lower_it() -> None:
    kappa = {heads: median_kappa(heads) for heads in (1, 2, 3, 4, 6, 12)}
    assert kappa[1] < kappa[2] < kappa[3] < kappa[4] > kappa[6] > kappa[12]
