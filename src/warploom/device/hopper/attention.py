"""Groups of warps that attend, on Hopper: what the forward kernels of flash attention are made of.

A group owns 64 queries, and finds tiles of keys and values in rings of buffers, which the copying warp fills (see
`warploom.device.hopper.pipeline`). It keeps two products in flight: while the logits of one tile of keys become weights, the
weights of the tile before are multiplied with their values. The KV loop goes from the last keys to the first, so that the
masked tiles come first.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    Ring,
    Scheduler,
    clear_rows,
    matrix,
    pieces_of,
    power_of_two,
    product_layout,
    product_transposed,
    received,
    store_tile,
    store_tile_or_rows,
    wait_full,
)
from warploom.device.hopper.softcap import capped

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
MOST_WEIGHT = gl.constexpr(57.0)
"""Of weights that are relative to no largest logit, in powers of two: sums of values up to 2⁵⁰ stay in float32."""
UNIT = gl.constexpr(128)
"""Rows of a unit of packed sequences: see `Entry`."""
MOST_SOFTCAP = gl.constexpr(75.0)
"""In powers of two, up to which no row needs its largest logit: see `exponent_base`."""


class Work(NamedTuple):
    """What the tiles of work of a persistent kernel are."""

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
    query_shift: gl.int32  # 0 where tensors are spread, as is the next
    key_shift: gl.int32


class Window(NamedTuple):
    """Which keys a query sees, besides what `Work` says."""

    left: gl.int32  # so many before its own place


class Options(NamedTuple):
    """What a call asks for besides full or causal attention of all keys; None where it does not."""

    window: Window | None = None
    seqused_k: gl.tensor | None = None  # (B,): how many keys each batch entry has
    sink: gl.tensor | None = None  # (H,): one more logit of every row, without a value
    softcap: gl.float32 | None = None  # in powers of two; the scale comes divided by the cap
    base: gl.float32 | None = None  # of exponents, instead of a row's largest logit: see `exponent_base`
    units: gl.tensor | None = None  # (units, 4) of packed sequences: where queries, and keys, begin and end
    shifts: gl.tensor | None = None  # (units, 2): those of an `Entry`, where tensors are packed


class State(NamedTuple):
    """The softmax of a group's 64 queries so far, and its place in the rings."""

    acc: gl.tensor  # (64, E): weighted sums of values
    weights: gl.tensor  # `kept`, of the last tile of keys, not in ``acc`` yet
    row_sum: gl.tensor  # (64,): of exponentials
    row_max: gl.tensor  # (64,): the largest logits, in powers of two
    tile: gl.int32  # number of the last tile
    starts: gl.int32  # how often the group was let start its products


class Forward(NamedTuple):
    """What groups of warps that attend share."""

    scheduler: Scheduler
    q_tiles: gl.shared_memory_descriptor  # GROUPS for each stage of the scheduler
    k: Ring
    v: Ring
    go: gl.shared_memory_descriptor  # a barrier for each group: of three, one starts its products after the other
    out: Result
    lse: gl.tensor
    statistics: gl.tensor
    work: Work
    scale: gl.float32
    options: Options


@gluon.jit
def tiles_of(work):
    """How many tiles of work there are."""
    return work.blocks * work.rows * work.splits


@gluon.jit
def tile_place(tile, work, CAUSAL: gl.constexpr):
    """Block, row and split of a tile, in the order of flash attention's `program_order`."""
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
    """The work of a batch entry, which may have fewer keys; or of the packed sequence that the row is of."""
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


@gluon.jit
def first_key(tile, work, options, BLOCK_N: gl.constexpr):
    """Where a tile of keys begins.

    If entries have lengths, the last tile ends at the last key, so that no tile holds what lies behind it, which may be
    NaN. What number 0 and tiles before it hold of keys before the first is zeros: the tensor memory accelerator's.
    """
    n = tile * BLOCK_N
    if options.seqused_k is not None:
        n += work.keys % BLOCK_N - BLOCK_N
    return n


@gluon.jit
def key_steps(block, split, work, options, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of the tiles of keys in a split of a KV loop: the first, those where masks end and begin again, and the end.

    The order is that of `tile_of_step`. There is at least one, since a group starts its pipeline with it: for an empty
    split one that no query sees.
    """
    end = work.keys
    full = work.keys
    if CAUSAL:
        first = block * BLOCK_M + work.keys - work.tokens
        end = gl.minimum(work.keys, first + BLOCK_M + work.right)
        full = gl.minimum(work.keys, gl.maximum(first + work.right + 1, 0))
    if options.window is None and options.seqused_k is None:
        if options.units is None:
            steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
            span = (steps + work.splits - 1) // work.splits
            begin = gl.minimum(split * span, steps)
            end = gl.maximum(gl.minimum(begin + span, steps), begin + 1)
        else:  # with one split
            begin = work.first_key // BLOCK_N
            end = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, begin + 1)
        full = gl.minimum(gl.maximum(full // BLOCK_N, begin), end - 1)
        low = begin
    else:
        origin = first_key(block * 0, work, options, BLOCK_N)
        some = origin * 0  # the first key that any query sees, and the first from which on every query does
        every = some
        if options.window is not None:
            lowest = block * BLOCK_M + work.keys - work.tokens - options.window.left
            some = gl.maximum(lowest, 0)
            every = gl.maximum(lowest + BLOCK_M - 1, 0)
        least = origin * 0  # tiles before all keys
        if options.units is not None:
            some = gl.maximum(some, work.first_key)
            every = gl.maximum(every, work.first_key)
            least = work.first_key // BLOCK_N
        steps = gl.maximum((end - origin + BLOCK_N - 1) // BLOCK_N, least + 1)
        begin = gl.minimum((some - origin) // BLOCK_N, steps - 1)
        span = (steps - begin + work.splits - 1) // work.splits
        begin = gl.minimum(begin + split * span, steps)
        end = gl.minimum(begin + span, steps)
        if options.seqused_k is not None:  # behind the end there may be keys, before number 0 there are none
            end = gl.where(begin == steps, 0, end)
            begin = gl.where(begin == steps, -1, begin)
        else:
            end = gl.maximum(end, begin + 1)
        full = gl.minimum(gl.maximum((full - origin) // BLOCK_N, begin + 1), end)
        low = gl.minimum(gl.maximum((every - origin + BLOCK_N - 1) // BLOCK_N, begin + 1), full)
    return begin, low, full, end


@gluon.jit
def tile_of_step(step, begin, end, options):
    """Number of the tile of keys of a step: from the last to the first.

    With lengths or a window, the first tile comes before all others. The first step has every mask, so lengths need no
    further loop.
    """
    tile = end - 1 - step
    if options.window is not None or options.seqused_k is not None:
        tile = gl.where(step == 0, begin, end - step)
    return tile


@gluon.jit
def rest_of(begin, end, options):
    """The tiles of keys without that of the first step."""
    if options.window is None and options.seqused_k is None:
        end -= 1
    else:
        begin += 1
    return begin, end


@gluon.jit
def query_steps(block, split, work, options, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Of the tiles of queries in a split of a loop: the first, those where masks end and begin again, and the end."""
    end = (work.tokens + BLOCK_M - 1) // BLOCK_M
    if options.seqused_k is not None:
        end = gl.where(block * BLOCK_N < work.keys, end, 0)
    high = end
    if options.window is not None:
        # The last query that sees the first key.
        last = block * BLOCK_N - (work.keys - work.tokens) + options.window.left
        end = gl.minimum((gl.maximum(last + BLOCK_N, 0) + BLOCK_M - 1) // BLOCK_M, end)
        high = gl.maximum(last + 1, 0) // BLOCK_M
    begin = end * 0
    if options.units is not None:
        begin = gl.minimum(work.first_query // BLOCK_M, end)
    full = begin
    if CAUSAL:
        first = block * BLOCK_N - (work.keys - work.tokens) - work.right  # the first query that sees the first key
        lowest = gl.maximum(first, 0)
        if options.units is not None:
            lowest = gl.maximum(lowest, work.first_query)
        begin = gl.minimum(lowest // BLOCK_M, end)
        full = gl.minimum((gl.maximum(first + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M, end)
    span = (end - begin + work.splits - 1) // work.splits
    begin = gl.minimum(begin + split * span, end)
    end = gl.minimum(begin + span, end)
    full = gl.minimum(gl.maximum(full, begin), end)
    if options.window is None:
        high = end
    else:
        high = gl.minimum(gl.maximum(high, full), end)
    return begin, full, high, end


@gluon.jit
def visible(n, first, work, options, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """Which keys ``n …`` are there and seen by 64 queries, of which the first stands at the key ``first``."""
    key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if options.seqused_k is None:
        mask = (key < work.keys)[None, :]
    else:  # see `first_key`
        mask = (key >= 0)[None, :]
    if CAUSAL:
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        mask = mask & (key[None, :] <= (query + work.right)[:, None])
    if options.window is not None:
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        mask = mask & (key[None, :] >= (query - options.window.left)[:, None])
    return mask


@gluon.constexpr_function
def exponent_base(softcap, dtype):
    """What exponents are relative to in every row, if there is a small cap: otherwise it is the row's largest logit.

    Weights then lie between 2⁻⁹³ and 2⁵⁷, which bfloat16 holds, and nothing is ever rescaled. A base near the logits keeps
    their last bits.
    """
    if softcap is None or softcap > MOST_SOFTCAP.value or dtype != gl.bfloat16:
        return None
    return max(softcap - MOST_WEIGHT.value, 0.0)


@gluon.jit
def clear_others(ring, count, n, work):
    """Make tile number ``count`` of packed values zero behind its sequence, as NaN there times a weight of 0 is NaN.

    ``n`` is the number of its first key.
    """
    if n + ring.tiles.shape[3] > work.keys:
        clear_rows(matrix(ring.tiles, wait_full(ring.full, count)), work.keys - n)


@gluon.jit
def softmax_step(logits, row_sum, row_max, first, n, work, options, scale, MASKED: gl.constexpr,
                 CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Weights of a tile of keys ``n …``; row_sum and row_max with it; the factor that rescales earlier sums.

    ``first`` is the position of the first query, where it stands among the keys. With a base, nothing is rescaled.
    Otherwise ``row_max`` is kept as rounded, so that sums are rescaled by exactly 1 where it stays the same.
    """
    if MASKED and options.units is not None and options.softcap is not None:
        # How a cap is computed depends on all logits, of which those of other sequences are none.
        mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
        logits = gl.where(mask, logits, 0.0)
    if options.base is not None:
        weights = capped(logits, scale, options.softcap, options.base, True)
        if MASKED:
            mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
            weights = gl.where(mask, weights, 0.0)
        new_max = row_max
        rescale = row_max
        row_sum = row_sum + gl.sum(weights, 1)
    else:
        if options.softcap is not None:
            logits = capped(logits, scale, options.softcap, 0.0, False)
            scale = 1.0
        if MASKED:
            mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
            logits = gl.where(mask, logits, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 1) * scale)
        base = new_max
        if MASKED:  # a row that has seen no key yet: −inf − (−inf) must not become NaN
            base = gl.where(new_max == float("-inf"), 0.0, base)
        weights = power_of_two(logits * scale - base[:, None])
        rescale = power_of_two(row_max - base)
        row_sum = row_sum * rescale + gl.sum(weights, 1)
    return weights, row_sum, new_max, rescale


@gluon.jit
def with_sink(row_sum, row_max, sink):
    """row_sum and row_max, in powers of two, with one more logit; the factor that rescales sums of values."""
    logit = sink * LOG2_E
    new_max = gl.maximum(row_max, logit)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = power_of_two(row_max - base)
    return row_sum * rescale + power_of_two(logit - base), new_max, rescale


@gluon.jit
def kept(tile, dtype: gl.constexpr):
    """A tile of weights, rounded, as a loop keeps it: two in a register, which it would otherwise unpack in each step."""
    low, high = gl.split(tile.reshape([tile.shape[0], tile.shape[1] // 2, 2]))
    ROUND: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(ROUND, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def kept_as_factor(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """What was `kept`, as `as_factor` has it: no data moves."""
    low = tile.to(gl.int16).to(dtype, bitcast=True)
    high = (tile >> 16).to(gl.int16).to(dtype, bitcast=True)
    whole = gl.join(low, high).reshape([tile.shape[0], 2 * tile.shape[1]])
    return gl.convert_layout(whole, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def attend(
    state, q_pieces, k, v, go, begin, end, first, work, options, scale,
    own: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """KV loop over tiles ``end − 1 … begin``."""
    acc, weights, row_sum, row_max, count, starts = state
    STAGES: gl.constexpr = k.full.shape[0]
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    GROUPS: gl.constexpr = go.shape[0]
    for i in range(end - begin):
        if GROUPS > 2:
            mbarrier.wait(go.index(own), starts & 1)
            starts += 1
        logits = product_transposed(q_pieces, k, count + 1, LAYOUT)
        slot = wait_full(v.full, count)
        factor = kept_as_factor(weights, v.tiles.dtype, OUT_LAYOUT)
        acc = warpgroup_mma(factor, matrix(v.tiles, slot), acc, is_async=True)
        if GROUPS > 2:
            mbarrier.arrive(go.index((own + 1) % GROUPS))
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k.empty.index((count + 1) % STAGES))
        n = first_key(end - 1 - i, work, options, BLOCK_N)
        new, row_sum, row_max, rescale = softmax_step(
            logits, row_sum, row_max, first, n, work, options, scale, MASKED, CAUSAL, LAYOUT
        )
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
        mbarrier.arrive(v.empty.index(slot))
        # Without a window the first step has the end of the sequence.
        if MASKED and options.units is not None and options.window is not None:
            clear_others(v, count + 1, n, work)
        if options.base is None:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        weights = kept(new, v.tiles.dtype)
        count += 1
    return State(acc, weights, row_sum, row_max, count, starts)


@gluon.jit
def compute_tiles(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call):
    """Group number ``own`` of warps of a `Forward`."""
    scheduler, q_tiles, k, v, go, out, lse, statistics, work, scale, options = call
    GROUPS: gl.constexpr = go.shape[0]
    STAGES: gl.constexpr = k.full.shape[0]
    PIECES: gl.constexpr = k.tiles.shape[0] // STAGES
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    E: gl.constexpr = v.tiles.shape[4]
    OWN_BUFFERS: gl.constexpr = scheduler.full.shape[0] > 1
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(E)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if own == GROUPS - 1:  # group 0 starts first
        mbarrier.arrive(go.index(0))
    tiles = tiles_of(work)
    count = 0
    starts = 0
    done = 0
    tile, q_slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        batch, head = row // work.heads, row % work.heads
        entry = entry_of(work, batch, block * BLOCK_M, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - entry.tokens  # the last query stands at the last key
        q_pieces = pieces_of(q_tiles, q_slot * GROUPS + own, PIECES)
        if options.units is not None and options.softcap is not None:  # see `softmax_step`
            if m + ROWS > entry.tokens:
                clear_rows(q_pieces[0], entry.tokens - m)
        if options.sink is not None:  # it is there when the loop has ended
            sink = gl.load(options.sink + head).to(gl.float32)
            if options.units is not None:  # rows behind the last sequence have none
                sink = gl.where(entry.keys < entry.first_key, float("-inf"), sink)
        acc = gl.zeros([ROWS, E], gl.float32, OUT_LAYOUT)
        row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)

        logits = product_transposed(q_pieces, k, count, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k.empty.index(count % STAGES))
        n = first_key(tile_of_step(0, begin, end, options), entry, options, BLOCK_N)
        begin, end = rest_of(begin, end, options)
        new, row_sum, row_max, _ = softmax_step(
            logits, row_sum, row_max, first, n, entry, options, scale, True, CAUSAL, LAYOUT
        )
        if options.units is not None:
            clear_others(v, count, n, entry)
        state = State(acc, kept(new, v.tiles.dtype), row_sum, row_max, count, starts)
        if CAUSAL or options.window is not None:  # otherwise the first step alone has a mask
            state = attend(
                state, q_pieces, k, v, go, full, end, first, entry, options, scale,
                own, True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        state = attend(
            state, q_pieces, k, v, go, low, full, first, entry, options, scale,
            own, False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if options.window is not None:
            state = attend(
                state, q_pieces, k, v, go, begin, low, first, entry, options, scale,
                own, True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        acc, weights, row_sum, row_max, count, starts = state
        if OWN_BUFFERS:
            mbarrier.arrive(scheduler.empty.index(q_slot))
        slot = wait_full(v.full, count)
        factor = kept_as_factor(weights, v.tiles.dtype, OUT_LAYOUT)
        acc = warpgroup_mma(factor, matrix(v.tiles, slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v.empty.index(slot))
        count += 1

        if options.base is not None:
            row_max = gl.where(row_sum == 0.0, float("-inf"), options.base)
        if options.sink is not None:
            row_sum, row_max, rescale = with_sink(row_sum, row_max, sink)
        some = gl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: 0 / 1, and lse −inf + 0
        inverse = 1.0 / some
        if options.sink is not None:
            inverse = inverse * rescale
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if OWN_BUFFERS:
            tma.store_wait(0)  # until the tile before has left its buffer
        # Of queries in pieces, the first tile of results within the group's own.
        OUT_SLOT: gl.constexpr = (
            own if OWN_BUFFERS else (own * q_tiles.shape[0] // GROUPS * q_tiles.shape[4] + E - 1) // E
        )
        end_row = work.tokens
        if options.units is not None:
            m -= entry.query_shift
            end_row = entry.tokens - entry.query_shift
            store_tile_or_rows(out, acc, OUT_SLOT, split, batch, head, m, end_row, OUT_LAYOUT)
        else:
            store_tile(out, acc, OUT_SLOT, split, batch, head, m, end_row, SPLIT, OUT_LAYOUT)
        if not OWN_BUFFERS:
            tma.store_wait(0)
            mbarrier.arrive(scheduler.empty.index(q_slot))

        local = gl.arange(0, ROWS, ROW_LAYOUT)
        mask = m + local < end_row
        offsets = row.to(gl.int64) * work.tokens + m + local
        size = work.rows.to(gl.int64) * work.tokens
        gl.store(statistics + split * 2 * size + offsets, row_max, mask=mask)
        gl.store(statistics + (split * 2 + 1) * size + offsets, row_sum, mask=mask)
        if not SPLIT:
            gl.store(lse + offsets, (row_max + gl.log2(some)) * LN_2, mask=mask)
        done += 1
        tile, q_slot = received(scheduler, done)
    tma.store_wait(0)
