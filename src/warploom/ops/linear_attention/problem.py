"""What a call of linear attention asks for, apart from its tensors."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """Options of the operator."""

    kind: str  # none, rotate, interleaved or cosine
    activation: str
    causal: bool
    scale: float
    return_state: bool
