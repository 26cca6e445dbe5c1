"""vmap, second derivatives, forward mode and autocast over the kernels of a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.error_budget import assert_within_budget
from tests.transform_cases import EXAMPLES, calls, of_floats, several, to_float

DEVICE = "cuda"


def placed(args: tuple[Any, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return the arguments on a device, what is floating point in this dtype."""
    return tuple(
        a.to(device, dtype if a.is_floating_point() else a.dtype) if isinstance(a, Tensor) else a
        for a in args
    )


WAYS = (torch.float64, "cpu"), (torch.float32, "cpu"), (torch.float32, DEVICE)


@pytest.mark.parametrize("name", calls())
def test_gradients_of_each_example_stay_within_the_error_budget(name: str) -> None:
    operator, args = calls()[name]
    found = []
    for dtype, device in WAYS:
        function, given = of_floats(operator, placed(args, dtype, device))
        places = tuple(range(len(given)))
        many = [several(t, 0) for t in given]
        found.append(
            torch.vmap(torch.func.grad(lambda *x: function(*x).square().sum(), places))(*many)  # noqa: B023
        )
    for exact, same_dtype, actual in zip(*found, strict=True):
        assert actual.shape[0] == EXAMPLES
        assert_within_budget(actual, same_dtype, exact)


@pytest.mark.parametrize("name", calls())
def test_second_derivatives_stay_within_the_error_budget(name: str) -> None:
    """Of the squared length of the gradient, and in forward mode over it."""
    operator, args = calls()[name]
    found = []
    for dtype, device in WAYS:
        function, given = of_floats(operator, placed(args, dtype, device))

        def gradients(*x: Tensor) -> tuple[Tensor, ...]:
            leaves = tuple(range(len(x)))
            return torch.func.grad(lambda *y: function(*y).square().sum(), leaves)(*x)  # noqa: B023

        leaves = [t.clone().requires_grad_() for t in given]
        loss = sum(g.square().sum() for g in gradients(*leaves))
        assert isinstance(loss, Tensor)
        _, forward = torch.func.jvp(gradients, tuple(given), tuple(given))
        found.append([*torch.autograd.grad(loss, leaves), *forward])
    for exact, same_dtype, actual in zip(*found, strict=True):
        assert_within_budget(actual, same_dtype, exact)


@pytest.mark.parametrize("name", calls())
def test_a_region_of_autocast_narrows_the_operator(name: str) -> None:
    operator, args = calls()[name]
    function, given = of_floats(operator, placed(tuple(map(to_float, args)), torch.float32, DEVICE))
    narrow = given[:1] if operator == "cross_covariance_attention" else given
    leaves = [t.requires_grad_() for t in given]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = function(*leaves)
    halves = [t.detach().bfloat16() for t in narrow]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, function(*halves, *given[len(halves) :]))
    assert {g.dtype for g in torch.autograd.grad(out.sum(), leaves)} == {torch.float32}
