"""What the commands share: errors of one line, and streams that take every character."""

import argparse
import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

# What a terminal obeys, or shows in another order than it is written.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_LONGEST = 4000  # characters of a line


def one_line(message: object) -> str:
    """Return a message as one line of which a terminal obeys nothing, whatever it quotes.

    A line break or a control character becomes an escape of Python's.
    """
    text = _OBEYED.sub(lambda match: repr(match[0])[1:-1], str(message).strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def words(text: str) -> str:
    """Read the text of a flag, which may not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    return text


def take_every_character(program: str) -> None:
    """Write what an output stream cannot show, as κ in ASCII, as an escape of Python's.

    A stream that is closed, or that nobody reads any more, does not end the program either.
    """
    # No file of data may become the output of a process that was started without.
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(spare)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            # Not where another program, such as a test, has put its own.
            if stream is getattr(sys, f"__{name}__"):
                setattr(sys, name, UntilUnread(stream))
    encoding = sys.stdout.encoding or "utf-8"
    shown = "κ".encode(encoding, "backslashreplace").decode(encoding)
    if shown != "κ" and (os.environ.get("RANK") or "0") == "0":
        sys.stderr.write(
            f"{program}: the output encoding, {encoding}, has no kappa; {shown} stands for it\n"
        )


class UntilUnread:
    """A stream of text, until nobody reads it, as behind ``| head``: then writes are dropped."""

    # What is no error: of a disk that is full, the command ends.
    FORGIVEN: type[OSError] = BrokenPipeError

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return self.stream.write(text)
        except self.FORGIVEN:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush."""
        try:
            self.stream.flush()
        except self.FORGIVEN:
            self._drop()

    def _drop(self) -> None:
        # What is buffered would fail again, at the latest when the interpreter ends.
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
