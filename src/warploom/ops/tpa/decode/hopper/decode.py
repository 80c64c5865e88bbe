"""Decoding by tensor-product attention for Hopper, written for its asynchronous units in Gluon.

A persistent program holds one multiprocessor and takes splits of the cache, one after the other. One warp copies blocks
of keys from device memory through the tensor memory accelerator, without a pause between chunks, splits and batch
entries; four warps compute what `triton.decode.decode_kernel` computes, in the same orientation. They meet as
`warploom.device.hopper.pipeline` says, at two rings of buffers: tiles of feature factors (BLOCK_M, BLOCK), one for each
rank, and tiles of head factors (BLOCK_M, ROWS · R).

Chunks are joined in a binary tree up to sixteen, and the sixteens from left to right; a program takes a part of the tree or all.
What is pending until its neighbour is computed lies in shared memory, a sum (BLOCK, ROWS) for each level: registers have no room for it.
A split of one chunk never touches it.
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

from warploom.device.activations import power_of_two
from warploom.device.hopper.pipeline import Ring, copy_tile, matrix, new_ring, wait_full
from warploom.device.online_softmax import finite_max, join_maxima
from warploom.ops.tpa.decode.triton.decode import ChunkLengths, DecodeScales, PartialSoftmax, chunk_length

BLOCK_M = gl.constexpr(64)  # keys of a block: what one matrix instruction takes
RANKS = gl.constexpr(16)  # of queries, at most: the depth of one matrix instruction


class SplitSizes(NamedTuple):
    """Sizes of a call, and the stride of seqused_k."""

    lengths_stride: gl.int32
    work_items: gl.int32  # splits of all batch entries
    keys: gl.int32
    splits: gl.int32  # of the keys of a batch entry
    split_chunks: gl.int32


class TokenHeadStrides(NamedTuple):
    """Strides of head factors (B, H, R) of one token."""

    b: gl.int32
    h: gl.int32
    r: gl.int32


class TokenFeatureStrides(NamedTuple):
    """Strides of feature factors (B, R, F) of one token. The output (B, H, F) has its heads for ranks."""

    b: gl.int32
    r: gl.int32
    f: gl.int32


class HopperDecodeConfig(NamedTuple):
    """Compile-time choices of the kernel."""

    H: int  # heads
    RQ: int  # ranks of queries
    R: int  # ranks of keys and values
    D: int  # features of keys
    E: int  # features of values
    A_STAGES: int  # buffers of tiles of head factors
    B_STAGES: int  # buffers of tiles of feature factors
    WHOLE: bool  # whether a split has all keys
    CHUNKS: ChunkLengths
    PENDING: int  # levels of the tree at which a softmax may be pending


class Copies(NamedTuple):
    """Sources and buffers of the copying warp."""

    ak_desc: gl.tensor
    av_desc: gl.tensor
    bk_desc: gl.tensor
    bv_desc: gl.tensor
    a: Ring  # head factors (BLOCK_M, ROWS · R)
    b: Ring  # feature factors (BLOCK_M, BLOCK), a tile for each rank
    seqused_k: gl.tensor | None
    sizes: SplitSizes


class QueryTiles(NamedTuple):
    """Query factors, and buffers for Qᵀ."""

    aq: gl.tensor | None
    bq: gl.tensor
    tile: gl.shared_memory_descriptor  # (BLOCK, ROWS)
    aq_tile: gl.shared_memory_descriptor  # (ROWS, RANKS)
    bq_tile: gl.shared_memory_descriptor  # (RANKS, BLOCK)
    aq_strides: TokenHeadStrides
    bq_strides: TokenFeatureStrides


class DecodeProgram(NamedTuple):
    """Arguments of the computing warps."""

    queries: QueryTiles
    out: gl.tensor
    partial: gl.tensor | None
    statistics: gl.tensor | None
    w_tiles: gl.shared_memory_descriptor  # weights (R, BLOCK_M, ROWS)
    pending: PartialSoftmax  # of each level of the tree
    a: Ring
    b: Ring
    seqused_k: gl.tensor | None
    sizes: SplitSizes
    out_strides: TokenFeatureStrides
    scales: DecodeScales


@gluon.jit
def split_bounds(item, seqused_k, sizes, CHUNKS: gl.constexpr):
    """Returns batch entry, first key, end and length of a chunk of the split number ``item``; it may be empty."""
    batch = item // sizes.splits
    length = sizes.keys
    if seqused_k is not None:
        length = gl.load(seqused_k + batch.to(gl.int64) * sizes.lengths_stride)
        length = gl.maximum(gl.minimum(length, sizes.keys), 0).to(gl.int32)
    chunk = chunk_length(length, CHUNKS)
    first = sizes.keys * 0
    end = length
    if sizes.splits > 1:
        first = item % sizes.splits * sizes.split_chunks * chunk
        end = gl.minimum(first + sizes.split_chunks * chunk, length)
    return batch, first, end, chunk


@gluon.jit
def copy_splits(config: gl.constexpr, copies):
    """Runs the copying warp."""
    R: gl.constexpr = config.R
    CHUNKS: gl.constexpr = config.CHUNKS
    a, b, sizes = copies.a, copies.b, copies.sizes
    a_count = 0
    b_count = 0
    for item in range(gl.program_id(0), sizes.work_items, gl.num_programs(0)):
        batch, first, end, _ = split_bounds(item, copies.seqused_k, sizes, CHUNKS)
        for start in range(first, end, BLOCK_M):
            copy_tile(copies.ak_desc, batch, 0, start, a, a_count)
            for r in gl.static_range(R):
                copy_tile(copies.bk_desc, batch, r, start, b, b_count + r)
            copy_tile(copies.av_desc, batch, 0, start, a, a_count + 1)
            for r in gl.static_range(R):
                copy_tile(copies.bv_desc, batch, r, start, b, b_count + R + r)
            a_count += 2
            b_count += 2 * R


@gluon.constexpr_function
def ranks_layout(rows, ranks):
    """Returns the layout of a tile (BLOCK_M, ROWS · R) in which every thread holds all ranks of the elements that it has of results (M, ROWS)."""
    registers = [[0, 1 << i] for i in range(ranks.bit_length() - 1)]
    registers += [[0, ranks], [8, 0]] + [[0, ranks * (8 << i)] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 2 * ranks], [0, 4 * ranks], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, rows * ranks])


@gluon.jit
def head_factors(tile, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns head factors (BLOCK_M, ROWS) of every rank, float32."""
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
def query_tile(queries, batch, scale_q, H: gl.constexpr, RQ: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Store Qᵀ (BLOCK, ROWS) of a batch entry in shared memory. Without ``aq``, ``bq`` holds Q."""
    aq, bq, tile = queries.aq, queries.bq, queries.tile
    aq_tile, bq_tile, aq_strides, bq_strides = (
        queries.aq_tile,
        queries.bq_tile,
        queries.aq_strides,
        queries.bq_strides,
    )
    BLOCK: gl.constexpr = tile.shape[0]
    ROWS: gl.constexpr = tile.shape[1]
    bq += batch.to(gl.int64) * bq_strides.b
    if aq is None:
        d = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
        h = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
        q = gl.load(bq + h * bq_strides.r + d * bq_strides.f, mask=(h < H) & (d < D), other=0.0).to(gl.float32)
    else:
        IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        h = gl.arange(0, ROWS, gl.SliceLayout(1, IN_ROWS))[:, None]
        r = gl.arange(0, RANKS, gl.SliceLayout(0, IN_ROWS))[None, :]
        aq += batch.to(gl.int64) * aq_strides.b
        a = gl.load(aq + h * aq_strides.h + r * aq_strides.r, mask=(h < H) & (r < RQ), other=0.0)
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        r = gl.arange(0, RANKS, gl.SliceLayout(1, WIDE))[:, None]
        d = gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))[None, :]
        b = gl.load(bq + r * bq_strides.r + d * bq_strides.f, mask=(r < RQ) & (d < D), other=0.0)
        aq_tile.store(a)
        bq_tile.store(b)
        fence_async_shared()
        zeros = gl.zeros([BLOCK, ROWS], gl.float32, LAYOUT)
        q = warpgroup_mma(bq_tile.permute([1, 0]), aq_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
        q = warpgroup_mma_wait(0, deps=[q])
    tile.store((q * scale_q).to(tile.dtype))
    fence_async_shared()


@gluon.jit
def join(softmax, pending, level: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the softmax that is pending at a level, joined with ``softmax`` over the keys behind; see `triton.decode.join`."""
    before_max = pending.row_max.index(level).load(gl.SliceLayout(0, LAYOUT))
    row_max, rescale, rescale_new = join_maxima(before_max, softmax.row_max)
    wide = rescale[None, :] + gl.zeros(softmax.acc.shape, gl.float32, LAYOUT)
    return PartialSoftmax(
        gl.fma(pending.acc.index(level).load(LAYOUT), wide, softmax.acc * rescale_new[None, :]),
        row_max,
        gl.fma(
            pending.row_sum.index(level).load(gl.SliceLayout(0, LAYOUT)), rescale, softmax.row_sum * rescale_new
        ),
    )


@gluon.jit
def store_pending(softmax, pending, level: gl.constexpr):
    """Stores a softmax as the pending one of a level."""
    pending.acc.index(level).store(softmax.acc)
    pending.row_max.index(level).store(softmax.row_max)
    pending.row_sum.index(level).store(softmax.row_sum)


@gluon.jit
def join_pending(softmax, pending, place, first, last, LAYOUT: gl.constexpr):
    """Joins the softmax of chunk number ``place`` with those that are pending, as far up the tree as there are some on both sides.

    ``first`` is the number of the first chunk of the split, and with ``last`` this is its last one: the result is the
    softmax of the split. Else it is stored, pending until its neighbour is computed.
    """
    LEVELS: gl.constexpr = pending.acc.shape[0] - 1
    joining = place == place  # true, until it is stored
    for level in gl.static_range(LEVELS):
        if joining:
            if place >> level & 1 == 1 and place >> level << level > first:
                softmax = join(softmax, pending, level, LAYOUT)
            if place >> level & 1 == 0 and not last:
                store_pending(softmax, pending, level)
                joining = place != place
    if joining:
        if place >> LEVELS << LEVELS > first:
            softmax = join(softmax, pending, LEVELS, LAYOUT)
        if not last:
            store_pending(softmax, pending, LEVELS)
    return softmax


@gluon.jit
def attend_splits(config: gl.constexpr, call):
    """Runs the computing warps."""
    CHUNKS: gl.constexpr = config.CHUNKS
    H: gl.constexpr = config.H
    R: gl.constexpr = config.R
    E: gl.constexpr = config.E
    out, w_tiles, pending, a, b = call.out, call.w_tiles, call.pending, call.a, call.b
    sizes, out_strides, scales = call.sizes, call.out_strides, call.scales
    q_tile = call.queries.tile
    BLOCK: gl.constexpr = q_tile.shape[0]
    ROWS: gl.constexpr = q_tile.shape[1]
    B_STAGES: gl.constexpr = b.full.shape[0]
    # Keys or features down, rows across: the same rows in a thread either way.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACROSS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    none = gl.zeros([BLOCK, ROWS], gl.float32, LAYOUT)
    none_max = gl.full([ROWS], float("-inf"), gl.float32, ACROSS)
    none_sum = gl.zeros([ROWS], gl.float32, ACROSS)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))[:, None]
    e = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    h = gl.arange(0, ROWS, ACROSS)
    no_logits = gl.zeros([BLOCK_M, ROWS], gl.float32, LAYOUT)
    a_count = 0
    b_count = 0
    for item in range(gl.program_id(0), sizes.work_items, gl.num_programs(0)):
        batch, first, end, chunk = split_bounds(item, call.seqused_k, sizes, CHUNKS)
        if config.WHOLE or first < end:
            query_tile(call.queries, batch, scales.q, H, config.RQ, config.D, LAYOUT)
            softmax = PartialSoftmax(none, none_max, none_sum)
            for chunk_start in range(first, end, chunk):
                chunk_end = gl.minimum(chunk_start + chunk, end)
                acc, row_max = none, none_max
                sums = no_logits
                for start in range(chunk_start, chunk_end, BLOCK_M):
                    tail = start + BLOCK_M > chunk_end
                    products = ()
                    for r in gl.static_range(R):
                        stage = wait_full(b.full, b_count + r)
                        products = products + (
                            warpgroup_mma(matrix(b.tiles, stage), q_tile, no_logits, use_acc=False, is_async=True),
                        )
                    stage = wait_full(a.full, a_count)
                    factors = head_factors(matrix(a.tiles, stage), R, LAYOUT)
                    mbarrier.arrive(a.empty.index(stage))
                    logits = no_logits
                    for r in gl.static_range(R):
                        product = warpgroup_mma_wait(R - 1 - r, deps=[products[r]])
                        mbarrier.arrive(b.empty.index((b_count + r) % B_STAGES))
                        if r == 0:
                            logits = product * factors[r]
                        else:
                            logits += product * factors[r]
                    logits = logits * scales.logits
                    if tail:
                        logits = gl.where(start + m < chunk_end, logits, float("-inf"))
                    new_max = gl.maximum(row_max, gl.max(logits, 0))
                    base = finite_max(new_max)
                    p = power_of_two(logits - base[None, :])
                    rescale = power_of_two(row_max - base)
                    sums = sums * rescale[None, :] + p
                    row_max = new_max
                    acc = acc * rescale[None, :]

                    stage = wait_full(a.full, a_count + 1)
                    factors = head_factors(matrix(a.tiles, stage), R, LAYOUT)
                    mbarrier.arrive(a.empty.index(stage))
                    for r in gl.static_range(R):
                        w = p * factors[r]
                        if tail:
                            w = gl.where(start + m < chunk_end, w, 0.0)
                        w_tiles.index(r).store(w.to(w_tiles.dtype))
                    for r in gl.static_range(R):
                        stage = wait_full(b.full, b_count + R + r)
                        if tail:  # what lies behind may be NaN, which times zero is NaN
                            tile = matrix(b.tiles, stage)
                            key = start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, WIDE))[:, None]
                            tile.store(gl.where(key < chunk_end, tile.load(WIDE), 0.0).to(tile.dtype))
                    fence_async_shared()
                    for r in gl.static_range(R):
                        stage = (b_count + R + r) % B_STAGES
                        acc = warpgroup_mma(
                            matrix(b.tiles, stage).permute([1, 0]), w_tiles.index(r), acc, is_async=True
                        )
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    for r in gl.static_range(R):
                        mbarrier.arrive(b.empty.index((b_count + R + r) % B_STAGES))
                    a_count += 2
                    b_count += 2 * R
                row_sum = gl.sum(sums, 0)
                place, first_place = chunk_start // chunk, first // chunk
                softmax = join_pending(
                    PartialSoftmax(acc, row_max, row_sum), pending, place, first_place, chunk_end == end, LAYOUT
                )
            if config.WHOLE:
                row_sum = softmax.row_sum
                result = softmax.acc * (scales.v / gl.where(row_sum == 0.0, 1.0, row_sum))[None, :]
                ptrs = out + batch.to(gl.int64) * out_strides.b
                ptrs = ptrs + (h.to(gl.int64) * out_strides.r)[None, :] + e * out_strides.f
                gl.store(ptrs, result.to(out.dtype.element_ty), mask=(h < H)[None, :] & (e < E))
            else:
                part = item.to(gl.int64)
                gl.store(
                    call.partial + part * (H * E) + (h * E)[None, :] + e,
                    softmax.acc,
                    mask=(h < H)[None, :] & (e < E),
                )
                gl.store(call.statistics + part * (2 * H) + h, softmax.row_max, mask=h < H)
                gl.store(call.statistics + part * (2 * H) + H + h, softmax.row_sum, mask=h < H)


POINTERS = ["aq", "bq", "seqused_k", "out"]


@gluon.jit(do_not_specialize_on_alignment=POINTERS)
def hopper_decode_kernel(
    ak_desc, av_desc, bk_desc, bv_desc, aq, bq, seqused_k, out, partial, statistics,
    sizes: SplitSizes, aq_strides: TokenHeadStrides, bq_strides: TokenFeatureStrides, out_strides: TokenFeatureStrides,
    scales: DecodeScales, config: gl.constexpr,
):  # fmt: skip
    """Computes one new token of every batch entry, over splits of its keys, of so many chunks each.

    Descriptors are of (B, 1, M, H·R), with boxes of (1, 1, BLOCK_M, ROWS · R), for head factors, and of (B, R, M, D),
    with boxes of (1, 1, BLOCK_M, BLOCK), for feature factors. Writes what `triton.decode.decode_kernel` writes.
    """
    R: gl.constexpr = config.R
    ROWS: gl.constexpr = ak_desc.block_type.shape[3] // R
    BLOCK: gl.constexpr = bk_desc.block_type.shape[3]
    dtype: gl.constexpr = bk_desc.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [config.A_STAGES, 1, 1, BLOCK_M, ROWS * R], ak_desc.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [config.B_STAGES, 1, 1, BLOCK_M, BLOCK], bk_desc.layout)
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
    pending = PartialSoftmax(
        gl.allocate_shared_memory(gl.float32, [config.PENDING, BLOCK, ROWS], SUMS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [config.PENDING, ROWS], FLAT_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [config.PENDING, ROWS], FLAT_LAYOUT),
    )
    a = new_ring(a_tiles, config.A_STAGES, 1)
    b = new_ring(b_tiles, config.B_STAGES, 1)
    fence_async_shared()
    copies = Copies(ak_desc, av_desc, bk_desc, bv_desc, a, b, seqused_k, sizes)
    queries = QueryTiles(aq, bq, q_tile, aq_tile, bq_tile, aq_strides, bq_strides)
    call = DecodeProgram(
        queries, out, partial, statistics, w_tiles, pending, a, b, seqused_k, sizes, out_strides, scales
    )
    gl.warp_specialize([(attend_splits, (config, call)), (copy_splits, (config, copies))], [1], [24])
