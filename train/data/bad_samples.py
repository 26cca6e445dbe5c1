"""What could not be read of the data: named, counted over all ranks, and borne up to a limit."""

from collections.abc import Callable, Iterable

import torch.distributed as dist

from train.data.order import DataError, FetchFailure


class TooManyFailuresError(DataError):
    """More of the data cannot be read than the user allows; every rank raises it together."""


class FetchFailures:
    """Items that cannot be read, and data workers that died.

    An item counts once, however often it is asked for. Ranks agree on the number at the end of
    every step, so that all of them stop in the same one.

    Args:
        limit: how many are borne.
        group: the processes; joins them on the host.
        tell: is given the message of each new one, in order.

    Attributes:
        known: their messages, equal on all ranks after ``share``.
    """

    def __init__(self, limit: int, group: dist.ProcessGroup, tell: Callable[[str], None]):
        self.limit, self.group, self.tell = limit, group, tell
        self.known: set[str] = set()
        self._new: set[str] = set()

    def note(self, failures: Iterable[FetchFailure]) -> None:
        """Take in what this rank found."""
        self._new.update(t.message for t in failures if t.message not in self.known)

    @property
    def new(self) -> int:
        """How many this rank found since ``share``."""
        return len(self._new)

    def share(self, new: float) -> None:
        """Join what the ranks found. Collective unless ``new``, the sum over ranks, is 0.

        Raises:
            TooManyFailuresError: they are more than the limit.
        """
        if not new:
            return
        found: list[set[str]] = [set()] * dist.get_world_size(self.group)
        dist.all_gather_object(found, self._new, group=self.group)
        self._new = set()
        for message in sorted(set().union(*found) - self.known):
            self.known.add(message)
            self.tell(message)
        if len(self.known) > self.limit:
            raise TooManyFailuresError(
                f"--bad-data-limit allows {self.limit}, got {len(self.known)}, named above: the "
                f"last is {message}"
            )
