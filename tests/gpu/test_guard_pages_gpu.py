"""Every Triton kernel on a GPU, on unaligned sizes, amid NaN: memory around tensors changes no bit.

Few and small: bench/gpu.sh runs them once more under compute-sanitizer's memcheck, each tensor in
an allocation of its own. Pages that may not be touched: tests/interpreter/test_guard_pages.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import (
    attention_cases,
    covariance_cases,
    nystrom_cases,
    outlook_cases,
    varlen_cases,
    window_cases,
)
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
    "cross-covariance": lambda: (
        covariance_cases.make_inputs(
            covariance_cases.CovarianceTestCase("", covariance_cases.CROSS, 2, 37, 2, 10),
            HALF,
            "cuda",
        ),
        covariance_cases.run_operator,
    ),
    "channels": lambda: (
        covariance_cases.make_inputs(
            covariance_cases.CovarianceTestCase("", covariance_cases.CHANNEL, 2, 17, 2, 5),
            HALF,
            "cuda",
        ),
        covariance_cases.run_operator,
    ),
    "windows in one tile": lambda: (
        window_cases.make_inputs(
            window_cases.WindowTestCase("", 2, (1, 3), (3, 5), 3, 10), HALF, "cuda"
        ),
        window_cases.run_operators,
    ),
    "windows in tiles": lambda: (
        window_cases.make_inputs(
            window_cases.WindowTestCase("", 1, (2, 1), (5, 7), 1, 5), SINGLE, "cuda"
        ),
        window_cases.run_operators,
    ),
    "outlook": lambda: (
        outlook_cases.make_inputs(
            outlook_cases.OutlookTestCase("", 2, (5, 3), 2, 16, (3, 2, 1)), HALF, "cuda"
        ),
        outlook_cases.run_operators,
    ),
    "landmarks": lambda: (
        nystrom_cases.make_inputs(
            nystrom_cases.NystromTestCase("", 2, 34, 2, 5, 17, (3, 34), iterations=1), HALF, "cuda"
        ),
        nystrom_cases.run_operator,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_lies_beside_a_tensor_changes_no_bit(name: str) -> None:
    inputs, run = CALLS[name]()

    def surrounded(beside: float) -> dict[str, Tensor]:
        places = {n: t for n, t in inputs._asdict().items() if isinstance(t, Tensor)}
        return run(inputs._replace(**{n: amid(t, beside) for n, t in places.items()}))

    found, wanted = surrounded(NAN), surrounded(0.0)
    for result, actual in found.items():
        assert actual.isfinite().all() or name == "packed", result
        torch.testing.assert_close(actual, wanted[result], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_end_their_allocation_give_the_same(name: str) -> None:
    """Under memcheck an element past the last is reported; alone, only a wrong result is."""
    inputs, run = CALLS[name]()
    ends = {}
    for field, t in inputs._asdict().items():
        if isinstance(t, Tensor):
            flat = torch.empty(span(t.shape, t.stride()), dtype=t.dtype, device=t.device)
            ends[field] = flat.as_strided(t.shape, t.stride())
            own_elements(ends[field]).copy_(own_elements(t))
    found, wanted = run(inputs._replace(**ends)), run(inputs)
    for result, actual in found.items():
        torch.testing.assert_close(actual, wanted[result], atol=0, rtol=0, equal_nan=True)
