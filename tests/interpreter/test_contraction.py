"""A row whose weight is all on one key has no entropy, also where products join sums.

The compiler makes ``a * b - c`` one operation that rounds once. A maximum ``c`` of products that
were rounded before is then not what it is subtracted from.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from tests import covariance_cases, nystrom_cases, outlook_cases, window_cases
from tests.interpreter import (
    test_covariance_kernels,
    test_nystrom_kernels,
    test_outlook_kernels,
    test_window_kernels,
)
from tests.interpreter.rounding import contracted

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
# No power of two: scores are rounded.
SCALE = 0.3


def diagonal(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two diagonal matrices; rows of their product have one score, far above the others."""
    rows = torch.diag(torch.linspace(7, 9, size)).to(dtype)
    return rows, torch.diag(torch.linspace(60, 70, size)).to(dtype)


@DTYPES
def test_of_a_window(dtype: torch.dtype) -> None:
    inputs = window_cases.make_inputs(
        window_cases.WindowTestCase("", 1, (1, 1), (4, 4), 1, 16), dtype
    )
    inputs = inputs._replace(scale=SCALE)
    for part, tokens in enumerate(diagonal(16, dtype)):
        inputs.qkv[0, :, :, part, 0] = tokens.view(4, 4, 16)
    with contracted():
        entropy = test_window_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


@DTYPES
def test_of_channels(dtype: torch.dtype) -> None:
    case = covariance_cases.CovarianceTestCase(
        "", covariance_cases.CHANNEL, 1, 16, 1, 16, scale=SCALE
    )
    inputs = covariance_cases.make_inputs(case, dtype)
    inputs.qkv[0, :, 1, 0], inputs.qkv[0, :, 2, 0] = diagonal(16, dtype)
    with contracted():
        entropy = test_covariance_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


@DTYPES
def test_of_landmarks(dtype: torch.dtype) -> None:
    case = nystrom_cases.NystromTestCase("", 1, 32, 1, 16, 16, scale=SCALE, iterations=1)
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
        outlook_cases.OutlookTestCase("", 1, (4, 4), 2, dim, (1, 1, 0)), dtype
    )._replace(params=(1, 1, 0, SCALE))
    with contracted():
        entropy = test_outlook_kernels.run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy
