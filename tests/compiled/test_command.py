"""``python -m bench.gpu_model``: what is wrong with a kernel shows in what it prints."""

import os
import re

import pytest

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model import command, machine_code


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert not ended.value.code
    return capsys.readouterr().out


def number(text: str, kind: str) -> float:
    found = re.search(rf"([\d,.]+)\s+\d+%\s+{kind}$", text, re.MULTILINE)
    return float(found[1].replace(",", "")) if found else 0.0


def floor(text: str, unit: str) -> float:
    found = re.search(rf"{unit} ([\d,.]+)", text)
    assert found is not None, text
    return float(found[1].rstrip(",").replace(",", ""))


def test_a_kernel_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "vit_base", "--only", "forward")
    assert "_resident_fwd_kernel: 16 x 1 x 1 programs of 4 warps" in text
    # 64 rows of scores against 208 keys, and their exponentials: 4 warps of 32 lanes.
    assert number(text, "exponentials and roots") == pytest.approx(64 * 208 / 32, rel=0.1)
    assert number(text, "local memory") == 0
    assert "FOUND" not in text
    # HGMMA of 64 rows: scores of 208 columns over a depth of 64, and the other way round.
    assert floor(text, "tensor cores") == pytest.approx(
        1e6 * 128 * 16 * 4 * 2 * 2 * 64 * 208 * 64 / 989e12, rel=0.05
    )


def test_spills_show_as_local_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "vit_base", "--only", "forward", "--tile", "maxnreg=96")
    assert number(text, "local memory") > 100
    assert " 0 of stack" not in text


def test_products_that_wait_for_each_other_show(capsys: pytest.CaptureFixture[str]) -> None:
    """As the backward of short rows does on Hopper: ptxas lets none of its wgmma overlap."""
    waits = number(printed(capsys, "vit_base", "--only", "backward"), "waits for tensor cores")
    overlapped = number(printed(capsys, "vit_base", "--only", "forward"), "waits for tensor cores")
    assert waits > 10 * overlapped > 0


def test_another_barrier_shows(capsys: pytest.CaptureFixture[str]) -> None:
    few = printed(capsys, "vit_base", "--only", "statistics", "--tile", "BLOCK=32")
    many = printed(capsys, "vit_base", "--only", "statistics", "--tile", "BLOCK=16")
    assert number(many, "barriers") > 1.5 * number(few, "barriers") > 0


@pytest.mark.parametrize("tile", ["BLOCKS=3", "BLOCK", "BLOCK=x"])
def test_a_tile_that_is_none_is_refused(tile: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["vit_base", "--tile", tile])
    assert "--tile takes BLOCK" in capsys.readouterr().err


LOOP = """
	//## File "kernel.py", line 1
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
	//## File "kernel.py", line 2
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/                   STL [R1], R4 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
	//## File "kernel.py", line 3
        /*0060*/                   STG.E [R2], R4 ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
"""


def test_runs_of_blocks_follow_from_what_is_kept() -> None:
    code = machine_code.parse(LOOP)
    assert code.blocks == [(0, 2), (2, 6), (6, 8), (8, 9)]
    assert set(code.edges) == {(0, 2), (0, 1), (1, 1), (1, 2), (2, 4), (3, 3)}
    known = {("HMMA", "kernel.py", 2): 14.0, ("STG", "kernel.py", 3): 1.0}
    found = machine_code.runs(code, known)
    assert found.of_block == pytest.approx([1, 7, 1, 0], abs=1e-3)
    assert found.off < 1e-3
    assert machine_code.executed(code, found.of_block)["STL"] == pytest.approx(7, abs=1e-2)


def test_counts_that_no_flow_explains_are_off() -> None:
    known = {("HMMA", "kernel.py", 2): 14.0, ("STG", "kernel.py", 3): 5.0}
    assert machine_code.runs(machine_code.parse(LOOP), known).off > 0.1
