"""What a command says of what it refuses."""

from collections.abc import Callable
from typing import Any


def refusal(capsys: Any, main: Callable[[list[str]], int | None], *words: object) -> str:
    """Run a command, which must refuse, and return its last line; it may hold no escape."""
    try:
        status = main([str(word) for word in words])
    except SystemExit as stopped:
        status = stopped.code
    assert status not in (None, 0)
    said = capsys.readouterr().err + (status if isinstance(status, str) else "")
    assert "\x1b" not in said
    return said.splitlines()[-1]
