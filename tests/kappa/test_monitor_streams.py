"""Rows that arrive later: the queue, and what is enqueued on a GPU, recorded without one."""

import json
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from leaner_kernels import KappaMonitor
from leaner_kernels.kappa import native
from leaner_kernels.monitor.measurement import HostCopy, SideStream
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops.statistics import STATISTICS
from tests.kappa.test_monitor import Model, Scalars, batch
from tests.wandb_runs import FakeRun


class Copy:
    """As torch.cuda.Event: a copy that is over when the test sets it, or when waited for."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


class DelayedStream(SideStream):
    """As SideStream: results are on their way until their copies are over."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies: list[Copy] = []

    def copy_to_host(self, values: torch.Tensor) -> HostCopy:
        self.copies.append(Copy())
        return HostCopy(values, self.copies[-1])


def step(monitor: KappaMonitor, model: Model, number: int) -> list[int]:
    """Do one step and return the steps whose rows came back."""
    monitor.begin(number)
    model(batch()).sum().backward()
    return [row["step"] for row in monitor.end()]


def test_rows_come_back_when_they_have_arrived_in_step_order(tmp_path: Path) -> None:
    path, scalars, run = tmp_path / "kappa.jsonl", Scalars(), FakeRun()
    model = Model()
    monitor = KappaMonitor(model, every=2, path=path, writer=[scalars, run])
    monitor._side_stream = side = DelayedStream()

    def lines() -> list[int]:
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    assert step(monitor, model, 0) == []
    assert not path.exists()
    assert step(monitor, model, 1) == step(monitor, model, 2) == []
    # The copy of step 2 was quicker: it waits for its turn.
    side.copies[1].over = True
    assert step(monitor, model, 3) == []
    side.copies[0].over = True
    # An unsampled step returns what has arrived, too.
    assert step(monitor, model, 5) == lines() == [0, 0, 2, 2]
    assert step(monitor, model, 6) == []
    assert [row["step"] for row in monitor.flush()] == [6, 6]
    assert lines() == [0, 0, 2, 2, 6, 6]
    assert monitor.flush() == []
    # TensorBoard and W&B have them at their own step.
    assert {at for name, at in scalars.written if name == "kappa/first"} == {0, 2, 6}
    run.finish()
    assert [values["kappa/step"] for values in run.rows] == [0, 2, 6]


class Transfers(TorchDispatchMode):
    """Notes the copies between devices, and whether each lets the host go on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        before = {t.device.type for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and len(before | {out.device.type}) > 1:
            goes_on = bool(args[2:] and args[2]) or bool((kwargs or {}).get("non_blocking"))
            self.seen.append((str(op), out.device.type, goes_on))
        return out


def test_on_a_gpu_no_value_is_read_and_the_memory_is_kept() -> None:
    """Tensors without values, on a GPU that is not there: reading one on the host raises."""
    cuda = mock.MagicMock()
    cuda.Event.return_value.query.return_value = False
    names = ("Stream", "Event", "stream", "current_stream")
    with (
        mock.patch.multiple(torch.cuda, **{name: getattr(cuda, name) for name in names}),
        mock.patch.object(torch.Tensor, "record_stream", lambda t, s: cuda.keep(tuple(t.shape), s)),
        mock.patch.object(native, "takes", return_value=True) as takes,
        FakeTensorMode(),
        Transfers() as transfers,
    ):
        module = ManyHeadAttention(12, num_heads=4, head_dim=8, device="cuda")
        monitor = KappaMonitor(module, every=1, samples=3)
        monitor.begin(0)
        x = torch.randn(6, 9, 12, device="cuda")
        lengths = torch.full((6,), 7, dtype=torch.int32, device="cuda")
        module(x, skip=x, key_lengths=lengths)
        assert monitor.end() == []

    assert takes.call_count == 2
    # Heads; output without and with the stream; their lengths; each statistic of every head.
    kept = [call.args[0] for call in cuda.keep.call_args_list]
    copies = [(1, 3, 9, 32), (1, 3), (2, 3, 9, 12), (2, 3), (len(STATISTICS), 4)]
    assert sorted(kept[:-1]) == sorted(copies)
    side = cuda.Stream.return_value
    assert all(call.args[1] is side for call in cuda.keep.call_args_list)
    assert {call.args[0] for call in cuda.stream.call_args_list} == {side}
    # The side stream waits before it works, and the event comes last.
    told = "Stream().wait_stream", "stream", "Event().record", "stream().__exit__"
    order = [name for name, *_ in cuda.mock_calls if name in told]
    assert order[0] == "Stream().wait_stream"
    assert order[-2:] == ["Event().record", "stream().__exit__"]
    cuda.Event.return_value.record.assert_called_once_with()
    cuda.Event.return_value.synchronize.assert_not_called()
    side.synchronize.assert_not_called()
    assert transfers.seen == [("aten.copy_.default", "cpu", True)]
