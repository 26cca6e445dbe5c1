"""A launch is repeated, without Triton, where tensors differ in their addresses alone."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops import _launch, _launch_cache
from leaner_kernels.ops._launch_cache import MAX_CACHED, CachedLaunch, Launch, View


class Kernel:
    """Compiles nothing; logs launches by Triton, and those that repeat one."""

    arg_names = ("stride", "x_ptr", "y_ptr", "BLOCK", "z_ptr")

    def __init__(self, compiles: bool = True) -> None:
        self.slow: list[dict[str, Any]] = []
        self.fast: list[tuple[Any, ...]] = []
        self.compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> Any:
            self.slow.append(arguments)
            return self if self.compiles else None

        return launch


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of Triton a launch takes has its tests in tests/aot."""
    starter = lambda kernel, _: (lambda given: kernel.fast.append(tuple(given)), [])  # noqa: E731
    monkeypatch.setattr(_launch_cache, "_starter", starter)
    monkeypatch.setattr(_launch, "_entries", {})


def call(kernel: Kernel, x: Tensor, y: Tensor | None = None, *numbers: Any) -> None:
    def prepare() -> Any:
        views = {} if y is None else {"y_ptr": View(y, *y.stride())}
        return (5,), {"stride": 7, "BLOCK": 16, "z_ptr": None, **views}

    _launch.launch(kernel, {"x_ptr": x, "y_ptr": y}, numbers, prepare)


def test_a_second_launch_takes_the_new_addresses_and_keeps_the_strides() -> None:
    kernel = Kernel()
    call(kernel, torch.empty(4), torch.empty(2, 3, 4))
    x, y = torch.empty(4), torch.empty(2, 3, 4)
    call(kernel, x, y)
    assert len(kernel.slow) == 1
    assert kernel.fast == [(7, x.data_ptr(), (y.data_ptr(), 12, 4, 1), 16, None)]


def test_calls_that_differ_in_anything_else_share_no_launch() -> None:
    kernel, other = Kernel(), Kernel()
    x, y = torch.empty(4), torch.empty(2, 3, 4)
    calls = [
        *((kernel, x), (kernel, x, y), (kernel, x, y, 0.5), (kernel, x, y, 2.0)),
        *((kernel, torch.empty(5)), (kernel, x.half()), (kernel, torch.empty(8)[::2])),
        *((kernel, torch.empty(5)[1:]), (kernel, x, y.mT.contiguous().mT), (other, x)),
    ]
    for count in range(2):
        for arguments in calls:
            call(*arguments)
        assert len(kernel.slow) + len(other.slow) == len(calls)
        assert len(kernel.fast) + len(other.fast) == count * len(calls)


def test_the_interpreter_which_compiles_nothing_is_asked_every_time() -> None:
    kernel = Kernel(compiles=False)
    for _ in range(3):
        call(kernel, torch.empty(4))
    assert len(kernel.slow) == 3


def test_shapes_that_never_repeat_do_not_fill_memory() -> None:
    kernel, x = Kernel(), torch.empty(4)
    for number in range(MAX_CACHED + 10):
        call(kernel, x, None, number)
    assert len(_launch._entries) <= MAX_CACHED


def first(kernel: Kernel, x: Any, y: Any, z: Tensor | None = None) -> CachedLaunch:
    arguments = {"x_ptr": x, "y_ptr": y, "z_ptr": z, "stride": 7, "BLOCK": 16, "num_warps": 4}
    entry = Launch(kernel, (5,), arguments).first(("x_ptr", "y_ptr"), scratch="z_ptr")
    assert entry is not None
    return entry


def test_one_tensor_in_two_places_does_not_tie_them() -> None:
    kernel, same = Kernel(), torch.empty(4)
    assert first(kernel, same, same).run([16, 32]) is None
    assert kernel.fast == [(7, 16, 32, 16, None)]


def test_each_launch_gets_scratch_of_its_own_and_an_entry_keeps_no_tensor_alive() -> None:
    kernel, x, before = Kernel(), torch.empty(2, 3, 4), torch.empty(2, 3).half()
    entry = first(kernel, x, View(x, *x.stride()), before)
    alive = weakref.ref(x), weakref.ref(before)
    kernel.slow.clear()
    del x, before
    assert [tensor() for tensor in alive] == [None, None]
    made = [entry.run([16, 16]) for _ in range(2)]
    assert all(launch[-1] is scratch for launch, scratch in zip(kernel.fast, made, strict=True))
    assert {(scratch.shape, scratch.dtype) for scratch in made} == {((2, 3), torch.float16)}
    assert made[0].data_ptr() != made[1].data_ptr()
