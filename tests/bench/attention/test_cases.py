"""The work of each case, against hand counts and against masks written out."""

import pytest
import torch

from bench.attention.cases import CASES, AttentionCase

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "forward_mb", "backward_mb", "forward_gflop", "backward_gflop"),
    [("vit_base", 208.2, 361.5, 20.35, 50.87), ("bert", 102.2, 176.2, 6.44, 16.11)],
)
def test_work_is_what_the_roofline_counts(
    name, forward_mb, backward_mb, forward_gflop, backward_gflop
):
    case = BY_NAME[name]
    assert case.bytes("forward") / 1e6 == pytest.approx(forward_mb, abs=0.05)
    assert case.bytes("backward") / 1e6 == pytest.approx(backward_mb, abs=0.05)
    assert case.flops("forward") / 1e9 == pytest.approx(forward_gflop, abs=0.005)
    assert case.flops("backward") / 1e9 == pytest.approx(backward_gflop, abs=0.005)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_those_that_the_mask_shows(causal, padded):
    case = AttentionCase("", "cpu", 3, 2, 9, 4, torch.float32, causal=causal, padded=padded)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "lengths"), [(1, ()), (5, ()), (12, ()), (None, (9, 1, 4))])
def test_crossed_and_ragged_scores_are_counted_row_by_row(queries, lengths, causal):
    case = AttentionCase(
        "", "cpu", 3, 2, 9, 4, torch.float32, causal=causal, queries=queries, lengths=lengths
    )
    rows, keys = (lengths, lengths) if lengths else ((queries,) * 3, (9,) * 3)
    expected = sum(
        row >= col or not causal for r, n in zip(rows, keys) for row in range(r) for col in range(n)
    )
    assert case.scores == 2 * expected
    assert case.query_rows == sum(rows)
    assert case.key_rows == sum(keys)
    assert case.rows == (queries or 9)
    # q, out; k, v; lse: float32 all.
    moved = 2 * 4 * (2 * 4 * (sum(rows) + sum(keys)) + sum(rows))
    assert case.bytes("forward") == moved
    assert case.bytes("backward") == 2 * 4 * 4 * (3 * sum(rows) + 4 * sum(keys))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_consistent(case):
    assert (case.device == "cpu") == case.name.startswith("cpu_")
    if case.ragged:
        assert len(case.lengths) == case.batch
        assert max(case.lengths) == case.tokens


def test_names_are_unique_and_carry_no_separator():
    assert len(BY_NAME) == len(CASES)
    assert all(case.name.isidentifier() for case in CASES)
    # pytest -k looks for parts of names: "vit_base-forward" shall choose one case.
    on_gpu = [case.name for case in CASES if case.device == "cuda"]
    assert not [n for n in on_gpu if any(n != other and other.endswith(n) for other in on_gpu)]
