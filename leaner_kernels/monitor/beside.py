"""Work beside the training step, whose results arrive on the host without anyone waiting."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """A result on its way to the host.

    Attributes:
        host: valid once ``ready`` said True or ``wait`` returned.
        event: recorded after the copy; None when there was nothing to wait for.
    """

    host: Tensor
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        """Whether it has arrived; does not wait."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait until it has arrived."""
        if self.event is not None:
            self.event.synchronize()


class AtOnce:
    """The CPU has no side stream: work is done when its call returns."""

    @contextmanager
    def after(self, _inputs: Sequence[Tensor]) -> Iterator[None]:
        """Work within the block."""
        yield

    def fetch(self, values: Tensor) -> Arriving:
        """Return the values, which have arrived."""
        return Arriving(values, None)


class SideStream:
    """A CUDA stream beside the current one.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        # The lowest priority there is, which the default stream has too: never before the step.
        self.stream = torch.cuda.Stream(device, priority=0)

    @contextmanager
    def after(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue what the block does here, after all that the current stream has been given.

        Args:
            inputs: tensors that the current stream made and the block reads.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in inputs:
            # Their memory must not be given to a later tensor of the step before it is read.
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def fetch(self, values: Tensor) -> Arriving:
        """Enqueue a copy to the host; within ``after``."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.stream)
        return Arriving(host, event)
