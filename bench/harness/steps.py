"""Training steps of a model, and the same with and without KappaMonitor, on the host's clock."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness import counters
from bench.harness.clock import Clock
from bench.harness.gate import WrongError
from leaner_kernels import KappaMonitor

EVERY = (1, 10, 50)
SAMPLES = 4
MIN_STEPS = 10  # number of steps in a window, which ends with one synchronisation


def mixed(device: torch.device) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast on a GPU; on a CPU float32 stays."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Training:
    """A model that takes one optimizer step for each call, on the same batch."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[], Tensor],
        batch: Iterable[Tensor],
        graphs: bool = False,
    ):
        """Add AdamW to a model.

        Args:
            model: that takes steps.
            loss: runs it on the tensors of the batch.
            batch: its tensors.
            graphs: whether the model replays CUDA graphs (``reduce-overhead``).
        """
        self.model, self._loss, self.batch, self.graphs = model, loss, tuple(batch), graphs
        self.device = self.batch[0].device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.steps_taken = 0

    def loss(self) -> Tensor:
        """Return the loss, with what its backward needs."""
        if self.graphs:
            # Free the results of the step before, those of a forward without a backward too.
            torch.compiler.cudagraph_mark_step_begin()
        with mixed(self.device):
            return self._loss()

    def step(self) -> Tensor:
        """Forward, backward, update; return the loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def peak_bytes(self) -> int | None:
        """Run a step after the first, which created AdamW's moments; return its peak memory.

        None on a CPU, where nothing counts it, and where CUDA graphs are replayed: PyTorch does not
        count what they hold.
        """
        if self.device.type != "cuda" or self.graphs:
            return None
        states = self.optimizer.state.values()
        moments = (moment for state in states for moment in state.values())
        return resident(self.model, *self.batch, *moments) + counters.peak_memory(self.step)

    def window(self, steps: int, monitor: KappaMonitor | None) -> list[dict[str, Any]]:
        """Take ``steps`` steps, wait for them, and return the monitor's rows."""
        rows = []
        for _ in range(steps):
            if monitor is None:
                self.step()
                continue
            monitor.begin(self.steps_taken)
            self.step()
            rows += monitor.end()
            self.steps_taken += 1
        if monitor is not None:
            rows += monitor.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return rows


def classifying(model: nn.Module, images: Tensor, labels: Tensor, graphs: bool = False) -> Training:
    """Return a model in training on images (B, 3, S, S) and labels (B,), by cross-entropy.

    ``graphs`` is as of ``Training``.
    """
    batch = images, labels
    return Training(model, lambda: F.cross_entropy(model(images), labels), batch, graphs)


def resident(model: nn.Module, *others: Tensor) -> int:
    """Return the bytes of a model, its gradients and other tensors."""
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    owned = (*model.parameters(), *model.buffers(), *gradients, *others)
    return sum(tensor.nbytes for tensor in owned)


def compare(
    training: Training, every: int, benchmark: Any, clock: Clock, rounds: int, limit: float
) -> list[float]:
    """Time windows of steps with the monitor, each after one of the same length without.

    Args:
        training: what takes the steps.
        every: of the monitor; a window holds at least one sample.
        benchmark: pytest-benchmark's fixture, which records the windows with the monitor.
        clock: its timer; readings are seconds for each step.
        rounds: pairs of windows.
        limit: about how many seconds all pairs may take; where they would take longer there are
            fewer, two at the least.

    Returns:
        Seconds for each step without, for each pair.

    Raises:
        WrongError: the monitor gave another number of rows than layers x samples in a window.
    """
    steps = max(every, MIN_STEPS)
    training.steps_taken = 0  # windows begin at a multiple of ``every``
    monitor = KappaMonitor(training.model, every=every, samples=SAMPLES)
    expected = steps // every * len(monitor.layers)
    start = time.perf_counter()
    found = len(training.window(steps, monitor))
    pair = 2 * (time.perf_counter() - start)
    rounds = max(2, int(min(limit / pair, rounds)))
    if found != expected:
        raise WrongError(f"{found} rows in {steps} steps, expected {expected}")
    without: list[float] = []
    clock.calls = steps

    def before_each() -> None:
        start = clock()
        training.window(steps, None)
        without.append(clock() - start)

    benchmark.pedantic(training.window, args=(steps, monitor), setup=before_each, rounds=rounds)
    return without
