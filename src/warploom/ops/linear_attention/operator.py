"""Linear attention on kernels: what dispatch asks of ``torch.ops.warploom.linear_attention`` and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.linear_attention import engine
else:
    engine = LazyModule(".engine", __package__)

Tensor = torch.Tensor


def _forward(inputs: LinearInputs, offset: int, options: LinearOptions, plans: Plans) -> Tensors:
    """Returns outputs and the last states."""
    return engine.forward(inputs, options, offset, plans)


def _fake(inputs: LinearInputs, options: LinearOptions) -> Tensors:
    q, v = inputs.q, inputs.v
    out = empty_in_order_of(q, v.shape[3])
    if not options.return_state:
        return out, None
    sequences = q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    features = q.shape[3] * (2 if options.kind == "cosine" else 1)
    return out, q.new_empty((sequences, q.shape[2], features, v.shape[3]), dtype=torch.float32)


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: LinearOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of q, k, v, theta, decay and the first state."""
    grad, grad_state = grads
    inputs = LinearInputs(*saved)
    if grad is None:
        grad = torch.zeros_like(layout_of(inputs.q, inputs.v.shape[3]), device=inputs.q.device)
    return engine.backward(grad, grad_state, inputs, options, offset, wanted, plans)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: LinearOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    rows = (empty_in_order_of(x, x.shape[3]) for x in saved[:3])
    rest = zip(saved[3:6], wanted[3:])
    return *rows, *(x.new_empty(x.shape) if x is not None and wants else None for x, wants in rest)


def _flops(inputs: LinearInputs, options: LinearOptions, products: int = 2) -> int:
    """Returns the operations of products of a state's size for every token.

    They are those of the recurrence: a key and a value into the state, and a query with it.
    """
    q, v = inputs.q, inputs.v
    features = q.shape[3] * (2 if options.kind == "cosine" else 1)
    return 2 * products * int(q.shape[0] * q.shape[1] * q.shape[2] * features * v.shape[3])


def _backward_flops(grads: Tensors, saved: Tensors, options: LinearOptions) -> int:
    """Returns the operations of five products: states again, their gradients, and those of q, k and v."""
    return _flops(LinearInputs(*saved), options, 5)


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? theta, Tensor? decay, Tensor? initial_state, Tensor? offsets, "
    "Tensor? cu_seqlens"
)
OPERATOR = CustomOperator(
    name="linear_attention",
    tensors=_TENSORS,
    number="SymInt offset",
    options="str kind, str activation, bool causal, float scale, bool return_state",
    num_results=2,
    inputs_type=LinearInputs,
    options_type=LinearOptions,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=_TENSORS,  # all: states of chunks are made again, which takes less memory than keeping them
        num_gradients=6,
        run=_backward,
        fake=_backward_fake,
        flops=_backward_flops,
    ),
)
