"""Tiles of work of a persistent kernel: what they belong to, which come next, and how groups of warps learn of them.

The copying warp takes tiles from a scheduler and broadcasts their numbers to the groups of warps.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from warploom.device.hopper.pipeline import barriers, init_ring, wait_empty, wait_full

UNIT = gl.constexpr(128)
"""Rows of a unit of packed sequences: see `Entry`."""


class Work(NamedTuple):
    """Sizes of a persistent kernel's work, and how it is cut into tiles."""

    tokens: gl.int32  # queries of a batch entry: rows of the tensors
    keys: gl.int32
    heads: gl.int32
    group: gl.int32  # query heads to a key head
    rows: gl.int32  # batch entries times heads: of queries, or of keys where a group of warps owns keys
    blocks: gl.int32  # tiles of a row
    section: gl.int32  # rows whose keys and values fit in the L2 cache together
    splits: gl.int32  # of the loop over keys, or over queries, of each tile
    right: gl.int32  # a causal query sees so many keys behind its own place


class Entry(NamedTuple):
    """The `Work` of a packed sequence, whose rows lie among those of the others.

    Rows have numbers as if they were spread: every sequence begins at a unit of `UNIT` rows, a multiple of all tiles, and
    the first of a sequence is not 0. Where tensors are spread, these are their places, and behind the last row of a
    sequence there are zeros up to the next. Where they are packed, rows lie a shift before them, and the next sequence
    follows. For rows behind the last sequence, those of the other side end before their first.
    """

    tokens: gl.int32  # where queries end
    keys: gl.int32  # where keys end
    heads: gl.int32
    group: gl.int32
    rows: gl.int32
    blocks: gl.int32
    section: gl.int32
    splits: gl.int32
    right: gl.int32
    first_query: gl.int32
    first_key: gl.int32
    query_shift: gl.int32  # 0 where tensors are spread
    key_shift: gl.int32  # 0 where tensors are spread


class Window(NamedTuple):
    """Which keys a query sees, besides what `Work` says."""

    left: gl.int32  # so many before its own place


class Options(NamedTuple):
    """Options of a call besides full or causal attention of all keys; None where it has them not."""

    window: Window | None = None
    seqused_k: gl.tensor | None = None  # (B,): how many keys each batch entry has
    sink: gl.tensor | None = None  # (H,): one more logit of every row, without a value
    softcap: gl.float32 | None = None  # in powers of two; the scale comes divided by the cap
    base: gl.float32 | None = None  # of exponents, instead of a row's largest logit: see `exponent_base`
    units: gl.tensor | None = None  # (units, 4) of packed sequences: where queries, and keys, begin and end
    shifts: gl.tensor | None = None  # (units, 2): those of an `Entry`, where tensors are packed


@gluon.jit
def tiles_of(work):
    """Returns how many tiles of work there are."""
    return work.blocks * work.rows * work.splits


@gluon.jit
def tile_place(tile, work, CAUSAL: gl.constexpr):
    """Returns block, row and split of a tile, in the order of `triton.tiles.program_order`."""
    place = tile % (work.section * work.blocks * work.splits)
    first = tile // (work.section * work.blocks * work.splits) * work.section
    width = gl.minimum(work.section, work.rows - first)
    block = place // width // work.splits
    split = place // width % work.splits
    if CAUSAL:  # the last queries see the most keys
        block = work.blocks - 1 - block
    return block, first + place % width, split


@gluon.jit
def entry_of(work, batch, row, options):
    """Returns the work of a batch entry, which may have fewer keys; or of the packed sequence that the row is of."""
    if options.seqused_k is not None:
        keys = gl.minimum(gl.maximum(gl.load(options.seqused_k + batch).to(gl.int32), 0), work.keys)
        work = Work(
            work.tokens, keys, work.heads, work.group, work.rows, work.blocks, work.section, work.splits, work.right
        )
    if options.units is not None:
        unit = options.units + row // UNIT * 4
        query_shift, key_shift = 0, 0
        if options.shifts is not None:
            shift = options.shifts + row // UNIT * 2
            query_shift, key_shift = gl.load(shift), gl.load(shift + 1)
        work = Entry(
            gl.load(unit + 1), gl.load(unit + 3), work.heads, work.group, work.rows, work.blocks, work.section,
            work.splits, work.right, gl.load(unit), gl.load(unit + 2), query_shift, key_shift,
        )  # fmt: skip
    return work


class Scheduler(NamedTuple):
    """A source of tiles of work: the copying warp takes them, and broadcasts them to the groups of warps."""

    counter: gl.tensor | None  # in device memory, int32: tiles taken besides each program's first
    tile: gl.shared_memory_descriptor  # (stages, 1) int32: the broadcast tile
    full: gl.shared_memory_descriptor  # a barrier for each stage, for what a group owns as well
    empty: gl.shared_memory_descriptor  # a barrier for each stage


@gluon.jit
def new_scheduler(counter, STAGES: gl.constexpr, arrivals: gl.constexpr):
    """A scheduler that broadcasts as many tiles ahead as there are stages."""
    tile = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, arrivals)
    return Scheduler(counter, tile, full, empty)


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
    """Returns the tile that was broadcast in buffer number ``slot``."""
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

    What rests on this order is said in `backward_fused.hopper_backward_kernel`: programs may wait for others there.
    """
    return gl.atomic_add(scheduler.counter, 1)
