"""Delta rule attention on kernels: what dispatch asks of ``torch.ops.warploom.delta_attention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.delta_attention.call import DeltaInputs, DeltaOptions
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.delta_attention import engine
else:
    engine = LazyModule(".engine", __package__)

Tensor = torch.Tensor


def _forward(inputs: DeltaInputs, offset: int, options: DeltaOptions, plans: Plans) -> Tensors:
    """Returns outputs and the last states."""
    return engine.forward(inputs, options, offset, plans)


def _fake(inputs: DeltaInputs, options: DeltaOptions) -> Tensors:
    q, v = inputs.q, inputs.v
    out = empty_in_order_of(v, v.shape[3])
    if not options.return_state:
        return out, None
    sequences = q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    return out, q.new_empty((sequences, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: DeltaOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of q, k, v, beta, decay, theta and the first state."""
    grad, grad_state = grads
    inputs = DeltaInputs(*saved)
    if grad is None:
        grad = torch.zeros_like(layout_of(inputs.v, inputs.v.shape[3]), device=inputs.v.device)
    return engine.backward(grad, grad_state, inputs, options, offset, wanted, plans)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: DeltaOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    rows = (empty_in_order_of(x, x.shape[3]) for x in saved[:3])
    rest = zip(saved[3:7], wanted[3:])
    return *rows, *(x.new_empty(x.shape) if x is not None and wants else None for x, wants in rest)


def _flops(inputs: DeltaInputs, options: DeltaOptions, products: int = 3) -> int:
    """Returns the operations of products of a state's size for every token.

    They are those of the recurrence: what a key predicts, its correction of the state, and a query with it.
    """
    q, v = inputs.q, inputs.v
    return 2 * products * int(v.shape[0] * v.shape[1] * v.shape[2] * q.shape[3] * v.shape[3])


def _backward_flops(grads: Tensors, saved: Tensors, options: DeltaOptions) -> int:
    """Returns those of eight products: two for states anew, three for their gradients, and of q and k."""
    return _flops(DeltaInputs(*saved), options, 8)


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? decay, Tensor? theta, Tensor? initial_state, "
    "Tensor? offsets, Tensor? cu_seqlens"
)
OPERATOR = CustomOperator(
    name="delta_attention",
    tensors=_TENSORS,
    number="SymInt offset",
    options="str kind, bool normalize, float scale, bool return_state",
    num_results=2,
    inputs_type=DeltaInputs,
    options_type=DeltaOptions,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=_TENSORS,  # all: what chunks hold is made again, which takes less memory than keeping it
        num_gradients=7,
        run=_backward,
        fake=_backward_fake,
        flops=_backward_flops,
    ),
)
