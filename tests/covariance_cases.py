"""Awkward shapes of attention between channels, and what the reference makes of them.

One table serves the operators on the CPU, the kernels in Triton's interpreter and on a GPU.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from leaner_kernels.ops.covariance import reference
from leaner_kernels.ops.covariance.op import split_qkv
from leaner_kernels.ops.statistics import AttentionStats, per_head
from tests import error_budget

CROSS, CHANNEL = "cross_covariance_attention", "channel_attention"


class CovarianceTestCase(NamedTuple):
    """Sizes as in the kernels; ``eps`` and ``scale`` are those of the operator."""

    name: str
    operator: str
    batch: int
    tokens: int
    heads: int
    dim: int
    eps: float = 1e-12
    scale: float = 0.2
    zero_channels: bool = False


CASES = (
    CovarianceTestCase("cross, one of everything", CROSS, 1, 1, 1, 1),
    CovarianceTestCase("cross, XCiT", CROSS, 1, 196, 2, 48),
    CovarianceTestCase("cross, XCiT large, lean", CROSS, 2, 197, 2, 64),
    CovarianceTestCase("cross, head_dim 32", CROSS, 3, 60, 2, 32),
    CovarianceTestCase("cross, head_dim 10", CROSS, 2, 33, 3, 10),
    CovarianceTestCase("cross, fewer tokens than channels", CROSS, 2, 5, 2, 20),
    CovarianceTestCase("cross, channels shorter than eps", CROSS, 2, 70, 2, 16, eps=8.0),
    CovarianceTestCase(
        "cross, channels of zeros", CROSS, 2, 70, 2, 24, eps=1e-3, zero_channels=True
    ),
    CovarianceTestCase("channel, one of everything", CHANNEL, 1, 1, 1, 1),
    CovarianceTestCase("channel, last stage of DaViT", CHANNEL, 2, 49, 3, 32),
    CovarianceTestCase("channel, third stage, lean", CHANNEL, 1, 196, 4, 16, scale=0.25),
    CovarianceTestCase("channel, long", CHANNEL, 1, 784, 1, 32, scale=0.1),
    CovarianceTestCase("channel, first stage of DaViT, lean", CHANNEL, 1, 3136, 1, 16, scale=0.03),
    CovarianceTestCase("channel, head_dim 42", CHANNEL, 2, 65, 2, 42, scale=-0.15),
    CovarianceTestCase("channel, channels of zeros", CHANNEL, 2, 17, 2, 24, zero_channels=True),
)
# What only the CPU takes.
WIDE_CASES = (
    CovarianceTestCase("cross, head_dim 128", CROSS, 1, 150, 1, 128),
    CovarianceTestCase("channel, head_dim 127", CHANNEL, 1, 40, 1, 127),
)
NAMES = [case.name for case in CASES]
STATISTICS = AttentionStats._fields[2:-1]
# Rounded once from float32 sums, or not at all: judged against float32 arithmetic.
FLOAT32_RESULTS = "lse", *(name for name in STATISTICS if name != "head_norm"), "heads"


class Inputs(NamedTuple):
    """Tensors in the dtype under test; the temperature is float32, as models keep it."""

    case: CovarianceTestCase
    qkv: Tensor
    temperature: Tensor
    grad: Tensor
    sample: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the operator takes first."""
        return (self.qkv, self.temperature) if self.case.operator == CROSS else (self.qkv,)

    @property
    def param(self) -> float:
        """What it takes last."""
        return self.case.eps if self.case.operator == CROSS else self.case.scale


def make_inputs(case: CovarianceTestCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    torch.manual_seed(0)
    shape = case.batch, case.tokens, 3, case.heads, case.dim
    numbers = torch.randn(shape) * torch.linspace(0.5, 2, case.dim)
    if case.zero_channels:
        numbers[..., ::3] = 0
    # Inside a larger block of NaN, so that a stray read shows.
    block = torch.full((shape[0], shape[1] + 2, 3, shape[3] + 1, shape[4] + 5), float("nan"))
    block[:, : case.tokens, :, : case.heads, : case.dim] = numbers
    block = block.to(device, dtype)
    return Inputs(
        case,
        block[:, : case.tokens, :, : case.heads, : case.dim],
        (torch.arange(case.heads, device=device) * 0.75 + 2).float(),
        torch.randn(case.batch, case.tokens, case.heads, case.dim).to(device, dtype),
        torch.tensor([case.batch - 1, -1, 0], dtype=torch.int32, device=device),
    )


def scores_and_values(inputs: Inputs, qkv: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = split_qkv(qkv)
    if inputs.case.operator == CROSS:
        return reference.cross_covariance_scores(q, k, temperature, inputs.param), v
    return reference.channel_scores(k, v, inputs.param), q


def reference_results(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run the reference on the CPU with every floating-point input cast to ``dtype``."""
    qkv, temperature, grad = (t.detach().cpu().to(dtype) for t in inputs[1:4])
    sample = inputs.sample.cpu()
    s, values = scores_and_values(inputs, qkv.requires_grad_(), temperature.requires_grad_())
    a, p, lse = reference.attend(s, values)
    results = {"out": a.transpose(1, 2), "lse": lse}
    results |= dict(zip(STATISTICS, per_head(p, s, a), strict=True))
    results["heads"] = a[sample[sample >= 0]].transpose(1, 2).flatten(2)
    return results | gradients(inputs, results["out"], qkv, temperature, grad)


def gradients(
    inputs: Inputs, out: Tensor, qkv: Tensor, temperature: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    cross = inputs.case.operator == CROSS
    leaves = [qkv, temperature] if cross else [qkv]
    dqkv, *rest = torch.autograd.grad(out, leaves, grad)
    return dict(zip(("dq", "dk", "dv"), dqkv.unbind(2))) | dict(zip(["dtemperature"], rest))


def peers_of(inputs: Inputs) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    run = partial(reference_results, inputs, torch.float64)
    return error_budget.peers_of([run], inputs.qkv.dtype, FLOAT32_RESULTS)


def name_results(inputs: Inputs, out: Tensor, lse: Tensor, stats, grads) -> dict[str, Tensor]:
    """Name what an operator returned, and check the slot that nobody asked for."""
    per_head, heads = stats
    dqkv, *rest = grads
    assert heads[inputs.sample < 0].isnan().all(), "a slot with a negative index was written"
    return {
        "out": out,
        "lse": lse,
        **dict(zip(STATISTICS, per_head, strict=True)),
        "heads": heads[inputs.sample >= 0],
        **dict(zip(("dq", "dk", "dv"), dqkv.unbind(2))),
        **dict(zip(["dtemperature"], rest)),
    }


def run_operator(inputs: Inputs) -> dict[str, Tensor]:
    """Run the operator with statistics, and its backward, on the device of the inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs.tensors]
    operator = getattr(torch.ops.leaner_kernels, f"{inputs.case.operator}_with_stats")
    out, lse, *stats = operator(*leaves, inputs.sample, inputs.param)
    grads = torch.autograd.grad(out, leaves, inputs.grad)
    return name_results(inputs, out, lse, stats, grads)
