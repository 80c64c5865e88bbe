"""The launch of the Triton kernel for the backward of small problems, and which calls it takes."""

from __future__ import annotations

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.problem import (
    MaskSpec,
    Shape,
    bounds,
    in_powers_of_two,
    is_plain,
    programs_at_once,
)
from warploom.ops.flash_attention.triton.config import SMALL_BACKWARD
from warploom.ops.flash_attention.triton.small import ROWS, SmallSizes, SmallTiles, backward_small_kernel
from warploom.ops.flash_attention.triton.tiles import BackwardStrides
from warploom.runtime.launch import Launch, architecture, has_pdl
from warploom.runtime.layout import layout_for

Tensor = torch.Tensor

_ROWS: int = ROWS.value
_LONGEST = 2048


def _blocks(length: int) -> int:
    return -(-length // _ROWS)


def _few(blocks: int, heads: int, q: Tensor) -> bool:
    return blocks * heads <= 2 * programs_at_once(q.device)


def suits_backward(shape: Shape, mask: MaskSpec, scale: float, *tensors: Tensor) -> bool:
    """Returns whether a backward is a small problem, and the kernel takes it."""
    first = tensors[0]
    if first.dtype == torch.float32 or not 90 <= architecture(first.device) < 120:
        return False
    if not is_plain(shape, mask, scale) or shape.head_dim not in SMALL_BACKWARD:
        return False
    if max(shape.keys, shape.tokens * shape.group) > _LONGEST:
        return False
    layout = layout_for(Strides, *tensors)
    few = _few(_blocks(shape.tokens), shape.batch_size * shape.heads, first)
    few_keys = _few(_blocks(shape.keys), shape.batch_size * shape.key_heads, first)
    return layout.unit and not layout.wide and few and few_keys


def plan_backward(shape: Shape, mask: MaskSpec, scale: float, *tensors: Tensor) -> Launch:
    """Returns the launch on q, k, v, grad, lse, delta, dq, dk and dv; ``tensors`` are like these, without lse and delta."""
    layout, tiles = layout_for(Strides, *tensors), SMALL_BACKWARD[shape.head_dim]
    blocks, key_blocks = _blocks(shape.tokens), _blocks(shape.keys)
    pdl = has_pdl(tensors[0].device)
    return Launch(
        backward_small_kernel,
        shape.batch_size * (blocks * shape.heads + key_blocks * shape.key_heads),
        takes=("q", "k", "v", "grad", "lse", "delta", "dq", "dk", "dv"),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        pdl=pdl,
        sizes=SmallSizes(
            tokens=shape.tokens, keys=shape.keys, heads=shape.heads, group=shape.group, blocks=blocks,
            key_blocks=key_blocks, right=bounds(shape, mask)[1], scale=in_powers_of_two(scale), grad_scale=scale,
            batch_size=shape.batch_size,
        ),
        strides=BackwardStrides(*layout.strides[:4]),
        dq_strides=layout.strides[4],
        dk_strides=layout.strides[5],
        dv_strides=layout.strides[6],
        tiles=SmallTiles(mask.right is not None, layout.vec, shape.head_dim, tiles.warps, tiles.block),
        PDL=pdl,
    )  # fmt: skip
