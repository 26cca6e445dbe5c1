"""Heads spread over layers: as many in all, and what a strategy says of each layer."""

import itertools

import pytest

from models.allocation import STRATEGIES, allocate


@pytest.mark.parametrize(("heads", "depth"), [*itertools.product((1, 2, 6, 16), (1, 2, 7, 10))])
def test_as_many_heads_in_all_fall_or_rise_over_the_layers(heads: int, depth: int) -> None:
    assert allocate("uniform", heads, 16, depth) == ([heads] * depth, [16] * depth)
    early, widths = allocate("early", heads, 16, depth)
    late, _ = allocate("late", heads, 16, depth)
    assert late == early[::-1]
    assert sum(early) == heads * depth
    assert early == sorted(early, reverse=True)
    assert min(early) >= 1
    assert widths == [16] * depth
    counts, widths = allocate("saturated", heads, 15, depth)
    assert counts == [heads] * depth
    assert widths == [15] * (depth - depth // 2) + [8] * (depth // 2)


def test_the_first_layer_gets_five_times_as_many_as_the_last() -> None:
    assert allocate("early", 6, 16, 8)[0] == [10, 9, 8, 7, 5, 4, 3, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("first", 4, 16, 4), f"strategy must be one of {', '.join(STRATEGIES)}, got 'first'"),
        (("early", 0, 16, 4), "heads must be at least 1, got 0"),
        (("early", 4, 0, 4), "head_dim must be at least 1, got 0"),
        (("early", 4, 16, 0), "depth must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_spread_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(*arguments)
