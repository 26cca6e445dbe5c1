"""A launch that is repeated goes around Triton's bookkeeping: what it keeps, and what is new."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops import _launch_cache
from leaner_kernels.ops._launch_cache import CachedLaunch, Launch, View


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of Triton a launch takes has its tests in tests/aot."""
    monkeypatch.setattr(
        _launch_cache, "_starter", lambda compiled, grid: (lambda given: compiled[grid](*given), [])
    )


class Kernel:
    """A kernel of three pointers, of which one may be missing, and two numbers."""

    arg_names = ("stride", "x_ptr", "y_ptr", "BLOCK", "z_ptr")

    def __init__(self) -> None:
        self.fast: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Any:
            self.fast += [(grid, *arguments)] if arguments else []
            return self

        return launch


def first(kernel: Kernel, x: Any, y: Any, z: Tensor | None = None) -> CachedLaunch:
    arguments = {"x_ptr": x, "y_ptr": y, "z_ptr": z, "stride": 7, "BLOCK": 16, "num_warps": 4}
    entry = Launch(kernel, (5,), arguments).first(("x_ptr", "y_ptr"), scratch="z_ptr")
    assert entry is not None
    return entry


def test_one_tensor_in_two_places_does_not_tie_them() -> None:
    kernel, same = Kernel(), torch.empty(4)
    first(kernel, same, same).run([16, 32])
    assert kernel.fast == [((5, 1, 1), 7, 16, 32, 16, None)]


def test_each_launch_gets_scratch_of_its_own_and_returns_it() -> None:
    kernel, x = Kernel(), torch.empty(4)
    before = torch.empty(2, 3).half()
    entry = first(kernel, x, x, before)
    made: list[Any] = [before, *(entry.run([16, 16]) for _ in range(2))]
    assert all(launch[-1] is t for launch, t in zip(kernel.fast, made[1:], strict=True))
    assert {(t.shape, t.dtype) for t in made} == {((2, 3), torch.float16)}
    assert len({t.data_ptr() for t in made}) == 3


def test_a_launch_without_scratch_returns_none() -> None:
    kernel, x = Kernel(), torch.empty(4)
    assert first(kernel, x, x).run([16, 16]) is None
    assert kernel.fast[0][-1] is None


def test_an_entry_keeps_no_tensor_alive() -> None:
    kernel, x, made = Kernel(), torch.empty(2, 3, 4), torch.empty(4)
    entry = first(kernel, x, View(x, *x.stride()), made)
    alive = weakref.ref(x), weakref.ref(made)
    del x, made
    assert [one() for one in alive] == [None, None]
    entry.run([16, 32])
    assert kernel.fast[0][2:4] == (16, (32, 12, 4, 1))
