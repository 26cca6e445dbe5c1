"""Signals that ask a run to stop."""

import signal


class Interrupt:
    """Notes SIGTERM and SIGINT while in use, so that a step is never cut in two."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.received: str | None = None

    def __enter__(self):
        self._before = [signal.signal(number, self._note) for number in self.SIGNALS]
        return self

    def __exit__(self, *_exception: object):
        for number, handler in zip(self.SIGNALS, self._before):
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number).name
