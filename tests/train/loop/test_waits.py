"""In a step of training the host waits for no device.

Nothing is computed here: on the device "meta" tensors have no values, so to read one on the host
raises. Every copy to it is noted. Kappa's monitor and penalty have tests of their own.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from leaner_kernels.monitor.measurement import HostCopy
from tests.kappa.test_monitor_streams import Transfers
from train import bert, gpt, vit
from train.config import flags
from train.data.loader import BadSamples, Fetched
from train.loop import parallel
from train.loop import train as loop
from train.loop.kappa import Kappa
from train.loop.optimizer import WeightAverage, make_optimizer
from train.loop.parallel import BatchNorms, DistributedContext, Passes
from train.loop.schedule import Schedule

pytestmark = pytest.mark.slow

STEPS = ["--steps", 4, "--accum", 2, "--kappa-every", 0, "--ema", 0.9, "--batch-size", 4]
CASES = {
    "vit": (vit, vit.ImageSettings, ["--mixup", 0.8, "--cutmix", 1.0, "--drop-path", 0.1]),
    "batch norms": (vit, vit.ImageSettings, ["--model", "xcit_digits"]),
    "gpt": (gpt, gpt.GptSettings, ["--dropout", 0.1, "--qk-clip", 100]),
    "bert": (bert, bert.BertSettings, []),
}


class Made(TorchFunctionMode):
    """Notes tensors that are made on a device from numbers of the host, which waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.device.type != "cpu":
            self.seen.append(func.__name__)
        return out


def run_of(name: str, precision: str, size: int) -> Any:
    """What a step needs of a run, whose rank is the first of ``size``."""
    script, kind, more = CASES[name]
    words = [str(word) for word in [*STEPS, "--precision", precision, *more]]
    parsed = flags.parse(script.PROGRAM, "", words, kind, recipes=script.RECIPES)
    task, settings = script.make_task(parsed)
    world = DistributedContext(0, size, size, torch.device("meta"), None, None)
    bf16 = settings.precision == "bf16"
    model = parallel.make_model(task.build, world, seed=0, bf16=bf16, mode="one")
    norms, report = BatchNorms(model), mock.MagicMock()
    schedule = Schedule(task, settings, world)
    kappa = Kappa(model, task, settings, world, report, None, 99)
    return SimpleNamespace(
        task=task,
        settings=settings,
        world=world,
        schedule=schedule,
        model=model,
        norms=norms,
        passes=Passes(model, "one", world),
        optimizer=make_optimizer(model, lr=settings.lr, weight_decay=settings.weight_decay),
        average=WeightAverage(model, norms, settings.ema),
        kappa=kappa,
        bad_samples=BadSamples(0, None, print),
        interrupt=SimpleNamespace(received=None),
        progress=SimpleNamespace(step=0),
    )


@pytest.mark.parametrize(("precision", "size"), [("fp32", 1), ("bf16", 2)])
@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_no_device(name, precision, size, tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(loop, "copy_to_host", lambda t: copied.append(t) or HostCopy(t, None))
    run = run_of(name, precision, size)
    keys = next(iter(run.schedule.sampler(0, 4)))
    batches = iter([Fetched(run.task.train.__getitems__(keys))] * 8)
    with mock.patch.object(dist, "all_reduce") as all_reduce:
        # What is copied once, such as the weights of classes, is there after the first step.
        loop.optimizer_step(run, batches, {"data_wait": 0.0})
        with Transfers() as transfers, Made() as made:
            for run.progress.step in range(1, 4):
                loop.optimizer_step(run, batches, {"data_wait": 0.0})
    assert transfers.seen
    assert [seen for seen in transfers.seen if not seen[2]] + made.seen == []
    assert all_reduce.call_count >= 4 if size > 1 else not all_reduce.called
    assert [values.device.type for values in copied] == ["meta"] * 4
