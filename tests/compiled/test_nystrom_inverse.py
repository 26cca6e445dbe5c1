"""Products of three bfloat16 parts of each number keep what float32 products of it keep."""

import os

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model.execute import check_findings, executing
from leaner_kernels.ops.nystrom import reference
from leaner_kernels.ops.nystrom.inverse import Inversion, invert_backward, invert_forward
from tests.error_budget import assert_within_budget

SCALE, ITERATIONS = 0.5, 4


def results(inputs: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the core and its gradients, of landmarks of q and k and of K3 V, in ``dtype``."""
    *leaves, grad = (t.to(dtype) for t in inputs)
    q, k, k3v = (leaf.requires_grad_() for leaf in leaves)
    k2 = torch.softmax(SCALE * (q @ k.mT), dim=-1)
    core = reference.iterates(k2, ITERATIONS, False)[-1] @ k3v
    return core.detach(), *torch.autograd.grad(core, leaves, grad)


@pytest.mark.parametrize("gpu", [80, 90])
def test_the_inverse_of_half_precision_inputs_keeps_float32(gpu: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = 1, 2, 24, 16
    inputs = [factor * torch.randn(shape, generator=generator) for factor in (2, 2, 1, 1)]
    exact, single = (results(inputs, dtype) for dtype in (torch.float64, torch.float32))
    *land, grad = inputs
    inversion = Inversion(SCALE, ITERATIONS, False, torch.bfloat16)
    with executing(gpu) as executions:
        core, _ = invert_forward((*land,), inversion)
        found = core, *invert_backward(grad, (*land,), inversion)
    check_findings(executions)
    for actual, peer, truth in zip(found, single, exact, strict=True):
        assert_within_budget(actual, peer, truth)
