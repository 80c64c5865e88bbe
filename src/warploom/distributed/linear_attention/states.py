"""States that ranks exchange: one all-gather of states and one of decays, and in the backward one of gradients."""

from __future__ import annotations

from typing import Any

import torch

from warploom.distributed.linear_attention.calls import (
    ContextLinearCall,
    count_sequences,
    last_state,
    state_dtype,
    state_shape,
)
from warploom.distributed.ranks import all_gather, as_bytes
from warploom.ops.linear_attention.call import LinearInputs

Tensor = torch.Tensor


def gather(x: Tensor, group: Any) -> Tensor:
    """Returns the tensors of all ranks, (W, …)."""
    every: Tensor = x.new_empty((group.size(), *x.shape))
    if x.numel():
        all_gather(as_bytes(every), as_bytes(x.contiguous()), group=group)
    return every


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
        The state before this rank, (B, H, F, E), and the decay over each rank, (W, B, H), 0 where the state that
        leaves a rank began there.
    """
    states, factors = gather(own, call.group), gather(factor, call.group)
    factors *= call.part.passed
    rank = call.group.rank()
    state = states[0].clone() if rank else torch.zeros_like(own)
    for other in range(1, rank):
        state = torch.addcmul(states[other], factors[other, :, :, None, None], state)
    return state, factors


def exchange_gradients(own: Tensor, factors: Tensor, call: ContextLinearCall) -> Tensor:
    """Returns the gradient of the state behind this rank, from those of the states before each rank."""
    every, rank, last = gather(own, call.group), call.group.rank(), call.group.size() - 1
    grad_state = every[last] if rank < last else torch.zeros_like(own)
    for other in range(last - 1, rank, -1):
        grad_state = torch.addcmul(every[other], factors[other, :, :, None, None], grad_state)
    return grad_state


def compute_total(call: ContextLinearCall) -> Tensor:
    """Returns the states of all tokens of each sequence, (S, H, F, E), for attention that is not causal."""
    shape = state_shape(call.inputs, call.options, count_sequences(call.inputs))
    own = call.inputs.q.new_zeros(shape, dtype=state_dtype(call.inputs))
    for segment in call.part.segments:
        own[segment.sequences] = last_state(*call.at(segment, None), call.plans)
    return gather(own, call.group).sum(0)


def gather_last_states(call: ContextLinearCall, found: list[Tensor]) -> Tensor:
    """Returns the last states of all sequences on every rank, from those of this rank's segments."""
    shape, initial = state_shape(call.inputs, call.options, count_sequences(call.inputs)), call.inputs.initial_state
    last = call.inputs.q.new_zeros(shape, dtype=state_dtype(call.inputs))
    ended, there = torch.zeros_like(last), torch.zeros(len(last), dtype=torch.uint8, device=last.device)
    sequences, rows = call.part.ended
    if len(sequences):
        ended[sequences] = torch.cat(found)[rows]
        there[sequences] = 1
    if initial is not None:
        last.copy_(initial)
    every, owners = gather(ended, call.group), gather(there, call.group)
    return torch.where(owners.bool().any(0)[:, None, None, None], every.sum(0), last)
