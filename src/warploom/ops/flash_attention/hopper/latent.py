"""Flash attention for rows of a latent cache on Hopper, written for its asynchronous units in Gluon.

Rows of 576 features are keys, and their first 512 features values; all heads are rows of a tile, as in `triton.latent`,
whose chunks these are too. One warp copies tiles of 64 keys into a ring of two. Two groups of four warps own the same
64 rows, and each the values of 256 features: both form all logits, with the same bits, so that nothing is exchanged, and
multiply the weights with their own half of the tile, where it lies. While one has its softmax, the other multiplies.
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
from warploom.device.hopper.pipeline import (
    Ring,
    as_factor,
    barriers,
    init_ring,
    matrix,
    thread_barrier,
    wait_empty,
    wait_full,
)
from warploom.device.online_softmax import join_maxima, update_softmax
from warploom.device.rows import Strides
from warploom.ops.flash_attention.hopper.forward import cache_places
from warploom.ops.flash_attention.hopper.softmax import LN_2, with_sink
from warploom.ops.flash_attention.hopper.tiles import ROWS, clear_rows, product_layout
from warploom.ops.flash_attention.hopper.work import SeqLens
from warploom.ops.flash_attention.triton.decode import FewQueries, Parts, packed_rows
from warploom.ops.flash_attention.triton.tiles import ForwardStrides, Sizes, loop_bounds, used_keys

LATENT_KEYS = gl.constexpr(64)  # of a tile
LATENT_STAGES = gl.constexpr(2)
HALF = gl.constexpr(256)  # features of values that a group of warps owns
REST = gl.constexpr(64)  # features of keys behind those of values
BOX = gl.constexpr(64)  # columns that are swizzled together: see `tma.boxes_in`
LATENT_FEATURES = gl.constexpr(576)


class LatentSequence(NamedTuple):
    """A sequence in a cache."""

    number: gl.int32
    keys: gl.int32


class LatentWork(NamedTuple):
    """A tile of rows, its part of the KV loop, and the tensors and buffers of a program; None where it has them not."""

    seq: LatentSequence
    key_head: gl.int32
    row: gl.int32  # the first
    tokens: gl.int32  # queries of the sequence
    first_token: gl.int32  # in q
    entry: gl.int64  # of q
    start: gl.int32  # of keys, and so are the next three
    stop: gl.int32
    end: gl.int32  # behind which no row sees any
    full: gl.int32  # behind which not all rows see all
    span: gl.int32  # keys of a chunk
    chunk: gl.int32  # the first
    last_chunk: gl.int32  # behind it
    lengths: SeqLens  # of the tensors
    block_table: gl.tensor | None
    sizes: Sizes
    q_halves: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    halves: Ring
    rest: gl.shared_memory_descriptor


class LatentResult(NamedTuple):
    """Addresses of results, or of those of chunks, and the places of rows in them."""

    out: gl.tensor
    lse: gl.tensor | None
    statistics: gl.tensor
    whole: gl.tensor | None
    sink: gl.tensor | None
    strides: Strides
    out_split: gl.int64  # from a chunk's output to the next
    entry: gl.int64
    first_token: gl.int32
    limit: gl.int32  # tokens that are stored
    tokens: gl.int32  # of an entry
    rows: gl.int64  # of all entries


@gluon.jit
def copy_queries(q, strides, work, tile, first: gl.constexpr, config: gl.constexpr):
    """Copy features from ``first`` on of all rows to shared memory, zeros where there is no row."""
    ACROSS: gl.constexpr = tile.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    VEC: gl.constexpr = config.VEC
    group = work.sizes.group
    r = work.row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token, head = work.first_token + r // group, work.key_head * group + r % group
    offsets = work.entry * (strides.b * VEC) + token * (strides.n * VEC) + head * (strides.h * VEC)
    feature = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    there = (r < work.tokens * group)[:, None]
    tile.store(gl.load(q + offsets[:, None] + feature[None, :], mask=there, other=0.0))


@gluon.jit
def store_statistics(row_sum, row_max, chunk, work, result, LAYOUT: gl.constexpr):
    """Store row_sum and row_max of a chunk, or of the result with its lse."""
    group = work.sizes.group
    r = work.row + gl.arange(0, ROWS, LAYOUT)
    head = work.key_head * group + r % group
    in_range = r < result.limit * group
    row = (result.entry * work.sizes.heads + head) * result.tokens + result.first_token + r // group
    to = result.statistics + chunk.to(gl.int64) * 2 * result.rows + row
    gl.store(to, row_max, mask=in_range)
    gl.store(to + result.rows, row_sum, mask=in_range)
    if result.lse is not None:
        some = gl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: lse −inf + 0
        gl.store(result.lse + row, (row_max + gl.log2(some)) * LN_2, mask=in_range)


@gluon.jit
def store_values(acc, chunk, own: gl.constexpr, work, result, config: gl.constexpr):
    """Store the sums of values of a chunk, or the result."""
    VEC: gl.constexpr = config.VEC
    LAYOUT: gl.constexpr = product_layout(HALF)
    group, strides = work.sizes.group, result.strides
    r = work.row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token, head = result.first_token + r // group, work.key_head * group + r % group
    offsets = result.entry * (strides.b * VEC) + token * (strides.n * VEC) + head * (strides.h * VEC)
    offsets += chunk.to(gl.int64) * (result.out_split * VEC)
    feature = own * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    out = result.out + offsets[:, None] + (feature if config.UNIT else feature * strides.f)[None, :]
    gl.store(out, acc.to(result.out.dtype.element_ty), mask=(r < result.limit * group)[:, None])


@gluon.jit
def store_result(
    acc, row_sum, row_max, own: gl.constexpr, work, result, LAYOUT: gl.constexpr, config: gl.constexpr
):
    """Store the result of a program that took all keys."""
    OUT_LAYOUT: gl.constexpr = product_layout(HALF)
    if result.sink is not None:
        head = work.key_head * work.sizes.group + (work.row + gl.arange(0, ROWS, LAYOUT)) % work.sizes.group
        row_sum, row_max, rescale = with_sink(row_sum, row_max, gl.load(result.sink + head).to(gl.float32))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
    some = gl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: 0 / 1
    acc = acc / gl.convert_layout(some, gl.SliceLayout(1, OUT_LAYOUT))[:, None]  # as where chunks are joined
    first = work.chunk * 0
    if own == 0:
        store_statistics(row_sum, row_max, first, work, result, LAYOUT)
    store_values(acc, first, own, work, result, config)


@gluon.jit
def whole_at(whole, own: gl.constexpr, first: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the addresses of sums of the program's chunks, of features from ``first`` on."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    feature = first + gl.arange(0, LAYOUT.instr_shape[1], gl.SliceLayout(0, LAYOUT))
    program = (gl.program_id(0) * 2 + own).to(gl.int64) * (ROWS * HALF)
    return whole + program + (r * HALF)[:, None] + feature[None, :]


@gluon.jit
def join_whole(acc, rescale, rescale_whole, whole, own: gl.constexpr, first: gl.constexpr):
    """Returns the sums of values of a chunk, joined with those before, as `triton.decode.join` does.

    A few features at a time, since no more fit in registers.
    """
    WIDTH: gl.constexpr = acc.shape[1]
    if WIDTH > LATENT_KEYS:
        low, high = gl.split(acc.reshape([ROWS, 2, WIDTH // 2]).permute([0, 2, 1]))
        low = join_whole(low, rescale, rescale_whole, whole, own, first)
        high = join_whole(high, rescale, rescale_whole, whole, own, first + WIDTH // 2)
        acc = gl.join(low, high).permute([0, 2, 1]).reshape([ROWS, WIDTH])
    else:
        LAYOUT: gl.constexpr = product_layout(WIDTH)
        acc = gl.convert_layout(acc, LAYOUT) * rescale[:, None]
        before = gl.load(whole_at(whole, own, first, LAYOUT))
        factor = rescale_whole[:, None] + gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc = gl.fma(before, factor, acc)
    return acc


@gluon.jit
def attend_half(own: gl.constexpr, q, q_strides, work, result, config: gl.constexpr, ONE_CHUNK: gl.constexpr):
    """Run group number ``own`` of warps of `hopper_latent_kernel`."""
    ring, sizes = work.halves, work.sizes
    LAYOUT: gl.constexpr = product_layout(LATENT_KEYS)
    OUT_LAYOUT: gl.constexpr = product_layout(HALF)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    DTYPE: gl.constexpr = ring.tiles.dtype
    if work.start < work.stop:
        copy_queries(q, q_strides, work, matrix(work.q_halves, own), own * HALF, config)
        if own == 0:
            copy_queries(q, q_strides, work, matrix(work.q_rest, 0), 2 * HALF, config)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(work.q_full.index(0))
    mbarrier.wait(work.q_full.index(0), 0)

    acc = gl.zeros([ROWS, HALF], gl.float32, OUT_LAYOUT)
    row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    whole_sum, whole_max = row_sum, row_max
    chunk, chunk_stop = work.chunk, work.start + work.span
    for i in range((work.stop - work.start + LATENT_KEYS - 1) // LATENT_KEYS):
        n = work.start + i * LATENT_KEYS
        slot = wait_full(ring.full, i)
        # (1) S = Q Kᵀ
        logits = gl.zeros([ROWS, LATENT_KEYS], gl.float32, LAYOUT)
        zero = i >> 30  # which the compiler cannot know: addresses of queries made before the loop would spill
        for half in gl.static_range(2):
            keys = matrix(ring.tiles, 2 * slot + half).permute([1, 0])
            logits = warpgroup_mma(
                matrix(work.q_halves, zero + half), keys, logits, use_acc=half > 0, is_async=True
            )
        keys = matrix(work.rest, slot).permute([1, 0])
        logits = warpgroup_mma(matrix(work.q_rest, zero), keys, logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        # (2) P = 2^(S − row_max)
        if n + LATENT_KEYS > work.full:
            key = n + gl.arange(0, LATENT_KEYS, gl.SliceLayout(0, LAYOUT))
            seen = (key < work.end)[None, :]
            if config.HAS_RIGHT:  # the last query stands at the last key
                row = work.row + gl.arange(0, ROWS, ROW_LAYOUT)
                position = row // sizes.group + work.seq.keys - work.tokens
                seen = seen & (key[None, :] <= (position + sizes.right)[:, None])
            logits = gl.where(seen, logits, float("-inf"))
        weights, row_sum, row_max, rescale = update_softmax(logits, sizes.scale, row_sum, row_max, True)
        # (3) O += P V
        values = matrix(ring.tiles, 2 * slot + own)
        if n + LATENT_KEYS > work.end:  # NaN times a weight of 0 is NaN
            clear_rows(values, work.end - n)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        acc = warpgroup_mma(as_factor(weights, DTYPE, OUT_LAYOUT), values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(slot))
        if not ONE_CHUNK:
            if n + LATENT_KEYS >= gl.minimum(chunk_stop, work.stop):
                if result.lse is None:
                    if own == 0:
                        store_statistics(row_sum, row_max, chunk, work, result, ROW_LAYOUT)
                    store_values(acc, chunk, own, work, result, config)
                else:
                    whole_max, rescale_whole, rescale = join_maxima(whole_max, row_max)
                    whole_sum = gl.fma(whole_sum, rescale_whole, row_sum * rescale)
                    if chunk > 0:
                        joined = join_whole(acc, rescale, rescale_whole, result.whole, own, 0)
                        acc = gl.convert_layout(joined, OUT_LAYOUT)
                    if n + LATENT_KEYS < work.stop:
                        gl.store(whole_at(result.whole, own, 0, OUT_LAYOUT), acc)
                if n + LATENT_KEYS < work.stop:
                    acc = gl.zeros([ROWS, HALF], gl.float32, OUT_LAYOUT)
                row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
                row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
                chunk += 1
                chunk_stop += work.span
    if result.lse is not None:
        if not ONE_CHUNK:
            row_sum, row_max = whole_sum, whole_max
        store_result(acc, row_sum, row_max, own, work, result, ROW_LAYOUT, config)
    elif ONE_CHUNK:
        if own == 0:
            store_statistics(row_sum, row_max, chunk, work, result, ROW_LAYOUT)
        if work.start < work.stop:
            store_values(acc, chunk, own, work, result, config)
    elif own == 0:
        for empty in range(chunk, work.last_chunk):
            store_statistics(row_sum, row_max, empty, work, result, ROW_LAYOUT)


@gluon.jit
def copy_keys(k_desc, work):
    """The copying warp: tiles of keys, box by box."""
    ring, rest_tiles = work.halves, work.rest
    ROWS_OF_BOX: gl.constexpr = k_desc.block_type.shape[2]
    BOXES: gl.constexpr = LATENT_KEYS // ROWS_OF_BOX
    COLUMNS: gl.constexpr = 2 * HALF // BOX
    boxes, rest = tma.boxes_in(ring.tiles, k_desc), tma.boxes_in(rest_tiles, k_desc)
    for i in range((work.stop - work.start + LATENT_KEYS - 1) // LATENT_KEYS):
        places = cache_places(work.start + i * LATENT_KEYS, work.seq, work, k_desc, LATENT_KEYS)
        slot = wait_empty(ring.empty, i)
        full = ring.full.index(slot)
        mbarrier.expect(full, (COLUMNS + 1) * BOXES * k_desc.block_type.nbytes)
        for j in gl.static_range(BOXES):
            page, row = places[j]
            for column in gl.static_range(COLUMNS):
                box = boxes.index((slot * COLUMNS + column) * BOXES + j)
                tma.async_copy_global_to_shared(k_desc, [page, work.key_head, row, column * BOX], full, box)
            box = rest.index(slot * BOXES + j)
            tma.async_copy_global_to_shared(k_desc, [page, work.key_head, row, COLUMNS * BOX], full, box)


@gluon.jit
def hopper_latent_kernel(
    q, k_desc, out, lse, statistics, whole, sink, seqused_k, block_table, cu_seqlens_q,
    sizes: Sizes, parts: Parts, packed: FewQueries, strides: ForwardStrides, config: gl.constexpr,
    LEAST: gl.constexpr, ONE_CHUNK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows to the keys of one head, over one part of its KV loop.

    Reads and writes what `triton.latent.latent_kernel` does, of tiles of 64 rows and 64 keys. In
    ``whole`` (programs, 2, 64, 256) it joins chunks, where it takes all of several. The descriptor is of (B, H, N, D) or pages, with boxes of 64 features.
    """
    if PDL:  # with the launch that joins chunks, which waits for this one
        gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    key_heads = sizes.heads // sizes.group
    block = gl.program_id(0) % sizes.blocks
    place = gl.program_id(0) // sizes.blocks
    key_head = place % key_heads
    part = place // key_heads % parts.count
    batch = place // key_heads // parts.count
    tokens, first_token, entry = sizes.tokens, batch * 0, batch.to(gl.int64)
    out_rows = gl.cast(sizes.batch_size, gl.int64) * sizes.heads * sizes.tokens
    result = LatentResult(
        out, lse, statistics, whole, sink, strides.out, parts.out_split, entry, first_token, tokens, tokens, out_rows
    )  # fmt: skip
    if cu_seqlens_q is not None:
        queries = packed_rows(batch, cu_seqlens_q, packed)
        tokens, first_token, entry = queries.tokens, queries.start, entry * 0
        if lse is not None:  # chunks are stored as those of a batch
            out_rows = gl.cast(queries.rows, gl.int64) * sizes.heads
            result = LatentResult(
                out, lse, statistics, whole, sink, strides.out, parts.out_split, entry, first_token, tokens, queries.rows,
                out_rows,
            )  # fmt: skip
    row = block * ROWS
    keys = used_keys(seqused_k, batch, sizes.keys)
    first = row // sizes.group + keys - tokens
    last = gl.minimum((row + ROWS - 1) // sizes.group, tokens - 1) + keys - tokens
    loop = loop_bounds(first, last, 0, sizes.right, keys, 0, 1, False, config.HAS_RIGHT, LATENT_KEYS)
    end = loop.end
    span = (((end + LATENT_KEYS - 1) // LATENT_KEYS) + sizes.splits - 1) // sizes.splits
    span = gl.maximum(span, LEAST // LATENT_KEYS) * LATENT_KEYS
    start = gl.minimum(part * parts.chunks * span, end)
    stop = gl.minimum(start + parts.chunks * span, end)
    if cu_seqlens_q is not None:
        stop = gl.where(tokens > 0, stop, start)

    q_halves = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, HALF], k_desc.layout)
    q_rest = gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, REST], k_desc.layout)
    halves = gl.allocate_shared_memory(dtype, [2 * LATENT_STAGES, 1, 1, LATENT_KEYS, HALF], k_desc.layout)
    rest = gl.allocate_shared_memory(dtype, [LATENT_STAGES, 1, 1, LATENT_KEYS, REST], k_desc.layout)
    full, empty, q_full = barriers(LATENT_STAGES), barriers(LATENT_STAGES), barriers(1)
    init_ring(full, empty, 2)
    mbarrier.init(q_full.index(0), count=2)
    fence_async_shared()
    chunk = part * parts.chunks
    work = LatentWork(
        LatentSequence(batch, keys), key_head, row, tokens, first_token, entry, start, stop, end, loop.full_end, span,
        chunk, gl.minimum(chunk + parts.chunks, sizes.splits), SeqLens(sizes.tokens, sizes.keys), block_table, sizes,
        q_halves, q_rest, q_full, Ring(halves, full, empty), rest,
    )  # fmt: skip
    gl.warp_specialize(
        [(attend_half, (0, q, strides.q, work, result, config, ONE_CHUNK)),
         (attend_half, (1, q, strides.q, work, result, config, ONE_CHUNK)), (copy_keys, (k_desc, work))],
        [4, 1], [240, 24],
    )  # fmt: skip
