"""Kappa of a model on given items, beside its training."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from leaner_kernels.monitor import KappaMonitor
from leaner_kernels.ops._checks import shown


def measure(
    model: nn.Module,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    samples: int = 16,
    step: int = 0,
    monitor: KappaMonitor | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of ``KappaMonitor`` of one forward in eval mode, between training steps.

    No bit of the training changes: modules return to the mode that each was in, random generators
    to their state, and what ``QKClip`` tracks to what it was. So the same items may be measured
    again and again, and kappa is compared over training on what does not vary.

        rows = measure(model, held_out[:16])

    Args:
        model: any that attends.
        batch: what the model is called with: one argument, several in a tuple or list, or keyword
            arguments in a mapping.
        forward: called with the model and the batch instead.
        samples: batch entries captured, evenly spaced, at least 1.
        step: of the rows.
        monitor: one of this model to measure with, of ``every=1``, instead of a new one with
            ``samples``. Under torch.distributed, where every rank calls this, a loop needs one: a
            new monitor makes a process group.

    Returns:
        One row per layer.

    Raises:
        ValueError: a monitor of another model or of other steps.
        RuntimeError: a step is being sampled, as between ``begin`` and ``end`` of a monitor; or no
            attention was seen.
    """
    if monitor is None:
        monitor = KappaMonitor(model, every=1, samples=samples)
    elif not isinstance(monitor, KappaMonitor) or monitor.model is not model or monitor.every != 1:
        raise ValueError(f"monitor must be of this model, with every=1, got {shown(monitor)}")
    if any(getattr(module, "capture_samples", 0) for module in model.modules()):
        raise RuntimeError("a step is being sampled: measure before begin or after end")
    with _as_it_was(model), torch.no_grad():
        monitor.begin(step)
        try:
            if forward is not None:
                forward(model, batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch) if isinstance(batch, tuple | list) else model(batch)
            rows = monitor.end()
        finally:
            monitor.cancel()
    return rows + monitor.flush()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, and leave the model and random generators as they were."""
    modes = [(module, module.training) for module in model.modules()]
    peaks = [(m, m.peak_logit) for m in model.modules() if hasattr(m, "peak_logit")]
    used = {t.device for t in (*model.parameters(), *model.buffers())}
    devices = [device for device in used if device.type == "cuda"]
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            # Not with train(), which would also set the parts of a module in eval mode.
            for module, training in modes:
                module.training = training
            for module, peak in peaks:
                module.peak_logit = peak
