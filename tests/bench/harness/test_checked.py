"""Peers behind the gate: checked once for each case, and no memory of a case outlives it."""

import gc
import warnings
import weakref

import pytest
import torch

from bench.attention.cases import AttentionCase
from bench.attention.catalogue import peers_of, problem_of
from bench.attention.peers import PEERS, eager_attention
from bench.harness.checked import Current
from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError, Peer

CASE = AttentionCase("small", "cpu", 2, 2, 9, 4, torch.float32)
OTHER = AttentionCase("other", "cpu", 2, 2, 5, 4, torch.float32)


def absent(q, k, v):
    raise torch.OutOfMemoryError("too large")


def wrong(q, k, v):
    return 2 * eager_attention(q, k, v, None, 0.5)


@pytest.fixture
def put(monkeypatch):
    builds = []

    def put(function, **kind):
        def build(case, device):
            builds.append(case.name)
            return function

        monkeypatch.setitem(PEERS, "mine", Peer(build, **kind))
        return builds

    return put


@pytest.mark.parametrize(("function", "error"), [(absent, AbsentError), (wrong, WrongError)])
def test_a_failed_peer_is_checked_once_and_its_case_is_freed(function, error, put):
    builds, state = put(function), Current(peers_of, problem_of)
    messages = []
    for _ in range(2):
        with pytest.raises(error) as raised:
            state.peer(CASE, "mine")
        messages.append(str(raised.value))
        del raised
    assert builds == ["small"]
    assert messages[0] == messages[1] != ""
    tensor = weakref.ref(state.built.sets[0][0])
    state.peer(OTHER, "eager")
    gc.collect()
    assert tensor() is None


def test_what_our_own_peer_raises_is_no_absence(put):
    put(absent, ours=True)
    with pytest.raises(torch.OutOfMemoryError):
        Current(peers_of, problem_of).peer(CASE, "mine")


def test_the_reason_that_pytorch_warns_of_is_kept(put):
    def refuse(q, k, v):
        warnings.warn("head_dim is odd (Triggered internally at a.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel.\nmore")

    put(refuse)
    with pytest.raises(
        AbsentError, match=r"^refuses the case: No available kernel. head_dim is odd$"
    ):
        Current(peers_of, problem_of).peer(CASE, "mine")
