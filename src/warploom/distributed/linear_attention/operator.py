"""Linear attention over ranks as an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.distributed.agreement import agree
from warploom.distributed.linear_attention.backward import backward
from warploom.distributed.linear_attention.calls import (
    DIFFERENTIABLE,
    ContextLinearCall,
    ContextLinearOptions,
    count_sequences,
    state_dtype,
    state_shape,
)
from warploom.distributed.linear_attention.forward import forward
from warploom.distributed.ranks import Bounds, bounds_of, group_named
from warploom.distributed.segments import LAYOUT, make_part
from warploom.errors import dtype_of
from warploom.ops.linear_attention.call import LinearInputs
from warploom.runtime.dispatch import CustomOperator, Gradient, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

NAME = "context_parallel_linear_attention"


def _agree_on(inputs: LinearInputs, offset: int, options: ContextLinearOptions) -> Bounds:
    """Compare the ranks' calls; returns the bounds of the whole."""
    (batch, tokens, heads, features), values = inputs.q.shape, inputs.v.shape[3]
    read = None if inputs.cu_seqlens is None else bounds_of(inputs.cu_seqlens)
    call = {"B": batch, "H": heads, "D": features, "E": values, "dtype": dtype_of(inputs.q), "offset": offset}
    call |= dict(zip(options._fields[:-1], options))
    for name in ("theta", "decay", "initial_state", "offsets"):
        x = getattr(inputs, name)
        call[f"{name} of dimensions"] = None if x is None else x.dim()
    return agree(NAME, group_named(options.group), "q", tokens, call, read, LAYOUT).bounds


def _call_of(inputs: LinearInputs, offset: int, options: ContextLinearOptions, bounds: Bounds) -> ContextLinearCall:
    """Returns a call that the ranks have agreed on."""
    group, batch, device = group_named(options.group), inputs.q.shape[0], inputs.q.device
    part = make_part(bounds, inputs.cu_seqlens is not None, batch, group.size(), group.rank(), device)
    return ContextLinearCall(inputs, offset, options, bounds, part, group, OPERATOR.plans)


def _forward(tensors: Tensors, offset: int, options: ContextLinearOptions, plans: Plans) -> Tensors:
    """Returns outputs and last states; for the backward states, decays over ranks and bounds."""
    inputs: Any = LinearInputs(*tensors)
    bounds = _agree_on(inputs, offset, options)
    states = inputs.q.new_empty(_states_shape(inputs, options), dtype=torch.float32)
    out, last, carried, factors = forward(_call_of(inputs, offset, options, bounds), states)
    return out, last, states, carried, factors, torch.tensor(bounds)


def _fake(tensors: Tensors, options: ContextLinearOptions) -> Tensors:
    inputs: Any = LinearInputs(*tensors)
    q, sequences, precise = inputs.q, count_sequences(inputs), state_dtype(inputs)
    last = q.new_empty(state_shape(inputs, options, sequences) if options.return_state else 0, dtype=precise)
    carried = q.new_empty(state_shape(inputs, options, q.shape[0] if options.causal else sequences), dtype=precise)
    ranks = group_named(options.group).size() if options.causal else 1
    factors = q.new_empty((ranks, q.shape[0], q.shape[2]), dtype=precise)
    bounds = torch.empty(2 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0], dtype=torch.int64)
    states = q.new_empty(_states_shape(inputs, options), dtype=torch.float32)
    return empty_in_order_of(q, inputs.v.shape[3]), last, states, carried, factors, bounds


def _states_shape(inputs: LinearInputs, options: ContextLinearOptions) -> tuple[int, ...]:
    """Returns the shape of the states before chunks of a part in one sequence, for any number of tokens."""
    if not (options.kernels and options.causal):
        return (0,)
    from warploom.ops.linear_attention.engine import most_slots

    slots = most_slots(inputs._replace(cu_seqlens=None), options.plain(True))
    return slots, *state_shape(inputs, options, 1)[1:]


def _save(
    tensors: Tensors, options: ContextLinearOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Returns this rank's part, and what `_forward` returns for the backward."""
    return (*tensors, *results[2:]), ()


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: ContextLinearOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns gradients of q, k, v, theta, decay and the first state."""
    *tensors, states, carried, factors, bounds = saved
    inputs: Any = LinearInputs(*tensors)
    call = _call_of(inputs, offset, options, tuple(bounds.tolist()))
    return backward(call, grads, states, carried, factors, wanted)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: ContextLinearOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    rows = (empty_in_order_of(x, x.shape[3]) for x in saved[:3])
    return *rows, *(None if x is None else torch.empty_like(x) for x in saved[3:DIFFERENTIABLE])


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? theta, Tensor? decay, Tensor? initial_state, Tensor? offsets, "
    "Tensor? cu_seqlens"
)
OPERATOR = CustomOperator(
    name=NAME,
    any_backend=True,
    tensors=_TENSORS,
    number="SymInt offset",
    options="str kind, str activation, bool causal, float scale, bool return_state, bool kernels, str group",
    num_results=6,
    options_type=ContextLinearOptions,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=f"{_TENSORS}, Tensor states, Tensor carried, Tensor factors, Tensor bounds",
        num_gradients=DIFFERENTIABLE,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
)
