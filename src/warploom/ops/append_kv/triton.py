"""The kernel: rows of keys, values and queries, one tile a program.

A tile has R = TOKENS · BLOCK_H rows of one of the three. A row is a (token, head), heads fastest, so that
neighbouring rows are neighbours in memory. A token's place in its sequence follows from the number of keys that the
sequence has with all new tokens, and from the number of those behind the token.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin, phase_step
from warploom.ops.lrpe.triton.angles import RowSpec
from warploom.ops.lrpe.triton.forward import rotate
from warploom.ops.lrpe.triton.rows import load_pair, store_pair


class TokenStrides(NamedTuple):
    """Strides of a tensor (B, N, H, F); all but that of features come divided by ``VEC`` of `RowSpec`."""

    b: tl.int64
    n: tl.int64
    h: tl.int64
    f: tl.int64


class AppendStrides(NamedTuple):
    """Strides of a call's tensors."""

    k: TokenStrides
    v: TokenStrides
    q: TokenStrides
    out: TokenStrides
    k_cache: TokenStrides
    v_cache: TokenStrides
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


class TokenPlaces(NamedTuple):
    """Rows (R,) of a tile: where their tokens come from, where they go, and which of them there are."""

    b: tl.tensor  # batch entry
    n: tl.tensor  # token of it
    place: tl.tensor  # in the sequence
    exists: tl.tensor  # the row is one of the tensor's
    used: tl.tensor  # and one of a sequence's


@triton.jit
def find_places(first, cu_seqlens, seqused_k, sizes, strides, config: tl.constexpr):
    """Returns the places of the tokens from ``first`` on, and the sequence of each row."""
    token = first + tl.arange(0, config.TOKENS * config.BLOCK_H) // config.BLOCK_H
    exists = (token < sizes.all_tokens) & (token >= 0)
    token = tl.where(exists, token, 0)
    if cu_seqlens is None:
        sequence = token // sizes.tokens
        b, n = sequence, token - sequence * sizes.tokens
        used = exists
        behind = sizes.tokens - n
    else:
        b, n = token * 0, token
        sequence = sequence_of(token, cu_seqlens, strides.cu_seqlens, sizes.sequences)
        used = exists & (sequence < sizes.sequences)
        end = tl.load(cu_seqlens + (sequence + 1).to(tl.int64) * strides.cu_seqlens, mask=used, other=0)
        used = used & (token < end)
        behind = end.to(tl.int32) - token
    sequence = sequence.to(tl.int64)
    keys = tl.load(seqused_k + sequence * strides.seqused_k, mask=used, other=0).to(tl.int32)
    return TokenPlaces(b.to(tl.int64), n.to(tl.int64), keys - behind, exists, used), sequence


@triton.jit
def find_slots(places, sequence, block_table, sizes, strides):
    """Returns row and column (int64) of the cache for each row of a tile, and which of them are in it."""
    place = places.place
    inside = places.used & (place >= 0)
    if block_table is None:
        row, column = sequence, place
        inside = inside & (place < sizes.cache_columns)
    else:
        page = tl.where(inside, place, 0) // sizes.cache_columns
        column = place - page * sizes.cache_columns
        inside = inside & (page < sizes.pages)
        ptrs = block_table + sequence * strides.table_s + page.to(tl.int64) * strides.table_p
        row = tl.load(ptrs, mask=inside, other=-1).to(tl.int64)
    inside = inside & (row >= 0) & (row < sizes.cache_rows)
    return row, column.to(tl.int64), inside


@triton.jit
def rows_at(ptr, b, n, h, strides, VEC: tl.constexpr):
    """Returns pointers (R, 1) to feature 0 of rows, in 64 bits."""
    return ptr + (b * (strides.b * VEC) + n * (strides.n * VEC) + h * (strides.h * VEC))[:, None]


@triton.jit
def copy_rotated(
    x_rows, out_rows, x_mask, out_mask, place, theta, x_stride, out_stride, theta_stride, spec: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Copies rows of queries or keys, rotated at their places; zeros where ``x_mask`` is false."""
    one, two = load_pair(x_rows, x_mask, x_stride, 0, spec, BLOCK_F)
    f = tl.arange(0, BLOCK_F)
    steps = tl.load(theta + f * theta_stride, mask=f < spec.E, other=0.0)[None, :]
    whole, rest, unit = phase_step(steps)
    HALF: tl.constexpr = out_rows.dtype.element_ty.primitive_bitwidth == 16
    cosine, sine = cos_sin(place[:, None], whole, rest, unit, HALF)
    one, two = rotate(one.to(tl.float32), two.to(tl.float32), cosine, sine, spec.KIND)
    store_pair(out_rows, one, two, out_mask, out_stride, 0, spec, BLOCK_F)


@triton.jit
def copy_features(x_rows, out_rows, mask, x_stride, out_stride, FEATURES: tl.constexpr, UNIT: tl.constexpr):
    """Copies rows of keys or values as they are."""
    BLOCK: tl.constexpr = triton.next_power_of_2(FEATURES)
    f = tl.arange(0, BLOCK)
    inside = mask[:, None] & (f < FEATURES)[None, :]
    x = tl.load(x_rows + (f if UNIT else f * x_stride)[None, :], mask=inside, other=0.0)
    tl.store(out_rows + (f if UNIT else f * out_stride)[None, :], x, mask=inside)


@triton.jit
def append_kernel(
    k, v, q, k_cache, v_cache, theta, cu_seqlens, seqused_k, block_table, out, sizes: AppendSizes,
    strides: AppendStrides, config: tl.constexpr,
):  # fmt: skip
    """Writes one tile of rows a program: of keys or values to the cache, of queries to ``out``.

    Rows of queries that are of no sequence become zero.
    """
    spec: tl.constexpr = config.spec
    VEC: tl.constexpr = spec.VEC
    UNIT: tl.constexpr = spec.UNIT
    BLOCK_F: tl.constexpr = config.BLOCK_F
    H: tl.constexpr = config.HEADS
    H_BLOCKS: tl.constexpr = (H + config.BLOCK_H - 1) // config.BLOCK_H
    Q_BLOCKS: tl.constexpr = (config.Q_HEADS + config.BLOCK_H - 1) // config.BLOCK_H
    JOBS: tl.constexpr = 2 * H_BLOCKS + Q_BLOCKS
    job = tl.program_id(0) % JOBS  # programs of one token are neighbours
    first = tl.program_id(0) // JOBS * config.TOKENS
    rows, sequence = find_places(first, cu_seqlens, seqused_k, sizes, strides, config)
    within = tl.arange(0, config.TOKENS * config.BLOCK_H) % config.BLOCK_H
    if job < 2 * H_BLOCKS:
        h = job % H_BLOCKS * config.BLOCK_H + within
        row, column, inside = find_slots(rows, sequence, block_table, sizes, strides)
        inside = inside & (h < H)
        if job >= H_BLOCKS:
            v_rows = rows_at(v, rows.b, rows.n, h, strides.v, VEC)
            out_rows = rows_at(v_cache, row, column, h, strides.v_cache, VEC)
            FEATURES: tl.constexpr = config.E
            copy_features(v_rows, out_rows, inside, strides.v.f, strides.v_cache.f, FEATURES, UNIT)
        else:
            k_rows = rows_at(k, rows.b, rows.n, h, strides.k, VEC)
            out_rows = rows_at(k_cache, row, column, h, strides.k_cache, VEC)
            if theta is None:
                FEATURES: tl.constexpr = config.D
                copy_features(k_rows, out_rows, inside, strides.k.f, strides.k_cache.f, FEATURES, UNIT)
            else:
                copy_rotated(
                    k_rows, out_rows, inside, inside, rows.place, theta, strides.k.f, strides.k_cache.f,
                    strides.theta, spec, BLOCK_F,
                )  # fmt: skip
    elif q is not None:
        h = (job - 2 * H_BLOCKS) * config.BLOCK_H + within
        q_rows = rows_at(q, rows.b, rows.n, h, strides.q, VEC)
        out_rows = rows_at(out, rows.b, rows.n, h, strides.out, VEC)
        given = h < config.Q_HEADS
        copy_rotated(
            q_rows, out_rows, rows.used & given, rows.exists & given, rows.place, theta, strides.q.f, strides.out.f,
            strides.theta, spec, BLOCK_F,
        )  # fmt: skip
