"""Nyström attention as a case: its work, its peers and its gate."""

from dataclasses import replace

import pytest
import torch

from bench.attention.operators import nystrom
from bench.attention.operators.nystrom import CASES, composition, softmax_attention
from bench.catalogue import peers_of, problem_of
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
SMALL = replace(BY_NAME["cpu_nystrom"], tokens=64)


def judge(case, function, layout="packed"):
    return problem_of(case, CPU, copies=1).check(Peer(None, layout), function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_peer_computes_the_same(dtype):
    case, passed = replace(SMALL, dtype=dtype), set()
    problem = problem_of(case, CPU, copies=1)
    for name, peer in peers_of(case).items():
        with peer.context():
            try:
                fractions = problem.check(peer, peer.build(case, CPU))
            except (AbsentError, *REFUSALS):
                assert not peer.ours, name
                continue
        assert all(0 <= fraction <= 1 for fraction in fractions.values()), name
        passed.add(name)
    ours = {name for name, peer in peers_of(case).items() if peer.ours}
    assert ours | {"eager", "sdpa"} <= passed


def test_exact_attention_is_held_to_itself_and_is_no_nystrom_attention():
    def exact(qkv):
        return softmax_attention(SMALL, qkv)

    assert judge(SMALL, exact, "softmax")["out"] <= 1
    with pytest.raises(WrongError, match=r"^out is off by"):
        judge(SMALL, exact)
    with pytest.raises(WrongError, match=r"^out is off by"):
        judge(SMALL, lambda qkv: composition(SMALL, qkv), "softmax")


def test_landmarks_differ_so_that_every_iteration_counts(monkeypatch):
    problem = problem_of(SMALL, CPU, copies=1)
    assert problem.truth
    monkeypatch.setattr(nystrom, "ITERATIONS", nystrom.ITERATIONS - 1)
    with pytest.raises(WrongError, match=r"^out is off by"):
        problem.check(Peer(None, "packed"), lambda qkv: composition(SMALL, qkv))


def test_work_is_counted_once():
    case = BY_NAME["nystrom_listops"]
    # q, k, v and out of 32 * 2048 * 64 bfloat16; with three gradients and dout in a backward.
    assert case.bytes("forward") / 1e6 == pytest.approx(4 * 8.39, abs=0.01)
    assert case.bytes("both") / 1e6 == pytest.approx(11 * 8.39, abs=0.05)
    # Four products of 2048 * 64 * 32 for each of 64 heads, two of 64 * 64 * 32, 24 of 64 * 64 * 64.
    assert case.flops("forward") / 1e9 == pytest.approx(2.15 + 0.034 + 0.805, abs=0.005)
