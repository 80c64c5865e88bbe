"""Launcher of flash attention's backward for few short walks: which calls it takes, and with which tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.flash_attention.kernels.small import ROWS, backward_few_kernel
from warploom.ops.flash_attention.problem import (
    Geometry,
    Mask,
    access_to,
    bounds,
    in_powers_of_two,
    is_plain,
    programs_at_once,
)
from warploom.runtime.launch import Launch, architecture, may_start_early

Tensor = torch.Tensor


class Ways(NamedTuple):
    """How a program cuts a step of its walk."""

    ways: int  # warps
    block: int  # rows of each
    stages: int


BACKWARD = {16: Ways(4, 64, 2), 32: Ways(4, 64, 2), 64: Ways(4, 32, 3)}
"""By features; measured on an H200 with bfloat16. Gradients of longer rows do not fit in a warp's registers."""

_ROWS: int = ROWS.value
_LONGEST = 2048


def _blocks(length: int) -> int:
    return -(-length // _ROWS)


def _few(blocks: int, heads: int, q: Tensor) -> bool:
    return blocks * heads <= 2 * programs_at_once(q.device)


def suits_backward(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> bool:
    """Whether a backward has few short walks, and the kernel takes it."""
    first = tensors[0]
    if first.dtype == torch.float32 or not 90 <= architecture(first.device) < 120:
        return False
    if not is_plain(geometry, mask, scale) or geometry.features not in BACKWARD:
        return False
    if max(geometry.keys, geometry.tokens * geometry.group) > _LONGEST:
        return False
    access = access_to(*tensors)
    few = _few(_blocks(geometry.tokens), geometry.entries * geometry.heads, first)
    few_keys = _few(_blocks(geometry.keys), geometry.entries * geometry.key_heads, first)
    return access.unit and not access.wide and few and few_keys


def plan_backward(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> Launch:
    """The launch on q, k, v, grad, shift, delta, dq, dk and dv that are like ``tensors``: these without the two."""
    access, ways = access_to(*tensors), BACKWARD[geometry.features]
    blocks, key_blocks = _blocks(geometry.tokens), _blocks(geometry.keys)
    programs = geometry.entries * (blocks * geometry.heads + key_blocks * geometry.key_heads)
    early = may_start_early(tensors[0].device)
    return Launch(
        backward_few_kernel,
        programs,
        takes=("q", "k", "v", "grad", "shift", "delta", "dq", "dk", "dv"),
        num_warps=ways.ways,
        num_stages=ways.stages,
        early=early,
        tokens=geometry.tokens, keys=geometry.keys, heads=geometry.heads, group=geometry.group, blocks=blocks,
        key_blocks=key_blocks, right=bounds(geometry, mask)[1], scale=in_powers_of_two(scale), slope=scale,
        entries=geometry.entries, CAUSAL=mask.right is not None, VEC=access.vec, D=geometry.features,
        WAYS=ways.ways, BLOCK=ways.block, EARLY=early,
        **access.of("q", "k", "v", "grad", "dq", "dk", "dv"),
    )  # fmt: skip
