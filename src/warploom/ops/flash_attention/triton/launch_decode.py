"""Launches of the Triton kernels for few queries: which calls they take, and how these are cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.hopper import launch as hopper
from warploom.ops.flash_attention.hopper.latent import hopper_latent_kernel
from warploom.ops.flash_attention.problem import Call, Shape, bounds, programs_at_once
from warploom.ops.flash_attention.triton import launch as tiling
from warploom.ops.flash_attention.triton.config import (
    DECODE_AHEAD,
    DECODE_CHUNK,
    DECODE_EVEN,
    DECODE_MOST_CHUNKS,
    DECODE_PAGE_STAGES,
    DECODE_PROGRAMS,
    DECODE_START,
    HOPPER_LATENT,
    HOPPER_LATENT_CHUNK,
    LATENT_CHUNK,
    LATENT_FEW,
    LATENT_MOST_CHUNKS,
    LATENT_SLAB,
    PACKED_ROWS,
    Configuration,
    decode_tiles,
    latent_tiles,
)
from warploom.ops.flash_attention.triton.decode import FewQueries, Parts, combine_chunks_kernel, decode_kernel
from warploom.ops.flash_attention.triton.latent import LatentTiles, latent_kernel
from warploom.ops.flash_attention.triton.launch import Grid
from warploom.ops.flash_attention.triton.tiles import ForwardStrides, LseRows, RowTiles
from warploom.runtime.launch import Buffer, Launch, architecture, shared_memory
from warploom.runtime.layout import layout_for

Tensor = torch.Tensor

TAKES = "q", "k", "v", "out", "lse", "statistics", "sink", "seqused_k", "block_table", "cu_seqlens_q"
HOPPER_TAKES = "q", "k_desc", *TAKES[3:6], "whole", *TAKES[6:]
MOST_TOKENS = 16
"""Queries of a batch entry, at most; tiles of more queries read keys as seldom in the other kernels."""


class SplitPlan(NamedTuple):
    """A launch of the kernel, what joins the chunks that it stores, of how many parts these are, and their sizes."""

    launch: Launch
    combine: Launch | None
    parts: int
    shape: Shape
    for_hopper: bool
    sums: Buffer | None = None  # in which programs for Hopper join chunks


def suits(call: Call) -> bool:
    """Returns whether a call has few queries, or rows so long that no other kernel takes it, and one sequence each."""
    return (call.shape.tokens <= MOST_TOKENS or call.shape.is_latent) and call.mask.cu_seqlens_q is None


def _beside(call: Call, tiles: Configuration) -> int:
    """Returns how many programs a multiprocessor needs, so that one computes while the others wait for memory."""
    return 1 if tiles.key_tiles > 1 or call.shape.is_latent else 2


def _count_keys(call: Call) -> int:
    """Returns how many keys the loop of a tile goes over, about."""
    shape, mask = call.shape, call.mask
    left, right = bounds(shape, mask)
    return shape.keys if mask.left is None else min(left + shape.tokens + right, shape.keys)


def chunks_of(call: Call, tiles: Configuration, blocks: int) -> int:
    """Returns into how many chunks the keys of a head are cut, at most: as many as keep a GPU busy with one batch entry.

    A sequence has as many as its own keys fill with `_least_keys`, so that results depend neither on the batch nor on
    the size of the cache.
    """
    most = LATENT_MOST_CHUNKS if call.shape.is_latent else DECODE_MOST_CHUNKS
    wanted = -(-DECODE_PROGRAMS * _beside(call, tiles) // (call.shape.key_heads * blocks))
    return max(min(wanted, most, -(-_count_keys(call) // _least_keys(call, tiles))), 1)


def _least_keys(call: Call, tiles: Configuration) -> int:
    """Returns the keys of a chunk, at least."""
    if tiles is HOPPER_LATENT:
        return HOPPER_LATENT_CHUNK
    return LATENT_CHUNK if call.shape.is_latent else DECODE_CHUNK


def chunks_of_program(call: Call, tiles: Configuration, chunks: int, loops: int) -> int:
    """Returns how many chunks of a loop a program takes: those that make the busiest multiprocessor's work least.

    Lengths are known on the device alone. Where there are some, and loops too few to even out, it takes one chunk.
    Of a latent cache 64 rows take one or all in Triton: there is no shared memory to store one in the loop.
    """
    at_once, keys = programs_at_once(call.device), -(-_count_keys(call) // chunks)
    if call.mask.seqused_k is not None and loops < DECODE_EVEN * at_once:
        return 1
    at_once *= _beside(call, tiles)

    def work(taken: int) -> int:
        return -(-loops * -(-chunks // taken) // at_once) * (taken * keys + DECODE_START)

    if call.shape.is_latent and tiles.block_m > 16 and tiles is not HOPPER_LATENT:
        return min(chunks, 1, key=work)
    return min(range(chunks, 0, -1), key=work)


def few_queries(call: Call) -> int:
    """Returns the queries of a packed sequence, at most, that are few: as many as share a tile with all their heads.

    None are, where a query's bits must be those of any number.
    """
    rows = LATENT_FEW if call.shape.is_latent else PACKED_ROWS
    return 0 if call.chunks else max(rows // call.shape.group, 1)


def _tiles_of(call: Call, rows: int) -> Configuration:
    """Returns the tiles of so many rows of a head of keys."""
    shape, arch, in_pages = call.shape, architecture(call.device), call.mask.block_table is not None
    if shape.is_latent:
        features = shape.block_d + shape.rest_d
        copied = features if call.shared else features + shape.block_e
        return latent_tiles(arch, rows, 2 * features, 2 * copied, shared_memory(call.device), in_pages)
    tiles = decode_tiles(arch, call.dtype, shape.width, shape.block_e, rows)
    return tiles._replace(stages=tiles.stages + DECODE_PAGE_STAGES) if in_pages else tiles


def plan(call: Call, precision: str, tensors: tuple[Tensor, ...], pdl: bool) -> SplitPlan:
    """Returns the launches for tensors like q, k, v and out; if there are parts, these stand for the last.

    Packed queries are taken as those of a batch of `few_queries` each, and so are their parts.
    """
    shape = call.shape
    _, k, _, out = tensors
    cu_seqlens, packed, parts_like = call.mask.cu_seqlens_q, None, out
    if cu_seqlens is not None:
        few, sequences = few_queries(call), cu_seqlens.shape[0] - 1
        packed = FewQueries(cu_seqlens.stride(0), shape.tokens, few)
        shape = shape._replace(batch_size=sequences, tokens=few)
        call = call._replace(shape=shape)
        parts_like = torch.empty((sequences, few, shape.heads, shape.value_dim), device="meta")
    pages = 0 if call.mask.block_table is None else k.shape[0]
    rows = shape.tokens * shape.group
    own = rows if packed is None else shape.group
    tiles, obstacle = _tiles_of(call, own), hopper.latent_obstacle(call, own, k, out)
    if shape.is_latent and obstacle is None:
        tiles = HOPPER_LATENT
    blocks = -(-rows // tiles.block_m)
    loops = shape.batch_size * shape.key_heads * blocks
    chunks = chunks_of(call, tiles, blocks if packed is None else -(-shape.group // tiles.block_m))
    taken = chunks_of_program(call, tiles, chunks, loops)
    whole = taken == chunks
    results_like = out if whole else parts_like
    layout = layout_for(Strides, *tensors[:3], results_like)
    grid = Grid(tiles, blocks, loops // blocks, chunks, short=True)
    to = layout_for(Strides, *((out,) if packed is None else (out, parts_like)))
    kernel: Any = decode_kernel
    takes = TAKES
    choices: dict[str, Any] = {"LEAST": _least_keys(call, tiles), "ONE_CHUNK": taken == 1 < chunks}
    if tiles is HOPPER_LATENT:
        kernel, takes = hopper_latent_kernel, HOPPER_TAKES
        choices |= {"k_desc": hopper.latent_keys(call, k), "ONE_CHUNK": taken == 1}
    elif not shape.is_latent:
        choices["KEY_TILES"] = tiles.key_tiles
    else:
        kernel, choices = latent_kernel, {"tiles": _latent_choices(call, None), "ONE_CHUNK": taken == 1}
    launch = Launch(
        kernel,
        loops * -(-chunks // taken),
        takes=takes,
        packed=packed,
        parts=Parts(-(-chunks // taken), taken, 0 if whole else parts_like.numel() // layout.vec),
        strides=ForwardStrides(*layout.strides),
        PDL=pdl,
        **choices,
        **tiling.arguments_of(
            call, grid, layout, tiling.product_of("forward", call, precision), shape.group, pages
        ),
    )
    for_hopper, sums = tiles is HOPPER_LATENT, None
    if for_hopper and 1 < taken == chunks:
        sums = Buffer.rows((loops * tiles.block_m, shape.value_dim), torch.float32)
    if whole:
        return SplitPlan(launch, None, 1, shape, for_hopper, sums)
    results = shape.batch_size * shape.heads * shape.tokens
    block_e = min(shape.block_e, LATENT_SLAB) if shape.is_latent else shape.block_e
    combine = Launch(
        combine_chunks_kernel,
        results * -(-shape.value_dim // block_e),
        takes=("part", "part_statistics", "out", "lse", "statistics", "sink", "cu_seqlens_q"),
        pdl=pdl,
        packed=packed,
        part_strides=None if packed is None else to.strides[1],
        out_strides=to.strides[0],
        lse_rows=LseRows(results, shape.tokens, shape.heads),
        chunks=chunks,
        out_split=parts_like.numel() // to.vec,
        tiles=RowTiles(to.vec, to.unit, shape.value_dim, 1, block_e),
        AHEAD=DECODE_AHEAD,
        SPARSE=shape.is_latent,
        PDL=pdl,
        num_warps=1,
    )
    return SplitPlan(launch, combine, chunks, shape, for_hopper)


def _latent_choices(call: Call, tokens: int | None) -> LatentTiles:
    return LatentTiles(call.shape.rest_d, call.shared, LATENT_CHUNK, tokens)


def plan_many(call: Call, precision: str, tensors: tuple[Tensor, ...], cu_seqlens: Tensor) -> Launch:
    """Returns the launch for packed sequences of more than `few_queries` on a latent cache. Loops are not split."""
    shape, table = call.shape, call.mask.block_table
    tiles = _tiles_of(call, LATENT_FEW)
    tokens = max(tiles.block_m // shape.group, 1)
    blocks = -(-shape.tokens // tokens) + cu_seqlens.shape[0] - 1
    blocks *= -(-tokens * shape.group // tiles.block_m)
    layout = layout_for(Strides, *tensors)
    return Launch(
        latent_kernel,
        blocks * shape.key_heads,
        takes=TAKES,
        packed=FewQueries(cu_seqlens.stride(0), shape.tokens, few_queries(call)),
        parts=Parts(1, 1, 0),
        strides=ForwardStrides(*layout.strides),
        tiles=_latent_choices(call, tokens),
        ONE_CHUNK=True,
        PDL=False,
        **tiling.arguments_of(
            call,
            Grid(tiles, blocks, shape.key_heads, 1, short=True),
            layout,
            tiling.product_of("forward", call, precision),
            shape.group,
            0 if table is None else tensors[1].shape[0],
        ),
    )
