"""The Triton kernels of softmax attention, run by Triton's interpreter on the CPU."""

import os

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.attention_cases import (
    CASES,
    NAMES,
    STATISTICS,
    WINDOW_CASES,
    AttentionTestCase,
    Inputs,
    check,
    make_inputs,
    new_gradients,
    new_stats,
    reference_results,
)
from tests.error_budget import assert_within_budget
from tests.interpreter.rounding import in_float32_first

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops.attention import op
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.kernels import scores
from tests.interpreter import online


def run_kernels(inputs: Inputs) -> dict[str, Tensor]:
    """Launch forward with statistics, capture and backward as the CUDA operators do."""
    query, key, value, mask = *inputs[:3], inputs.attn_mask
    out, max_log_sum = op.new_out(query), online.new_max_log_sum(query)
    lse, stats, heads = new_stats(query, inputs.sample)
    online.forward(inputs.call, out, max_log_sum, lse, stats)
    online.capture(inputs.call, inputs.sample, heads)
    mask_grad = mask is not None and mask.is_floating_point()
    *grads, _ = new_gradients(query, key, value, mask, False)
    ds = torch.zeros(*query.shape[:3], key.shape[2]) if mask_grad else None
    online.backward(inputs.grad, inputs.call, out, max_log_sum, *grads, ds)
    unwritten = heads[inputs.sample < 0]
    assert unwritten.isnan().all(), "a slot with a negative index was written"
    names = "out", "lse", *STATISTICS, "dq", "dk", "dv"
    results = dict(zip(names, (out, lse, *stats, *grads), strict=True))
    results["heads"] = heads[inputs.sample >= 0]
    if mask is not None and ds is not None:
        results["dmask"] = ds.sum_to_size(mask.shape).to(mask.dtype)
    return results


@in_float32_first
@pytest.mark.parametrize("case", [*CASES, *WINDOW_CASES], ids=lambda case: case.name)
def test_kernels_stay_within_the_error_budget(case: AttentionTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    results = run_kernels(inputs)
    assert results.keys() == reference_results(inputs, torch.float64).keys()
    check(inputs, results)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), [(4096, 16), (16, 4096)])
def test_float32_sums_over_many_tokens_stay_within_the_error_budget(
    rows: int, cols: int, gpu_rounding: None
) -> None:
    """The first tokens make up most of each sum, which one chain would round 4,096 times."""
    inputs = make_inputs(AttentionTestCase("", 1, 1, 1, rows, cols, 16), torch.float32)
    for tensor in (inputs.value, inputs.grad):
        tensor[:, :, 64:] *= 0.01
    check(inputs, run_kernels(inputs))


def test_values_of_one_come_out_as_one_but_for_half_a_unit(gpu_rounding: None) -> None:
    """The backward's delta comes from the output, and has to cancel dP: a fast division is off."""
    inputs = make_inputs(AttentionTestCase("", 2, 2, 2, 40, 2, 16), torch.float32)
    inputs.value.fill_(1)
    out = run_kernels(inputs)["out"]
    assert ((out - 1).abs() <= 2.0**-24).all()


@triton.jit
def _tanh_kernel(x_ptr, y_ptr, slope_ptr, BLOCK: tl.constexpr):
    y, slope = scores.tanh(tl.load(x_ptr + tl.arange(0, BLOCK)))
    tl.store(y_ptr + tl.arange(0, BLOCK), y)
    tl.store(slope_ptr + tl.arange(0, BLOCK), slope)


def test_tanh_keeps_its_digits_near_zero_and_its_derivative_far_from_it() -> None:
    size = 2 ** torch.linspace(-30, 4, 1 << 14)
    x = torch.cat([size, -size, torch.tensor([0.0, 1e4, -1e4, float("inf")])])
    x = torch.nn.functional.pad(x, (0, (1 << 16) - len(x)))
    y, slope = torch.empty_like(x), torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, slope, BLOCK=1 << 16)
    exact, e = x.double().tanh(), (-2 * x.double().abs()).exp()
    assert ((y - exact).abs() <= 4e-7 * exact.abs()).all()
    # What rounds the exponent of e, up to 46, is an error of e.
    wanted = 4 * e / (1 + e) ** 2
    assert ((slope - wanted).abs() <= 4e-6 * wanted).all()


@pytest.mark.parametrize(
    ("outside", "inside"), [(slice(0, 140), slice(300, 400)), (slice(260, 400), slice(0, 100))]
)
def test_tiles_outside_the_window_are_not_read(outside: slice, inside: slice) -> None:
    """Keys and queries there are NaN, which 0 times their values would pass on."""
    case = AttentionTestCase("", 1, 1, 1, 400, 400, 16, window=(20, 10))
    inputs = make_inputs(case, torch.float32)
    clean = run_kernels(inputs)
    for tensor in inputs[:4]:
        tensor[:, :, outside] = float("nan")
    results = run_kernels(inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[name][:, :, inside], clean[name][:, :, inside]), name


def test_packed_views_need_no_copy() -> None:
    """The kernels read (B, N, 3, H, D) in place and write one packed gradient."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 33, 3, 4, 16)
    query, key, value = op.split_qkv(qkv)
    call = Call(query, key, value, None, None, None, 0.0, False, 0.25)
    out, max_log_sum = op.new_out(query), online.new_max_log_sum(query)
    online.forward(call, out, max_log_sum)
    dqkv, grad = torch.empty_like(qkv), torch.randn(out.shape)
    online.backward(grad, call, out, max_log_sum, *op.split_qkv(dqkv), None)

    def exact(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = qkv.to(dtype).requires_grad_()
        a = torch.nn.functional.scaled_dot_product_attention(*op.split_qkv(x))
        (gradient,) = torch.autograd.grad(a, x, grad.to(dtype))
        return a, gradient

    for actual, peer, truth in zip((out, dqkv), exact(torch.float32), exact(torch.float64)):
        assert_within_budget(actual, peer, truth)


def test_lengths_and_samples_outside_the_batch_are_clamped_and_skipped() -> None:
    """The device cannot raise; it must not read outside either."""
    inputs = make_inputs(CASES[NAMES.index("lengths")], torch.float32)
    clamped = inputs._replace(key_lengths=torch.tensor([1, 50, 50], dtype=torch.int32))
    wild = inputs._replace(
        key_lengths=torch.tensor([-4, 50, 1 << 20], dtype=torch.int32),
        sample=torch.tensor([3, -7, 1 << 20], dtype=torch.int32),
    )
    out = op.new_out(inputs.query)
    online.forward(wild.call, out, online.new_max_log_sum(inputs.query))
    assert torch.equal(out, run_kernels(clamped)["out"])
    heads = torch.full((3, 50, 32), 7.0)
    online.capture(wild.call, wild.sample, heads)
    assert (heads == 7).all()


def test_nothing_past_a_length_is_read() -> None:
    inputs = make_inputs(CASES[NAMES.index("lengths")], torch.float32)
    expected = run_kernels(inputs)
    for length, key, value in zip(inputs.key_lengths, inputs.key, inputs.value):
        key[:, length:], value[:, length:] = float("nan"), float("nan")
    for name, result in run_kernels(inputs).items():
        assert torch.equal(result, expected[name]), name


def test_statistics_show_a_nan() -> None:
    inputs = make_inputs(CASES[NAMES.index("lengths")], torch.float32)
    inputs.query[1, 1, 7, 3] = float("nan")
    results = run_kernels(inputs)
    for name in STATISTICS:
        assert results[name].isnan().nonzero().tolist() == [[1, 1]], name


def test_the_backward_is_deterministic() -> None:
    inputs = make_inputs(CASES[NAMES.index("dropout with everything")], torch.float16)
    first, second = run_kernels(inputs), run_kernels(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
