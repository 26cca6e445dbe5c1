"""The gate of the vision operators: every peer passes, wrong ones get no number."""

import sys
from dataclasses import replace

import pytest
import torch

from bench.attention import vision_peers
from bench.attention.vision_cases import VisionCase
from bench.attention.vision_gate import VisionProblem
from bench.catalogue import peers_of, problem_of
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer
from tests.bench.attention.test_gate import WrongGradient

CPU = torch.device("cpu")
OPS = "cross_covariance", "channel", "window", "outlook"
GRADIENTS = [
    ("cross_covariance", 0, "dqkv"),
    ("cross_covariance", 1, "dtemperature"),
    ("channel", 0, "dqkv"),
    ("window", 0, "dqkv"),
    ("outlook", 0, "dvalue"),
    ("outlook", 1, "dlogits"),
]


def small(op, dtype=torch.float32):
    return VisionCase(op, "cpu", op, 2, 6, 2, 8, dtype, window=3)


def judge(case, function, layout="packed"):
    return problem_of(case, CPU, copies=1).check(Peer(None, layout), function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_peer_computes_the_same(op, dtype):
    case = small(op, dtype)
    passed = set()
    for name, peer in peers_of(case).items():
        with peer.context():
            try:
                fractions = judge(case, peer.build(case, CPU), peer.layout)
            except (AbsentError, *REFUSALS):
                assert name.startswith("sdpa_") or name == "eager_compiled"
                continue
        assert all(0 <= fraction <= 1 for fraction in fractions.values()), name
        passed.add(name)
    assert {"leaner", "leaner_stats", "leaner_stats_sampled", "timm", "eager"} <= passed
    assert ("sdpa" in passed) == (op != "outlook")


@pytest.mark.parametrize(("op", "place", "name"), GRADIENTS)
def test_a_wrong_gradient_is_refused_by_name(op, place, name):
    case = small(op)

    def function(*leaves):
        leaves = list(leaves)
        leaves[place] = WrongGradient.apply(leaves[place])
        return vision_peers.eager(case, *leaves)

    with pytest.raises(WrongError, match=f"^{name} is off by"):
        judge(case, function)


@pytest.mark.parametrize("op", OPS)
def test_another_scale_is_refused(op):
    case = small(op)
    # A larger head dimension is a smaller scale; of cosines the temperature is one.
    other = replace(case, head_dim=10) if op != "cross_covariance" else case

    def function(*leaves):
        if op == "cross_covariance":
            leaves = leaves[0], 1.1 * leaves[1]
        return vision_peers.EAGER[op](Rescaled(other, case), *leaves)

    with pytest.raises(WrongError, match=r"^out is off by"):
        judge(case, function)


class Rescaled:
    """A case with the scale of another."""

    def __init__(self, scale_of, case):
        self.scale, self.case = scale_of.scale, case

    def __getattr__(self, name):
        return getattr(self.case, name)


def test_windows_are_cut_and_joined():
    case = small("window")
    positions = torch.arange(2 * 36).view(2, 6, 6, 1)
    windows = vision_peers.cut(case, positions)
    assert windows.shape == (8, 9, 1)
    assert windows[1].flatten().tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert torch.equal(vision_peers.join(case, windows), positions)


def test_a_peer_on_windows_gets_them_cut():
    case = small("window")
    problem = VisionProblem(case, CPU, copies=2)
    (given,) = problem.inputs("windows")[0].leaves
    assert given.shape == (8, 9, 3, 2, 8)
    assert given.is_contiguous()
    assert given.requires_grad
    assert problem.inputs("windows")[0].grad.shape == (8, 9, 2, 8)
    assert not torch.equal(given, problem.inputs("windows")[1].leaves[0])


def test_the_inputs_stay_as_they_were_drawn():
    problem = VisionProblem(small("channel"), CPU, copies=1)
    assert problem.truth
    assert not any(tensor.requires_grad for tensor in problem.sets[0])


@pytest.mark.parametrize("op", OPS)
def test_without_timm_its_peer_is_absent(op, monkeypatch):
    module = {"cross_covariance": "xcit", "outlook": "volo"}.get(op, "davit")
    monkeypatch.setitem(sys.modules, f"timm.models.{module}", None)
    with pytest.raises(AbsentError, match=f"timm.models.{module} cannot be imported"):
        peers_of(small(op))["timm"].build(small(op), CPU)


def test_compiling_is_measured_on_a_gpu_only():
    with pytest.raises(AbsentError, match="CUDA only"):
        peers_of(small("window"))["eager_compiled"].build(small("window"), CPU)
