"""The table of resources: what is recorded, how occupancy is counted, and when the check fails."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from bench import resources
from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ON_GPU
from bench.gpu_model import compile_ahead
from bench.gpu_model.compile_ahead import GPUS, compile_launch, distinct, programs_per_sm, recorded
from tests.resource_limits import faults, key

BF16 = torch.bfloat16
CASE = AttentionCase("small", "cuda", 2, 4, 50, 32, BF16)
ROW = {
    "case": "vit_base",
    "launch": "forward",
    "capability": 86,
    "kernel": "_a_kernel",
    "registers": 100,
    "shared": 24_576,
    "stack": 0,
    "spills": 0,
    "looped_spills": 0,
    "programs_per_sm": 3,
}
TABLE = {"versions": {"triton": triton.__version__, "torch": "2"}, "rows": [ROW]}


@triton.jit
def _scale_kernel(x_ptr, factor, N, BLOCK: tl.constexpr, SQUARE: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N) * factor
    tl.store(x_ptr + cols, tl.exp(x) if SQUARE else x, mask=cols < N)


def scale(n: int, square: bool = False) -> None:
    x = torch.empty(n, device="meta")
    _scale_kernel[(1,)](x, 2.0, n, BLOCK=128, SQUARE=square, num_warps=2, enable_fp_fusion=True)


def changed(**values) -> dict:
    return {**copy.deepcopy(ROW), **values}


def test_one_launch_of_each_specialisation_is_kept() -> None:
    with recorded() as launches:
        for n in (100, 102, 128, 256):
            scale(n)
        scale(100, square=True)
    # A multiple of 16 is compiled apart.
    assert distinct(launches, 80) == [launches[1], launches[3], launches[4]]
    assert distinct(launches, 80, besides=launches[:1]) == [launches[3], launches[4]]


def test_what_a_kernel_takes_is_read_from_its_machine_code() -> None:
    with recorded() as launches:
        scale(100)
    plain = compile_launch(launches[0], 80)
    assert plain.threads == 64
    assert plain.stack == plain.spills == plain.shared == 0
    assert 0 < plain.registers < 32
    # 64 threads are 32 of 32 to an SM by programs, not by threads.
    assert plain.programs_per_sm == 32


@pytest.mark.parametrize(
    ("gpu", "registers", "shared", "threads", "columns", "programs"),
    [
        (80, 255, 0, 128, 0, 2),  # 8 warps of 8,192 registers
        (80, 128, 0, 128, 0, 4),
        (80, 129, 0, 128, 0, 3),  # given out by 8 registers of a thread: 136, 3 warps to a quarter
        (80, 32, 0, 128, 0, 16),  # threads: 2,048
        (86, 32, 0, 128, 0, 12),  # threads: 1,536
        (86, 32, 0, 32, 0, 16),  # programs
        (80, 32, 54 * 1024, 128, 0, 2),  # 55 KiB with what the system keeps: 3 would be 165
        (86, 32, 99 * 1024, 128, 0, 1),
        (86, 32, 99 * 1024 + 1, 128, 0, 0),
        (90, 32, 75 * 1024, 128, 0, 3),
        (90, 255, 0, 512, 0, 0),  # more registers than there are
        (100, 32, 0, 128, 256, 2),  # tensor memory: 512 columns
    ],
)
def test_programs_on_an_sm_are_counted(
    gpu: int, registers: int, shared: int, threads: int, columns: int, programs: int
) -> None:
    assert programs_per_sm(GPUS[gpu], registers, shared, threads, columns) == programs


def test_a_row_within_its_limits_passes() -> None:
    assert faults(ROW, TABLE) == []
    fewer = changed(registers=90, shared=20_000, programs_per_sm=4)
    assert faults(fewer, TABLE) == []
    assert faults(changed(registers=116), TABLE) == []
    assert faults(changed(stack=24, spills=6), TABLE) == []


@pytest.mark.parametrize(
    ("worse", "fault"),
    [
        ({"registers": 117}, "117 registers, the table has 100"),
        ({"programs_per_sm": 2}, "2 programs fit, the table has 3"),
        ({"stack": 196}, "196 bytes of stack, 192 are allowed"),
        ({"looped_spills": 5}, "5 spills in an innermost loop"),
        ({"shared": 99 * 1024 + 1}, "101377 bytes of shared memory, 101376 are there"),
        ({"launch": "capture"}, "not in the table"),
    ],
)
def test_a_row_beyond_its_limits_fails(worse: dict, fault: str) -> None:
    (found,) = faults(changed(**worse), TABLE)
    assert re.match(r"vit_base \w+ on sm_86, _a_kernel: ", found)
    assert fault in found


@pytest.mark.parametrize(("is_tuned", "allowed"), [(True, 0), (False, 4)])
def test_spills_in_loops_are_for_releases_that_tiles_were_not_chosen_with(
    is_tuned: bool, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "tuned", lambda: is_tuned)
    assert faults(changed(looped_spills=allowed), TABLE) == []
    assert len(faults(changed(looped_spills=allowed + 1), TABLE)) == 1


def test_the_committed_table_has_what_is_launched_and_nothing_else() -> None:
    table = json.loads(resources.TABLE.read_text("utf-8"))
    rows = resources.launches(ON_GPU.values(), resources.IN_TABLE)
    launched = [key(name) for name, _ in rows]
    assert [key(row) for row in table["rows"]] == launched
    assert len(set(launched)) == len(launched)
    assert {row["case"] for row in table["rows"]} == set(ON_GPU)


@pytest.mark.slow
def test_the_command_writes_what_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "ON_GPU", {CASE.name: CASE})
    monkeypatch.setattr(resources, "IN_TABLE", (80,))
    monkeypatch.setattr(resources, "TABLE", tmp_path / "table.json")
    resources.main(["--write"])
    table = json.loads(resources.TABLE.read_text("utf-8"))
    assert {row["launch"] for row in table["rows"]} >= {"forward", "backward"}
    found = [fault for row in resources.rows([CASE], [80]) for fault in faults(row, table)]
    assert found == []
