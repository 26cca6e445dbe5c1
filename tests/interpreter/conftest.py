"""The interpreter: bfloat16 right in every test, and no work done again and again."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter.rounding import like_a_gpu, right_bfloat16


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


@pytest.fixture(autouse=True)
def rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Round to nearest, or as a GPU does where a test is parametrized with "gpu"."""
    with like_a_gpu() if getattr(request, "param", "exact") == "gpu" else right_bfloat16():
        yield


@pytest.fixture
def gpu_rounding(rounding: None) -> Iterator[None]:
    """Round as a GPU does."""
    with like_a_gpu():
        yield
