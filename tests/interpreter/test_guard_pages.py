"""Every kernel between pages that nobody may touch, with NaN around what it may read.

An access before a tensor or behind it ends the process, so that the launches run in one of their
own. What lies between a tensor's rows, or beside it on its pages, is NaN: what is read there shows
in the results, which equal those of the same launches in ordinary memory bit for bit, and what is
written there is found.
"""

import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import attention_cases, varlen_cases
from tests.operators import CHANNEL, CROSS, Case, make_inputs, run_kernels
from tests.ops.test_covariance import CovarianceTestCase
from tests.ops.test_outlook import OutlookTestCase
from tests.ops.test_windows import WindowTestCase
from tests.placement import behind_guards, in_a_process

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

import triton
import triton.language as tl

from leaner_kernels.ops import route
from leaner_kernels.ops.attention import op
from leaner_kernels.ops.attention.kernels import online as kernels
from tests.interpreter import online, test_short_kernels

Results = dict[str, Tensor]
HALF, SINGLE = torch.float16, torch.float32


def attention(dtype: torch.dtype = HALF, **sizes: Any) -> attention_cases.Inputs:
    case = {"batch": 2, "heads": 3, "kv_heads": 3, "rows": 17, "cols": 19, "dim": 5} | sizes
    return attention_cases.make_inputs(attention_cases.AttentionTestCase("", **case), dtype)


EVERYTHING = {"lengths": (3, 19), "mask": "additive", "dropout_p": 0.3}


def any_length(**sizes: Any) -> Results:
    return online.run(attention(**sizes))


def whole_heads(**sizes: Any) -> Results:
    return test_short_kernels.run_short(attention(**sizes), block=16)


def packed(**sizes: Any) -> Results:
    inputs = varlen_cases.make_inputs(varlen_cases.VarlenTestCase("", **sizes), HALF)
    with mock.patch.object(kernels, "SPARE_PROGRAMS", 3):
        out, *rest, max_log_sum = route.forward_on_gpu(
            op.Varlen, True, *inputs.operands, inputs.sample, *inputs.params
        )
        # Without statistics a program past the end of its sequence leaves, and others fill.
        plain = route.forward_on_gpu(op.Varlen, False, *inputs.operands, *inputs.params)
        grads = route.backward_on_gpu(
            op.Varlen, inputs.grad, *inputs.operands, out, max_log_sum, *inputs.params
        )
    return {str(n): t for n, t in enumerate((out, *rest, max_log_sum, *plain, *grads))}


def operator(case: Case, dtype: torch.dtype = HALF) -> Results:
    return run_kernels(make_inputs(case, dtype))


def windows(case: WindowTestCase, dtype: torch.dtype) -> Results:
    # Without statistics a program owns several heads of windows.
    plain = run_kernels(make_inputs(case, dtype), with_stats=False)
    return operator(case, dtype) | {f"plain {name}": t for name, t in plain.items()}


ONE = {"batch": 1, "heads": 1, "kv_heads": 1, "rows": 1, "cols": 1, "dim": 1}
LAUNCHES: dict[str, Callable[[], Results]] = {
    "any length, one of everything": lambda: any_length(**ONE),
    "any length": lambda: any_length(heads=1, kv_heads=1, **EVERYTHING),
    "any length, several tiles": lambda: any_length(
        dtype=SINGLE, batch=1, heads=2, kv_heads=1, rows=33, cols=35, dim=20, causal=True
    ),
    "short, one of everything": lambda: whole_heads(**ONE),
    "short": lambda: whole_heads(**EVERYTHING),
    "short, boolean mask": lambda: whole_heads(mask="boolean"),
    "short, several tiles": lambda: whole_heads(
        batch=1, heads=1, kv_heads=1, rows=53, cols=37, dim=33
    ),
    "packed": lambda: packed(
        lengths=(5, 0, 17), heads=2, dim=5, before=2, after=3, slack=20, dropout_p=0.3
    ),
    "packed, crossed": lambda: packed(
        lengths=(33, 1), heads=2, dim=17, kv_heads=1, key_lengths=(7, 20), causal=True
    ),
    "cross-covariance": lambda: operator(CovarianceTestCase("", CROSS, 1, 17, 2, 10)),
    "channels": lambda: operator(CovarianceTestCase("", CHANNEL, 1, 17, 2, 5)),
    "windows in one tile": lambda: windows(WindowTestCase("", 1, (1, 2), (3, 5), 3, 10), HALF),
    "windows in tiles": lambda: windows(WindowTestCase("", 1, (2, 1), (5, 7), 1, 5), SINGLE),
    "outlook": lambda: operator(OutlookTestCase("", 1, (3, 3), 1, 16, (3, 2, 1))),
    "outlook, odd sizes": lambda: operator(OutlookTestCase("", 1, (3, 4), 1, 5, (2, 1, 0)), SINGLE),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_outside_is_read_or_written(name: str) -> None:
    def compare() -> None:
        expected = LAUNCHES[name]()
        for at_end in (True, False):
            with behind_guards(at_end) as launched:
                found = LAUNCHES[name]()
            assert len(launched) >= 2, launched
            for result, actual in found.items():
                torch.testing.assert_close(
                    actual, expected[result], atol=0, rtol=0, equal_nan=True, msg=result
                )

    status = in_a_process(compare)
    assert status != -signal.SIGSEGV, "a kernel reached outside a tensor"
    assert status == 0


# --- The pages do what the test above relies on --------------------------------------------------


@triton.jit
def _copy_kernel(from_ptr, to_ptr, first, limit, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < limit, other=0.0), mask=at < limit)


def copy(first: int, limit: int, read: int = 5, written: int = 5) -> Tensor:
    taken, given = torch.arange(read).float(), torch.zeros(written)
    _copy_kernel[(1,)](from_ptr=taken, to_ptr=given, first=first, limit=limit, BLOCK=8)
    return given


@pytest.mark.parametrize(("first", "at_end"), [(0, True), (-1, False)])
def test_an_element_outside_ends_the_process(first: int, at_end: bool) -> None:
    def reach() -> None:
        with behind_guards(at_end):
            copy(first, first + 6)

    assert in_a_process(reach) == -signal.SIGSEGV
