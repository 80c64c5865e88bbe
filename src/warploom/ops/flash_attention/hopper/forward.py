"""The forward of flash attention for Hopper, written for its asynchronous units in Gluon.

One warp copies tiles. Groups of four warps each own 64 queries, and find tiles of keys and values in rings of buffers (see
`warploom.device.hopper.pipeline`). A group keeps two products in flight: while the logits of one tile of keys become
weights, the weights of the tile before are multiplied with their values. The KV loop goes from the last keys to the first,
so that the masked tiles come first.
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
from triton.language.extra.cuda import gdc_launch_dependents

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import Ring, barriers, copy_tile, init_each, matrix, new_ring, wait_full
from warploom.ops.flash_attention.hopper.masks import first_key, key_steps, rest_of, tile_of_step
from warploom.ops.flash_attention.hopper.softmax import LN_2, exponent_base, softmax_step, with_sink
from warploom.ops.flash_attention.hopper.tiles import (
    NARROW_HEAD,
    ROWS,
    Result,
    SplitStrides,
    clear_rows,
    copy_own,
    pack_16bit,
    pieces_of,
    product_layout,
    product_transposed,
    store_tile,
    store_tile_or_rows,
    unpack_as_operand,
)
from warploom.ops.flash_attention.hopper.work import (
    Options,
    Scheduler,
    Window,
    Work,
    broadcast,
    broadcast_end,
    entry_of,
    new_scheduler,
    next_tile,
    received,
    tile_place,
    tiles_of,
)


class State(NamedTuple):
    """The softmax of a group's 64 queries so far, and its place in the rings."""

    acc: gl.tensor  # (64, E): weighted sums of values
    weights: gl.tensor  # of the last tile of keys, by `pack_16bit`, not in ``acc`` yet
    row_sum: gl.tensor  # (64,): of exponentials
    row_max: gl.tensor  # (64,): the largest logits, in powers of two
    tile: gl.int32  # number of the last tile
    starts: gl.int32  # how often the group was let start its products


class Forward(NamedTuple):
    """Tensors that groups of warps that attend share."""

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
def zero_rows_past_end(ring, count, n, work):
    """Make tile number ``count`` of packed values zero behind its sequence, as NaN there times a weight of 0 is NaN.

    ``n`` is the number of its first key.
    """
    if n + ring.tiles.shape[3] > work.keys:
        clear_rows(matrix(ring.tiles, wait_full(ring.full, count)), work.keys - n)


@gluon.jit
def attend(
    state, q_pieces, first, seq, begin, end, call, own: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """KV loop of group number ``own`` over tiles ``end − 1 … begin``; its first query stands at the key ``first``."""
    acc, weights, row_sum, row_max, count, starts = state
    k, v, go, options = call.k, call.v, call.go, call.options
    STAGES: gl.constexpr = k.full.shape[0]
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    GROUPS: gl.constexpr = go.shape[0]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(v.tiles.shape[4])
    for i in range(end - begin):
        if GROUPS > 2:
            mbarrier.wait(go.index(own), starts & 1)
            starts += 1
        logits = product_transposed(q_pieces, k, count + 1, LAYOUT)  # S = Q Kᵀ
        slot = wait_full(v.full, count)
        factor = unpack_as_operand(weights, v.tiles.dtype, OUT_LAYOUT)
        acc = warpgroup_mma(factor, matrix(v.tiles, slot), acc, is_async=True)  # O += P V, of the tile before
        if GROUPS > 2:
            mbarrier.arrive(go.index((own + 1) % GROUPS))
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k.empty.index((count + 1) % STAGES))
        n = first_key(end - 1 - i, seq, options, BLOCK_N)
        new, row_sum, row_max, rescale = softmax_step(  # P = 2^(S − row_max)
            logits, row_sum, row_max, first, n, seq, options, call.scale, MASKED, CAUSAL, LAYOUT
        )
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
        mbarrier.arrive(v.empty.index(slot))
        # Without a window the first step has the end of the sequence.
        if MASKED and options.units is not None and options.window is not None:
            zero_rows_past_end(v, count + 1, n, seq)
        if options.base is None:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        weights = pack_16bit(new, v.tiles.dtype)
        count += 1
    return State(acc, weights, row_sum, row_max, count, starts)


@gluon.jit
def compute_tiles(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call):
    """Run group number ``own`` of warps of a `Forward`."""
    scheduler, q_tiles, k, v = call.scheduler, call.q_tiles, call.k, call.v
    go, out, lse, statistics = call.go, call.out, call.lse, call.statistics
    work, scale, options = call.work, call.scale, call.options
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
            zero_rows_past_end(v, count, n, entry)
        state = State(acc, pack_16bit(new, v.tiles.dtype), row_sum, row_max, count, starts)
        if CAUSAL or options.window is not None:  # otherwise the first step alone has a mask
            state = attend(state, q_pieces, first, entry, full, end, call, own, True, CAUSAL)
        state = attend(state, q_pieces, first, entry, low, full, call, own, False, CAUSAL)
        if options.window is not None:
            state = attend(state, q_pieces, first, entry, begin, low, call, own, True, CAUSAL)
        acc, weights, row_sum, row_max, count, starts = state
        if OWN_BUFFERS:
            mbarrier.arrive(scheduler.empty.index(q_slot))
        slot = wait_full(v.full, count)
        factor = unpack_as_operand(weights, v.tiles.dtype, OUT_LAYOUT)
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


MOST_FIXED_TILES = gl.constexpr(6)  # of a program; see `are_counted`


@gluon.constexpr_function
def loops_are_even(causal, has_window, has_lengths, is_packed):
    """Returns whether the KV loops of all tiles are equally long."""
    return not (causal or has_window or has_lengths or is_packed)


@gluon.jit
def are_counted(tiles, programs):
    """Returns whether programs take tiles from a counter though loops are even: otherwise each has a fixed share of them.

    Few even tiles gain nothing by a counter, which costs a launch that makes it zero.
    """
    return tiles > MOST_FIXED_TILES * programs


class QueryCopies(NamedTuple):
    """Tensors that the copying warp of a kernel that owns tiles of queries copies, and buffers."""

    scheduler: Scheduler
    own_descs: gl.tuple  # of the queries, and what comes with them
    own_tiles: gl.tuple
    k_desc: gl.tensor
    v_desc: gl.tensor
    k: Ring
    v: Ring
    work: Work
    options: Options


@gluon.jit
def copy_for_queries(
    GROUPS: gl.constexpr, CAUSAL: gl.constexpr, COUNTED: gl.constexpr, TERMS: gl.constexpr, copies
):
    """The copying warp of a kernel that owns tiles of queries and has a KV loop.

    Its tiles are ``COUNTED``, or loops are even and `are_counted` says whether they are.
    """
    scheduler, own_descs, own_tiles, k_desc = copies.scheduler, copies.own_descs, copies.own_tiles, copies.k_desc
    v_desc, k, v, work = copies.v_desc, copies.k, copies.v, copies.work
    options = copies.options
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    batch_size = work.rows // work.heads
    tiles = tiles_of(work)
    tile = gl.program_id(0)
    count = 0
    done = 0
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        block, row, split = tile_place(tile, work, CAUSAL)
        batch, head = row // work.heads, row % work.heads
        entry = entry_of(work, batch, block * BLOCK_M, options)
        begin, _, _, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        query_shift, key_shift = 0, 0
        if options.units is not None:
            query_shift, key_shift = entry.query_shift, entry.key_shift
        m = block * BLOCK_M - query_shift
        copy_own(own_descs, own_tiles, batch, head, m, scheduler.full, slot, GROUPS, batch_size, TERMS)
        for i in range(end - begin):
            n = first_key(tile_of_step(i, begin, end, options), entry, options, BLOCK_N)
            n -= key_shift
            copy_tile(k_desc, batch, head // work.group, n, k, count, batch_size, TERMS)
            copy_tile(v_desc, batch, head // work.group, n, v, count, batch_size, TERMS)
            count += 1
        done += 1
        if COUNTED:
            tile = next_tile(scheduler, tiles)
        elif are_counted(tiles, gl.num_programs(0)):
            tile = next_tile(scheduler, tiles)
        else:
            tile += gl.num_programs(0)
    broadcast_end(scheduler, tile, done)


@gluon.jit
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out, lse, statistics, counter, seqused_k, units, shifts, out_rows, sink,
    work: Work, window: Window, scale: gl.float32, out_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Attention for tiles of GROUPS · 64 queries, one after the other.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, 64, D) for queries and results and (1, 1, BLOCK_N, D) for
    keys and values; those of queries and keys may be as wide as one of ``PIECES`` of a row. ``counter`` (1,) is zero
    where there are more tiles than programs, unless these have fixed shares (`are_counted`). With ``units`` and
    ``shifts`` sequences are packed, and ``out_rows`` is the address of ``out``. The sink (H,) comes with one split
    alone. Writes what `triton.forward.forward_kernel` writes: if ``SPLIT``, ``out`` is the address of the parts, and
    otherwise a descriptor.
    """
    if SPLIT:  # what merges parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    # Tiles of queries: one that attends, and the next, where there is room for it.
    Q_STAGES: gl.constexpr = 2 if PIECES * D <= NARROW_HEAD else 1
    q_tiles = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS * PIECES, 1, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT:
        out_tiles = q_tiles  # not used: parts go from registers to memory
    elif PIECES * D > NARROW_HEAD:
        out_tiles = tma.tiles_in(q_tiles, E, out.layout)
    else:
        out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], out.layout)
    scheduler = new_scheduler(counter, Q_STAGES, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, STAGES, GROUPS)
    go = barriers(GROUPS)
    init_each(go)
    fence_async_shared()
    options = Options(window, seqused_k, sink, SOFTCAP, exponent_base(SOFTCAP, dtype), units, shifts)
    UNEVEN: gl.constexpr = not loops_are_even(CAUSAL, window is not None, seqused_k is not None, units is not None)
    copies = QueryCopies(scheduler, (q_desc,), (q_tiles,), k_desc, v_desc, k, v, work, options)
    result = Result(out, out_tiles, out_strides, out_rows)
    call = Forward(scheduler, q_tiles, k, v, go, result, lse, statistics, work, scale, options)
    if GROUPS == 2:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, call)), (compute_tiles, (1, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, UNEVEN, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, call)), (compute_tiles, (1, CAUSAL, SPLIT, call)),
             (compute_tiles, (2, CAUSAL, SPLIT, call)), (copy_for_queries, (GROUPS, CAUSAL, UNEVEN, 1, copies))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
