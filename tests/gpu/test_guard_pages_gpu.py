"""Every Triton kernel on a GPU, on unaligned sizes, amid NaN: memory around tensors changes no bit.

Few and small: bench/gpu.sh runs them once more under compute-sanitizer's memcheck, each tensor in
an allocation of its own. Pages that may not be touched: tests/interpreter/test_guard_pages.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests import attention_cases, operators, varlen_cases
from tests.operators import CHANNEL, CROSS, Case
from tests.ops.test_covariance import CovarianceTestCase
from tests.ops.test_nystrom import NystromTestCase
from tests.ops.test_outlook import OutlookTestCase
from tests.ops.test_windows import WindowTestCase
from tests.placement import own_elements, span

HALF, SINGLE = torch.float16, torch.float32
SLACK = 4096  # elements before and after
NAN = float("nan")


def amid(t: Tensor, beside: float) -> Tensor:
    """Return a copy with the same strides; ``beside`` is all around it and between its rows."""
    length = span(t.shape, t.stride())
    if not t.is_floating_point():
        beside = 3 if beside == 0 else 2**30
    block = torch.full((length + 2 * SLACK,), beside, dtype=t.dtype, device=t.device)
    copy = block[SLACK : SLACK + length].as_strided(t.shape, t.stride(), SLACK)
    own_elements(copy).copy_(own_elements(t.detach()))
    return copy


def attention(rows: int, cols: int, dim: int, dtype: torch.dtype = HALF, **features: Any) -> Any:
    case = attention_cases.AttentionTestCase("", 2, 3, 3, rows, cols, dim, **features)
    return attention_cases.make_inputs(case, dtype, "cuda"), attention_cases.run_operators


def operator(case: Case, dtype: torch.dtype = HALF) -> Any:
    return operators.make_inputs(case, dtype, "cuda"), operators.run_operator


EVERYTHING: dict[str, Any] = {"mask": "additive", "dropout_p": 0.3}
CALLS: dict[str, Callable[[], tuple[Any, Callable[..., dict[str, Tensor]]]]] = {
    "few tokens": lambda: attention(17, 17, 32),
    "few tokens, everything": lambda: attention(17, 19, 10, lengths=(3, 19), **EVERYTHING),
    "short": lambda: attention(149, 149, 64, causal=True),
    "any length": lambda: attention(301, 299, 40, lengths=(3, 299), **EVERYTHING),
    "any length, float32": lambda: attention(1, 131, 5, SINGLE),
    "packed": lambda: (
        varlen_cases.make_inputs(
            varlen_cases.VarlenTestCase("", (5, 0, 70), 2, 17, before=2, after=3, slack=20),
            HALF,
            "cuda",
        ),
        varlen_cases.run_operators,
    ),
    "cross-covariance": lambda: operator(CovarianceTestCase("", CROSS, 2, 37, 2, 10)),
    "channels": lambda: operator(CovarianceTestCase("", CHANNEL, 2, 17, 2, 5)),
    "windows in one tile": lambda: operator(WindowTestCase("", 2, (1, 3), (3, 5), 3, 10)),
    "windows in tiles": lambda: operator(WindowTestCase("", 1, (2, 1), (5, 7), 1, 5), SINGLE),
    "outlook": lambda: operator(OutlookTestCase("", 2, (5, 3), 2, 16, (3, 2, 1))),
    "landmarks": lambda: operator(NystromTestCase("", 2, 34, 2, 5, 17, (3, 34), iterations=1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_lies_beside_a_tensor_changes_no_bit(name: str) -> None:
    inputs, run = CALLS[name]()

    def surrounded(beside: float) -> dict[str, Tensor]:
        return run(tree_map_only(Tensor, lambda t: amid(t, beside), inputs))

    found, wanted = surrounded(NAN), surrounded(0.0)
    for result, actual in found.items():
        assert actual.isfinite().all() or name == "packed", result
        torch.testing.assert_close(actual, wanted[result], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_end_their_allocation_give_the_same(name: str) -> None:
    """Under memcheck an element past the last is reported; alone, only a wrong result is."""

    def alone(t: Tensor) -> Tensor:
        flat = torch.empty(span(t.shape, t.stride()), dtype=t.dtype, device=t.device)
        copy = flat.as_strided(t.shape, t.stride())
        own_elements(copy).copy_(own_elements(t))
        return copy

    inputs, run = CALLS[name]()
    found, wanted = run(tree_map_only(Tensor, alone, inputs)), run(inputs)
    for result, actual in found.items():
        torch.testing.assert_close(actual, wanted[result], atol=0, rtol=0, equal_nan=True)
