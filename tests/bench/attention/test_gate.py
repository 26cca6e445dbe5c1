"""The correctness gate: right peers pass in every layout, wrong ones get no number."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.attention.cases import AttentionCase
from bench.attention.gate import AttentionProblem, outside
from bench.attention.peers import eager_attention
from bench.harness.gate import WrongError, budget
from bench.harness.peers import Peer
from tests.error_budget import assert_within_budget

CPU = torch.device("cpu")
CASE = AttentionCase("small", "cpu", 12, 2, 9, 4, torch.float32)


def judge(function, layout="heads", case=CASE):
    return AttentionProblem(case, CPU, copies=1).check(Peer(None, layout), function)


eager = partial(eager_attention, visible=None, scale=CASE.scale)


@pytest.mark.parametrize("same_dtype_error", [0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_budget_is_the_one_that_the_tests_hold(dtype, same_dtype_error):
    exact = torch.arange(-8, 9, dtype=torch.float64) / 8
    same_dtype = exact.to(dtype)
    same_dtype[3] += same_dtype_error
    allowed = budget(exact, same_dtype)
    within, past = exact.to(dtype), exact.to(dtype)
    within[-1] += 0.9 * allowed
    past[-1] += 1.5 * allowed
    assert_within_budget(within, same_dtype, exact)
    with pytest.raises(AssertionError):
        assert_within_budget(past, same_dtype, exact)


KINDS = {}, {"causal": True}, {"padded": True}
LENGTHS = 5, 9, 1, 9, 2, 3, 4, 8, 7, 6, 5, 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["heads", "tokens", "packed"])
def test_a_right_peer_passes_in_every_layout(layout, kind):
    case = AttentionCase("small", "cpu", 12, 2, 9, 4, torch.bfloat16, **kind)
    visible = case.visible(CPU)

    def function(*leaves):
        q, k, v = leaves[0].unbind(2) if layout == "packed" else leaves
        if layout != "heads":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = eager_attention(q, k, v, visible, case.scale)
        return out if layout == "heads" else out.transpose(1, 2)

    fractions = judge(function, layout, case)
    assert tuple(fractions) == AttentionProblem.names
    assert all(0 < fraction <= 0.5 for fraction in fractions.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["heads", "varlen", "jagged"])
def test_a_right_peer_passes_on_sequences_of_different_lengths(layout, causal):
    case = replace(CASE, lengths=LENGTHS, causal=causal)

    def alone(q, k, v):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril() if causal else None
        return eager_attention(q, k, v, seen, case.scale).transpose(0, 1)

    def function(q, k, v):
        if layout == "heads":
            out = eager_attention(q, k, v, case.visible(CPU), case.scale)
            return out.masked_fill(outside(case, CPU), 7.0)  # rows that do not count
        values = [t.values() if layout == "jagged" else t for t in (q, k, v)]
        sequences = zip(*(t.split(LENGTHS) for t in values), strict=True)
        out = torch.cat([alone(*one) for one in sequences])
        if layout == "varlen":
            return out
        return torch.nested.nested_tensor_from_jagged(out, q.offsets())

    fractions = judge(function, layout, case)
    assert all(fraction <= 0.5 for fraction in fractions.values())


def test_a_neighbour_that_is_seen_is_refused():
    case = replace(CASE, lengths=LENGTHS)

    def function(q, k, v):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        return eager_attention(q, k, v, None, case.scale).transpose(0, 1)

    with pytest.raises(WrongError, match="out"):
        judge(function, "varlen", case)


class WrongGradient(torch.autograd.Function):
    """Changes nothing forward, and the gradient by a tenth."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


def last_entry_zero(q, k, v):
    out = eager(q, k, v).clone()
    out[-1] = 0
    return out


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (partial(eager_attention, visible=None, scale=0.51), "out"),
        (lambda q, k, v: eager(WrongGradient.apply(q), k, v), "dq"),
        (lambda q, k, v: eager(q, WrongGradient.apply(k), v), "dk"),
        (lambda q, k, v: eager(q, k, WrongGradient.apply(v)), "dv"),
        (lambda q, k, v: eager(q, k, v) + float("nan"), "out is off by nan"),
        (last_entry_zero, "out"),
    ],
)
def test_a_wrong_peer_is_refused_with_its_error(function, named):
    with pytest.raises(WrongError, match=named) as refused:
        judge(function)
    assert "\n" not in str(refused.value)
    assert "is allowed" in str(refused.value)


def test_a_mask_that_is_ignored_is_refused():
    for kind in ("causal", "padded"):
        with pytest.raises(WrongError):
            judge(
                eager,
                case=AttentionCase("small", "cpu", 12, 2, 9, 4, torch.float32, **{kind: True}),
            )
