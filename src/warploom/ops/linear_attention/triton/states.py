"""Kernels that make the states of chunks: every chunk's own sum, and the scan that hands states over.

In the forward a chunk's sum is ``Σ_j exp(total − a_j) φ(k_j) v_jᵀ`` and the scan makes of it the state before the chunk.
``REVERSE``, it is ``Σ_i exp(a_i) φ(q_i) do_iᵀ`` and the scan makes of it the gradient of the state behind the chunk,
over the scale. ``a`` are sums of logarithms of decays from the chunk's first token on.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import exponential_float32
from warploom.device.chunks import load_plain, locate, row_pointers
from warploom.device.decays import exp
from warploom.device.rows import StateStrides, Strides
from warploom.ops.linear_attention.triton import tiles


class SumsStrides(NamedTuple):
    """Strides of the kernel's tensors."""

    b: Strides
    c: Strides
    states: StateStrides


@triton.jit
def sums_kernel(
    b, c, states, totals, theta, offsets, cu_seqlens, decay, offset: tl.int32, sizes: tiles.LinearSizes, strides: SumsStrides, spec: tl.constexpr, config: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Computes the sum of a chunk, a block of its columns: from b (B, N, H, D) and c (B, N, H, E) to states (slots, H, F, E).

    ``totals`` (slots, H) are the sums of the chunks' logarithms of decays.
    """
    HALF: tl.constexpr = b.dtype.element_ty.primitive_bitwidth == 16
    place = locate(offsets, cu_seqlens, offset, sizes)
    first_e = place.column * config.BLOCK_E
    steps = tiles.load_steps(theta, place, 0, config.PIECES, sizes, spec, config)
    within = tiles.cos_sin_within(steps, config, HALF)
    state = tiles.load_state(None, 0, 0, 0, first_e, 1.0, strides.states, spec, config, False)
    chunk_total = 0.0
    count = tl.cdiv(tl.maximum(place.last - place.first, 0), config.BLOCK_T)
    for tile in range(count):
        first = place.first + (count - 1 - tile if REVERSE else tile) * config.BLOCK_T
        n = first + tl.arange(0, config.BLOCK_T)
        mask = n < place.last
        b_rows = row_pointers(b, n, place, strides.b, spec.VEC)
        c_rows = row_pointers(c, n, place, strides.c, spec.VEC)
        x = tiles.load_pieces(b_rows, mask, strides.b, 0, config.PIECES, spec, config)
        values = load_plain(c_rows, mask, strides.c, first_e, 1, config.E, config.BLOCK_E, spec.UNIT)
        encoded = tiles.encode(x, tiles.cos_sin_from(first, place, steps, within, HALF), 0, spec, config)
        decays = tiles.sum_tile_decays(decay, first, place.last, place, sizes, config)
        weights = exp(decays.up_to if REVERSE else decays.behind, HALF)
        state = tiles.update_state(state, encoded, values, weights, decays.total, config, HALF)
        chunk_total += decays.total
    tiles.store_state(states, state, place.slot, place.h, 0, first_e, 1.0, strides.states, spec, config, False)
    if totals is not None and place.column == 0:
        tl.store(totals + place.slot * sizes.heads + place.h, chunk_total)


@triton.jit
def scan_kernel(
    states, totals, initial, final, cu_seqlens, sizes: tiles.LinearSizes, initial_strides: StateStrides,
    final_strides: StateStrides, into: tl.float32, out_of: tl.float32, F: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Hands states (slots, H, F, E) over from chunk to chunk of a sequence, in place: a block of one head's numbers.

    ``initial`` and ``final`` (S, H, F, E) are the state before the first chunk and behind the last, or the other way
    round if ``REVERSE``; one is multiplied by ``into``, the other by ``out_of``.
    """
    program = tl.program_id(0)
    block = program % sizes.columns
    program = program // sizes.columns
    h = (program % sizes.heads).to(tl.int64)
    sequence = program // sizes.heads
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + sequence * sizes.cu_stride).to(tl.int32)
        end = tl.load(cu_seqlens + (sequence + 1) * sizes.cu_stride).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), sizes.tokens)
        end = tl.minimum(end, sizes.tokens)
        first = start // sizes.chunk + sequence
        chunks = tl.cdiv(end - start, sizes.chunk)
    else:
        first = sequence * sizes.chunks
        chunks = sizes.chunks
    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < F * E
    f = (i // E).to(tl.int64)
    e = (i % E).to(tl.int64)
    sequence = sequence.to(tl.int64)
    carried = tl.zeros((BLOCK,), tl.float32)
    if initial is not None:
        before = initial + sequence * initial_strides.s + h * initial_strides.h
        before += f * initial_strides.f + e * initial_strides.e
        carried = tl.load(before, mask=mask, other=0.0).to(tl.float32) * into
    for start in range(0, chunks, AHEAD):
        # All loads come before the stores: the compiler does not move a load across a store, so they would wait for it.
        found = ()
        for j in tl.static_range(AHEAD):
            c = start + j
            there = c < chunks
            slot = (first + (chunks - 1 - c if REVERSE else c)).to(tl.int64) * sizes.heads + h
            ptrs = states + slot * (F * E) + i
            own = tl.load(ptrs, mask=mask & there, other=0.0)
            shrink = 1.0
            if totals is not None:
                shrink = exponential_float32(tl.load(totals + slot, mask=there, other=0.0))
            found = found + ((ptrs, mask & there, own, shrink),)
        for j in tl.static_range(AHEAD):
            ptrs, there, own, shrink = found[j]
            tl.store(ptrs, carried, mask=there)
            if totals is not None:
                carried *= shrink
            carried += own
    if final is not None:
        behind = final + sequence * final_strides.s + h * final_strides.h
        behind += f * final_strides.f + e * final_strides.e
        tl.store(behind, (carried * out_of).to(final.dtype.element_ty), mask=mask)
