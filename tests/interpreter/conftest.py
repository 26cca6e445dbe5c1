"""The interpreter, without work that it does again and again."""

from collections.abc import Callable
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def prepare_the_language_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton replaces its builtins again at every call of a device function: half of the time."""
    prepare = interpreter._patch_lang

    def prepare_if_needed(fn: Callable[..., Any]) -> Any:
        named = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if named and not any(tl.core.is_builtin(language.load) for language in named):
            return interpreter._LangPatchScope()
        return prepare(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_if_needed)
