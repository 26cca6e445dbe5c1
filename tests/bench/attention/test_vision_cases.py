"""The work of each vision case, against hand counts and against the public functions."""

import pytest
import torch

import leaner_kernels
from bench.attention.vision_cases import VISION_CASES, VisionCase

BY_NAME = {case.name: case for case in VISION_CASES}
TINY = [
    VisionCase(op, "cpu", op, 2, 6, 3, 4, torch.float32, window=3)
    for op in ("cross_covariance", "channel", "window", "outlook")
]


@pytest.mark.parametrize(
    ("name", "forward_mb", "backward_mb", "forward_gflop", "backward_gflop"),
    [
        # 4 and 7 tensors of 128 * 196 * 512 bfloat16, products of 2 * 128 * 8 * 64 * 64 * 196.
        ("xcit_m", 102.8, 179.8, 3.29, 8.22),
        ("davit_channel3", 102.8, 179.8, 1.64, 4.11),
        # 128 * 16 heads of 4 windows of 49 * 49 scores.
        ("davit_window3", 102.8, 179.8, 2.52, 6.29),
        # 2 or 3 maps of 128 * 784 * 256 and 1 or 2 times 128 * 196 * 8 * 81 logits.
        ("volo_d3_outlook", 135.3, 219.2, 1.04, 2.08),
    ],
)
def test_work_is_counted_once(name, forward_mb, backward_mb, forward_gflop, backward_gflop):
    case = BY_NAME[name]
    assert case.bytes("forward") / 1e6 == pytest.approx(forward_mb, abs=0.05)
    assert case.bytes("backward") / 1e6 == pytest.approx(backward_mb, abs=0.05)
    assert case.flops("forward") / 1e9 == pytest.approx(forward_gflop, abs=0.005)
    assert case.flops("backward") / 1e9 == pytest.approx(backward_gflop, abs=0.005)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.op)
def test_the_public_function_takes_the_shapes_and_parameters(case):
    inputs = [torch.randn(shape) for shape in case.input_shapes]
    function = getattr(leaner_kernels, f"{case.op}_attention")
    assert function(*inputs, **case.params).shape == case.out_shape
    operator = getattr(torch.ops.leaner_kernels, f"{case.op}_attention")
    out, lse = operator(*inputs, *case.operator_params)
    assert out.shape == case.out_shape
    # A softmax over D, D, 9 and 9 scores each.
    width = {"cross_covariance": 4, "channel": 4, "window": 9, "outlook": 9}[case.op]
    assert lse.numel() * width == case.scores


def test_the_papers_shapes_are_there():
    def shape(name):
        case = BY_NAME[name]
        return case.batch, case.heads, case.tokens, case.head_dim

    assert shape("xcit_m") == (128, 8, 196, 64)
    assert shape("xcit_m_lean") == (128, 16, 196, 64)
    assert shape("xcit_l") == (64, 16, 196, 48)
    assert shape("xcit_l_lean") == (64, 24, 196, 32)
    stages = [shape(f"davit_channel{stage}") for stage in (1, 2, 3, 4)]
    assert stages == [(128, 4, 3136, 32), (128, 8, 784, 32), (128, 16, 196, 32), (128, 32, 49, 32)]
    assert [shape(f"davit_window{stage}") for stage in (1, 2, 3, 4)] == stages
    assert shape("davit_channel3_lean") == shape("davit_window3_lean") == (128, 32, 196, 16)
    assert shape("volo_d3_outlook") == (128, 8, 784, 32)
    assert shape("volo_d3_outlook_lean") == (128, 16, 784, 16)
    assert {BY_NAME[name].places for name in BY_NAME if "volo" in name} == {14}
