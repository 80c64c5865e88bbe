"""Rotary positions and causal attention, from one projection to queries, keys and values, as a single operator.

It runs the kernels of `warploom.lrpe_rotate` and `warploom.flash_attention`. One after the other, these leave the
gradients of queries, keys and values in tensors of their own, which autograd then copies side by side, once for the
positions and once for the projection. Here the kernels write them where they belong, and a layer enters PyTorch's
dispatcher once in each direction, where a small model waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.rotary_attention.call import RotaryInputs, RotaryOptions, split_keys, split_values
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.modes import count_attention_pairs
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.rotary_attention import engine
else:
    engine = LazyModule(".engine", __package__)

Tensor = torch.Tensor


def _forward(inputs: RotaryInputs, _: int, options: RotaryOptions, plans: Plans) -> Tensors:
    return engine.forward(inputs, options, plans)


def _fake(inputs: RotaryInputs, options: RotaryOptions) -> Tensors:
    qkv = inputs.qkv
    batch, tokens, _, features = qkv.shape
    rotated = empty_in_order_of(split_values(qkv, options.heads)[0], features)
    out = empty_in_order_of(split_keys(rotated, options.heads)[0], features)
    return out, rotated, qkv.new_empty((2, batch, options.heads, tokens), dtype=torch.float32)


def _save(
    inputs: RotaryInputs, options: RotaryOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    return (*inputs, *results), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: RotaryOptions, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    (grad,), (qkv, theta, *results) = grads, saved
    forward = engine.RotaryResults(*results)
    return engine.backward(grad, RotaryInputs(qkv, theta), forward, options, wanted[1], plans)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: RotaryOptions, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    qkv, theta, *_ = saved
    return empty_in_order_of(qkv, qkv.shape[-1]), theta.new_empty(theta.shape) if wanted[1] else None


def _flops(inputs: Tensors, options: RotaryOptions) -> int:
    """Returns those of attention: two products for every query and key, hidden or not."""
    qkv, _ = inputs
    return 4 * count_attention_pairs(qkv, qkv, None, None) * options.heads * int(qkv.shape[3])


def _backward_flops(grads: Tensors, saved: Tensors, options: RotaryOptions) -> int:
    """Returns those of five products."""
    return _flops(saved[:2], options) // 2 * 5


OPERATOR = CustomOperator(
    name="rotary_attention",
    tensors="Tensor qkv, Tensor theta",
    options="int heads, str kind, float scale",
    num_results=3,
    inputs_type=RotaryInputs,
    options_type=RotaryOptions,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    gradient=Gradient(
        grad_outputs="Tensor grad",
        saved="Tensor qkv, Tensor theta, Tensor out, Tensor rotated, Tensor statistics",
        num_gradients=2,
        save=_save,
        run=_backward,
        fake=_backward_fake,
        flops=_backward_flops,
    ),
)
