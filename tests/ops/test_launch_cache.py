"""A launch is repeated, without Triton, where tensors differ in their addresses alone."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops import _launch_cache, route
from leaner_kernels.ops._launch_cache import MAX_CACHED, CachedLaunch, Launch, Scratch, View


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
    monkeypatch.setattr(route, "plans", {})


POINTERS = {"x_ptr": "x", "y_ptr": "y"}


def first(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    *,
    view: bool = False,
    copy: bool = False,
    scratch: Scratch | None = None,
    z: Tensor | None = None,
) -> CachedLaunch | None:
    """Launch on x and y; ``z`` is scratch, and y the result that it is reduced to."""
    given: Any = x.clone() if copy else x
    arguments = {
        "x_ptr": View(given, 12, 4, 1) if view else given,
        "y_ptr": y,
        "z_ptr": z,
        "stride": 7,
        "BLOCK": 16,
        "num_warps": 4,
    }
    launch = Launch(kernel, (5,), arguments, () if scratch is None else (scratch,))
    return launch.first(POINTERS, {"x": x}, {"y": y})


def test_a_second_launch_takes_the_new_addresses_and_keeps_the_strides() -> None:
    kernel, y = Kernel(), torch.empty(4)
    entry = first(kernel, torch.empty(2, 3, 4), y, view=True)
    assert entry is not None
    entry.run([16, 32], [y])
    assert len(kernel.slow) == 1
    assert kernel.fast == [(7, (16, 12, 4, 1), 32, 16, None)]


class Descriptor:
    """As Triton's of a tensor that TMA copies: ``base`` is the tensor."""

    def __init__(self, base: Any, shape: list[int]) -> None:
        self.base, self.shape = base, shape


def test_a_descriptor_of_a_second_launch_names_the_new_address_and_keeps_no_tensor() -> None:
    kernel, whole = Kernel(), torch.empty(8)
    alive = weakref.ref(whole)
    arguments = {"x_ptr": Descriptor(whole[2:], [6]), "y_ptr": None, "z_ptr": None}
    launch = Launch(kernel, (5,), arguments | {"stride": 7, "BLOCK": 16})
    entry = launch.first({"x_ptr": "x"}, {"x": whole}, {})
    assert entry is not None
    arguments.clear()
    kernel.slow.clear()
    del whole, launch
    assert alive() is None
    entry.run([160], [])
    entry.run([320], [])
    described = [launch[1] for launch in kernel.fast]
    assert [one.base.data_ptr() for one in described] == [160 + 8, 320 + 8]
    assert [one.shape for one in described] == [[6], [6]]


def test_a_pointer_into_an_operand_keeps_its_distance() -> None:
    kernel, whole = Kernel(), torch.empty(8)
    arguments = {"x_ptr": whole[2:], "y_ptr": whole[6:], "z_ptr": None, "stride": 7, "BLOCK": 16}
    launch = Launch(kernel, (5,), arguments)
    entry = launch.first({"x_ptr": "x", "y_ptr": "x"}, {"x": whole}, {})
    assert entry is not None
    entry.run([160], [])
    assert kernel.fast == [(7, 160 + 8, 160 + 24, 16, None)]


def test_the_interpreter_which_compiles_nothing_leaves_nothing_to_repeat() -> None:
    kernel = Kernel(compiles=False)
    assert first(kernel, torch.empty(4), torch.empty(4)) is None
    assert len(kernel.slow) == 1


def test_a_launch_on_a_copy_of_an_operand_is_not_repeated() -> None:
    """The copy would have to be made again, and keep its address."""
    assert first(Kernel(), torch.empty(4), torch.empty(4), copy=True) is None


def test_signatures_that_never_repeat_do_not_fill_memory() -> None:
    for number in range(MAX_CACHED + 10):
        route.remember(number, None)
    assert len(route.plans) <= MAX_CACHED


def test_one_tensor_in_two_places_does_not_tie_them() -> None:
    kernel, same = Kernel(), torch.empty(4)
    entry = first(kernel, same, same)
    assert entry is not None
    entry.run([16, 32], [same])
    assert kernel.fast == [(7, 16, 32, 16, None)]


def test_each_launch_gets_scratch_of_its_own_and_an_entry_keeps_no_tensor_alive() -> None:
    kernel, before = Kernel(), torch.empty(2, 3).half()
    x, y = torch.empty(2, 3, 4), torch.empty(4)
    reduced: list[tuple[Tensor, Tensor]] = []
    scratch = Scratch("z_ptr", "y", lambda *tensors: reduced.append(tensors))
    entry = first(kernel, x, y, view=True, scratch=scratch, z=before)
    assert entry is not None
    (pair,) = reduced
    assert pair[0] is before
    assert pair[1] is y
    reduced.clear()
    alive = [weakref.ref(t) for t in (x, y, before)]
    kernel.slow.clear()
    del x, y, before, pair
    assert [tensor() for tensor in alive] == [None, None, None]
    target = torch.empty(4)
    for _ in range(2):
        entry.run([16, 16], [target])
    made = [scratch for scratch, _ in reduced]
    assert all(launch[-1] is buffer for launch, buffer in zip(kernel.fast, made, strict=True))
    assert all(result is target for _, result in reduced)
    assert {(buffer.shape, buffer.dtype) for buffer in made} == {((2, 3), torch.float16)}
    assert made[0].data_ptr() != made[1].data_ptr()


def test_scratch_that_is_no_part_of_a_result_is_new_at_every_launch() -> None:
    kernel = Kernel()
    entry = first(
        kernel, torch.empty(4), torch.empty(4), scratch=Scratch("z_ptr"), z=torch.empty(2, 3)
    )
    assert entry is not None
    for _ in range(2):
        entry.run([16, 32], [torch.empty(4)])
    one, other = (launch[-1] for launch in kernel.fast)
    assert one.shape == other.shape == (2, 3)
    assert one.data_ptr() != other.data_ptr()


def test_scratch_that_must_be_zero_is_zero_at_every_launch() -> None:
    kernel, sums = Kernel(), []
    scratch = Scratch("z_ptr", "y", lambda buffer, _: sums.append(buffer.sum().item()), zero=True)
    entry = first(kernel, torch.empty(4), torch.empty(4), scratch=scratch, z=torch.zeros(1000))
    assert entry is not None
    for _ in range(2):
        entry.run([16, 32], [torch.empty(4)])
    assert sums == [0, 0, 0]


def test_a_result_is_reduced_to_another_after_each_launch() -> None:
    kernel, reduced = Kernel(), []
    scratch = Scratch("y", "y", lambda *tensors: reduced.append(tensors), of_result=True)
    entry = first(kernel, torch.empty(4), torch.empty(4), scratch=scratch)
    assert entry is not None
    result = torch.empty(4)
    entry.run([16, 32], [result])
    assert [tensor is result for tensor in reduced[1]] == [True, True]
    assert kernel.fast == [(7, 16, 32, 16, None)]
