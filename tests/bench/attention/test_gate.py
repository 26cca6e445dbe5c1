"""The correctness gate: right peers pass in every layout, wrong ones get no number."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.attention import operators
from bench.attention.cases import AttentionCase
from bench.attention.catalogue import peers_of, problem_of
from bench.attention.gate import AttentionProblem
from bench.attention.operators import OperatorCase
from bench.attention.peers import eager_attention
from bench.harness.gate import WrongError, budget
from bench.harness.peers import REFUSALS, AbsentError, Peer
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


KINDS = {}, {"causal": True}
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
    with pytest.raises(WrongError):
        judge(eager, case=replace(CASE, causal=True))


# Other operators.


def small(op, dtype=torch.float32):
    size = 64 if op == "nystrom" else 6
    return OperatorCase(op, "cpu", op, 2, size, 2, 8, dtype, window=3, landmarks=16)


def judge_operator(case, function):
    return problem_of(case, CPU, copies=1).check(Peer(None, "packed"), function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["cross_covariance", "channel", "window", "outlook", "nystrom"])
def test_every_peer_of_an_operator_computes_the_same(op, dtype):
    case, passed = small(op, dtype), set()
    problem = problem_of(case, CPU, copies=1)
    for name, peer in peers_of(case).items():
        with peer.context():
            try:
                fractions = problem.check(peer, peer.build(case, CPU))
            except (AbsentError, *REFUSALS):
                assert name == "eager_compiled"
                continue
        assert all(0 <= fraction <= 1 for fraction in fractions.values()), name
        passed.add(name)
    ours = {name for name, peer in peers_of(case).items() if peer.ours}
    assert ours | {"eager"} <= passed
    assert ("timm" in passed) == (op not in ("window", "nystrom"))
    assert ("sdpa" in passed) == (op not in ("outlook", "nystrom"))


@pytest.mark.parametrize(
    ("op", "place", "name"),
    [
        (op, place, name)
        for op, names in operators.GRADIENTS.items()
        for place, name in enumerate(names)
    ],
)
def test_a_wrong_gradient_is_refused_by_name(op, place, name):
    case = small(op)

    def function(*leaves):
        leaves = list(leaves)
        leaves[place] = WrongGradient.apply(leaves[place])
        return operators.eager(case, *leaves)

    with pytest.raises(WrongError, match=f"^{name} is off by"):
        judge_operator(case, function)


def test_landmarks_differ_so_that_every_iteration_counts(monkeypatch):
    case = small("nystrom")
    problem = problem_of(case, CPU, copies=1)
    assert problem.truth
    monkeypatch.setattr(operators, "ITERATIONS", operators.ITERATIONS - 1)
    with pytest.raises(WrongError, match=r"^out is off by"):
        problem.check(Peer(None, "packed"), partial(operators.eager, case))
