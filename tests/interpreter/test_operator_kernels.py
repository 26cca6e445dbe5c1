"""The Triton kernels of the operators beside softmax attention, run by Triton's interpreter."""

import os

import pytest
import torch
from torch import Tensor

from tests.error_budget import assert_within_budget
from tests.operator_cases import (
    CASES,
    CHANNEL,
    CROSS,
    STATISTICS,
    CovarianceTestCase,
    OperatorTestCase,
    OutlookTestCase,
    WindowTestCase,
    check,
    identify,
    make_inputs,
    named,
    peers_of,
    reference_results,
    run_kernels,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)


from leaner_kernels import condition_number, cross_covariance_attention
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops.outlook import OutlookCall
from leaner_kernels.ops.outlook import kernels as outlook
from leaner_kernels.ops.route import Results
from tests.interpreter.rounding import contracted, in_float32_first, in_half_arithmetic

FAMILIES = "covariance", "window"


@in_float32_first
@pytest.mark.parametrize(
    "case", [case for family in FAMILIES for case in CASES[family]], ids=identify
)
def test_kernels_stay_within_the_error_budget(case: OperatorTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    check(inputs, run_kernels(inputs))


# Nothing is rounded between inputs and results: a dtype of each case, and all of a small one.
ARITHMETIC = {"an odd map": torch.float32, "kernel size 5": torch.bfloat16}
CALLS = [
    *((name, ARITHMETIC.get(name, torch.float16), "exact") for name, *_ in CASES["outlook"]),
    ("VOLO", torch.float16, "gpu"),
    ("VOLO", torch.bfloat16, "gpu"),
    ("VOLO", torch.bfloat16, "exact"),
    ("VOLO", torch.float32, "exact"),
]


@pytest.mark.parametrize(("name", "dtype", "rounding"), CALLS, indirect=["rounding"], ids=str)
def test_outlook_stays_within_the_error_budget(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(named("outlook", name), dtype)
    check(inputs, run_kernels(inputs))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CovarianceTestCase("cross", CROSS, 2, 70, 2, 16), torch.float16),
        (CovarianceTestCase("channel", CHANNEL, 2, 70, 2, 16), torch.float16),
        (named("window", "DaViT"), torch.float16),
        (named("window", "more than a tile"), torch.float16),
        (named("outlook", "pixels that no window holds"), torch.float16),
    ],
    ids=identify,
)
def test_the_kernels_are_deterministic(case: OperatorTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    first, second = run_kernels(inputs), run_kernels(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# --- Entropy where products join sums -------------------------------------------------------------


def diagonal(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two diagonal matrices; rows of their product have one score, far above the others."""
    rows = torch.diag(torch.linspace(7, 9, size)).to(dtype)
    return rows, torch.diag(torch.linspace(60, 70, size)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        WindowTestCase("", 1, (1, 1), (4, 4), 1, 16),
        CovarianceTestCase("channels", CHANNEL, 1, 16, 1, 16),
        OutlookTestCase("one pixel", 1, (4, 4), 2, 1, (1, 1, 0)),
        OutlookTestCase("one pixel, head_dim 32", 1, (4, 4), 2, 32, (1, 1, 0)),
    ],
    ids=identify,
)
def test_a_row_whose_weight_is_all_on_one_key_has_no_entropy(
    case: OperatorTestCase, dtype: torch.dtype
) -> None:
    """The compiler makes ``a * b - c`` one operation that rounds once.

    A maximum ``c`` of products that were rounded before is then not what it is subtracted from.
    """
    # No power of two: scores are rounded.
    inputs = make_inputs(case, dtype).scaled(0.3)
    query, key = diagonal(16, dtype)
    first = inputs.tensors[0]
    if isinstance(case, WindowTestCase):
        for part, tokens in enumerate((query, key)):
            first[0, :, :, part, 0] = tokens.view(4, 4, 16)
    elif isinstance(case, CovarianceTestCase):
        first[0, :, 1, 0], first[0, :, 2, 0] = query, key
    with contracted():
        entropy = run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


# --- Between channels -----------------------------------------------------------------------------


def test_the_capture_shows_condition_numbers_that_half_precision_hides() -> None:
    inputs = make_inputs(CovarianceTestCase("kappa", CROSS, 1, 150, 4, 32), torch.float16)
    inputs = inputs._replace(tensors=(inputs.tensors[0], torch.full((4,), 0.1)))
    qkv, temperature = (t.double() for t in inputs.tensors)
    exact = cross_covariance_attention(qkv, temperature).flatten(2)
    wanted = condition_number(exact).kappa
    assert wanted.item() > 1e5
    captured = condition_number(run_kernels(inputs)["heads"]).kappa.double()
    torch.testing.assert_close(captured[-1:], wanted, rtol=0.01, atol=0)
    rounded = condition_number(exact.half().float()).kappa.double()
    assert rounded.item() < wanted.item() / 2


def assert_held_in_half_precision(
    found: dict[str, Tensor], exact: dict[str, Tensor], names: list[str]
) -> None:
    for name in names:
        largest = exact[name].abs().max()
        assert 2**-13 < largest < 65504
        error = (found[name].double() - exact[name]).abs().max()
        assert error <= 2**-9 * largest, name


@pytest.mark.parametrize(
    ("operator", "q", "k", "v", "grad"),
    [
        (CROSS, 2.0**11, 2.0**-12, 2.0**9, 1.0),
        (CROSS, 2.0**-14, 1.0, 2.0**-9, 2.0**-12),
        (CHANNEL, 2.0**11, 1.0, 1.0, 2.0**6),
    ],
    ids=["cross, past 65504", "cross, under 6e-8", "channel, past 65504"],
)
def test_what_the_scores_pass_on_may_be_outside_half_precision(
    operator: str, q: float, k: float, v: float, grad: float
) -> None:
    """Inputs and gradients are inside it, and so must be what is between them."""
    case = CovarianceTestCase("far", operator, 1, 196, 1, 16, scale=2e-3)
    inputs = make_inputs(case, torch.float16)
    factors = torch.tensor([q, k, v], dtype=torch.float16)[:, None, None]
    qkv, *others = inputs.tensors
    inputs = inputs._replace(tensors=(qkv * factors, *others), grad=inputs.grad * grad)
    exact = reference_results(inputs, torch.float64)
    held = [n for n in ("dq", "dk", "dv") if 2**-13 < exact[n].abs().max() < 65504]
    assert len(held) >= 2
    assert_held_in_half_precision(run_kernels(inputs), exact, held)


# --- Windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["exact", "gpu"], indirect=True)
def test_gradients_cancel_what_all_values_share(rounding: None) -> None:
    """A log-sum-exp of 30 is rounded by 1e-6, and dP - delta must not keep that of a large dP."""
    inputs = make_inputs(WindowTestCase("", 1, (2, 2), (2, 5), 2, 10), torch.float32).scaled(3.0)
    inputs.tensors[0][:, :, :, 2] += 20
    check(inputs, run_kernels(inputs))


@in_half_arithmetic
def test_the_capture_sees_what_keys_of_little_weight_add(dtype: torch.dtype) -> None:
    """One key of nothing takes almost all the weight: the others are below float16's normals."""
    inputs = make_inputs(named("window", "a full tile"), dtype).scaled(0.25)
    query, key, value = inputs.tensors[0].unbind(3)
    query[..., 0], key[..., 0] = 4, -1
    key[:, ::8, ::8], value[:, ::8, ::8] = 0, 0
    key[:, ::8, ::8, :, 0] = 10
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, dtype)
    assert 0 < exact["heads"].abs().max() < 0.05
    assert_within_budget(run_kernels(inputs)["heads"], peers["heads"], exact["heads"])


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale_will_do(scale: float) -> None:
    inputs = make_inputs(named("window", "flat windows"), torch.float32).scaled(scale)
    check(inputs, run_kernels(inputs))


# --- Outlook --------------------------------------------------------------------------------------


def test_output_without_statistics_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs then own a tile each, and not a whole head."""
    grids, start = [], Launch.start

    def noted(self: Launch) -> None:
        grids.append(self.grid)
        start(self)

    monkeypatch.setattr(Launch, "start", noted)
    inputs = make_inputs(named("outlook", "more than a tile, lean"), torch.float16)
    value, logits = inputs.tensors
    found = []
    for stats in (torch.empty(len(STATISTICS), 1, 1), None):
        out = value.new_empty(value.shape)
        lse = torch.empty(1, 1, *logits.shape[1:3], logits.shape[-1])
        call = OutlookCall(*inputs.tensors, *inputs.numbers)
        outlook.prepare_forward(call, Results(out, lse=lse, stats=stats)).start()
        found.append((out, lse))
    expected, actual = found
    (with_stats,), (plain,) = grids
    assert with_stats == 1
    assert plain > 1
    for a, b in zip(actual, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["VOLO", "windows at every pixel"])
def test_a_place_that_is_never_looked_at_costs_no_statistic(name: str) -> None:
    inputs = make_inputs(named("outlook", name), torch.float16)
    inputs.tensors[1][..., 1:2] = float("-inf")
    exact, found = reference_results(inputs, torch.float64), run_kernels(inputs)
    for statistic in STATISTICS:
        torch.testing.assert_close(found[statistic].double(), exact[statistic], rtol=1e-3, atol=0)


def test_autocast_around_the_backward_of_large_windows_rounds_nothing() -> None:
    inputs = make_inputs(WindowTestCase("", 1, (1, 1), (9, 9), 1, 16), torch.float16)
    expected = run_kernels(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_kernels(inputs)
    assert torch.equal(found["dqkv"], expected["dqkv"])
