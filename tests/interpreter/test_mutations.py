"""Kernels that are wrong on purpose: the error budget must notice each.

A mutation replaces one piece of a kernel's source. Beside its results stands error over budget:
with one plain computation in the kernel's dtype and PyTorch's fused one as the only peers, as it
was once, on an AMD EPYC 7003; and with the budget of today. Of the kernels themselves the largest
are 0.21; 0.20.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

from leaner_kernels.ops.attention.kernels import online as kernels
from tests.attention_cases import CASES, NAMES, make_inputs, peers_of, reference_results
from tests.error_budget import assert_within_budget
from tests.interpreter import online


class Mutation(NamedTuple):
    """One piece of source, what it becomes, and the results that show it."""

    name: str
    module: ModuleType
    piece: str
    instead: str
    wrong: tuple[str, ...]


CASE = "ViT"
MUTATIONS = (
    Mutation(
        "the accumulator is rounded to half precision once",
        kernels,
        "out = acc * normaliser[:, None]",
        "out = acc.to(q.dtype).to(tl.float32) * normaliser[:, None]",
        ("heads",),  # inf; inf: some sums are past the largest number
    ),
    Mutation(
        "probabilities are summed in half precision",
        kernels,
        "row_sum = alpha * row_sum + tl.sum(p, axis=1)",
        "row_sum = alpha * row_sum + tl.sum(p.to(q.dtype).to(tl.float32), axis=1)",
        ("lse", "heads"),  # 22.7; 21.5 and 14.1; 7.6
    ),
    Mutation(
        "the last tile of keys is dropped",
        kernels,
        "for start in range(begin, end, BLOCK_N):",
        "for start in range(begin, end - end % BLOCK_N, BLOCK_N):",
        ("out", "lse", "heads"),  # 31.8; 22.3, 44,500; 42,000 and 157,000; 84,800
    ),
    Mutation(
        "the accumulator is not rescaled to a new maximum",
        kernels,
        "acc * alpha[:, None]",
        "acc",
        ("out", "heads"),  # 350; 246 and 1,720,000; 932,000
    ),
    Mutation(
        "the last tile of rows is dropped from the gradients of keys",
        kernels,
        "for row_start in range(first, last, BLOCK_M):",
        "for row_start in range(first, last - last % BLOCK_M, BLOCK_M):",
        ("dk", "dv"),  # 62.2; 40.2 and 59.8; 33.1
    ),
    Mutation(
        "delta is left out",
        kernels,
        "p * (dp - delta[:, None])",
        "p * dp",
        ("dq", "dk"),  # 46.9; 37.5 and 30.3; 19.6
    ),
)


def mutated(mutation: Mutation, folder: Path) -> ModuleType:
    """Import a copy of the module with the piece replaced."""
    source = Path(str(mutation.module.__file__)).read_text("utf-8")
    assert mutation.piece in source, "the kernel no longer has this piece: mutate what it has"
    path = folder / f"{mutation.module.__name__.rpartition('.')[2]}_mutated.py"
    path.write_text(source.replace(mutation.piece, mutation.instead), "utf-8")
    # In the package of the kernel, whose imports are relative.
    name = f"{mutation.module.__package__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def judge() -> Callable[[], set[str]]:
    """Return what tells which results of the kernels are past the budget."""
    inputs = make_inputs(CASES[NAMES.index(CASE)], torch.float16)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, torch.float16)

    def past() -> set[str]:
        found = set()
        for name, actual in online.run(inputs).items():
            try:
                assert_within_budget(actual, peers[name], exact[name])
            except AssertionError:
                found.add(name)
        return found

    return past


def test_the_kernels_themselves_are_within_the_budget(judge: Callable[[], set[str]]) -> None:
    assert judge() == set()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_of_a_kernel_is_past_the_budget(
    mutation: Mutation,
    judge: Callable[[], set[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online, "kernels", mutated(mutation, tmp_path))
    assert set(mutation.wrong) <= judge()
