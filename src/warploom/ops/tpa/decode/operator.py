"""Decoding on kernels: what dispatch asks of ``torch.ops.warploom.tpa_decode``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.ops.tpa.problem import FACTORS, Operands, flops_of_pairs, flops_of_products
from warploom.ops.tpa.validation import DecodeOptions as Options
from warploom.runtime.dispatch import CustomOperator, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.tpa.decode import engine
else:
    engine = LazyModule(".engine", __package__)

Tensor = torch.Tensor


def _forward(tensors: Tensors, _: int, options: Options, plans: Plans) -> Tensors:
    aq, ak, av, bq, bk, bv, cache_seqlens = tensors
    return (engine.decode(Operands(aq, ak, av, bq, bk, bv), engine.DecodeCall(cache_seqlens, *options), plans),)


def _fake(tensors: Tensors, options: Options) -> Tensors:
    aq, _, _, bq, _, bv, _ = tensors
    return (empty_in_order_of(bq if aq is None else aq, bv.shape[-1]),)


def _flops(tensors: Tensors, options: Options) -> int:
    """Products of factors for queries, keys and values, and two of attention with the whole cache."""
    return flops_of_products(tensors) + flops_of_pairs(tensors, None, 1, 1)


OPERATOR = CustomOperator(
    name="tpa_decode",
    tensors=f"{FACTORS}, Tensor? cache_seqlens",
    options="str strategy, float scale, float scale_q, float scale_k, float scale_v",
    num_results=1,
    options_type=Options,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    why_no_gradient="tpa_decode has no gradient; tpa_attention is for training",
)
