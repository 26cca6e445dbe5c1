"""Awkward shapes of Nyström attention, and what the reference makes of them.

One table serves the operator on the CPU, the kernels in Triton's interpreter and on a GPU.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leaner_kernels.ops.nystrom import reference
from leaner_kernels.ops.nystrom.op import per_head_of
from leaner_kernels.ops.statistics import AttentionStats
from tests import error_budget


class NystromTestCase(NamedTuple):
    """Sizes as in the kernels; the rest is what the operator takes."""

    name: str
    batch: int
    tokens: int
    heads: int
    dim: int
    landmarks: int
    lengths: tuple[int, ...] | None = None
    scale: float = 0.3
    iterations: int = 6
    whole_batch: bool = False


CASES = (
    NystromTestCase("two tokens, one landmark", 1, 2, 1, 1, 1, iterations=1),
    NystromTestCase("segments of two", 1, 32, 1, 32, 16),
    NystromTestCase("head_dim 20, padded tiles", 1, 96, 1, 20, 24, (50,), iterations=3),
    NystromTestCase("one token of a sequence", 2, 30, 1, 8, 10, (1, 30), iterations=2),
    NystromTestCase("padding inside a segment", 1, 160, 1, 16, 4, (139,), iterations=2),
    NystromTestCase("whole batch", 2, 48, 2, 16, 8, scale=-0.4, whole_batch=True),
    NystromTestCase(
        "whole batch, padded", 2, 36, 1, 12, 12, (15, 35), iterations=1, whole_batch=True
    ),
)
# What only the CPU takes, and what would take the interpreter long.
LARGE_CASES = (
    NystromTestCase("head_dim 128", 1, 96, 1, 128, 24, (77,), scale=0.1),
    NystromTestCase("256 landmarks", 1, 512, 1, 8, 256),
)
NAMES = [case.name for case in CASES]
STATISTICS = AttentionStats._fields[2:-1]
# Rounded once from float32 sums, or not at all: judged against float32 arithmetic.
FLOAT32_RESULTS = "lse", *(name for name in STATISTICS if name != "head_norm"), "heads"


class Inputs(NamedTuple):
    """Tensors in the dtype under test: views of one packed projection, and a gradient."""

    case: NystromTestCase
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    sample: Tensor
    lengths: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the operator takes first."""
        return self.query, self.key, self.value

    @property
    def params(self) -> tuple[Any, ...]:
        """What it takes last."""
        case = self.case
        return self.lengths, case.landmarks, case.scale, case.iterations, case.whole_batch


def make_inputs(case: NystromTestCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    torch.manual_seed(0)
    shape = case.batch, case.tokens, 3, case.heads, case.dim
    numbers = torch.randn(shape) * torch.linspace(0.5, 2, case.dim)
    # Neighbours are alike, as tokens are: the means of noise are nearly zero.
    for axis in (0, 1):
        numbers[:, :, axis] += numbers[:, :, axis].cumsum(dim=1) / case.tokens**0.5
    # Inside a larger block of NaN, so that a stray read shows; padding is NaN too.
    block = torch.full((shape[0], shape[1] + 2, 3, shape[3] + 1, shape[4] + 5), float("nan"))
    block[:, : case.tokens, :, : case.heads, : case.dim] = numbers
    lengths = None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        for entry, length in zip(block, case.lengths):
            entry[length:] = float("nan")
    block = block.to(device, dtype)[:, : case.tokens, :, : case.heads, : case.dim]
    return Inputs(
        case,
        *block.permute(2, 0, 3, 1, 4).unbind(0),
        torch.randn(case.batch, case.tokens, case.heads, case.dim).to(device, dtype),
        torch.tensor([case.batch - 1, -1, 0], dtype=torch.int32, device=device),
        lengths,
    )


def reference_results(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run the reference on the CPU with every floating-point input cast to ``dtype``."""
    *qkv, grad = (t.detach().cpu().to(dtype) for t in (*inputs.tensors, inputs.grad))
    qkv = [t.requires_grad_() for t in qkv]
    lengths, *rest = inputs.params
    sample = inputs.sample.cpu()
    parts = reference.attend(*qkv, lengths if lengths is None else lengths.cpu(), *rest)
    results = {"out": parts.out.transpose(1, 2), "lse": parts.scores[0].logsumexp(dim=-1)}
    statistics = per_head_of(parts.k1, parts.scores, parts.out)
    results |= dict(zip(STATISTICS, statistics, strict=True))
    results["heads"] = results["out"][sample[sample >= 0]].flatten(2)
    grads = torch.autograd.grad(results["out"], qkv, grad)
    return results | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def peers_of(inputs: Inputs) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    run = partial(reference_results, inputs, torch.float64)
    return error_budget.peers_of([run], inputs.query.dtype, FLOAT32_RESULTS)


def name_results(inputs: Inputs, out: Tensor, lse: Tensor, stats, grads) -> dict[str, Tensor]:
    """Name what an operator returned, and check the slot that nobody asked for."""
    per_head, heads = stats
    assert heads[inputs.sample < 0].isnan().all(), "a slot with a negative index was written"
    return {
        "out": out,
        "lse": lse,
        **dict(zip(STATISTICS, per_head, strict=True)),
        "heads": heads[inputs.sample >= 0],
        **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
    }


def run_operator(inputs: Inputs) -> dict[str, Tensor]:
    """Run the operator with statistics, and its backward, on the device of the inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs.tensors]
    operator = torch.ops.leaner_kernels.nystrom_attention_with_stats
    lengths, *numbers = inputs.params
    out, lse, *stats = operator(*leaves, lengths, inputs.sample, *numbers)
    grads = torch.autograd.grad(out, leaves, inputs.grad)
    return name_results(inputs, out, lse, stats, grads)
