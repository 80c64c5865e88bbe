"""What persistent Gluon kernels for Hopper share: rings of buffers, tiles of work, products.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.hopper import tma

ROWS = gl.constexpr(64)  # rows of a group of warps: what one matrix instruction takes
NARROW_HEAD = gl.constexpr(128)
"""Features of a head up to which results have buffers of their own. Wider ones leave through those of the queries."""
STRIDE_UNIT = gl.constexpr(8)
"""Elements in which strides of rows in pieces are counted: 16 bytes, a multiple of which they are for descriptors."""

thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


class Ring(NamedTuple):
    """Buffers in shared memory that tiles pass through, in the order in which they are used."""

    tiles: gl.shared_memory_descriptor
    """(stages · TERMS · pieces, 1, 1, rows, features): a tile is a box of (B, H, N, D)."""
    full: gl.shared_memory_descriptor  # a barrier for each stage, as is the next
    empty: gl.shared_memory_descriptor


class RowRing(NamedTuple):
    """A `Ring`, and a number for each row of its tiles."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    row_values: gl.shared_memory_descriptor  # (stages, rows) float32


class Scheduler(NamedTuple):
    """How a program gets its tiles of work: the copying warp takes them, and broadcasts them to the groups of warps."""

    counter: gl.tensor | None  # in device memory, int32: tiles taken besides each program's first
    tile: gl.shared_memory_descriptor  # (stages, 1) int32: the broadcast tile
    full: gl.shared_memory_descriptor  # a barrier for each stage, for what a group owns as well, as is the next
    empty: gl.shared_memory_descriptor


class SplitStrides(NamedTuple):
    """Sizes and strides of the float32 parts of a result, one for each split; or of a result that has rows to store."""

    split: gl.int32
    b: gl.int32
    n: gl.int32
    h: gl.int32
    features: gl.int32  # how many


class Result(NamedTuple):
    """Where a result goes: through buffers and a descriptor, or from registers to its part."""

    out: gl.tensor  # a descriptor, or the address of the parts
    tiles: gl.shared_memory_descriptor
    strides: SplitStrides | None
    rows: gl.tensor | None = None  # the address, besides a descriptor, where some tiles are stored by rows


@gluon.jit
def barriers(count: gl.constexpr):
    """Barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def power_of_two(x):
    """2ˣ to 2 units in the last place; zero where the result would be denormal."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


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
    """A ring of these buffers, with barriers of its own; see `init_ring`."""
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, arrivals)
    return Ring(tiles, full, empty)


@gluon.jit
def new_row_ring(tiles, STAGES: gl.constexpr, arrivals: gl.constexpr, row_values):
    """A ring with a number for each row of its tiles; see `new_ring`."""
    tiles, full, empty = new_ring(tiles, STAGES, arrivals)
    return RowRing(tiles, full, empty, row_values)


@gluon.jit
def new_scheduler(counter, STAGES: gl.constexpr, arrivals: gl.constexpr):
    """A scheduler that broadcasts as many tiles ahead as there are stages."""
    tile = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, arrivals)
    return Scheduler(counter, tile, full, empty)


@gluon.jit
def wait_full(full, count):
    """Wait for the tile number ``count`` of a ring of buffers; the number of its buffer."""
    slot = count % full.shape[0]
    mbarrier.wait(full.index(slot), count // full.shape[0] & 1)
    return slot


@gluon.jit
def wait_empty(empty, count):
    """Wait until there is room for the tile number ``count`` of a ring of buffers; the number of its buffer."""
    slot = count % empty.shape[0]
    mbarrier.wait(empty.index(slot), (count // empty.shape[0] & 1) ^ 1)
    return slot


@gluon.constexpr_function
def bytes_of_slot(descs, tiles, full):
    """How many bytes a barrier of ``full`` waits for."""
    return sum(desc.block_type.nbytes * each.shape[0] for desc, each in zip(descs, tiles)) // full.shape[0]


@gluon.jit
def copy_rows(desc, batch, head, row, tiles, full, slot, number, COUNT: gl.constexpr):
    """Start to copy all pieces of the rows number ``number``, of which each barrier of ``full`` has ``COUNT``."""
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
def copy_own(descs, tiles, batch, head, row, full, slot, GROUPS: gl.constexpr, batch_size, TERMS: gl.constexpr):
    """Copy 64 rows of each tensor for each group into buffer number ``slot``."""
    mbarrier.expect(full.index(slot), bytes_of_slot(descs, tiles, full))
    for group in gl.static_range(GROUPS):
        for i in gl.static_range(len(descs)):
            for term in gl.static_range(TERMS):
                copy_rows(
                    descs[i], term * batch_size + batch, head, row + group * ROWS, tiles[i], full, slot,
                    (slot * GROUPS + group) * TERMS + term, GROUPS * TERMS,
                )  # fmt: skip


@gluon.jit
def matrix(tiles, slot):
    """A tile of a ring as a matrix in shared memory."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]])


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
def finished(pieces):
    """Wait for all products; the sums of these in pieces."""
    if len(pieces) == 1:
        sums = (warpgroup_mma_wait(0, deps=[pieces[0]]),)
    else:
        sums = warpgroup_mma_wait(0, deps=pieces)
    return sums


@gluon.jit
def as_factor(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of results, rounded, as the first factor of a product with results of layout ``LAYOUT``: no data moves."""
    return gl.convert_layout(tile.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def broadcast(scheduler, tile, done):
    """Publish the next tile to the groups, once a buffer is free for it; returns the number of that buffer."""
    slot = wait_empty(scheduler.empty, done)
    scheduler.tile.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    return slot


@gluon.jit
def broadcast_end(scheduler, tile, done):
    """Publish the end to the groups: a tile number beyond the last."""
    slot = broadcast(scheduler, tile, done)
    mbarrier.arrive(scheduler.full.index(slot))


@gluon.jit
def received(scheduler, done, WARPS: gl.constexpr = 4):
    """The tile that `broadcast` published, and the number of its buffer."""
    slot = wait_full(scheduler.full, done)
    return read(scheduler, slot, WARPS), slot


@gluon.jit
def read(scheduler, slot, WARPS: gl.constexpr = 4):
    """What was broadcast in buffer number ``slot``."""
    return gl.max(scheduler.tile.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def next_tile(scheduler, tiles):
    """A tile that no program has taken. Every program starts with the tile of its own number."""
    programs = gl.num_programs(0)
    tile = tiles
    if tiles > programs:
        tile = programs + gl.atomic_add(scheduler.counter, 1)
    return tile


@gluon.jit
def take_tile(scheduler):
    """The next tile that no program has taken, the first included: all are taken in their order.

    What rests on this order is said in flash attention's `hopper_backward_kernel`: programs may wait for others there.
    """
    return gl.atomic_add(scheduler.counter, 1)


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
def store_tile(result, tile, slot, split, batch, head, row, rows, SPLIT: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to write rows ``row …`` of a result: to its part, or rounded, by way of buffer number ``slot``."""
    if SPLIT:
        store_part(result, tile, split, batch, head, row, rows, LAYOUT)
    else:
        matrix(result.tiles, slot).store(tile.to(result.tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(result.out, [batch, head, row, 0], result.tiles.index(slot))


@gluon.jit
def store_tile_or_rows(result, tile, slot, split, batch, head, row, rows, LAYOUT: gl.constexpr):
    """Store rows ``row …`` of a result, behind whose ``rows`` there are others: the last tile from registers."""
    if row + ROWS <= rows:
        store_tile(result, tile, slot, split, batch, head, row, rows, False, LAYOUT)
    else:
        by_rows = Result(result.rows, result.tiles, result.strides)
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
