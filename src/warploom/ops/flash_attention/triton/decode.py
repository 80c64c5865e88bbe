"""Triton kernels of flash attention for few queries on many keys: decoding.

Shapes. A row is a pair (query, head) of the heads that share a head of keys, heads fastest. Rows come in tiles (M, D), so
that keys (N, D) and values (N, E) are read once for all of them. Memory is the limit: one loop with masks, and small tiles.

Tiles of keys. A step of the loop takes ``KEY_TILES`` of them, each with a softmax of its own. With as many as there are
warps, no warp waits for another's numbers in the loop. Where there are several, tensors have them as their first axis,
and a `Softmax` the rows of all.

Chunks. The keys that a tile sees are cut into chunks, by their number and by sizes of the call that are not the batch's. The
softmaxes of a chunk start afresh. They are joined in pairs, then the chunks from left to right, always by `join`: by a
program that takes all chunks, or by `combine_chunks_kernel`. The bits are the same, with as many programs as the size of
the batch asks for.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.online_softmax import join_maxima
from warploom.device.packed import sequence_bounds
from warploom.device.product import product, terms_of
from warploom.device.rows import Strides
from warploom.ops.flash_attention.triton.forward import Softmax, softmax_step, store_results
from warploom.ops.flash_attention.triton.tiles import (
    ForwardStrides,
    LseRows,
    Mask,
    Rows,
    Sizes,
    as_factor,
    base_of,
    element_offsets,
    loop_bounds,
    row_offsets,
    transpose,
    used_keys,
    within,
)


@triton.jit
def nothing(ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Returns the `Softmax` of no keys."""
    acc = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
    return Softmax(acc, tl.zeros((ROWS,), dtype=tl.float32), tl.full((ROWS,), float("-inf"), dtype=tl.float32))


@triton.jit
def join(a, b):
    """Returns the `Softmax` over the keys of both.

    Fused by hand, so that every kernel rounds alike. Joining to `nothing` changes no bit.
    """
    row_max, rescale_a, rescale_b = join_maxima(a.row_max, b.row_max)
    acc = tl.fma(a.acc, tl.broadcast_to(rescale_a[:, None], a.acc.shape), b.acc * rescale_b[:, None])
    return Softmax(acc, tl.fma(a.row_sum, rescale_a, b.row_sum * rescale_b), row_max)


@triton.jit
def load_rows(ptrs, there, F: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a tile (…, rows, features) of the rows that are ``there``, zeros outside, as a factor of a `product`."""
    FEATURES: tl.constexpr = ptrs.shape[len(ptrs.shape) - 1]
    mask = tl.expand_dims(there, -1)
    if F != FEATURES:
        mask = mask & (tl.arange(0, FEATURES) < F)
    factor = tl.load(ptrs, mask=mask, other=0.0)
    if PRECISION == "3-term here":
        factor = terms_of(factor, 3)
    return factor


@triton.jit
def offsets_of_rows(row, strides, FEATURES: tl.constexpr, config: tl.constexpr):
    """Returns offsets (…, features) of rows by number (…), in as many bits as the number of a row has."""
    stride_row, stride_feature = strides.n, strides.f
    if row.dtype == tl.int32:
        stride_row = stride_row.to(tl.int32)
        stride_feature = stride_feature.to(tl.int32)
    feature = tl.arange(0, FEATURES)
    if not config.UNIT:
        feature = feature * stride_feature
    return tl.expand_dims(row * (stride_row * config.VEC), -1) + feature


@triton.jit
def load_keys(x, table, pages, n, number, there, keys, F: tl.constexpr, FEATURES: tl.constexpr, config: tl.constexpr,
              STEP: tl.constexpr):  # fmt: skip
    """Returns the tiles of a step of keys or values from number ``n`` on; one that lies in one page looks it up once."""
    VEC: tl.constexpr = config.VEC
    if config.PAGE is None:
        ptrs = x.ptr + n * (x.strides.n * VEC) + x.offsets
    elif config.PAGE % STEP == 0:
        page = within(tl.load(table + n // config.PAGE).to(tl.int64), pages)
        ptrs = x.ptr + page * (x.strides.b * VEC) + (n % config.PAGE) * (x.strides.n * VEC) + x.offsets
    else:
        key = n + number
        page = within(tl.load(table + key // config.PAGE, mask=key < keys, other=0).to(tl.int64), pages)
        offsets = offsets_of_rows((key % config.PAGE).to(tl.int64), x.strides, FEATURES, config)
        ptrs = x.ptr + tl.expand_dims(page * (x.strides.b * VEC), -1) + offsets
    return load_rows(ptrs, there, F, config.PRECISION)


@triton.jit
def halves(x):
    """Returns the first and the last half of the rows (R, …) of one or two axes."""
    if len(x.shape) == 1:
        first, last = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2)), (1, 0)))
    else:
        first, last = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
    return first, last


@triton.jit
def join_key_tiles(softmax, KEY_TILES: tl.constexpr):
    """Joins the `Softmax` (KEY_TILES · M rows) of all tiles of keys (M rows): the first half with the last, and so on."""
    if KEY_TILES > 1:
        accs, sums, maxima = halves(softmax.acc), halves(softmax.row_sum), halves(softmax.row_max)
        joined = join(Softmax(accs[0], sums[0], maxima[0]), Softmax(accs[1], sums[1], maxima[1]))
        softmax = join_key_tiles(joined, KEY_TILES // 2)
    return softmax


class FewQueries(NamedTuple):
    """Packed queries on a cache, where sequences of few queries are for these kernels."""

    cu_stride: tl.int64
    rows: tl.int32  # queries of all sequences, and rows behind them
    few: tl.int32  # queries of a sequence, at most; others are left alone


class PackedRows(NamedTuple):
    """Queries of a packed sequence."""

    start: tl.int32
    tokens: tl.int32  # how many they are; 0 if they are not few
    rows: tl.int32  # see `FewQueries`


@triton.jit
def packed_rows(sequence, cu_seqlens_q, packed):
    """Returns the `PackedRows` of a sequence."""
    start, tokens = sequence_bounds(sequence, cu_seqlens_q, packed.cu_stride)
    start = tl.minimum(tl.maximum(start, 0), packed.rows)
    tokens = tl.minimum(tl.maximum(tokens, 0), packed.rows - start)
    return PackedRows(start, tl.where(tokens <= packed.few, tokens, 0), packed.rows)


class Target(NamedTuple):
    """Places of a tile's rows in the results."""

    offsets: tl.tensor  # (rows, E), in the output
    mask: tl.tensor  # (rows, E)
    row: tl.tensor  # (rows,): their numbers in ``lse``
    in_range: tl.tensor  # (rows,)
    rows: tl.int64  # in ``lse``


@triton.jit
def target(first_head, r, batch, queries, sizes, strides, config: tl.constexpr):
    """Returns the `Target` of rows by number ``r`` of the heads from ``first_head`` on; ``queries``: `PackedRows`, or None."""
    tokens, group = sizes.tokens, sizes.group
    token, head = r // group, first_head + r % group
    in_range = r < tokens * group
    batch_size = sizes.batch_size
    if queries is not None:
        in_range = r < queries.tokens * group
        token += queries.start
        tokens = queries.rows
        batch = batch * 0
        batch_size = batch_size * 0 + 1
    feature = tl.arange(0, config.BLOCK_E)
    offsets = element_offsets(batch, token, head, strides, feature, config.VEC, config.UNIT)
    mask = in_range[:, None] & (feature < config.E)[None, :]
    row = (batch * sizes.heads + head) * tokens + token
    return Target(offsets, mask, row, in_range, tl.cast(batch_size, tl.int64) * sizes.heads * tokens)


@triton.jit
def store_chunk(softmax, number, out, out_split, statistics, to, VEC: tl.constexpr):
    """Store the softmax of chunk ``number``, to be joined with the others."""
    part = tl.cast(number, tl.int64)
    tl.store(out + part * (out_split * VEC) + to.offsets, softmax.acc, mask=to.mask)
    tl.store(statistics + part * 2 * to.rows + to.row, softmax.row_max, mask=to.in_range)
    tl.store(statistics + (part * 2 + 1) * to.rows + to.row, softmax.row_sum, mask=to.in_range)


class Parts(NamedTuple):
    """The parts of a KV loop, of which a program takes one."""

    count: tl.int32
    chunks: tl.int32  # of a part; there are ``sizes.splits`` in all
    out_split: tl.int64  # from a chunk's output to the next


@triton.jit
def decode_kernel(
    q, k, v, out, lse, statistics, sink, seqused_k, block_table, cu_seqlens_q,
    sizes: Sizes, parts: Parts, packed: FewQueries, strides: ForwardStrides,
    config: tl.constexpr, KEY_TILES: tl.constexpr, LEAST: tl.constexpr, ONE_CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows to the keys of one head, over one part of its KV loop.

    Reads and writes what `forward.forward_kernel` does. Without ``lse``, rows are stored as `Softmax` of each
    chunk: ``out`` (splits, B, N, H, E) in float32, not divided by sums, and ``statistics`` (splits, 2, B, H, N).
    ``config`` has one tile of keys. ``LEAST``: keys of a chunk that another follows, at least. ``ONE_CHUNK``: the program
    takes a single chunk, and stores it.

    With ``cu_seqlens_q``, queries are packed: a batch entry is a sequence of ``sizes.tokens`` queries at most, which
    are where its bounds say, and chunks of them are stored as those of a batch.
    """
    if PDL:  # with the launch that joins chunks, which waits for this one
        gdc_launch_dependents()
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    ROWS: tl.constexpr = KEY_TILES * BLOCK_M
    STEP: tl.constexpr = KEY_TILES * BLOCK_N
    VEC: tl.constexpr = config.VEC
    PRECISION: tl.constexpr = config.PRECISION
    heads, group, tokens = sizes.heads, sizes.group, sizes.tokens
    chunks, out_split = parts.chunks, parts.out_split
    # Programs that run together read keys that lie together.
    key_heads = heads // group
    block = tl.program_id(0) % sizes.blocks
    place = tl.program_id(0) // sizes.blocks
    key_head = place % key_heads
    part = place // key_heads % parts.count
    batch = (place // key_heads // parts.count).to(tl.int64)

    queries = None
    if cu_seqlens_q is not None:
        queries = packed_rows(batch, cu_seqlens_q, packed)
        tokens = queries.tokens

    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_head = key_head * group
    keys = used_keys(seqused_k, batch, sizes.keys)
    offset = keys - tokens  # the last query stands at the last key
    first = block * BLOCK_M // group + offset
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // group, tokens - 1) + offset
    loop = loop_bounds(first, last, sizes.left, sizes.right, keys, 0, 1, config.HAS_LEFT, config.HAS_RIGHT, STEP)
    begin, end = loop.begin, loop.end
    span = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), STEP), sizes.splits)
    span = tl.maximum(span, LEAST // STEP) * STEP
    start = tl.minimum(begin + part * chunks * span, end)
    stop = tl.minimum(start + chunks * span, end)
    if queries is not None:
        stop = tl.where(tokens > 0, stop, start)
    lowest = first - sizes.left if config.HAS_LEFT else begin  # that any row sees

    feature = tl.arange(0, BLOCK_D)
    token = r // group
    if queries is not None:
        token += queries.start
    q_ptrs = q + row_offsets(batch, token, q_head + r % group, strides.q, VEC)[:, None]
    q_ptrs += (feature if config.UNIT else feature * strides.q.f)[None, :]
    q_tile = load_rows(q_ptrs, r < tokens * group, config.D, PRECISION)
    if KEY_TILES > 1:
        q_tile = tl.broadcast_to(q_tile[None, :, :], (KEY_TILES, BLOCK_M, BLOCK_D))
    table = None
    kv_batch = batch
    if config.PAGE is not None:
        table = block_table + batch * (sizes.keys // config.PAGE)
        kv_batch = batch * 0
    number = tl.arange(0, BLOCK_N)  # of the keys of a step
    if KEY_TILES > 1:
        number = (tl.arange(0, KEY_TILES) * BLOCK_N)[:, None] + number[None, :]
    place = number.to(tl.int64) if config.WIDE else number
    k_ptr = base_of(k, kv_batch, begin * 0, key_head, strides.k, VEC)
    v_ptr = base_of(v, kv_batch, begin * 0, key_head, strides.v, VEC)
    k_rows = Rows(k_ptr, offsets_of_rows(place, strides.k, BLOCK_D, config), strides.k, 0)
    v_rows = Rows(v_ptr, offsets_of_rows(place, strides.v, BLOCK_E, config), strides.v, 0)

    # The rows of all tiles of keys; they, and the end of the keys, are counted from the first key of their tile.
    row = block * BLOCK_M + tl.arange(0, ROWS) % BLOCK_M
    first_key = tl.arange(0, ROWS) // BLOCK_M * BLOCK_N
    position = row // group + offset - first_key
    mask = Mask((keys - first_key)[:, None], sizes.left, sizes.right)
    softmax = nothing(ROWS, BLOCK_E)
    whole = nothing(BLOCK_M, BLOCK_E)
    chunk = part * chunks
    chunk_stop = start + span
    for n in tl.range(start, stop, STEP):
        key = n + number
        there = (key >= lowest) & (key < end)
        k_tile = load_keys(
            k_rows, table, sizes.cu_k_stride, n, number, there, keys, config.D, BLOCK_D, config, STEP
        )
        if KEY_TILES > 1:
            logits = tl.zeros((KEY_TILES, BLOCK_M, BLOCK_N), dtype=tl.float32)
            logits = product(q_tile, tl.permute(k_tile, (0, 2, 1)), logits, PRECISION)
            logits = tl.reshape(logits, (ROWS, BLOCK_N))
        else:
            logits = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            logits = product(q_tile, transpose(k_tile, PRECISION), logits, PRECISION)
        weights, softmax = softmax_step(softmax, logits, n, position, mask, sizes.scale, True, config)
        v_tile = load_keys(
            v_rows, table, sizes.cu_k_stride, n, number, there, keys, config.E, BLOCK_E, config, STEP
        )
        factor = as_factor(weights, v.dtype.element_ty, PRECISION)
        if KEY_TILES > 1:
            acc = tl.reshape(softmax.acc, (KEY_TILES, BLOCK_M, BLOCK_E))
            acc = product(tl.reshape(factor, (KEY_TILES, BLOCK_M, BLOCK_N)), v_tile, acc, PRECISION)
            softmax = Softmax(tl.reshape(acc, (ROWS, BLOCK_E)), softmax.row_sum, softmax.row_max)
        else:
            softmax = Softmax(product(factor, v_tile, softmax.acc, PRECISION), softmax.row_sum, softmax.row_max)
        if not ONE_CHUNK:
            if n + STEP >= tl.minimum(chunk_stop, stop):
                joined = join_key_tiles(softmax, KEY_TILES)
                if lse is None:
                    # Addresses hang on a number that the compiler cannot know: made before the loop, they would spill.
                    to = target(q_head, (chunk >> 30) + r, batch, None, sizes, strides.out, config)
                    store_chunk(joined, chunk, out, out_split, statistics, to, VEC)
                else:
                    whole = join(whole, joined)
                softmax = nothing(ROWS, BLOCK_E)
                chunk += 1
                chunk_stop += span
    if lse is None:  # chunks are stored as those of a batch
        to = target(q_head, r, batch, None, sizes, strides.out, config)
    else:
        to = target(q_head, r, batch, queries, sizes, strides.out, config)
    if lse is not None:
        store_results(
            whole, sink, q_head + r % group, out, to.offsets, to.mask, lse, statistics, to.row, to.in_range, to.rows
        )  # fmt: skip
    elif ONE_CHUNK:
        store_chunk(join_key_tiles(softmax, KEY_TILES), chunk, out, out_split, statistics, to, VEC)
    else:
        for empty in range(chunk, tl.minimum((part + 1) * chunks, sizes.splits)):
            store_chunk(whole, empty, out, out_split, statistics, to, VEC)


@triton.jit
def combine_chunks_kernel(
    part, part_statistics, out, lse, statistics, sink, cu_seqlens_q,
    lse_rows: LseRows, chunks: tl.int32, out_split: tl.int64, packed: FewQueries,
    part_strides: Strides, out_strides: Strides, tiles: tl.constexpr, AHEAD: tl.constexpr, SPARSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write a slab of a row of what `forward.forward_kernel` writes, from what `decode_kernel` stored of all chunks.

    Parts are in float32, with the strides of ``out``. Those of packed queries have ``part_strides``, and rows of
    sequences with fewer or more are left alone. ``SPARSE``: outputs of chunks without keys are not there.
    """
    VEC: tl.constexpr = tiles.VEC
    UNIT: tl.constexpr = tiles.UNIT
    BLOCK_E: tl.constexpr = tiles.BLOCK_F
    SLABS: tl.constexpr = (tiles.F + BLOCK_E - 1) // BLOCK_E
    rows, tokens, heads = lse_rows.count, lse_rows.tokens, lse_rows.heads
    row = (tl.program_id(0) // SLABS).to(tl.int64) + tl.arange(0, 1)
    in_range = row < rows
    token, head, batch = row % tokens, row // tokens % heads, row // tokens // heads
    feature = tl.arange(0, BLOCK_E)
    if SLABS > 1:
        feature += tl.program_id(0) % SLABS * BLOCK_E
    mask = (feature < tiles.F)[None, :]
    place, entry, out_row, out_rows = token, batch, row, rows
    if cu_seqlens_q is not None:
        queries = packed_rows(batch, cu_seqlens_q, packed)
        in_range = in_range & (token < queries.tokens)
        place, entry = queries.start + token, batch * 0
        out_row, out_rows = head * queries.rows + place, tl.cast(queries.rows, tl.int64) * heads
    offsets = element_offsets(entry, place, head, out_strides, feature, VEC, UNIT)
    part_offsets = offsets
    if part_strides is not None:
        part_offsets = element_offsets(batch, token, head, part_strides, feature, VEC, UNIT)
    # With PDL twice: on nothing while the other launch still runs, so that the code is in a cache when that ends.
    for again in range(0 if PDL else 1, tl.minimum(chunks, 2)):
        some = chunks * again
        softmax = nothing(1, BLOCK_E)
        for chunk in range(0, chunks, AHEAD):
            accs, sums, maxima = (), (), ()
            for i in tl.static_range(AHEAD):
                left = in_range & (chunk + i < some)
                beside = part_statistics + (chunk + i) * 2 * rows + row
                tile = part + (chunk + i) * (out_split * VEC) + part_offsets
                if SPARSE:
                    maxima += (tl.load(beside, mask=left, other=float("-inf")),)
                    left = left & (maxima[i] != float("-inf"))
                accs += (tl.load(tile, mask=mask & left[:, None], other=0.0),)
                sums += (tl.load(beside + rows, mask=left, other=0.0),)
                if not SPARSE:
                    maxima += (tl.load(beside, mask=left, other=float("-inf")),)
            for i in tl.static_range(AHEAD):
                softmax = join(softmax, Softmax(accs[i], sums[i], maxima[i]))
        there = in_range & (some > 0)
        store_results(
            softmax, sink, head, out, offsets, mask & there[:, None], lse, statistics, out_row, there, out_rows
        )  # fmt: skip
        if PDL:
            gdc_wait()
