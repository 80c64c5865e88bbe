"""Delta rule attention over ranks as an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.distributed.agreement import agree
from warploom.distributed.delta_attention.calls import (
    DIFFERENTIABLE,
    ContextDeltaCall,
    ContextDeltaOptions,
    count_sequences,
    state_dtype,
)
from warploom.distributed.delta_attention.forward_backward import backward, forward
from warploom.distributed.ranks import Bounds, bounds_of, group_named
from warploom.distributed.segments import LAYOUT, make_part
from warploom.errors import dtype_of
from warploom.ops.delta_attention.call import DeltaInputs
from warploom.runtime.dispatch import CustomOperator, Gradient, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

NAME = "context_parallel_delta_attention"


def _agree_on(inputs: DeltaInputs, offset: int, options: ContextDeltaOptions) -> Bounds:
    """Compare the ranks' calls; returns the bounds of the whole."""
    (batch, tokens, *keys), values = inputs.q.shape, inputs.v.shape[2:]
    read = None if inputs.cu_seqlens is None else bounds_of(inputs.cu_seqlens)
    call = dict(zip(("B", "Hk", "D", "H", "E"), (batch, *keys, *values)))
    call |= {"dtype": dtype_of(inputs.q), "offset": offset, **dict(zip(options._fields[:-1], options))}
    for name in ("theta", "decay", "initial_state", "offsets"):
        x = getattr(inputs, name)
        call[f"{name} of dimensions"] = None if x is None else x.dim()
    return agree(NAME, group_named(options.group), "q", tokens, call, read, LAYOUT).bounds


def _call_of(inputs: DeltaInputs, offset: int, options: ContextDeltaOptions, bounds: Bounds) -> ContextDeltaCall:
    """Returns a call that the ranks have agreed on."""
    group, batch, device = group_named(options.group), inputs.q.shape[0], inputs.q.device
    part = make_part(bounds, inputs.cu_seqlens is not None, batch, group.size(), group.rank(), device)
    return ContextDeltaCall(inputs, offset, options, bounds, part, group)


def _forward(tensors: Tensors, offset: int, options: ContextDeltaOptions, plans: Plans) -> Tensors:
    """Returns outputs and last states; for the backward the state before this rank, its map, and bounds."""
    inputs = DeltaInputs(*tensors)
    bounds = _agree_on(inputs, offset, options)
    return *forward(_call_of(inputs, offset, options, bounds)), torch.tensor(bounds)


def _fake(tensors: Tensors, options: ContextDeltaOptions) -> Tensors:
    inputs = DeltaInputs(*tensors)
    (batch, _, _, features), (heads, values) = inputs.q.shape, inputs.v.shape[2:]
    bounds = torch.empty(2 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0], dtype=torch.int64)
    sequences = count_sequences(inputs) if options.return_state else 0
    last, carried, own_map = (
        inputs.q.new_empty(shape, dtype=state_dtype(inputs))
        for shape in (
            (sequences, heads, features, values),
            (batch, heads, features, values),
            (batch, heads, features, features),
        )
    )
    return empty_in_order_of(inputs.v, values), last, carried, own_map, bounds


def _save(
    tensors: Tensors, options: ContextDeltaOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Returns this rank's part, and what `_forward` returns for the backward."""
    return (*tensors, *results[2:]), ()


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: ContextDeltaOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns gradients of q, k, v, beta, decay, theta and the first state."""
    *tensors, carried, own_map, bounds = saved
    call = _call_of(DeltaInputs(*tensors), offset, options, tuple(bounds.tolist()))
    return backward(call, grads, carried, own_map, wanted)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: ContextDeltaOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    rows = (empty_in_order_of(x, x.shape[3]) for x in saved[:3])
    return *rows, *(None if x is None else torch.empty_like(x) for x in saved[3:DIFFERENTIABLE])


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? decay, Tensor? theta, Tensor? initial_state, "
    "Tensor? offsets, Tensor? cu_seqlens"
)
OPERATOR = CustomOperator(
    name=NAME,
    any_backend=True,
    tensors=_TENSORS,
    number="SymInt offset",
    options="str kind, bool normalize, float scale, bool return_state, bool kernels, str group",
    num_results=5,
    options_type=ContextDeltaOptions,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=f"{_TENSORS}, Tensor carried, Tensor own_map, Tensor bounds",
        num_gradients=DIFFERENTIABLE,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
)
