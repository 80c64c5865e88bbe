"""Tiles of the delta rule's kernels: rows and how they are encoded, decays, pairs of tokens, the triangular inverse.

A program takes a chunk of `DeltaConfig.BLOCK_T` tokens of a head, or goes through all chunks of a sequence. No product
has more than 32 rows: those of 64 and more are Hopper's products of warp groups, whose factors in registers Triton 3.4
to 3.7.0 loses where a loop has several of them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.decays import clamp_decay, exp
from warploom.device.phase import cos_sin, phase_step
from warploom.device.product import dot, dot_of_terms, find_scale, product, round_to

SUBSTITUTED = tl.constexpr(16)
"""Rows of the blocks that are inverted by substitution."""
STEPS = tl.constexpr(1024.0)
"""Parts of 1 into which logarithms are cut: sums of whole parts are exact in float32."""
EPSILON = tl.constexpr(1e-6)


class DeltaSizes(NamedTuple):
    """Sizes of a call and of its chunks. Every number is a run-time value: none of them ever causes a compilation."""

    tokens: tl.int32  # of a batch entry
    heads: tl.int32  # of values
    group: tl.int32  # heads of values for each of queries and keys
    chunks: tl.int32  # of a batch entry
    chunk: tl.int32  # tokens of a chunk
    columns: tl.int32  # blocks of a value's features
    sequences: tl.int32  # packed ones
    scale: tl.float32
    cu_stride: tl.int64
    theta_h: tl.int64
    theta_f: tl.int64
    offsets_b: tl.int64
    beta_b: tl.int64
    beta_n: tl.int64
    beta_h: tl.int64
    decay_b: tl.int64
    decay_n: tl.int64
    decay_h: tl.int64
    decay_f: tl.int64


class DeltaConfig(NamedTuple):
    """Compile-time choices of a kernel."""

    KIND: str  # none, rotate or interleaved
    NORMALIZE: bool
    DECAY: str  # none, head or feature
    D: int  # features of a query or key
    E: int  # features of a value
    F: int  # frequencies of a head
    VEC: int  # by which strides of rows are divided, all but those of features
    UNIT: bool  # whether features are adjacent
    BLOCK_T: int  # tokens of a chunk
    LEVELS: int  # 2 to this power they are
    BLOCK_D: int  # features of a query or key, of a tile
    BLOCK_E: int  # features of a value, of a tile
    WIDE_D: int  # features in buffers between launches
    WIDE: int
    PARTS: int  # sums that the gradient of a head's decay comes in


# ----------------------------------------------------------------------------------------------------------
# Rows
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def head_rows(ptr, n, place, h, strides, VEC: tl.constexpr):
    """Returns pointers (T, 1) to feature 0 of the tokens ``n`` of the place's sequence in head ``h``, in 64 bits."""
    head = ptr + (place.b * (strides.b * VEC) + h * (strides.h * VEC))
    return head + ((place.start + n).to(tl.int64) * (strides.n * VEC))[:, None]


@triton.jit
def owned_rows(n, place, sizes):
    """Returns which tokens (T,) of the chunk this program writes: those of its sequence, and of none behind the last."""
    inside = n < place.last
    behind = (place.start + n < sizes.tokens) & (place.sequence == sizes.sequences - 1)
    return inside | behind


@triton.jit
def feature_pointers(rows, f, stride, UNIT: tl.constexpr):
    """Returns pointers (T, F) to features ``f`` of rows."""
    return rows + (f if UNIT else f * stride)[None, :]


@triton.jit
def load_features(rows, f, mask, stride, FEATURES: tl.constexpr, UNIT: tl.constexpr):
    """Returns features ``f`` of rows, 0 where there are none."""
    return tl.load(feature_pointers(rows, f, stride, UNIT), mask=mask[:, None] & (f < FEATURES)[None, :], other=0.0)


@triton.jit
def store_features(rows, x, f, mask, stride, FEATURES: tl.constexpr, UNIT: tl.constexpr):
    """Stores what `load_features` loads."""
    ptrs = feature_pointers(rows, f, stride, UNIT)
    tl.store(ptrs, round_to(x, rows.dtype.element_ty), mask=mask[:, None] & (f < FEATURES)[None, :])


@triton.jit
def work_rows(ptr, slot, h, sizes, rows, first, BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns pointers to a tile of a buffer (slots, H, BLOCK_T, COLUMNS): its ``rows`` and the columns ``first``."""
    return ptr + (slot * sizes.heads + h) * (BLOCK_T * COLUMNS) + (rows[:, None] * COLUMNS + first[None, :])


@triton.jit
def inverse_lengths(rows, mask, stride, config: tl.constexpr):
    """Returns the inverse lengths (T,) of rows, by which they are normalized: 1 where they are not."""
    squares = tl.zeros((rows.shape[0],), tl.float32)
    if config.NORMALIZE:
        for first in range(0, config.D, config.BLOCK_D):
            f = first + tl.arange(0, config.BLOCK_D)
            x = load_features(rows, f, mask, stride, config.D, config.UNIT).to(tl.float32)
            squares += tl.sum(x * x, axis=1)
        squares += EPSILON
    else:
        squares += 1.0
    return tl.div_rn(tl.full((rows.shape[0],), 1.0, tl.float32), tl.sqrt_rn(squares))


@triton.jit
def load_encoded(rows, f, inverse, mask, position, theta, h, stride, sizes, config: tl.constexpr):
    """Returns features ``f`` of rows in float32, normalized and rotated at positions (T,), 0 where there are none."""
    x = load_features(rows, f, mask, stride, config.D, config.UNIT).to(tl.float32)
    if config.KIND != "none":
        HALF: tl.constexpr = config.D // 2
        if config.KIND == "interleaved":
            is_first = f % 2 == 0
            pair = f // 2
            other = tl.where(is_first, f + 1, f - 1)
        else:
            is_first = f < HALF
            pair = tl.where(is_first, f, f - HALF)
            other = tl.where(is_first, f + HALF, f - HALF)
        other = tl.where(f < config.D, other, f)
        partner = load_features(rows, other, mask, stride, config.D, config.UNIT).to(tl.float32)
        ptrs = theta + h * sizes.theta_h + pair * sizes.theta_f
        turned = (pair < config.F) & (f < config.D)
        step = phase_step(tl.load(ptrs, mask=turned, other=0.0)[None, :])
        NARROW: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth == 16
        cosine, sine = cos_sin(position[:, None], step, NARROW)
        x = x * cosine + tl.where(is_first[None, :], -partner, partner) * sine
    if config.NORMALIZE:
        x *= inverse[:, None]
    return x


@triton.jit
def load_beta(beta, n, mask, place, sizes):
    """Returns β (T,) of a chunk's tokens, 0 where there are none."""
    ptrs = beta + place.b * sizes.beta_b + (place.start + n).to(tl.int64) * sizes.beta_n + place.h * sizes.beta_h
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


# ----------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def multiply(a, b, acc, dtype: tl.constexpr):
    """Returns ``a · b + acc`` in float32, of factors in a dtype: float32 ones are rounded to it."""
    if a.dtype == dtype and b.dtype == dtype:
        acc = dot(a, b, acc)
    elif dtype == tl.float16:  # which does not hold every float32
        size = 1.0
        if a.dtype != dtype:
            of_a = find_scale(a)
            a = round_to(a / of_a, dtype)
            size *= of_a
        if b.dtype != dtype:
            of_b = find_scale(b)
            b = round_to(b / of_b, dtype)
            size *= of_b
        acc += dot(a, b, tl.zeros(acc.shape, tl.float32)) * size
    else:
        if a.dtype != dtype:
            a = round_to(a, dtype)
        if b.dtype != dtype:
            b = round_to(b, dtype)
        acc = dot(a, b, acc)
    return acc


@triton.jit
def exact_terms(x, COUNT: tl.constexpr = 3):
    """Returns a float32 tile as a sum of bfloat16 terms, the largest first: three hold all of its bits, two 16 of them.

    Each is cut off, not rounded: this takes the whole numbers' units, of which there are more than of converting ones.
    """
    terms = ()
    for _ in tl.static_range(COUNT):
        bits = x.to(tl.int32, bitcast=True)
        terms += ((bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
        x -= (bits & -65536).to(tl.float32, bitcast=True)
    return terms


@triton.jit
def sum_rows(chosen, x, NARROW: tl.constexpr):
    """Returns the sums (T, F) of the rows of ``x`` that are ``chosen`` (T, T), to float32's accuracy.

    ``NARROW``: of numbers with 16 bits, for results that are rounded to as many or fewer.
    """
    COUNT: tl.constexpr = 2 if NARROW else 3
    ones = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
    terms = exact_terms(x, COUNT)
    total = tl.zeros(x.shape, tl.float32)
    for i in tl.static_range(COUNT):  # the smallest first
        total = dot_of_terms((ones,), (terms[COUNT - 1 - i],), 0, 0, total)
    return total


# ----------------------------------------------------------------------------------------------------------
# Decays
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_decays(decay, n, f, mask, place, sizes, config: tl.constexpr):
    """Returns logarithms of decays of a chunk's tokens: (T,) of a head, (T, F) of features ``f``, 0 where there are none."""
    if config.DECAY == "none":
        g = tl.zeros((config.BLOCK_T,), tl.float32)
    else:
        token = (place.start + n).to(tl.int64) * sizes.decay_n
        ptrs = decay + place.b * sizes.decay_b + place.h * sizes.decay_h + token
        if config.DECAY == "head":
            g = clamp_decay(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32))
        else:
            inside = mask[:, None] & (f < config.D)[None, :]
            g = tl.load(ptrs[:, None] + (f * sizes.decay_f)[None, :], mask=inside, other=0.0)
            g = clamp_decay(g.to(tl.float32))
    return g


@triton.jit
def decays_of_chunk(g, config: tl.constexpr, NARROW: tl.constexpr):
    """Returns the decays of a chunk from its start to each token, from each token to its end, and over all of it.

    Each sum has its own first term: none is a difference of others. They are (T, 1) and (1, 1) of a head, or
    (T, F) and (1, F).
    """
    t = tl.arange(0, config.BLOCK_T)
    behind = t[None, :] > t[:, None]
    if config.DECAY == "feature":
        since = sum_rows(t[None, :] <= t[:, None], g, NARROW)
        until = sum_rows(behind, g, NARROW)
        whole = tl.sum(g, axis=0)[None, :]
    else:
        since = tl.cumsum(g, axis=0)[:, None]
        until = tl.sum(tl.where(behind, g[None, :], 0.0), axis=1)[:, None]
        whole = tl.sum(g, axis=0) + tl.zeros((1, 1), tl.float32)
    return exp(since, NARROW), exp(until, NARROW), exp(whole, False)


@triton.jit
def decays_between(g, NARROW: tl.constexpr):
    """Returns the decays (T, T) of a head from the column's token to the row's; 1 where that is not behind it.

    Logarithms are cut into multiples of 1/`STEPS`, whose sums and differences are exact, and what they leave: strong
    decays leave no rounding in the sums of weak ones behind them.
    """
    coarse = tl.floor(g * STEPS) / STEPS
    coarse_sums, fine_sums = tl.cumsum(coarse, axis=0), tl.cumsum(g - coarse, axis=0)
    between = (coarse_sums[:, None] - coarse_sums[None, :]) + (fine_sums[:, None] - fine_sums[None, :])
    t = tl.arange(0, g.shape[0])
    return exp(tl.where(t[None, :] <= t[:, None], between, 0.0), NARROW)


@triton.jit
def tokens_to_middle(level, BLOCK_T: tl.constexpr):
    """Returns which decays (T, T) lie between each token and the middle of the block of 2 · 2ˡᵉᵛᵉˡ tokens that has it.

    A token behind the middle has its own among them, one before it has not.
    """
    t = tl.arange(0, BLOCK_T)
    middle = (((t >> level) | 1) << level)[:, None]
    row, i = t[:, None], t[None, :]
    return ((i >= middle) & (i <= row)) | ((i > row) & (i < middle))


@triton.jit
def across_middle(level, BLOCK_T: tl.constexpr):
    """Returns the pairs (T, T) of tokens with the middle of 2 · 2ˡᵉᵛᵉˡ tokens between them, the later one's the row."""
    t = tl.arange(0, BLOCK_T) >> level
    row, column = t[:, None], t[None, :]
    return (row >> 1 == column >> 1) & (row > column)


# ----------------------------------------------------------------------------------------------------------
# Pairs of tokens, and the triangular inverse
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def add_pairs(of_keys, of_queries, queries, keys, g, config: tl.constexpr, NARROW: tl.constexpr):
    """Adds inner products (T, T), over some features, of keys with earlier keys and of queries with keys up to their own.

    Where decays are per feature, they are in the factors: both tokens decay to the middle of the smallest block of
    2ⁿ tokens that has one of them on each side. Those of a head are for `decay_pairs`.
    """
    dtype: tl.constexpr = keys.dtype
    if config.DECAY == "feature":
        t = tl.arange(0, config.BLOCK_T)
        zeros = tl.zeros((config.BLOCK_T, config.BLOCK_T), tl.float32)
        own = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)
        of_queries += tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
        for level in range(config.LEVELS):
            decays = exp(sum_rows(tokens_to_middle(level, config.BLOCK_T), g, NARROW), NARROW)
            decayed = round_to(keys.to(tl.float32) * decays, dtype)
            asking = round_to(queries.to(tl.float32) * decays, dtype)
            pairs = across_middle(level, config.BLOCK_T)
            of_keys += tl.where(pairs, dot(decayed, tl.trans(decayed), zeros), 0.0)
            of_queries += tl.where(pairs, dot(asking, tl.trans(decayed), zeros), 0.0)
    else:
        of_keys = dot(keys, tl.trans(keys), of_keys)
        of_queries = dot(queries, tl.trans(keys), of_queries)
    return of_keys, of_queries


@triton.jit
def decay_pairs(of_keys, of_queries, g, NARROW: tl.constexpr):
    """Returns pairs (T, T) of keys, and of queries with keys, over the decays of a head between them."""
    between = decays_between(g, NARROW)
    return of_keys * between, of_queries * between


@triton.jit
def invert_blocks(lower, scratch, BLOCK_T: tl.constexpr):
    """Returns the inverses of the blocks of `SUBSTITUTED` rows on the diagonal of ``1 + lower``, 0 elsewhere.

    Every column of an inverse follows from itself alone, row by row. A thread has one of them, and reads the block's
    factors from ``scratch``, `SUBSTITUTED` float32 numbers for each row of the tile, which it overwrites.
    """
    SIZE: tl.constexpr = SUBSTITUTED
    t = tl.arange(0, BLOCK_T)
    row, column = t[:, None], t[None, :]
    block = row // SIZE == column // SIZE
    ptrs = scratch + (row * SIZE + column % SIZE)
    tl.store(ptrs, lower, mask=block)
    tl.debug_barrier()
    own = scratch + t // SIZE * (SIZE * SIZE)
    found = ()
    for i in tl.static_range(SIZE):
        x = tl.where(t % SIZE == i, 1.0, 0.0)
        for j in tl.static_range(i):
            x -= tl.load(own + (i * SIZE + j)) * found[j]
        found += (x,)
    tl.debug_barrier()
    for i in tl.static_range(SIZE):
        tl.store(own + (i * SIZE + t % SIZE), found[i])
    tl.debug_barrier()
    return tl.load(ptrs, mask=block, other=0.0)


@triton.jit
def invert(lower, scratch, BLOCK_T: tl.constexpr, LEVELS: tl.constexpr):
    """Returns the inverse (T, T) of ``1 + lower``, which is strictly lower triangular, in float32.

    Blocks on the diagonal are inverted by substitution (`invert_blocks`), and then merged two by two:
    ``[[A, 0], [C, B]]`` has the inverse ``[[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]``.
    """
    x = invert_blocks(lower, scratch, BLOCK_T)
    zeros = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for level in tl.static_range(4, LEVELS):
        known = exact_terms(x)
        between = exact_terms(tl.where(across_middle(level, BLOCK_T), lower, 0.0))
        x -= product(exact_terms(product(known, between, zeros, "3-term")), known, zeros, "3-term")
    return x
