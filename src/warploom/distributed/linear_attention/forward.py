"""The forward of linear attention over ranks."""

from __future__ import annotations

from typing import Any

import torch

from warploom.distributed.linear_attention.calls import (
    ContextLinearCall,
    attend,
    count_sequences,
    state_dtype,
    state_shape,
)
from warploom.distributed.linear_attention.states import (
    compute_carried,
    compute_total,
    decay_over,
    exchange_states,
)
from warploom.distributed.segments import Segment, gather_last_states
from warploom.runtime.memory_order import empty_in_order_of

Tensor = torch.Tensor


def forward(call: ContextLinearCall, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, last states, the state before this rank or of all tokens, and decays over ranks.

    Args:
        call: The call.
        states: Memory for the states before chunks, which the backward of a part in one sequence reads.
    """
    inputs, options = call.inputs, call.options
    found: list[Any] = []
    single = call.part.single if options.kernels and options.causal else None
    if single is not None:
        out, last, carried, factors = _forward_single(single, call, states)
        found.append(last)
    else:
        if options.causal:
            carried, factors = compute_carried(call)
        else:
            carried, factors = compute_total(call), decay_over(inputs, slice(0, 0))[None]
        out = empty_in_order_of(inputs.q, inputs.v.shape[3])
        for segment in call.part.segments:
            plain = call.at(segment, call.state_before(segment, carried), values=options.causal)
            out[:, segment.tokens], state = attend(*plain, options.return_state)
            found.append(state)
    if options.return_state:
        shape = state_shape(inputs, options, count_sequences(inputs))
        last = inputs.q.new_zeros(shape, dtype=state_dtype(inputs))
        if inputs.initial_state is not None:
            last.copy_(inputs.initial_state)
        return out, gather_last_states(call.part, found, last, call.group), carried, factors
    return out, inputs.q.new_empty(0, dtype=state_dtype(inputs)), carried, factors


def _forward_single(
    segment: Segment, call: ContextLinearCall, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns results of a part in one sequence, on the kernels, and what `exchange_states` returns.

    The sums of its chunks make the state that is sent, and with what is received the states that its outputs are
    of, which are kept in ``states``.
    """
    from warploom.ops.linear_attention.engine import Continuation, forward

    exchanged: list[Tensor] = []

    def carry(own: Tensor) -> Tensor:
        factor = decay_over(call.inputs, segment.tokens if segment.goes_on else slice(0, 0))
        initial = call.inputs.initial_state
        if not segment.goes_on:
            own = torch.zeros_like(own)
        elif initial is not None and not segment.continued:
            own = own + factor[:, :, None, None] * initial[segment.sequences].to(own.dtype)
        exchanged.extend(exchange_states(own, factor, call))
        before = call.state_before(segment, exchanged[0])
        return torch.zeros_like(own) if before is None else before.to(own.dtype).contiguous()

    inputs, offset, options = call.at(segment, None)
    plans = call.plans_of("forward", segment.tokens.stop)
    found = forward(inputs, options.plain(options.return_state), offset, plans, Continuation(carry, states))
    return (*found, *exchanged)  # type: ignore[return-value]
