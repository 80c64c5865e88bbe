"""Launches of the Triton kernels of attention with a mask, a bias or slopes: see `masked`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.problem import LOG2_E, Call, Masking, bounds
from warploom.ops.flash_attention.triton.launch import PRODUCTS
from warploom.ops.flash_attention.triton.masked import (
    BiasStrides,
    MaskingSizes,
    masked_bias_kernel,
    masked_forward_kernel,
    masked_key_kernel,
    masked_query_kernel,
)
from warploom.ops.flash_attention.triton.tiles import ForwardStrides, Sizes, TritonConfig
from warploom.runtime.launch import Launch, architecture
from warploom.runtime.layout import layout_for

Tensor = torch.Tensor

Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, and the output or its gradient."""

_ROWS = ("q", "k", "v", "grad", "lse", "delta", "inverse")
_OF_ROWS = ("tiles", "listed", "bits", "column_bits", "bias", "alibi")
_OF_COLUMNS = ("tiles", "listed", "bits", "bias", "alibi")


class Tiles(NamedTuple):
    """Queries and keys of a tile, and how a kernel is compiled for it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def product_of(call: Call) -> str:
    """Returns how factors are multiplied: see `warploom.device.product`."""
    if call.dtype != torch.float32:
        return "ieee"
    if call.shape.width > 128 and call.precision == "highest":
        return "ieee"
    return PRODUCTS[call.precision]


def tiles_of(call: Call, masking: Masking, backward: bool) -> Tiles:
    """Returns the tiles of a call, which lie within those of a mask and fit in 99 KiB of shared memory."""
    wide, tokens = call.shape.width, call.shape.tokens
    if call.dtype == torch.float32:
        tiles = Tiles(32, 32, 4, 1) if backward or wide > 64 else Tiles(64, 32, 4, 2)
    elif backward:
        tiles = Tiles(64, 64, 8, 2) if wide <= 64 else Tiles(64, 32, 8, 1) if wide <= 128 else Tiles(32, 32, 8, 1)
    else:
        tiles = Tiles(128, 64, 8, 2) if wide <= 128 else Tiles(64, 32, 8, 1)
        if wide == 128 and architecture(call.device) != 90:  # where larger ones spill 2 KB a thread
            tiles = Tiles(64, 64, 8, 2)
    if masking.bias is not None:  # which would be copied ahead too
        tiles = tiles._replace(stages=1)
    least = max(1 << (tokens - 1).bit_length(), 16)
    return tiles._replace(block_m=min(tiles.block_m, least))


def plan_forward(call: Call, masking: Masking, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Launch:
    """Returns the launch of the forward."""
    tiles = tiles_of(call, masking, False)
    takes = ("q", "k", "v", "out", "lse", "statistics", "sink", "seqused_k", *_OF_ROWS)
    blocks, heads = -(-call.shape.tokens // tiles.block_m), call.shape.heads
    return _plan(masked_forward_kernel, takes, blocks, heads, call, masking, tiles, (q, k, v, out))


def plan_query(call: Call, masking: Masking, rows: Rows) -> Launch:
    """Returns the launch for the gradient of queries; ``rows`` are q, k, v and the gradient of the output."""
    tiles = tiles_of(call, masking, True)
    blocks, heads = -(-call.shape.tokens // tiles.block_m), call.shape.heads
    takes = (*_ROWS, "dq", "seqused_k", *_OF_ROWS)
    return _plan(masked_query_kernel, takes, blocks, heads, call, masking, tiles, rows)


def plan_key(call: Call, masking: Masking, rows: Rows) -> Launch:
    """Returns the launch for the gradients of keys and values."""
    tiles = tiles_of(call, masking, True)
    blocks, heads = -(-call.shape.keys // tiles.block_n), call.shape.key_heads
    takes = (*_ROWS, "dk", "dv", "seqused_k", *_OF_COLUMNS)
    return _plan(masked_key_kernel, takes, blocks, heads, call, masking, tiles, rows)


def plan_bias(call: Call, masking: Masking, bias: Tensor, rows: Rows) -> Launch:
    """Returns the launch for the gradient of a bias."""
    shape, tiles = call.shape, tiles_of(call, masking, True)
    sum_rows = bias.shape[2] == 1
    blocks = 1 if sum_rows else -(-shape.tokens // tiles.block_m)
    programs = -(-shape.keys // tiles.block_n) * blocks * bias.shape[0] * bias.shape[1]
    takes = (*_ROWS, "dbias", "seqused_k", "tiles", "bits", "bias", "alibi")
    arguments = _arguments(call, masking, tiles, blocks, *rows)
    return Launch(masked_bias_kernel, programs, takes=takes, SUM_ROWS=sum_rows, **arguments)


def _plan(
    kernel: Any, takes: tuple[str, ...], blocks: int, heads: int, call: Call, masking: Masking, tiles: Tiles,
    rows: Rows,
) -> Launch:  # fmt: skip
    """Returns a launch with a program for each block of rows of each head."""
    arguments = _arguments(call, masking, tiles, blocks, *rows)
    return Launch(kernel, blocks * call.shape.batch_size * heads, takes=takes, **arguments)


def _arguments(
    call: Call, masking: Masking, tiles: Tiles, blocks: int, q: Tensor, k: Tensor, v: Tensor, other: Tensor
) -> dict[str, Any]:
    """Returns what all kernels are launched with; ``other`` is the output or its gradient."""
    shape, mask = call.shape, call.mask
    scale, cap = call.scale * LOG2_E, None
    if call.softcap is not None:
        scale, cap = call.scale / call.softcap, call.softcap * LOG2_E
    layout, bias = layout_for(Strides, q, k, v, other), _layout_of(masking.bias)
    sizes = Sizes(
        shape.tokens, shape.keys, shape.heads, shape.group, blocks, 1, 1, 0, 0, 0, *bounds(shape, mask), scale,
        shape.batch_size,
    )  # fmt: skip
    config = TritonConfig(
        mask.left is not None, mask.right is not None, False, layout.vec, layout.unit, layout.wide, shape.head_dim,
        shape.value_dim, product_of(call), tiles.block_m, tiles.block_n, shape.block_d, shape.block_e, False, cap,
        None, None, bias.unit, bias.vec,
    )  # fmt: skip
    return {
        "sizes": sizes,
        "masking_sizes": _sizes_of(masking, bias.strides, call.scale),
        "strides": ForwardStrides(*layout.strides),
        "config": config,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


class _BiasLayout(NamedTuple):
    """Memory of a bias: whether keys are adjacent, and a divisor of all other strides, which come divided by it."""

    unit: bool
    vec: int
    strides: BiasStrides


def _layout_of(bias: Tensor | None) -> _BiasLayout:
    if bias is None:
        return _BiasLayout(False, 1, BiasStrides(0, 0, 0, 0))
    *others, last = (0 if n == 1 else s for n, s in zip(bias.shape, bias.stride()))
    vec = next(d for d in (8, 1) if all(x % d == 0 for x in others)) if last == 1 else 1
    return _BiasLayout(last == 1, vec, BiasStrides(*(x // vec for x in others), last))


def _sizes_of(masking: Masking, bias: BiasStrides, grad_scale: float) -> MaskingSizes:
    mask_b = mask_h = rows = columns = 0
    if masking.tiles is not None:
        batches, heads, rows, columns = masking.tiles.shape
        mask_b, mask_h = heads if batches > 1 else 0, 1 if heads > 1 else 0
    alibi_b = alibi_h = 0
    if masking.alibi is not None:
        *batch, alibi_h = masking.alibi.stride()
        alibi_b = batch[0] if batch else 0
    batches, heads = (1, 1) if masking.bias is None else masking.bias.shape[:2]
    return MaskingSizes(mask_b, mask_h, rows, columns, alibi_b, alibi_h, bias, batches, heads, grad_scale)
