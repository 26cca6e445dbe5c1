"""Tell users what to use instead of a name that is removed or not provided: ``removed.toml``."""

import functools
import sys
import tomllib
from collections.abc import Callable
from opcode import opmap
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return the replacements of removed or absent commands, flags, names and arguments."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def line_for(kind: str, name: str) -> str | None:
    """Return the message for a user of a name in the table, or None for any other name.

    Args:
        kind: key of ``table``.
        name: name of a command, flag, object or argument, as the table writes it.
    """
    instead = table()[kind].get(name)
    fate = "is not provided" if kind == "absent" else "was removed"
    return None if instead is None else f"{name} {fate}; instead: {instead}"


def stop_command(name: str) -> None:
    """End the process with status 2 and one line if a command of that name was removed."""
    if (line := line_for("commands", name)) is not None:
        sys.stderr.write(f"{line}\n")
        raise SystemExit(2)


def attribute(owner: str, name: str) -> NoReturn:
    """Raise the error of a module or object for a name that it lacks, or that was removed.

    Args:
        owner: the ``__name__`` of the module, followed by the name of the class if there is one.
        name: name of the attribute.

    Raises:
        ImportError: ``from MODULE import NAME`` of a name in the table, because Python replaces the
            message of an AttributeError there.
        AttributeError: otherwise, as ``hasattr`` and ``getattr`` with a default expect.
    """
    for kind in ("names", "absent"):
        if (line := line_for(kind, f"{owner}.{name}")) is not None:
            raise (ImportError if _is_import_of_a_name(sys._getframe(1)) else AttributeError)(line)
    raise AttributeError(f"{owner!r} has no attribute {name!r}")


def _is_import_of_a_name(frame: FrameType | None) -> bool:
    """Return whether a frame, or the caller of a ``__getattr__``, runs ``from X import NAME``."""
    if frame is not None and frame.f_code.co_name == "__getattr__":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def refuse_removed_arguments(function: _Callable) -> _Callable:
    """Decorate a function or constructor to raise TypeError for removed arguments."""
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if (line := line_for("arguments", f"{owner}({name}=)")) is not None:
                raise TypeError(line)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


# While Python looks for the module of ``python -m NAME``, it imports the packages around it.
if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv[:-1]:
    stop_command(sys.orig_argv[sys.orig_argv.index("-m") + 1])
