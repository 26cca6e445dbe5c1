"""Kappa captured by the kernels on a GPU, in the precision that models train in."""

from collections.abc import Callable, Iterator

import pytest
import torch

from leaner_kernels import KappaMonitor, attention_with_stats, condition_number, kappa
from leaner_kernels.ops.attention import reference
from models.vit import VisionTransformer
from tests.gpu.draws import randn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [1e-2, 1e-3, 4e-4])
def test_captured_heads_keep_the_condition_number(spread: float, dtype: torch.dtype) -> None:
    """Nearly uniform attention is nearly rank one: kappa rises as the scores shrink."""
    q, k, v = (randn(3, 4, 100, 64, dtype=dtype) for _ in range(3))
    q = (spread * q).to(dtype)
    sample = torch.tensor([2, 0], dtype=torch.int32, device="cuda")
    stats = attention_with_stats(q, k, v, sample=sample)
    p, _, _ = reference.probabilities(q.cpu().double(), k.cpu().double(), None, None, scale=0.125)
    exact = reference.forward(p, v.cpu().double(), None, 0.0).transpose(1, 2).flatten(2)[[2, 0]]
    truth = condition_number(exact).kappa
    assert truth.max() < 1e6
    captured = condition_number(stats.heads).kappa.cpu()
    torch.testing.assert_close(captured, truth, rtol=0.01, atol=0)
    if spread < 1e-2:
        # What the output holds in half precision, where kappa is mostly rounding, tells less.
        hook = condition_number(stats.out.transpose(1, 2).flatten(2).float()).kappa.cpu()[[2, 0]]
        errors = [(found / truth - 1).abs().max() for found in (captured, hook)]
        assert errors[1] > 5 * errors[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_monitor_watches_a_vit_in_bfloat16(compiled: bool) -> None:
    model = VisionTransformer(image_size=64, depth=2, heads=[4, 12]).cuda().bfloat16()
    monitor = KappaMonitor(model, every=2, samples=2)
    run = torch.compile(model) if compiled else model
    rows = []
    for step in range(3):
        monitor.begin(step)
        run(images()).float().square().sum().backward()
        rows += monitor.end()
    rows += monitor.flush()
    assert [row["step"] for row in rows] == [0, 0, 2, 2]
    for row in rows:
        assert row["kappa"] is None or row["kappa"] >= 1
        assert row["kappa_after_skip"] is None or 1 <= row["kappa_after_skip"] <= 512
        assert row["tokens"] == 17
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def images() -> torch.Tensor:
    return randn(4, 3, 64, 64, dtype=torch.bfloat16)


def skip_where_solving_synchronises() -> None:
    if kappa.backend("cuda") != "cuda":
        pytest.skip("torch.linalg synchronises: the native library is not built for this GPU")


@pytest.fixture
def synchronisation_is_an_error() -> Iterator[Callable[[bool], None]]:
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


def test_a_sampled_step_does_not_synchronise(
    synchronisation_is_an_error: Callable[[bool], None],
) -> None:
    skip_where_solving_synchronises()
    model = VisionTransformer(image_size=64, depth=2, heads=4).cuda().bfloat16()
    monitor = KappaMonitor(model, every=1, samples=2)
    batch, rows = images(), []
    for step in range(4):
        # The first step compiles kernels and allocates.
        synchronisation_is_an_error(step > 0)
        monitor.begin(step)
        model(batch).float().square().sum().backward()
        rows += monitor.end()
    synchronisation_is_an_error(False)
    rows += monitor.flush()
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_captures_are_not_overwritten_before_a_late_measurement() -> None:
    skip_where_solving_synchronises()
    model = VisionTransformer(image_size=64, depth=2, heads=4).cuda()
    monitor = KappaMonitor(model, every=1, samples=2)
    batch = images().float()
    monitor.begin(0)
    model(batch)
    monitor.end()
    monitor.flush()

    monitor.begin(1)
    model(batch)
    heads = [module.captured.heads.clone() for module in monitor.modules.values()]
    with torch.cuda.stream(monitor._side_stream.stream):
        torch.cuda._sleep(500_000_000)
    assert monitor.end() == []
    # Into the memory that the captures and their copies had, were it free.
    for _ in range(100):
        model(batch.fill_(float("nan")))
    rows = monitor.flush()
    for row, captured in zip(rows, heads, strict=True):
        expected = condition_number(captured.cpu())
        assert row["sigma_max"] == pytest.approx(expected.sigma_max.mean().item(), rel=1e-5)
        assert row["kappa"] == pytest.approx(expected.kappa.log().mean().exp().item(), rel=1e-3)
