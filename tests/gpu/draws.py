"""Random numbers for a GPU, drawn on the CPU: those of CUDA's generator are others.

A bound that was seen to hold on a CPU then holds for the same numbers on a GPU.
"""

import torch
from torch import Tensor


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers on the GPU; every test begins with the same (conftest.py)."""
    return torch.randn(shape).to("cuda", dtype)
