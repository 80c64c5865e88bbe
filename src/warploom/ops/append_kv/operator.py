"""Appending on kernels: what dispatch asks of ``torch.ops.warploom.append_kv``, which writes two of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.ops.append_kv.call import AppendInputs, AppendOptions
from warploom.runtime.dispatch import CustomOperator, LazyModule, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.append_kv import engine
else:
    engine = LazyModule(".engine", __package__)


def _forward(inputs: AppendInputs, _: int, options: AppendOptions, plans: Plans) -> Tensors:
    return (engine.append(inputs, options, plans),)


def _fake(inputs: AppendInputs, options: AppendOptions) -> Tensors:
    return (None if inputs.q is None else empty_in_order_of(inputs.q, inputs.q.shape[-1]),)


OPERATOR = CustomOperator(
    name="append_kv",
    tensors=(
        "Tensor k, Tensor v, Tensor? q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? theta, "
        "Tensor? cu_seqlens, Tensor seqused_k, Tensor? block_table"
    ),
    options="str kind",
    num_results=1,
    inputs_type=AppendInputs,
    options_type=AppendOptions,
    forward=_forward,
    fake=_fake,
    why_no_gradient="append_kv has no gradient; call it under torch.no_grad()",
)
