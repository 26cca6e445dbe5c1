"""The native library as a wheel carries it: built where nvcc exists, left out where it does not."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bench.gpu_model.compile_ahead import GPUS, programs_per_sm
from bench.gpu_model.machine_code import cuda_tools
from leaner_kernels.kappa import native

ROOT = Path(__file__).resolve().parents[2]
NAME = native.LIBRARY.name
# Threads of a block, blocks that an SM must hold at once, and the GPUs that launch it:
# the rate of float64 decides between the two arithmetics.
FAST, SLOW = {"80", "90"}, {"86"}
KERNELS = {
    "solve_batchINS0_5BlockILi1EEEdE": (384, 1, FAST),
    "solve_batchINS0_5BlockILi4EEEdE": (384, 1, {"90"}),
    "solve_batchINS0_5BlockILi1EEENS_8TwoFloatE": (384, 1, SLOW),
    "gram_two_float": (256, 2, SLOW),
    "find_scales": (256, 4, SLOW),
    "gram": (256, 2, FAST),
}


def build_wheel(folder: Path, path: str, checkout: Path = ROOT) -> zipfile.ZipFile:
    """The checkout's wheel, as pip builds it with this PATH."""
    code = (
        "import sys; from scikit_build_core.build import build_wheel; "
        "build_wheel(sys.argv[1], {'build-dir': sys.argv[2]})"
    )
    command = [sys.executable, "-c", code, str(folder), str(folder / "build")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "NVCC"))}
    subprocess.run(command, cwd=checkout, check=True, env={**environment, "PATH": path})
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a wheel built here."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs a CUDA compiler: nvcc is not on PATH")
    folder = tmp_path_factory.mktemp("wheel")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with build_wheel(folder, path) as wheel:
        assert re.search(r"-py3-none-(?!any)\w+\.whl$", str(wheel.filename))
        return Path(wheel.extract(f"leaner_kernels/{NAME}", folder))


def test_the_wheel_holds_code_for_every_gpu(library: Path) -> None:
    command = [cuda_tools() / "cuobjdump", "-lelf", "-lptx", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"(sm_\d+)\.cubin", listing)) == {"sm_80", "sm_86", "sm_90"}
    assert re.findall(r"(sm_\d+)\.ptx", listing) == ["sm_90"]


def test_kernels_fit_and_do_not_spill(library: Path) -> None:
    command = [cuda_tools() / "cuobjdump", "-res-usage", str(library)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"\barch = sm_(\d+)\n", report)
    seen = set()
    for arch, usages in zip(parts[1::2], parts[2::2]):
        for function, usage in re.findall(r"Function (\w+):\n(.*)\n", usages):
            used = {name: int(n) for name, n in re.findall(r"(\w+):(\d+)", usage)}
            kernel = next(name for name in KERNELS if name in function)
            threads, blocks, gpus = KERNELS[kernel]
            if arch not in gpus:
                continue
            assert used["STACK"] == used["LOCAL"] == 0, (arch, function)
            held = programs_per_sm(GPUS[int(arch)], used["REG"], used["SHARED"], threads)
            assert held >= blocks, (arch, function)
            seen.add((arch, kernel))
    assert seen == {(arch, kernel) for kernel, (*_, gpus) in KERNELS.items() for arch in gpus}


def test_the_library_opens_with_nothing_but_the_system(library: Path) -> None:
    opened = native.declare(library)
    assert opened.leaner_condition_limit() == native.LIMIT
    assert opened.leaner_condition_workspace(3, 20, 700) == 3 * 8 * (240 + 700 + 1)
    if not torch.cuda.is_available():
        error = opened.leaner_condition_ready()
        assert error
        assert opened.leaner_error(error).decode().startswith(("no CUDA", "CUDA driver"))


def test_a_cuda_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs a CUDA compiler: nvcc is not on PATH")
    checkout = tmp_path / "checkout"
    sources = checkout / "leaner_kernels/csrc"
    sources.mkdir(parents=True)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "leaner_kernels/__init__.py").write_text('__version__ = "0"\n')
    (sources / "a.cu").write_text("#error not for this compiler\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with pytest.raises(subprocess.CalledProcessError):
        build_wheel(tmp_path, path, checkout)
    assert list(tmp_path.glob("*.whl")) == []


def test_a_wheel_built_without_a_cuda_compiler_is_python_alone(tmp_path: Path) -> None:
    # pip's environment brings CMake and Ninja; the compiler would come from the system.
    with build_wheel(tmp_path, str(Path(sys.executable).parent)) as wheel:
        names = wheel.namelist()
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert "leaner_kernels/kappa/native.py" in names
    assert [name for name in names if name.endswith((".so", ".cu", ".h", ".cuh"))] == []
