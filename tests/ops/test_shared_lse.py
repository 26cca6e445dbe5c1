"""Forwards and backwards of our kernels that share the output and the log-sum-exp alone.

Both ways: kernels store and load it, or launches convert it from and to what kernels save.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops import _tiles, route
from leaner_kernels.ops.attention import op
from tests import attention_cases, shared_lse, varlen_cases
from tests.attention_cases import (
    CASES,
    MODELS,
    WINDOW_CASES,
    AttentionTestCase,
    Inputs,
    aligned,
    as_reference,
    case_named,
    check,
    make_inputs,
    peers_of,
    poisoned,
    reference_results,
    share_lse,
    sharing_lse,
)
from tests.backends import BFLOAT16, INTERPRETER, Target, executed
from tests.error_budget import assert_all_within_budget
from tests.varlen_cases import VarlenTestCase

WAYS = pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "conversion"])
# Every way in which a row may see keys, and every place where scores are scaled.
SHARED = (
    "one of everything",
    "GPT-2 on stories",
    "head_dim 80, crossed",
    "lengths, causal",
    "grouped queries",
    "boolean mask, a hidden row",
    "additive mask",
    "float32 mask",
    "dropout with everything",
    "softcap, additive mask",
    "window, more rows than keys",
)
BACKWARD = "dq", "dk", "dv"


def parts(inputs: Inputs) -> tuple[tuple, tuple]:
    """Return tensors and numbers of the operator."""
    return inputs.arguments[:6], inputs.arguments[6:]


def gradients(inputs: Inputs, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    tensors, numbers = parts(inputs)
    found = shared_lse.backward_from_lse(op.Dense, inputs.grad, tensors, numbers, out=out, lse=lse)
    return dict(zip(BACKWARD, found, strict=True))


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", SHARED)
def test_the_log_sum_exp_is_all_that_a_backward_needs(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(case_named(name), dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, dtype)
    plain, _ = route.forward_on_gpu(op.Dense, False, *inputs.arguments)
    for by_kernels in (True, False):
        with sharing_lse(by_kernels):
            found = share_lse(op.Dense, inputs.grad, *parts(inputs))
        assert found["lse"].dtype == torch.float32
        assert torch.equal(found["out"], plain)
        assert found["out"].stride() == plain.stride()
        found["lse"] = as_reference(found["lse"])
        assert_all_within_budget(found, peers, exact)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("factor", [1, 30])
@pytest.mark.parametrize("name", ["head_dim 80, crossed", "boolean mask, a hidden row"])
def test_the_forward_may_be_anothers(name: str, factor: int) -> None:
    inputs = make_inputs(case_named(name), torch.float32)
    inputs.query.mul_(factor)
    exact = reference_results(inputs, torch.float64)
    # Of other strides, as from a library.
    lse = exact["lse"].float().transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.where(lse.isinf(), float("inf"), lse)
    peers = peers_of(inputs, torch.float32)
    for by_kernels in (True, False):
        with sharing_lse(by_kernels):
            found = gradients(inputs, exact["out"].float(), lse)
        assert_all_within_budget(found, peers, exact)


@pytest.mark.backends(INTERPRETER)
@WAYS
@pytest.mark.parametrize("scale", [-0.3, 1e-35])
def test_scores_are_scaled_however_maxima_are_taken(scale: float, by_kernels: bool) -> None:
    inputs = make_inputs(case_named("grouped queries"), torch.float32)._replace(scale=scale)
    with sharing_lse(by_kernels):
        check(inputs, share_lse(op.Dense, inputs.grad, *parts(inputs)))


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize(
    "name",
    [
        "an empty sequence first, amid and last",
        "nothing but padding",
        "grouped queries",
        "rows without keys, keys without rows",
        pytest.param("dropout with everything", marks=pytest.mark.slow),
    ],
)
def test_sequences_side_by_side_share_it_too(name: str) -> None:
    inputs = varlen_cases.make_inputs(varlen_cases.case_named(name), torch.float32)
    exact = varlen_cases.assemble(inputs, torch.float64)
    peers = varlen_cases.peers_of(inputs, torch.float32)
    first, last = inputs.cu_seqlens[[0, -1]].tolist()
    for by_kernels in (True, False):
        with sharing_lse(by_kernels):
            found = share_lse(op.Varlen, inputs.grad, inputs.operands, inputs.params)
        if not by_kernels:  # a conversion does not fill the tokens outside of sequences
            found["lse"][:, :first] = found["lse"][:, last:] = float("inf")
        found["lse"] = as_reference(found["lse"])
        assert_all_within_budget(found, peers, exact)


@pytest.mark.backends(INTERPRETER)
@WAYS
@pytest.mark.parametrize(
    ("form", "shapes", "ends"),
    [
        (op.Dense, [(2, 3, 4, 16), (2, 3, 0, 16)], ()),
        (op.Dense, [(0, 3, 4, 16), (0, 3, 5, 16)], ()),
        (op.Varlen, [(4, 3, 16), (0, 3, 16)], ([0, 4], [0, 0])),
    ],
    ids=["no keys", "no entries", "no tokens"],
)
def test_an_empty_batch_has_no_visible_key(
    form: Any, shapes: list, ends: tuple, by_kernels: bool
) -> None:
    query, key = (torch.randn(shape) for shape in shapes)
    tensors, numbers = (query, key, key, None, None, None), (0.0, False, None, 0.0, -1, -1)
    if ends:
        starts = (torch.tensor(end, dtype=torch.int32) for end in ends)
        tensors, numbers = (query, key, key, *starts, None), (4, 0, 0.0, False, None, -1, -1)
    with sharing_lse(by_kernels):
        found = share_lse(form, torch.randn_like(query), tensors, numbers)
    assert (found["lse"] == float("inf")).all()
    for name in ("out", *BACKWARD):
        assert not found[name].any(), name


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "heads after rows": lambda lse: lse.transpose(1, 2).reshape(lse.shape),
    "in base 2": lambda lse: lse / torch.log(torch.tensor(2.0)),
    "of probabilities that sum to two": lambda lse: lse - torch.log(torch.tensor(2.0)),
}


@pytest.mark.backends(INTERPRETER)
@WAYS
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_another_statistic_is_past_the_budget(
    wrong: Callable[[Tensor], Tensor], by_kernels: bool
) -> None:
    inputs = make_inputs(case_named("GPT-2 on stories"), torch.float32)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, torch.float32)
    with sharing_lse(by_kernels):
        out, lse = shared_lse.forward_with_lse(op.Dense, *parts(inputs))
        found = {"lse": wrong(lse)} | gradients(inputs, out, wrong(lse))
    for name, result in found.items():
        with pytest.raises(AssertionError, match="budget"):
            assert_all_within_budget({name: result}, peers, exact)


# --- Executed: kernels in Gluon too ---------------------------------------------------------------

MODELS_EXECUTED_EACH_COMMIT = {
    ("ViT-B", BFLOAT16, 80),
    ("ViT-B", BFLOAT16, 90),
    ("ViT-B, boolean mask", BFLOAT16, 90),
    ("ViT-B, additive mask", BFLOAT16, 80),
    ("GPT-2, 64 tokens", BFLOAT16, 90),
    ("16 tokens, boolean mask", BFLOAT16, 80),
    ("inner tokens of TNT", BFLOAT16, 80),
}


def assert_compiled_kernels_share_it(
    case: AttentionTestCase, target: Target, layout: Callable[..., Tensor]
) -> None:
    """Run as a GPU that has a head for every program does: kernels in Gluon, forward too."""
    # On the CPU: functions below the dispatcher do not unwrap pretended tensors.
    inputs = make_inputs(case, target.dtype, layout=layout)
    with target.active(), mock.patch.object(_tiles, "ENOUGH_PROGRAMS", 1):
        plain, _ = route.forward_on_gpu(op.Dense, False, *inputs.arguments)
        results = attention_cases.run_sharing_lse(inputs)
    assert torch.equal(results["out"], plain)
    check(inputs, results)


@pytest.mark.parametrize(("case", "target"), executed(MODELS, MODELS_EXECUTED_EACH_COMMIT))
def test_compiled_kernels_of_aligned_rows_share_it(case: AttentionTestCase, target: Target) -> None:
    assert_compiled_kernels_share_it(case, target, aligned)


@pytest.mark.parametrize(
    ("case", "target"),
    executed(CASES + WINDOW_CASES, {("boolean mask, a hidden row", BFLOAT16, 90)}),
)
def test_compiled_kernels_of_any_strides_share_it(case: AttentionTestCase, target: Target) -> None:
    assert_compiled_kernels_share_it(case, target, poisoned)


@pytest.mark.parametrize(
    ("case", "target"),
    executed(
        varlen_cases.CASES + varlen_cases.WINDOW_CASES,
        {("rows without keys, keys without rows", BFLOAT16, 90)},
    ),
)
def test_compiled_kernels_of_sequences_share_it(case: VarlenTestCase, target: Target) -> None:
    inputs = varlen_cases.make_inputs(case, target.dtype)
    with target.active():
        results = varlen_cases.run_sharing_lse(inputs)
    exact = varlen_cases.assemble(inputs, torch.float64)
    assert_all_within_budget(results, varlen_cases.peers_of(inputs, target.dtype), exact)
