"""Kappa captured by the kernels on a card, in the precision that models train in."""

import pytest
import torch

from leaner_kernels import KappaMonitor, attention_with_stats, condition_number
from leaner_kernels.ops.attention import reference
from models.vit import VisionTransformer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [1e-2, 1e-3, 4e-4])
def test_captured_heads_keep_the_condition_number(spread: float, dtype: torch.dtype) -> None:
    """Nearly uniform attention is nearly rank one: kappa rises as the scores shrink."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, 100, 64, device="cuda").to(dtype) for _ in range(3))
    q = (spread * q).to(dtype)
    sample = torch.tensor([2, 0], dtype=torch.int32, device="cuda")
    stats = attention_with_stats(q, k, v, sample=sample)
    p, _, _ = reference.probabilities(q.cpu().double(), k.cpu().double(), None, None, False, 0.125)
    exact = reference.attend(p, v.cpu().double(), None, 0.0).transpose(1, 2).flatten(2)[[2, 0]]
    truth = condition_number(exact).kappa
    assert truth.max() < 1e6
    captured = condition_number(stats.heads).kappa.cpu()
    torch.testing.assert_close(captured, truth, rtol=0.01, atol=0)
    if spread < 1e-2:
        hook = condition_number(stats.out.transpose(1, 2).flatten(2).float()).kappa.cpu()[[2, 0]]
        assert ((hook / truth - 1).abs() > 0.1).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_monitor_watches_a_vit_in_bfloat16(compiled: bool) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(image_size=64, depth=2, heads=[4, 12]).cuda().bfloat16()
    monitor = KappaMonitor(model, every=2, samples=2)
    run = torch.compile(model) if compiled else model
    images = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    counts = []
    for step in range(3):
        monitor.begin(step)
        run(images).float().square().sum().backward()
        rows = monitor.end()
        counts.append(len(rows))
        for row in rows:
            assert row["kappa"] is None or row["kappa"] >= 1
            assert row["tokens"] == 17
    assert counts == [2, 0, 2]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
