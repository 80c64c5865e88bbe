"""A plain call of delta rule attention on a segment: on the kernels, or in PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.distributed.plain_calls import PlainOperator
from warploom.distributed.ranks import Bounds
from warploom.distributed.segments import RankPart, Segment
from warploom.ops.delta_attention import reference
from warploom.ops.delta_attention.call import DeltaInputs, DeltaOptions
from warploom.ops.delta_attention.operator import OPERATOR

Tensor = torch.Tensor

DIFFERENTIABLE = 7  # the first inputs


class ContextDeltaOptions(NamedTuple):
    """Options of delta rule attention over ranks."""

    kind: str
    normalize: bool
    scale: float
    return_state: bool
    kernels: bool
    group: str

    def plain(self, return_state: bool) -> DeltaOptions:
        """Returns the options of a plain call."""
        return DeltaOptions(self.kind, self.normalize, self.scale, return_state)


class ContextDeltaCall(NamedTuple):
    """A call that the ranks have agreed on, as this rank computes it."""

    inputs: DeltaInputs  # this rank's parts, and what all ranks have
    offset: int
    options: ContextDeltaOptions
    bounds: Bounds  # the sequences of the whole
    part: RankPart
    group: Any

    def at(self, segment: Segment, initial: Tensor | None) -> tuple[DeltaInputs, int]:
        """Returns inputs and offset of the call on a segment from the state before it."""
        q, k, v, beta, decay, theta, _, offsets, _ = self.inputs
        q, k, v, beta = (x[:, segment.tokens] for x in (q, k, v, beta))
        decay = None if decay is None else decay[:, segment.tokens]
        offsets = None if offsets is None else offsets.long() + segment.start
        inputs = DeltaInputs(q, k, v, beta, decay, theta, initial, offsets, segment.cu_seqlens)
        return inputs, self.offset + segment.start

    def first_states(self, segment: Segment) -> Tensor | None:
        """Returns the states of a segment's sequences before their first tokens."""
        initial = self.inputs.initial_state
        return None if initial is None else initial[segment.sequences]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape (B, H, D, E) of the state that goes from rank to rank."""
        q, v = self.inputs.q, self.inputs.v
        return q.shape[0], v.shape[2], q.shape[3], v.shape[3]


def count_sequences(inputs: DeltaInputs) -> int:
    """Returns the number of sequences in the whole."""
    return int(inputs.q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1)


def state_dtype(inputs: DeltaInputs) -> torch.dtype:
    """Returns the dtype of states."""
    return torch.promote_types(inputs.q.dtype, torch.float32)


def _run_reference(inputs: DeltaInputs, offset: int, options: DeltaOptions) -> Any:
    q, k, v, beta, decay, theta, initial_state, offsets, cu_seqlens = inputs
    longest = int(cu_seqlens.diff().max()) if cu_seqlens is not None and cu_seqlens.is_cpu else None
    return reference.delta_attention(
        q, k, v, beta,
        decay=decay, theta=theta, encoding="rotate" if options.kind == "interleaved" else options.kind,
        interleaved=options.kind == "interleaved", offset=offset if offsets is None else offsets,
        normalize=options.normalize, scale=options.scale, initial_state=initial_state,
        return_state=options.return_state, cu_seqlens=cu_seqlens, longest=longest,
    )  # fmt: skip


PLAIN = PlainOperator(OPERATOR, _run_reference, DIFFERENTIABLE)
