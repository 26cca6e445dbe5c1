"""Awkward shapes of window attention, and what the reference makes of them.

One table serves the operators on the CPU, the kernels in Triton's interpreter and on a GPU.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from leaner_kernels.ops.statistics import AttentionStats, per_head
from leaner_kernels.ops.window import reference
from tests import error_budget

STATISTICS = AttentionStats._fields[2:-1]
FLOAT32_RESULTS = "lse", *(name for name in STATISTICS if name != "head_norm"), "heads"


class WindowTestCase(NamedTuple):
    """A map of ``windows`` windows of ``window`` tokens, (rows, columns) each."""

    name: str
    batch: int
    windows: tuple[int, int]
    window: tuple[int, int]
    heads: int
    dim: int


CASES = (
    WindowTestCase("one of everything", 1, (1, 1), (1, 1), 1, 1),
    WindowTestCase("DaViT", 2, (1, 2), (7, 7), 3, 32),
    WindowTestCase("the third stage of the lean DaViT", 1, (2, 1), (7, 7), 5, 16),
    WindowTestCase("flat windows", 2, (3, 2), (2, 5), 2, 10),
    WindowTestCase("windows of one column", 1, (1, 3), (17, 1), 1, 48),
    WindowTestCase("a full tile", 1, (1, 2), (8, 8), 2, 24),
    WindowTestCase("more than a tile", 1, (1, 2), (5, 14), 2, 16),
    WindowTestCase("head_dim 128", 1, (2, 1), (3, 6), 2, 128),
)
NAMES = [case.name for case in CASES]


class Inputs(NamedTuple):
    """Tensors in the dtype under test, and the arguments that go with them."""

    qkv: Tensor
    grad: Tensor
    sample: Tensor
    window: tuple[int, int]
    scale: float


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random numbers inside a larger block of NaN, so that a stray read shows."""
    batch, rows, cols, *inner, dim = shape
    larger = batch, rows + 1, cols + 2, *inner, dim + 5
    block = torch.full(larger, float("nan"), dtype=dtype, device=device)
    inside = block[:, :rows, :cols, ..., :dim]
    return inside.copy_(torch.randn(shape).to(dtype))


def make_inputs(case: WindowTestCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    torch.manual_seed(0)
    (windows_y, windows_x), (rows, cols) = case.windows, case.window
    size = case.batch, windows_y * rows, windows_x * cols
    return Inputs(
        poisoned((*size, 3, case.heads, case.dim), dtype, device),
        poisoned((*size, case.heads, case.dim), dtype, device),
        torch.tensor([case.batch - 1, -1, 0], dtype=torch.int32, device=device),
        case.window,
        case.dim**-0.5,
    )


def reference_results(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run the reference on the CPU with every floating-point input cast to ``dtype``."""
    qkv, grad = (t.cpu().to(dtype) for t in inputs[:2])
    sample, window, scale = inputs.sample.cpu(), inputs.window, inputs.scale
    size = qkv.shape[1], qkv.shape[2]
    q, k, v = (reference.partition(t, window) for t in qkv.unbind(3))
    p, lse, s = reference.probabilities(q, k, scale)
    a = p @ v
    out = reference.reverse(a, size, window)
    parts = reference.backward(reference.partition(grad, window), q, k, v, p, scale)
    lse = reference.reverse(lse[..., None], size, window).squeeze(-1)
    return {
        "out": out,
        "lse": lse.permute(0, 3, 1, 2),
        **dict(zip(STATISTICS, per_head(p, s, a, rows=(1, 3), outputs=(1, 3, 4)), strict=True)),
        "heads": out[sample[sample >= 0]].flatten(1, 2).flatten(2),
        "dqkv": torch.stack([reference.reverse(d, size, window) for d in parts], dim=3),
    }


def peers_of(inputs: Inputs, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    run = partial(reference_results, inputs, torch.float64)
    return error_budget.peers_of([run], dtype, FLOAT32_RESULTS)


def run_operators(inputs: Inputs) -> dict[str, Tensor]:
    """Run ``window_attention_with_stats`` and its backward on the device of the inputs."""
    qkv = inputs.qkv.requires_grad_()
    results = torch.ops.leaner_kernels.window_attention_with_stats(
        qkv, inputs.sample, *inputs.window, inputs.scale
    )
    out, lse, per_head, heads = results
    found = {"out": out, "lse": lse, **dict(zip(STATISTICS, per_head, strict=True)), "heads": heads}
    (found["dqkv"],) = torch.autograd.grad(found["out"], qkv, inputs.grad)
    return without_the_unwritten(found, inputs.sample)


def without_the_unwritten(results: dict[str, Tensor], sample: Tensor) -> dict[str, Tensor]:
    """Return the results less the slots that nobody may write, which still hold the poison."""
    assert results["heads"][sample < 0].isnan().all(), "a slot with a negative index was written"
    return results | {"heads": results["heads"][sample >= 0]}
