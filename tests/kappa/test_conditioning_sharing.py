"""Copied models, shared and computed projections, changing lengths, sizes near float64's ends."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from leaner_kernels import EntropyAlarm
from leaner_kernels.conditioning import ConditioningPenalty, QKClip
from tests.kappa.test_conditioning import attention_with, batch, peaks_of


def test_a_copied_model_feeds_no_penalty() -> None:
    model, x = attention_with(), batch()
    penalty = ConditioningPenalty(model, weight=1.0)
    copied = copy.deepcopy(model)
    model(x)
    copied(2 * x)
    copied(x, attn_mask=torch.zeros(7, 7))
    penalty.loss().backward()
    assert model.qkv.weight.grad.abs().max() > 0
    assert copied.qkv.weight.grad is None


def tied(threshold: float) -> tuple[nn.Sequential, QKClip]:
    model = nn.Sequential(attention_with(), attention_with())
    model[1].qkv = model[0].qkv
    return model, QKClip(model, threshold)


def test_a_projection_that_two_modules_share_is_scaled_once() -> None:
    model, clip = tied(threshold=1e9)
    x = batch()
    model(x)
    peaks = clip.step()
    torch.testing.assert_close(peaks["0"], peaks_of(model[0], x))
    largest = peaks["0"].maximum(peaks["1"])
    model, clip = tied(threshold=largest.max().item() / 3)
    weight = model[0].qkv.weight.detach().clone()
    model(x)
    clip.step()
    old, new = (w.unflatten(0, (3, 3, 4)) for w in (weight, model[0].qkv.weight.detach()))
    expected = (clip.threshold / largest.clamp(min=clip.threshold)).sqrt()
    assert (expected < 1).any()
    expected = expected[:, None, None].expand(3, 4, 6)
    torch.testing.assert_close(new[0] / old[0], expected)
    torch.testing.assert_close(new[1] / old[1], expected)
    assert torch.equal(new[2], old[2])


class Quantised(Tensor):
    """What a quantised weight is: the numbers in memory are not those that it stands for."""


def quantise(projection: nn.Linear, part: str) -> None:
    data = getattr(projection, part).detach().as_subclass(Quantised)
    projection.register_parameter(part, nn.Parameter(data, requires_grad=False))


def to_integers(projection: nn.Linear, part: str) -> None:
    data = getattr(projection, part).detach().to(torch.int8)
    projection.register_parameter(part, nn.Parameter(data, requires_grad=False))


NOT_SCALED: dict[str, tuple[Callable[[nn.Linear, str], object], str]] = {
    "pruned": (partial(prune.l1_unstructured, amount=0.1), "is no parameter but computed"),
    "quantised": (quantise, r"is a Quantised of torch\.float32"),
    "integers": (to_integers, r"is a Parameter of torch\.int8"),
}


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("name", NOT_SCALED)
def test_what_scaling_in_place_would_not_reach_is_refused_at_once_and_later(
    name: str, part: str
) -> None:
    change, reason = NOT_SCALED[name]
    message = rf"qkv\.{part} in place.* that of .*{reason}"
    module = attention_with()
    clip = QKClip(module, threshold=1.0)
    module.peak_logit = torch.full((3,), 5.0)
    change(module.qkv, part)
    before = {part: t.detach().clone() for part, t in module.qkv._parameters.items()}
    for call in (clip.step, partial(QKClip, module)):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    after = module.qkv._parameters
    assert all(torch.equal(before[part], after[part]) for part in before)


@pytest.mark.parametrize("monitors", [QKClip, ConditioningPenalty])
def test_replicas_of_data_parallel_are_refused(monitors: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"^nn\.DataParallel runs replicas.*$"):
        monitors(nn.DataParallel(attention_with()))


def alarms_of(rows: list[tuple[float, int]], **options: float) -> list[tuple[int, str]]:
    alarm = EntropyAlarm(**options)
    fired = []
    for step, (entropy, columns) in enumerate(rows):
        row = {"step": step, "layer": "a", "entropy": entropy, "columns": columns}
        fired += [(a.step, a.reason) for a in alarm.update([row])]
    return fired


def test_shorter_sequences_are_no_collapse_and_a_collapse_on_longer_ones_is_one() -> None:
    long, short = math.log(2048), math.log(5)
    healthy = [(0.8 * long, 2048)] * 30 + [(0.8 * short, 5)] * 10
    assert alarms_of(healthy) == []
    # In nats it would be as before.
    collapsed = [(0.8 * short, 5)] * 30 + [(0.2 * long, 2048)]
    assert alarms_of(collapsed) == [(30, "drop")]
    (alarm,) = EntropyAlarm().update([{"step": 0, "layer": "a", "entropy": 0.1, "columns": 100}])
    assert (alarm.value, alarm.limit) == (0.1, pytest.approx(0.1 * math.log(100)))


def test_a_replica_of_a_module_that_is_clipped_refuses_to_be_made() -> None:
    # As DataParallel does that wraps the model only later.
    module = attention_with()
    module._replicate_for_data_parallel()
    QKClip(module)
    with pytest.raises(RuntimeError, match="replicas"):
        module._replicate_for_data_parallel()
