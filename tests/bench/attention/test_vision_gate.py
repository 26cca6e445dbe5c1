"""The gate of the vision operators: every peer passes, wrong ones get no number."""

import pytest
import torch

from bench.attention import vision_peers
from bench.attention.vision_cases import VisionCase
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
