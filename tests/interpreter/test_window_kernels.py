"""The Triton kernels of window attention, run by Triton's interpreter on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from tests.error_budget import assert_within_budget
from tests.window_cases import (
    CASES,
    NAMES,
    STATISTICS,
    Inputs,
    WindowTestCase,
    make_inputs,
    peers_of,
    reference_results,
    without_the_unwritten,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.window import launch
from tests.interpreter.rounding import in_float32_first, in_half_arithmetic


def run_kernels(inputs: Inputs, with_stats: bool = True) -> dict[str, Tensor]:
    """Launch forward, capture and backward as the CUDA operators do."""
    qkv, grad, sample, window, scale = inputs
    batch, y, x, _, heads, dim = qkv.shape
    params = *window, scale
    out, lse = qkv.new_empty(batch, y, x, heads, dim), torch.empty(batch, heads, y, x)
    stats = torch.empty(len(STATISTICS), batch, heads)
    captured = torch.empty(len(sample), y * x, heads * dim)
    wanted = (stats, captured, sample) if with_stats else (None, None, None)
    launch.forward((qkv,), params, Results(out, lse, *wanted))
    dqkv = qkv.new_empty(qkv.shape)
    launch.backward(grad, (qkv,), params, lse, (dqkv,))
    results = {"out": out, "lse": lse, "dqkv": dqkv}
    if with_stats:
        results |= zip((*STATISTICS, "heads"), (*stats, captured), strict=True)
        results = without_the_unwritten(results, sample)
    return results


def check(inputs: Inputs, results: dict[str, Tensor]) -> None:
    exact = reference_results(inputs, torch.float64)
    peers = peers_of(inputs, inputs.qkv.dtype)
    assert results.keys() == exact.keys()
    for name, actual in results.items():
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("rounding", ["exact", "gpu"], indirect=True)
def test_gradients_cancel_what_all_values_share(rounding: None) -> None:
    """A log-sum-exp of 30 is rounded by 1e-6, and dP - delta must not keep that of a large dP."""
    inputs = make_inputs(WindowTestCase("", 1, (2, 2), (2, 5), 2, 10), torch.float32)
    inputs.qkv[:, :, :, 2] += 20
    inputs = inputs._replace(scale=3.0)
    check(inputs, run_kernels(inputs))


@in_float32_first
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_stay_within_the_error_budget(case: WindowTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    check(inputs, run_kernels(inputs))


@in_half_arithmetic
def test_the_capture_sees_what_keys_of_little_weight_add(dtype: torch.dtype) -> None:
    """One key of nothing takes almost all the weight: the others are below float16's normals."""
    inputs = make_inputs(CASES[NAMES.index("a full tile")], dtype)._replace(scale=0.25)
    query, key, value = inputs.qkv.unbind(3)
    query[..., 0], key[..., 0] = 4, -1
    key[:, ::8, ::8], value[:, ::8, ::8] = 0, 0
    key[:, ::8, ::8, :, 0] = 10
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, dtype)
    assert 0 < exact["heads"].abs().max() < 0.05
    assert_within_budget(run_kernels(inputs)["heads"], peers["heads"], exact["heads"])


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale_will_do(scale: float) -> None:
    inputs = make_inputs(CASES[NAMES.index("flat windows")], torch.float32)._replace(scale=scale)
    check(inputs, run_kernels(inputs))


def test_the_backward_is_deterministic() -> None:
    for name in ("DaViT", "more than a tile"):
        inputs = make_inputs(CASES[NAMES.index(name)], torch.float16)
        first, second = run_kernels(inputs), run_kernels(inputs)
        for result, value in first.items():
            assert torch.equal(value, second[result]), result
