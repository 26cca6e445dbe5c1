"""The Triton kernels over varlen sequences, run by Triton's interpreter on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from tests.interpreter.rounding import in_float32_first
from tests.varlen_cases import (
    CASES,
    STATISTICS,
    WINDOW_CASES,
    Inputs,
    VarlenTestCase,
    assemble,
    case_named,
    check,
    finish,
    make_inputs,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops import route
from leaner_kernels.ops.attention import op


def run_kernels(inputs: Inputs) -> dict[str, Tensor]:
    """Run what the CUDA operators run: forward with statistics, capture and backward."""
    out, lse, stats, heads, max_log_sum = route.forward_on_gpu(
        op.Varlen, True, *inputs.operands, inputs.sample, *inputs.params
    )
    grads = route.backward_on_gpu(
        op.Varlen, inputs.grad, *inputs.operands, out, max_log_sum, *inputs.params
    )
    names = "out", "lse", *STATISTICS, "heads", "dq", "dk", "dv"
    return finish(inputs, dict(zip(names, (out, lse, *stats, heads, *grads), strict=True)))


@in_float32_first
@pytest.mark.parametrize("case", [*CASES, *WINDOW_CASES], ids=lambda case: case.name)
def test_kernels_stay_within_the_error_budget(case: VarlenTestCase, dtype: torch.dtype) -> None:
    """Outside the sequences all is NaN: what is read there shows."""
    inputs = make_inputs(case, dtype)
    check(inputs, run_kernels(inputs))


@pytest.mark.slow
def test_the_backward_is_deterministic() -> None:
    inputs = make_inputs(case_named("dropout with everything"), torch.float16)
    first, second = run_kernels(inputs), run_kernels(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_much_padding_is_filled() -> None:
    """More than one round of all programs that fill."""
    before = 5
    case = VarlenTestCase(
        "a short sequence in a long buffer", (3,), 8, 128, before=before, after=300
    )
    inputs = make_inputs(case, torch.float32)
    exact = assemble(inputs, torch.float64)
    assert inputs.query.numel() > 2 * 128 * 1024
    results = run_kernels(inputs)
    owned = slice(before, before + 3)
    for name in ("out", "dq", "dk", "dv"):
        assert (results[name][:before] == 0).all()
        assert (results[name][owned] != 0).all()
        assert (results[name][before + 3 :] == 0).all()
    assert torch.equal(results["lse"].isinf(), exact["lse"].isinf())


@pytest.mark.parametrize(
    ("wild", "clamped"),
    [
        ((-7, 4, 8, 20), (0, 4, 8, 20)),
        ((0, 4, 8, 1 << 30), (0, 4, 8, 20)),
        ((0, 20, 1 << 30, 1 << 30), (0, 20, 20, 20)),
        ((50, 50, 50, 50), (20, 20, 20, 20)),
        ((9, 9, -(1 << 31), -5), (9, 9, 9, 9)),
    ],
    ids=str,
)
def test_wild_starts_and_samples_are_clamped_and_skipped(
    wild: tuple[int, ...], clamped: tuple[int, ...]
) -> None:
    """The device cannot raise; it must not reach outside either."""
    inputs = make_inputs(VarlenTestCase("", (4, 4, 12), 2, 16), torch.float32)
    found = []
    for starts in (wild, clamped):
        tensor = torch.tensor(starts, dtype=torch.int32)
        sample = torch.tensor([3, -7, 1 << 20], dtype=torch.int32)
        packed = inputs._replace(cu_seqlens=tensor, cu_seqlens_k=tensor, sample=sample)
        out, *stats, heads, max_log_sum = route.forward_on_gpu(
            op.Varlen, True, *packed.operands, sample, *packed.params
        )
        assert heads.isnan().all()
        grads = route.backward_on_gpu(
            op.Varlen, packed.grad, *packed.operands, out, max_log_sum, *packed.params
        )
        found.append((out, *stats, *grads))
    for actual, expected in zip(*found):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


def test_a_maximum_that_is_too_short_computes_the_first_rows() -> None:
    inputs = make_inputs(VarlenTestCase("", (40, 20), 2, 16), torch.float32)
    short = inputs._replace(max_seqlen=33, max_seqlen_k=33)
    cut = torch.cat([torch.arange(33), torch.arange(40, 60)])
    expected = make_inputs(VarlenTestCase("", (33, 20), 2, 16), torch.float32)
    expected = expected._replace(**{n: getattr(inputs, n)[cut] for n in ("query", "key", "value")})
    out, _ = route.forward_on_gpu(op.Varlen, False, *short.operands, *short.params)
    wanted, _ = route.forward_on_gpu(op.Varlen, False, *expected.operands, *expected.params)
    assert torch.equal(out[cut], wanted)
    assert out[33:40].isnan().all()
