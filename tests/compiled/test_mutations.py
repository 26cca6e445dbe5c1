"""Instructions taken away from shipped kernels, one at a time: does the executor notice?

A barrier, a wait, a fence or a predicate that can go without a finding, a crash or another result
is redundant, or something that the executor is blind to.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model import decode
from bench.gpu_model.execute import Execution, ExecutionError, executing
from leaner_kernels.ops import _gluon, _tiles
from tests import attention_cases, operators, varlen_cases
from tests.attention_cases import MODELS, aligned, run_operators
from tests.ops import test_covariance, test_windows

# Of an operator, its cases, what makes inputs of one, and what runs them.
OPERATORS = {
    "attention": (MODELS, partial(attention_cases.make_inputs, layout=aligned), run_operators),
    "varlen": (varlen_cases.CASES, varlen_cases.make_inputs, varlen_cases.run_operators),
    "window": (test_windows.CASES, operators.make_inputs, operators.run_operator),
    "covariance": (test_covariance.CASES, operators.make_inputs, operators.run_operator),
}
MANY_HEADS = "attention of many heads"
SYNCHRONISING = (
    "bar",
    "cp.async.wait_group",
    "wgmma.wait_group",
    "wgmma.fence",
    "fence.proxy.async",
)


class Mutation:
    """Instruction ``index`` of a program, replaced by nothing; or, of an access, unguarded."""

    def __init__(self, program: decode.Program, index: int) -> None:
        self.program, self.index = program, index
        self.instruction = program.code[index]
        self.statement = program.kernel.statements[index]

    @property
    def kind(self) -> str:
        return operation(self.program, self.index)

    def __str__(self) -> str:
        s = self.statement
        return f"{self.program.kernel.name} line {s.line}: {s.text}"

    def __enter__(self) -> None:
        self._before = self.instruction.operation, self.instruction.guard
        if self.statement.guard:
            self.instruction.guard = -1
        else:
            self.instruction.operation = self.program.operation_names.index("nop")

    def __exit__(self, *_: object) -> None:
        self.instruction.operation, self.instruction.guard = self._before


def operation(program: decode.Program, index: int) -> str:
    return program.operation_names[program.code[index].operation]


def synchronising(execution: Execution) -> Iterator[Mutation]:
    program = execution.program
    for index in range(len(program.code)):
        if operation(program, index) in SYNCHRONISING:
            yield Mutation(program, index)


def guarded_accesses(execution: Execution) -> Iterator[Mutation]:
    """Those that a guard kept some lane from."""
    program = execution.program
    for index, statement in enumerate(program.kernel.statements):
        accesses = operation(program, index) in ("ld.global", "st.global")
        if statement.guard and accesses and execution.counts[index].skipped:
            yield Mutation(program, index)


def results_of(
    operator: str, case: str, gpu: int, **options: bool
) -> tuple[dict[str, Tensor], list[Execution], Counter[str]]:
    cases, make_inputs, run = OPERATORS["attention" if operator == MANY_HEADS else operator]
    (wanted,) = (c for c in cases if c.name == case)
    torch.manual_seed(0)
    # Programs of a head each, as where there are many.
    enough = 1 if operator == MANY_HEADS else _tiles.ENOUGH_PROGRAMS
    with (
        mock.patch.object(_tiles, "ENOUGH_PROGRAMS", enough),
        executing(gpu, **options) as executions,
    ):
        results = run(make_inputs(wanted, torch.bfloat16, "cuda"))
    findings: Counter[str] = Counter()
    for execution in executions:
        findings.update(execution.found)
    return {name: t.cpu() for name, t in results.items()}, executions, findings


def outcome(
    mutation: Mutation, operator: str, case: str, gpu: int, whole: dict[str, Tensor]
) -> str:
    with mutation:
        try:
            results, _, findings = results_of(operator, case, gpu)
        except (ExecutionError, AssertionError):
            return "stopped"
    if findings:
        return "found"
    same = (torch.equal(t.nan_to_num(7), whole[name].nan_to_num(7)) for name, t in results.items())
    return "unnoticed" if all(same) else "another result"


# Of each kind some, in a kernel whose products are asynchronous.
@pytest.mark.parametrize("kind", ["bar", "wgmma.wait_group", "fence.proxy.async"])
def test_what_orders_asynchronous_products_is_missed(kind: str) -> None:
    call = "attention", "ViT-B", 90
    whole, executions, findings = results_of(*call)
    assert not findings
    backward = executions[-1]
    assert backward.program.tracks_wgmma
    mutations = [m for m in synchronising(backward) if m.kind == kind]
    assert "found" in (outcome(mutation, *call, whole) for mutation in mutations)


@pytest.mark.parametrize(
    ("case", "place", "kernel"),
    [("ViT-B", 0, "_hopper_fwd_kernel"), ("ViT-B, dropout", -1, "_hopper_bwd_kernel")],
)
def test_memory_may_not_change_while_an_asynchronous_product_reads_it(
    case: str, place: int, kernel: str
) -> None:
    """As a reduction's scratch did in a buffer that a product of another warp still read."""
    if "dropout" in case and not _gluon.KEEPS_FENCES:
        pytest.skip("with this Triton the backward of dropout is not in Gluon")
    call = MANY_HEADS, case, 90
    _, executions, _ = results_of(*call)
    mutated = executions[place]
    assert mutated.program.kernel.name == kernel
    found: Counter[str] = Counter()
    for mutation in synchronising(mutated):
        if mutation.kind in ("bar", "wgmma.wait_group"):
            with mutation, suppress(ExecutionError, AssertionError):
                found.update(results_of(*call)[2])
        if found["written while wgmma reads"]:
            return
    pytest.fail(f"no barrier and no wait of {kernel} keeps writers from what wgmma reads: {found}")


# How many of a kind may go unnoticed in all kernels of a call, and why; of two numbers the second
# is of Triton before 3.9, which places more barriers.
BEFORE_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
WAITED_BEFORE = "the wait before covers all copies that were made"
FENCED_BEFORE = "the fence before covers all copies: nothing is written to shared memory between"
FENCED_TWICE = "another fence lies between the same stores and the product, or no store before it"
NOTHING_BETWEEN = "no warp writes what others have read since the barrier before"
TWO_BARRIERS = (
    "Triton puts one beside one that is asked for; seven stand where large dO is corrected"
)
ADDS_UP = "the next product adds to the same registers, in order, and nothing else reads them"
REDUNDANT = {
    (MANY_HEADS, "ViT-B", 80): {
        "bar": ((3, 13), NOTHING_BETWEEN),
    },
    (MANY_HEADS, "ViT-B", 90): {
        "bar": ((14, 30), TWO_BARRIERS),
        "fence.proxy.async": ((0, 2), FENCED_TWICE),
        "wgmma.wait_group": ((5, 6), ADDS_UP),
    },
    (MANY_HEADS, "ViT-B, dropout", 90): {
        "bar": (30, TWO_BARRIERS),
        "fence.proxy.async": (4, FENCED_TWICE),
        "wgmma.wait_group": (6, ADDS_UP),
    },
    (MANY_HEADS, "GPT-2, 512 tokens", 80): {
        "bar": ((1, 22), NOTHING_BETWEEN),
    },
    (MANY_HEADS, "GPT-2, 512 tokens", 90): {
        "bar": ((25, 58), TWO_BARRIERS),
        "fence.proxy.async": (4, FENCED_TWICE),
        "wgmma.wait_group": ((2, 4), ADDS_UP),
    },
    ("varlen", "images of many sizes", 90): {
        # One of them since rows' statistics are stored in pairs, which a warp exchanges by itself.
        "bar": (2, NOTHING_BETWEEN),
        "fence.proxy.async": (3, FENCED_BEFORE),
    },
    ("window", "DaViT", 80): {},
    ("covariance", "cross, XCiT", 90): {
        "cp.async.wait_group": (1, WAITED_BEFORE),
        "bar": (6, NOTHING_BETWEEN),
        "fence.proxy.async": (3, FENCED_BEFORE),
        "wgmma.wait_group": (2, ADDS_UP),
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("call", REDUNDANT, ids=str)
def test_barriers_waits_and_fences_are_missed(call: tuple[str, str, int]) -> None:
    whole, executions, findings = results_of(*call)
    assert not findings
    tried, unnoticed = 0, Counter[str]()
    for execution in {id(e.program): e for e in executions}.values():
        for mutation in synchronising(execution):
            tried += 1
            unnoticed[mutation.kind] += outcome(mutation, *call, whole) == "unnoticed"
    assert tried > 20
    limits = {kind: most for kind, (most, _) in REDUNDANT[call].items()}
    allowed = {k: n if isinstance(n, int) else n[BEFORE_3_9] for k, n in limits.items()}
    assert {kind: n for kind, n in unnoticed.items() if n > allowed.get(kind, 0)} == {}


# A number of a whole row or head, which several lanes hold: each would store the same.
SCALARS = 11


@pytest.mark.nightly
@pytest.mark.parametrize("call", [*REDUNDANT], ids=str)
def test_guards_of_accesses_are_missed(call: tuple[str, str, int]) -> None:
    """Of every kernel's loads and stores that a guard keeps some lane from."""
    if call[0] == "varlen":
        pytest.skip("rows of the next sequence are read, and hidden by the lengths alone")
    whole, executions, _ = results_of(*call, count=True)
    unnoticed = []
    for execution in {id(e.program): e for e in executions}.values():
        guarded = guarded_accesses(execution)
        unnoticed += [m for m in guarded if outcome(m, *call, whole) == "unnoticed"]
    assert len(unnoticed) <= SCALARS, list(map(str, unnoticed))
    assert all(m.kind == "st.global" for m in unnoticed), list(map(str, unnoticed))
