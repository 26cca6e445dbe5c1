"""The whole CUDA source of the native solver on an emulated device."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leaner_kernels.kappa import backend, native, reference
from tests.native.host import DEVICES, ROOT, SOURCES, compile_host, emulate, solve_emulated


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 66, 81), (2, 100, 33), (2, 5, 9), (1, 1, 1)])
def test_every_device_agrees_with_lapack(device: str, shape: tuple[int, ...]) -> None:
    a = gaussian(*shape)
    found, values = solve_emulated(a, emulate(device))
    sigma = torch.linalg.svdvals(a.double())
    torch.testing.assert_close(found.kappa, sigma[:, 0] / sigma[:, -1], rtol=1e-9, atol=0)
    torch.testing.assert_close(values, sigma, rtol=1e-6, atol=0)
    assert found.resolved.all()


# Bytes that hold part of a triangle of 67 rows or more; the rest starts in global memory. On sm_90
# four blocks then share the matrix.
SPLIT = {"sm_80": 20_000, "sm_86": 20_000, "sm_90": 27_000}


@pytest.mark.slow
def test_blocks_that_share_a_matrix_find_what_one_finds() -> None:
    a = gaussian(6, 67, 71)
    a[1] *= torch.logspace(0, -3, 67)[:, None]
    a[2, 5] = a[2, 9]
    a[3], a[4, 3, 2] = 0, torch.inf
    a[5] *= 1e-30
    alone, values = solve_emulated(a, emulate("sm_90"))
    shared, shared_values = solve_emulated(a, emulate("sm_90", shared=SPLIT["sm_90"]))
    assert torch.equal(shared.resolved, alone.resolved)
    assert alone.resolved.tolist() == [True, True, False, False, False, True]
    torch.testing.assert_close(shared.kappa, alone.kappa, rtol=1e-6, atol=0, equal_nan=True)
    largest = alone.sigma_max[:, None].nan_to_num()
    torch.testing.assert_close(
        shared_values / largest, values / largest, rtol=1e-5, atol=1e-7, equal_nan=True
    )
    assert not torch.equal(shared_values[0], values[0])
    again, _ = solve_emulated(a[1:2], emulate("sm_90", shared=SPLIT["sm_90"]))
    assert torch.equal(again.kappa, shared.kappa[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["shared", "split"])
@pytest.mark.parametrize(
    "device", ["sm_80", pytest.param("sm_86", marks=pytest.mark.nightly), "sm_90"]
)
def test_the_order_in_which_threads_run_changes_nothing(device: str, split: bool) -> None:
    shared = SPLIT[device] if split else None
    a, lengths = gaussian(2, 67, 70), torch.tensor([67, 61], dtype=torch.int32)
    expected, *orders = (
        solve_emulated(a, emulate(device, order, shared), lengths) for order in (0, 1, 2)
    )
    for found, values in orders:
        assert torch.equal(found.kappa, expected[0].kappa)
        assert torch.equal(found.sigma_min, expected[0].sigma_min)
        assert torch.equal(values, expected[1])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("file", "function", "barrier", "shared"),
    [
        ("eigen.h", "void reduce_rows", "team.sync();", 232_448),
        ("eigen.h", "void reduce_rows", "team.meet();", SPLIT["sm_90"]),
        ("gram.cuh", "    gram(Matrices", "__syncthreads();", 232_448),
    ],
)
def test_the_emulator_shows_a_missing_barrier(
    tmp_path: Path, file: str, function: str, barrier: str, shared: int
) -> None:
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = tmp_path / "leaner_kernels/csrc" / file
    before, after = path.read_text("utf-8").split(function)
    assert barrier in after
    path.write_text(before + function + after.replace(barrier, "", 1), "utf-8")
    broken = compile_host(tmp_path, 900, tmp_path / "broken.so")
    a, wrong = gaussian(1, 70, 70), 0
    for order in (0, 1, 2):
        broken.emulate(shared, 2, order)
        kappa = solve_emulated(a, broken)[0].kappa.item()
        wrong += kappa != pytest.approx(torch.linalg.cond(a[0].double()).item(), rel=1e-6)
    assert wrong


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80", "sm_86"])
def test_strides_and_lengths(device: str) -> None:
    whole = gaussian(4, 30, 50)
    a = whole[::2, 3:, 5:45]
    lengths = torch.tensor([27, 9], dtype=torch.int32)
    found, values = solve_emulated(a, emulate(device), lengths)
    kappa, _, _, resolved, sigma = reference.condition_report(a, lengths, spectrum=True)
    torch.testing.assert_close(found.kappa, kappa, rtol=1e-9, atol=0)
    torch.testing.assert_close(values, sigma, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.resolved, resolved)


def test_a_cuda_error_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"\(1, 513, 513\) failed on CUDA: invalid argument"):
        native.solve(emulate("sm_90"), torch.zeros(1, 513, 513), None, False, 0)


@pytest.mark.parametrize(
    ("a", "lengths"),
    [
        (torch.zeros(2, 5, 4, dtype=torch.float64), None),
        (torch.zeros(2, 5, 4, dtype=torch.float16), None),
        (torch.zeros(5, 4), None),
        (torch.zeros(2, 5, 4), torch.tensor([3], dtype=torch.int32)),
        (torch.zeros(2, 5, 4), torch.tensor([3, 3])),
        (torch.zeros(2, 5, 4), torch.tensor([3, 0, 3, 0], dtype=torch.int32)[::2]),
        (torch.zeros(2, 5, 4), torch.tensor([[3, 3]], dtype=torch.int32)),
    ],
)
def test_what_the_library_would_misread_is_refused(a, lengths) -> None:
    with pytest.raises(ValueError, match="must be") as refused:
        native.solve(emulate("sm_90"), a, lengths, True, 0)
    assert "\n" not in str(refused.value)


def test_a_library_that_cannot_be_opened_is_said_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / native.LIBRARY.name
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    with pytest.warns(UserWarning, match=f"{broken.name} is not used"):
        assert native.library() is None


def test_a_library_that_was_not_built_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native._warn_of_its_absence.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / native.LIBRARY.name)
    monkeypatch.setattr(native, "_ready", set())
    with pytest.warns(UserWarning, match=r"was not built, for lack of nvcc: torch.linalg") as said:
        names = [backend("cuda:0") for _ in range(2)]
    assert names == ["torch", "torch"]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("batch", "rows", "cols"), [(1, 512, 2**31 - 1), (1000, 2**31 - 1, 2), (2**31 - 1, 512, 512)]
)
def test_sizes_of_the_workspace_are_counted_in_64_bits(batch: int, rows: int, cols: int) -> None:
    size = min(rows, cols)
    words = sum(-(-i // 4) * 4 for i in range(1, size + 1)) + max(rows, cols) + 1
    assert emulate("sm_90").leaner_condition_workspace(batch, rows, cols) == batch * words * 8


def test_the_cpu_is_left_to_torch() -> None:
    assert backend("cpu") == "torch"
    assert not native.takes(gaussian(2, 3, 4))
