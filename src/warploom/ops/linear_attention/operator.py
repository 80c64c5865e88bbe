"""Linear attention on kernels: what dispatch asks of ``torch.ops.warploom.linear_attention`` and of its backward."""

from __future__ import annotations

from typing import Any

import torch

from warploom.ops.linear_attention import launches
from warploom.ops.linear_attention.launches import Inputs
from warploom.ops.linear_attention.validation import Options
from warploom.runtime.dispatch import Operator, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


def _forward(tensors: Tensors, offset: int, options: Options, plans: Plans) -> Tensors:
    """Outputs and the last states."""
    return launches.forward(Inputs(*tensors), options, offset, plans)


def _fake(tensors: Tensors, options: Options) -> Tensors:
    q, _, v, _, _, _, _, cu_seqlens = tensors
    out = empty_in_order_of(q, v.shape[3])
    if not options.return_state:
        return out, None
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    features = q.shape[3] * (2 if options.kind == "cosine" else 1)
    return out, q.new_empty((sequences, q.shape[2], features, v.shape[3]), dtype=torch.float32)


OPERATOR = Operator(
    name="linear_attention",
    tensors=(
        "Tensor q, Tensor k, Tensor v, Tensor? theta, Tensor? decay, Tensor? initial_state, Tensor? offsets, "
        "Tensor? cu_seqlens"
    ),
    number="SymInt offset",
    options="str kind, str activation, bool causal, float scale, bool return_state",
    results=2,
    options_type=Options,
    forward=_forward,
    fake=_fake,
)
