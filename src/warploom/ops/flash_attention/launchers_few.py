"""Launchers of flash attention's kernels for few short walks: which calls they take, and with which tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.launch import Kernel, Launch, architecture, may_start_early
from warploom.ops.flash_attention.kernels_few import ROWS, backward_few_kernel, forward_few_kernel
from warploom.ops.flash_attention.launchers_geometry import (
    UNBOUNDED,
    Geometry,
    Mask,
    access_to,
    in_powers_of_two,
    is_plain,
    programs_at_once,
)

Tensor = torch.Tensor

forward_launch = Kernel(forward_few_kernel)
backward_launch = Kernel(backward_few_kernel)


class Ways(NamedTuple):
    """How a program cuts a step of its walk."""

    ways: int  # warps
    block: int  # rows of each
    stages: int


FORWARD = {16: Ways(4, 64, 3), 32: Ways(4, 64, 3), 64: Ways(4, 32, 3), 128: Ways(4, 32, 3)}
BACKWARD = {16: Ways(4, 64, 2), 32: Ways(4, 64, 2), 64: Ways(4, 32, 3), 128: Ways(4, 16, 3)}
"""By features; measured on an H200 with bfloat16."""

_ROWS: int = ROWS.value
_LONGEST = 2048  # rows of a walk


def _blocks(length: int) -> int:
    return -(-length // _ROWS)


def suit(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> bool:
    """Whether a call with these tensors, forward or backward, has few short walks, and the kernels take it."""
    first = tensors[0]
    if first.dtype == torch.float32 or not 90 <= architecture(first.device) < 120:
        return False
    if not is_plain(geometry, mask, scale) or geometry.features > 128:
        return False
    most = programs_at_once(first.device)
    entries, group = geometry.entries, geometry.group
    few = _blocks(geometry.tokens) * entries * geometry.heads <= most
    few = few and _blocks(geometry.keys) * entries * geometry.key_heads <= most
    if not few or max(geometry.keys, geometry.tokens * group) > _LONGEST:
        return False
    access = access_to(*tensors)
    return access.unit and not access.wide


def _constants(mask: Mask, vec: int, features: int, ways: Ways) -> tuple[object, ...]:
    return (mask.right is not None, vec, features, ways.ways, ways.block)


def plan_forward(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> Launch:
    """The launch on q, k, v and out that are like ``tensors``, lse and statistics."""
    access, ways = access_to(*tensors), FORWARD[geometry.features]
    blocks, rows = _blocks(geometry.tokens), geometry.entries * geometry.heads
    numbers = (
        geometry.tokens, geometry.keys, geometry.heads, geometry.group, blocks,
        min(mask.right or 0, UNBOUNDED), in_powers_of_two(scale), geometry.entries, *access.strides,
    )  # fmt: skip
    constants = _constants(mask, access.vec, geometry.features, ways)
    return Launch(forward_launch, blocks * rows, numbers, constants, ways.ways, ways.stages)


def plan_backward(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> Launch:
    """The launch on q, k, v, grad, shift, delta, dq, dk and dv that are like ``tensors``: these without the two."""
    access, ways = access_to(*tensors), BACKWARD[geometry.features]
    blocks, key_blocks = _blocks(geometry.tokens), _blocks(geometry.keys)
    programs = geometry.entries * (blocks * geometry.heads + key_blocks * geometry.key_heads)
    numbers = (
        geometry.tokens, geometry.keys, geometry.heads, geometry.group, blocks, key_blocks,
        min(mask.right or 0, UNBOUNDED), in_powers_of_two(scale), scale, geometry.entries, *access.strides,
    )  # fmt: skip
    early = may_start_early(tensors[0].device)
    constants = (*_constants(mask, access.vec, geometry.features, ways), early)
    return Launch(backward_launch, programs, numbers, constants, ways.ways, ways.stages, early)
