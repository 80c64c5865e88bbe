"""The backward of linear attention over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.distributed.linear_attention import calls
from warploom.distributed.linear_attention.calls import (
    DIFFERENTIABLE,
    ContextLinearCall,
    count_sequences,
    state_shape,
)
from warploom.distributed.linear_attention.states import decay_over, exchange_gradients
from warploom.distributed.ranks import gather
from warploom.distributed.segments import GradientSums, Segment
from warploom.runtime.dispatch import Tensors
from warploom.runtime.memory_order import layout_of

Tensor = torch.Tensor


def backward(
    call: ContextLinearCall,
    grads: Tensors,
    states: Tensor,
    carried: Tensor,
    factors: Tensor,
    wanted: Sequence[bool],
) -> Tensors:
    """Returns gradients of q, k, v, theta, decay and the first state.

    Args:
        call: The call.
        grads: Gradients of outputs and last states.
        states: What `forward` wrote there.
        carried: What `forward` returned.
        factors: Likewise.
        wanted: Which gradients are.
    """
    grad, grad_last = grads
    decay = call.inputs.decay
    rows = (True, True, True, False, decay is not None and decay.dim() == 3, False)
    sums = GradientSums(call.inputs[:DIFFERENTIABLE], rows)
    if not call.options.causal:
        _add_full(sums, call, grad, carried, wanted)
        return tuple(sums.found)
    if call.options.return_state:  # on every rank, for all take part in the sum
        if grad_last is None:
            grad_last = carried.new_zeros(state_shape(call.inputs, call.options, count_sequences(call.inputs)))
        grad_last = gather(grad_last, call.group).sum(0)
    single = call.part.single if call.options.kernels else None
    if single is not None:
        sums.add(single, _differentiate_single(single, call, grad, grad_last, states, carried, factors, wanted))
    else:
        _add_causal(sums, call, grad, grad_last, carried, factors, wanted)
    sums.add_empty(call.bounds, grad_last, call.group)
    return tuple(sums.found)


def _add_causal(
    sums: GradientSums, call: ContextLinearCall, grad: Tensor | None, grad_last: Tensor | None, carried: Tensor,
    factors: Tensor, wanted: Sequence[bool],
) -> None:  # fmt: skip
    own = torch.zeros_like(carried)  # the gradient of the state before this rank, by its own results
    for segment in call.part.segments[:1]:
        if segment.continued:
            of_state = None if grad_last is None or segment.goes_on else grad_last[segment.sequences]
            only_state = [False] * (DIFFERENTIABLE - 1) + [True]
            found = calls.differentiate(_of(segment, grad), of_state, *call.at(segment, carried), only_state)[-1]
            own = own if found is None else found.to(own.dtype)
    grad_state = exchange_gradients(own, factors, call)
    for segment in call.part.segments:
        of_state = None if grad_last is None else grad_last[segment.sequences]
        if segment.goes_on:
            shape = state_shape(call.inputs, call.options, len(segment.sequences))
            of_state = grad_state.new_zeros(shape) if of_state is None else of_state.clone()
            of_state[-len(grad_state) :] = grad_state
        wants = [*wanted[:-1], wanted[-1] and not segment.continued]
        plain = call.at(segment, call.state_before(segment, carried))
        sums.add(segment, calls.differentiate(_of(segment, grad), of_state, *plain, wants))


def _of(segment: Segment, grad: Tensor | None) -> Tensor | None:
    """Returns the gradient of a segment's outputs."""
    return None if grad is None else grad[:, segment.tokens]


def _differentiate_single(
    segment: Segment, call: ContextLinearCall, grad: Tensor | None, grad_last: Tensor | None, states: Tensor,
    carried: Tensor, factors: Tensor, wanted: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    """Returns gradients of a part in one sequence, on the kernels, which exchange states as in the forward."""
    from warploom.ops.linear_attention.engine import Continuation, backward

    of_last = None if grad_last is None or segment.goes_on else grad_last[segment.sequences].to(carried.dtype)

    def carry(own: Tensor) -> Tensor:
        if not segment.continued:
            own = torch.zeros_like(own)
        elif of_last is not None:
            own = own + decay_over(call.inputs, segment.tokens)[:, :, None, None] * of_last
        grad_state = exchange_gradients(own, factors, call)
        return (grad_state if of_last is None else of_last).contiguous()

    inputs, offset, options = call.at(segment, call.state_before(segment, carried))
    if grad is None:
        grad = torch.zeros_like(layout_of(inputs.q, inputs.v.shape[3]), device=carried.device)
    wants = [wants and x is not None for wants, x in zip(wanted, inputs)]
    wants[-1] = wants[-1] and not segment.continued
    plans = call.plans_of("backward", segment.continued, segment.tokens.stop)
    return backward(grad, None, inputs, options.plain(False), offset, wants, plans, Continuation(carry, states))


def _add_full(
    sums: GradientSums, call: ContextLinearCall, grad: Tensor | None, total: Tensor, wanted: Sequence[bool]
) -> None:
    """Add gradients without causality, where outputs are products of queries and the state of all tokens."""
    own = torch.zeros_like(total)
    of_q, of_k, of_v, of_theta, _, _ = wanted
    for segment in call.part.segments:
        plain, wants = (
            call.at(segment, total[segment.sequences], values=False),
            [of_q, False, False, of_theta, False],
        )
        *found, of_state = calls.differentiate(_of(segment, grad), None, *plain, [*wants, True])
        own[segment.sequences] = of_state.to(own.dtype)  # type: ignore[union-attr]
        sums.add(segment, found)
    of_total = gather(own, call.group).sum(0)
    of_keys = [False, of_k, of_v, of_theta, False, False]
    for segment in call.part.segments:
        plain = call.at(segment, None)
        sums.add(segment, calls.differentiate(None, of_total[segment.sequences], *plain, of_keys))
