"""Record the conditions of a measurement: versions, hardware, commit and hardware ceilings.

``python -m bench.harness.machine`` prints them as JSON, without host name, user name and paths.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import leaner_kernels
from bench.harness.clock import Clock, seconds
from bench.harness.digest import kernels as digest_of_kernels

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "apex"),
    *("pytest-benchmark", "timm", "transformers"),
)
CLOCKS = {"sm": 1, "memory": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM


def versions() -> dict[str, str | None]:
    """Return the version of everything between a kernel and the GPU, None where it is absent."""
    cudnn = torch.backends.cudnn.version()
    dotted = cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "cuda": torch.version.cuda,
        "cudnn": dotted,
        "driver": Gpu(0).driver if torch.cuda.is_available() else None,
        "leaner_kernels": leaner_kernels.__version__,
    }
    return found | {package: _installed(package) for package in PACKAGES}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit(root: Path = ROOT) -> dict[str, Any]:
    """Return the checkout's git commit and a digest of its source.

    The variable LEANER_COMMIT names the commit of a copy on a rented machine; without it and git
    the commit is None. ``source`` identifies the code also in a copy or with uncommitted changes,
    ``kernels`` that of the kernels alone.
    """
    digest = hashlib.sha256()
    for folder in ("leaner_kernels", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h"):
                digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    named = os.environ.get("LEANER_COMMIT")
    changes = None if named else _git(root, "status", "--porcelain")
    return {
        "id": named or _git(root, "rev-parse", "--verify", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "source": digest.hexdigest()[:16],
        "kernels": digest_of_kernels(root),
    }


def _git(root: Path, *command: str) -> str | None:
    # A copy of the checkout may lie inside another repository, whose commit is not ours.
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", *command], cwd=root, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu() -> dict[str, Any]:
    """Return the CPU's model, cores, and the threads torch uses."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.split(":", 1) for line in info.read_text("utf-8").splitlines()]
        names = [line[1].strip() for line in lines if line[0].strip() == "model name"]
        model = names[0] if names else model
    return {
        "model": model,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


class Gpu:
    """One GPU, as torch and NVML see it; a reading that NVML does not offer is None."""

    def __init__(self, index: int):
        """Find torch's GPU ``index`` in NVML by its UUID: the two may count differently."""
        self.properties = torch.cuda.get_device_properties(index)
        self.nvml = nvml_library()
        uuid = f"GPU-{str(self.properties.uuid).removeprefix('GPU-')}"
        self.handle = self._nvml("nvmlDeviceGetHandleByUUID", uuid)

    def _nvml(self, function: str, *args: Any) -> Any:
        if self.nvml is None:
            return None
        try:
            return getattr(self.nvml, function)(*args)
        except self.nvml.NVMLError:
            return None

    def _read(self, what: str, *args: Any) -> Any:
        if self.handle is None:
            return None
        return self._nvml(f"nvmlDeviceGet{what}", self.handle, *args)

    @property
    def driver(self) -> str | None:
        """The version of the driver."""
        return self._nvml("nvmlSystemGetDriverVersion")

    @property
    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded; the counter moves every few tens of milliseconds."""
        millijoules = self._read("TotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    @property
    def clocks_mhz(self) -> dict[str, int | None]:
        """The clocks of the SMs and of the memory at this moment."""
        return {name: self._read("ClockInfo", kind) for name, kind in CLOCKS.items()}

    def facts(self) -> dict[str, Any]:
        """Return what identifies the GPU and its state."""
        limit = self._read("EnforcedPowerLimit")
        return {
            "name": self.properties.name,
            "count": torch.cuda.device_count(),
            "compute_capability": f"{self.properties.major}.{self.properties.minor}",
            "multiprocessors": self.properties.multi_processor_count,
            "memory_bytes": self.properties.total_memory,
            "l2_bytes": self.properties.L2_cache_size,
            "power_limit_watts": None if limit is None else limit / 1e3,
            "max_clocks_mhz": {n: self._read("MaxClockInfo", k) for n, k in CLOCKS.items()},
            "clocks_mhz": self.clocks_mhz,
        }


@cache
def nvml_library() -> ModuleType | None:
    """Return NVIDIA's management library, started, or None where it or its driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def facts() -> dict[str, Any]:
    """Return everything that identifies the machine, ready for JSON."""
    return {
        "versions": versions(),
        "cpu": cpu(),
        "gpu": Gpu(0).facts() if torch.cuda.is_available() else None,
    }


@cache
def copy_bandwidth(device_type: str) -> float:
    """Measure bytes per second, read and written, of a copy far larger than any cache."""
    size = 2**30 if device_type == "cuda" else 2**26
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device_type)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), Clock(device_type), rounds=10)


@cache
def matrix_rate(device_type: str, dtype: torch.dtype) -> float:
    """Measure FLOP per second of a large product of random matrices through torch."""
    size = 8192 if device_type == "cuda" else 1024
    # Random, because a GPU multiplies zeros faster: they switch fewer transistors.
    a, b = torch.randn(2, size, size, device=device_type).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ b, Clock(device_type), rounds=10)


if __name__ == "__main__":
    argparse.ArgumentParser("python -m bench.harness.machine", description=__doc__).parse_args()
    json.dump(facts() | {"commit": commit()}, sys.stdout, indent=2)
    sys.stdout.write("\n")
