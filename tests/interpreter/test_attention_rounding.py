"""Where the attention kernels' rounding shows: huge scores, one visible key, captured heads."""

import os
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.attention_cases import (
    AttentionTestCase,
    Inputs,
    check,
    make_inputs,
    new_stats,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

from leaner_kernels import condition_number
from leaner_kernels.ops.attention import reference
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.kernels import scores
from tests.interpreter import online, test_short_kernels
from tests.interpreter.rounding import contracted

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
FAMILIES: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "any length": online.run,
    "short, keys in one step": lambda inputs: test_short_kernels.run_short(inputs, 128),
    "short, keys in several": lambda inputs: test_short_kernels.run_short(inputs, 16),
}
ANY_DTYPE = [(family, dtype) for family in FAMILIES for dtype in (HALF, BF16)]
ANY_DTYPE.append(("any length", SINGLE))
families = pytest.mark.parametrize(("family", "dtype"), ANY_DTYPE, ids=str)


def inputs_of(dtype: torch.dtype, **options: object) -> Inputs:
    return make_inputs(AttentionTestCase("", 1, 2, 2, 20, 40, 16, **options), dtype)  # pyright: ignore


def within_budget(results: dict[str, Tensor], inputs: Inputs, *names: str) -> None:
    """Hold results to what correct arithmetic makes of the inputs."""
    check(inputs, {name: results[name] for name in names})


@pytest.mark.parametrize("least", [-1e2, -6e4, -1e9, -1e30])
@families
def test_a_row_of_large_negative_numbers_has_the_gradients_of_equal_scores(
    family: str, dtype: torch.dtype, least: float
) -> None:
    """Without a query such a row's scores are equal exactly, as they are without the mask."""
    if dtype == HALF and least < -65504:
        pytest.skip("float16 has no such number")
    inputs = inputs_of(dtype, mask="shared")
    assert inputs.attn_mask is not None
    mask = torch.zeros_like(inputs.attn_mask)
    mask[3] = least
    mask[4, 10:] = least
    inputs.query[:, :, 3] = 0
    inputs = inputs._replace(attn_mask=mask)
    with contracted():
        results = FAMILIES[family](inputs)
    alike = inputs._replace(attn_mask=mask.clone())
    alike.attn_mask[3] = 0
    within_budget(results, alike, "out", "entropy", "prob_norm", "dq", "dk", "dv", "dmask")


@families
def test_equal_scores_of_billions_share_a_row(family: str, dtype: torch.dtype) -> None:
    """Of powers of two, so that the scores are equal in whatever order products are added."""
    alike = inputs_of(dtype)
    alike.query.zero_()
    alike.key.fill_(2**13)
    inputs = alike._replace(query=alike.query.clone())
    inputs.query[:, :, 3] = 2**15
    with contracted():
        results = FAMILIES[family](inputs)
    within_budget(results, alike, "out", "entropy", "prob_norm", "dv")


@pytest.mark.parametrize("mask", [None, "line"])
@families
def test_a_row_with_one_key_has_no_entropy(
    family: str, dtype: torch.dtype, mask: str | None
) -> None:
    inputs = inputs_of(dtype, lengths=(1,), mask=mask)
    with contracted():
        results = FAMILIES[family](inputs)
    assert (results["entropy"] == 0).all()
    assert torch.equal(results["prob_norm"], torch.full((1, 2), 20.0).sqrt())
    assert torch.equal(results["out"], inputs.value[:, :, :1].expand_as(results["out"]))


def capture(inputs: Inputs) -> Tensor:
    heads = new_stats(inputs.query, inputs.sample)[-1]
    online.capture(inputs.call, inputs.sample, heads)
    return heads[inputs.sample >= 0]


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_captured_heads_count_what_is_small_beside_the_maximum(dtype: torch.dtype) -> None:
    """A thousand keys of 1e-4 each beside one of 1: the second part of those is what is left."""
    inputs = make_inputs(AttentionTestCase("", 1, 1, 1, 16, 1000, 16), dtype)
    inputs.query.fill_(1)
    inputs.key.mul_(0.1)
    inputs.key[:, :, 0] = 9.2 / 4
    inputs.value.abs_()
    inputs.value[:, :, 0] = 0
    within_budget({"heads": capture(inputs)}, inputs, "heads")


@pytest.mark.parametrize("rounding", ["exact", "gpu"], indirect=True)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_captured_heads_keep_a_condition_number_of_millions(
    dtype: torch.dtype, rounding: None
) -> None:
    """Of two heads that differ in one small component of the query alone.

    Heads in float32 are off by up to 4% here, by the order of sums; P as two bfloat16 by 16%.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 48, 16).expand(1, 2, 48, 16).clone() for _ in range(3))
    q[:, 0, :, 0] = 0
    q[:, 1, :, 0] *= 1e-4
    call = Call(*(t.to(dtype) for t in (q, k, v)), None, None, None, 0.0, False, 0.25)
    heads = torch.empty(1, 48, 32)
    online.capture(call, torch.zeros(1, dtype=torch.int32), heads)
    p, _, _ = reference.probabilities(
        call.query.double(), call.key.double(), None, None, scale=0.25
    )
    exact = reference.forward(p, call.value.double(), None, 0.0).transpose(1, 2).flatten(2)
    truth = condition_number(exact).kappa.item()
    assert 2e6 < truth < 1e7
    assert condition_number(heads).kappa.item() == pytest.approx(truth, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), [(4096, 16), (16, 4096)])
def test_float32_sums_over_many_tokens_stay_within_the_error_budget(
    rows: int, cols: int, gpu_rounding: None
) -> None:
    """The first tokens make up most of each sum, which one chain would round 4,096 times."""
    inputs = make_inputs(AttentionTestCase("", 1, 1, 1, rows, cols, 16), torch.float32)
    for tensor in (inputs.value, inputs.grad):
        tensor[:, :, 64:] *= 0.01
    check(inputs, online.run(inputs))


def test_values_of_one_come_out_as_one_but_for_half_a_unit(gpu_rounding: None) -> None:
    """The backward's delta comes from the output, and has to cancel dP: a fast division is off."""
    inputs = make_inputs(AttentionTestCase("", 2, 2, 2, 40, 2, 16), torch.float32)
    inputs.value.fill_(1)
    out = online.run(inputs)["out"]
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
