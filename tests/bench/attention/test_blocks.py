"""Attention blocks: our modules and timm's agree, and the work is that of both projections."""

import sys

import pytest
import torch

from bench.attention.blocks import BLOCK_CASES, BLOCK_PEERS, BlockCase, timm_module
from bench.attention.vision_cases import VisionCase
from bench.catalogue import problem_of
from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError, Peer

CPU = torch.device("cpu")
OPS = "cross_covariance", "channel", "window", "outlook"
BY_NAME = {case.name: case for case in BLOCK_CASES}


def small(op, dim=16, dtype=torch.float32):
    return BlockCase(VisionCase(op, "cpu", op, 2, 6, 2, 8, dtype, window=3), dim)


def judge(case, name):
    peer = BLOCK_PEERS[name]
    return problem_of(case, CPU, copies=1).check(peer, peer.build(case, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "dim"), [*((op, 16) for op in OPS), ("cross_covariance", 12)])
def test_our_module_and_timms_agree_in_every_gradient(op, dim, dtype):
    case = small(op, dim, dtype)
    for name in ("leaner", "timm"):
        fractions = judge(case, name)
        assert {"out", "dx", "dproj.weight", "dproj.bias"} <= fractions.keys()
        assert all(0 <= fraction <= 1 for fraction in fractions.values())


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_gradient_of_a_weight_is_refused(op):
    case = small(op)
    function = BLOCK_PEERS["leaner"].build(case, CPU)

    def wrong(x, *weights):
        *others, bias = weights
        return function(x, *others, 1.1 * bias - 0.1 * bias.detach())

    with pytest.raises(WrongError, match=r"^dproj\.bias is off by"):
        problem_of(case, CPU, copies=1).check(Peer(None, "packed"), wrong)


def test_work_is_that_of_the_attention_and_its_projections():
    case = BY_NAME["xcit_m_block"]
    projections = 2 * 128 * 196 * (512 * 1536 + 512 * 512)
    assert case.flops("forward") == case.inner.flops("forward") + projections
    assert case.flops("backward") == case.inner.flops("backward") + 2 * projections
    weights = 512 * 1536 + 1536 + 512 * 512 + 512 + 8
    assert case.bytes("forward") == 2 * (2 * 128 * 196 * 512 + weights)
    assert case.bytes("both") == case.bytes("forward") + case.bytes("backward")
    wide = BY_NAME["xcit_m_lean_block"]
    assert wide.weights["qkv.weight"] == (3 * 1024, 512)
    outlook = BY_NAME["volo_d3_outlook_block"]
    logits = 2 * 128 * 196 * 256 * 8 * 81
    others = 2 * 2 * 128 * 784 * 256 * 256
    assert outlook.flops("forward") == outlook.inner.flops("forward") + logits + others


def test_the_case_is_described():
    facts = BY_NAME["davit_window3_block"].facts()
    assert facts["op"] == "window_block"
    assert facts["size"] == "128·16·14²·32, windows 7×7, width 512"


def test_without_timm_a_block_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.models.xcit", None)
    with pytest.raises(AbsentError, match=r"timm\.models\.xcit cannot be imported"):
        timm_module(small("cross_covariance"))
