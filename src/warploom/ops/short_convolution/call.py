"""A call of the short convolution: its tensors, its options, and the sizes that follow from both."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class ConvolutionInputs(NamedTuple):
    """The tensors of a call, by the same names from the public function to the kernels."""

    x: Tensor  # (B, N, C)
    weight: Tensor  # (C, K)
    bias: Tensor | None  # (C,)
    initial_state: Tensor | None  # (S, C, K − 1)
    cu_seqlens: Tensor | None

    @property
    def sequences(self) -> int:
        """Packed sequences, or batch entries."""
        return int(self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape (S, C, K − 1) of the states of all sequences."""
        return self.sequences, int(self.x.shape[2]), int(self.weight.shape[1]) - 1


class ConvolutionOptions(NamedTuple):
    """The options of a call."""

    activation: str  # none or silu
    return_state: bool
