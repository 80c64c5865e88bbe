"""The short convolution on kernels: what dispatch asks of ``torch.ops.warploom.short_convolution``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.short_convolution.call import ConvolutionInputs, ConvolutionOptions
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.short_convolution import engine
else:
    engine = LazyModule(".engine", __package__)


def _forward(inputs: ConvolutionInputs, _: int, options: ConvolutionOptions, plans: Plans) -> Tensors:
    """Returns outputs and the last states."""
    return engine.forward(inputs, options, plans)


def _fake(inputs: ConvolutionInputs, options: ConvolutionOptions) -> Tensors:
    out = empty_in_order_of(inputs.x, inputs.x.shape[2])
    if not options.return_state:
        return out, None
    sequences = inputs.x.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    return out, inputs.x.new_empty((sequences, inputs.x.shape[2], inputs.weight.shape[1] - 1))


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: ConvolutionOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of x, weight, bias and the first state."""
    grad, grad_state = grads
    inputs = ConvolutionInputs(*saved)
    if grad is None:
        grad = torch.zeros_like(layout_of(inputs.x, inputs.x.shape[2]), device=inputs.x.device)
    return engine.backward(grad, grad_state, inputs, options, wanted, plans)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: ConvolutionOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    x, *rest = saved[:4]
    others = (t.new_empty(t.shape) if t is not None and wants else None for t, wants in zip(rest, wanted[1:]))
    return empty_in_order_of(x, x.shape[2]), *others


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens"
OPERATOR = CustomOperator(
    name="short_convolution",
    tensors=_TENSORS,
    options="str activation, bool return_state",
    num_results=2,
    inputs_type=ConvolutionInputs,
    options_type=ConvolutionOptions,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=_TENSORS,  # all: what comes before the activation is computed again
        num_gradients=4,
        run=_backward,
        fake=_backward_fake,
    ),
)
