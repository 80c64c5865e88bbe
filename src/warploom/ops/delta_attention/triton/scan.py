"""Kernels that carry a state from chunk to chunk of a sequence, and its gradient back.

Both hold some columns of the state, and hold them transposed, (E, D): a product's rows are then few, and what one
product gives is the next one's left factor as it lies in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.packed import sequence_bounds
from warploom.device.product import round_to
from warploom.device.rows import StateStrides, Strides
from warploom.ops.delta_attention.triton import tiles


class ScanStrides(NamedTuple):
    """Strides of rows, and of the states before the first chunk and behind the last."""

    rows: Strides
    first: StateStrides
    last: StateStrides


class Sequence(NamedTuple):
    """The sequence that a program takes."""

    b: tl.tensor  # batch entry
    h: tl.tensor  # head
    number: tl.tensor  # packed sequence, or batch entry
    start: tl.tensor  # its first token
    length: tl.tensor
    owned: tl.tensor  # length, with the rows behind the last sequence
    slot: tl.tensor  # number of its first chunk among all
    column: tl.tensor  # block of columns of the state


@triton.jit
def find_sequence(cu_seqlens, sizes):
    """Returns the sequence of this program."""
    program = tl.program_id(0)
    column = program % sizes.columns
    program = program // sizes.columns
    h = program % sizes.heads
    number = program // sizes.heads
    if cu_seqlens is not None:
        start, length = sequence_bounds(number, cu_seqlens, sizes.cu_stride)
        start = tl.minimum(tl.maximum(start, 0), sizes.tokens)
        length = tl.maximum(tl.minimum(length, sizes.tokens - start), 0)
        owned = tl.where(number == sizes.sequences - 1, sizes.tokens - start, length)
        slot = start // sizes.chunk + number
        b = number * 0
    else:
        b, start, length, owned = number, number * 0, sizes.tokens, sizes.tokens
        slot = number * sizes.chunks
    return Sequence(
        b.to(tl.int64), h.to(tl.int64), number.to(tl.int64), start, length, owned, slot.to(tl.int64), column
    )


@triton.jit
def state_pointers(ptr, place, strides, config: tl.constexpr):
    """Returns pointers (E, D) to the program's columns of a state (S, H, D, E), and which of them there are."""
    e = place.column * config.BLOCK_E + tl.arange(0, config.BLOCK_E)
    f = tl.arange(0, config.BLOCK_D)
    head = ptr + place.number * strides.s + place.h * strides.h
    ptrs = head + (f.to(tl.int64) * strides.f)[None, :] + (e.to(tl.int64) * strides.e)[:, None]
    return ptrs, (f < config.D)[None, :] & (e < config.E)[:, None]


@triton.jit
def load_kept(kept, slot, h, sizes, config: tl.constexpr):
    """Returns the decays of a chunk, (1, D) or (1, 1)."""
    if config.DECAY == "feature":
        found = tl.load(kept + (slot * sizes.heads + h) * config.WIDE_D + tl.arange(0, config.BLOCK_D)[None, :])
    else:
        found = tl.load(kept + (slot * sizes.heads + h))
    return found


@triton.jit
def scan_kernel(
    from_start, until_end, scores, corrected, predicted, kept, initial, out, final, states, updates, cu_seqlens,
    sizes: tiles.DeltaSizes, strides: ScanStrides, config: tl.constexpr,
):  # fmt: skip
    """Carries columns of a state through the chunks of a sequence, and writes outputs (B, N, H, E).

    ``states`` (slots, H, E, D) are those before the chunks, and ``updates`` (slots, H, T, E) the corrected values ``U``,
    where they are asked for.
    """
    dtype: tl.constexpr = from_start.dtype.element_ty
    BLOCK_T: tl.constexpr = config.BLOCK_T
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    place = find_sequence(cu_seqlens, sizes)
    h = place.h
    t = tl.arange(0, BLOCK_T)
    f = tl.arange(0, BLOCK_D)
    e = place.column * BLOCK_E + tl.arange(0, BLOCK_E)
    if initial is None:
        state = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    else:
        ptrs, there = state_pointers(initial, place, strides.first, config)
        state = tl.load(ptrs, mask=there, other=0.0).to(tl.float32)
    for c in range(tl.cdiv(place.owned, BLOCK_T)):
        slot = place.slot + c
        if states is not None:
            to = tiles.work_rows(states, slot, h, sizes, e, f, config.WIDE, config.WIDE_D)
            tl.store(to, round_to(state, states.dtype.element_ty))
        keys = tl.load(tiles.work_rows(predicted, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
        own = tl.load(tiles.work_rows(corrected, slot, h, sizes, t, e, BLOCK_T, config.WIDE))
        # (1) Uᵀ = (T β V)ᵀ − Sᵀ (T β K̃)ᵀ
        before = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
        before = tiles.multiply(state, tl.trans(keys), before, dtype)
        update = tl.trans(own).to(tl.float32) - before
        if updates is not None:
            to = tiles.work_rows(updates, slot, h, sizes, t, e, BLOCK_T, config.WIDE)
            tl.store(to, round_to(tl.trans(update), updates.dtype.element_ty))
        if out is not None:
            # (2) Oᵀ = Sᵀ Q̃ᵀ + Uᵀ Pᵀ
            queries = tl.load(tiles.work_rows(from_start, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
            pairs = tl.load(tiles.work_rows(scores, slot, h, sizes, t, t, BLOCK_T, BLOCK_T))
            result = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
            result = tiles.multiply(state, tl.trans(queries), result, dtype)
            result = tiles.multiply(update, tl.trans(pairs), result, dtype)
            n = c * BLOCK_T + t
            rows = tiles.head_rows(out, n, place, h, strides.rows, config.VEC)
            result = tl.trans(result) * sizes.scale
            tiles.store_features(rows, result, e, n < place.owned, strides.rows.f, config.E, config.UNIT)
        # (3) Sᵀ = Sᵀ decayed + Uᵀ K̂
        keys = tl.load(tiles.work_rows(until_end, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
        if config.DECAY != "none":
            state *= load_kept(kept, slot, h, sizes, config)
        state = tiles.multiply(update, keys, state, dtype)
    if final is not None:
        ptrs, there = state_pointers(final, place, strides.last, config)
        tl.store(ptrs, state, mask=there)


@triton.jit
def reverse_scan_kernel(
    from_start, until_end, scores, predicted, kept, grad, last, first, grad_states, grad_updates, cu_seqlens,
    sizes: tiles.DeltaSizes, strides: ScanStrides, config: tl.constexpr,
):  # fmt: skip
    """Carries columns of the gradient of a state back through the chunks of a sequence, over the scale.

    ``grad_states`` (slots, H, E, D) are those of the states behind the chunks, and ``grad_updates`` (slots, H, T, E)
    those of ``U``. ``last`` is the gradient of the state behind the last chunk, ``first`` of that before the first.
    """
    dtype: tl.constexpr = from_start.dtype.element_ty
    BLOCK_T: tl.constexpr = config.BLOCK_T
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    place = find_sequence(cu_seqlens, sizes)
    h = place.h
    t = tl.arange(0, BLOCK_T)
    f = tl.arange(0, BLOCK_D)
    e = place.column * BLOCK_E + tl.arange(0, BLOCK_E)
    if last is None:
        state = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    else:
        ptrs, there = state_pointers(last, place, strides.last, config)
        state = tl.load(ptrs, mask=there, other=0.0).to(tl.float32) / sizes.scale
    count = tl.cdiv(place.owned, BLOCK_T)
    for i in range(count):
        c = count - 1 - i
        slot = place.slot + c
        to = tiles.work_rows(grad_states, slot, h, sizes, e, f, config.WIDE, config.WIDE_D)
        tl.store(to, round_to(state, grad_states.dtype.element_ty))
        n = c * BLOCK_T + t
        rows = tiles.head_rows(grad, n, place, h, strides.rows, config.VEC)
        given = tl.trans(tiles.load_features(rows, e, n < place.length, strides.rows.f, config.E, config.UNIT))
        # (1) dUᵀ = dOᵀ P + dSᵀ K̂ᵀ
        pairs = tl.load(tiles.work_rows(scores, slot, h, sizes, t, t, BLOCK_T, BLOCK_T))
        keys = tl.load(tiles.work_rows(until_end, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
        update = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
        update = tiles.multiply(given, pairs, update, dtype)
        update = tiles.multiply(state, tl.trans(keys), update, dtype)
        to = tiles.work_rows(grad_updates, slot, h, sizes, t, e, BLOCK_T, config.WIDE)
        tl.store(to, round_to(tl.trans(update), grad_updates.dtype.element_ty))
        # (2) dSᵀ = dSᵀ decayed + dOᵀ Q̃ − dUᵀ T β K̃
        if config.DECAY != "none":
            state *= load_kept(kept, slot, h, sizes, config)
        queries = tl.load(tiles.work_rows(from_start, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
        state = tiles.multiply(given, queries, state, dtype)
        keys = tl.load(tiles.work_rows(predicted, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
        state = tiles.multiply(-update, keys, state, dtype)
    if first is not None:
        ptrs, there = state_pointers(first, place, strides.first, config)
        state *= sizes.scale
        if last is not None:
            if count == 0:  # as it was, without rounding
                last_ptrs, _ = state_pointers(last, place, strides.last, config)
                state = tl.load(last_ptrs, mask=there, other=0.0).to(tl.float32)
        tl.store(ptrs, state.to(first.dtype.element_ty), mask=there)
