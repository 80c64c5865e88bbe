"""Tensor-product attention in forward mode, on the kernels of flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.ops.flash_attention.reference import without_tail
from warploom.ops.flash_attention.tangent import attend_dual
from warploom.ops.flash_attention.validation import FlashInputs, FlashOptions
from warploom.ops.tpa import reference
from warploom.ops.tpa.call import AttentionInputs, AttentionOptions
from warploom.runtime.dispatch import Tangent, differentiate_forward

Tensor = torch.Tensor


def _differentiate(inputs: AttentionInputs, tangents: Any, _: int, options: AttentionOptions) -> Sequence[Tensor]:
    """Returns the tangent of the output: queries, keys and values are formed with theirs, and attend."""
    bounds = inputs.cu_seqlens

    def form(*factors: Any) -> tuple[Tensor, ...]:
        if bounds is not None:
            factors = tuple(None if x is None else without_tail(x, bounds) for x in factors)
        aq, ak, av, bq, bk, bv = factors
        q = reference.queries(aq, bq, options.scale_q)
        k, v = reference.product(ak, bk, options.scale_k), reference.product(av, bv, options.scale_v)
        return tuple(x.to(bq.dtype) for x in (q, k, v))

    formed, dformed = differentiate_forward(form, inputs[:6], tangents[:6])
    of_attention = FlashOptions(None, 0 if options.causal else None, options.scale, None)
    q, k, v = formed
    attention = FlashInputs(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    return attend_dual(attention, FlashInputs(*dformed), 0, of_attention)[1][:1]


TANGENT = Tangent(_differentiate)
