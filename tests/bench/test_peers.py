"""Peers as data: who takes which case, and what is said about those who do not."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import arange
from torch._functorch import config as functorch_config

from bench import peers
from bench.cases import CASES, Case
from bench.peers import PEERS, AbsentError, flex_mask

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = Case("small", "cuda", 2, 2, 128, 64, torch.float16)


def reason(name, case, device=CUDA):
    with pytest.raises(AbsentError) as absent:
        PEERS[name].build(case, device)
    assert "\n" not in str(absent.value)
    return str(absent.value)


def test_every_peer_of_the_field_is_named():
    assert {name.split("_")[0] for name in PEERS} == {
        *("leaner", "sdpa", "eager", "flex", "flash", "apex", "xformers")
    }
    assert {"sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn"} <= PEERS.keys()
    ours = {name for name, peer in PEERS.items() if peer.ours}
    assert ours == {name for name in PEERS if name.startswith("leaner_")}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("flash_attn_2", "flash_attn"),
        ("flash_attn_2_packed", "flash_attn"),
        ("flash_attn_3", "flash_attn_interface"),
        ("flash_attn_4", "flash_attn.cute"),
        ("apex_fmha", "apex.contrib.fmha.fmha"),
        ("xformers", "xformers.ops"),
    ],
)
def test_a_missing_library_is_absent_by_name(name, module, monkeypatch):
    for depth in range(1, module.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(module.split(".")[:depth]), None)
    assert reason(name, CASE).startswith(f"{module} cannot be imported")
    assert "CUDA only" in reason(name, CASE, CPU)
    assert "padded" in reason(name, replace(CASE, padded=True))
    assert "float32" in reason(name, replace(CASE, dtype=torch.float32))


def test_a_peer_without_the_arguments_of_a_case_says_so():
    assert "causal" in reason("apex_fmha", replace(CASE, causal=True))
    assert "head_dim 64" in reason("apex_fmha", replace(CASE, head_dim=32))
    assert "backward" in reason("flex", CASE, CPU)


def test_a_library_without_the_function_is_absent(monkeypatch):
    # flash-attn 4 alone leaves a package `flash_attn` that holds no version 2.
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert reason("flash_attn_2", CASE) == "flash_attn has no flash_attn_func"


def test_an_installed_library_is_called_as_it_wants(monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, causal):
        calls.append(causal)
        return q + k + v, "lse"

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    run = PEERS["flash_attn_3"].build(replace(CASE, causal=True), CUDA)
    assert run(1, 2, 3) == 6
    assert calls == [True]


def test_apex_gets_packed_sequences_and_their_ends(monkeypatch):
    calls = []

    def apply(qkv, ends, *rest):
        calls.append((tuple(qkv.shape), ends.tolist(), rest))
        return qkv[:, 0]

    fmha = ModuleType("apex.contrib.fmha.fmha")
    fmha.FMHAFun = SimpleNamespace(apply=apply)
    for name in ("apex", "apex.contrib", "apex.contrib.fmha"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "apex.contrib.fmha.fmha", fmha)
    monkeypatch.setattr(torch, "arange", lambda *args, device, **kwargs: arange(*args, **kwargs))
    qkv = torch.randn(2, 128, 3, 2, 64)
    out = PEERS["apex_fmha"].build(CASE, CUDA)(qkv)
    assert torch.equal(out, qkv[:, :, 0])
    assert calls == [((256, 3, 2, 64), [0, 128, 256], (0.0, 128, True, False))]


def test_flex_can_run_its_backward_many_times(monkeypatch):
    monkeypatch.setattr(peers, "flex_mask", lambda case, device: "mask")
    with functorch_config.patch(donated_buffer=True):
        compiled = PEERS["flex"].build(CASE, CUDA)
        assert not functorch_config.donated_buffer
    assert compiled.keywords == {"block_mask": "mask"}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_sees_what_the_case_shows(causal, padded):
    case = Case("small", "cpu", 3, 2, 130, 16, torch.float32, causal=causal, padded=padded)
    mask, shown = flex_mask(case, CPU), case.visible(CPU)
    assert (mask is None) == (shown is None)
    if mask is not None:
        batch, row, col = torch.meshgrid(*map(torch.arange, (3, 130, 130)), indexing="ij")
        assert torch.equal(mask.mask_mod(batch, None, row, col), shown.expand(3, 1, 130, 130)[:, 0])


@pytest.mark.parametrize(
    "name", ["sdpa", "leaner_attention", "leaner_stats", "leaner_stats_sampled"]
)
def test_cpu_peers_compute_the_same(name):
    for case in CASES:
        if case.device == "cpu":
            q, k, v = torch.randn(3, case.batch, case.heads, case.tokens, case.head_dim).double()
            out = PEERS[name].build(case, CPU)(q, k, v)
            torch.testing.assert_close(out, PEERS["eager"].build(case, CPU)(q, k, v))
