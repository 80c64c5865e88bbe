"""What a call of attention is about besides its factors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.tpa.problem import logit_unit

Tensor = torch.Tensor


class Call(NamedTuple):
    """What a call is about besides its factors."""

    cu_seqlens: Tensor | None
    causal: bool
    scale: float
    scale_q: float
    scale_k: float
    scale_v: float

    def logit_scale(self, dtype: torch.dtype) -> float:
        """From ``Q · K``, where K is without its scale, to a logit in the unit of the kernels for ``dtype``."""
        return self.scale * self.scale_k * logit_unit(dtype)

    def tiles(self, tokens: int, size: int) -> int:
        """Tiles of ``size`` tokens, as many as the kernels' ``tiles_of`` says."""
        return -(-tokens // size) if self.cu_seqlens is None else tokens // size + self.packed[0]

    @property
    def packed(self) -> tuple[int, int]:
        """Number of packed sequences, and the stride of their bounds."""
        return (0, 0) if self.cu_seqlens is None else (self.cu_seqlens.shape[0] - 1, self.cu_seqlens.stride(0))
