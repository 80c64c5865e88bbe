"""A call of LRPE: its tensors, its options, and the sizes that follow from both."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class LrpeInputs(NamedTuple):
    """The tensors of a call, by the same names from the public function to the kernels."""

    x: Tensor
    theta: Tensor
    position_ids: Tensor | None = None  # (N,), (B, N) or (B, N, k)
    offsets: Tensor | None = None  # () or (B,), where the offset is a tensor
    cu_seqlens: Tensor | None = None  # (S + 1,)


class LrpeOptions(NamedTuple):
    """The options of a call."""

    prefix: int = 0
    grid: tuple[int, ...] = ()  # empty for positions on one axis
    kind: str = "rotate"  # cosine, rotate or interleaved
    activation: str = "none"
    theta_gradient: bool = False  # whether theta's will be asked for

    def reads_x(self, theta_gradient: bool) -> bool:
        """Returns whether the backward reads ``x``: without an activation it only turns the gradient back."""
        return self.activation != "none" or theta_gradient


class LrpeCall(NamedTuple):
    """A call apart from its offset and from what its tensors hold: all that its launches depend on."""

    inputs: LrpeInputs
    options: LrpeOptions

    @property
    def heads(self) -> int:
        """Heads of ``x``, 1 if it has no axis of them."""
        x = self.inputs.x
        return int(x.shape[2]) if x.dim() == 4 else 1

    @property
    def members(self) -> int:
        """Features of ``x`` that an angle turns: 1 for ``cosine``, 2 for the pairs of ``rotate``."""
        return 1 if self.options.kind == "cosine" else 2

    @property
    def angles(self) -> int:
        """Angles of a head."""
        return int(self.inputs.x.shape[-1]) // self.members

    @property
    def axes(self) -> int:
        """Coordinates of a token."""
        ids = self.inputs.position_ids
        if ids is not None:
            return int(ids.shape[2]) if ids.dim() == 3 else 1
        return len(self.options.grid) or 1

    @property
    def per_batch(self) -> bool:
        """Returns whether batch entries stand at different positions."""
        ids, offsets = self.inputs.position_ids, self.inputs.offsets
        if ids is not None:
            return ids.dim() > 1 and ids.shape[0] > 1
        return offsets is not None and offsets.numel() > 1

    @property
    def theta_rows(self) -> int:
        """Rows of theta: the heads', or one for all."""
        theta = self.inputs.theta
        return int(theta.shape[0]) if theta.dim() == 2 else 1

    @property
    def statistics_shape(self) -> tuple[int, int, int, int]:
        """Columns' statistics of softmax over the sequence: (groups, H, 2, D), features in the kernels' order."""
        x, cu_seqlens = self.inputs.x, self.inputs.cu_seqlens
        groups = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return groups, self.heads, 2, x.shape[-1]
