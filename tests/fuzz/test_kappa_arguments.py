"""Condition numbers, reports and what acts on them: any argument gives a result or one line."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import leaner_kernels
from leaner_kernels.nn import ManyHeadAttention
from tests.fuzz.profiles import fuzzed
from tests.fuzz.refusals import NO_COUNTS, NO_NUMBERS, NO_TENSORS, outcome
from tests.fuzz.strategies import EXTREMES, VALUES, Block

LAYOUTS = ("plain", "inside", "permuted", "expanded", "padded", "gaps")
MATRICES = {
    "condition_number": {},
    "condition_report": {},
    "singular_values": {},
    "head_report": {"num_heads": 1},
    "conditioning_penalty": {},
}
anything = st.sampled_from(
    [*NO_TENSORS, *NO_NUMBERS, *NO_COUNTS, 0, 1, 0.5, -0.0, 1e300, 10**400, "each", True, b"", {1}]
)


@st.composite
def matrices(draw: Any, extremes: bool = False) -> Block:
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    shape = *lead, draw(st.integers(1, 12)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    extreme = draw(st.sampled_from(EXTREMES)) if extremes else None
    layout = draw(st.sampled_from(LAYOUTS[: 3 if extremes else None]))
    return Block(
        shape, dtype, layout, draw(st.sampled_from(VALUES)), draw(st.integers(0, 9)), extreme
    )


@pytest.mark.parametrize("function", MATRICES)
@fuzzed(2)
@given(st.data())
def test_what_is_no_matrix_is_refused_in_one_line(function, data):
    block = data.draw(matrices())
    wrong = data.draw(
        st.sampled_from(["no tensor", "dtype", "empty", "one axis", "sparse", "nested"])
    )
    a = block.make()
    if wrong == "no tensor":
        a = data.draw(st.sampled_from(NO_TENSORS))
    elif wrong == "dtype":
        others = torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.complex64
        a = a.to(data.draw(st.sampled_from(others)))
    elif wrong == "empty":
        a = a[..., :0, :]
    elif wrong == "one axis":
        a = a[(0,) * (a.dim() - 1)]
    elif wrong == "sparse":
        a = a.to_sparse()
    else:
        a = torch.nested.nested_tensor([a])
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        getattr(leaner_kernels, function)(a, **MATRICES[function])


@fuzzed(6)
@given(matrices(), st.data())
def test_condition_numbers_are_those_of_the_singular_values(block, data):
    a = block.make()
    lengths = data.draw(st.none() | st.just("some"))
    if lengths is not None:
        count = math.prod(a.shape[:-2])
        numbers = data.draw(st.lists(st.integers(0, a.shape[-2]), min_size=count, max_size=count))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        lengths = torch.tensor(numbers, dtype=dtype).view(a.shape[:-2])
    found = leaner_kernels.condition_report(a, lengths=lengths)
    assert all(t.shape == a.shape[:-2] for t in found)
    number = leaner_kernels.condition_number(a, lengths=lengths)
    for one, other in zip(number, found):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
    rows = [a.shape[-2]] * max(1, math.prod(a.shape[:-2])) if lengths is None else lengths.flatten()
    flat = a.reshape(-1, *a.shape[-2:])
    for i, (matrix, count) in enumerate(zip(flat, map(int, rows), strict=True)):
        values = (t.reshape(-1)[i] for t in found)
        kappa, largest, least, resolved, effective, stable, rank, kappa_to_rank = values
        if count == 0:
            assert kappa.isnan()
            assert rank.isnan()
            continue
        sigma = torch.linalg.svdvals(matrix[:count].double())
        torch.testing.assert_close(largest, sigma[0], rtol=1e-6, atol=0)
        if not sigma[0]:
            assert kappa.isinf()
            assert effective.isnan()
            assert stable.isnan()
            assert rank == 0
            assert kappa_to_rank.isnan()
            continue
        if resolved:
            torch.testing.assert_close(kappa, sigma[0] / sigma[-1], rtol=0.02, atol=0)
        else:
            assert kappa.isinf()
            assert sigma[-1] <= 2e-7 * sigma[0]
        assert 1 - 1e-9 <= stable <= len(sigma) * (1 + 1e-6)
        assert 1 - 1e-9 <= effective <= len(sigma) * (1 + 1e-3)
        assert least <= largest
        # Where a singular value lies on the limit either count is right.
        assert (sigma > 1.2e-6 * sigma[0]).sum() <= rank <= (sigma > 0.8e-6 * sigma[0]).sum()
        torch.testing.assert_close(
            kappa_to_rank, sigma[0] / sigma[int(rank) - 1], rtol=0.02, atol=0
        )


@fuzzed(2)
@given(matrices(extremes=True))
def test_a_matrix_that_is_not_finite_leaves_the_others_alone(block):
    calm, wild = block._replace(extreme=None).make(), block.make()
    for function, params in MATRICES.items():
        before, after = (getattr(leaner_kernels, function)(a, **params) for a in (calm, wild))
        if not block.shape[:-2]:
            continue
        for one, other in zip(*(flattened(r) for r in (before, after)), strict=True):
            assert torch.equal(one[:-1].nan_to_num(-1), other[:-1].nan_to_num(-1)), function


def flattened(result: Any) -> list[Tensor]:
    """Return the tensors of a result that have a number for each matrix."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return [t for each in result for t in flattened(each)]
    return []


@fuzzed(2)
@given(matrices(), st.sampled_from(["log_kappa", "log_am_gm"]), st.sampled_from([1e-10, 1e-8, 1.0]))
def test_the_penalty_and_its_gradient_are_finite(block, kind, ridge):
    heads = block.make().requires_grad_()
    penalty = leaner_kernels.conditioning_penalty(heads, kind, ridge)
    (grad,) = torch.autograd.grad(penalty.sum(), heads)
    assert penalty.isfinite().all()
    assert (penalty > -1e-6).all()
    # The bound of the docstring: of numbers near the smallest it is past the largest.
    root = heads.detach().double().norm() / min(heads.shape[-2:]) ** 0.5
    if 1 / (2 * root * ridge**0.5) < torch.finfo(heads.dtype).max:
        assert grad.isfinite().all()


@fuzzed(2)
@given(matrices(), st.integers(1, 6), st.booleans())
def test_the_report_on_heads_stays_within_its_ranges(block, num_heads, divides):
    block = block._replace(
        shape=(*block.shape[:-1], block.shape[-1] * (num_heads if divides else 1))
    )
    heads = block.make()
    if heads.shape[-1] % num_heads:
        with pytest.raises(ValueError, match="num_heads must divide"):
            leaner_kernels.head_report(heads, num_heads)
        return
    report = leaner_kernels.head_report(heads, num_heads)
    for name in ("correlation", "isotropy", "mean_share"):
        values = getattr(report, name)
        values = values[~values.isnan()]
        assert (values >= 0).all(), name
        assert (values <= 1 + 1e-6).all(), name


PARTS = {
    "condition_number": ("samples", "lengths"),
    "condition_report": ("lengths",),
    "head_report": ("num_heads",),
    "conditioning_penalty": ("kind", "ridge"),
}


@pytest.mark.parametrize("function", PARTS)
@fuzzed(4)
@given(st.data(), matrices())
def test_any_other_argument_gives_a_result_or_one_line(function, data, block):
    params = dict(MATRICES[function])
    a = block.make()
    for name in data.draw(st.lists(st.sampled_from(PARTS[function]), min_size=1)):
        integers = torch.randint(-3, 15, a.shape[:-2])
        params[name] = data.draw(anything | st.just(integers) | st.just(integers.int().to("meta")))
    outcome(lambda: getattr(leaner_kernels, function)(a, **params))


@fuzzed(6)
@given(anything, anything)
def test_the_prediction_of_the_theorem_is_a_number_or_one_line(tokens, width):
    found, _ = outcome(lambda: leaner_kernels.gaussian_condition_number(tokens, width))
    assert found is None or found >= 1


def model() -> nn.Module:
    return nn.Sequential(ManyHeadAttention(8, 2, 4))


ACTORS = {
    "QKClip": ("threshold",),
    "ConditioningPenalty": ("weight", "samples", "kind", "ridge"),
    "EntropyAlarm": ("floor", "drop", "window", "recover"),
    "KappaMonitor": ("every", "samples", "path", "writer"),
}


@pytest.mark.parametrize("name", ACTORS)
@fuzzed(6)
@given(st.data())
def test_what_acts_on_condition_numbers_works_or_is_refused_in_one_line(
    tmp_path, monkeypatch, name, data
):
    # A path may be any string.
    monkeypatch.chdir(tmp_path)
    chosen = data.draw(st.lists(st.sampled_from(ACTORS[name]), max_size=2, unique=True))
    # A tensor has a method log, which a writer is known by.
    some = anything.filter(lambda value: not isinstance(value, Tensor))
    params = {each: data.draw(some if each == "writer" else anything) for each in chosen}
    if name == "EntropyAlarm":
        alarm, _ = outcome(lambda: leaner_kernels.EntropyAlarm(**params))
        row = {"step": 1, "layer": "a", "columns": 9, "entropy": 1.0}
        for entropy in (1.0, None, 0.01, 1.0):
            assert alarm is None or isinstance(alarm.update([row | {"entropy": entropy}]), list)
        return
    monitored = model() if data.draw(st.integers(0, 4)) else data.draw(anything)
    actor, _ = outcome(lambda: getattr(leaner_kernels, name)(monitored, **params))
    if actor is None:
        return
    if name == "KappaMonitor":
        actor.begin(0)
    loss = monitored(torch.randn(2, 5, 8)).sum()
    if name == "ConditioningPenalty":
        loss = loss + actor.loss()
    assert loss.isfinite()
    loss.backward()
    if name == "KappaMonitor":
        assert len(actor.end()) == 1
    elif name == "QKClip":
        assert len(actor.step()) == 1
        actor.close()
