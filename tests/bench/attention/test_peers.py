"""Peers as data: who takes which case, and why the others do not."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from bench.attention import catalogue
from bench.attention.cases import CASES, AttentionCase
from bench.attention.catalogue import ATTENTION_CASES
from bench.attention.gate import AttentionProblem, heads_first
from bench.attention.peers import PEERS, flex, flex_mask, peers_of
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
        ("apex_fmha", "apex.contrib.fmha.fmha"),
    ],
)
def test_a_missing_library_is_absent_by_name(name, module, monkeypatch):
    for depth in range(1, module.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(module.split(".")[:depth]), None)
    assert reason(name, CASE).startswith(f"{module} cannot be imported")
    assert "CUDA only" in reason(name, CASE, CPU)
    assert "float32" in reason(name, replace(CASE, dtype=torch.float32))


@pytest.mark.parametrize("name", ["xformers", "xformers_varlen"])
def test_xformers_is_absent_by_name(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    assert reason(name, CASE).startswith("xformers.ops cannot be imported")
    assert "CUDA only" in reason(name, CASE, CPU)


@pytest.mark.parametrize(
    "change", [{"dtype": torch.bfloat16}, {"head_dim": 32}, {"tokens": 640}, {"causal": True}]
)
def test_apex_says_which_cases_it_takes(change):
    message = "takes float16, heads of 64, at most 512 tokens, and no causal mask"
    assert reason("apex_fmha", replace(CASE, **change)) == message


@pytest.mark.parametrize("name", ["flex_attention", "flex_attention_varlen"])
def test_flex_attention_is_compiled_on_cuda_only(name):
    assert "compiled on CUDA only" in reason(name, CASE, CPU)


@pytest.mark.parametrize("name", ["leaner_packed", "flash_attn_2_packed", "apex_fmha"])
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
    monkeypatch.setattr(
        AttentionCase, "offsets", lambda case, device, **options: offsets(case, CPU, **options)
    )


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
    leaves = [torch.full((136, 2, 64), value) for value in (1.0, 2.0, 3.0)]
    for peer in ("flash_attn_3_varlen", "torch_varlen"):
        assert torch.equal(PEERS[peer].build(case, CUDA)(*leaves), 6 * torch.ones(136, 2, 64))
    limits = {"max_seqlen_q": 128, "max_seqlen_k": 128, "causal": causal, "window_size": (-1, -1)}
    assert calls[0] == (offsets, offsets, limits)
    assert calls[1] == (offsets, offsets, 128, 128, (-1, 0) if causal else (-1, -1))


def library(monkeypatch, module, **functions):
    for depth in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        setattr(sys.modules[module], name, function)


def test_libraries_get_the_window_of_a_sliding_case(monkeypatch, host_tensors):
    case, calls = replace(CASE, causal=True, window=24), []

    def record(*args, **options):
        calls.append((args, options))
        return args[0] if args else "mask"

    library(monkeypatch, "torch.nn.attention.varlen", varlen_attn=record)
    library(monkeypatch, "flash_attn_interface", flash_attn_func=record)
    library(monkeypatch, "xformers.ops.fmha.attn_bias", LocalAttentionFromBottomRightMask=record)
    sys.modules["xformers.ops"].memory_efficient_attention = record
    q = torch.ones(2, 128, 2, 64)
    for name in ("torch_varlen_equal", "flash_attn_3", "xformers"):
        assert torch.equal(PEERS[name].build(case, CUDA)(q, q, q), q)
    (packed, _, _, starts, keys, rows, cols), options = calls[0]
    assert (packed.shape, starts.tolist(), rows, cols) == ((256, 2, 64), [0, 128, 256], 128, 128)
    assert torch.equal(starts, keys)
    assert options == {"window_size": (24, 0)}
    assert calls[1][1] == {"causal": True, "window_size": (24, 0)}
    assert calls[2] == ((24, 0), {})
    assert calls[3][1] == {"attn_bias": 24}


def test_one_query_a_sequence_is_put_end_to_end(monkeypatch, host_tensors):
    calls = []

    def varlen_attn(q, k, v, *limits, window_size):
        calls.append((len(q), len(k), *(t.tolist() for t in limits[:2]), *limits[2:]))
        return q

    library(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)
    q, k = torch.ones(2, 1, 2, 64), torch.ones(2, 128, 2, 64)
    run = PEERS["torch_varlen_equal"].build(replace(CASE, queries=1), CUDA)
    assert run(q, k, k).shape == q.shape
    assert calls == [(2, 256, [0, 1, 2], [0, 128, 256], 1, 128)]


def test_xformers_masks_documents(monkeypatch):
    class BlockDiagonalMask(list):
        from_seqlens = classmethod(lambda cls, lengths: cls(lengths))

        def make_causal(self):
            return "causal", *self

    def attend(q, k, v, attn_bias):
        assert attn_bias == ("causal", 5, 128, 3)
        assert q.shape == (1, 136, 2, 64)
        return q + k + v

    masks = "xformers.ops.fmha.attn_bias"
    library(monkeypatch, masks, BlockDiagonalMask=BlockDiagonalMask)
    sys.modules["xformers.ops"].memory_efficient_attention = attend
    q = torch.ones(136, 2, 64)
    run = PEERS["xformers_varlen"].build(replace(RAGGED, causal=True), CUDA)
    assert torch.equal(run(q, q, q), 3 * q)


def test_apex_gets_sequences_end_to_end(monkeypatch, host_tensors):
    calls = []

    class FMHAFun:
        @staticmethod
        def apply(qkv, offsets, *options):
            calls.append((qkv.shape, offsets.tolist(), *options))
            return qkv[:, 0]

    library(monkeypatch, "apex.contrib.fmha.fmha", FMHAFun=FMHAFun)
    qkv = torch.randn(2, 100, 3, 2, 64)
    out = PEERS["apex_fmha"].build(replace(CASE, tokens=100), CUDA)(qkv)
    assert torch.equal(out, qkv[:, :, 0])
    assert calls == [((200, 3, 2, 64), [0, 100, 200], 0.0, 128, True, False)]


FLEX_CASES = {
    "plain": CASE,
    "one query": replace(CASE, queries=1),
    "causal": replace(CASE, causal=True),
    "sliding": replace(CASE, causal=True, window=24),
    "documents": RAGGED,
    "causal documents": replace(RAGGED, causal=True),
}


@pytest.mark.parametrize("case", FLEX_CASES.values(), ids=FLEX_CASES)
def test_flex_attention_sees_what_the_case_does(case):
    """Uncompiled: the forward of flex_attention on a CPU, against the textbook's."""
    case = replace(case, dtype=torch.float32)
    problem = AttentionProblem(case, CPU, copies=1)
    layout = "varlen" if case.ragged else "heads"
    leaves = (t.detach() for t in problem.inputs(layout)[0].leaves)
    out = flex(case, CPU, flex_attention)(*leaves)
    out = heads_first(case, out, layout)
    exact, allowed = problem.truth[0]
    assert (out.double()[problem.entries] - exact).abs().max() <= allowed


def test_a_flex_mask_hides_other_documents_and_what_lies_outside_the_window():
    case = replace(RAGGED, causal=True, window=2)
    mask = create_mask(flex_mask(case, CPU), None, None, 136, 136, device=CPU)[0, 0]
    visible = case.visible(CPU)[:, 0]  # (B, N, N)
    blocks = [seen[:n, :n] for seen, n in zip(visible, case.lengths)]
    assert torch.equal(mask, torch.block_diag(*blocks))
    assert flex_mask(CASE, CPU) is None


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
                assert not peer.ours or case.crossed or name == "leaner_sdpa", name
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
