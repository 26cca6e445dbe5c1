"""KappaMonitor in training loops as they are: copies, interrupts, threads, skipped layers."""

import copy
import gc
import math
import pickle
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels import KappaMonitor, attention, nystrom_attention
from leaner_kernels.nn import ManyHeadAttention
from tests.kappa.test_monitor import Model, batch, measured
from tests.kappa.test_monitor_foreign import SDPA, Attention, one_step, seeded, untouched


class OfOthers(Attention):
    def __init__(self) -> None:
        super().__init__(SDPA)


def of_others() -> nn.Module:
    return seeded(lambda: nn.Sequential(Attention(SDPA), Attention(attention)))


# Copies, and steps that are not ended.


def test_a_monitor_dropped_in_a_step_leaves_no_module_capturing() -> None:
    model = Model()
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    model(batch())
    del monitor
    gc.collect()
    assert (model.first.capture_samples, model.first.captured) == (0, None)
    model(batch())
    assert model.first.captured is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", [Model, lambda: seeded(OfOthers)], ids=["ours", "others"])
def test_a_copy_made_in_a_sampled_step_captures_nothing(
    make: Callable, duplicate: Callable
) -> None:
    model = make()
    expected = measured(model, batch())
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    model(batch())
    copied = duplicate(model)
    copied(2 * batch())
    assert all(getattr(m, "captured", None) is None for m in copied.modules())
    assert monitor.end() == expected
    copied(batch())
    assert untouched(model)
    assert not any(getattr(m, "capture_samples", 0) for m in copied.modules())


# Steps in which layers do not run.


class Skips(nn.Module):
    """Blocks, some of which a step leaves out."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.skipped = nn.ModuleList(blocks), set[int]()

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = x if place in self.skipped else x + block(x)
        return x


def ours() -> Skips:
    return seeded(lambda: Skips(*(ManyHeadAttention(12, heads, 8) for heads in (4, 2, 3))))


@pytest.mark.parametrize("make", [ours, lambda: Skips(*of_others())], ids=["ours", "others"])
def test_a_layer_that_a_step_skips_has_a_row_without_numbers(make: Callable[[], Skips]) -> None:
    model = make()
    monitor = KappaMonitor(model, every=1)
    whole = one_step(monitor, model, batch())
    assert {row["reason"] for row in whole} == {None}
    model.skipped = {1}
    rows = one_step(monitor, model, batch(), step=1)
    assert [row["layer"] for row in rows] == [row["layer"] for row in whole]
    skipped = rows[1]
    assert skipped["reason"] == ("not run" if make is ours else "no call of several queries")
    assert skipped["resolved"] is False
    known = {"step", "layer", "heads", "head_dim", "source", "reason", "resolved", "head_norms"}
    assert all(value is None for key, value in skipped.items() if key not in known)
    assert skipped["head_norms"] == [None] * skipped["heads"]
    # The others' are as if there was no such layer.
    assert rows[0]["kappa"] == pytest.approx(whole[0]["kappa"])
    model.skipped = set()
    assert one_step(monitor, model, batch(), step=0) == whole


def test_why_there_is_no_kappa() -> None:
    model = ours()
    monitor = KappaMonitor(model, every=1)
    (row, *_) = one_step(monitor, model, batch()[:, :1].expand(-1, 9, -1))
    assert (row["kappa"], row["resolved"], row["reason"]) == (None, False, "not resolved")
    assert row["entropy"] == pytest.approx(math.log(9))
    (row, *_) = one_step(monitor, model, batch() * math.nan)
    assert (row["kappa"], row["reason"]) == (None, "not finite")


# Several monitors, threads, other modules.


def test_monitors_of_two_models_have_the_rows_of_each() -> None:
    """As of a generator and a discriminator, or of a teacher that is measured meanwhile."""
    models = [seeded(of_others), seeded(of_others)]
    alone = one_step(KappaMonitor(models[0], every=1), models[0], batch())
    first, second = (KappaMonitor(model, every=1) for model in models)
    first.begin(0)
    second.begin(0)
    for model in models:
        model(batch())
    assert first.end() == alone
    assert second.end() == alone
    first.begin(0)
    KappaMonitor(models[1]).measure(batch())
    models[0](batch())
    assert first.end() == alone


def test_nystrom_attention_of_a_module_of_others_is_no_layer() -> None:
    def through_three(*qkv: Tensor) -> Tensor:
        return nystrom_attention(*qkv, 3)

    model = nn.Sequential(seeded(of_others), Attention(through_three))
    with pytest.warns(UserWarning, match="has no rows of 1,"):
        rows = one_step(KappaMonitor(model, every=1), model, batch())
    assert {row["layer"].partition(".")[0] for row in rows} == {"0"}


def test_attention_in_another_thread_is_no_ones() -> None:
    model = of_others()
    expected = one_step(KappaMonitor(model, every=1), model, batch())
    monitor, q = KappaMonitor(model, every=1), torch.randn(2, 3, 7, 4)

    def in_other_thread() -> None:
        out = attention(q, q, q), SDPA(q, q, q)
        with torch.no_grad():
            found.append((out, model(2 * batch())))

    found: list = []
    expected_out = attention(q, q, q)
    for where in ("before", "inside"):
        monitor.begin(0)
        handle = None
        other = threading.Thread(target=in_other_thread)
        if where == "inside":
            handle = model[1].register_forward_pre_hook(lambda *_, other=other: run(other))
        else:
            run(other)
        model(batch())
        if handle is not None:
            handle.remove()
        assert monitor.end() == expected
        assert torch.equal(found[-1][0][0], expected_out)
    assert len(found) == 2
    assert untouched(model)


def run(thread: threading.Thread) -> None:
    if threading.current_thread() is not thread:
        thread.start()
        thread.join()


def test_modules_that_look_like_attention_and_give_no_row_are_named_once() -> None:
    class ComposedAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    class AttentionBlock(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    not_monitored = ComposedAttention()
    not_monitored.monitored = False
    model = seeded(
        lambda: nn.Sequential(
            AttentionBlock(Attention(SDPA)),
            ComposedAttention(),
            AttentionBlock(ComposedAttention()),
        )
    )
    model.append(not_monitored)
    monitor = KappaMonitor(model, every=1)
    with pytest.warns(
        UserWarning, match=r"no rows of 1, 2\.inner, which look like attention"
    ) as caught:
        one_step(monitor, model, batch())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(monitor, model, batch(), step=1)
        whole = nn.Sequential(AttentionBlock(Attention(SDPA)), ManyHeadAttention(12, 4, 8))
        one_step(KappaMonitor(whole, every=1), whole, batch())


def test_data_parallel_on_several_devices_is_refused() -> None:
    model = nn.DataParallel(Model())
    assert len(measured(model, batch())) == 2
    model.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"^nn\.DataParallel on several devices.*$"):
        KappaMonitor(model)


# What is kept.


@pytest.mark.slow
@pytest.mark.parametrize("make", [ours, of_others], ids=["ours", "others"])
def test_many_sampled_steps_keep_nothing(make: Callable[[], nn.Module]) -> None:
    model, x = make(), batch()[:1, :3]
    monitor = KappaMonitor(model, every=1, samples=1)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    alive()  # what other tests left
    counts = []
    for step in range(100):
        monitor.begin(step)
        model(x)
        monitor.end()
        if step in (10, 50, 99):
            counts.append(alive())
    assert len(set(counts)) == 1
    assert not monitor._pending_rows
