"""The forward and the backward of delta rule attention over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.distributed.delta_attention.calls import (
    DIFFERENTIABLE,
    PLAIN,
    ContextDeltaCall,
    count_sequences,
    state_dtype,
)
from warploom.distributed.delta_attention.maps import exchange_gradients, exchange_states, keep_state, make_map
from warploom.distributed.ranks import gather
from warploom.distributed.segments import GradientSums, Segment, gather_last_states
from warploom.runtime.dispatch import Tensors
from warploom.runtime.memory_order import empty_in_order_of

Tensor = torch.Tensor


def forward(call: ContextDeltaCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, last states, the state before this rank, and the map of its part, (B, H, D, D)."""
    inputs, options, segments = call.inputs, call.options, call.part.segments
    out, values = empty_in_order_of(inputs.v, inputs.v.shape[3]), inputs.v.shape[3]
    found: dict[int, Tensor | None] = {}

    def attend(number: int, initial: Tensor | None, return_state: bool) -> None:
        segment = segments[number]
        plain = (*call.at(segment, initial), options.plain(return_state), options.kernels)
        out[:, segment.tokens], found[number] = PLAIN.run(*plain)

    message = keep_state(call)
    for number, segment in enumerate(segments):
        if segment.continued:
            message = make_map(call, segment) if segment.goes_on else message
            continue
        attend(number, call.first_states(segment), options.return_state or segment.goes_on)
        if segment.goes_on:
            message[..., :values] = found[number][-len(message) :]  # type: ignore[index]
    carried = exchange_states(message, call)
    if segments and segments[0].continued:
        attend(0, carried, options.return_state)
    last = inputs.q.new_zeros((count_sequences(inputs), *call.state_shape[1:]), dtype=state_dtype(inputs))
    if not options.return_state:
        last = last[:0]
    else:
        if inputs.initial_state is not None:
            last.copy_(inputs.initial_state)
        last = gather_last_states(call.part, [found[n] for n in sorted(found)], last, call.group)  # type: ignore[misc]
    return out, last, carried, message[..., values:].contiguous()


def backward(
    call: ContextDeltaCall, grads: Tensors, carried: Tensor, own_map: Tensor, wanted: Sequence[bool]
) -> Tensors:
    """Returns gradients of q, k, v, beta, decay, theta and the first state.

    Args:
        call: The call.
        grads: Gradients of outputs and last states.
        carried: What `forward` returned: the state before this rank.
        own_map: Likewise.
        wanted: Which gradients are.
    """
    grad, grad_last = grads
    inputs, options, segments = call.inputs, call.options, call.part.segments
    sums = GradientSums(inputs[:DIFFERENTIABLE], (True,) * 5 + (False,) * 2)
    if options.return_state:  # on every rank, for all take part in the sum
        if grad_last is None:
            grad_last = carried.new_zeros((count_sequences(inputs), *call.state_shape[1:]))
        grad_last = gather(grad_last, call.group).sum(0)

    def differentiate(segment: Segment, of_state: Tensor | None, wants: Sequence[bool]) -> list[Tensor | None]:
        initial = carried if segment.continued else call.first_states(segment)
        of_out = None if grad is None else grad[:, segment.tokens]
        plain = (*call.at(segment, initial), options.plain(False), options.kernels)
        return PLAIN.differentiate(of_out, of_state, *plain, wants)

    own = torch.zeros_like(carried)  # the gradient of the state before this rank, by its own results
    for segment in segments:
        if segment.goes_on and segment.continued:
            own = differentiate(segment, None, [*[False] * (DIFFERENTIABLE - 1), True])[-1]  # type: ignore[assignment]
        elif not segment.goes_on:
            of_state = None if grad_last is None else grad_last[segment.sequences]
            *found, of_first = differentiate(segment, of_state, [*wanted[:-1], wanted[-1] or segment.continued])
            if segment.continued:
                own, of_first = of_first, None  # type: ignore[assignment]
            sums.add(segment, [*found, of_first])
    behind = exchange_gradients(torch.cat((own.to(own_map.dtype), own_map), -1), call)
    for segment in segments:
        if segment.goes_on:
            shape = (len(segment.sequences), *call.state_shape[1:])
            of_state = carried.new_zeros(shape) if grad_last is None else grad_last[segment.sequences]
            of_state[-len(behind) :] = behind
            *found, of_first = differentiate(
                segment, of_state, [*wanted[:-1], wanted[-1] and not segment.continued]
            )
            sums.add(segment, [*found, of_first])
    sums.add_empty(call.bounds, grad_last, call.group)
    return tuple(sums.found)
