"""A check that ``wgmma`` in a compiled kernel reads from addresses in shared memory.

The assembler of CUDA 12.8 (Triton 3.6 and 3.7) has a fault: if a loop stores a tile and multiplies with it, the
machine code may compute the tile's matrix descriptor from a register that holds another value, or none. The PTX is
right, but the product reads from an undefined address.

The lower half of a descriptor is the address in units of 16 bytes, cut to 14 bits, plus a constant. So on every
path that leads to a ``wgmma``, its descriptor must come from such a cut. (With two loops, the descriptors of the
second may be computed from those of the first, which is skipped if it has no work. Two addresses may be cut at
once, in the halves of a register.)
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import triton

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L_\w+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"\bU?R\d+\b(?!\])")
_PRODUCT = re.compile(r"gdesc\[UR(\d+)\]")
_CUT = (("SGXT", "0xe"), ("SGXT", "0xf"), ("LOP3", "0x3fff"), ("LOP3", "0x7fff"), ("LOP3", "0x3fff3fff"))
_WITHOUT_RESULT = ("ST", "RED", "BAR", "BRA", "HGMMA", "DEPBAR", "SYNCS", "UBLKCP", "UTMA", "EXIT")
_PASSED_ON = (
    *("UIADD3", "IADD3", "VIADD", "UMOV", "MOV", "R2UR", "IMAD", "UIMAD"),
    *("LOP3", "ULOP3", "USEL", "SEL", "ULEA", "LEA", "SHF", "USHF", "PRMT", "UPRMT"),
)


class _Instruction(NamedTuple):
    name: str
    operands: list[str]
    text: str
    always: bool
    """True if the instruction has no predicate."""


def disassemble(cubin: bytes) -> str:
    """Returns the machine instructions of a compiled kernel, as text."""
    return run_tool(cubin, triton.knobs.nvidia.nvdisasm.path, "-c")


def run_tool(cubin: bytes, *command: str) -> str:
    """Returns the output of a command on a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def find_lost_addresses(assembly: str) -> list[str]:
    """Returns the ``wgmma`` instructions that may read from an undefined address, each with the reason."""
    code, before = _parse(assembly)
    writes = [_find_written(instruction) for instruction in code]

    def find_writers(register: str, at: int) -> Iterator[int | None]:
        """Yield the last instruction to write a register, on each path to an instruction; None if there is none."""
        seen: set[int] = set()
        ways = list(before[at])
        while ways:
            place = ways.pop()
            if place is None or register in writes[place]:
                yield place
            elif place not in seen:
                seen.add(place)
                ways += before[place]

    def check_register(register: str, at: int, found: dict[tuple[str, int], str]) -> str:
        """Returns why a register holds no address before an instruction; empty if it holds one."""
        if (register, at) not in found:
            found[register, at] = ""  # in a cycle, the value before the loop decides
            reasons = (check_writer(register, writer, found) for writer in find_writers(register, at))
            found[register, at] = next((reason for reason in reasons if reason), "")
        return found[register, at]

    def check_writer(register: str, writer: int | None, found: dict[tuple[str, int], str]) -> str:
        if writer is None:
            return f"{register} is never written"
        name, operands, text, _ = code[writer]
        if any((cut in name and operands[-1] == bits) or (bits in operands and cut in name) for cut, bits in _CUT):
            return ""
        if name.startswith("LD"):  # spilled
            return ""
        sources = [register for operand in operands[1:] for register in _REGISTER.findall(operand)]
        if not name.startswith(_PASSED_ON) or not sources:
            return f"{register} comes from {text}"
        reasons = [check_register(source, writer, found) for source in sources]
        return "" if "" in reasons else reasons[0]

    lost = []
    for at, (name, operands, text, _) in enumerate(code):
        product = _PRODUCT.search(text) if name.startswith("HGMMA") else None
        if product is None:
            continue
        first = int(product[1])
        # The descriptors of the first factor, unless that is in registers, and of the second.
        lower = [first + 2] if re.match(r"R\d+", operands[1]) else [first, first + 2]
        reasons = [reason for reason in (check_register(f"UR{number}", at, {}) for number in lower) if reason]
        lost += [f"{text}: {reason}" for reason in reasons[:1]]
    return lost


def _parse(assembly: str) -> tuple[list[_Instruction], list[list[int | None]]]:
    """Returns the instructions, and for each those that can run just before it (None for the program's start)."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        for predicate, name, operands in _LINE.findall(line):
            # `BRA P1, label` has a predicate as well.
            always = not predicate and not (name.startswith("BRA") and re.search(r"\bU?P\d", operands))
            each = [operand.strip() for operand in operands.split(",")]
            code.append(_Instruction(name, each, f"{name} {operands}", always))
    before: list[list[int | None]] = [[] for _ in range(len(code) + 1)]
    before[0].append(None)
    for at, (name, _, text, always) in enumerate(code):
        target = _TARGET.search(text) if name.startswith("BRA") else None
        if target is not None and target[1] in labels:
            before[labels[target[1]]].append(at)
        if not (always and name.startswith(("BRA", "EXIT"))):
            before[at + 1].append(at)
    return code, before


def _find_written(instruction: _Instruction) -> list[str]:
    name, operands, *_ = instruction
    found = re.match(r"(U?R)(\d+)", operands[0])
    if found is None or name.startswith(_WITHOUT_RESULT):
        return []
    count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return [f"{found[1]}{int(found[2]) + place}" for place in range(count)]
