"""Every kernel of window attention, compiled for GPUs this machine does not have."""

import os
from typing import NamedTuple

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench import resources
from bench.gpu_model.compile_ahead import GPUS, Launch, compile_launch, recorded
from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.statistics import STATISTICS
from leaner_kernels.ops.window import launch

BF16, FP32 = torch.bfloat16, torch.float32
HEADS = 12
ONE_LAUNCH = "forward", "statistics", "capture", "backward"
TWO_LAUNCHES = "forward", "statistics", "capture", "backward_rows", "backward_cols"


class Flavour(NamedTuple):
    """What sets the compiled kernels of a call apart."""

    window: tuple[int, int]
    dim: int
    dtype: torch.dtype = BF16

    def launches(self) -> dict[str, Launch]:
        """Return what is launched, by its tile's name; only shapes, strides and dtypes matter."""
        size = 2, 4 * self.window[0], 2 * self.window[1]
        qkv = torch.empty(*size, 3, HEADS, self.dim, dtype=self.dtype, device="meta")
        out = torch.empty(*size, HEADS, self.dim, dtype=self.dtype, device="meta")
        lse = torch.empty(2, HEADS, *size[1:], device="meta")
        stats = torch.empty(len(STATISTICS), 2, HEADS, device="meta")
        heads = torch.empty(2, size[1] * size[2], HEADS * self.dim, device="meta")
        sample = torch.empty(2, dtype=torch.int32, device="meta")
        params = *self.window, self.dim**-0.5
        with recorded() as found:
            launch.forward((qkv,), params, Results(out, lse))
            launch.forward((qkv,), params, Results(out, lse, stats, heads, sample))
            launch.backward(out, (qkv,), params, lse, (qkv,))
        names = ONE_LAUNCH if len(found) == len(ONE_LAUNCH) else TWO_LAUNCHES
        return dict(zip(names, found, strict=True))


# What the models run, whole windows of a head dimension that fills no tile, and two that take
# tiles.
FLAVOURS = {
    "DaViT": (Flavour((7, 7), 32), ONE_LAUNCH),
    "lean DaViT": (Flavour((7, 7), 16), ONE_LAUNCH),
    "padded_dim": (Flavour((8, 8), 42), ("backward",)),
    "large": (Flavour((12, 12), 32), TWO_LAUNCHES[1::2]),
    "single": (Flavour((7, 7), 32, FP32), TWO_LAUNCHES[::2]),
}
CALLS = [
    pytest.param(flavour, kernel, id=f"{kernel}-{name}")
    for name, (flavour, kernels) in FLAVOURS.items()
    for kernel in kernels
]


@pytest.mark.parametrize(("flavour", "kernel"), CALLS)
def test_kernel_fits_every_supported_gpu(flavour: Flavour, kernel: str) -> None:
    found = flavour.launches()[kernel]
    for gpu in resources.SUPPORTED:
        used = compile_launch(found, gpu)
        assert not used.spill_faults, f"sm_{gpu} {found.name} spills: {used}"
        assert used.shared <= GPUS[gpu].shared_per_program, f"sm_{gpu}: {used}"
        assert used.programs_per_sm >= 1, f"sm_{gpu}: {used}"


def test_a_window_of_davit_is_one_launch_each_way() -> None:
    """A warp has 16 rows of a head; no window of a map is copied beforehand."""
    for dim in (16, 32):
        found = Flavour((7, 7), dim).launches()
        assert tuple(found) == ONE_LAUNCH
        assert all(found[name].kwargs["num_warps"] == 4 for name in ("forward", "statistics"))
    assert tuple(Flavour((12, 12), 32).launches()) == TWO_LAUNCHES
    qkv = torch.empty(1, 7, 7, 3, 1, 32, dtype=BF16)
    assert launch.choose(launch.BACKWARD_TILES, qkv, (7, 7)) is not None
