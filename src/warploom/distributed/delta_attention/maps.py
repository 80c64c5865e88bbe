"""Maps that parts make of the state before them, and their exchange: one all-gather in each direction.

A message is ``[U | M]``, (B, H, D, E + D), for the state ``M S + U`` behind a part, or ``[dS | M]`` for the
gradient ``Mᵀ dS' + dS`` of the state before it.
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.distributed.delta_attention.calls import PLAIN, ContextDeltaCall, state_dtype
from warploom.distributed.ranks import gather
from warploom.distributed.segments import Segment
from warploom.ops.delta_attention.validation import MAX_FEATURES

Tensor = torch.Tensor


def keep_state(call: ContextDeltaCall) -> Tensor:
    """Returns the message of a part without tokens: a state stays as it is."""
    *shape, values = call.state_shape
    one = torch.eye(shape[-1], dtype=state_dtype(call.inputs), device=call.inputs.q.device)
    return torch.nn.functional.pad(one, (values, 0)).expand(*shape, -1).clone()


def make_map(call: ContextDeltaCall, segment: Segment) -> Tensor:
    """Returns the message of a part that is in the middle of a sequence.

    The delta rule takes every column of a state alone, with its feature of the values. So a call gives the map of a
    state too: from a state of one, with values of 0.
    """
    options, one = call.options.plain(True), keep_state(call)
    inputs, offset = call.at(segment, one)
    features, values = inputs.q.shape[3], inputs.v.shape[3]
    calls = [inputs._replace(v=torch.nn.functional.pad(inputs.v, (0, features)))]
    if call.options.kernels and features + values > MAX_FEATURES:
        nothing = inputs.v.new_zeros(()).expand(*inputs.v.shape[:3], features)
        calls = [
            inputs._replace(initial_state=None), inputs._replace(v=nothing, initial_state=one[..., values:])
        ]  # fmt: skip
    states: list[Any] = [PLAIN.run(each, offset, options, call.options.kernels)[1] for each in calls]
    return torch.cat(states, -1)


def exchange_states(message: Tensor, call: ContextDeltaCall) -> Tensor:
    """Returns the state before this rank, (B, H, D, E), from the messages of all ranks."""
    states, maps = _split(gather(message, call.group), call)
    rank = call.group.rank()
    state = states[0] if rank else torch.zeros_like(states[0])
    for other in range(1, rank):
        state = _multiply(maps[other], state) + states[other] if call.part.passed[other] else states[other]
    return state.contiguous()


def exchange_gradients(message: Tensor, call: ContextDeltaCall) -> Tensor:
    """Returns the gradient of the state behind this rank, (B, H, D, E), from the messages of all ranks."""
    grads, maps = _split(gather(message, call.group), call)
    rank, last = call.group.rank(), call.group.size() - 1
    grad = grads[last] if rank < last else torch.zeros_like(grads[last])
    for other in range(last - 1, rank, -1):
        grad = _multiply(maps[other].mT, grad) + grads[other] if call.part.passed[other] else grads[other]
    return grad.contiguous()


def _split(messages: Tensor, call: ContextDeltaCall) -> tuple[Tensor, Tensor]:
    """Returns the states and the maps of messages."""
    values = call.state_shape[3]
    return messages[..., :values], messages[..., values:]


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a product of float32, which no setting of PyTorch's makes one of fewer bits."""
    return (a.double() @ b.double()).to(b.dtype)
