"""A call of delta rule attention: its tensors, its options, and the sizes that follow from both."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class DeltaInputs(NamedTuple):
    """The tensors of a call, by the same names from the public function to the kernels."""

    q: Tensor  # (B, N, Hk, D)
    k: Tensor
    v: Tensor  # (B, N, H, E)
    beta: Tensor  # (B, N, H)
    decay: Tensor | None  # (B, N, H) or (B, N, H, D)
    theta: Tensor | None
    initial_state: Tensor | None  # (S, H, D, E)
    offsets: Tensor | None  # () or (B,), where the offset is a tensor
    cu_seqlens: Tensor | None


class DeltaOptions(NamedTuple):
    """The options of a call."""

    kind: str  # none, rotate or interleaved
    normalize: bool
    scale: float
    return_state: bool


class DeltaCall(NamedTuple):
    """A call apart from what tensors hold: sizes, and how sequences are cut into chunks."""

    inputs: DeltaInputs
    options: DeltaOptions
    chunk: int  # tokens of a chunk

    @property
    def features(self) -> int:
        """Features of a query or key."""
        return int(self.inputs.q.shape[3])

    @property
    def heads(self) -> int:
        """Heads of values."""
        return int(self.inputs.v.shape[2])

    @property
    def group(self) -> int:
        """Heads of values for each head of queries and keys."""
        return self.heads // int(self.inputs.q.shape[2])

    @property
    def values(self) -> int:
        """Features of a value."""
        return int(self.inputs.v.shape[3])

    @property
    def decay(self) -> str:
        """Kind of decays: ``none``, ``head`` or ``feature``."""
        decay = self.inputs.decay
        return "none" if decay is None else "head" if decay.dim() == 3 else "feature"

    @property
    def sequences(self) -> int:
        """Packed sequences, or batch entries."""
        cu_seqlens = self.inputs.cu_seqlens
        return int(self.inputs.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    @property
    def chunks(self) -> int:
        """Chunks of a batch entry."""
        return -(-int(self.inputs.q.shape[1]) // self.chunk)

    @property
    def slots(self) -> int:
        """Chunks of all sequences; see `warploom.device.packed`."""
        if self.inputs.cu_seqlens is None:
            return self.sequences * self.chunks
        return int(self.inputs.q.shape[1]) // self.chunk + self.sequences

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape (S, H, D, E) of the states of all sequences."""
        return self.sequences, self.heads, self.features, self.values

    @property
    def half(self) -> bool:
        """True if numbers have 16 bits."""
        return self.inputs.q.dtype != torch.float32

    @property
    def encoded(self) -> bool:
        """True if queries and keys are not used as they come."""
        return self.options.normalize or self.options.kind != "none"
