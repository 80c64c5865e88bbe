"""Attention on kernels: what dispatch asks of ``torch.ops.warploom.tpa_attention`` and of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.tpa.call import FACTORS, AttentionInputs, AttentionOptions, flops_of_pairs, flops_of_products
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.tpa.attention import engine
else:
    engine = LazyModule(".engine", __package__)


def _forward(inputs: AttentionInputs, _: int, options: AttentionOptions, plans: Plans) -> Tensors:
    """Returns the output, and the statistics from which the backward computes the weights again."""
    return engine.forward(inputs, options, plans)


def _fake(inputs: AttentionInputs, options: AttentionOptions) -> Tensors:
    aq, bq = inputs.aq, inputs.bq
    statistics = bq.new_empty((2, bq.shape[0], inputs.ak.shape[2], bq.shape[1]), dtype=torch.float32)
    return empty_in_order_of(bq if aq is None else aq, inputs.bv.shape[-1]), statistics


def _save(
    inputs: AttentionInputs, options: AttentionOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    return (*inputs, *results), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: AttentionOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of the six factors."""
    *inputs, out, statistics = saved
    return engine.backward(grads[0], out, statistics, AttentionInputs(*inputs), options, plans)


def _backward_fake(grads: Tensors, saved: Tensors, *_: Any) -> Tensors:
    return tuple(None if x is None else empty_in_order_of(x, x.shape[-1]) for x in saved[:6])


def _flops(inputs: AttentionInputs, options: AttentionOptions) -> int:
    """Returns the operations of products of factors, and of two products for every query and key."""
    return flops_of_products(inputs) + flops_of_pairs(inputs, inputs.cu_seqlens, 1, 1)


def _backward_flops(grads: Tensors, saved: Tensors, options: AttentionOptions) -> int:
    """Returns the operations of three products for each of factors, and of five products of attention."""
    inputs = AttentionInputs(*saved[:7])
    return 3 * flops_of_products(inputs) + flops_of_pairs(inputs, inputs.cu_seqlens, 3, 2)


OPERATOR = CustomOperator(
    name="tpa_attention",
    tensors=f"{FACTORS}, Tensor? cu_seqlens",
    options="bool causal, float scale, float scale_q, float scale_k, float scale_v",
    num_results=2,
    inputs_type=AttentionInputs,
    options_type=AttentionOptions,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    gradient=Gradient(
        grad_outputs="Tensor grad",
        saved=f"{FACTORS}, Tensor? cu_seqlens, Tensor out, Tensor statistics",
        num_gradients=6,
        save=_save,
        run=_backward,
        fake=_backward_fake,
        flops=_backward_flops,
    ),
)
