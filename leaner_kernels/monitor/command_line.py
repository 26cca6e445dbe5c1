"""Shared code of the commands: one-line errors, and streams that accept every character."""

import argparse
import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

# Characters that control a terminal, or change the order in which it shows text.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_LONGEST = 4000  # longest line, in characters


def one_line(message: object) -> str:
    """Return a message as one line without characters that control a terminal.

    Line breaks and control characters become Python escapes.
    """
    text = _OBEYED.sub(lambda match: repr(match[0])[1:-1], str(message).strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def words(text: str) -> str:
    """Return the text of a flag; raise an error if it is empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    return text


def take_every_character(program: str) -> None:
    """Make the output streams write unsupported characters, such as κ in ASCII, as escapes.

    A stream that is closed or no longer read does not end the program.
    """
    # If the process was started without standard streams, no data file may get their descriptors.
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(spare)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            # Unless another program, such as a test, has replaced the stream.
            if stream is getattr(sys, f"__{name}__"):
                setattr(sys, name, UntilUnread(stream))
    encoding = sys.stdout.encoding or "utf-8"
    shown = "κ".encode(encoding, "backslashreplace").decode(encoding)
    if shown != "κ" and (os.environ.get("RANK") or "0") == "0":
        sys.stderr.write(
            f"{program}: the output encoding, {encoding}, has no kappa; {shown} stands for it\n"
        )


class UntilUnread:
    """A text stream that drops writes once nobody reads it, as behind ``| head``."""

    # Errors to ignore. A full disk is not among them: it ends the command.
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
        # Buffered text would fail again, at the latest when the interpreter exits.
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
