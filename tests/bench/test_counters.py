"""Kernel names and energy."""

from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import counters


def test_names_say_which_backend_really_ran():
    q = torch.randn(1, 2, 16, 8)

    def names(backend):
        with sdpa_kernel(backend):
            attend = torch.nn.functional.scaled_dot_product_attention
            return counters.kernel_names(lambda: attend(q, attend(q, q, q), q), "cpu")

    assert any("flash_attention_for_cpu" in name for name in names(SDPBackend.FLASH_ATTENTION))
    math = names(SDPBackend.MATH)
    assert any("attention_math" in name for name in math)
    assert not any("flash" in name for name in math)
    assert len(set(math)) == len(math)


def test_energy_is_the_counters_difference_over_every_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(counters, "ENERGY_SECONDS", 0.01)
    rounds = []
    gpu = SimpleNamespace(energy_joules=1000.0)

    def run_round():
        rounds.append(None)
        gpu.energy_joules += 60

    assert counters.joules_per_call(run_round, 20, gpu) == 3
    assert len(rounds) > 1
    assert counters.joules_per_call(run_round, 20, SimpleNamespace(energy_joules=None)) is None
