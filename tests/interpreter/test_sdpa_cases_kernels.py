"""Those of PyTorch's cases that make a kernel compute addresses, in Triton's interpreter."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops.attention.checks import four_axes
from tests import attention_cases
from tests.interpreter.test_attention_kernels import run_kernels
from tests.ops.sdpa_cases import CASES, SdpaCase, assert_as_expected, expectations, make_inputs

NAMES = (
    "five axes, mask of four",
    "mask (2, 1, 7, 1)",
    "rows that see nothing, additive",
    "mask expanded from a row",
    "mask with gaps",
    "mask transposed",
    "negative scale, causal",
    "heads last in memory",
    "expanded over the batch",
    "expanded over the tokens",
    "expanded, masked",
    "off by one element",
    "permuted",
    "size 1 with any stride",
    "a nan in a query",
    "a nan in a value",
    "an infinite value",
)
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMES], ids=NAMES)
def test_kernels_agree_with_pytorchs(case: SdpaCase) -> None:
    peers, exact = expectations(case, torch.float16)
    query, key, value, mask, grad = make_inputs(case, torch.float16)
    four = query, key, value, mask
    if query.dim() != 4:
        four = four_axes(*four, None)
        grad = grad.view(four[0].shape)
    scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    sample = torch.zeros(0, dtype=torch.int32)
    results = run_kernels(
        attention_cases.Inputs(
            *four[:3], grad, four[3], None, None, sample, 0.0, case.causal, scale
        )
    )
    for leaf, t in (("out", query), ("dq", query), ("dk", key), ("dv", value)):
        results[leaf] = results[leaf].view(t.shape)
    assert_as_expected({name: results[name] for name in exact}, peers, exact)
