"""The launch of flash attention's kernel for few queries: which calls it takes, and how these are cut."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.flash_attention.configs import (
    DECODE_CHUNK,
    DECODE_MOST_CHUNKS,
    DECODE_NODE,
    DECODE_PAGE_STAGES,
    DECODE_PROGRAMS,
    DECODE_WAVES,
    decode_tiles,
)
from warploom.ops.flash_attention.kernels.decode import decode_kernel
from warploom.ops.flash_attention.launches import tiling
from warploom.ops.flash_attention.launches.tiling import Call, Grid, layout_for
from warploom.ops.flash_attention.problem import bounds, programs_at_once
from warploom.runtime.launch import Launch

Tensor = torch.Tensor

MOST_TOKENS = 16
"""Of a batch entry; tiles of more queries read keys as seldom in the other kernels."""


class Plan(NamedTuple):
    """A launch of the kernel, into how many parts it cuts loops, and how many of these are a node of its tree."""

    launch: Launch
    parts: int
    node: int


def suits(call: Call) -> bool:
    """Whether a call has few queries, and every batch entry one sequence."""
    return call.shape.tokens <= MOST_TOKENS and call.mask.cu_seqlens_q is None


def chunks_of(call: Call, blocks: int) -> int:
    """Into how many chunks the keys of a head are cut: as many as keep a GPU busy with one batch entry.

    Never by the size of the batch: results depend on it.
    """
    shape, mask = call.shape, call.mask
    left, right = bounds(shape, mask)
    seen = shape.keys if mask.left is None else min(left + shape.tokens + right, shape.keys)
    wanted = -(-DECODE_PROGRAMS // (shape.key_heads * blocks))
    return max(min(wanted, DECODE_MOST_CHUNKS, seen // DECODE_CHUNK), 1)


def chunks_of_program(chunks: int, loops: int, device: torch.device) -> int:
    """How many chunks of a loop a program takes: the most with which all multiprocessors have enough to read."""
    least = DECODE_WAVES * programs_at_once(device)
    taken = [each for each in (chunks, DECODE_NODE, 1) if each <= chunks]
    return next((each for each in taken if loops * -(-chunks // each) >= least), 1)


def plan(call: Call, precision: str, tensors: tuple[Tensor, ...], pdl: bool) -> Plan:
    """The launch for tensors like q, k, v and out; if there are parts, these stand for the last."""
    shape = call.shape
    *_, out = tensors
    rows = shape.tokens * shape.group
    tiles = decode_tiles(call.dtype, shape.width, rows)
    if call.mask.block_table is not None:
        tiles = tiles._replace(stages=tiles.stages + DECODE_PAGE_STAGES)
    blocks = -(-rows // tiles.block_m)
    loops = shape.batch_size * shape.key_heads * blocks
    chunks = chunks_of(call, blocks)
    taken = chunks_of_program(chunks, loops, call.device)
    parts = -(-chunks // taken)
    layout = layout_for(*tensors)
    grid = Grid(tiles, blocks, loops // blocks, chunks, short=True)
    launch = Launch(
        decode_kernel,
        loops * parts,
        takes=("q", "k", "v", "out", "lse", "statistics", "sink", "seqused_k", "block_table"),
        parts=parts,
        chunks=taken,
        out_split=out.numel() // layout.vec if parts > 1 else 0,  # from one part to the next
        NODE=DECODE_NODE,
        PDL=pdl,
        **tiling.arguments_of(call, grid, layout, tiling.product_of("forward", call, precision), shape.group),
        **layout.of("q", "k", "v", "out"),
    )
    return Plan(launch, parts, max(DECODE_NODE // taken, 1))
