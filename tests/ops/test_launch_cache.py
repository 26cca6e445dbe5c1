"""The launch cache: a second launch on inputs of the same kind goes around Triton's bookkeeping."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops import _launch_cache
from leaner_kernels.ops._launch_cache import MAX_CACHED, Launch, LaunchCache, View


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of Triton a launch takes has its tests in tests/aot."""
    monkeypatch.setattr(
        _launch_cache, "_starter", lambda compiled, grid: (lambda given: compiled[grid](*given), [])
    )


class Compiled:
    """What a launch returns: takes its arguments by position, in the order of the signature."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        x, y, z = grid
        return lambda *arguments: self.log.append(((x, y, z), *arguments))


class Kernel:
    """A kernel of three pointers, of which one may be missing, and two numbers."""

    arg_names = ("stride", "x_ptr", "y_ptr", "BLOCK", "z_ptr")

    def __init__(self, compiles: bool = True) -> None:
        self.slow: list[dict[str, Any]] = []
        self.fast: list[tuple[Any, ...]] = []
        self.compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> Compiled | None:
            self.slow.append(arguments)
            return Compiled(self.fast) if self.compiles else None

        return launch


def prepare(kernel: Kernel, x: Tensor, y: Tensor, z: Tensor | None) -> Launch:
    arguments = {"x_ptr": x, "y_ptr": y, "z_ptr": z, "stride": 7, "BLOCK": 16, "num_warps": 4}
    return Launch(kernel, (5,), arguments)


def call(cache: LaunchCache, kernel: Kernel, x: Tensor, y: Tensor, z: Tensor | None = None) -> None:
    if not cache.run("kind", (x, y, z)):
        cache.start("kind", prepare(kernel, x, y, z), (x, y, z))


def patterns(addresses: Sequence[int]) -> list[bool]:
    return [address % 16 != 0 for address in addresses]


def test_a_second_launch_takes_the_new_addresses_in_the_order_of_the_signature() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr", "z_ptr"))
    call(cache, kernel, torch.empty(4), torch.empty(4))
    x, y = torch.empty(4), torch.empty(4)
    call(cache, kernel, x, y)
    assert len(kernel.slow) == 1
    grid, stride, first, second, block, third = kernel.fast[0]
    assert (grid, stride, block, third) == ((5, 1, 1), 7, 16, None)
    assert (first, second) == (x.data_ptr(), y.data_ptr())


def test_a_view_gets_the_new_address_and_keeps_its_strides() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr"))
    x, y = torch.empty(4), torch.empty(2, 3, 4)
    for _ in range(2):
        launch = prepare(kernel, x, y, None)
        launch.arguments["y_ptr"] = View(y, *y.stride())
        cache.launch("kind", (x, y), lambda: launch)  # noqa: B023 - runs here
    assert kernel.fast[0][2:4] == (x.data_ptr(), (y.data_ptr(), 12, 4, 1))


def test_one_tensor_in_two_places_does_not_tie_them() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr", "z_ptr"))
    same = torch.empty(4)
    call(cache, kernel, same, same)
    x, y = torch.empty(4), torch.empty(4)
    call(cache, kernel, x, y)
    assert kernel.fast[0][2:4] == (x.data_ptr(), y.data_ptr())


def test_each_pattern_of_unaligned_addresses_has_an_entry_of_its_own() -> None:
    """Triton compiles for each tensor whether its address is a multiple of 16."""
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr", "z_ptr"))
    aligned, shifted = torch.empty(8), torch.empty(9)[1:]
    assert patterns((aligned.data_ptr(), shifted.data_ptr())) == [False, True]
    calls = (shifted, aligned), (aligned, aligned), (aligned, shifted), (shifted, shifted)
    for number, tensors in enumerate(calls, start=1):
        call(cache, kernel, *tensors)
        assert (len(kernel.slow), len(kernel.fast)) == (number, 0)
    for number, tensors in enumerate(calls, start=1):
        call(cache, kernel, *tensors)
        assert (len(kernel.slow), len(kernel.fast)) == (4, number)
        assert kernel.fast[-1][2:4] == tuple(t.data_ptr() for t in tensors)


def test_each_launch_gets_scratch_of_its_own_and_returns_it() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr"), scratch="z_ptr")
    x = torch.empty(4)
    made: list[Any] = [
        cache.launch("kind", (x, x), lambda: prepare(kernel, x, x, torch.empty(2, 3).half()))
        for _ in range(3)
    ]
    assert (len(kernel.slow), len(kernel.fast)) == (1, 2)
    assert kernel.slow[0]["z_ptr"] is made[0]
    assert all(launch[-1] is t for launch, t in zip(kernel.fast, made[1:], strict=True))
    assert {(t.shape, t.dtype) for t in made} == {((2, 3), torch.float16)}
    assert len({t.data_ptr() for t in made}) == 3


def test_a_launch_without_scratch_returns_none() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr"), scratch="z_ptr")
    x = torch.empty(4)
    for _ in range(2):
        assert cache.launch("kind", (x, x), lambda: prepare(kernel, x, x, None)) is None
    assert (len(kernel.slow), len(kernel.fast)) == (1, 1)
    assert kernel.fast[0][-1] is None


def test_an_entry_keeps_no_tensor_alive() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr"), scratch="z_ptr")
    x, made = torch.empty(2, 3, 4), torch.empty(4)
    launch = prepare(kernel, x, x, made)
    launch.arguments["y_ptr"] = View(x, *x.stride())
    cache.start("kind", launch, (x, x))
    alive = weakref.ref(x), weakref.ref(made)
    kernel.slow.clear()
    del x, made, launch
    assert [one() for one in alive] == [None, None]


def test_the_interpreter_which_compiles_nothing_is_asked_every_time() -> None:
    kernel, cache = Kernel(compiles=False), LaunchCache(("x_ptr", "y_ptr", "z_ptr"))
    for _ in range(3):
        call(cache, kernel, torch.empty(4), torch.empty(4))
    assert len(kernel.slow) == 3


def test_shapes_that_never_repeat_do_not_fill_memory() -> None:
    kernel, cache = Kernel(), LaunchCache(("x_ptr", "y_ptr", "z_ptr"))
    x = torch.empty(4)
    for kind in range(MAX_CACHED + 10):
        cache.start(kind, prepare(kernel, x, x, None), (x, x, None))
    assert len(cache._entries) <= MAX_CACHED
