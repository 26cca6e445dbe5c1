"""The Triton kernels of outlook attention, run by Triton's interpreter on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from tests.error_budget import assert_within_budget
from tests.outlook_cases import (
    CASES,
    NAMES,
    STATISTICS,
    Inputs,
    make_inputs,
    peers_of,
    reference_results,
    without_the_unwritten,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.outlook import launch


def run_kernels(inputs: Inputs) -> dict[str, Tensor]:
    """Launch forward, capture and backward as the CUDA operators do."""
    value, logits, grad, sample, params = inputs
    batch, y, x, heads, dim = value.shape
    out = value.new_empty(value.shape)
    lse = torch.empty(batch, heads, *logits.shape[1:3], logits.shape[-1])
    stats = torch.empty(len(STATISTICS), batch, heads)
    captured = torch.empty(len(sample), y * x, heads * dim)
    launch.forward((value, logits), params, Results(out, lse, stats, captured, sample))
    grads = value.new_empty(value.shape), logits.new_empty(logits.shape)
    launch.backward(grad, (value, logits), params, lse, grads)
    found = zip(
        ("out", "lse", *STATISTICS, "heads", "dvalue", "dlogits"),
        (out, lse, *stats, captured, *grads),
        strict=True,
    )
    return without_the_unwritten(dict(found), sample)


# Nothing is rounded between inputs and results: a dtype of each case, and all of a small one.
ARITHMETIC = {"an odd map": torch.float32, "kernel size 5": torch.bfloat16}
CALLS = [
    *((name, ARITHMETIC.get(name, torch.float16), "exact") for name in NAMES),
    ("VOLO", torch.float16, "gpu"),
    ("VOLO", torch.bfloat16, "gpu"),
    ("VOLO", torch.bfloat16, "exact"),
    ("VOLO", torch.float32, "exact"),
]


@pytest.mark.parametrize(("name", "dtype", "rounding"), CALLS, indirect=["rounding"], ids=str)
def test_kernels_stay_within_the_error_budget(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(CASES[NAMES.index(name)], dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, dtype)
    found = run_kernels(inputs)
    assert found.keys() == exact.keys()
    for result, actual in found.items():
        assert_within_budget(actual, peers[result], exact[result])


def test_output_without_statistics_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs then own a tile each, and not a whole head."""
    grids, start = [], Launch.start

    def noted(self: Launch) -> None:
        grids.append(self.grid)
        start(self)

    monkeypatch.setattr(Launch, "start", noted)
    inputs = make_inputs(CASES[NAMES.index("more than a tile, lean")], torch.float16)
    tensors, params = inputs[:2], inputs.params
    shape = *inputs.logits.shape[1:3], inputs.logits.shape[-1]
    found = []
    for stats in (torch.empty(len(STATISTICS), 1, 1), None):
        out, lse = inputs.value.new_empty(inputs.value.shape), torch.empty(1, 1, *shape)
        launch.attend(tensors, params, out, lse, stats)
        found.append((out, lse))
    expected, actual = found
    (with_stats,), (plain,) = grids
    assert with_stats == 1
    assert plain > 1
    for a, b in zip(actual, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["VOLO", "windows at every pixel"])
def test_a_place_that_is_never_looked_at_costs_no_statistic(name: str) -> None:
    inputs = make_inputs(CASES[NAMES.index(name)], torch.float16)
    inputs.logits[..., 1:2] = float("-inf")
    exact, found = reference_results(inputs, torch.float64), run_kernels(inputs)
    for statistic in STATISTICS:
        torch.testing.assert_close(found[statistic].double(), exact[statistic], rtol=1e-3, atol=0)


def test_the_backward_is_deterministic() -> None:
    inputs = make_inputs(CASES[NAMES.index("pixels that no window holds")], torch.float16)
    first, second = run_kernels(inputs), run_kernels(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
