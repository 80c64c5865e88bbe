"""What a call of rotary attention is. Layers make it of what they have checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from warploom.runtime.dispatch import Checked, Tensors


class Options(NamedTuple):
    """Options of the operator."""

    heads: int
    kind: str  # rotate or interleaved
    scale: float


def check(name: str, tensors: Tensors, options: tuple[Any, ...], _: int) -> Checked:
    """Take a call as it is."""
    return Checked(Options(*options))
