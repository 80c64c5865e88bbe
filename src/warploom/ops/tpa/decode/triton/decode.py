"""Triton kernels of tensor-product attention for decoding: a few queries on a long cache of factors.

Shapes. A row is a (query, head) pair; a tile has ROWS = BLOCK_N · BLOCK_H of them, heads fastest. A block of keys is
BLOCK_M cache entries, which are BLOCK_M · R rows of the feature factors, ranks fastest. Everything is computed
transposed, keys or features down and rows across:

    logits  (M, ROWS) = Σ_r ak (M, ROWS) ⊙ (bk (M·R, D) · Qᵀ (D, ROWS))
    acc     (E, ROWS) = bvᵀ (E, M·R) · (p ⊙ av) (M·R, ROWS)

so that the head factors, which lie (M, H) in memory, multiply the logits as they were loaded, and the long axis of
both products is the one that tensor cores want long.

Chunks. The keys of a batch entry are cut into chunks whose length depends on the number of its valid keys alone.
A chunk's softmax starts afresh. Four chunks are joined from left to right, then all fours, always by `join`: a tree
that is the same wherever its parts are computed. A program takes one chunk, four or all, and `combine_kernel` does what
is left of the tree, so all of them give the same bits. Blocks of float32 factors of high rank hold few keys, and a
chunk has so many of them that its sum would be rounded a hundred times: the softmax of sixteen blocks starts afresh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.online_softmax import exp, finite_max, join_maxima
from warploom.device.product import add_outside, dot, exact_dot, round_to
from warploom.ops.tpa.decode.triton.sums import product_by_itself, sum_of_pairs
from warploom.ops.tpa.triton.factors import FeatureStrides, HeadStrides

TERMS = tl.constexpr(16)
"""Terms that are added up one after another in a logit of float32 factors."""
BLOCKS = tl.constexpr(16)
"""Blocks of keys that are added up one after another, in float32 and where the shortest chunk has more: a power of two."""


class FactorTensor(NamedTuple):
    """Factors in memory; no factors if ``ptr`` is None. Strides come divided by the ``VEC`` of `HeadLayout` or `Features`."""

    ptr: Any
    strides: Any


class HeadLayout(NamedTuple):
    """Layout of head factors: the strides of batch and tokens come divided by ``VEC``.

    ``DENSE``: heads and ranks are adjacent, which wide loads need, and offsets within a tile fit in 32 bits.
    """

    VEC: tl.constexpr
    DENSE: tl.constexpr


class ChunkLengths(NamedTuple):
    """Numbers that settle the length of a chunk; see `warploom.ops.tpa.decode.chunks`."""

    SHORTEST: tl.constexpr
    LONGEST: tl.constexpr
    WANTED: tl.constexpr


class DecodeSizes(NamedTuple):
    """Sizes of a call, and the stride of seqused_k."""

    tokens: tl.int32
    keys: tl.int32
    splits: tl.int32  # of the keys of a batch entry
    lengths_stride: tl.int64


class DecodeStrides(NamedTuple):
    """Strides of the factors and of the output."""

    aq: HeadStrides
    bq: FeatureStrides
    ak: HeadStrides
    bk: FeatureStrides
    av: HeadStrides
    bv: FeatureStrides
    out: FeatureStrides


class DecodeScales(NamedTuple):
    """Factors of logits (as they are, and for powers of two), of queries and of values."""

    logits: tl.float32
    q: tl.float32
    v: tl.float32


class DecodeTile(NamedTuple):
    """Queries and heads of a tile of rows, keys of a block, and ranks, padded, of Q, K and V."""

    BLOCK_N: tl.constexpr
    BLOCK_H: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_RQ: tl.constexpr
    BLOCK_RK: tl.constexpr
    BLOCK_RV: tl.constexpr


class DecodeConfig(NamedTuple):
    """Compile-time choices of the decode kernel."""

    H: tl.constexpr  # heads
    Q: tl.constexpr  # `Features` of queries
    K: tl.constexpr  # `Features` of keys
    V: tl.constexpr  # `Features` of values
    A: tl.constexpr  # `HeadLayout` of keys and of values
    TILE: tl.constexpr  # `DecodeTile`
    CHUNKS: tl.constexpr  # `ChunkLengths`
    LEVELS: tl.constexpr  # levels of the tree of chunks that a split has: 0, 1 or 2
    WHOLE: tl.constexpr  # whether there is one split, and the program writes the output


class PartialSoftmax(NamedTuple):
    """Softmax of rows over some of the keys: numerators, maxima and denominators."""

    acc: Any
    row_max: Any
    row_sum: Any


class Partials(NamedTuple):
    """Memory for the softmax of splits: numerators (parts, rows, E), maxima and denominators (parts, 2, rows)."""

    acc: Any
    statistics: Any
    rows: tl.int64


# ----------------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def scale_alone(x, factor, dtype: tl.constexpr):
    """Returns ``x · factor``, for results in ``dtype``.

    In float32 the product is rounded by itself. Fused with the subtraction that follows, it would keep bits that what
    is subtracted, once such a product too, has lost: the difference of equals would not be zero.
    """
    if dtype == tl.float32:
        y = product_by_itself(x, factor)
    else:
        y = x * factor
    return y


@triton.jit
def chunk_length(length, chunks):
    """Returns the keys of a chunk: the shortest length, doubled until there are at most ``WANTED`` chunks or it is the longest."""
    chunk = length * 0 + chunks.SHORTEST
    while (chunk * chunks.WANTED < length) & (chunk < chunks.LONGEST):
        chunk = chunk * 2
    return chunk


@triton.jit
def valid_keys(seqused_k, batch, lengths_stride, keys):
    """Returns how many keys of the cache a batch entry may look at (int32)."""
    if seqused_k is None:
        length = keys
    else:
        length = tl.load(seqused_k + batch.to(tl.int64) * lengths_stride)
        length = tl.maximum(tl.minimum(length, keys), 0).to(tl.int32)
    return length


@triton.jit
def empty_softmax(E: tl.constexpr, ROWS: tl.constexpr):
    """Returns the softmax of rows over no keys."""
    return PartialSoftmax(
        tl.zeros((E, ROWS), tl.float32),
        tl.full((1, ROWS), float("-inf"), tl.float32),
        tl.zeros((1, ROWS), tl.float32),
    )


@triton.jit
def join(a, b, dtype: tl.constexpr):
    """Returns the softmax over the keys of both.

    Fused by hand, so that every kernel rounds alike. Joining to nothing (zeros, -inf, 0) changes no bit.
    """
    row_max, rescale_a, rescale_b = join_maxima(a.row_max, b.row_max, dtype == tl.float32)
    return PartialSoftmax(
        tl.fma(a.acc, tl.broadcast_to(rescale_a, a.acc.shape), b.acc * rescale_b),
        row_max,
        tl.fma(a.row_sum, rescale_a, b.row_sum * rescale_b),
    )


@triton.jit
def load_part(parts, part, row, e, mask, E: tl.constexpr):
    """Returns the softmax of a part; nothing where ``mask`` is false.

    ``row`` and ``e`` are tiles of one row and one column, either way round; ``part`` is int64.
    """
    ptrs = parts.statistics + part * 2 * parts.rows + row
    return PartialSoftmax(
        tl.load(parts.acc + part * parts.rows * E + row.to(tl.int64) * E + e, mask=mask & (e < E), other=0.0),
        tl.load(ptrs, mask=mask, other=float("-inf")),
        tl.load(ptrs + parts.rows, mask=mask, other=0.0),
    )


@triton.jit
def join_parts(softmaxes, first: tl.constexpr, count: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Returns ``count`` of a list from number ``first`` on joined, from left to right or in a binary tree."""
    if count == 1:
        acc, row_max, row_sum = softmaxes[first]  # a tuple in a list of them has no names in Triton 3.6
        joined = PartialSoftmax(acc, row_max, row_sum)
    else:
        half: tl.constexpr = count // 2 if PAIRS else count - 1
        left = join_parts(softmaxes, first, half, PAIRS, dtype)
        right = join_parts(softmaxes, first + half, count - half, PAIRS, dtype)
        joined = join(left, right, dtype)
    return joined


@triton.jit
def store_part(parts, part, row, e, mask, softmax, E: tl.constexpr):
    """Store what `load_part` loads."""
    ptrs = parts.statistics + part * 2 * parts.rows + row
    tl.store(parts.acc + part * parts.rows * E + row.to(tl.int64) * E + e, softmax.acc, mask=mask & (e < E))
    tl.store(ptrs, softmax.row_max, mask=mask)
    tl.store(ptrs + parts.rows, softmax.row_sum, mask=mask)


@triton.jit
def add_masked(acc, v, w, mask):
    """Returns ``acc + vᵀ w`` (E, ROWS) where rows see some of the keys (M·R): what is NaN or infinite in others stays there.

    Zero times NaN is NaN: values are finite in the product, and a product of flags says which rows become NaN.
    """
    w = tl.where(mask, w, 0.0).to(v.dtype)
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    acc = dot(tl.trans(tl.where(finite, v, 0.0).to(v.dtype)), w, acc)
    flags = tl.trans(tl.where(finite, 0.0, 1.0).to(tl.bfloat16))
    reached = dot(flags, tl.where(mask, 1.0, 0.0).to(tl.bfloat16), tl.zeros(acc.shape, tl.float32))
    return tl.where(reached > 0.0, float("nan"), acc)


@triton.jit
def finish(softmax, scale_v):
    """Returns the output from numerators and denominators; 0 where no key was seen."""
    return softmax.acc * (scale_v / tl.where(softmax.row_sum == 0.0, 1.0, softmax.row_sum))


class TileRows(NamedTuple):
    """Rows (ROWS,) of a tile: their batch entry, queries, heads, and which of them there are."""

    batch: tl.tensor
    n: tl.tensor
    h: tl.tensor
    mask: tl.tensor
    first_n: tl.tensor  # the tile's first query
    tokens: tl.tensor  # queries of a batch entry


@triton.jit
def query_tile(
    aq, bq, rows, scale_q,
    Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, FIRST: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Returns Q of every row (ROWS, FEATURES), from feature ``FIRST`` on, in the dtype of memory.

    Without ``aq``, ``bq`` holds Q and its rank axis the heads.
    """
    d = FIRST + tl.arange(0, FEATURES)
    features = d[None, :] if Q.UNIT else (d * bq.strides.f)[None, :]
    b_ptr = bq.ptr + rows.batch.to(tl.int64) * (bq.strides.b * Q.VEC)
    if aq.ptr is None:
        ptrs = (
            b_ptr
            + (rows.n.to(tl.int64) * (bq.strides.n * Q.VEC) + rows.h.to(tl.int64) * (bq.strides.r * Q.VEC))[:, None]
        )
        q = tl.load(ptrs + features, mask=rows.mask[:, None] & (d < Q.F)[None, :], other=0.0).to(tl.float32)
    else:
        a_ptr = aq.ptr + rows.batch.to(tl.int64) * aq.strides.b
        r = tl.arange(0, BLOCK_R)
        ptrs = a_ptr + (rows.n.to(tl.int64) * aq.strides.n + rows.h.to(tl.int64) * aq.strides.h)[:, None]
        q = tl.zeros((rows.n.shape[0], FEATURES), tl.float32)
        # The heads of one query at a time.
        for i in tl.range(0, BLOCK_N * ((Q.R + BLOCK_R - 1) // BLOCK_R), num_stages=1):
            token = rows.first_n + i % BLOCK_N
            rank = i // BLOCK_N * BLOCK_R + r
            a_mask = (rows.mask & (rows.n == token))[:, None] & (rank < Q.R)[None, :]
            a = tl.load(ptrs + (rank * aq.strides.r)[None, :], mask=a_mask, other=0.0)
            ranks = b_ptr + token.to(tl.int64) * (bq.strides.n * Q.VEC)
            ranks += rank.to(tl.int64)[:, None] * (bq.strides.r * Q.VEC)
            b_mask = ((rank < Q.R) & (token < rows.tokens))[:, None] & (d < Q.F)[None, :]
            b = tl.load(ranks + features, mask=b_mask, other=0.0)
            if BLOCK_N == 1:
                q = exact_dot(a, b, q)
            else:  # rows of the others are zero, which times NaN is NaN
                q = tl.where((rows.n == token)[:, None], exact_dot(a, b, q), q)
    return round_to(q * scale_q, bq.ptr.dtype.element_ty)


@triton.jit
def head_tile(
    a, first, h, key_mask, head_mask,
    A: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Returns head factors of a block of keys: (M, ROWS), or (M, ROWS, R) beyond rank one; in the dtype of memory."""
    block = a.ptr + first * (a.strides.n * A.VEC)
    m = tl.arange(0, BLOCK_M)
    if A.DENSE:
        offsets = (m * (a.strides.n.to(tl.int32) * A.VEC))[:, None] + (h * R)[None, :]
    else:
        offsets = (m * (a.strides.n * A.VEC))[:, None] + (h.to(tl.int64) * a.strides.h)[None, :]
    mask = key_mask[:, None] & head_mask[None, :]
    if BLOCK_R > 1:
        r = tl.arange(0, BLOCK_R)
        offsets = offsets[:, :, None] + (r if A.DENSE else r * a.strides.r)[None, None, :]
        mask = mask[:, :, None] & (r < R)[None, None, :]
    return tl.load(block + offsets, mask=mask, other=0.0)


@triton.jit
def feature_tile(
    b, first, length, B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    FIRST: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Returns feature factors of a block of keys, (M·R, FEATURES) from feature ``FIRST`` on, ranks fastest; in the dtype of memory."""
    block = b.ptr + first * (b.strides.n * B.VEC)
    row = tl.arange(0, BLOCK_M * BLOCK_R)
    m = row // BLOCK_R
    r = row % BLOCK_R
    f = FIRST + tl.arange(0, FEATURES)
    if B.UNIT:
        offsets = (m * (b.strides.n.to(tl.int32) * B.VEC) + r * (b.strides.r.to(tl.int32) * B.VEC))[:, None]
        offsets += f[None, :]
    else:
        offsets = (m * (b.strides.n * B.VEC) + r * (b.strides.r * B.VEC))[:, None] + (f * b.strides.f)[None, :]
    mask = (first + m < length)[:, None]
    if B.R != BLOCK_R:
        mask = mask & (r < B.R)[:, None]
    if B.F != B.BLOCK_F:
        mask = mask & (f < B.F)[None, :]
    return tl.load(block + offsets, mask=mask, other=0.0)


@triton.jit
def logits_of_ranks(b, first, length, queries, B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    """Returns ``k · q`` (M·R, ROWS) float32 of a block of feature factors and the queries, from parts of their features.

    Sums of float32 factors are made term after term, and parts keep them short: a weight's relative error is the
    absolute one of its logit.
    """
    FEATURES: tl.constexpr = queries[0].shape[0]
    zeros = tl.zeros((BLOCK_M * BLOCK_R, queries[0].shape[1]), tl.float32)
    k = feature_tile(b, first, length, B, BLOCK_M, BLOCK_R, 0, FEATURES)
    logits = exact_dot(k, queries[0], zeros)
    for part in tl.static_range(1, len(queries)):
        k = feature_tile(b, first, length, B, BLOCK_M, BLOCK_R, part * FEATURES, FEATURES)
        logits = add_outside(exact_dot(k, queries[part], zeros), logits)
    return logits


@triton.jit
def sum_ranks(logits, factors, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr):
    """Returns ``Σ_r a ⊙ logits`` (M, ROWS) float32, from logits (M·R, ROWS) of every rank.

    Products are rounded by themselves: several threads may hold the same sum, of which one adds up the numerator and
    another the denominator. Each would fuse its own product into it, and they would hold different bits.
    """
    if BLOCK_R == 1:
        summed = logits * factors.to(tl.float32)
    else:
        ranks = logits.reshape(BLOCK_M, BLOCK_R, ROWS).permute(0, 2, 1)
        summed = sum_of_pairs(product_by_itself(ranks, factors.to(tl.float32)), axis=2)
    return summed


@triton.jit
def spread(p, factors, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr):
    """Returns ``p ⊙ a`` (M·R, ROWS) float32 of every rank, from weights p (M, ROWS)."""
    if BLOCK_R == 1:
        ranks = p * factors.to(tl.float32)
    else:
        ranks = p[:, :, None] * factors.to(tl.float32)
        ranks = ranks.permute(0, 2, 1).reshape(BLOCK_M * BLOCK_R, ROWS)
    return ranks


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(
    ak, av, bk, bv, aq, bq, seqused_k, out, partial, statistics,
    sizes: DecodeSizes, strides: DecodeStrides, scales: DecodeScales,
    config: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows of one batch entry, over one of ``splits`` splits of its keys.

    A split is one chunk, four or all, with 0, 1 or 2 ``LEVELS``. With ``WHOLE`` there is one, and the program writes the
    output. Without, it stores numerators, maximum and denominator for `combine_kernel` in part (batch entry, split) of
    ``partial`` (B, splits, N·H, E) and ``statistics`` (B, splits, 2, N·H), float32.
    """
    H: tl.constexpr = config.H
    Q: tl.constexpr = config.Q
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    A: tl.constexpr = config.A
    TILE: tl.constexpr = config.TILE
    CHUNKS: tl.constexpr = config.CHUNKS
    LEVELS: tl.constexpr = config.LEVELS
    tokens, splits = sizes.tokens, sizes.splits
    ROWS: tl.constexpr = TILE.BLOCK_N * TILE.BLOCK_H
    H_BLOCKS: tl.constexpr = (H + TILE.BLOCK_H - 1) // TILE.BLOCK_H
    row_blocks = H_BLOCKS * tl.cdiv(tokens, TILE.BLOCK_N)
    program = tl.program_id(0)
    row_block = program % row_blocks  # neighbours share the cache they read
    split = program // row_blocks % splits
    batch = program // row_blocks // splits
    length = valid_keys(seqused_k, batch, sizes.lengths_stride, sizes.keys)
    chunk = chunk_length(length, CHUNKS)
    first = split * 0
    end = length
    if LEVELS < 2:
        first = split * chunk * 4**LEVELS
        end = tl.minimum(first + chunk * 4**LEVELS, length)
    if first > 0 and first >= length:
        return

    rows_in_tile = tl.arange(0, ROWS)
    first_n = row_block // H_BLOCKS * TILE.BLOCK_N
    end = tl.minimum(end, length - tokens + first_n + TILE.BLOCK_N)  # no row sees what lies behind
    n = first_n + rows_in_tile // TILE.BLOCK_H
    h = row_block % H_BLOCKS * TILE.BLOCK_H + rows_in_tile % TILE.BLOCK_H
    head_mask = h < H  # what stands in rows of other queries, or of none, is not stored
    row_mask = head_mask & (n < tokens)
    dtype: tl.constexpr = bk.dtype.element_ty
    FEATURES: tl.constexpr = min(K.BLOCK_F, TERMS) if dtype == tl.float32 else K.BLOCK_F
    IN_PARTS: tl.constexpr = dtype == tl.float32 and CHUNKS.SHORTEST > BLOCKS * TILE.BLOCK_M
    queries = ()
    for first_d in tl.static_range(0, K.F, FEATURES):
        q = query_tile(
            FactorTensor(aq, strides.aq), FactorTensor(bq, strides.bq),
            TileRows(batch, n, h, row_mask, first_n, tokens), scales.q, Q, TILE.BLOCK_N, TILE.BLOCK_RQ, first_d, FEATURES,
        )  # fmt: skip
        queries += (tl.trans(q),)
    logit_scale = tl.full((1, ROWS), scales.logits, tl.float32)
    row_end = length - tokens + n + 1  # keys that a row sees

    k_heads = FactorTensor(ak + batch.to(tl.int64) * (strides.ak.b * A.VEC), strides.ak)
    v_heads = FactorTensor(av + batch.to(tl.int64) * (strides.av.b * A.VEC), strides.av)
    k_features = FactorTensor(bk + batch.to(tl.int64) * (strides.bk.b * K.VEC), strides.bk)
    v_features = FactorTensor(bv + batch.to(tl.int64) * (strides.bv.b * K.VEC), strides.bv)
    row = (n.to(tl.int64) * H + h)[None, :]
    e = tl.arange(0, V.BLOCK_F)[:, None]
    acc = tl.zeros((V.BLOCK_F, ROWS), tl.float32)
    row_max = tl.full((1, ROWS), float("-inf"), tl.float32)
    sums = tl.zeros(
        (TILE.BLOCK_M, ROWS), tl.float32
    )  # of weights; over the keys of a block they are added up in the end
    joined = empty_softmax(V.BLOCK_F, ROWS)
    four = empty_softmax(V.BLOCK_F, ROWS)
    fours = empty_softmax(V.BLOCK_F, ROWS)
    # What all rows see, and behind it keys of which some rows see some.
    seen_by_all = end
    if TILE.BLOCK_N > 1:
        seen_by_all = (
            first
            + tl.maximum(tl.minimum(end, length - tokens + first_n + 1) - first, 0) // TILE.BLOCK_M * TILE.BLOCK_M
        )
    bounds = (first, seen_by_all, end)
    for tail in tl.static_range(2 if TILE.BLOCK_N > 1 else 1):
        for start in range(bounds[tail], bounds[tail + 1], TILE.BLOCK_M):
            m = start + tl.arange(0, TILE.BLOCK_M)
            key_mask = m < end
            a = head_tile(k_heads, start, h, key_mask, head_mask, A, K.R, TILE.BLOCK_M, TILE.BLOCK_RK)
            logits = logits_of_ranks(k_features, start, end, queries, K, TILE.BLOCK_M, TILE.BLOCK_RK)
            logits = scale_alone(sum_ranks(logits, a, TILE.BLOCK_M, TILE.BLOCK_RK, ROWS), logit_scale, dtype)
            logits = tl.where((m[:, None] < row_end[None, :]) & key_mask[:, None], logits, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(logits, axis=0, keep_dims=True))
            base = finite_max(new_max)
            p = exp(logits - base, dtype == tl.float32)
            rescale = exp(row_max - base, dtype == tl.float32)
            sums = sums * rescale + p
            row_max = new_max
            v = feature_tile(v_features, start, end, V, TILE.BLOCK_M, TILE.BLOCK_RV, 0, V.BLOCK_F)
            a = head_tile(v_heads, start, h, key_mask, head_mask, A, V.R, TILE.BLOCK_M, TILE.BLOCK_RV)
            w = round_to(spread(p, a, TILE.BLOCK_M, TILE.BLOCK_RV, ROWS), v.dtype)
            acc = acc * rescale
            if tail == 1:
                key = start + tl.arange(0, TILE.BLOCK_M * TILE.BLOCK_RV) // TILE.BLOCK_RV
                acc = add_masked(acc, v, w, key[:, None] < row_end[None, :])
            else:
                acc = dot(tl.trans(v), w, acc)
            behind = start + TILE.BLOCK_M
            if IN_PARTS:
                if behind % (BLOCKS * TILE.BLOCK_M) == 0:
                    joined = join(joined, PartialSoftmax(acc, row_max, sum_of_pairs(sums, axis=0)[None, :]), dtype)
                    acc = tl.zeros((V.BLOCK_F, ROWS), tl.float32)
                    row_max = tl.full((1, ROWS), float("-inf"), tl.float32)
                    sums = tl.zeros((TILE.BLOCK_M, ROWS), tl.float32)
            if LEVELS > 0:
                if behind % chunk == 0:
                    of_chunk = PartialSoftmax(acc, row_max, sum_of_pairs(sums, axis=0)[None, :])
                    if IN_PARTS:
                        of_chunk = join(joined, of_chunk, dtype)
                        joined = empty_softmax(V.BLOCK_F, ROWS)
                    four = join(four, of_chunk, dtype)
                    acc = tl.zeros((V.BLOCK_F, ROWS), tl.float32)
                    row_max = tl.full((1, ROWS), float("-inf"), tl.float32)
                    sums = tl.zeros((TILE.BLOCK_M, ROWS), tl.float32)
                    if LEVELS > 1:
                        if behind % (4 * chunk) == 0:
                            fours = join(fours, four, dtype)
                            four = empty_softmax(V.BLOCK_F, ROWS)

    softmax = PartialSoftmax(acc, row_max, sum_of_pairs(sums, axis=0)[None, :])
    if IN_PARTS:
        softmax = join(joined, softmax, dtype)
    if LEVELS > 0:  # what is not complete
        softmax = join(four, softmax, dtype)
    if LEVELS > 1:
        softmax = join(fours, softmax, dtype)
    if config.WHOLE:
        ptrs = (
            out
            + (batch.to(tl.int64) * strides.out.b + n.to(tl.int64) * strides.out.n + h * strides.out.r)[None, :]
            + e * strides.out.f
        )
        result = round_to(finish(softmax, scales.v), out.dtype.element_ty)
        tl.store(ptrs, result, mask=row_mask[None, :] & (e < V.F))
    else:
        part = batch.to(tl.int64) * splits + split
        parts = Partials(partial, statistics, tokens.to(tl.int64) * H)
        store_part(parts, part, row, e, row_mask[None, :], softmax, V.F)


@triton.jit
def combine_kernel(
    partial, statistics, seqused_k, out, sizes: DecodeSizes, out_strides: FeatureStrides, scale_v: tl.float32,
    H: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, AHEAD: tl.constexpr,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Joins the parts of programs that took ``WIDTH`` chunks each: a tile (R, E) of one entry's rows.

    ``GROUP`` parts are joined first, from left to right or in ``PAIRS``; then these groups, from left to right.
    ``AHEAD`` parts, a multiple of that, are under way before the first is needed.

    With ``BESIDE``, of one row, so many groups are joined beside each other, by warps of their own, and each is stored
    in the place of its first part. ``AHEAD`` groups are under way then.
    """
    if PDL:
        gdc_wait()
    parts = Partials(partial, statistics, sizes.tokens.to(tl.int64) * H)
    row_blocks = tl.cdiv(parts.rows, BLOCK_R).to(tl.int32)
    batch = tl.program_id(0) // row_blocks
    row = ((tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    mask = row < parts.rows
    e = tl.arange(0, BLOCK_E)[None, :]
    length = valid_keys(seqused_k, batch, sizes.lengths_stride, sizes.keys)
    count = tl.cdiv(length, chunk_length(length, CHUNKS) * WIDTH)
    part = batch.to(tl.int64) * sizes.splits
    dtype: tl.constexpr = out.dtype.element_ty
    softmax = PartialSoftmax(
        tl.zeros((BLOCK_R, BLOCK_E), tl.float32),
        tl.full((BLOCK_R, 1), float("-inf"), tl.float32),
        tl.zeros((BLOCK_R, 1), tl.float32),
    )
    STEP: tl.constexpr = GROUP if BESIDE else 1
    JOINED: tl.constexpr = 1 if BESIDE else GROUP
    if BESIDE:
        group = tl.arange(0, BESIDE)[:, None] * GROUP
        for first in range(0, count, BESIDE * GROUP):
            ahead = ()
            for i in tl.static_range(GROUP):
                number = first + group + i
                ahead += (load_part(parts, part + number, row, e, mask & (number < count), E),)
            joined = join_parts(ahead, 0, GROUP, PAIRS, dtype)
            tl.debug_barrier()  # until every warp has read the part whose place this takes
            store_part(parts, part + first + group, row, e, mask & (first + group < count), joined, E)
        tl.debug_barrier()
    for first in range(0, count, AHEAD * STEP):
        ahead = ()
        for i in tl.static_range(AHEAD):
            part_mask = mask & (first + i * STEP < count)
            ahead += (load_part(parts, part + first + i * STEP, row, e, part_mask, E),)
        for i in tl.static_range(AHEAD // JOINED):
            softmax = join(softmax, join_parts(ahead, i * JOINED, JOINED, PAIRS, dtype), dtype)
    n = row // H
    h = row % H
    ptrs = out + batch.to(tl.int64) * out_strides.b + (n * out_strides.n + h * out_strides.r) + e * out_strides.f
    tl.store(ptrs, round_to(finish(softmax, scale_v), out.dtype.element_ty), mask=mask & (e < E))
