"""What a call of linear attention asks for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Options(NamedTuple):
    """Options of the operator."""

    kind: str  # none, rotate, interleaved or cosine
    activation: str
    causal: bool
    scale: float
    return_state: bool


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor | None
    decay: Tensor | None
    initial_state: Tensor | None
    offsets: Tensor | None
    cu_seqlens: Tensor | None

    def places(self, offset: int) -> tuple[Any, ...]:
        """What every kernel takes behind its tensors: those that say where tokens stand, and how they decay."""
        return self.theta, self.offsets, self.cu_seqlens, self.decay, offset
