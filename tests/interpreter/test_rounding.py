"""What the interpreter makes of bfloat16, and of arithmetic that rounds as a GPU does."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

import triton
import triton.language as tl

from tests.interpreter import rounding

HALF = torch.float16, torch.bfloat16


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    rows, inner, cols = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * N + cols[None, :])
    product = tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], product.to(out_ptr.dtype.element_ty))


@triton.jit
def _functions_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.exp2(x))
    tl.store(out_ptr + N + i, tl.exp(x))
    tl.store(out_ptr + 2 * N + i, x / y)
    tl.store(out_ptr + 3 * N + i, tl.sqrt(y))


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    _dot_kernel[(1,)](a_ptr=a, b_ptr=b, out_ptr=out, M=a.shape[0], K=a.shape[1], N=b.shape[1])
    return out


def functions(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(4, len(x))
    _functions_kernel[(1,)](x_ptr=x, y_ptr=y, out_ptr=out, N=len(x))
    return out


def test_every_bfloat16_number_is_widened_and_narrowed_as_pytorch_does() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    bits = every.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(rounding.widen(bits), every.float().numpy())
    numbers = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    floats = torch.cat([numbers.to(torch.int32).view(torch.float32), every.float() * 1.00390625])
    expected = floats.bfloat16().float().numpy()
    np.testing.assert_array_equal(rounding.widen(rounding.narrow(floats.numpy())), expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_tensor_cores_truncate_once_a_step(gpu_rounding: None, dtype: torch.dtype) -> None:
    # The second step's products are far below a unit of the first one's sum, and negative.
    a, b = torch.zeros(16, 32, dtype=dtype), torch.zeros(32, 16, dtype=dtype)
    a[:, 0], b[0], a[:, 16], b[16] = 1, 1, -(2.0**-14), 2.0**-14
    below = torch.full((16, 16), np.nextafter(np.float32(1), np.float32(0)))
    assert torch.equal(product(a, b), below)
    # Inside a step nothing is lost.
    a[:, 1], b[1], a[:, 16] = -(2.0**-14), 2.0**-14, 0
    a[:, 2], b[2] = 2.0**-14, 2.0**-14
    assert torch.equal(product(a, b), torch.ones(16, 16))


def test_functions_are_off_by_what_is_documented_and_powers_of_two_are_exact(
    gpu_rounding: None,
) -> None:
    x, y = torch.linspace(-20, 20, 1024), torch.linspace(0.01, 7, 1024)
    found = functions(x, y).double()
    exact = torch.stack([x.double().exp2(), x.double().exp(), x.double() / y, y.double().sqrt()])
    error = ((found - exact) / exact).abs().amax(dim=1)
    eps = 2.0**-24  # of storing a float32
    exponent = 2.0**-24 * 20 * 1.45  # of the rounded product with log2 e
    limits = torch.tensor(
        [
            rounding.EX2_ERROR,
            rounding.EX2_ERROR + exponent,
            rounding.DIVISION_ERROR,
            rounding.ROOT_ERROR,
        ]
    )
    assert (error <= limits + eps).all()
    assert (error > limits / 4).all(), "nothing was approximate"
    powers = torch.arange(-512, 512).float() / 16
    whole = powers == powers.round()
    assert torch.equal(functions(powers, y)[0, whole], powers[whole].exp2())
