"""Peers as data: who takes which case, and why the others do not."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from bench.attention import catalogue
from bench.attention.cases import CASES, AttentionCase
from bench.attention.catalogue import ATTENTION_CASES
from bench.attention.gate import AttentionProblem
from bench.attention.peers import PEERS, peers_of
from bench.harness.peers import AbsentError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = AttentionCase("small", "cuda", 2, 2, 128, 64, torch.float16)
RAGGED = replace(CASE, batch=3, lengths=(5, 128, 3))


def reason(name, case, device=CUDA):
    with pytest.raises(AbsentError) as absent:
        PEERS[name].build(case, device)
    assert "\n" not in str(absent.value)
    return str(absent.value)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("flash_attn_2", "flash_attn"),
        ("flash_attn_2_packed", "flash_attn"),
        ("flash_attn_3", "flash_attn_interface"),
        ("flash_attn_4", "flash_attn.cute"),
    ],
)
def test_a_missing_library_is_absent_by_name(name, module, monkeypatch):
    for depth in range(1, module.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(module.split(".")[:depth]), None)
    assert reason(name, CASE).startswith(f"{module} cannot be imported")
    assert "CUDA only" in reason(name, CASE, CPU)
    assert "float32" in reason(name, replace(CASE, dtype=torch.float32))


@pytest.mark.parametrize("name", ["leaner_packed", "flash_attn_2_packed"])
def test_one_projection_has_as_many_queries_as_keys(name):
    assert "as many queries as keys" in reason(name, replace(CASE, queries=1))


def test_a_library_without_the_function_is_absent(monkeypatch):
    # flash-attn 4 alone leaves a package `flash_attn` that holds no version 2.
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert reason("flash_attn_2", CASE) == "flash_attn has no flash_attn_func"


@pytest.fixture
def host_tensors(monkeypatch):
    """Let a builder that puts tensors on a GPU put them on the CPU."""
    offsets = AttentionCase.offsets
    monkeypatch.setattr(AttentionCase, "offsets", lambda case, device: offsets(case, CPU))


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_libraries_get_offsets_and_the_longest(causal, monkeypatch, host_tensors):
    calls = []

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, **rest):
        calls.append((cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), rest))
        return q + k + v, "lse"

    def varlen_attn(q, k, v, starts, key_starts, rows, cols, *, window_size):
        calls.append((starts.tolist(), key_starts.tolist(), rows, cols, window_size))
        return q + k + v

    for name, function in (
        ("flash_attn_interface", flash_attn_varlen_func),
        ("torch.nn.attention.varlen", varlen_attn),
    ):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    case, offsets = replace(RAGGED, causal=causal), [0, 5, 133, 136]
    assert PEERS["flash_attn_3_varlen"].build(case, CUDA)(1, 2, 3) == 6
    assert PEERS["torch_varlen"].build(case, CUDA)(1, 2, 3) == 6
    limits = {"max_seqlen_q": 128, "max_seqlen_k": 128, "causal": causal, "window_size": (-1, -1)}
    assert calls[0] == (offsets, offsets, limits)
    assert calls[1] == (offsets, offsets, 128, 128, (-1, 0) if causal else (-1, -1))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.device == "cpu"], ids=lambda case: case.name
)
def test_peers_of_a_cpu_pass_the_gate(case):
    problem = AttentionProblem(case, CPU, copies=1)
    passed = set()
    for name, peer in peers_of(case).items():
        with peer.context():
            try:
                assert max(problem.check(peer, peer.build(case, CPU)).values()) <= 1
            except (AbsentError, RuntimeError):
                assert not peer.ours or case.crossed, name
                continue
        passed.add(name)
    if case.ragged:
        ours = {"leaner_varlen", "leaner_varlen_stats", "leaner_padded"}
        assert ours | {"sdpa_padded", "eager_padded"} <= passed
    else:
        ours = {"leaner_attention", "leaner_kernel", "leaner_stats", "leaner_stats_sampled"}
        assert ours | {"leaner_stats_unsampled", "sdpa", "eager"} <= passed


def test_every_peer_says_in_one_sentence_what_it_is():
    for case in ATTENTION_CASES:
        for name, peer in catalogue.peers_of(case).items():
            assert peer.about, name
            assert "\n" not in peer.about, name
            assert not peer.about.endswith("."), name
