"""Operators on compiled kernels: within the error budget, and nothing a sanitizer would report."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model.execute import executing
from tests.compiled.cases import BF16, CHOSEN, HALF, OPERATORS, check_findings


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
