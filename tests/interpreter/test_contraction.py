"""A row whose weight is all on one key has no entropy, also where products join sums.

The compiler makes ``a * b - c`` one operation that rounds once. A maximum ``c`` of products that
were rounded before is then not what it is subtracted from.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests import covariance_cases, nystrom_cases, outlook_cases, window_cases
from tests.interpreter import (
    test_covariance_kernels,
    test_nystrom_kernels,
    test_outlook_kernels,
    test_window_kernels,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
# No power of two: scores are rounded.
SCALE = 0.3


@contextmanager
def contracted() -> Iterator[None]:
    """Let a product that is added to or subtracted from round once, with the sum."""
    select = InterpreterBuilder.create_select

    def multiply(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        found = self.binary_op(lhs, rhs, np.multiply)
        if found.data.dtype == np.float32:
            # Of two float32 numbers a float64 holds the product.
            found.product = lhs.data.astype(np.float64) * rhs.data
        return found

    def joined(op: Any) -> Any:
        def method(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
            products = [getattr(handle, "product", None) for handle in (lhs, rhs)]
            if products[0] is not None:
                return TensorHandle(op(products[0], rhs.data).astype(np.float32), lhs.dtype.scalar)
            if products[1] is not None:
                return TensorHandle(op(lhs.data, products[1]).astype(np.float32), lhs.dtype.scalar)
            return self.binary_op(lhs, rhs, op)

        return method

    def choose(self: InterpreterBuilder, cond: Any, lhs: Any, rhs: Any) -> TensorHandle:
        # A mask that hides nothing is known when compiling, and gone.
        return lhs if np.all(cond.data) else select(self, cond, lhs, rhs)

    with mock.patch.multiple(
        InterpreterBuilder,
        create_fmul=multiply,
        create_fadd=joined(np.add),
        create_fsub=joined(np.subtract),
        create_select=choose,
    ):
        yield


def diagonal(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two diagonal matrices; rows of their product have one score, far above the others."""
    rows = torch.diag(torch.linspace(7, 9, size)).to(dtype)
    return rows, torch.diag(torch.linspace(60, 70, size)).to(dtype)


@DTYPES
def test_of_a_window(dtype: torch.dtype) -> None:
    inputs = window_cases.make_inputs(window_cases.Case("", 1, (1, 1), (4, 4), 1, 16), dtype)
    inputs = inputs._replace(scale=SCALE)
    for part, tokens in enumerate(diagonal(16, dtype)):
        inputs.qkv[0, :, :, part, 0] = tokens.view(4, 4, 16)
    with contracted():
        entropy = test_window_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


@DTYPES
def test_of_channels(dtype: torch.dtype) -> None:
    case = covariance_cases.Case("", covariance_cases.CHANNEL, 1, 16, 1, 16, scale=SCALE)
    inputs = covariance_cases.make_inputs(case, dtype)
    inputs.qkv[0, :, 1, 0], inputs.qkv[0, :, 2, 0] = diagonal(16, dtype)
    with contracted():
        entropy = test_covariance_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


@DTYPES
def test_of_landmarks(dtype: torch.dtype) -> None:
    case = nystrom_cases.Case("", 1, 32, 1, 16, 16, scale=SCALE, iterations=1)
    inputs = nystrom_cases.make_inputs(case, dtype)
    query, key = diagonal(16, dtype)
    inputs.query[0, 0], inputs.key[0, 0] = (t.repeat_interleave(2, dim=0) for t in (query, key))
    with contracted():
        entropy = test_nystrom_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


@DTYPES
@pytest.mark.parametrize("dim", [1, 32])
def test_of_an_outlook_on_one_pixel(dim: int, dtype: torch.dtype) -> None:
    inputs = outlook_cases.make_inputs(
        outlook_cases.Case("", 1, (4, 4), 2, dim, (1, 1, 0)), dtype
    )._replace(knobs=(1, 1, 0, SCALE))
    with contracted():
        entropy = test_outlook_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy
