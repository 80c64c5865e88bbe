"""LRPE on kernels: what dispatch asks of the operator ``torch.ops.warploom.lrpe`` and of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.lrpe.call import LrpeCall, LrpeInputs, LrpeOptions
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order, empty_in_order_of, memory_order
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.lrpe import engine
    from warploom.ops.lrpe.softmax_sequence import engine as over_sequence
else:
    engine = LazyModule(".engine", __package__)
    over_sequence = LazyModule(".softmax_sequence.engine", __package__)

Tensor = torch.Tensor


def _forward(inputs: LrpeInputs, offset: int, options: LrpeOptions, plans: Plans) -> Tensors:
    """Returns the encoding and, of softmax over the sequence, its statistics."""
    if options.activation == "softmax_sequence":
        return over_sequence.forward(inputs, offset, options, plans)
    return engine.forward(inputs, offset, options, plans), None


def _fake(inputs: LrpeInputs, options: LrpeOptions) -> Tensors:
    x, call = inputs.x, LrpeCall(inputs, options)
    out = empty_in_order_of(x, 2 * x.shape[-1] if options.kind == "cosine" else x.shape[-1])
    if options.activation != "softmax_sequence":
        return out, None
    return out, x.new_empty(call.statistics_shape, dtype=torch.float32)


def _save(
    inputs: LrpeInputs, options: LrpeOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Saves the tensors of positions too, so that autograd sees when one is changed in place."""
    x = inputs.x if options.reads_x(wanted[1]) else None
    return (x, *inputs[1:], results[1]), (memory_order(inputs.x),)


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: LrpeOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of x and theta."""
    (grad,), (x, *others, statistics) = grads, saved
    result = None
    if x is None:  # of which only the gradient's layout is needed
        x = result = _empty_gradient(grad, extra[0], options.kind)
    inputs = LrpeInputs(x, *others)
    if options.activation == "softmax_sequence":
        return over_sequence.backward(grad, inputs, offset, options, statistics, wanted[1], plans)
    return engine.backward(grad, inputs, offset, options, wanted[1], plans, result)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: LrpeOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    theta = saved[1]
    return _empty_gradient(grads[0], extra[0], options.kind), theta.new_empty(theta.shape) if wanted[1] else None


def _empty_gradient(grad: Tensor, order: Sequence[int], kind: str) -> Tensor:
    """Returns an uninitialised gradient of x, from that of the result and the order of x's axes in memory."""
    features = grad.shape[-1] // 2 if kind == "cosine" else grad.shape[-1]
    return empty_in_order(grad, (*grad.shape[:-1], features), order)


_POSITIONS = "Tensor? position_ids, Tensor? offsets, Tensor? cu_seqlens"
OPERATOR = CustomOperator(
    name="lrpe",
    tensors=f"Tensor x, Tensor theta, {_POSITIONS}",
    number="SymInt offset",
    options="SymInt prefix, SymInt[] grid, str kind, str activation, bool theta_gradient",
    num_results=2,  # the second is the statistics of softmax over the sequence, which its backward takes
    inputs_type=LrpeInputs,
    options_type=LrpeOptions,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor grad",
        saved=f"Tensor? x, Tensor theta, {_POSITIONS}, Tensor? statistics",
        extra_options="int[] order",
        num_gradients=2,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
    specialize=lambda options, wanted: options._replace(theta_gradient=wanted[1]),
)
