"""Kappa of given items between training steps, which no bit of the training notices."""

import copy

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels import KappaMonitor, QKClip, measure
from leaner_kernels.nn import ManyHeadAttention, NystromAttention


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(12)
        self.attention = ManyHeadAttention(16, 4, head_dim=8)
        self.frozen = nn.Dropout(0.5).eval()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.drop(self.frozen(self.attention(self.norm(x)))) + shift


x = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(1))


def trained(probe: bool) -> tuple[list[Tensor], nn.Module]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = QKClip(model, threshold=0.01)
    losses = []
    for _ in range(4):
        if probe:
            measure(model, x, forward=lambda model, items: model(items + torch.randn(8, 12, 16)))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if probe:
            measure(model, x * 100)
        clip.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model


def test_no_bit_of_the_training_changes() -> None:
    (plain, model), (probed, same) = trained(False), trained(True)
    assert torch.equal(torch.stack(plain), torch.stack(probed))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name


def test_the_rows_are_those_of_a_monitor_in_eval_mode() -> None:
    model = Net()
    rows = measure(model, x, samples=8)
    monitor = KappaMonitor(copy.deepcopy(model).eval(), every=1, samples=8)
    monitor.begin(0)
    with torch.no_grad():
        monitor.model(x)
    assert rows == monitor.end()


def test_a_step_that_raises_is_cancelled() -> None:
    model = Net()
    monitor = KappaMonitor(model, every=1)
    with pytest.raises(RuntimeError), monitor.step(0):  # noqa: PT012
        model(x)
        model(x[..., :1])
    assert monitor.end() == []
    with monitor.step(1) as rows:
        model(x)
    assert [row["step"] for row in rows] == [1]


def test_landmarks_have_kappa_to_their_rank() -> None:
    torch.manual_seed(0)
    model = NystromAttention(dim=16, num_heads=2, head_dim=4, num_landmarks=4)
    monitor = KappaMonitor(model, every=1, samples=2)
    with monitor.step(0) as rows:
        model(torch.randn(2, 32, 16))
        heads = model.captured.heads
    (row,) = rows
    assert row["reason"] == "not resolved"
    # Two heads that span four columns each share one direction.
    assert row["rank"] == 7
    sigma = torch.linalg.svdvals(heads.double())
    assert row["kappa_to_rank"] == pytest.approx(
        float((sigma[:, 0] / sigma[:, 6]).log().mean().exp()), rel=1e-3
    )


def test_a_step_being_sampled_is_not_disturbed() -> None:
    model = Net()
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    with pytest.raises(RuntimeError, match="call it before begin or after end"):
        measure(model, x)
    model(x)
    assert monitor.end()[0]["kappa"] > 1
