"""Packed sequences on Hopper: where each has rows to itself, and copies to there and back.

Rows have numbers as if they were spread: each sequence begins at a unit of `UNIT` rows, and has at least one. The tail,
rows behind the last sequence, follows. ``⌈rows / UNIT⌉ + sequences`` units hold everything, and no length has to be known
on the host. A tile that the tensor memory accelerator copies holds rows of the next sequence as well, which might be
NaN. The forward masks these. For the backward rows are copied to be spread, with zeros behind the last row of a sequence
and in the tail.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.rows import Strides
from warploom.ops.flash_attention.hopper.work import UNIT


@triton.jit
def units_kernel(
    cu_seqlens_q, cu_seqlens_k, units_q, units_k, shifts_q, shifts_k,
    q_stride: tl.int32, k_stride: tl.int32, sequences: tl.int32, count_q: tl.int32, tokens: tl.int32, keys: tl.int32,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Find of each unit of queries, then of keys, where its sequence begins and ends among spread rows.

    ``units`` (units, 4) are first query, end of queries, first key, end of keys; ``shifts`` (units, 2) how far queries,
    and keys, lie behind the packed ones. The tail of queries has no keys, that of keys no queries: these end before the
    first.
    """
    program = tl.program_id(0)
    of_keys = program >= count_q
    unit = tl.where(of_keys, program - count_q, program)
    s = tl.arange(0, BLOCK_S)
    there = s < sequences
    start_q = row_of(tl.load(cu_seqlens_q + s * q_stride, mask=there, other=0), tokens)
    start_k = row_of(tl.load(cu_seqlens_k + s * k_stride, mask=there, other=0), keys)
    length_q = row_of(tl.load(cu_seqlens_q + (s + 1) * q_stride, mask=there, other=0), tokens) - start_q
    length_k = row_of(tl.load(cu_seqlens_k + (s + 1) * k_stride, mask=there, other=0), keys) - start_k
    count_of_q = tl.where(there, tl.maximum((length_q + UNIT - 1) // UNIT, 1), 0)
    count_of_k = tl.where(there, tl.maximum((length_k + UNIT - 1) // UNIT, 1), 0)
    own = tl.where(of_keys, count_of_k, count_of_q)
    ends = tl.cumsum(own, axis=0)
    before = there & (ends <= unit)
    mine = there & (ends > unit) & (ends - own <= unit)
    first_q = UNIT * tl.sum(tl.where(before, count_of_q, 0), axis=0)
    first_k = UNIT * tl.sum(tl.where(before, count_of_k, 0), axis=0)
    end_q = first_q + tl.sum(tl.where(mine, length_q, 0), axis=0)
    end_k = first_k + tl.sum(tl.where(mine, length_k, 0), axis=0)
    shift_q = first_q - tl.sum(tl.where(mine, start_q, 0), axis=0)
    shift_k = first_k - tl.sum(tl.where(mine, start_k, 0), axis=0)
    if tl.sum(own, axis=0) <= unit:  # behind all sequences
        shift_q = first_q - row_of(tl.load(cu_seqlens_q + sequences * q_stride), tokens)
        shift_k = first_k - row_of(tl.load(cu_seqlens_k + sequences * k_stride), keys)
        end_q = tl.where(of_keys, first_q - 1, shift_q + tokens)
        end_k = tl.where(of_keys, shift_k + keys, first_k - 1)
    if of_keys:
        store_unit(units_k + unit * 4, shifts_k + unit * 2, first_q, end_q, first_k, end_k, shift_q, shift_k)
    else:
        store_unit(units_q + unit * 4, shifts_q + unit * 2, first_q, end_q, first_k, end_k, shift_q, shift_k)


@triton.jit
def cache_units_kernel(
    cu_seqlens_q, seqused_k, units, shifts, counts,
    q_stride: tl.int32, sequences: tl.int32, tokens: tl.int32, keys: tl.int32, few: tl.int32,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Find of each unit of queries which sequence it is of, among those of more than ``few`` queries, and where that ends.

    ``units`` (units, 4) are as those of `units_kernel`, with keys from 0 on; ``shifts`` (units, 2) how far queries lie
    behind the packed ones, and the number of the sequence. The tail of queries follows, and has no keys. ``counts``
    (2,) are a counter of zero, and how many units there are.
    """
    unit = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    there = s < sequences
    start = row_of(tl.load(cu_seqlens_q + s * q_stride, mask=there, other=0), tokens)
    length = row_of(tl.load(cu_seqlens_q + (s + 1) * q_stride, mask=there, other=0), tokens) - start
    own = tl.where(there & (length > few), (length + UNIT - 1) // UNIT, 0)
    ends = tl.cumsum(own, axis=0)
    mine = (ends > unit) & (ends - own <= unit)
    first = UNIT * tl.sum(tl.where(mine, ends - own, 0), axis=0)
    shift = first - tl.sum(tl.where(mine, start, 0), axis=0)
    end = first + tl.sum(tl.where(mine, length, 0), axis=0)
    number = tl.sum(tl.where(mine, s, 0), axis=0)
    used = row_of(tl.load(seqused_k + number), keys)
    count = tl.sum(own, axis=0)
    last = row_of(tl.load(cu_seqlens_q + sequences * q_stride), tokens)
    if count <= unit:  # behind all sequences
        first = UNIT * count
        shift = first - last
        end = shift + tokens
        used = -1
    store_unit(units + unit * 4, shifts + unit * 2, first, end, 0, used, shift, number)
    if unit == 0:
        tl.store(counts, 0)
        tl.store(counts + 1, tl.minimum(count + (tokens - last + UNIT - 1) // UNIT, tl.num_programs(0)))


@triton.jit
def row_of(bound, rows):
    """A bound of sequences, which never leaves the rows that there are."""
    return tl.minimum(tl.maximum(bound.to(tl.int32), 0), rows)


@triton.jit
def store_unit(place, shift_place, first_q, end_q, first_k, end_k, shift_q, shift_k):
    """Store what `units_kernel` says of a unit."""
    tl.store(place, first_q)
    tl.store(place + 1, end_q)
    tl.store(place + 2, first_k)
    tl.store(place + 3, end_k)
    tl.store(shift_place, shift_q)
    tl.store(shift_place + 1, shift_k)


@triton.jit
def spread_kernel(
    packed, spread, units, shifts, heads: tl.int32, packed_strides: Strides, spread_strides: Strides,
    KEYS: tl.constexpr, BACK: tl.constexpr, FILL: tl.constexpr, VEC: tl.constexpr, F: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Copy rows (1, N, H, F) of packed sequences to where they are spread, (1, units · UNIT, H, F), or ``BACK``.

    What is behind a sequence, or in the tail, becomes ``FILL``, and zero on the way back. ``KEYS``: rows are those of keys.
    """
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    row = program // heads * BLOCK_R + tl.arange(0, BLOCK_R)
    unit = program // heads * BLOCK_R // UNIT
    there = row < tl.load(units + unit * 4 + (3 if KEYS else 1))
    is_tail = tl.load(units + unit * 4 + (1 if KEYS else 3)) < tl.load(units + unit * 4 + (0 if KEYS else 2))
    given = there & (is_tail == 0)
    n = row - tl.load(shifts + unit * 2 + (1 if KEYS else 0))
    f = tl.arange(0, BLOCK_F)
    features = (f < F)[None, :]
    of_packed = packed + (n.to(tl.int64) * packed_strides.n + head * packed_strides.h)[:, None] * VEC + f[None, :]
    of_spread = spread + (row.to(tl.int64) * spread_strides.n + head * spread_strides.h)[:, None] * VEC + f[None, :]
    if BACK:
        x = tl.load(of_spread, mask=given[:, None] & features, other=0.0)
        tl.store(of_packed, x, mask=there[:, None] & features)
    else:
        x = tl.load(of_packed, mask=given[:, None] & features, other=FILL)
        tl.store(of_spread, x, mask=features)
