"""The launch of the Triton kernel of flash attention in forward mode, and its tiles."""

from __future__ import annotations

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.problem import Call
from warploom.ops.flash_attention.triton.config import WIDTHS, Configuration
from warploom.ops.flash_attention.triton.jvp import jvp_kernel
from warploom.ops.flash_attention.triton.launch import SHORT, Grid, arguments_of
from warploom.ops.flash_attention.triton.launch_masked import product_of
from warploom.ops.flash_attention.triton.tiles import ForwardStrides
from warploom.runtime.launch import Launch, architecture, multiprocessors
from warploom.runtime.layout import layout_for

Tensor = torch.Tensor

_TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "sm_90": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 8, 1)),
    "16-bit": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    "float32": ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
}
"""``block_m, block_n, warps, stages`` for each of `WIDTHS`. Of wider rows two sums do not fit in registers."""


def _grid_of(call: Call, tiles: Configuration) -> Grid:
    """Returns the programs: one for each tile of queries of each head, and of packed sequences one more for each."""
    shape, bounds = call.shape, call.mask.cu_seqlens_q
    blocks = -(-shape.tokens // tiles.block_m)
    if bounds is not None:
        blocks = shape.tokens // tiles.block_m + bounds.shape[0]
    rows = shape.batch_size * shape.heads
    steps = blocks * rows * -(-shape.keys // tiles.block_n)
    return Grid(tiles, blocks, rows, 1, steps <= SHORT * multiprocessors(call.device))


def plan_jvp(call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Launch:
    """Returns the launch on tensors like these, and tangents that have their strides."""
    layout = layout_for(Strides, q, k, v, out)
    kind = "float32" if call.dtype == torch.float32 else "sm_90" if architecture(call.device) == 90 else "16-bit"
    grid = _grid_of(call, Configuration(*_TILES[kind][WIDTHS.index(call.shape.width)]))
    return Launch(
        jvp_kernel,
        grid.programs,
        takes=(
            *("q", "k", "v", "dq", "dk", "dv", "out", "lse", "dout", "dlse", "sink", "dsink"),
            *("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
        ),
        strides=ForwardStrides(*layout.strides),
        **arguments_of(call, grid, layout, product_of(call), call.shape.group),
    )
