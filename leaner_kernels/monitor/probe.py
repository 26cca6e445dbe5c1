"""A forward in eval mode between training steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def run_forward(
    model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any] | None = None
) -> None:
    """Call the model with a batch, as ``measure`` describes it."""
    if forward is not None:
        forward(model, batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
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
            reshard(model)


def reshard(model: Any) -> None:
    """Free what FSDP2 gathered: without a backward the root keeps copies, which would go stale."""
    # By its name: the import takes long, and only sharded models need it.
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        model.reshard()
