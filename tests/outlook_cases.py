"""Awkward shapes of outlook attention, and what the reference makes of them.

One table serves the operators on the CPU, the kernels in Triton's interpreter and on a GPU.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from leaner_kernels.ops.outlook import reference
from leaner_kernels.ops.statistics import AttentionStats, per_head
from tests import error_budget

STATISTICS = AttentionStats._fields[2:-1]
FLOAT32_RESULTS = "lse", *STATISTICS, "heads"


class OutlookTestCase(NamedTuple):
    """A map of ``size`` pixels, and the kernel size, stride and padding of its windows."""

    name: str
    batch: int
    size: tuple[int, int]
    heads: int
    dim: int
    window: tuple[int, int, int]


CASES = (
    OutlookTestCase("one of everything", 1, (1, 1), 1, 1, (1, 1, 0)),
    OutlookTestCase("VOLO", 2, (4, 6), 2, 32, (3, 2, 1)),
    OutlookTestCase("more than a tile, lean", 1, (16, 18), 1, 16, (3, 2, 1)),
    OutlookTestCase("an odd map", 1, (7, 5), 1, 10, (3, 2, 1)),
    OutlookTestCase("windows at every pixel", 1, (5, 4), 1, 12, (3, 1, 1)),
    OutlookTestCase("pixels that no window holds", 1, (6, 8), 1, 4, (3, 2, 0)),
    OutlookTestCase("stride 3 of 4, padding 2", 1, (5, 8), 1, 6, (4, 3, 2)),
    OutlookTestCase("kernel size 5", 1, (5, 6), 1, 8, (5, 2, 2)),
    OutlookTestCase("kernel size 2, windows at every pixel", 1, (4, 5), 1, 8, (2, 1, 0)),
    OutlookTestCase("head_dim 128", 1, (4, 3), 1, 128, (3, 2, 1)),
)
NAMES = [case.name for case in CASES]


class Inputs(NamedTuple):
    """Tensors in the dtype under test, and the arguments that go with them."""

    value: Tensor
    logits: Tensor
    grad: Tensor
    sample: Tensor
    params: tuple[int, int, int, float]

    @property
    def window(self) -> tuple[int, int, int]:
        """Kernel size, stride and padding."""
        return self.params[:3]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random numbers inside a larger block of NaN, so that a stray read shows.

    Strides are multiples of 16, as those of most models are, which sets the tiles.
    """
    batch, rows, cols, *inner, last = shape
    larger = batch, rows + 1, cols + 2, *inner, last + 16 + -last % 16
    block = torch.full(larger, float("nan"), dtype=dtype, device=device)
    inside = block[:, :rows, :cols, ..., :last]
    return inside.copy_(torch.randn(shape).to(dtype))


def make_inputs(case: OutlookTestCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    torch.manual_seed(0)
    shape = *(case.batch, *case.size, case.heads), case.dim
    count = [reference.num_windows(size, case.window) for size in case.size]
    places = case.window[0] ** 2
    return Inputs(
        poisoned(shape, dtype, device),
        poisoned((case.batch, *count, case.heads, places, places), dtype, device),
        poisoned(shape, dtype, device),
        torch.tensor([case.batch - 1, -1, 0], dtype=torch.int32, device=device),
        # Larger than the default, so that a softmax is not almost uniform.
        (*case.window, 1.5),
    )


def reference_results(
    inputs: Inputs, dtype: torch.dtype, from_lse: bool = False
) -> dict[str, Tensor]:
    """Run the reference on the CPU with every floating-point input cast to ``dtype``.

    With ``from_lse`` the gradients take P from the log-sum-exp, as fused kernels do.
    """
    value, logits, grad = (t.cpu().to(dtype) for t in inputs[:3])
    sample, (*_, scale) = inputs.sample.cpu(), inputs.params
    p, lse, s = reference.probabilities(logits, scale)
    a = reference.attend(p, value, inputs.window)
    again = (s - lse.permute(0, 2, 3, 1, 4)[..., None]).exp() if from_lse else p
    dvalue, dlogits = reference.backward(grad, value, again, scale, inputs.window)
    return {
        "out": a,
        "lse": lse,
        **dict(zip(STATISTICS, per_head(p, s, a, rows=(1, 2, 4), outputs=(1, 2, 4)), strict=True)),
        "heads": a[sample[sample >= 0]].flatten(1, 2).flatten(2),
        "dvalue": dvalue,
        "dlogits": dlogits,
    }


def peers_of(inputs: Inputs, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    runs = [
        partial(reference_results, inputs, torch.float64, from_lse=each) for each in (False, True)
    ]
    return error_budget.peers_of(runs, dtype, FLOAT32_RESULTS)


def run_operators(inputs: Inputs) -> dict[str, Tensor]:
    """Run ``outlook_attention_with_stats`` and its backward on the device of the inputs."""
    leaves = inputs.value.requires_grad_(), inputs.logits.requires_grad_()
    results = torch.ops.leaner_kernels.outlook_attention_with_stats(
        *leaves, inputs.sample, *inputs.params
    )
    out, lse, per_head, heads = results
    found = {"out": out, "lse": lse, **dict(zip(STATISTICS, per_head, strict=True)), "heads": heads}
    found["dvalue"], found["dlogits"] = torch.autograd.grad(found["out"], leaves, inputs.grad)
    return without_the_unwritten(found, inputs.sample)


def without_the_unwritten(results: dict[str, Tensor], sample: Tensor) -> dict[str, Tensor]:
    """Return the results less the slots that nobody may write, which still hold the poison."""
    assert results["heads"][sample < 0].isnan().all(), "a slot with a negative index was written"
    return results | {"heads": results["heads"][sample >= 0]}
