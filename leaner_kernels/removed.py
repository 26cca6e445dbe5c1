"""Tell what to do instead of something that was removed: a line each in ``removed.toml``."""

import functools
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return what to do instead by removed name, for commands, flags, names and arguments."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def line_for(kind: str, name: str) -> str | None:
    """Return the line that a user gets who gives a removed name; None of any other name.

    Args:
        kind: key of ``table``.
        name: of a command, flag, name or argument, as the table writes it.
    """
    instead = table()[kind].get(name)
    return None if instead is None else f"{name} was removed; instead: {instead}"


def stop_command(name: str) -> None:
    """End the process with status 2 and one line if a command of that name was removed."""
    if (line := line_for("commands", name)) is not None:
        sys.stderr.write(f"{line}\n")
        raise SystemExit(2)


def attribute(owner: str, name: str, error: type[Exception] = ImportError) -> NoReturn:
    """Raise what a module or an object raises for a name that it does not have, or has no more.

    Args:
        owner: the ``__name__`` of the module, or that and the name of the class.
        name: of the attribute.
        error: raised for a removed name. Of a module it is ImportError, because
            ``from MODULE import NAME`` drops the message of an AttributeError.
    """
    if (line := line_for("names", f"{owner}.{name}")) is not None:
        raise error(line)
    raise AttributeError(f"{owner!r} has no attribute {name!r}")


def refuse_removed_arguments(function: _Callable) -> _Callable:
    """Decorate a function or constructor to raise TypeError for arguments that it once had."""
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
