"""States that ranks exchange: one all-gather of states and one of decays, and in the backward one of gradients."""

from __future__ import annotations

import torch

from warploom.distributed.linear_attention.calls import (
    ContextLinearCall,
    count_sequences,
    last_state,
    state_dtype,
    state_shape,
)
from warploom.distributed.ranks import gather
from warploom.ops.linear_attention.call import LinearInputs

Tensor = torch.Tensor


def decay_over(inputs: LinearInputs, tokens: slice) -> Tensor:
    """Returns the factor by which states have decayed behind tokens: (B, H), the product of their decays."""
    q, decay = inputs.q, inputs.decay
    if decay is None:
        return torch.ones((q.shape[0], q.shape[2]), dtype=state_dtype(inputs), device=q.device)
    count = max(tokens.stop - tokens.start, 0)
    total = decay.double() * count if decay.dim() == 1 else decay[:, tokens].double().sum(1)
    factor: Tensor = total.expand(q.shape[0], -1).exp()
    return factor.to(state_dtype(inputs))


def compute_carried(call: ContextLinearCall) -> tuple[Tensor, Tensor]:
    """Returns what `exchange_states` returns, from this rank's tokens."""
    inputs, segment = call.inputs, call.part.send
    if segment is None:
        own = inputs.q.new_zeros(state_shape(inputs, call.options, inputs.q.shape[0]), dtype=state_dtype(inputs))
        return exchange_states(own, decay_over(inputs, slice(0, 0)), call)
    initial = inputs.initial_state
    initial = None if initial is None or segment.continued else initial[segment.sequences]
    own = last_state(*call.at(segment, initial), call.plans)
    return exchange_states(own, decay_over(inputs, segment.tokens), call)


def exchange_states(own: Tensor, factor: Tensor, call: ContextLinearCall) -> tuple[Tensor, Tensor]:
    """Exchange the states that ranks leave behind and the decays over their tokens.

    Returns:
        The state before this rank, (B, H, F, E), and the decay over each rank, (W, B, H).
    """
    states, factors = gather(own, call.group), gather(factor, call.group)
    rank = call.group.rank()
    state = states[0].clone() if rank else torch.zeros_like(own)
    for other in range(1, rank):
        decayed = states[other], factors[other, :, :, None, None], state
        state = torch.addcmul(*decayed) if call.part.passed[other] else states[other].clone()
    return state, factors


def exchange_gradients(own: Tensor, factors: Tensor, call: ContextLinearCall) -> Tensor:
    """Returns the gradient of the state behind this rank, from those of the states before each rank."""
    every, rank, last = gather(own, call.group), call.group.rank(), call.group.size() - 1
    grad_state = every[last] if rank < last else torch.zeros_like(own)
    for other in range(last - 1, rank, -1):
        decayed = every[other], factors[other, :, :, None, None], grad_state
        grad_state = torch.addcmul(*decayed) if call.part.passed[other] else every[other]
    return grad_state


def compute_total(call: ContextLinearCall) -> Tensor:
    """Returns the states of all tokens of each sequence, (S, H, F, E), for attention that is not causal."""
    shape = state_shape(call.inputs, call.options, count_sequences(call.inputs))
    own = call.inputs.q.new_zeros(shape, dtype=state_dtype(call.inputs))
    for segment in call.part.segments:
        own[segment.sequences] = last_state(*call.at(segment, None), call.plans)
    return gather(own, call.group).sum(0)
