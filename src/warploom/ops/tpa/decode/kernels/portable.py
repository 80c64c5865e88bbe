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
is left of the tree, so all of them give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.activations import exponential_float32, power_of_two
from warploom.device.product import dot, rounded

# ----------------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def chunk_length(length, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, WANTED: tl.constexpr):
    """Keys of a chunk: ``SHORTEST``, doubled until there are at most ``WANTED`` chunks or it is ``LONGEST``."""
    chunk = length * 0 + SHORTEST
    while (chunk * WANTED < length) & (chunk < LONGEST):
        chunk = chunk * 2
    return chunk


@triton.jit
def valid_keys(lengths, batch, lengths_b, keys):
    """How many entries of the cache a batch entry may look at (int32)."""
    if lengths is None:
        length = keys
    else:
        length = tl.load(lengths + batch.to(tl.int64) * lengths_b)
        length = tl.maximum(tl.minimum(length, keys), 0).to(tl.int32)
    return length


@triton.jit
def power(x, dtype: tl.constexpr):
    """For results in ``dtype``: eˣ where that is float32, else 2ˣ, which is one instruction; x near 0 or below.

    Logits come in these units. The difference of two is exact where it matters, so it comes first.
    """
    if dtype == tl.float32:
        y = exponential_float32(x)
    else:
        y = power_of_two(x)
    return y


@triton.jit
def join(acc, top, total, more, more_top, more_total, dtype: tl.constexpr):
    """Two partial softmax sums over different keys as one: numerators, maxima and denominators.

    Fused by hand, so that every kernel rounds alike. Joining to nothing (zeros, -inf, 0) changes no bit.
    """
    highest = tl.maximum(top, more_top)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    keep = power(top - base, dtype)
    add = power(more_top - base, dtype)
    return (
        tl.fma(acc, tl.broadcast_to(keep, acc.shape), more * add),
        highest,
        tl.fma(total, keep, more_total * add),
    )


@triton.jit
def load_part(partial, statistics, slot, row, rows, e, inside, E: tl.constexpr):
    """Numerators, maxima and denominators of a slot; nothing where ``inside`` is false.

    ``row`` and ``e`` are tiles of one row and one column, either way round; ``slot`` is int64.
    """
    pointers = statistics + slot * 2 * rows + row
    return (
        tl.load(partial + slot * rows * E + row.to(tl.int64) * E + e, mask=inside & (e < E), other=0.0),
        tl.load(pointers, mask=inside, other=float("-inf")),
        tl.load(pointers + rows, mask=inside, other=0.0),
    )


@triton.jit
def node_sum(parts, first: tl.constexpr, count: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """``count`` parts from number ``first`` on joined, from left to right or in a binary tree."""
    if count == 1:
        acc, top, total = parts[first]
    else:
        half: tl.constexpr = count // 2 if PAIRS else count - 1
        acc, top, total = node_sum(parts, first, half, PAIRS, dtype)
        more, more_top, more_total = node_sum(parts, first + half, count - half, PAIRS, dtype)
        acc, top, total = join(acc, top, total, more, more_top, more_total, dtype)
    return acc, top, total


@triton.jit
def store_part(partial, statistics, slot, row, rows, e, inside, acc, top, total, E: tl.constexpr):
    """Leave what `load_part` loads."""
    pointers = statistics + slot * 2 * rows + row
    tl.store(partial + slot * rows * E + row.to(tl.int64) * E + e, acc, mask=inside & (e < E))
    tl.store(pointers, top, mask=inside)
    tl.store(pointers + rows, total, mask=inside)


@triton.jit
def add_seen(acc, v, w, seen):
    """``acc + vᵀ w`` (E, ROWS) where rows see some of the keys (M·R): what is NaN or infinite in others stays there.

    Zero times NaN is NaN: values are finite in the product, and a product of flags says which rows become NaN.
    """
    w = tl.where(seen, w, 0.0).to(v.dtype)
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    acc = dot(tl.trans(tl.where(finite, v, 0.0).to(v.dtype)), w, acc)
    flags = tl.trans(tl.where(finite, 0.0, 1.0).to(tl.bfloat16))
    reached = dot(flags, tl.where(seen, 1.0, 0.0).to(tl.bfloat16), tl.zeros(acc.shape, tl.float32))
    return tl.where(reached > 0.0, float("nan"), acc)


@triton.jit
def finish(acc, total, scale_v):
    """The output from numerators and denominators; 0 where no key was seen."""
    return acc * (scale_v / tl.where(total == 0.0, 1.0, total))


@triton.jit
def query_tile(
    aq, bq, batch, n, h, inside, first_n, tokens,
    aq_b, aq_n, aq_h, aq_r, bq_b, bq_n, bq_r, bq_d, scale_q,
    RQ: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Q of every row (ROWS, D) in the dtype of memory. Without ``aq``, ``bq`` holds Q and its rank axis the heads."""
    d = tl.arange(0, BLOCK_D)
    features = d[None, :] if UNIT else (d * bq_d)[None, :]
    bq += batch.to(tl.int64) * (bq_b * VEC)
    if aq is None:
        rows = bq + (n.to(tl.int64) * (bq_n * VEC) + h.to(tl.int64) * (bq_r * VEC))[:, None]
        q = tl.load(rows + features, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    else:
        aq += batch.to(tl.int64) * aq_b
        r = tl.arange(0, BLOCK_R)
        rows = aq + (n.to(tl.int64) * aq_n + h.to(tl.int64) * aq_h)[:, None]
        q = tl.zeros((n.shape[0], BLOCK_D), tl.float32)
        # The heads of one query at a time.
        for i in tl.range(0, BLOCK_N * ((RQ + BLOCK_R - 1) // BLOCK_R), num_stages=1):
            token = first_n + i % BLOCK_N
            rank = i // BLOCK_N * BLOCK_R + r
            mask = (inside & (n == token))[:, None] & (rank < RQ)[None, :]
            a = tl.load(rows + (rank * aq_r)[None, :], mask=mask, other=0.0)
            ranks = bq + token.to(tl.int64) * (bq_n * VEC) + rank.to(tl.int64)[:, None] * (bq_r * VEC)
            mask = ((rank < RQ) & (token < tokens))[:, None] & (d < D)[None, :]
            b = tl.load(ranks + features, mask=mask, other=0.0)
            if BLOCK_N == 1:
                q = dot(a, b, q)
            else:  # rows of the others are zero, which times NaN is NaN
                q = tl.where((n == token)[:, None], dot(a, b, q), q)
    return rounded(q * scale_q, bq.dtype.element_ty)


@triton.jit
def head_factors(
    a, first, h, inside, head_mask, a_m, a_h, a_r,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, VEC: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Head factors of a block of keys: (M, ROWS), or (M, ROWS, R) beyond rank one; in the dtype of memory.

    ``DENSE``: heads and ranks are adjacent in memory, which the compiler must know for wide loads, and offsets within
    the block fit in 32 bits.
    """
    block = a + first * (a_m * VEC)
    m = tl.arange(0, BLOCK_M)
    if DENSE:
        offsets = (m * (a_m.to(tl.int32) * VEC))[:, None] + (h * R)[None, :]
    else:
        offsets = (m * (a_m * VEC))[:, None] + (h.to(tl.int64) * a_h)[None, :]
    mask = inside[:, None] & head_mask[None, :]
    if BLOCK_R > 1:
        r = tl.arange(0, BLOCK_R)
        offsets = offsets[:, :, None] + (r if DENSE else r * a_r)[None, None, :]
        mask = mask[:, :, None] & (r < R)[None, None, :]
    return tl.load(block + offsets, mask=mask, other=0.0)


@triton.jit
def feature_factors(
    b, first, length, b_m, b_r, b_d,
    R: tl.constexpr, F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Feature factors of a block of keys, (M·R, F), ranks fastest; in the dtype of memory.

    ``UNIT``: features are adjacent, and offsets within the block fit in 32 bits.
    """
    block = b + first * (b_m * VEC)
    row = tl.arange(0, BLOCK_M * BLOCK_R)
    m = row // BLOCK_R
    r = row % BLOCK_R
    f = tl.arange(0, BLOCK_F)
    if UNIT:
        offsets = (m * (b_m.to(tl.int32) * VEC) + r * (b_r.to(tl.int32) * VEC))[:, None] + f[None, :]
    else:
        offsets = (m * (b_m * VEC) + r * (b_r * VEC))[:, None] + (f * b_d)[None, :]
    mask = (first + m < length)[:, None]
    if R != BLOCK_R:
        mask = mask & (r < R)[:, None]
    if F != BLOCK_F:
        mask = mask & (f < F)[None, :]
    return tl.load(block + offsets, mask=mask, other=0.0)


@triton.jit
def weigh(logits, factors, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr):
    """``Σ_r a ⊙ logits`` (M, ROWS) float32, from logits (M·R, ROWS) of every rank."""
    if BLOCK_R == 1:
        weighed = logits * factors.to(tl.float32)
    else:
        ranks = logits.reshape(BLOCK_M, BLOCK_R, ROWS).permute(0, 2, 1)
        weighed = tl.sum(ranks * factors.to(tl.float32), axis=2)
    return weighed


@triton.jit
def spread(weights, factors, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr):
    """``p ⊙ a`` (M·R, ROWS) float32 of every rank, from weights (M, ROWS)."""
    if BLOCK_R == 1:
        ranks = weights * factors.to(tl.float32)
    else:
        ranks = weights[:, :, None] * factors.to(tl.float32)
        ranks = ranks.permute(0, 2, 1).reshape(BLOCK_M * BLOCK_R, ROWS)
    return ranks


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------

# Every number is a run-time value of declared width: none of them ever causes a compilation.
_DECODE_NUMBERS = (
    "tokens keys spans lengths_b aq_b aq_n aq_h aq_r bq_b bq_n bq_r bq_d ak_b ak_m ak_h ak_r bk_b bk_m bk_r bk_d "
    "av_b av_m av_h av_r bv_b bv_m bv_r bv_e out_b out_n out_h out_e logit_scale scale_q scale_v"
).split()


@triton.jit(do_not_specialize=_DECODE_NUMBERS)
def decode_kernel(
    ak, av, bk, bv, aq, bq, lengths, out, partial, statistics,
    tokens: tl.int32, keys: tl.int32, spans: tl.int32, lengths_b: tl.int64,
    aq_b: tl.int64, aq_n: tl.int64, aq_h: tl.int64, aq_r: tl.int64,
    bq_b: tl.int64, bq_n: tl.int64, bq_r: tl.int64, bq_d: tl.int64,
    ak_b: tl.int64, ak_m: tl.int64, ak_h: tl.int64, ak_r: tl.int64,
    bk_b: tl.int64, bk_m: tl.int64, bk_r: tl.int64, bk_d: tl.int64,
    av_b: tl.int64, av_m: tl.int64, av_h: tl.int64, av_r: tl.int64,
    bv_b: tl.int64, bv_m: tl.int64, bv_r: tl.int64, bv_e: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_e: tl.int64,
    logit_scale: tl.float32, scale_q: tl.float32, scale_v: tl.float32,
    H: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RQ: tl.constexpr,
    BLOCK_RK: tl.constexpr, BLOCK_RV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, WANTED: tl.constexpr, LEVELS: tl.constexpr, WHOLE: tl.constexpr,
    Q_VEC: tl.constexpr, Q_UNIT: tl.constexpr, A_VEC: tl.constexpr, A_DENSE: tl.constexpr,
    B_VEC: tl.constexpr, B_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one batch entry, over one of ``spans`` spans of its keys.

    A span is one chunk, four or all, with 0, 1 or 2 ``LEVELS``. With ``WHOLE`` there is one, and the program writes the
    output. Without, it leaves numerators, maximum and denominator for `combine_kernel` in slot (batch entry, span) of
    ``partial`` (B, spans, N·H, E) and ``statistics`` (B, spans, 2, N·H), float32.
    """
    ROWS: tl.constexpr = BLOCK_N * BLOCK_H
    H_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    row_blocks = H_BLOCKS * tl.cdiv(tokens, BLOCK_N)
    program = tl.program_id(0)
    row_block = program % row_blocks  # neighbours share the cache they read
    span = program // row_blocks % spans
    batch = program // row_blocks // spans
    length = valid_keys(lengths, batch, lengths_b, keys)
    chunk = chunk_length(length, SHORTEST, LONGEST, WANTED)
    first = span * 0
    end = length
    if LEVELS < 2:
        first = span * chunk * 4**LEVELS
        end = tl.minimum(first + chunk * 4**LEVELS, length)
    if first > 0 and first >= length:
        return

    rows_in_tile = tl.arange(0, ROWS)
    first_n = row_block // H_BLOCKS * BLOCK_N
    end = tl.minimum(end, length - tokens + first_n + BLOCK_N)  # no row sees what lies behind
    n = first_n + rows_in_tile // BLOCK_H
    h = row_block % H_BLOCKS * BLOCK_H + rows_in_tile % BLOCK_H
    head_mask = h < H  # what stands in rows of other queries, or of none, is not stored
    inside = head_mask & (n < tokens)
    q = query_tile(
        aq, bq, batch, n, h, inside, first_n, tokens, aq_b, aq_n, aq_h, aq_r, bq_b, bq_n, bq_r, bq_d, scale_q,
        RQ, D, BLOCK_N, BLOCK_RQ, BLOCK_D, Q_VEC, Q_UNIT,
    )  # fmt: skip
    q = tl.trans(q)
    horizon = length - tokens + n + 1  # keys that a row sees

    ak += batch.to(tl.int64) * (ak_b * A_VEC)
    av += batch.to(tl.int64) * (av_b * A_VEC)
    bk += batch.to(tl.int64) * (bk_b * B_VEC)
    bv += batch.to(tl.int64) * (bv_b * B_VEC)
    row = (n.to(tl.int64) * H + h)[None, :]
    e = tl.arange(0, BLOCK_E)[:, None]
    acc = tl.zeros((BLOCK_E, ROWS), tl.float32)
    top = tl.full((1, ROWS), float("-inf"), tl.float32)
    sums = tl.zeros(
        (BLOCK_M, ROWS), tl.float32
    )  # of weights; over the keys of a block they are added up in the end
    if LEVELS > 0:
        four, four_top, four_total = acc, top, tl.zeros((1, ROWS), tl.float32)
    if LEVELS > 1:
        every, every_top, every_total = acc, top, tl.zeros((1, ROWS), tl.float32)
    # What all rows see, and behind it keys of which some rows see some.
    seen_by_all = end
    if BLOCK_N > 1:
        seen_by_all = (
            first + tl.maximum(tl.minimum(end, length - tokens + first_n + 1) - first, 0) // BLOCK_M * BLOCK_M
        )
    bounds = (first, seen_by_all, end)
    for part in tl.static_range(2 if BLOCK_N > 1 else 1):
        for start in range(bounds[part], bounds[part + 1], BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            valid = m < end
            k = feature_factors(bk, start, end, bk_m, bk_r, bk_d, RK, D, BLOCK_M, BLOCK_RK, BLOCK_D, B_VEC, B_UNIT)
            a = head_factors(
                ak, start, h, valid, head_mask, ak_m, ak_h, ak_r, RK, BLOCK_M, BLOCK_RK, A_VEC, A_DENSE
            )
            logits = dot(k, q, tl.zeros((BLOCK_M * BLOCK_RK, ROWS), tl.float32))
            logits = weigh(logits, a, BLOCK_M, BLOCK_RK, ROWS) * logit_scale
            logits = tl.where((m[:, None] < horizon[None, :]) & valid[:, None], logits, float("-inf"))
            highest = tl.maximum(top, tl.max(logits, axis=0, keep_dims=True))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            p = power(logits - base, k.dtype)
            keep = power(top - base, k.dtype)
            sums = sums * keep + p
            top = highest
            v = feature_factors(bv, start, end, bv_m, bv_r, bv_e, RV, E, BLOCK_M, BLOCK_RV, BLOCK_E, B_VEC, B_UNIT)
            a = head_factors(
                av, start, h, valid, head_mask, av_m, av_h, av_r, RV, BLOCK_M, BLOCK_RV, A_VEC, A_DENSE
            )
            w = rounded(spread(p, a, BLOCK_M, BLOCK_RV, ROWS), v.dtype)
            acc = acc * keep
            if part == 1:
                key = start + tl.arange(0, BLOCK_M * BLOCK_RV) // BLOCK_RV
                acc = add_seen(acc, v, w, key[:, None] < horizon[None, :])
            else:
                acc = dot(tl.trans(v), w, acc)
            if LEVELS > 0:
                behind = start + BLOCK_M
                if behind % chunk == 0:
                    total = tl.sum(sums, axis=0, keep_dims=True)
                    four, four_top, four_total = join(four, four_top, four_total, acc, top, total, k.dtype)
                    acc = tl.zeros((BLOCK_E, ROWS), tl.float32)
                    top = tl.full((1, ROWS), float("-inf"), tl.float32)
                    sums = tl.zeros((BLOCK_M, ROWS), tl.float32)
                    if LEVELS > 1:
                        if behind % (4 * chunk) == 0:
                            every, every_top, every_total = join(
                                every, every_top, every_total, four, four_top, four_total, k.dtype
                            )
                            four = tl.zeros((BLOCK_E, ROWS), tl.float32)
                            four_top = tl.full((1, ROWS), float("-inf"), tl.float32)
                            four_total = tl.zeros((1, ROWS), tl.float32)

    dtype: tl.constexpr = bk.dtype.element_ty
    total = tl.sum(sums, axis=0, keep_dims=True)
    if LEVELS > 0:  # what is not complete
        acc, top, total = join(four, four_top, four_total, acc, top, total, dtype)
    if LEVELS > 1:
        acc, top, total = join(every, every_top, every_total, acc, top, total, dtype)
    if WHOLE:
        pointers = out + (batch.to(tl.int64) * out_b + n.to(tl.int64) * out_n + h * out_h)[None, :] + e * out_e
        result = rounded(finish(acc, total, scale_v), out.dtype.element_ty)
        tl.store(pointers, result, mask=inside[None, :] & (e < E))
    else:
        slot = batch.to(tl.int64) * spans + span
        rows = tokens.to(tl.int64) * H
        store_part(partial, statistics, slot, row, rows, e, inside[None, :], acc, top, total, E)


_COMBINE_NUMBERS = "tokens keys spans lengths_b out_b out_n out_h out_e scale_v".split()


@triton.jit(do_not_specialize=_COMBINE_NUMBERS)
def combine_kernel(
    partial, statistics, lengths, out,
    tokens: tl.int32, keys: tl.int32, spans: tl.int32, lengths_b: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_e: tl.int64, scale_v: tl.float32,
    H: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, AHEAD: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, WANTED: tl.constexpr, WIDTH: tl.constexpr, NODE: tl.constexpr,
    PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Joins what programs left that took ``WIDTH`` chunks each: a tile (R, E) of one entry's rows.

    ``NODE`` parts make a node of the tree, from left to right or in ``PAIRS``; nodes are joined from left to right.
    ``AHEAD`` parts, a multiple of that, are under way before the first is needed.
    """
    if EARLY:
        gdc_wait()
    rows = tokens.to(tl.int64) * H
    row_blocks = tl.cdiv(rows, BLOCK_R).to(tl.int32)
    batch = tl.program_id(0) // row_blocks
    row = ((tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    inside = row < rows
    e = tl.arange(0, BLOCK_E)[None, :]
    length = valid_keys(lengths, batch, lengths_b, keys)
    parts = tl.cdiv(length, chunk_length(length, SHORTEST, LONGEST, WANTED) * WIDTH)
    slot = batch.to(tl.int64) * spans
    dtype: tl.constexpr = out.dtype.element_ty
    acc = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_R, 1), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R, 1), tl.float32)
    for first in range(0, parts, AHEAD):
        ahead = ()
        for i in tl.static_range(AHEAD):
            there = inside & (first + i < parts)
            ahead += (load_part(partial, statistics, slot + first + i, row, rows, e, there, E),)
        for i in tl.static_range(AHEAD // NODE):
            more, more_top, more_total = node_sum(ahead, i * NODE, NODE, PAIRS, dtype)
            acc, top, total = join(acc, top, total, more, more_top, more_total, dtype)
    n = row // H
    h = row % H
    pointers = out + batch.to(tl.int64) * out_b + (n * out_n + h * out_h) + e * out_e
    tl.store(pointers, rounded(finish(acc, total, scale_v), out.dtype.element_ty), mask=inside & (e < E))
