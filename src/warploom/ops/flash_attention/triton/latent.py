"""Triton kernel of flash attention for rows of more than 256 features, as those of a latent cache.

Latent attention keeps one row a token for all heads. Queries are brought to its features, so that the row is the key, and
its first features are the value: 576 and 512 of them in most models. All heads are rows of a tile, as in `decode`, whose
chunks these are too, and a tile of keys is copied to shared memory once for both products.

A tile of keys has two parts, of a power of two of features and of the rest, and logits are the sum of two products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from warploom.device.packed import sequence_of_tile, sequence_or_tail
from warploom.device.product import product
from warploom.ops.flash_attention.triton.decode import (
    FewQueries,
    PackedRows,
    Parts,
    Target,
    join,
    load_keys,
    load_rows,
    nothing,
    offsets_of_rows,
    packed_rows,
    store_chunk,
    target,
)
from warploom.ops.flash_attention.triton.forward import Softmax, softmax_step, store_results
from warploom.ops.flash_attention.triton.tiles import (
    ForwardStrides,
    Mask,
    Rows,
    Sizes,
    as_factor,
    base_of,
    loop_bounds,
    row_offsets,
    transpose,
    used_keys,
)


class LatentTiles(NamedTuple):
    """Compile-time choices of the kernel."""

    REST: tl.constexpr  # features of the second part of a tile of keys; 0: there is none
    SHARED: tl.constexpr  # whether values are the first part of keys, in their memory
    LEAST: tl.constexpr  # keys of a chunk that another follows, at least
    TOKENS: tl.constexpr  # queries of a tile, where sequences of many are cut into such; None: for few queries


class ManyTile(NamedTuple):
    """A tile of rows of one of all packed sequences, or of the rows behind these."""

    queries: PackedRows  # of the sequence, up to the last of the tile; none where another launch has the sequence
    first: tl.int32  # row of the tile, in the sequence
    tokens: tl.int32  # queries of the sequence
    sequence: tl.int64
    in_sequence: tl.int1


@triton.jit
def many_tile(block, cu_seqlens_q, sizes, packed, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the `ManyTile` of a block: ``TOKENS`` queries with all their heads are one block, or one query several."""
    rows = TOKENS * sizes.group
    blocks = tl.cdiv(rows, BLOCK_M)
    sequences = sizes.sequences
    sequence, tile = sequence_of_tile(block // blocks, cu_seqlens_q, packed.cu_stride, sequences + 1, TOKENS)
    start, tokens = sequence_or_tail(sequence, cu_seqlens_q, packed.cu_stride, sequences, packed.rows)
    in_sequence = sequence < sequences
    limit = tl.where(in_sequence & (tokens <= packed.few), 0, tl.minimum(tokens, (tile + 1) * TOKENS))
    queries = PackedRows(start, limit, packed.rows)
    sequence = tl.minimum(sequence, sequences - 1).to(tl.int64)
    return ManyTile(queries, tile * rows + block % blocks * BLOCK_M, tokens, sequence, in_sequence)


@triton.jit
def features_of(rows, first: tl.constexpr, strides, FEATURES: tl.constexpr, config: tl.constexpr):
    """Returns the addresses (M, FEATURES) of features from ``first`` on of rows at ``rows`` (M, 1)."""
    feature = first + tl.arange(0, FEATURES)
    return rows + (feature if config.UNIT else feature * strides.f)[None, :]


@triton.jit
def latent_kernel(
    q, k, v, out, lse, statistics, sink, seqused_k, block_table, cu_seqlens_q,
    sizes: Sizes, parts: Parts, packed: FewQueries, strides: ForwardStrides,
    config: tl.constexpr, tiles: tl.constexpr, ONE_CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows to the keys of one head, over one part of its KV loop.

    Reads and writes what `decode.decode_kernel` does, but for outputs of chunks without keys, of which statistics are
    stored alone. ``ONE_CHUNK``: the program takes a single chunk.
    """
    if PDL:  # with the launch that joins chunks, which waits for this one
        gdc_launch_dependents()
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    FIRST: tl.constexpr = min(config.D, BLOCK_D)  # features of the first part
    REST: tl.constexpr = tiles.REST
    TOKENS: tl.constexpr = tiles.TOKENS
    VEC: tl.constexpr = config.VEC
    PRECISION: tl.constexpr = config.PRECISION
    group = sizes.group
    chunks, out_split = parts.chunks, parts.out_split
    # Programs that run together read keys that lie together.
    key_heads = sizes.heads // group
    place = tl.program_id(0) // sizes.blocks
    key_head = place % key_heads
    part = place // key_heads % parts.count
    block = tl.program_id(0) % sizes.blocks
    batch = (place // key_heads // parts.count).to(tl.int64)

    queries, in_sequence = None, None
    tokens, first_row = sizes.tokens, block * BLOCK_M
    if TOKENS is not None:
        tile = many_tile(block, cu_seqlens_q, sizes, packed, TOKENS, BLOCK_M)
        queries, in_sequence, batch = tile.queries, tile.in_sequence, tile.sequence
        tokens, first_row = tile.tokens, tile.first
    elif cu_seqlens_q is not None:
        queries = packed_rows(batch, cu_seqlens_q, packed)
        tokens = queries.tokens
    limit = tokens if queries is None else queries.tokens  # queries up to the last of the tile

    r = first_row + tl.arange(0, BLOCK_M)
    q_head = key_head * group
    keys = used_keys(seqused_k, batch, sizes.keys)
    if in_sequence is not None:
        keys = tl.where(in_sequence, keys, 0)
    offset = keys - tokens  # the last query stands at the last key
    first = first_row // group + offset
    last = tl.minimum((first_row + BLOCK_M - 1) // group, limit - 1) + offset
    loop = loop_bounds(first, last, sizes.left, sizes.right, keys, 0, 1, config.HAS_LEFT, config.HAS_RIGHT, BLOCK_N)
    begin, end = loop.begin, loop.end
    span = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), sizes.splits)
    span = tl.maximum(span, tiles.LEAST // BLOCK_N) * BLOCK_N
    start = tl.minimum(begin + part * chunks * span, end)
    stop = tl.minimum(start + chunks * span, end)
    if queries is not None:
        stop = tl.where(limit > 0, stop, start)
    lowest = first - sizes.left if config.HAS_LEFT else begin  # that any row sees

    token = r // group
    if queries is not None:
        token += queries.start
    entry = batch if queries is None else batch * 0
    q_rows = q + row_offsets(entry, token, q_head + r % group, strides.q, VEC)[:, None]
    q_there = r < limit * group
    q_tile = load_rows(features_of(q_rows, 0, strides.q, BLOCK_D, config), q_there, FIRST, PRECISION)
    if REST > 0:
        q_rest = load_rows(
            features_of(q_rows, BLOCK_D, strides.q, REST, config), q_there, config.D - FIRST, PRECISION
        )
    table = None
    kv_batch = batch
    if config.PAGE is not None:
        table = block_table + batch * (sizes.keys // config.PAGE)
        kv_batch = batch * 0
    number = tl.arange(0, BLOCK_N)  # of the keys of a step
    row = number.to(tl.int64) if config.WIDE else number
    k_ptr = base_of(k, kv_batch, begin * 0, key_head, strides.k, VEC)
    v_ptr = base_of(v, kv_batch, begin * 0, key_head, strides.v, VEC)
    k_rows = Rows(k_ptr, offsets_of_rows(row, strides.k, BLOCK_D, config), strides.k, 0)
    v_rows = Rows(v_ptr, offsets_of_rows(row, strides.v, BLOCK_E, config), strides.v, 0)
    if REST > 0:
        rest_ptr = k_ptr + (BLOCK_D if config.UNIT else BLOCK_D * strides.k.f)
        rest_rows = Rows(rest_ptr, offsets_of_rows(row, strides.k, REST, config), strides.k, 0)

    mask = Mask(keys, sizes.left, sizes.right)
    softmax = nothing(BLOCK_M, BLOCK_E)
    whole = nothing(BLOCK_M, BLOCK_E)
    chunk = part * chunks
    chunk_stop = start + span
    for n in tl.range(start, stop, BLOCK_N):
        key = n + number
        there = (key >= lowest) & (key < end)
        k_tile = load_keys(
            k_rows, table, sizes.cu_k_stride, n, number, there, keys, FIRST, BLOCK_D, config, BLOCK_N
        )
        # (1) S = Q Kᵀ, of both parts
        logits = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        logits = product(q_tile, transpose(k_tile, PRECISION), logits, PRECISION)
        if REST > 0:
            rest = load_keys(
                rest_rows, table, sizes.cu_k_stride, n, number, there, keys, config.D - FIRST, REST, config, BLOCK_N
            )
            logits = product(q_rest, transpose(rest, PRECISION), logits, PRECISION)
        # (2) P = 2^(S − row_max)
        weights, softmax = softmax_step(softmax, logits, n, r // group + offset, mask, sizes.scale, True, config)
        # (3) O += P V
        if tiles.SHARED:
            v_tile = k_tile
        else:
            v_tile = load_keys(
                v_rows, table, sizes.cu_k_stride, n, number, there, keys, config.E, BLOCK_E, config, BLOCK_N
            )
        factor = as_factor(weights, v.dtype.element_ty, PRECISION)
        softmax = Softmax(product(factor, v_tile, softmax.acc, PRECISION), softmax.row_sum, softmax.row_max)
        if not ONE_CHUNK:
            if n + BLOCK_N >= tl.minimum(chunk_stop, stop):
                if lse is None:
                    # Addresses hang on a number that the compiler cannot know: made before the loop, they would spill.
                    to = target(q_head, (chunk >> 30) + r, batch, None, sizes, strides.out, config)
                    store_chunk(softmax, chunk, out, out_split, statistics, to, VEC)
                else:
                    whole = join(whole, softmax)
                softmax = nothing(BLOCK_M, BLOCK_E)
                chunk += 1
                chunk_stop += span
    if lse is not None:
        to = target(q_head, r, batch, queries, sizes, strides.out, config)
        if ONE_CHUNK:
            whole = softmax
        store_results(
            whole, sink, q_head + r % group, out, to.offsets, to.mask, lse, statistics, to.row, to.in_range, to.rows,
            in_sequence,
        )  # fmt: skip
    else:  # chunks are stored as those of a batch
        to = target(q_head, r, batch, None, sizes, strides.out, config)
        if ONE_CHUNK:
            to = Target(to.offsets, to.mask & (start < stop), to.row, to.in_range, to.rows)
            store_chunk(softmax, chunk, out, out_split, statistics, to, VEC)
        else:
            to = Target(to.offsets, to.mask & (group == 0), to.row, to.in_range, to.rows)
            for empty in range(chunk, tl.minimum((part + 1) * chunks, sizes.splits)):
                store_chunk(whole, empty, out, out_split, statistics, to, VEC)
