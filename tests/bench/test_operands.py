"""Operands of products in machine code: what follows them back, on code written by hand."""

import pytest

from bench.gpu_model import machine_code, operands

# As ptxas writes the descriptor of a product, the low word of it and one moved on.
RIGHT = """\
        /*0000*/ S2R R0, SR_TID.X ;
        /*0010*/ FMUL R2, R0, 1.5 ;
        /*0020*/ R2UR UR4, R2 ;
        /*0030*/ USHF.R.U32.HI UR8, URZ, 0x4, UR7 ;
        /*0040*/ USGXT.U32 UR8, UR8, 0xe ;
        /*0050*/ UMOV UR9, 0x40000040 ;
        /*0060*/ UMOV UR10, UR8 ;
        /*0070*/ UMOV UR11, 0x40000040 ;
        /*0080*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0090*/ UIADD3 UR10, UP0, UR10, 0x20, URZ ;
        /*00a0*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00b0*/ EXIT ;
"""
# The second of two ways to the product computes nothing.
TWO_WAYS = """\
        /*0000*/ ULEA.HI.X UR8, UR1, UR2, UR3, 0x1, UP1 ;
        /*0010*/ UMOV UR10, 0x5 ;
        /*0020*/ USGXT.U32 UR10, UR7, 0xe ;
        /*0030*/ @P0 BRA `(.L_x_0) ;
        /*0040*/ USGXT.U32 UR8, UR7, 0xe ;
.L_x_0:
        /*0050*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0060*/ EXIT ;
"""
# An address that was kept on the stack, and one that is masked in an ordinary register.
BY_STACK = """\
        /*0000*/ LOP3.LUT R4, R3, 0x3fff, RZ, 0xc0, !PT ;
        /*0010*/ STL [R1+0x8], R4 ;
        /*0020*/ MOV R4, 0x7 ;
        /*0030*/ LDL R5, [R1+0x8] ;
        /*0040*/ IADD3 R5, P1, R5, 0x2, RZ ;
        /*0050*/ R2UR UR10, R5 ;
        /*0060*/ HGMMA.64x16x16.F32.BF16 R24, R88, gdesc[UR8], RZ, !UPT ;
        /*0070*/ EXIT ;
"""
# Two addresses in one register.
PACKED = """\
        /*0000*/ USGXT.U32 UR4, UR7, 0xf ;
        /*0010*/ ULOP3.LUT UR6, UR9, 0x3fff3fff, URZ, 0xc0, !UPT ;
        /*0020*/ UPRMT UR4, UR6, 0x5410, UR4 ;
        /*0030*/ ULOP3.LUT UR8, UR4, 0xffff, URZ, 0xc0, !UPT ;
        /*0040*/ UPRMT UR10, UR4, 0x7732, URZ ;
        /*0050*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0060*/ EXIT ;
"""


def strays(text: str) -> list[str]:
    return operands.strays(machine_code.parse(text))


@pytest.mark.parametrize("text", [RIGHT, BY_STACK, PACKED])
def test_addresses_are_followed_through_sums_copies_and_the_stack(text: str) -> None:
    assert strays(text) == []


def test_a_float_in_the_place_of_an_address_is_found() -> None:
    (found,) = strays(RIGHT.replace("UP0, UR10, 0x20", "UP0, UR4, 0x20"))
    assert "UR10 may be FMUL R2, R0, 1.5" in found


def test_a_way_that_computes_no_address_is_found() -> None:
    (found,) = strays(TWO_WAYS)
    assert "UR8 may be ULEA.HI.X" in found
    assert strays(TWO_WAYS.replace("@P0 BRA `(.L_x_0)", "NOP")) == []


def test_a_register_that_nothing_writes_is_found() -> None:
    (found,) = strays(RIGHT.replace("USGXT.U32 UR8, UR8, 0xe", "USGXT.U32 UR10, UR8, 0xe"))[:1]
    assert "UR8 may be USHF" in found
    (found,) = strays(BY_STACK.replace("R2UR UR10", "R2UR UR12"))
    assert "UR10 may be nothing" in found


def test_a_constant_is_no_address() -> None:
    assert len(strays(PACKED.replace("USGXT.U32 UR4, UR7, 0xf", "FMUL UR4, UR7, 0.5"))) == 2
    found = strays(RIGHT.replace("UMOV UR10, UR8", "UMOV UR10, 0x10"))
    assert len(found) == 2
    assert "UR10 may be a number" in found[0]
