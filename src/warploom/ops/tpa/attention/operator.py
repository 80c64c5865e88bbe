"""Attention on kernels: what dispatch asks of ``torch.ops.warploom.tpa_attention`` and of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.tpa.attention.problem import Call
from warploom.ops.tpa.problem import FACTORS, Operands, flops_of_pairs, flops_of_products
from warploom.ops.tpa.validation import AttentionOptions as Options
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.tpa.attention import engine
else:
    engine = LazyModule(".engine", __package__)

Tensor = torch.Tensor


def _forward(tensors: Tensors, _: int, options: Options, plans: Plans) -> Tensors:
    """The output, and what the backward computes the weights again from."""
    *factors, cu_seqlens = tensors
    return engine.forward(Operands(*factors), Call(cu_seqlens, *options), plans)


def _fake(tensors: Tensors, options: Options) -> Tensors:
    aq, ak, _, bq, _, bv, _ = tensors
    statistics = bq.new_empty((2, bq.shape[0], ak.shape[2], bq.shape[1]), dtype=torch.float32)
    return empty_in_order_of(bq if aq is None else aq, bv.shape[-1]), statistics


def _save(
    tensors: Tensors, options: Options, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    return (*tensors, *results), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Gradients of the six factors."""
    *factors, cu_seqlens, out, statistics = saved
    return engine.backward(grads[0], out, statistics, Operands(*factors), Call(cu_seqlens, *options), plans)


def _backward_fake(grads: Tensors, saved: Tensors, *_: Any) -> Tensors:
    return tuple(None if x is None else empty_in_order_of(x, x.shape[-1]) for x in saved[:6])


def _flops(tensors: Tensors, options: Options) -> int:
    """Products of factors for queries, keys and values, and two of attention for every query and key."""
    return flops_of_products(tensors) + flops_of_pairs(tensors, tensors[6], 1, 1)


def _backward_flops(grads: Tensors, saved: Tensors, options: Options) -> int:
    """Three for each product of factors, formed anew, and five of attention: the weights, and four gradients."""
    return 3 * flops_of_products(saved) + flops_of_pairs(saved, saved[6], 3, 2)


OPERATOR = CustomOperator(
    name="tpa_attention",
    tensors=f"{FACTORS}, Tensor? cu_seqlens",
    options="bool causal, float scale, float scale_q, float scale_k, float scale_v",
    num_results=2,
    options_type=Options,
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
