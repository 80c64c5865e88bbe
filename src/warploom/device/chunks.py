"""Chunks of sequences: where a program stands that takes one of them, and its rows."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.packed import sequence_bounds, sequence_of_tile
from warploom.device.product import round_to


class ChunkPlace(NamedTuple):
    """The tile that a program takes."""

    b: tl.tensor  # batch entry
    h: tl.tensor  # head
    slot: tl.tensor  # number of the chunk among all
    sequence: tl.tensor  # packed sequence, or batch entry
    start: tl.tensor  # token at which the sequence begins
    first: tl.tensor  # the chunk's first token within the sequence
    last: tl.tensor  # one past its last token
    position: tl.tensor  # of the sequence's first token: int64 where a tensor gives it
    column: tl.tensor  # block of features of the result


@triton.jit
def locate(offsets, cu_seqlens, offset, sizes):
    """Returns this program's place. Blocks of columns, which read the same rows, lie next to each other, then heads."""
    program = tl.program_id(0)
    column = program % sizes.columns
    program = program // sizes.columns
    h = program % sizes.heads
    slot = program // sizes.heads
    if cu_seqlens is not None:
        sequence, c = sequence_of_tile(slot, cu_seqlens, sizes.cu_stride, sizes.sequences, sizes.chunk)
        start, length = sequence_bounds(sequence, cu_seqlens, sizes.cu_stride)
        start = tl.minimum(tl.maximum(start, 0), sizes.tokens)
        length = tl.minimum(length, sizes.tokens - start)
        b = slot * 0
    else:
        b = slot // sizes.chunks
        c = slot - b * sizes.chunks
        sequence, start, length = b, slot * 0, sizes.tokens
    if offsets is not None:
        offset = tl.load(offsets + b.to(tl.int64) * sizes.offsets_b).to(tl.int64)
    first = c * sizes.chunk
    last = tl.minimum(length, first + sizes.chunk)
    return ChunkPlace(b.to(tl.int64), h.to(tl.int64), slot.to(tl.int64), sequence.to(tl.int64), start, first, last, offset,
                 column)  # fmt: skip


@triton.jit
def row_pointers(ptr, n, place, strides, VEC: tl.constexpr):
    """Returns pointers (T, 1) to feature 0 of the tokens ``n`` of the place's sequence, in 64 bits."""
    head = ptr + (place.b * (strides.b * VEC) + place.h * (strides.h * VEC))
    return head + ((place.start + n).to(tl.int64) * (strides.n * VEC))[:, None]


@triton.jit
def load_plain(
    rows, mask, strides, first, PIECES: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Returns the features from ``first`` on, in tiles (T, BLOCK)."""
    found = ()
    for i in tl.static_range(PIECES):
        f = first + i * BLOCK + tl.arange(0, BLOCK)
        ptrs = rows + (f if UNIT else f * strides.f)[None, :]
        found = found + (tl.load(ptrs, mask=mask[:, None] & (f < FEATURES)[None, :], other=0.0),)
    return found


@triton.jit
def store_plain(rows, x, mask, strides, first, FEATURES: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Stores what `load_plain` loads, of one tile."""
    f = first + tl.arange(0, BLOCK)
    ptrs = rows + (f if UNIT else f * strides.f)[None, :]
    tl.store(ptrs, round_to(x, rows.dtype.element_ty), mask=mask[:, None] & (f < FEATURES)[None, :])
