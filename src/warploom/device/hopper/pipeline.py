"""Rings of buffers that tiles pass through, and their barriers, for persistent Gluon kernels for Hopper.

A persistent program holds one multiprocessor. One warp copies tiles from device memory through the tensor memory
accelerator; groups of four warps each own 64 rows of the result. Copying and computing meet at barriers in shared
memory, two to a buffer: ``full`` when its tile has arrived, ``empty`` when all groups have read it. Tiles come in the
order in which they are used, so a count of tiles gives buffer and phase of a barrier on both sides.

A float32 factor is the sum of ``TERMS`` tensors in bfloat16 (see `warploom.device.product`), (TERMS · B, H, N, D): the
terms of a tile lie in as many buffers, one behind the other. Of 16-bit tensors there is one term.

Rows of 192 features, which no tile has, are copied in three pieces of 64: they too lie in as many buffers.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from warploom.device.hopper import tma

thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


class Ring(NamedTuple):
    """Buffers in shared memory that tiles pass through, in the order in which they are used."""

    tiles: gl.shared_memory_descriptor
    """(stages · TERMS · pieces, 1, 1, rows, features): a tile is a box of (B, H, N, D)."""
    full: gl.shared_memory_descriptor  # a barrier for each stage: its tile has arrived
    empty: gl.shared_memory_descriptor  # a barrier for each stage: all groups have read its tile


@gluon.jit
def barriers(count: gl.constexpr):
    """Returns so many barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_ring(full, empty, arrivals: gl.constexpr):
    """Initialise the barriers of a ring of buffers: one arrival fills a buffer, ``arrivals`` empty it."""
    STAGES: gl.constexpr = full.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=arrivals)


@gluon.jit
def init_each(barriers):
    """Initialise barriers, each for one arrival."""
    COUNT: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)


@gluon.jit
def new_ring(tiles, STAGES: gl.constexpr, arrivals: gl.constexpr):
    """Returns a ring of these buffers, with barriers of its own; see `init_ring`."""
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, arrivals)
    return Ring(tiles, full, empty)


@gluon.jit
def wait_full(full, count):
    """Wait for tile number ``count`` of a ring of buffers; returns the number of its buffer."""
    slot = count % full.shape[0]
    mbarrier.wait(full.index(slot), count // full.shape[0] & 1)
    return slot


@gluon.jit
def wait_empty(empty, count):
    """Wait until there is room for tile number ``count`` of a ring of buffers; returns the number of its buffer."""
    slot = count % empty.shape[0]
    mbarrier.wait(empty.index(slot), (count // empty.shape[0] & 1) ^ 1)
    return slot


@gluon.constexpr_function
def bytes_of_slot(descs, tiles, full):
    """Returns how many bytes a barrier of ``full`` waits for."""
    return sum(desc.block_type.nbytes * each.shape[0] for desc, each in zip(descs, tiles)) // full.shape[0]


@gluon.jit
def copy_rows(desc, batch, head, row, tiles, full, slot, number, COUNT: gl.constexpr):
    """Start to copy all pieces of rows ``number``; each barrier of ``full`` waits for ``COUNT`` such copies."""
    PIECES: gl.constexpr = tiles.shape[0] // (full.shape[0] * COUNT)
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    for piece in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(
            desc, [batch, head, row, piece * WIDTH], full.index(slot), tiles.index(number * PIECES + piece)
        )


@gluon.jit
def copy_tile(desc, batch, head, row, ring, count, batch_size=0, TERMS: gl.constexpr = 1):
    """Copy the tile number ``count`` into its buffers of a ring once these are empty. Several terms need ``batch_size``."""
    slot = wait_empty(ring.empty, count)
    mbarrier.expect(ring.full.index(slot), bytes_of_slot((desc,), (ring.tiles,), ring.full))
    for i in gl.static_range(TERMS):
        copy_rows(desc, i * batch_size + batch, head, row, ring.tiles, ring.full, slot, slot * TERMS + i, TERMS)


@gluon.jit
def matrix(tiles, slot):
    """Returns a tile of a ring as a matrix in shared memory."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def as_factor(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns a tile of results, rounded, as the first factor of a product whose results have ``LAYOUT``: no data moves."""
    return gl.convert_layout(tile.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))
