"""The work of each case, against hand counts and against masks written out."""

from dataclasses import replace

import pytest
import torch

from bench.cases import CASES, DIRECTIONS, Case

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "forward_mb", "backward_mb", "forward_gflop", "backward_gflop", "million_exps"),
    [("vit_base", 208.2, 361.5, 20.35, 50.87, 79.48), ("bert", 102.2, 176.2, 6.44, 16.11, 50.33)],
)
def test_work_is_what_the_roofline_counts(
    name, forward_mb, backward_mb, forward_gflop, backward_gflop, million_exps
):
    case = BY_NAME[name]
    assert case.bytes("forward") / 1e6 == pytest.approx(forward_mb, abs=0.05)
    assert case.bytes("backward") / 1e6 == pytest.approx(backward_mb, abs=0.05)
    assert case.flops("forward") / 1e9 == pytest.approx(forward_gflop, abs=0.005)
    assert case.flops("backward") / 1e9 == pytest.approx(backward_gflop, abs=0.005)
    assert case.exps("backward") / 1e6 == pytest.approx(million_exps, abs=0.005)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_is_forward_and_backward(case):
    for count in (case.bytes, case.flops, case.exps):
        forward, backward, both = map(count, DIRECTIONS)
        assert both == forward + backward


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_those_that_the_mask_shows(causal, padded):
    case = Case("", "cpu", 3, 2, 9, 4, torch.float32, causal=causal, padded=padded)
    expected = 0
    for batch in range(3):
        length = case.key_lengths(CPU)[batch].item() if padded else 9
        expected += sum(
            col < length and (row >= col or not causal) for row in range(9) for col in range(9)
        )
    assert case.scores == 2 * expected
    shown = case.visible(CPU)
    assert (shown is None) == (not causal and not padded)
    if shown is not None:
        assert 2 * shown.expand(3, 1, 9, 9).sum() == case.scores


def test_padded_lengths_reach_from_half_to_all():
    lengths = replace(BY_NAME["cpu_padded"], batch=5).key_lengths(CPU)
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [64, 80, 96, 112, 128]


def test_names_are_unique_and_carry_no_separator():
    assert len(BY_NAME) == len(CASES)
    assert all(case.name.isidentifier() for case in CASES)
