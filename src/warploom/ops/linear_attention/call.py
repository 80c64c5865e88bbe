"""A call of linear attention: its tensors, its options, and the sizes that follow from both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class LinearInputs(NamedTuple):
    """The tensors of a call, by the same names from the public function to the kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor | None
    decay: Tensor | None
    initial_state: Tensor | None
    offsets: Tensor | None  # () or (B,), where the offset is a tensor
    cu_seqlens: Tensor | None

    def places(self, offset: int) -> tuple[Any, ...]:
        """Returns the tensors of positions and decays, which every kernel takes, in the order of `PLACES`."""
        return self.theta, self.offsets, self.cu_seqlens, self.decay, offset


PLACES = ("theta", "offsets", "cu_seqlens", "decay", "offset")
"""Names of the tensors of positions and decays."""


class LinearOptions(NamedTuple):
    """The options of a call."""

    kind: str  # none, rotate, interleaved or cosine
    activation: str
    causal: bool
    scale: float
    return_state: bool


class LinearCall(NamedTuple):
    """A call apart from what tensors hold: sizes, and how sequences are cut into chunks."""

    inputs: LinearInputs
    options: LinearOptions
    chunk: int  # tokens of a chunk

    @property
    def features(self) -> int:
        """Features of a part of φ."""
        features = int(self.inputs.q.shape[3])
        return features if self.options.kind in ("none", "cosine") else features // 2

    @property
    def parts(self) -> int:
        """Parts of φ."""
        return 1 if self.options.kind == "none" else 2

    @property
    def heads(self) -> int:
        """Heads of queries, keys and values."""
        return int(self.inputs.q.shape[2])

    @property
    def values(self) -> int:
        """Features of a value."""
        return int(self.inputs.v.shape[3])

    @property
    def decay(self) -> str:
        """Kind of decays: ``none``, ``head`` or ``token``."""
        decay = self.inputs.decay
        return "none" if decay is None else "head" if decay.dim() == 1 else "token"

    @property
    def sequences(self) -> int:
        """Packed sequences, or batch entries."""
        cu_seqlens = self.inputs.cu_seqlens
        return int(self.inputs.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    @property
    def chunks(self) -> int:
        """Chunks of a batch entry."""
        return max(-(-int(self.inputs.q.shape[1]) // self.chunk), 1)

    @property
    def slots(self) -> int:
        """Chunks of all sequences; see `warploom.device.packed`."""
        if self.inputs.cu_seqlens is None:
            return self.sequences * self.chunks
        return self.sequences if self.chunks == 1 else int(self.inputs.q.shape[1]) // self.chunk + self.sequences

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape (S, H, F, E) of the states of all sequences."""
        return self.sequences, self.heads, self.parts * self.features, self.values

    @property
    def half(self) -> bool:
        """Returns whether numbers have 16 bits."""
        return self.inputs.q.dtype != torch.float32

    @property
    def state_scale(self) -> float:
        """Returns the divisor of gradients of states in memory: the scale, or 1 without tokens or causality."""
        return self.options.scale if self.options.causal and self.inputs.q.shape[1] else 1.0
