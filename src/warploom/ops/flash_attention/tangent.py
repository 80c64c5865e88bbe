"""Flash attention in forward mode, on kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.ops.flash_attention.operator import OPERATOR_DUAL, DualInputs
from warploom.ops.flash_attention.validation import MAX_FEATURES, FlashInputs, FlashOptions
from warploom.runtime.dispatch import Tangent, apply_registered

Tensor = torch.Tensor


def attend_dual(
    inputs: FlashInputs, tangents: Any, _: int, options: FlashOptions
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns attention and lse, and their tangents, given those of q, k, v and the sink."""
    of_inputs = tangents.q, tangents.k, tangents.v, tangents.sink
    results = apply_registered(OPERATOR_DUAL, DualInputs(*inputs[:7], *of_inputs), 0, options)
    return results[:2], results[2:]


def _differentiate(inputs: FlashInputs, tangents: Any, number: int, options: FlashOptions) -> Sequence[Tensor]:
    """Returns the tangents of attention and lse."""
    return attend_dual(inputs, tangents, number, options)[1]


def _find_obstacle(inputs: FlashInputs, options: FlashOptions, given: Sequence[bool]) -> str | None:
    if inputs.on_cache or inputs.block_table is not None:
        return "the kernels take no keys in a cache or in pages"
    if max(inputs.q.shape[-1], inputs.v.shape[-1]) > MAX_FEATURES:
        return f"the kernels take {MAX_FEATURES} features at most"
    return None


TANGENT = Tangent(_differentiate, _find_obstacle, attend_dual)
