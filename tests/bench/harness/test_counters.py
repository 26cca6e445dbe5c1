"""Memory kept for a backward, energy, and FLOPs."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import leaner_kernels
from bench.harness import counters


def test_what_a_backward_needs_is_counted_once_and_whole_without_parameters():
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    # The input, the product for the sine, and the weight unless it is there anyway.
    assert counters.kept_for_backward(lambda: (x @ w).sin()) == 2 * x.nbytes + w.nbytes
    assert counters.kept_for_backward(lambda: (x @ w.T).sin(), (w,)) == 2 * x.nbytes
    qkv = torch.randn(4, 3, 8, requires_grad=True)
    kept = counters.kept_for_backward(lambda: qkv[:, 0] * qkv[:, 1] * qkv[:, 2])
    assert kept == qkv.nbytes + qkv[:, 0].nbytes
    assert counters.kept_for_backward(lambda: x.detach().exp()) == 0


@pytest.mark.parametrize(
    "attend",
    [
        scaled_dot_product_attention,
        leaner_kernels.attention,
        lambda *leaves: leaner_kernels.attention_with_stats(*leaves).out,
    ],
    ids=["PyTorch's", "ours", "ours with statistics"],
)
def test_attention_has_the_flops_of_its_products_whoever_computes_it(attend):
    """Two forward, five backward, where the scores are computed again."""
    q = torch.randn(2, 4, 32, 16, requires_grad=True)
    product = 2 * q.numel() * 32
    assert counters.flops(lambda: attend(q, q, q)) == 2 * product
    assert counters.flops(lambda: attend(q, q, q).sum().backward()) == 7 * product


def test_energy_is_the_counters_difference_between_two_of_its_movements(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(counters, "ENERGY_SECONDS", 0.01)
    rounds = []
    gpu = SimpleNamespace(energy_joules=1000.0)

    def run_round():  # 60 joules a round, which the counter shows at every fifth
        rounds.append(None)
        gpu.energy_joules += 300 * (len(rounds) % 5 == 0)

    measured = counters.energy(run_round, 20, gpu)
    assert measured["joules"] == 3
    assert measured["energy_seconds"] >= 0.01
    assert counters.energy(run_round, 20, SimpleNamespace(energy_joules=None)) == {}
    assert counters.energy(lambda: None, 20, SimpleNamespace(energy_joules=7.0)) == {}
