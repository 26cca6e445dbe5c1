"""The kernels in Gluon, executed: every way in which they cut the tokens of a head."""

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model.execute import check_findings, executing
from leaner_kernels import attention
from leaner_kernels.ops import _gluon
from leaner_kernels.ops.attention import tiles
from tests.attention_cases import Case
from tests.compiled.cases import BF16, HALF, OPERATORS, make_aligned
from tests.error_budget import assert_within_budget

if not _gluon.AVAILABLE:
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

# Whole tiles alone; with a tail of 16, 32 or 48; a last tile that is not full.
LENGTHS = {
    65: ({}, {"causal": True}),
    100: ({}, {"causal": True}),
    128: ({"causal": True},),
    160: ({}, {"lengths": (3, 140), "batch": 2}),
    197: ({}, {"causal": True}, {"lengths": (50, 197), "batch": 2}),
    250: ({"causal": True}, {"lengths": (200,)}),
    256: ({},),
    272: ({"causal": True, "lengths": (201,)},),
    320: ({},),
}
DIMS = 16, 32, 48, 64, 80, 128
CARDS = {90: "hopper", 80: "ampere", 86: "ampere"}
CHOSEN = {
    (197, 64, BF16, 90),
    (160, 64, HALF, 90),
    (250, 32, BF16, 90),
    (65, 80, BF16, 90),
    (197, 64, BF16, 80),
    (250, 32, HALF, 86),
    (100, 64, BF16, 80),
}


def calls() -> Iterator[Any]:
    for (tokens, flavours), dim, dtype, card in product(LENGTHS.items(), DIMS, (BF16, HALF), CARDS):
        for number, flavour in enumerate(flavours):
            marks = () if (tokens, dim, dtype, card) in CHOSEN else pytest.mark.nightly
            batch = flavour.get("batch", 1)
            rest = {name: value for name, value in flavour.items() if name != "batch"}
            case = Case(f"{tokens}", batch, 2, 2, tokens, tokens, dim, **rest)
            name = f"{tokens}-{dim}-{dtype}-{card}-{number}"
            yield pytest.param(case, dtype, card, marks=marks, id=name)


@pytest.mark.parametrize(("case", "dtype", "card"), list(calls()))
def test_a_head_is_cut_into_tiles_and_a_tail(
    case: Case, dtype: torch.dtype, card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "ENOUGH_PROGRAMS", 1)
    with executing(card) as executions:
        OPERATORS["attention"].check(case, dtype)
    check_findings(executions)
    names = {execution.name for execution in executions}
    with executing(card) as executions:
        inputs = make_aligned(case, dtype, "cuda")
        out, _ = torch.ops.leaner_kernels.attention(*inputs.call)
    check_findings(executions)
    plain = {execution.name for execution in executions}
    operator = OPERATORS["attention"]
    exact = operator.exact(operator.make_inputs(case, dtype), torch.float64)["out"]
    peers = operator.peers(operator.make_inputs(case, dtype), dtype)["out"]
    assert_within_budget(out, peers, exact)
    query = torch.empty(case.batch, case.heads, case.rows, case.dim, dtype=dtype, device="meta")
    monkeypatch.setattr(tiles, "capability", lambda _: card)
    features = tiles.features(None, None, query)
    choose = getattr(tiles, family := CARDS[card])
    for way, launched in ("forward", plain), ("forward_statistics", names), ("backward", names):
        rule = choose(f"{family}_{way}", query, query, features, 0.1)
        assert (f"_{family}_{way[0]}wd_kernel" in launched) == (rule is not None)


@pytest.mark.parametrize("card", [80, 90])
def test_what_a_large_log_sum_exp_lost_is_put_right(card: int) -> None:
    """Scores of millions, exact in float32; beside them the log of a sum is rounded away."""
    torch.manual_seed(0)
    shape = 1, 197, 2, 64
    query, key, value, grad = (torch.randn(shape).transpose(1, 2) for _ in range(4))
    for t in (query, key):
        t.mul_(2).round_()[..., 0] = 2048
    inputs = [t.to(BF16).requires_grad_() for t in (query, key, value)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    p = (exact[0] @ exact[1].mT / 8).softmax(-1)
    (p @ exact[2]).backward(grad.to(BF16).double())
    with executing(card) as executions:
        on_card = [t.detach().cuda().requires_grad_() for t in inputs]
        attention(*on_card).backward(grad.to(BF16).cuda())
    check_findings(executions)
    assert executions[-1].name == f"_{CARDS[card]}_bwd_kernel"
    expected, actual = exact[2].grad, on_card[2].grad
    assert expected is not None
    assert actual is not None
    error = (actual.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < 0.008
