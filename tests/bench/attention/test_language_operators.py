"""Nyström attention and the loss of a large vocabulary as cases: work, peers and gates."""

import sys
from dataclasses import replace

import pytest
import torch

from bench.attention.cases import DIRECTIONS
from bench.attention.operators import nystrom
from bench.attention.operators.nystrom import CASES as NYSTROM_CASES
from bench.attention.operators.nystrom import composition, softmax_attention
from bench.catalogue import ATTENTION_CASES, peers_of, problem_of
from bench.cross_entropy.cases import CROSS_ENTROPY_CASES
from bench.cross_entropy.peers import textbook
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer
from models import papers
from tests.bench.attention.test_gate import WrongGradient

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in (*NYSTROM_CASES, *CROSS_ENTROPY_CASES)}
NYSTROM, LOSS = BY_NAME["cpu_nystrom"], BY_NAME["cpu_cross_entropy"]
LOSS = replace(LOSS, tokens=64, vocabulary=300)
SMALL = [
    replace(NYSTROM, tokens=64),
    replace(NYSTROM, tokens=64, dtype=torch.bfloat16),
    LOSS,
    replace(LOSS, bias=False, dtype=torch.bfloat16),
]


def judge(case, function, layout="packed"):
    return problem_of(case, CPU, copies=1).check(Peer(None, layout), function)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.dtype_name}")
def test_every_peer_computes_the_same(case):
    problem, passed = problem_of(case, CPU, copies=1), set()
    for name, peer in peers_of(case).items():
        with peer.context():
            try:
                fractions = problem.check(peer, peer.build(case, CPU))
            except (AbsentError, *REFUSALS):
                assert not peer.ours, name
                continue
        assert fractions.keys() == set(problem.names)
        assert all(0 <= fraction <= 1 for fraction in fractions.values()), name
        passed.add(name)
    ours = {name for name, peer in peers_of(case).items() if peer.ours}
    plain = {"logits", "logits_float32"} if "loss_tokens" in case.facts() else {"eager", "sdpa"}
    assert ours | plain <= passed


def test_exact_attention_is_held_to_itself_and_is_no_nystrom_attention():
    case = SMALL[0]

    def exact(qkv):
        return softmax_attention(case, qkv)

    assert judge(case, exact, "softmax")["out"] <= 1
    with pytest.raises(WrongError, match=r"^out is off by"):
        judge(case, exact)
    with pytest.raises(WrongError, match=r"^out is off by"):
        judge(case, lambda qkv: composition(case, qkv), "softmax")


def test_wrong_gradients_are_refused_by_name():
    case = SMALL[0]
    with pytest.raises(WrongError, match=r"^dqkv is off by"):
        judge(case, lambda qkv: composition(case, WrongGradient.apply(qkv)))
    targets = LOSS.targets(CPU)
    for place, name in enumerate(("dtokens", "dweight", "dbias")):

        def wrong(*leaves, place=place):
            leaves = list(leaves)
            leaves[place] = WrongGradient.apply(leaves[place])
            return textbook(targets, *leaves)

        with pytest.raises(WrongError, match=f"^{name} is off by"):
            judge(LOSS, wrong, "loss")


def test_a_wrong_loss_is_refused():
    targets = LOSS.targets(CPU)
    with pytest.raises(WrongError, match=r"^loss is off by"):
        judge(LOSS, lambda *leaves: 1.001 * textbook(targets, *leaves), "loss")


def test_landmarks_differ_so_that_every_iteration_counts(monkeypatch):
    case, problem = SMALL[0], problem_of(SMALL[0], CPU, copies=1)
    (qkv,) = problem.inputs("packed")[0].leaves
    exact = softmax_attention(case, qkv)
    assert qkv.unflatten(1, (case.landmarks, -1)).mean(dim=2).std() > 0.9
    # Landmarks of independent tokens are all near zero: the error is then above a half.
    assert 0.05 < (composition(case, qkv) - exact).norm() / exact.norm() < 0.3
    assert problem.truth
    monkeypatch.setattr(nystrom, "ITERATIONS", nystrom.ITERATIONS - 1)
    with pytest.raises(WrongError, match=r"^out is off by"):
        problem.check(Peer(None, "packed"), lambda qkv: composition(case, qkv))


def test_work_is_counted_once():
    case = BY_NAME["nystrom_listops"]
    # q, k, v and out of 32 * 2048 * 64 bfloat16; with three gradients and dout in a backward.
    assert case.bytes("forward") / 1e6 == pytest.approx(4 * 8.39, abs=0.01)
    assert case.bytes("both") / 1e6 == pytest.approx(11 * 8.39, abs=0.05)
    # Four products of 2048 * 64 * 32 for each of 64 heads, two of 64 * 64 * 32, 24 of 64 * 64 * 64.
    assert case.flops("forward") / 1e9 == pytest.approx(2.15 + 0.034 + 0.805, abs=0.005)
    assert case.exps("forward") / 1e6 == pytest.approx(64 * (2 * 2048 * 64 + 64**2) / 1e6)
    loss = BY_NAME["cross_entropy_32k"]
    assert loss.flops("both") / 1e9 == pytest.approx(3 * 206.2, abs=0.3)
    assert loss.bytes("forward") / 1e6 == pytest.approx(2 * (4096 + 32768) * 768 / 1e6)
    for counted in (case, loss):
        for count in (counted.bytes, counted.flops):
            forward, backward, both = map(count, DIRECTIONS)
            assert both == forward + backward


def test_the_papers_shapes_are_there():
    on_gpu = {(c.heads, c.tokens, c.head_dim) for c in NYSTROM_CASES if c.device == "cuda"}
    rows = [r.config for r in papers.ROWS.values() if r.row == "nystromformer_listops"]
    sizes = {(row["heads"], row["sequence_length"], row["head_dim"]) for row in rows}
    assert sizes <= on_gpu
    assert {case.landmarks for case in NYSTROM_CASES if case.device == "cuda"} == {64, 128, 256}
    vocabularies = {(c.vocabulary, c.bias) for c in CROSS_ENTROPY_CASES if c.device == "cuda"}
    assert vocabularies == {(32768, False), (50257, True)}
    assert set(NYSTROM_CASES) <= set(ATTENTION_CASES)


def test_what_is_not_installed_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", None)
    for name in ("liger", "quack"):
        with pytest.raises(AbsentError, match="cannot be imported"):
            peers_of(LOSS)[name].build(LOSS, torch.device("cuda"))
        with pytest.raises(AbsentError, match="CUDA only"):
            peers_of(LOSS)[name].build(LOSS, CPU)
