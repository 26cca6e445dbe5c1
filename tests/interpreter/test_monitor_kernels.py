"""A bfloat16 ViT under KappaMonitor, its attention run by the kernels as a GPU would round.

What docs/kappa.md promises of captured heads is held from the model to the monitor's row.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from triton.runtime import interpreter

from leaner_kernels import KappaMonitor, condition_number
from leaner_kernels.ops.attention import beside, op
from models.vit import VisionTransformer
from tests.attention_cases import Inputs, peers_of, reference_results
from tests.error_budget import assert_within_budget

TOKENS, DIM = 37, 16


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give tensors of the CPU to the implementations for a GPU; yield the kernels interpreted."""
    ran: list[str] = []
    run = interpreter.GridExecutor.__call__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        ran.append(self.fn.__name__)
        run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    # As on a GPU, from the same pass.
    monkeypatch.setattr(beside, "_on_the_cpu", lambda *_: False)
    with torch.library._scoped_library("leaner_kernels", "IMPL") as library:
        library.impl(
            "attention_qkvpacked_with_stats",
            functools.partial(op.attend_cuda, op.Packed, True),
            "CPU",
            allow_override=True,
        )
        yield ran


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "beyond"), [(1.0, 50), (0.1, 50_000)])
def test_the_monitor_of_a_bfloat16_vit_reports_the_truth(
    gpu_rounding: None, kernels_on_the_cpu: list[str], scale: float, beyond: float
) -> None:
    """Smaller weights make attention more even, and kappa larger."""
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=48, patch_size=8, embed_dim=64, depth=2, heads=[2, 6], head_dim=DIM
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(10 * scale)
    model.bfloat16()
    projected: list[Tensor] = []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda *given: projected.append(given[-1]))
    monitor = KappaMonitor(model, every=1, samples=2)
    monitor.begin(0)
    with torch.no_grad():
        model(torch.randn(2, 3, 48, 48).bfloat16())
    rows = monitor.end()
    assert len(rows) == len(projected) == 2
    largest_kappa = 0.0
    for row, qkv in zip(rows, projected):
        inputs = inputs_of(qkv)
        exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, torch.bfloat16)
        truth = condition_number(exact["heads"])
        assert truth.resolved.all()
        largest_kappa = max(largest_kappa, truth.kappa.max().item())
        # Geometric over the samples, as the row says.
        assert row["kappa"] == pytest.approx(truth.kappa.log().mean().exp().item(), rel=0.01)
        for name in ("entropy", "prob_norm", "head_norm"):
            means = tuple(peer.mean() for peer in peers[name])
            assert_within_budget(torch.tensor(row[name]), means, exact[name].mean())
        largest = tuple(peer.max() for peer in peers["max_logit"])
        assert_within_budget(torch.tensor(row["max_logit"]), largest, exact["max_logit"].max())
    assert largest_kappa > beyond
    assert kernels_on_the_cpu.count("_attention_fwd_kernel") == 2, "a capture a layer"


def inputs_of(qkv: Tensor) -> Inputs:
    """Return the attention that a layer computes from its projection, as a case of the tests."""
    batch, tokens, width = qkv.shape
    assert tokens == TOKENS
    packed = qkv.view(batch, tokens, 3, width // 3 // DIM, DIM)
    query, key, value = op.split_qkv(packed)
    sample = torch.arange(batch, dtype=torch.int32)
    grad = torch.zeros_like(query)
    return Inputs(query, key, value, grad, None, None, None, sample, 0.0, False, DIM**-0.5)
