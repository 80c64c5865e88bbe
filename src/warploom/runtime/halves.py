"""A check that no number in PTX is wider than the half of a register that holds it.

LLVM computes two numbers of 32 bits at once, in the halves of a register of 64. If nothing reads the number in the
lower half, it may put a product there that does not fit, whose upper bits change the number in the upper half. Seen
with Triton 3.6 to 3.8 in a kernel with assertions, where threads took wrong columns.
"""

from __future__ import annotations

import re

_MOVE = re.compile(r"mov\.b64\s+\{_, (%r\d+)\}, (%rd\d+);")
_DEFINITION = re.compile(r"^\s*([\w.]+)\s+(%rd\d+), ([^;]+);", re.MULTILINE)


def find_spilled_halves(ptx: str) -> list[str]:
    """Returns the instructions that take the upper half of a register whose lower half is a product of 64 bits."""
    definitions: dict[str, tuple[str, str]] = {
        register: (name, operands) for name, register, operands in _DEFINITION.findall(ptx)
    }

    def is_wide(register: str) -> bool:
        return register in definitions and definitions[register][0].startswith("mul.wide")

    found = []
    for upper, register in _MOVE.findall(ptx):
        name, operands = definitions.get(register, ("", ""))
        halves = operands.split(", ") if name == "or.b64" else [register]
        found += [
            f"{upper} is the upper half of {half}, {' '.join(definitions[half])}"
            for half in halves
            if is_wide(half)
        ]
    return found
