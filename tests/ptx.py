"""PTX as Python: pieces of assembly that go forward only, for all entries at once. Each is a warp of one thread."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor


def power_of_two(x: Tensor) -> Tensor:
    y = torch.exp2(x)
    return torch.where(y < 2.0**-126, 0.0, y)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov": lambda x: x,
    "abs": torch.abs,
    "neg": torch.neg,
    "mul": torch.mul,
    "add": torch.add,
    "fma": lambda x, y, z: x * y + z,
    "max": torch.fmax,
    "ex2": power_of_two,
    "rcp": torch.reciprocal,
    "copysign": lambda sign, size: torch.copysign(size, sign),
    "setp.gt": torch.gt,
    "vote": lambda x, _: x,
    "cvt": lambda high, low: torch.stack((low, high), -1),
}


class _Instruction(NamedTuple):
    name: str
    guard: str | None
    negated: bool
    to: str
    given: tuple[str, ...]


@functools.cache
def _instructions(text: str) -> tuple[_Instruction | str, ...]:
    """Instructions and labels."""
    parsed: list[_Instruction | str] = []
    for line in re.sub(r"(\w+):", r"\1:;", text.strip("{ }")).split(";"):
        if line.strip().endswith(":"):
            parsed.append(line.strip()[:-1])
        elif found := re.fullmatch(r"(?:@(!?)(\w+) )?([a-z][\w.]*) (.*)", line.strip()):
            to, *given = found[4].split(", ")
            name = ".".join(found[3].split(".")[: 2 if found[3].startswith("setp") else 1])
            parsed.append(_Instruction(name, found[2], bool(found[1]), to, tuple(given)))
    return tuple(parsed)


class _Warps:
    """Registers of many warps, and which of these are there."""

    def __init__(self, registers: dict[str, Tensor]) -> None:
        self.registers = registers
        self.count = len(next(iter(registers.values())))
        self.there: Tensor | None = torch.ones(self.count, dtype=torch.bool)  # None: no warp is
        self.ahead: dict[str, Tensor] = {}

    def reach(self, label: str) -> None:
        """Those that jumped to a label are there again."""
        come = self.ahead.pop(label, None)
        if come is not None:
            self.there = come if self.there is None else self.there | come

    def jump(self, label: str, which: Tensor) -> None:
        """Some go to a label."""
        assert self.there is not None
        self.ahead[label] = self.ahead[label] | which if label in self.ahead else which
        rest = self.there & ~which
        self.there = rest if bool(rest.any()) else None

    def execute(self, instruction: _Instruction) -> None:
        if self.there is None:
            return
        which = self.there
        if instruction.guard is not None:
            guard = self.registers[instruction.guard]
            which = which & (~guard if instruction.negated else guard)
        if instruction.name == "bra":
            self.jump(instruction.to, which)
            return
        known = self.registers
        operands = (known[each] if each in known else torch.tensor(float(each)) for each in instruction.given)
        result = _OPERATIONS[instruction.name](*operands)
        old = known.get(instruction.to)
        if old is not None and old.dtype == result.dtype:
            result = torch.where(which[:, None] if result.ndim > 1 else which, result, old)
        known[instruction.to] = result.expand(self.count, *result.shape[1:])


def run(text: str, constraints: str, given: list[Tensor], dtypes: list[torch.dtype], pack: int) -> list[Tensor]:
    """What ``inline_asm_elementwise`` makes of tensors of one shape, ``pack`` entries in a row at a time."""
    kinds = constraints.split(",")
    results = sum(kind.startswith("=") for kind in kinds)
    registers = {}
    entries = [column for x in given for column in x.float().reshape(-1, pack).unbind(1)]
    for i, (kind, entry) in enumerate(zip(kinds[results:], entries)):
        registers[f"${kind if kind.isdigit() else results + i}"] = entry
    warps = _Warps(registers)
    for each in _instructions(text):
        if isinstance(each, str):
            warps.reach(each)
        else:
            warps.execute(each)
    out, first = [], 0
    for dtype in dtypes:
        count = pack * dtype.itemsize // 4
        columns = [registers[f"${i}"] for i in range(first, first + count)]
        out.append(torch.stack(columns, 1).reshape(given[0].shape).to(dtype))
        first += count
    return out
