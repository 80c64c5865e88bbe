"""Whether ``wgmma`` in a compiled kernel reads from addresses in shared memory.

The assembler of CUDA 12.8 (Triton 3.6 and 3.7) loses some: where a loop stores a tile and multiplies with it, the
descriptor of the tile is computed from a register that holds something else, or was never written. PTX is right,
the machine code reads anywhere. A descriptor's lower half is the address in units of 16 bytes, cut to 14 bits, plus
a number; so back from each instruction there must be such a cut.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple

import triton

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bU?R\d+\b(?!\])")
_PRODUCT = re.compile(r"gdesc\[UR(\d+)\]")
_CUT = (("SGXT", "0xe"), ("SGXT", "0xf"), ("LOP3", "0x3fff"), ("LOP3", "0x7fff"))
_WITHOUT_RESULT = ("ST", "RED", "BAR", "BRA", "HGMMA", "DEPBAR", "SYNCS", "UBLKCP", "UTMA", "EXIT")
_PASSED_ON = (
    *("UIADD3", "IADD3", "VIADD", "UMOV", "MOV", "R2UR", "IMAD", "UIMAD"),
    *("LOP3", "ULOP3", "USEL", "SEL", "ULEA", "LEA", "SHF", "USHF"),
)
_DEEPEST = 24


class _Instruction(NamedTuple):
    name: str
    operands: list[str]
    text: str


def disassemble(cubin: bytes) -> str:
    """The instructions of a compiled kernel."""
    return said_of(cubin, triton.knobs.nvidia.nvdisasm.path, "-c")


def said_of(cubin: bytes, *command: str) -> str:
    """What a tool says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def lost_addresses(assembly: str) -> list[str]:
    """The ``wgmma`` instructions that read from no address in shared memory, each with the reason.

    Definitions are looked for backwards in the order of the text, not along the branches.
    """
    code = [
        _Instruction(name, [operand.strip() for operand in operands.split(",")], f"{name} {operands}")
        for name, operands in _LINE.findall(assembly)
    ]
    written: dict[str, list[int]] = {}
    for at, instruction in enumerate(code):
        for register in _written(instruction):
            written.setdefault(register, []).append(at)

    def wrong(register: str, before: int, depth: int = 0) -> str:
        """Why a register holds no address; empty if it does."""
        at = max((at for at in written.get(register, ()) if at < before), default=None)
        if at is None or depth > _DEEPEST:
            return f"{register} is never written"
        name, operands, text = code[at]
        if any((cut in name and operands[-1] == bits) or (bits in operands and cut in name) for cut, bits in _CUT):
            return ""
        if name.startswith("LD"):  # spilled
            return ""
        sources = [register for operand in operands[1:] for register in _REGISTER.findall(operand)]
        if not name.startswith(_PASSED_ON) or not sources:
            return f"{register} comes from {text}"
        reasons = [wrong(source, at, depth + 1) for source in sources]
        return "" if "" in reasons else reasons[0]

    lost = []
    for at, (name, operands, text) in enumerate(code):
        found = _PRODUCT.search(text) if name.startswith("HGMMA") else None
        if found is None:
            continue
        first = int(found[1])
        # The first factor's and the second's; the first may lie in registers.
        lower = [first + 2] if re.match(r"R\d+", operands[1]) else [first, first + 2]
        reasons = [reason for reason in (wrong(f"UR{number}", at) for number in lower) if reason]
        lost += [f"{text}: {reason}" for reason in reasons[:1]]
    return lost


def _written(instruction: _Instruction) -> list[str]:
    name, operands, _ = instruction
    found = re.match(r"(U?R)(\d+)", operands[0])
    if found is None or name.startswith(_WITHOUT_RESULT):
        return []
    count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return [f"{found[1]}{int(found[2]) + place}" for place in range(count)]
