"""Rows of ``KappaMonitor`` as a table of text, and all that a command makes of them."""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .probe import layer_means

_COLUMNS = {
    "κ": "kappa",
    "Gaussian": "kappa_gaussian",
    "eff. rank": "effective_rank",
    "entropy": "entropy",
    "max logit": "max_logit",
}
_HEAD_REPORT = {
    "corr.": "head_correlation",
    "Gaussian ": "head_correlation_gaussian",
    "isotropy": "isotropy",
    "Gaussian  ": "isotropy_gaussian",
    "mean share": "mean_share",
}


# What a terminal obeys, or shows in another order than it is written.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_LONGEST = 4000  # characters of a line


def one_line(message: object) -> str:
    """Return a message as one line of which a terminal obeys nothing, whatever it quotes.

    A line break or a control character becomes an escape of Python's.
    """
    text = _OBEYED.sub(lambda match: repr(match[0])[1:-1], str(message).strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error of a library, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@contextmanager
def status_of_errors() -> Iterator[None]:
    """Turn an error that names what the user gave, or a file, into one line and status 1."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise SystemExit(one_line(named)) from None
    except (ImportError, ValueError, MemoryError) as error:
        raise SystemExit(one_line(first_line(error))) from None


def as_path(text: str) -> Path:
    """Read the path of a flag, which may not be empty.

    Raises:
        ArgumentTypeError: it is.
    """
    return Path(words(text))


def words(text: str) -> str:
    """Read the text of a flag, which may not be empty.

    Raises:
        ArgumentTypeError: it is, or is blank.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    return text


class OneLine(argparse.ArgumentParser):
    """A parser whose errors are lines of which a terminal obeys nothing."""

    def error(self, message: str) -> NoReturn:
        """Stop, after the usage and the message."""
        super().error(one_line(message))


def command(
    program: str,
    doc: str | None,
    kind: type[argparse.ArgumentParser] = OneLine,
    **more: Any,
) -> argparse.ArgumentParser:
    """Return the parser of a command, whose output takes every character from here on.

    Args:
        program: name of the command, for messages.
        doc: docstring whose first line describes it; None under ``python -OO``.
        kind: of the parser.
        **more: of that.
    """
    take_every_character(program)
    return kind(program, description=(doc or "").partition("\n")[0], **more)


def take_every_character(program: str) -> None:
    """Write what an output stream cannot show, as κ in ASCII or half a character, as an escape.

    Otherwise it would end the program. Escapes are those of JSON and Python: nothing is lost. A
    stream that is closed, or that nobody reads any more, ends nothing either.
    """
    _fill_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            # Not where another program, such as a test, has put its own.
            if stream is getattr(sys, f"__{name}__"):
                setattr(sys, name, _UntilUnread(stream))
    encoding = sys.stdout.encoding or "utf-8"
    shown = "κ".encode(encoding, "backslashreplace").decode(encoding)
    if shown != "κ" and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{program}: the output is in {encoding}: {shown} is kappa\n")


def _fill_descriptors() -> None:
    """Open what the process was started without, so that no file of data becomes its output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest that is free: this one.
            os.open(os.devnull, os.O_RDWR)


class _UntilUnread:
    """A stream, until nobody reads it, as behind ``| head``: then what is written is dropped."""

    def __init__(self, stream: io.TextIOWrapper):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        # What is buffered would fail again, at the latest when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a line per layer of the newest step among ``rows``, and the means over the layers.

    Where kappa is None the reason is there instead. Entropy is in nats. Rows with a head report
    also show the correlation of pairs of heads, the isotropy of heads, each before what
    independent Gaussian heads have, and the share of the norm that is the token mean.

    Raises:
        ValueError: no rows.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows to show")
    newest = [row for row in rows if row["step"] == rows[-1]["step"]]
    columns = _COLUMNS | (_HEAD_REPORT if "mean_share" in newest[0] else {})
    lines = [["layer", "heads", "tokens", *columns]]
    for row in newest:
        numbers = [row["reason"] if key == "kappa" and row[key] is None else _number(row[key])
                   for key in columns.values()]  # fmt: skip
        size = f"{row['heads']}x{row['head_dim']}"
        lines.append([row["layer"] or "the model", size, _number(row["tokens"]), *numbers])
    text = [aligned(lines)]
    (means,) = layer_means(newest)
    if means["layers"]:
        text.append(
            f"mean κ of {means['layers']} layers: arithmetic {_number(means['arithmetic_mean'])}, "
            f"geometric {_number(means['geometric_mean'])}"
        )
    if means["not_resolved"]:
        text.append(f"not resolved: {means['not_resolved']} layers, which no mean counts")
        unresolved = (row for row in newest if row["reason"] == "not resolved")
        # Rows of before have no rank.
        ranks = [row["rank"] for row in unresolved if row.get("rank") is not None]
        if ranks:
            text.append(
                "their rank (singular values above 1e-6 of the largest): "
                f"{_number(min(ranks))} to {_number(max(ranks))}"
            )
    return "\n".join(text)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what commands that measure a model have in common; ``show`` does as they say."""
    parser.add_argument(
        "--head-report",
        action="store_true",
        help="also how correlated and isotropic the heads are, which explains a high κ",
    )
    for name, text in (
        ("--json", "write the rows, as JSON lines"),
        ("--plot", "draw κ over layers: png, svg, pdf"),
    ):
        parser.add_argument(name, type=as_path, metavar="FILE", help=text)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def show(rows: list[dict[str, Any]], flags: argparse.Namespace) -> None:
    """Print the table of rows, and write what ``--json`` and ``--plot`` name.

    Raises:
        ImportError: a plot without matplotlib.
        ValueError: no rows.
        OSError: a file cannot be written.
    """
    sys.stdout.write(table(rows) + "\n")
    if flags.json is not None:
        flags.json.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    if flags.plot is not None:
        from .plots import plot

        plot(rows, flags.plot, over="layers")


def pieces(tokens: Sequence[int], length: int, samples: int) -> Tensor:
    """Return whole pieces of a text, one after another, without padding.

    Args:
        tokens: of the text.
        length: of a piece, at most; a shorter text is one piece.
        samples: pieces, at most.

    Returns:
        (S, N), int64.

    Raises:
        ValueError: fewer than two tokens.
    """
    length = min(length, len(tokens))
    if length < 2:
        raise ValueError("the text has fewer than two tokens")
    count = min(samples, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).view(count, length)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:,.0f}"
        if value >= 1e3
        else f"{value:.3g}"
    )
