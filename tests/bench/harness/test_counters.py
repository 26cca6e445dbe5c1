"""Kernel names, memory kept for a backward, and energy."""

from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import counters


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


def test_what_is_kept_is_told_apart():
    # d/dx of exp(w * x + b) needs x and w, which are inputs, and the exponential, which is the
    # output; the sine of it needs the exponential as its own.
    w, x, b = (torch.randn(8, 16, requires_grad=True) for _ in range(3))
    size = 8 * 16 * 4
    assert counters.kept_for_backward(lambda *t: (t[0] * t[1] + t[2]).exp(), (w, x, b)) == (
        2 * size,
        size,
        0,
    )
    assert counters.kept_for_backward(lambda *t: (t[0] * t[1]).exp().sin(), (w, x)) == (
        2 * size,
        0,
        size,
    )


def test_parameters_are_not_counted():
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with_weight = counters.kept_for_backward(lambda x: (x @ w).sin(), (x,))
    without = counters.kept_for_backward(lambda x: (x @ w.T).sin(), (x,), (w,))
    assert without.inputs == with_weight.inputs == x.nbytes
    assert with_weight.own - without.own == w.nbytes


def test_a_storage_is_kept_once_and_whole():
    qkv = torch.randn(4, 3, 8, requires_grad=True)
    kept = counters.kept_for_backward(lambda t: t[:, 0] * t[:, 1] * t[:, 2], (qkv,))
    assert kept.inputs == 4 * 3 * 8 * 4
    assert kept.own == 4 * 8 * 4


def test_jagged_tensors_count_their_values():
    offsets = torch.tensor([0, 3, 5])
    values = torch.randn(5, 8)
    t = torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()
    kept = counters.kept_for_backward(lambda t: (t * t).sin(), (t,))
    assert kept == (values.nbytes, 0, values.nbytes)


def test_nothing_is_kept_where_nothing_is_differentiated():
    x = torch.randn(8)
    assert counters.kept_for_backward(torch.exp, (x,)) == (0, 0, 0)


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
