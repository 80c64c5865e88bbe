"""Launchers of flash attention's kernels for few short walks: which calls they take, and with which tiles."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from warploom.launch import Kernel, Launch, architecture, may_start_early
from warploom.ops.flash_attention.kernels_few import ROWS, backward_few_kernel, forward_few_kernel
from warploom.ops.flash_attention.launchers_geometry import (
    UNBOUNDED,
    Costs,
    Geometry,
    Mask,
    access_to,
    best_parts,
    in_powers_of_two,
    is_plain,
    programs_at_once,
    walks,
)

Tensor = torch.Tensor

forward_launch = Kernel(forward_few_kernel)
backward_launch = Kernel(backward_few_kernel)


class Ways(NamedTuple):
    """How a program cuts a step of its walk."""

    ways: int  # warps
    block: int  # rows of each
    stages: int


FORWARD = {16: Ways(4, 64, 3), 32: Ways(4, 64, 3), 64: Ways(4, 64, 3), 128: Ways(4, 16, 4)}
BACKWARD = {16: Ways(4, 64, 2), 32: Ways(4, 64, 2), 64: Ways(4, 32, 3)}
"""By features; measured on an H200 with bfloat16. Gradients of longer rows do not fit in a warp's registers."""

COSTS = {16: Costs(2, 5, 5e5), 32: Costs(2, 5, 5e5), 64: Costs(2, 5, 5e5), 128: Costs(2, 5, 5e5)}

_ROWS: int = ROWS.value
_LONGEST = {16: 4096, 32: 4096, 64: 4096, 128: 2048}  # rows of a forward's walk, by features
_LONGEST_BACKWARD = 2048


def _blocks(length: int) -> int:
    return -(-length // _ROWS)


def _few(blocks: int, heads: int, q: Tensor) -> bool:
    return blocks * heads <= 2 * programs_at_once(q.device)


def _suits(geometry: Geometry, mask: Mask, scale: float, features: Collection[int], *tensors: Tensor) -> bool:
    first = tensors[0]
    if first.dtype == torch.float32 or not 90 <= architecture(first.device) < 120:
        return False
    if not is_plain(geometry, mask, scale) or geometry.features not in features:
        return False
    access = access_to(*tensors)
    return (
        access.unit and not access.wide and _few(_blocks(geometry.tokens), geometry.entries * geometry.heads, first)
    )


def suits_forward(
    geometry: Geometry, mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> bool:
    """Whether a forward has few short walks, and the kernel takes it."""
    return _suits(geometry, mask, scale, FORWARD, q, k, v, out) and geometry.keys <= _LONGEST[geometry.features]


def suits_backward(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> bool:
    """Whether a backward has few short walks, and the kernel takes it."""
    if not _suits(geometry, mask, scale, BACKWARD, *tensors):
        return False
    few_keys = _few(_blocks(geometry.keys), geometry.entries * geometry.key_heads, tensors[0])
    return few_keys and max(geometry.keys, geometry.tokens * geometry.group) <= _LONGEST_BACKWARD


def _constants(mask: Mask, vec: int, features: int, ways: Ways) -> tuple[object, ...]:
    return (mask.right is not None, vec, features, ways.ways, ways.block)


class Plan(NamedTuple):
    """A launch, and into how many parts it cuts walks."""

    launch: Launch
    parts: int


def plan_forward(geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> Plan:
    """The launch on q, k, v and out that are like ``tensors``, lse and statistics.

    If walks are cut, ``out`` will be parts, as many in one float32 tensor, each in the memory order of ``out``, and
    so are statistics.
    """
    access, ways = access_to(*tensors), FORWARD[geometry.features]
    blocks, rows, elements = _blocks(geometry.tokens), geometry.entries * geometry.heads, tensors[-1].numel()
    device = tensors[0].device
    steps = walks("forward", geometry, mask, _ROWS, ways.ways * ways.block)
    parts = best_parts(steps, rows, programs_at_once(device), elements, COSTS[geometry.features])
    numbers = (
        geometry.tokens, geometry.keys, geometry.heads, geometry.group, blocks,
        min(mask.right or 0, UNBOUNDED), in_powers_of_two(scale), geometry.entries,
        parts, elements // access.vec if parts > 1 else 0,  # from one part to the next
        *access.strides,
    )  # fmt: skip
    constants = (*_constants(mask, access.vec, geometry.features, ways), may_start_early(device))
    launch = Launch(forward_launch, blocks * rows * parts, numbers, constants, ways.ways, ways.stages)
    return Plan(launch, parts)


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
