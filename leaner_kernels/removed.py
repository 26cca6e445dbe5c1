"""Tell users the replacement of a removed name: each has a line in ``removed.toml``."""

import functools
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return the replacements of removed commands, flags, names and arguments, by name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def line_for(kind: str, name: str) -> str | None:
    """Return the message for a user of a removed name, or None for any other name.

    Args:
        kind: key of ``table``.
        name: name of a command, flag, object or argument, as the table writes it.
    """
    instead = table()[kind].get(name)
    return None if instead is None else f"{name} was removed; instead: {instead}"


def stop_command(name: str) -> None:
    """End the process with status 2 and one line if a command of that name was removed."""
    if (line := line_for("commands", name)) is not None:
        sys.stderr.write(f"{line}\n")
        raise SystemExit(2)


def attribute(owner: str, name: str, error: type[Exception] = ImportError) -> NoReturn:
    """Raise the error of a module or object for a name that it lacks, or that was removed.

    Args:
        owner: the ``__name__`` of the module, followed by the name of the class if there is one.
        name: name of the attribute.
        error: type of the error for a removed name. A module raises ImportError, because ``from
            MODULE import NAME`` drops the message of an AttributeError.
    """
    if (line := line_for("names", f"{owner}.{name}")) is not None:
        raise error(line)
    raise AttributeError(f"{owner!r} has no attribute {name!r}")


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
