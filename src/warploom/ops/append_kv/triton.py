"""The kernel: rows of keys, values and queries, one tile a program.

A tile has R = TOKENS · BLOCK_H rows of one of the three. A row is a (token, head), heads fastest, so that
neighbouring rows are neighbours in memory. A token's place in its sequence follows from the number of keys that the
sequence has with all new tokens, and from the number of those behind the token.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.phase import cos_sin, phase_step
from warploom.device.rotation import rotate
from warploom.device.rows import RowSpec, Strides, load_pair, store_pair

BOUNDS = tl.constexpr(256)
"""Bounds of sequences that are read at once."""
LARGEST = tl.constexpr(2**31 - 1)


class AppendStrides(NamedTuple):
    """Strides of a call's tensors."""

    k: Strides
    v: Strides
    q: Strides
    out: Strides
    k_cache: Strides
    v_cache: Strides
    theta: tl.int64
    cu_seqlens: tl.int64
    seqused_k: tl.int64
    table_s: tl.int64
    table_p: tl.int64


class AppendSizes(NamedTuple):
    """Sizes of a call."""

    tokens: tl.int32  # of a batch entry
    all_tokens: tl.int32
    sequences: tl.int32
    cache_rows: tl.int32  # sequences of the cache, or pages
    cache_columns: tl.int32  # keys of a sequence, or of a page
    pages: tl.int32  # of a sequence; 1 without pages


class AppendConfig(NamedTuple):
    """Compile-time choices of the kernel."""

    spec: RowSpec  # of queries and keys
    HEADS: int  # of keys and of values
    Q_HEADS: int  # 0 without queries
    D: int  # features of a query or key
    E: int  # features of a value
    BLOCK_F: int  # pairs of features, as a block
    BLOCK_H: int  # heads of a tile
    TOKENS: int  # of a tile


class TokenRows(NamedTuple):
    """Rows (R,) of a tile: their tokens in the tensors of new ones, and which of them there are."""

    token: tl.tensor  # of all batch entries
    b: tl.tensor  # batch entry
    n: tl.tensor  # token of it
    exists: tl.tensor


class TokenPlaces(NamedTuple):
    """Places (R,) of tokens in their sequences."""

    sequence: tl.tensor
    place: tl.tensor
    used: tl.tensor  # the token is one of a sequence


@triton.jit
def find_rows(first, cu_seqlens, sizes, config: tl.constexpr):
    """Returns the rows of the tokens from ``first`` on."""
    token = first + tl.arange(0, config.TOKENS * config.BLOCK_H) // config.BLOCK_H
    exists = (token < sizes.all_tokens) & (token >= 0)
    token = tl.where(exists, token, 0)
    b, n = token * 0, token
    if cu_seqlens is None:
        b = token // sizes.tokens
        n = token - b * sizes.tokens
    return TokenRows(token, b.to(tl.int64), n.to(tl.int64), exists)


@triton.jit
def find_places(rows, cu_seqlens, seqused_k, sizes, strides):
    """Returns the places of a tile's tokens."""
    used = rows.exists
    if cu_seqlens is None:
        sequence = rows.b
        behind = sizes.tokens - rows.n.to(tl.int32)
    else:
        # As many sequences end before a token as its number says. A search would wait for one load after another.
        count = tl.zeros_like(rows.token)
        for start in range(1, sizes.sequences + 1, BOUNDS):
            s = start + tl.arange(0, BOUNDS)
            ends = tl.load(
                cu_seqlens + s.to(tl.int64) * strides.cu_seqlens, mask=s <= sizes.sequences, other=LARGEST
            )
            count += tl.sum((ends[None, :] <= rows.token[:, None]).to(tl.int32), axis=1)
        used = used & (count < sizes.sequences)
        sequence = count.to(tl.int64)
        end = tl.load(cu_seqlens + (sequence + 1) * strides.cu_seqlens, mask=used, other=0)
        behind = end.to(tl.int32) - rows.token
    keys = tl.load(seqused_k + sequence * strides.seqused_k, mask=used, other=0).to(tl.int32)
    return TokenPlaces(sequence, keys - behind, used)


@triton.jit
def find_slots(places, block_table, sizes, strides):
    """Returns row and column (int64) of the cache for each row of a tile, and which of them are in it."""
    place, row = places.place, places.sequence
    inside = places.used & (place >= 0)
    if block_table is None:
        column = place
        inside = inside & (place < sizes.cache_columns)
    else:
        page = tl.where(inside, place, 0) // sizes.cache_columns
        column = place - page * sizes.cache_columns
        inside = inside & (page < sizes.pages)
        ptrs = block_table + row * strides.table_s + page.to(tl.int64) * strides.table_p
        row = tl.load(ptrs, mask=inside, other=-1).to(tl.int64)
    inside = inside & (row >= 0) & (row < sizes.cache_rows)
    return row, column.to(tl.int64), inside


@triton.jit
def rows_at(ptr, b, n, h, strides, VEC: tl.constexpr):
    """Returns pointers (R, 1) to feature 0 of rows, in 64 bits."""
    return ptr + (b * (strides.b * VEC) + n * (strides.n * VEC) + h * (strides.h * VEC))[:, None]


@triton.jit
def rotate_pairs(
    one, two, place, theta, theta_stride, dtype: tl.constexpr, spec: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Returns pairs of features (R, F) rotated at places (R,)."""
    f = tl.arange(0, BLOCK_F)
    step = phase_step(tl.load(theta + f * theta_stride, mask=f < spec.E, other=0.0)[None, :])
    HALF: tl.constexpr = dtype.primitive_bitwidth == 16
    cosine, sine = cos_sin(place[:, None], step, HALF)
    return rotate(one.to(tl.float32), two.to(tl.float32), cosine, sine, spec.KIND)


@triton.jit
def feature_pointers(rows, stride, FEATURES: tl.constexpr, UNIT: tl.constexpr):
    """Returns pointers (R, features) to rows, and which features there are."""
    BLOCK: tl.constexpr = triton.next_power_of_2(FEATURES)
    f = tl.arange(0, BLOCK)
    return rows + (f if UNIT else f * stride)[None, :], (f < FEATURES)[None, :]


class Sequences(NamedTuple):
    """Tensors that say where tokens go."""

    cu_seqlens: tl.tensor | None
    seqused_k: tl.tensor
    block_table: tl.tensor | None


@triton.jit
def find_cache_rows(cache, rows, h, sequences, sizes, strides, cache_strides, VEC: tl.constexpr):
    """Returns pointers (R, 1) to the cache's rows for the heads ``h`` of a tile, a mask (R,) and `TokenPlaces`."""
    places = find_places(rows, sequences.cu_seqlens, sequences.seqused_k, sizes, strides)
    row, column, inside = find_slots(places, sequences.block_table, sizes, strides)
    return rows_at(cache, row, column, h, cache_strides, VEC), inside, places


@triton.jit
def copy_rows(
    x, cache, rows, h, there, sequences, sizes, strides, x_strides, cache_strides,
    FEATURES: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the heads ``h`` that are ``there`` to the cache."""
    VEC: tl.constexpr = spec.VEC
    UNIT: tl.constexpr = spec.UNIT
    x_rows = rows_at(x, rows.b, rows.n, h, x_strides, VEC)
    ptrs, features = feature_pointers(x_rows, x_strides.f, FEATURES, UNIT)
    tile = tl.load(ptrs, mask=there[:, None] & features, other=0.0)
    to, inside, _ = find_cache_rows(cache, rows, h, sequences, sizes, strides, cache_strides, VEC)
    ptrs, features = feature_pointers(to, cache_strides.f, FEATURES, UNIT)
    tl.store(ptrs, tile, mask=(inside & there)[:, None] & features)


@triton.jit
def append_kernel(
    k, v, q, k_cache, v_cache, theta, cu_seqlens, seqused_k, block_table, out, sizes: AppendSizes,
    strides: AppendStrides, config: tl.constexpr,
):  # fmt: skip
    """Writes one tile of rows a program: of keys or values to the cache, of queries to ``out``.

    Rows of queries that are of no sequence become zero. A tile is loaded while its places are looked up.
    """
    spec: tl.constexpr = config.spec
    VEC: tl.constexpr = spec.VEC
    BLOCK_F: tl.constexpr = config.BLOCK_F
    H: tl.constexpr = config.HEADS
    H_BLOCKS: tl.constexpr = (H + config.BLOCK_H - 1) // config.BLOCK_H
    Q_BLOCKS: tl.constexpr = (config.Q_HEADS + config.BLOCK_H - 1) // config.BLOCK_H
    JOBS: tl.constexpr = 2 * H_BLOCKS + Q_BLOCKS
    job = tl.program_id(0) % JOBS  # programs of one token are neighbours
    rows = find_rows(tl.program_id(0) // JOBS * config.TOKENS, cu_seqlens, sizes, config)
    within = tl.arange(0, config.TOKENS * config.BLOCK_H) % config.BLOCK_H
    sequences = Sequences(cu_seqlens, seqused_k, block_table)
    if job < H_BLOCKS:
        h = job * config.BLOCK_H + within
        there = rows.exists & (h < H)
        if theta is None:
            D: tl.constexpr = config.D
            copy_rows(k, k_cache, rows, h, there, sequences, sizes, strides, strides.k, strides.k_cache, D, spec)
        else:
            k_rows = rows_at(k, rows.b, rows.n, h, strides.k, VEC)
            one, two = load_pair(k_rows, there, strides.k.f, 0, spec, BLOCK_F)
            to, inside, places = find_cache_rows(k_cache, rows, h, sequences, sizes, strides, strides.k_cache, VEC)
            dtype: tl.constexpr = k_cache.dtype.element_ty
            one, two = rotate_pairs(one, two, places.place, theta, strides.theta, dtype, spec, BLOCK_F)
            store_pair(to, one, two, inside & there, strides.k_cache.f, 0, spec, BLOCK_F)
    elif job < 2 * H_BLOCKS:
        h = (job - H_BLOCKS) * config.BLOCK_H + within
        there = rows.exists & (h < H)
        E: tl.constexpr = config.E
        copy_rows(v, v_cache, rows, h, there, sequences, sizes, strides, strides.v, strides.v_cache, E, spec)
    elif q is not None:
        h = (job - 2 * H_BLOCKS) * config.BLOCK_H + within
        there = rows.exists & (h < config.Q_HEADS)
        q_rows = rows_at(q, rows.b, rows.n, h, strides.q, VEC)
        one, two = load_pair(q_rows, there, strides.q.f, 0, spec, BLOCK_F)
        places = find_places(rows, cu_seqlens, seqused_k, sizes, strides)
        used = places.used[:, None]  # others may be NaN
        one, two = tl.where(used, one, 0.0), tl.where(used, two, 0.0)
        dtype: tl.constexpr = out.dtype.element_ty
        one, two = rotate_pairs(one, two, places.place, theta, strides.theta, dtype, spec, BLOCK_F)
        to = rows_at(out, rows.b, rows.n, h, strides.out, VEC)
        store_pair(to, one, two, there, strides.out.f, 0, spec, BLOCK_F)
