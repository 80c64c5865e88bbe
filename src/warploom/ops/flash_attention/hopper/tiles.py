"""Tiles in shared memory and registers: copies of own rows, products in pieces, and stores of results.

Rows of 192 features, which no tile has, are copied in three pieces of 64, which lie in as many buffers.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import bytes_of_slot, copy_rows, matrix, thread_barrier, wait_full

ROWS = gl.constexpr(64)  # rows of a group of warps: what one matrix instruction takes
NARROW_HEAD = gl.constexpr(128)
"""Features of a head up to which results have buffers of their own. Wider ones are stored through those of the queries."""
STRIDE_UNIT = gl.constexpr(8)
"""Elements in which strides of rows in pieces are counted: 16 bytes, a multiple of which they are for descriptors."""


class SplitStrides(NamedTuple):
    """Sizes and strides of the float32 parts of a result, one for each split; or of a result that has rows to store."""

    split: gl.int32
    b: gl.int32
    n: gl.int32
    h: gl.int32
    features: gl.int32  # how many


class Result(NamedTuple):
    """The target of a result: through buffers and a descriptor, or from registers to its part."""

    out: gl.tensor  # a descriptor, or the address of the parts
    tiles: gl.shared_memory_descriptor | None  # buffers, unless it goes from registers
    strides: SplitStrides | None
    rows: gl.tensor | None = None  # the address, besides a descriptor, where some tiles are stored by rows


@gluon.jit
def copy_own(kernel, batch, head, row, slot, batch_size, config: gl.constexpr):
    """Copy 64 rows of each tensor for each group into buffer number ``slot``."""
    descs, tiles, full = kernel.own_descs, kernel.own_tiles, kernel.scheduler.full
    GROUPS: gl.constexpr = config.GROUPS
    TERMS: gl.constexpr = config.TERMS
    mbarrier.expect(full.index(slot), bytes_of_slot(descs, tiles, full))
    for group in gl.static_range(GROUPS):
        for i in gl.static_range(len(descs)):
            for term in gl.static_range(TERMS):
                copy_rows(
                    descs[i], term * batch_size + batch, head, row + group * ROWS, tiles[i], full, slot,
                    (slot * GROUPS + group) * TERMS + term, GROUPS * TERMS,
                )  # fmt: skip


_CLEARED = gl.constexpr(16)  # rows that `clear_rows` takes at a time


@gluon.jit
def clear_rows(tile, rows):
    """Make a matrix in shared memory zero behind its first rows, before a product of this group of warps reads it.

    Others may do the same at the same time: those first rows are written as they are.
    """
    ROWS_OF_TILE: gl.constexpr = tile.shape[0]
    ACROSS: gl.constexpr = tile.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    for first in gl.static_range(0, ROWS_OF_TILE, _CLEARED):
        if first + _CLEARED > rows:
            some = tile.slice(first, _CLEARED)
            row = first + gl.arange(0, _CLEARED, gl.SliceLayout(1, LAYOUT))
            some.store(gl.where((row < rows)[:, None], some.load(LAYOUT), 0.0).to(tile.dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def clear_hidden_rows(tile, words):
    """`clear_rows` of those rows whose bits in ``words``, of 32 rows each, are 0."""
    ROWS_OF_TILE: gl.constexpr = tile.shape[0]
    ACROSS: gl.constexpr = tile.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    for first in gl.static_range(0, ROWS_OF_TILE, _CLEARED):
        some = tile.slice(first, _CLEARED)
        row = first + gl.arange(0, _CLEARED, gl.SliceLayout(1, LAYOUT))
        seen = ((gl.load(words + row // 32) >> (row % 32)) & 1) != 0
        some.store(gl.where(seen[:, None], some.load(LAYOUT), 0.0).to(tile.dtype))
    fence_async_shared()
    thread_barrier()


@gluon.constexpr_function
def product_layout(columns):
    """Layout of a product with 64 rows, in the registers of a group of warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def pieces_of(tiles, slot, PIECES: gl.constexpr):
    """The pieces of own rows, or their terms."""
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces += (matrix(tiles, slot * PIECES + i),)
    return pieces


@gluon.jit
def product_transposed(a_pieces, ring, count, LAYOUT: gl.constexpr):
    """Start ``a · bᵀ`` with tile number ``count`` of a ring of (N, D) tiles, both in as many pieces."""
    PIECES: gl.constexpr = len(a_pieces)
    slot = wait_full(ring.full, count)
    N: gl.constexpr = ring.tiles.shape[3]
    acc = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    for i in gl.static_range(PIECES):
        b = matrix(ring.tiles, slot * PIECES + i).permute([1, 0])
        acc = warpgroup_mma(a_pieces[i], b, acc, use_acc=i > 0, is_async=True)
    return acc


@gluon.jit
def empty_sum(PIECES: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeros in pieces: rows of a sum before `sum_of_pieces`."""
    pieces = ()
    for _ in gl.static_range(PIECES):
        pieces += (gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT),)
    return pieces


@gluon.jit
def sum_of_pieces(acc, factor, tiles, slot):
    """Start ``acc + factor · b`` with buffer number ``slot`` of tiles in pieces, of which each has its own sum."""
    PIECES: gl.constexpr = len(acc)
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces += (warpgroup_mma(factor, matrix(tiles, slot * PIECES + i), acc[i], is_async=True),)
    return pieces


@gluon.jit
def finish_products(pieces):
    """Wait for all products; the sums of these in pieces."""
    if len(pieces) == 1:
        sums = (warpgroup_mma_wait(0, deps=[pieces[0]]),)
    else:
        sums = warpgroup_mma_wait(0, deps=pieces)
    return sums


@gluon.jit
def pack_16bit(tile, dtype: gl.constexpr):
    """A tile of weights, rounded, as a loop keeps it: two in a register, which it would otherwise unpack in each step."""
    low, high = gl.split(tile.reshape([tile.shape[0], tile.shape[1] // 2, 2]))
    ROUND: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(ROUND, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_as_operand(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns what `pack_16bit` returned, as `as_factor` has it: no data moves."""
    low = tile.to(gl.int16).to(dtype, bitcast=True)
    high = (tile >> 16).to(gl.int16).to(dtype, bitcast=True)
    whole = gl.join(low, high).reshape([tile.shape[0], 2 * tile.shape[1]])
    return gl.convert_layout(whole, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def store_part(result, tile, split, batch, head, row, rows, LAYOUT: gl.constexpr):
    """Store rows ``row …`` of a float32 result in its part, or rounded."""
    strides = result.strides
    start = split.to(gl.int64) * strides.split + batch.to(gl.int64) * strides.b + head.to(gl.int64) * strides.h
    local = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    feature = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    offsets = (local * strides.n)[:, None] + feature[None, :]
    mask = (local < rows)[:, None] & (feature < strides.features)[None, :]
    gl.store(result.out + start + offsets, tile, mask=mask)


@gluon.jit
def store_tile(result, tile, slot, split, batch, head, row, rows, LAYOUT: gl.constexpr):
    """Start to write rows ``row …`` of a result: to its part, or rounded, by way of buffer number ``slot`` if it has any."""
    if result.tiles is None:
        store_part(result, tile, split, batch, head, row, rows, LAYOUT)
    else:
        matrix(result.tiles, slot).store(tile.to(result.tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(result.out, [batch, head, row, 0], result.tiles.index(slot))


@gluon.jit
def store_tile_or_rows(result, tile, slot, split, batch, head, row, rows, LAYOUT: gl.constexpr):
    """Store rows ``row …`` of a result, behind whose ``rows`` there are others: the last tile from registers."""
    if row + ROWS <= rows:
        store_tile(result, tile, slot, split, batch, head, row, rows, LAYOUT)
    else:
        by_rows = Result(result.rows, None, result.strides)
        store_part(by_rows, tile, split, batch, head, row, rows, LAYOUT)


@gluon.jit
def store_pieces(result, pieces, scale, split, batch, head, row, rows, LAYOUT: gl.constexpr):
    """Store rows ``row …`` of a result in pieces, times ``scale``, from registers: in its part, if there are any.

    Strides are in `STRIDE_UNIT`, a multiple of what a thread stores at once.
    """
    PIECES: gl.constexpr = len(pieces)
    WIDTH: gl.constexpr = pieces[0].shape[1]
    strides = result.strides
    start = split.to(gl.int64) * strides.split + batch.to(gl.int64) * strides.b + head.to(gl.int64) * strides.h
    local = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    places = (start + local.to(gl.int64) * strides.n) * STRIDE_UNIT
    for i in gl.static_range(PIECES):
        feature = gl.arange(i * WIDTH, (i + 1) * WIDTH, gl.SliceLayout(0, LAYOUT))
        # The same for two features, which a thread stores at once.
        mask = (local < rows)[:, None] & (feature // 2 < strides.features // 2)[None, :]
        gl.store(result.out + places[:, None] + feature[None, :], pieces[i] * scale, mask=mask)
