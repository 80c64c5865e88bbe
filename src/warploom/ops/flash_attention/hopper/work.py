"""Tiles of work of a persistent kernel: what they belong to, which come next, and how groups of warps learn of them.

The copying warp takes tiles from a scheduler and broadcasts their numbers to the groups of warps.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from warploom.device.hopper.pipeline import barriers, init_ring, wait_empty, wait_full
from warploom.ops.flash_attention.hopper.bias import Bias
from warploom.ops.flash_attention.hopper.tile_mask import TileMask

LOG2_E = gl.constexpr(1.4426950408889634)
UNIT = gl.constexpr(128)
"""Rows of a unit of packed sequences: see `PackedSeq`."""


class Config(NamedTuple):
    """Compile-time choices of a kernel."""

    CAUSAL: gl.constexpr
    STAGES: gl.constexpr  # tiles in flight of those that a loop goes over
    GROUPS: gl.constexpr = 1  # of warps, which own 64 rows of a tile of work each
    SOFTCAP: gl.constexpr = None  # in powers of two; the scale comes divided by the cap
    SPLIT: gl.constexpr = False  # results are float32 parts, or in pieces: they go to addresses from registers
    PIECES: gl.constexpr = 1  # in which rows of queries and keys are copied
    TERMS: gl.constexpr = 1  # of a float32 factor
    ORDERED: gl.constexpr = False  # tiles of keys are taken, and add to gradients of queries, in their order
    PARTS: gl.constexpr = 1  # buffers of a group's part of these gradients
    ENDS: gl.constexpr = False  # see `backward_fused.compute_all`
    CACHE: gl.constexpr = None  # keys of a tile, where these lie in a cache, and are copied page by page
    BIAS: gl.constexpr = (
        None  # tiles of a bias in flight in the backward, 0 of one that is the same for all queries
    )
    ZEROS: gl.constexpr = False  # the gradient of a bias has zeros where no query sees a key


class Schedule(NamedTuple):
    """Heads, and the tiles of work into which a persistent kernel cuts them."""

    heads: gl.int32
    group: gl.int32  # query heads to a key head
    rows: gl.int32  # batch entries times heads: of queries, or of keys where a group of warps owns keys
    blocks: gl.int32  # tiles of a row
    section: gl.int32  # rows whose keys and values fit in the L2 cache together
    splits: gl.int32  # of the loop over keys, or over queries, of each tile


class SeqLens(NamedTuple):
    """Numbers of rows of a batch entry."""

    tokens: gl.int32  # queries
    keys: gl.int32


class PackedSeq(NamedTuple):
    """A packed sequence, whose rows lie among those of the others.

    Rows have numbers as if they were spread: every sequence begins at a unit of `UNIT` rows, a multiple of all tiles, and
    the first of a sequence is not 0. Where tensors are spread, these are their places, and behind the last row of a
    sequence there are zeros up to the next. Where they are packed, rows lie a shift before them, and the next sequence
    follows. For rows behind the last sequence, those of the other side end before their first.
    """

    tokens: gl.int32  # where queries end
    keys: gl.int32  # where keys end
    first_query: gl.int32
    first_key: gl.int32
    query_shift: gl.int32  # 0 where tensors are spread
    key_shift: gl.int32  # 0 where tensors are spread, and of a cache
    number: gl.int32  # of the sequence, where its keys lie in a cache


class Scales(NamedTuple):
    """Factors of a backward."""

    logits: gl.float32  # in powers of two
    gradients: gl.float32  # of queries and keys


class Window(NamedTuple):
    """Keys that a query sees before its own place, where these are not all."""

    left: gl.int32


class AlibiStrides(NamedTuple):
    """Strides of slopes; 0 for one of all batch entries."""

    b: gl.int32
    h: gl.int32


class Alibi(NamedTuple):
    """Slopes of heads: a key gets its head's slope times its place behind the query."""

    slopes: gl.tensor  # (B, H)
    strides: AlibiStrides


class AttentionCall(NamedTuple):
    """Numbers and options of a call; None where it has them not."""

    lengths: SeqLens  # of the tensors; keys in a cache: of a sequence, at most
    schedule: Schedule
    right: gl.int32  # a causal query sees so many keys behind its own place
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32 | None  # of gradients of queries and keys
    window: Window | None = None
    seqused_k: gl.tensor | None = None  # (B,): how many keys each batch entry has
    sink: gl.tensor | None = None  # (H,): one more logit of every row, without a value
    softcap: gl.float32 | None = None  # as in `Config`
    base: gl.float32 | None = None  # of exponents, instead of a row's largest logit: see `exponent_base`
    units: gl.tensor | None = None  # (units, 4) of packed sequences: where queries, and keys, begin and end
    shifts: gl.tensor | None = None  # (units, 2): those of a `PackedSeq`, where tensors are packed
    block_table: gl.tensor | None = None  # (S, P), of adjacent numbers: pages of each sequence
    tiles: TileMask | None = None
    alibi: Alibi | None = None
    bias: Bias | None = None


class TilePlace(NamedTuple):
    """The part of a problem that a tile of work is."""

    block: gl.int32
    row: gl.int32
    split: gl.int32


@gluon.jit
def slopes_from(alibi, batch, head):
    """Returns the slopes of a batch entry from a head on."""
    strides = alibi.strides
    return Alibi(alibi.slopes + batch.to(gl.int64) * strides.b + head.to(gl.int64) * strides.h, strides)


@gluon.jit
def slope_of(alibi, head):
    """Returns a head's slope, in powers of two."""
    return gl.load(alibi.slopes + head.to(gl.int64) * alibi.strides.h).to(gl.float32) * LOG2_E


@gluon.jit
def tiles_of(schedule):
    """Returns how many tiles of work there are."""
    return schedule.blocks * schedule.rows * schedule.splits


@gluon.jit
def with_blocks(schedule, blocks):
    """Returns a schedule with another number of tiles of a row."""
    return Schedule(schedule.heads, schedule.group, schedule.rows, blocks, schedule.section, schedule.splits)


@gluon.jit
def tile_place(tile, schedule, BACKWARDS: gl.constexpr):
    """Returns the place of a tile, in the order of `triton.tiles.program_order`, or with the last block of a row first."""
    place = tile % (schedule.section * schedule.blocks * schedule.splits)
    first = tile // (schedule.section * schedule.blocks * schedule.splits) * schedule.section
    width = gl.minimum(schedule.section, schedule.rows - first)
    block = place // width // schedule.splits
    split = place // width % schedule.splits
    if BACKWARDS:
        block = schedule.blocks - 1 - block
    return TilePlace(block, first + place % width, split)


@gluon.jit
def whole_loop(place):
    """Returns the place of a tile where no loop is split."""
    return TilePlace(place.block, place.row, 0)


@gluon.jit
def sequence_of(batch, row, call, CACHED: gl.constexpr = False):
    """Returns the rows of a batch entry, which may have fewer keys; or of the packed sequence that the row is of.

    ``CACHED``: the sequence's keys lie in a cache, and its number stands where a shift of keys would.
    """
    seq = call.lengths
    if call.seqused_k is not None:
        keys = gl.minimum(gl.maximum(gl.load(call.seqused_k + batch).to(gl.int32), 0), seq.keys)
        seq = SeqLens(seq.tokens, keys)
    if call.units is not None:
        unit = call.units + row // UNIT * 4
        query_shift, key_shift, number = 0, 0, 0
        if call.shifts is not None:
            shift = call.shifts + row // UNIT * 2
            query_shift, key_shift = gl.load(shift), gl.load(shift + 1)
        if CACHED:
            number, key_shift = key_shift, 0
        ends = gl.load(unit + 1), gl.load(unit + 3)
        seq = PackedSeq(*ends, gl.load(unit), gl.load(unit + 2), query_shift, key_shift, number)
    return seq


class Scheduler(NamedTuple):
    """A source of tiles of work: the copying warp takes them, and broadcasts them to the groups of warps."""

    counter: gl.tensor | None  # in device memory, int32: tiles taken besides each program's first
    tile: gl.shared_memory_descriptor  # (stages, 1) int32: the broadcast tile
    full: gl.shared_memory_descriptor  # a barrier for each stage, for what a group owns as well
    empty: gl.shared_memory_descriptor  # a barrier for each stage


class Work(NamedTuple):
    """A tile of work that a group of warps has received."""

    number: gl.int32  # how many the group has received before
    tile: gl.int32
    slot: gl.int32  # of what the group owns of it


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
def receive(scheduler, number, WARPS: gl.constexpr = 4):
    """Returns the tile that `broadcast` publishes after so many others, once it has."""
    slot = wait_full(scheduler.full, number)
    return Work(number, read(scheduler, slot, WARPS), slot)


@gluon.jit
def read(scheduler, slot, WARPS: gl.constexpr = 4):
    """Returns the tile that was broadcast in buffer number ``slot``."""
    return gl.max(scheduler.tile.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def next_tile(scheduler, tiles):
    """Takes a tile that no program has taken. Every program starts with the tile of its own number."""
    programs = gl.num_programs(0)
    tile = tiles
    if tiles > programs:
        tile = programs + gl.atomic_add(scheduler.counter, 1)
    return tile


@gluon.jit
def take_tile(scheduler):
    """Takes the next tile that no program has taken, the first included: all are taken in their order.

    What rests on this order is said in `backward_fused.hopper_backward_kernel`: programs may wait for others there.
    """
    return gl.atomic_add(scheduler.counter, 1)
