"""Products that read from nowhere are found in machine code, and those that do not are not."""

import pytest

from warploom.testing.descriptors import find_lost_addresses

GOOD = """
        /*0010*/                   USHF.R.U32.HI UR50, URZ, 0x4, UR45 ;
        /*0020*/                   USGXT.U32 UR50, UR50, 0xe ;
        /*0030*/                   UIADD3 UR14, UP1, UR50, 0x20, URZ ;
        /*0040*/                   UIADD3.X UR15, URZ, -0x3ffffff0, URZ, UP1, !UPT ;
        /*0050*/                   UMOV UR51, 0xc0000010 ;
        /*0060*/                   HGMMA.64x16x16.F32 R56, R24, gdesc[UR48].tnspB, R56 ;
        /*0070*/              @!P0 HGMMA.64x16x16.F32 R56, R28, gdesc[UR12].tnspB, R56, gsb0 ;
"""


def test_addresses_that_are_there() -> None:
    assert find_lost_addresses(GOOD) == []
    vector = GOOD.replace("USGXT.U32 UR50, UR50, 0xe", "R2UR UR50, R7")
    assert find_lost_addresses("/*0000*/ LOP3.LUT R7, R7, 0x3fff, RZ, 0xc0, !PT ;" + vector) == []
    halves = "/*0000*/ ULOP3.LUT UR7, UR6, 0x3fff3fff, URZ, 0xc0, !UPT ;" + GOOD.replace(
        "USGXT.U32 UR50, UR50, 0xe", "UPRMT UR50, UR7, 0x7732, URZ"
    )
    assert find_lost_addresses(halves) == []
    assert find_lost_addresses(halves.replace("0x3fff3fff", "0xffff"))
    spilled = "/*0000*/ LDL R7, [R1+0xd4] ;" + vector
    assert find_lost_addresses(spilled) == []
    assert find_lost_addresses(
        "/*0000*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;"
    )  # both factors in shared memory
    assert find_lost_addresses("no code") == []


@pytest.mark.parametrize(
    ("before", "after", "lost", "reason"),
    [
        ("UP1, UR50, 0x20", "UP1, UR46, 0x20", 1, "UR46 is never written"),
        ("USGXT.U32 UR50, UR50, 0xe", "UIADD3 UR50, UR16, 0x40, URZ", 2, "UR16 is never written"),
        ("USGXT.U32 UR50, UR50, 0xe", "S2UR UR50, SR_CTAID.X", 2, "UR50 comes from S2UR"),
        ("USGXT.U32 UR50, UR50, 0xe", "USGXT.U32 UR50, UR50, 0x8", 2, "comes from USGXT"),
    ],
)
def test_addresses_that_are_lost(before: str, after: str, lost: int, reason: str) -> None:
    assert before in GOOD
    found = find_lost_addresses(GOOD.replace(before, after))
    assert len(found) == lost
    assert reason in found[0]


def test_what_comes_later_defines_nothing() -> None:
    first, *rest = GOOD.strip().splitlines()
    assert find_lost_addresses("\n".join([*rest[1:], first, rest[0]]))


LOOPS = """
        /*0010*/                   ULDC UR18, c[0x0][0x2a4] ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/                   USGXT.U32 UR18, UR6, 0xe ;
.L_x_3:
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R48, R24, gdesc[UR16], R48 ;
        /*0060*/                   UIADD3 UR18, UR18, 0x2, URZ ;
        /*0070*/                   BRA P1, `(.L_x_3) ;
.L_x_2:
        /*0078*/                   DEPBAR.LE SB0, 0x0 ;
        /*0080*/                   UIADD3 UR22, UR18, 0x20, URZ ;
        /*0090*/                   HGMMA.64x16x16.F32.BF16 R48, R24, gdesc[UR20], R48, gsb0 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   HGMMA.64x16x16.F32.BF16 R48, R24, gdesc[UR16], R48 ;
"""
IN_BOTH = "ULDC UR18, c[0x0][0x2a4]", "USGXT.U32 UR18, UR6, 0xe"


def test_an_address_must_be_there_on_every_way() -> None:
    (found,) = find_lost_addresses(LOOPS)
    assert "gdesc[UR20]" in found
    assert "UR18 comes from ULDC UR18" in found
    assert find_lost_addresses(LOOPS.replace(*IN_BOTH)) == []
    always = LOOPS.replace("@!P0 BRA", "BRA")
    assert find_lost_addresses(always) == []
    assert find_lost_addresses(always.replace("BRA P1,", "BRA")) == []
    found, *_ = find_lost_addresses(LOOPS.replace(IN_BOTH[1], "S2UR UR18, SR_CTAID.X").replace(*IN_BOTH))
    assert "S2UR" in found
