"""The work of each case, against hand counts, and against masks written out."""

import pytest
import torch

import leaner_kernels
from bench.attention.cases import CASES, AttentionCase
from bench.attention.catalogue import ATTENTION_CASES
from bench.attention.operators import OperatorCase

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in ATTENTION_CASES}


@pytest.mark.parametrize(
    ("name", "forward_mb", "backward_mb", "forward_gflop", "backward_gflop"),
    [
        ("vit_base", 208.2, 361.5, 20.35, 50.87),
        # 4 and 7 tensors of 128 * 196 * 512 bfloat16, products of 2 * 128 * 8 * 64 * 64 * 196.
        ("xcit_m", 102.8, 179.8, 3.29, 8.22),
        ("davit_channel3", 102.8, 179.8, 1.64, 4.11),
        # 128 * 16 heads of 4 windows of 49 * 49 scores.
        ("davit_window3", 102.8, 179.8, 2.52, 6.29),
        # 2 or 3 maps of 128 * 784 * 256 and 1 or 2 times 128 * 196 * 8 * 81 logits.
        ("volo_d3_outlook", 135.3, 219.2, 1.04, 2.08),
        # 4 and 7 of 32 * 2048 * 64 bfloat16; for each of 64 heads four products of 2048 * 64 * 32,
        # two of 64 * 64 * 32 and 24 of 64 * 64 * 64.
        ("nystrom_listops", 33.55, 58.72, 2.99, 8.41),
    ],
)
def test_work_is_what_the_roofline_counts(
    name, forward_mb, backward_mb, forward_gflop, backward_gflop
):
    case = BY_NAME[name]
    assert case.bytes("forward") / 1e6 == pytest.approx(forward_mb, abs=0.05)
    assert case.bytes("backward") / 1e6 == pytest.approx(backward_mb, abs=0.05)
    assert case.bytes("both") == case.bytes("forward") + case.bytes("backward")
    assert case.flops("forward") / 1e9 == pytest.approx(forward_gflop, abs=0.005)
    assert case.flops("backward") / 1e9 == pytest.approx(backward_gflop, abs=0.005)


KINDS = (
    *({}, {"causal": True}),
    {"causal": True, "window": 3},
    *({"queries": queries, "causal": causal} for queries in (1, 5, 12) for causal in (False, True)),
    *({"lengths": (9, 1, 4), "causal": causal} for causal in (False, True)),
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scores_and_bytes_are_counted_row_by_row(kind):
    case = AttentionCase("", "cpu", 3, 2, 9, 4, torch.float32, **kind)
    rows, keys = (case.lengths,) * 2 if case.ragged else ((case.rows,) * 3, (9,) * 3)
    expected = sum(
        (row >= col or not case.causal) and (row - col <= case.window or not case.window)
        for r, n in zip(rows, keys, strict=True)
        for row in range(r)
        for col in range(n)
    )
    assert case.scores == 2 * expected
    shown = case.visible(CPU)
    if shown is not None and not case.ragged:
        assert 2 * shown.expand(3, 1, case.rows, 9).sum() == case.scores
    # q, out; k, v; lse: float32 all. Keys past a length are read, and get a gradient.
    assert case.bytes("forward") == 2 * 4 * (2 * 4 * (sum(rows) + sum(keys)) + sum(rows))
    assert case.bytes("backward") == 2 * 4 * 4 * (3 * sum(rows) + 4 * sum(keys))


@pytest.mark.parametrize("op", ["cross_covariance", "channel", "window", "outlook"])
def test_the_public_function_takes_the_shapes_and_parameters(op):
    case = OperatorCase(op, "cpu", op, 2, 6, 3, 4, torch.float32, window=3)
    inputs = [torch.randn(shape) for shape in case.input_shapes]
    function = getattr(leaner_kernels, f"{op}_attention")
    assert function(*inputs, **case.params).shape == case.out_shape
    operator = getattr(torch.ops.leaner_kernels, f"{op}_attention")
    out, lse = operator(*inputs, *case.operator_params)
    assert out.shape == case.out_shape
    # A softmax over D, D, 9 and 9 scores each.
    width = {"cross_covariance": 4, "channel": 4, "window": 9, "outlook": 9}[op]
    assert lse.numel() * width == case.scores


def test_every_case_is_consistent_and_a_part_of_its_name_chooses_no_other():
    for case in CASES:
        if case.ragged:
            assert len(case.lengths) == case.batch
            assert max(case.lengths) == case.tokens
    # pytest -k looks for parts of names: "vit_base-forward" shall choose one case.
    on_gpu = [case.name for case in CASES if case.device == "cuda"]
    assert not [n for n in on_gpu if any(n != other and other.endswith(n) for other in on_gpu)]
