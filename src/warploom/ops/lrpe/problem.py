"""What a call of LRPE is, as its launches and PyTorch's registration of the operator take it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Positions(NamedTuple):
    """Where tokens stand: what the public arguments come down to."""

    ids: torch.Tensor | None = None  # (N,), (B, N) or (B, N, k)
    offsets: torch.Tensor | None = None  # () or (B,)
    cu_seqlens: torch.Tensor | None = None  # (sequences + 1,)
    offset: int = 0
    prefix: int = 0
    grid: tuple[int, ...] = ()

    def axes(self) -> int:
        """Number of coordinates of a token."""
        if self.ids is not None:
            return self.ids.shape[2] if self.ids.dim() == 3 else 1
        return len(self.grid) or 1

    def per_batch(self) -> bool:
        """Whether the batch entries stand at different positions."""
        if self.ids is not None:
            return self.ids.dim() > 1 and self.ids.shape[0] > 1
        return self.offsets is not None and self.offsets.numel() > 1


def reads_x(activation: str, theta_gradient: bool) -> bool:
    """Whether `backward` reads ``x``: without an activation, its gradient is that of the result, turned back."""
    return activation != "none" or theta_gradient


def statistics_shape(x: torch.Tensor, positions: Positions) -> tuple[int, int, int, int]:
    """Of the columns' statistics: (groups, H, 2, D) with the features in the kernels' order."""
    groups = x.shape[0] if positions.cu_seqlens is None else positions.cu_seqlens.shape[0] - 1
    return groups, x.shape[2] if x.dim() == 4 else 1, 2, x.shape[-1]
