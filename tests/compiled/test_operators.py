"""Operators on compiled kernels: within the error budget, and nothing a sanitizer would report."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model.execute import executing
from leaner_kernels.ops.nystrom import reference
from leaner_kernels.ops.nystrom.inverse import Inversion, invert_backward, invert_forward
from tests.compiled.cases import BF16, CHOSEN, HALF, OPERATORS, check_findings
from tests.error_budget import assert_within_budget


def rows() -> Iterator[Any]:
    left = set(CHOSEN)
    for operator, tested in OPERATORS.items():
        for case in tested.cases:
            for dtype in (BF16, HALF):
                for gpu in (80, 89, 90, 100, 120):
                    row = operator, case.name, dtype, gpu
                    if gpu not in (80, 90) and row not in CHOSEN:
                        continue  # the rules and kernels are those of 80 and 86
                    marks = () if row in CHOSEN else pytest.mark.nightly
                    left.discard(row)
                    yield pytest.param(
                        operator, case, dtype, gpu, marks=marks, id="-".join(map(str, row))
                    )
    assert not left, f"no such case: {left}"


@pytest.mark.parametrize(("operator", "case", "dtype", "gpu"), list(rows()))
def test_compiled_kernels_stay_within_the_error_budget(
    operator: str, case: Any, dtype: torch.dtype, gpu: int
) -> None:
    with executing(gpu) as executions:
        OPERATORS[operator].check(case, dtype)
    assert executions
    check_findings(executions)


SCALE, ITERATIONS = 0.5, 4


def inverse_of(inputs: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the core and its gradients, of landmarks of q and k and of K3 V, in ``dtype``."""
    *leaves, grad = (t.to(dtype) for t in inputs)
    q, k, k3v = (leaf.requires_grad_() for leaf in leaves)
    k2 = torch.softmax(SCALE * (q @ k.mT), dim=-1)
    core = reference.iterates(k2, ITERATIONS, False)[-1] @ k3v
    return core.detach(), *torch.autograd.grad(core, leaves, grad)


@pytest.mark.parametrize("gpu", [80, 90])
def test_the_inverse_of_half_precision_inputs_keeps_float32(gpu: int) -> None:
    """Products of three bfloat16 parts of each number keep what float32 products of it keep."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, 2, 24, 16
    inputs = [factor * torch.randn(shape, generator=generator) for factor in (2, 2, 1, 1)]
    exact, single = (inverse_of(inputs, dtype) for dtype in (torch.float64, torch.float32))
    *land, grad = inputs
    inversion = Inversion(SCALE, ITERATIONS, False, torch.bfloat16)
    with executing(gpu) as executions:
        core, _ = invert_forward((*land,), inversion)
        found = core, *invert_backward(grad, (*land,), inversion)
    check_findings(executions)
    for actual, peer, truth in zip(found, single, exact, strict=True):
        assert_within_budget(actual, peer, truth)
