"""A plain call of linear attention on a segment: on the kernels, or in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.distributed.plain_calls import PlainOperator
from warploom.distributed.ranks import Bounds
from warploom.distributed.segments import RankPart, Segment
from warploom.ops.linear_attention import reference
from warploom.ops.linear_attention.api import longest_of
from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
from warploom.ops.linear_attention.operator import OPERATOR
from warploom.runtime.plans import Plans, tensor_key

Tensor = torch.Tensor

DIFFERENTIABLE = 6  # the first inputs


class ContextLinearOptions(NamedTuple):
    """Options of linear attention over ranks."""

    kind: str
    activation: str
    causal: bool
    scale: float
    return_state: bool
    kernels: bool
    group: str

    def plain(self, return_state: bool) -> LinearOptions:
        """Returns the options of a plain call."""
        return LinearOptions(self.kind, self.activation, True, self.scale, return_state)


class ContextLinearCall(NamedTuple):
    """A call that the ranks have agreed on, as this rank computes it."""

    inputs: LinearInputs  # this rank's parts, and what all ranks have
    offset: int
    options: ContextLinearOptions
    bounds: Bounds  # the sequences of the whole
    part: RankPart
    group: Any
    plans: Plans

    def at(
        self, segment: Segment, initial: Tensor | None, *, values: bool = True
    ) -> tuple[LinearInputs, int, ContextLinearOptions]:
        """Returns inputs, offset and options of the call on a segment from the state before it.

        Without values these are zeros that take no memory, so that outputs are of the state alone.
        """
        q, k, v, theta, decay, _, offsets, _ = self.inputs
        q, k, v = (x[:, segment.tokens] for x in (q, k, v))
        v = v if values else torch.zeros((), dtype=v.dtype, device=v.device).expand(v.shape)
        decay = decay if decay is None or decay.dim() == 1 else decay[:, segment.tokens]
        offsets = None if offsets is None else offsets.long() + segment.start
        inputs = LinearInputs(q, k, v, theta, decay, initial, offsets, segment.cu_seqlens)
        return inputs, self.offset + segment.start, self.options

    def state_before(self, segment: Segment, carried: Tensor) -> Tensor | None:
        """Returns the state before a segment, from those that `states` returns."""
        initial = self.inputs.initial_state
        if not self.options.causal:
            return carried[segment.sequences]
        if segment.continued:
            return carried
        return None if initial is None else initial[segment.sequences]

    def plans_of(self, *kind: object) -> Plans:
        """Returns the kernels' plans of calls like this one."""
        return self.plans.get((*map(tensor_key, self.inputs), *self.options, *kind), Plans)


def count_sequences(inputs: LinearInputs) -> int:
    """Returns the number of sequences in the whole."""
    return int(inputs.q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1)


def state_shape(inputs: LinearInputs, options: ContextLinearOptions, sequences: int) -> tuple[int, ...]:
    """Returns the shape (S, H, F, E) of the states of so many sequences."""
    features = inputs.q.shape[3] * (2 if options.kind == "cosine" else 1)
    return sequences, inputs.q.shape[2], features, inputs.v.shape[3]


def state_dtype(inputs: LinearInputs) -> torch.dtype:
    """Returns the dtype of states."""
    return torch.promote_types(inputs.q.dtype, torch.float32)


def _run_reference(inputs: LinearInputs, offset: int, options: LinearOptions) -> Any:
    q, k, v, theta, decay, initial_state, offsets, cu_seqlens = inputs
    return reference.linear_attention(
        q, k, v, decay=decay, theta=theta, encoding="rotate" if options.kind == "interleaved" else options.kind,
        activation=options.activation, interleaved=options.kind == "interleaved",
        offset=offset if offsets is None else offsets, scale=options.scale, initial_state=initial_state,
        return_state=options.return_state, cu_seqlens=cu_seqlens, longest=longest_of(cu_seqlens),
    )  # fmt: skip


PLAIN = PlainOperator(OPERATOR, _run_reference, DIFFERENTIABLE)


def attend(
    inputs: LinearInputs, offset: int, options: ContextLinearOptions, return_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns outputs, and the last states where they are wanted."""
    return PLAIN.run(inputs, offset, options.plain(return_state), options.kernels)


def differentiate(
    grad: Tensor | None, grad_state: Tensor | None, inputs: LinearInputs, offset: int,
    options: ContextLinearOptions, wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Returns gradients of q, k, v, theta, decay and the first state, of those that are wanted and there."""
    plain = options.plain(False)
    return PLAIN.differentiate(grad, grad_state, inputs, offset, plain, options.kernels, wanted)


def last_state(inputs: LinearInputs, offset: int, options: ContextLinearOptions, plans: Plans) -> Tensor:
    """Returns the last states alone."""
    if options.kernels:
        from warploom.ops.linear_attention.engine import last_state

        return last_state(inputs, options.plain(True), offset, plans)
    state: Any = attend(inputs._replace(q=inputs.k), offset, options, True)[1]
    return state  # type: ignore[no-any-return]
