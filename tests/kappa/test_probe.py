"""Kappa of given items between training steps, which no bit of the training notices."""

import copy

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels import KappaMonitor, QKClip, measure
from leaner_kernels.nn import ManyHeadAttention


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


def test_modules_return_to_the_mode_that_each_was_in() -> None:
    model = Net()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="x must be"):
        measure(model, x[..., :3], forward=lambda model, items: model.attention(items))
    measure(model, x)
    assert [module.training for module in model.modules()] == modes
    assert not model.frozen.training
    assert model.drop.training


def test_equal_items_have_equal_rows_whatever_was_drawn_before() -> None:
    model = Net()
    first = measure(model, x, step=3)
    torch.randn(7)
    assert measure(model, x, step=3) == first
    assert [row["step"] for row in first] == [3]
    assert first[0]["kappa"] > 1


def test_the_rows_are_those_of_a_monitor_in_eval_mode() -> None:
    model = Net()
    rows = measure(model, x, samples=8)
    monitor = KappaMonitor(copy.deepcopy(model).eval(), every=1, samples=8)
    monitor.begin(0)
    with torch.no_grad():
        monitor.model(x)
    assert rows == monitor.end()


def test_a_batch_is_an_argument_several_or_named_ones() -> None:
    model = Net()
    rows = measure(model, x)
    assert measure(model, (x, 1.0)) == rows
    assert measure(model, {"x": x, "shift": 1.0}) == rows
    assert measure(model, [x], forward=lambda model, items: model(*items)) == rows


def test_a_monitor_of_before_measures_again() -> None:
    model = Net()
    monitor = KappaMonitor(model, every=1, samples=2)
    assert measure(model, x, monitor=monitor) == measure(model, x, samples=2)
    assert measure(model, x, monitor=monitor) == measure(model, x, samples=2)


@pytest.mark.parametrize(("every", "model"), [(2, "own"), (1, "other")])
def test_a_monitor_of_another_model_or_of_other_steps_is_refused(every: int, model: str) -> None:
    own = Net()
    monitor = KappaMonitor(own if model == "own" else Net(), every=every)
    with pytest.raises(ValueError, match="monitor must be of this model, with every=1"):
        measure(own, x, monitor=monitor)


def test_a_step_being_sampled_is_not_disturbed() -> None:
    model = Net()
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    with pytest.raises(RuntimeError, match="measure before begin or after end"):
        measure(model, x)
    model(x)
    assert monitor.end()[0]["kappa"] > 1
