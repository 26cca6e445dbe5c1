"""PyTorch's own cases of scaled_dot_product_attention on a GPU, with and without statistics."""

import pytest
import torch

from leaner_kernels import attention
from tests.ops.sdpa_cases import (
    CASES,
    REFUSALS,
    Refusal,
    SdpaCase,
    assert_as_expected,
    expectations,
    make_inputs,
    run,
    with_statistics,
)

DTYPES = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree_with_pytorchs(case: SdpaCase) -> None:
    for dtype in DTYPES:
        peers, exact = expectations(case, dtype)
        for function in (attention, with_statistics):
            inputs = make_inputs(case, dtype).to(dtype, "cuda")
            actual = run(function, case, inputs)
            assert all(result.is_cuda for result in actual.values())
            assert_as_expected(actual, peers, exact)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_a_refusal_is_one_line(refusal: Refusal) -> None:
    with pytest.raises(ValueError, match=refusal.message) as caught:
        attention(**refusal.arguments("cuda"))
    assert "\n" not in str(caught.value)
