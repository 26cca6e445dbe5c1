"""Where the attention kernels' rounding shows: huge scores, one visible key, captured heads."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests import attention_cases, varlen_cases
from tests.attention_cases import Case, Inputs, make_inputs, reference_results
from tests.error_budget import assert_within_budget

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels import condition_number
from leaner_kernels.ops.attention import backward, forward, operators, reference, varlen
from leaner_kernels.ops.attention.call import Call
from tests.interpreter import test_attention_kernels, test_short_kernels

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
FAMILIES: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "any length": test_attention_kernels.run_kernels,
    "resident, keys in one step": lambda inputs: test_short_kernels.run_resident(inputs, 128),
    "resident, keys in several": lambda inputs: test_short_kernels.run_resident(inputs, 16),
    "grouped": lambda inputs: test_short_kernels.run_grouped(inputs, 2),
}
ANY_DTYPE = [(family, dtype) for family in FAMILIES for dtype in (HALF, BF16)]
ANY_DTYPE.append(("any length", SINGLE))
families = pytest.mark.parametrize(("family", "dtype"), ANY_DTYPE, ids=str)


@contextmanager
def contracted() -> Iterator[None]:
    """Round a * b + c once wherever the product goes straight into the sum, as compilers do."""
    original = {name: getattr(InterpreterBuilder, name) for name in ("create_fadd", "create_fsub")}

    def multiply(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle) -> TensorHandle:
        found = self.binary_op(x, y, np.multiply)
        if x.data.dtype == y.data.dtype == np.float32:
            found.product = x.data.astype(np.float64) * y.data  # pyright: ignore
        return found

    def fusing(name: str, op: Callable[..., np.ndarray]) -> Callable[..., TensorHandle]:
        def method(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle) -> TensorHandle:
            left, right = (getattr(handle, "product", None) for handle in (x, y))
            if left is None and right is None:
                return original[name](self, x, y)
            # Of two products one is rounded.
            left, right = x.data if left is None else left, y.data if left is not None else right
            with np.errstate(all="ignore"):
                exact = op(np.asarray(left, np.float64), np.asarray(right, np.float64))
            return TensorHandle(exact.astype(np.float32), x.dtype.scalar)

        return method

    with mock.patch.multiple(
        InterpreterBuilder,
        create_fmul=multiply,
        create_fadd=fusing("create_fadd", np.add),
        create_fsub=fusing("create_fsub", np.subtract),
    ):
        yield


def inputs_of(dtype: torch.dtype, **options: object) -> Inputs:
    return make_inputs(Case("", 1, 2, 2, 20, 40, 16, **options), dtype)  # pyright: ignore


def within_float32(results: dict[str, Tensor], inputs: Inputs, *names: str) -> None:
    """Hold results to what float32 arithmetic makes of the inputs."""
    exact, peers = (reference_results(inputs, dtype) for dtype in (torch.float64, SINGLE))
    for name in names:
        assert_within_budget(results[name], peers[name], exact[name])


@pytest.mark.parametrize("least", [-1e2, -6e4, -1e9, -1e30])
@families
def test_a_row_of_large_negative_numbers_has_the_gradients_of_equal_scores(
    family: str, dtype: torch.dtype, least: float
) -> None:
    """Without a query such a row's scores are equal exactly, and so is P, in any precision."""
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
    within_float32(results, inputs, "out", "lse", "entropy", "dq", "dk", "dv", "dmask")


@families
def test_equal_scores_of_billions_share_a_row(family: str, dtype: torch.dtype) -> None:
    """Of powers of two, so that the scores are equal in whatever order products are added."""
    inputs = inputs_of(dtype)
    inputs.query.zero_()
    inputs.query[:, :, 3] = 2**15
    inputs.key.fill_(2**13)
    with contracted():
        results = FAMILIES[family](inputs)
    within_float32(results, inputs, "out", "lse", "entropy", "dv")


@pytest.mark.parametrize("dtype", [HALF, BF16, SINGLE], ids=str)
def test_equal_scores_of_billions_share_a_row_of_a_packed_batch(dtype: torch.dtype) -> None:
    inputs = varlen_cases.make_inputs(varlen_cases.Case("", (20, 40), 2, 16), dtype)
    inputs.query.zero_()
    inputs.query[3], inputs.query[50] = 2**15, 2**15
    inputs.key.fill_(2**13)
    few = [mock.patch.object(kernels, "SPARE_PROGRAMS", 3) for kernels in (forward, backward)]
    with few[0], few[1]:
        out, max_log_sum = varlen._attention_varlen_cuda(*inputs.operands, *inputs.knobs)
        _, _, dv = varlen._attention_varlen_backward_cuda(
            inputs.grad, *inputs.operands, out, max_log_sum, *inputs.knobs
        )
    exact, peers = (varlen_cases.assemble(inputs, d) for d in (torch.float64, SINGLE))
    assert_within_budget(out, peers["out"], exact["out"])
    assert_within_budget(dv, peers["dv"], exact["dv"])


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
    heads = operators.new_stats(inputs.query, inputs.sample)[-1]
    forward.launch_capture(inputs.call, inputs.sample, heads)
    return heads[inputs.sample >= 0]


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("case", attention_cases.CASES, ids=attention_cases.NAMES)
def test_captured_heads_are_as_accurate_as_float32(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    within_float32({"heads": capture(inputs)}, inputs, "heads")


@pytest.mark.parametrize("case", varlen_cases.CASES, ids=varlen_cases.NAMES)
def test_captured_heads_of_a_packed_batch_are_as_accurate_as_float32(
    case: varlen_cases.Case,
) -> None:
    inputs = varlen_cases.make_inputs(case, BF16)
    with mock.patch.object(forward, "SPARE_PROGRAMS", 3):
        *_, heads, _ = varlen._attention_varlen_with_stats_cuda(
            *inputs.operands, inputs.sample, *inputs.knobs
        )
    exact, peers = (varlen_cases.assemble(inputs, d) for d in (torch.float64, SINGLE))
    captured = heads[inputs.sample >= 0]
    assert_within_budget(captured, peers["heads"], exact["heads"])


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_captured_heads_count_what_is_small_beside_the_maximum(dtype: torch.dtype) -> None:
    """A thousand keys of 1e-4 each beside one of 1: the second part of those is what is left."""
    inputs = make_inputs(Case("", 1, 1, 1, 16, 1000, 16), dtype)
    inputs.query.fill_(1)
    inputs.key.mul_(0.1)
    inputs.key[:, :, 0] = 9.2 / 4
    inputs.value.abs_()
    inputs.value[:, :, 0] = 0
    within_float32({"heads": capture(inputs)}, inputs, "heads")


@pytest.mark.parametrize("rounding", ["exact", "gpu"], indirect=True)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_captured_heads_keep_a_condition_number_of_millions(
    dtype: torch.dtype, rounding: None
) -> None:
    """Of two heads that differ in one small component of the query alone."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 48, 16).expand(1, 2, 48, 16).clone() for _ in range(3))
    q[:, 0, :, 0] = 0
    q[:, 1, :, 0] *= 1e-4
    call = Call(*(t.to(dtype) for t in (q, k, v)), None, None, None, 0.0, False, 0.25)
    heads = torch.empty(1, 48, 32)
    forward.launch_capture(call, torch.zeros(1, dtype=torch.int32), heads)
    p, _, _ = reference.probabilities(
        call.query.double(), call.key.double(), None, None, False, 0.25
    )
    exact = reference.attend(p, call.value.double(), None, 0.0).transpose(1, 2).flatten(2)
    truth = condition_number(exact).kappa.item()
    assert 2e6 < truth < 1e7
    assert condition_number(heads).kappa.item() == pytest.approx(truth, rel=0.03)
