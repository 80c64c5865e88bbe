"""Linear attention on kernels: what dispatch asks of ``torch.ops.warploom.linear_attention`` and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.linear_attention.problem import Inputs, Options
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.linear_attention.launches import backward, forward
else:
    forward = LazyModule(".launches.forward", __package__)
    backward = LazyModule(".launches.backward", __package__)

Tensor = torch.Tensor


def _forward(tensors: Tensors, offset: int, options: Options, plans: Plans) -> Tensors:
    """Outputs and the last states."""
    return forward.forward(Inputs(*tensors), options, offset, plans)


def _fake(tensors: Tensors, options: Options) -> Tensors:
    q, _, v, _, _, _, _, cu_seqlens = tensors
    out = empty_in_order_of(q, v.shape[3])
    if not options.return_state:
        return out, None
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    features = q.shape[3] * (2 if options.kind == "cosine" else 1)
    return out, q.new_empty((sequences, q.shape[2], features, v.shape[3]), dtype=torch.float32)


def _save(
    tensors: Tensors, options: Options, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """The inputs: states of chunks are made again, which takes less memory than keeping them."""
    return tensors, ()


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Gradients of q, k, v, theta, decay and the first state."""
    grad, grad_state = grads
    inputs = Inputs(*saved)
    if grad is None:
        grad = torch.zeros_like(layout_of(inputs.q, inputs.v.shape[3]), device=inputs.q.device)
    return backward.backward(grad, grad_state, inputs, options, offset, wanted, plans)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    q, k, v, theta, decay, initial, _, _ = saved
    rows = (empty_in_order_of(x, x.shape[3]) for x in (q, k, v))
    rest = zip((theta, decay, initial), wanted[3:])
    return *rows, *(x.new_empty(x.shape) if x is not None and wants else None for x, wants in rest)


def _of_the_state(q: Tensor, v: Tensor, options: Options) -> int:
    """Operations of one product for every token, of a state's size."""
    features = q.shape[3] * (2 if options.kind == "cosine" else 1)
    return 2 * int(q.shape[0] * q.shape[1] * q.shape[2] * features * v.shape[3])


def _flops(tensors: Tensors, options: Options) -> int:
    """Those of the recurrence: a key and a value into the state, and a query with it."""
    q, _, v, *_ = tensors
    return 2 * _of_the_state(q, v, options)


def _backward_flops(grads: Tensors, saved: Tensors, options: Options) -> int:
    """Five products: states anew, their gradients, and those of q, k and v."""
    q, _, v, *_ = saved
    return 5 * _of_the_state(q, v, options)


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
    options_type=Options,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=_TENSORS,
        num_gradients=6,
        save=_save,
        run=_backward,
        fake=_backward_fake,
        flops=_backward_flops,
    ),
)
