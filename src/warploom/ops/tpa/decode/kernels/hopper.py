"""Decoding by tensor-product attention for Hopper, written for its asynchronous units in Gluon.

A persistent program holds one multiprocessor and takes spans of the cache, one after the other. One warp copies blocks
of keys from device memory through the tensor memory accelerator, without a pause between chunks, spans and batch
entries; four warps compute what `kernels.decode_kernel` computes, in the same orientation. They meet as
`warploom.device.hopper.pipeline` says, at two rings of buffers: tiles of feature factors (BLOCK_M, BLOCK), one for each
rank, and tiles of head factors (BLOCK_M, ROWS · R).

Chunks are joined in a binary tree up to sixteen, and the sixteens from left to right; a program takes a node or all.
What waits for its neighbour lies in shared memory, a sum (BLOCK, ROWS) for each level: registers have no room for it.
A span of one chunk never touches it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.hopper import pipeline as hopper
from warploom.device.hopper.pipeline import Ring, barriers, copy_tile, init_ring, matrix, power_of_two, wait_full

BLOCK_M = gl.constexpr(hopper.ROWS)  # keys of a block
RANKS = gl.constexpr(16)  # of queries, at most: the depth of one matrix instruction


@gluon.jit
def chunk_length(length, SHORTEST: gl.constexpr, LONGEST: gl.constexpr, WANTED: gl.constexpr):
    """See `kernels.chunk_length`."""
    chunk = length * 0 + SHORTEST
    while (chunk * WANTED < length) & (chunk < LONGEST):
        chunk = chunk * 2
    return chunk


@gluon.jit
def span_of(
    unit, lengths, lengths_b, keys, spans, span_chunks,
    SHORTEST: gl.constexpr, LONGEST: gl.constexpr, WANTED: gl.constexpr,
):  # fmt: skip
    """Batch entry, first key, end and length of a chunk of the span number ``unit``; it may be empty."""
    entry = unit // spans
    length = keys
    if lengths is not None:
        length = gl.load(lengths + entry.to(gl.int64) * lengths_b)
        length = gl.maximum(gl.minimum(length, keys), 0).to(gl.int32)
    chunk = chunk_length(length, SHORTEST, LONGEST, WANTED)
    first = keys * 0
    end = length
    if spans > 1:
        first = unit % spans * span_chunks * chunk
        end = gl.minimum(first + span_chunks * chunk, length)
    return entry, first, end, chunk


@gluon.jit
def copy_spans(arguments, R: gl.constexpr, SHORTEST: gl.constexpr, LONGEST: gl.constexpr, WANTED: gl.constexpr):
    """The copying warp."""
    (
        ak_desc, av_desc, bk_desc, bv_desc, a_tiles, b_tiles, a_full, a_empty, b_full, b_empty,
        lengths, lengths_b, units, keys, spans, span_chunks,
    ) = arguments  # fmt: skip
    a_count = 0
    b_count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        entry, first, end, _ = span_of(
            unit, lengths, lengths_b, keys, spans, span_chunks, SHORTEST, LONGEST, WANTED
        )
        for start in range(first, end, BLOCK_M):
            copy_tile(ak_desc, entry, 0, start, Ring(a_tiles, a_full, a_empty), a_count)
            for r in gl.static_range(R):
                copy_tile(bk_desc, entry, r, start, Ring(b_tiles, b_full, b_empty), b_count + r)
            copy_tile(av_desc, entry, 0, start, Ring(a_tiles, a_full, a_empty), a_count + 1)
            for r in gl.static_range(R):
                copy_tile(bv_desc, entry, r, start, Ring(b_tiles, b_full, b_empty), b_count + R + r)
            a_count += 2
            b_count += 2 * R


@gluon.constexpr_function
def ranks_layout(rows, ranks):
    """Of a tile (BLOCK_M, ROWS · R): every thread holds all ranks of the elements that it has of results (M, ROWS)."""
    registers = [[0, 1 << i] for i in range(ranks.bit_length() - 1)]
    registers += [[0, ranks], [8, 0]] + [[0, ranks * (8 << i)] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 2 * ranks], [0, 4 * ranks], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, rows * ranks])


@gluon.jit
def head_factors(tile, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Head factors (BLOCK_M, ROWS) of every rank, float32."""
    ROWS: gl.constexpr = tile.shape[1] // R
    if R == 1:
        factors = (tile.load(LAYOUT).to(gl.float32),)
    else:
        every = tile.load(ranks_layout(ROWS, R))
        if R == 2:
            parts = gl.split(every.reshape([BLOCK_M, ROWS, 2]))
        else:
            even, odd = gl.split(every.reshape([BLOCK_M, ROWS, 2, 2]))
            first, third = gl.split(even)
            second, fourth = gl.split(odd)
            parts = (first, second, third, fourth)
        factors = ()
        for r in gl.static_range(R):
            factors = factors + (gl.convert_layout(parts[r], LAYOUT, assert_trivial=True).to(gl.float32),)
    return factors


@gluon.jit
def query_tile(
    aq, bq, entry, q_tile, aq_tile, bq_tile, aq_b, aq_h, aq_r, bq_b, bq_r, bq_d, scale_q,
    H: gl.constexpr, RQ: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Leave Qᵀ (BLOCK, ROWS) of a batch entry in shared memory. Without ``aq``, ``bq`` holds Q."""
    BLOCK: gl.constexpr = q_tile.shape[0]
    ROWS: gl.constexpr = q_tile.shape[1]
    bq += entry.to(gl.int64) * bq_b
    if aq is None:
        d = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
        h = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
        q = gl.load(bq + h * bq_r + d * bq_d, mask=(h < H) & (d < D), other=0.0).to(gl.float32)
    else:
        IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        h = gl.arange(0, ROWS, gl.SliceLayout(1, IN_ROWS))[:, None]
        r = gl.arange(0, RANKS, gl.SliceLayout(0, IN_ROWS))[None, :]
        aq += entry.to(gl.int64) * aq_b
        a = gl.load(aq + h * aq_h + r * aq_r, mask=(h < H) & (r < RQ), other=0.0)
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        r = gl.arange(0, RANKS, gl.SliceLayout(1, WIDE))[:, None]
        d = gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))[None, :]
        b = gl.load(bq + r * bq_r + d * bq_d, mask=(r < RQ) & (d < D), other=0.0)
        aq_tile.store(a)
        bq_tile.store(b)
        fence_async_shared()
        zeros = gl.zeros([BLOCK, ROWS], gl.float32, LAYOUT)
        q = warpgroup_mma(bq_tile.permute([1, 0]), aq_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
        q = warpgroup_mma_wait(0, deps=[q])
    q_tile.store((q * scale_q).to(q_tile.dtype))
    fence_async_shared()


@gluon.jit
def join(acc, top, total, waiting, level: gl.constexpr, LAYOUT: gl.constexpr):
    """What waits at a level, and then a sum over the keys behind it, joined; see `kernels.join`."""
    sums, tops, totals = waiting
    before_top = tops.index(level).load(gl.SliceLayout(0, LAYOUT))
    highest = gl.maximum(before_top, top)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    keep = power_of_two(before_top - base)
    add = power_of_two(top - base)
    wide = keep[None, :] + gl.zeros(acc.shape, gl.float32, LAYOUT)
    return (
        gl.fma(sums.index(level).load(LAYOUT), wide, acc * add[None, :]),
        highest,
        gl.fma(totals.index(level).load(gl.SliceLayout(0, LAYOUT)), keep, total * add),
    )


@gluon.jit
def let_wait(acc, top, total, waiting, level: gl.constexpr):
    """Leave a sum at a level."""
    sums, tops, totals = waiting
    sums.index(level).store(acc)
    tops.index(level).store(top)
    totals.index(level).store(total)


@gluon.jit
def climb(acc, top, total, waiting, place, first, last, LAYOUT: gl.constexpr):
    """Join the sum of chunk number ``place`` with what waits, as far up the tree as there are sums on both sides.

    ``first`` is the number of the first chunk of the span, and with ``last`` this is its last one: the result is the
    sum of the span. Else the sum is left where it waits for its neighbour.
    """
    LEVELS: gl.constexpr = waiting[0].shape[0] - 1
    climbing = place == place  # true, until the sum is left
    for level in gl.static_range(LEVELS):
        if climbing:
            if place >> level & 1 == 1 and place >> level << level > first:
                acc, top, total = join(acc, top, total, waiting, level, LAYOUT)
            if place >> level & 1 == 0 and not last:
                let_wait(acc, top, total, waiting, level)
                climbing = place != place
    if climbing:
        if place >> LEVELS << LEVELS > first:
            acc, top, total = join(acc, top, total, waiting, LEVELS, LAYOUT)
        if not last:
            let_wait(acc, top, total, waiting, LEVELS)
    return acc, top, total


@gluon.jit
def attend_spans(
    arguments, H: gl.constexpr, RQ: gl.constexpr, R: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    WHOLE: gl.constexpr, SHORTEST: gl.constexpr, LONGEST: gl.constexpr, WANTED: gl.constexpr,
):  # fmt: skip
    """The computing warps."""
    (
        aq, bq, out, partial, statistics, q_tile, aq_tile, bq_tile, w_tiles, waiting,
        a_tiles, b_tiles, a_full, a_empty, b_full, b_empty,
        lengths, lengths_b, units, keys, spans, span_chunks,
        aq_b, aq_h, aq_r, bq_b, bq_r, bq_d, out_b, out_h, out_e, logit_scale, scale_q, scale_v,
    ) = arguments  # fmt: skip
    BLOCK: gl.constexpr = q_tile.shape[0]
    ROWS: gl.constexpr = q_tile.shape[1]
    B_STAGES: gl.constexpr = b_full.shape[0]
    # Keys or features down, rows across: the same rows in a thread either way.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACROSS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    none = gl.zeros([BLOCK, ROWS], gl.float32, LAYOUT)
    none_top = gl.full([ROWS], float("-inf"), gl.float32, ACROSS)
    none_total = gl.zeros([ROWS], gl.float32, ACROSS)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))[:, None]
    e = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    h = gl.arange(0, ROWS, ACROSS)
    no_logits = gl.zeros([BLOCK_M, ROWS], gl.float32, LAYOUT)
    a_count = 0
    b_count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        entry, first, end, chunk = span_of(
            unit, lengths, lengths_b, keys, spans, span_chunks, SHORTEST, LONGEST, WANTED
        )
        if WHOLE or first < end:
            query_tile(
                aq, bq, entry, q_tile, aq_tile, bq_tile, aq_b, aq_h, aq_r, bq_b, bq_r, bq_d, scale_q,
                H, RQ, D, LAYOUT,
            )  # fmt: skip
            acc, top, total = none, none_top, none_total
            for chunk_start in range(first, end, chunk):
                chunk_end = gl.minimum(chunk_start + chunk, end)
                acc, top = none, none_top
                sums = no_logits
                for start in range(chunk_start, chunk_end, BLOCK_M):
                    tail = start + BLOCK_M > chunk_end
                    products = ()
                    for r in gl.static_range(R):
                        slot = wait_full(b_full, b_count + r)
                        products = products + (
                            warpgroup_mma(matrix(b_tiles, slot), q_tile, no_logits, use_acc=False, is_async=True),
                        )
                    slot = wait_full(a_full, a_count)
                    factors = head_factors(matrix(a_tiles, slot), R, LAYOUT)
                    mbarrier.arrive(a_empty.index(slot))
                    logits = no_logits
                    for r in gl.static_range(R):
                        product = warpgroup_mma_wait(R - 1 - r, deps=[products[r]])
                        mbarrier.arrive(b_empty.index((b_count + r) % B_STAGES))
                        if r == 0:
                            logits = product * factors[r]
                        else:
                            logits += product * factors[r]
                    logits = logits * logit_scale
                    if tail:
                        logits = gl.where(start + m < chunk_end, logits, float("-inf"))
                    highest = gl.maximum(top, gl.max(logits, 0))
                    base = gl.where(highest == float("-inf"), 0.0, highest)
                    p = power_of_two(logits - base[None, :])
                    keep = power_of_two(top - base)
                    sums = sums * keep[None, :] + p
                    top = highest
                    acc = acc * keep[None, :]

                    slot = wait_full(a_full, a_count + 1)
                    factors = head_factors(matrix(a_tiles, slot), R, LAYOUT)
                    mbarrier.arrive(a_empty.index(slot))
                    for r in gl.static_range(R):
                        w = p * factors[r]
                        if tail:
                            w = gl.where(start + m < chunk_end, w, 0.0)
                        w_tiles.index(r).store(w.to(w_tiles.dtype))
                    for r in gl.static_range(R):
                        slot = wait_full(b_full, b_count + R + r)
                        if tail:  # what lies behind may be NaN, which times zero is NaN
                            tile = matrix(b_tiles, slot)
                            key = start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, WIDE))[:, None]
                            tile.store(gl.where(key < chunk_end, tile.load(WIDE), 0.0).to(tile.dtype))
                    fence_async_shared()
                    for r in gl.static_range(R):
                        slot = (b_count + R + r) % B_STAGES
                        acc = warpgroup_mma(
                            matrix(b_tiles, slot).permute([1, 0]), w_tiles.index(r), acc, is_async=True
                        )
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    for r in gl.static_range(R):
                        mbarrier.arrive(b_empty.index((b_count + R + r) % B_STAGES))
                    a_count += 2
                    b_count += 2 * R
                total = gl.sum(sums, 0)
                place, first_place = chunk_start // chunk, first // chunk
                acc, top, total = climb(acc, top, total, waiting, place, first_place, chunk_end == end, LAYOUT)
            if WHOLE:
                result = acc * (scale_v / gl.where(total == 0.0, 1.0, total))[None, :]
                cells = out + entry.to(gl.int64) * out_b + (h.to(gl.int64) * out_h)[None, :] + e * out_e
                gl.store(cells, result.to(out.dtype.element_ty), mask=(h < H)[None, :] & (e < E))
            else:
                slot = unit.to(gl.int64)
                gl.store(partial + slot * (H * E) + (h * E)[None, :] + e, acc, mask=(h < H)[None, :] & (e < E))
                gl.store(statistics + slot * (2 * H) + h, top, mask=h < H)
                gl.store(statistics + slot * (2 * H) + H + h, total, mask=h < H)


NUMBERS = (
    "lengths_b units keys spans span_chunks aq_b aq_h aq_r bq_b bq_r bq_d out_b out_h out_e "
    "logit_scale scale_q scale_v"
).split()
POINTERS = "aq bq lengths out".split()


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def hopper_decode_kernel(
    ak_desc, av_desc, bk_desc, bv_desc, aq, bq, lengths, out, partial, statistics,
    lengths_b: gl.int32, units: gl.int32, keys: gl.int32, spans: gl.int32, span_chunks: gl.int32,
    aq_b: gl.int32, aq_h: gl.int32, aq_r: gl.int32, bq_b: gl.int32, bq_r: gl.int32, bq_d: gl.int32,
    out_b: gl.int32, out_h: gl.int32, out_e: gl.int32,
    logit_scale: gl.float32, scale_q: gl.float32, scale_v: gl.float32,
    H: gl.constexpr, RQ: gl.constexpr, R: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    A_STAGES: gl.constexpr, B_STAGES: gl.constexpr, WHOLE: gl.constexpr,
    SHORTEST: gl.constexpr, LONGEST: gl.constexpr, WANTED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """One new token of every batch entry, over ``spans`` spans of its keys, of ``span_chunks`` chunks each.

    Descriptors are of (B, 1, M, H·R), with boxes of (1, 1, BLOCK_M, ROWS · R), for head factors, and of (B, R, M, D),
    with boxes of (1, 1, BLOCK_M, BLOCK), for feature factors. Writes what `kernels.decode_kernel` writes.
    """
    ROWS: gl.constexpr = ak_desc.block_type.shape[3] // R
    BLOCK: gl.constexpr = bk_desc.block_type.shape[3]
    dtype: gl.constexpr = bk_desc.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [A_STAGES, 1, 1, BLOCK_M, ROWS * R], ak_desc.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [B_STAGES, 1, 1, BLOCK_M, BLOCK], bk_desc.layout)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, ROWS], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK, ROWS], Q_LAYOUT)
    AQ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, RANKS], dtype)
    aq_tile = gl.allocate_shared_memory(dtype, [ROWS, RANKS], AQ_LAYOUT)
    BQ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([RANKS, BLOCK], dtype)
    bq_tile = gl.allocate_shared_memory(dtype, [RANKS, BLOCK], BQ_LAYOUT)
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, ROWS], dtype)
    w_tiles = gl.allocate_shared_memory(dtype, [R, BLOCK_M, ROWS], W_LAYOUT)
    # A thread has two neighbours of an (8, 8) tile of results: with this swizzle half a warp meets no bank twice.
    SUMS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    FLAT_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    waiting = (
        gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK, ROWS], SUMS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], FLAT_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], FLAT_LAYOUT),
    )
    a_full = barriers(A_STAGES)
    a_empty = barriers(A_STAGES)
    b_full = barriers(B_STAGES)
    b_empty = barriers(B_STAGES)
    init_ring(a_full, a_empty, 1)
    init_ring(b_full, b_empty, 1)
    fence_async_shared()
    copying = (
        ak_desc, av_desc, bk_desc, bv_desc, a_tiles, b_tiles, a_full, a_empty, b_full, b_empty,
        lengths, lengths_b, units, keys, spans, span_chunks,
    )  # fmt: skip
    computing = (
        aq, bq, out, partial, statistics, q_tile, aq_tile, bq_tile, w_tiles, waiting,
        a_tiles, b_tiles, a_full, a_empty, b_full, b_empty,
        lengths, lengths_b, units, keys, spans, span_chunks,
        aq_b, aq_h, aq_r, bq_b, bq_r, bq_d, out_b, out_h, out_e, logit_scale, scale_q, scale_v,
    )  # fmt: skip
    gl.warp_specialize(
        [(attend_spans, (computing, H, RQ, R, D, E, WHOLE, SHORTEST, LONGEST, WANTED)),
         (copy_spans, (copying, R, SHORTEST, LONGEST, WANTED))],
        [1], [24],
    )  # fmt: skip
