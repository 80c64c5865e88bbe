"""A call of attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.flash_attention.problem import Mask

Tensor = torch.Tensor


class Call(NamedTuple):
    """What a call is about besides its factors."""

    cu_seqlens: Tensor | None
    causal: bool
    scale: float
    scale_q: float
    scale_k: float
    scale_v: float

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        right = 0 if self.causal else None
        return Mask(right=right, cu_seqlens_q=self.cu_seqlens, cu_seqlens_k=self.cu_seqlens)
