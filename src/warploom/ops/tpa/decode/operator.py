"""Decoding on kernels: what dispatch asks of ``torch.ops.warploom.tpa_decode``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.ops.tpa.call import FACTORS, DecodeInputs, DecodeOptions, flops_of_pairs, flops_of_products
from warploom.runtime.dispatch import CustomOperator, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.tpa.decode import engine
else:
    engine = LazyModule(".engine", __package__)


def _forward(inputs: DecodeInputs, _: int, options: DecodeOptions, plans: Plans) -> Tensors:
    return (engine.decode(inputs, options, plans),)


def _fake(inputs: DecodeInputs, options: DecodeOptions) -> Tensors:
    return (empty_in_order_of(inputs.bq if inputs.aq is None else inputs.aq, inputs.bv.shape[-1]),)


def _flops(inputs: DecodeInputs, options: DecodeOptions) -> int:
    """Returns the operations of products of factors, and of two products with the whole cache."""
    return flops_of_products(inputs) + flops_of_pairs(inputs, None, 1, 1)


OPERATOR = CustomOperator(
    name="tpa_decode",
    tensors=f"{FACTORS}, Tensor? seqused_k",
    options="str strategy, float scale, float scale_q, float scale_k, float scale_v",
    num_results=1,
    inputs_type=DecodeInputs,
    options_type=DecodeOptions,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    why_no_gradient="tpa_decode has no gradient; tpa_attention is for training",
)
