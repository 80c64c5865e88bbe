"""The kernel that goes through a chunk with its state: outputs, and the gradients of queries, keys and values.

All four are one sum over pairs of tokens, of rows ``a`` with rows ``b``, times rows ``c``:

    result_t = Σ_s decay(t, s) ⟨a_t, b_s⟩ c_s

with s ≤ t for outputs (a, b, c = φ(q), φ(k), v) and gradients of φ(q) (do, v, φ(k)), and s ≥ t for those of φ(k)
(v, do, φ(q)) and v (φ(k), φ(q), do). Within a tile pairs are taken; all others are in a state ``Σ_s b_s c_sᵀ``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import load_plain, locate, row_pointers, store_plain
from warploom.device.decays import exp
from warploom.device.rows import StateStrides, Strides, load_input
from warploom.ops.linear_attention.triton import tiles


class ProductStrides(NamedTuple):
    """Strides of the rows and states of a product."""

    a: Strides
    b: Strides
    c: Strides
    x: Strides
    out: Strides
    initial: StateStrides
    final: StateStrides


class ProductConfig(NamedTuple):
    """Compile-time choices that only products have."""

    DECODED: bool  # whether results are gradients of what was encoded
    REVERSE: bool  # whether tiles are taken from the last to the first
    LOADED: bool  # whether each tile loads the state again: see `configs.is_held`


@triton.jit
def product_kernel(
    a, b, c, x, out, initial, final, partial, theta, offsets, cu_seqlens, decay, offset: tl.int32,
    scales: tiles.StateScales, sizes: tiles.LinearSizes, strides: ProductStrides, spec: tl.constexpr, config: tl.constexpr,
    product: tl.constexpr,
):  # fmt: skip
    """Computes a block of columns of ``out`` (B, N, H, features) for a chunk of a head.

    ``a`` and ``b`` are encoded and ``c`` is not, or the other way round if ``DECODED``: then ``out`` is the gradient
    of ``x``, which was encoded as ``c`` is. ``initial`` and ``final`` are states (slots, H, F, E) before and behind all
    tiles; without causality ``initial`` (S, H, F, E) is that of all tokens. ``partial`` (slots, H, F) float64 are
    sums for theta's gradient.
    """
    DECODED: tl.constexpr = product.DECODED
    REVERSE: tl.constexpr = product.REVERSE
    THETA: tl.constexpr = partial is not None
    HALF: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    RESULTS: tl.constexpr = 2 if DECODED and config.KIND != "none" else 1
    READS_X: tl.constexpr = DECODED and (THETA or config.ACTIVATION != "none")
    place = locate(offsets, cu_seqlens, offset, sizes)
    first_e = 0 if DECODED else place.column * config.BLOCK_E
    first_f = place.column * config.BLOCK_F if DECODED else 0
    steps = tiles.load_steps(theta, place, first_f, 1 if DECODED else config.PIECES, sizes, spec, config)
    within = tiles.cos_sin_within(steps, config, HALF and not THETA)
    index = place.slot if config.CAUSAL else place.sequence
    if not product.LOADED:
        state = tiles.load_state(
            initial, index, place.h, first_f, first_e, scales.into, strides.initial, spec, config, DECODED
        )
    theta_sum = tl.zeros((config.BLOCK_F,), tl.float64)
    count = tl.cdiv(tl.maximum(place.last - place.first, 0), config.BLOCK_T)
    for tile in range(count):
        first = place.first + (count - 1 - tile if REVERSE else tile) * config.BLOCK_T
        n = first + tl.arange(0, config.BLOCK_T)
        mask = n < place.last
        a_rows = row_pointers(a, n, place, strides.a, spec.VEC)
        out_rows = row_pointers(out, n, place, strides.out, spec.VEC)
        if DECODED:
            rows = load_plain(a_rows, mask, strides.a, 0, config.PIECES, config.E, config.BLOCK_E, spec.UNIT)
        else:
            rows = tiles.load_pieces(a_rows, mask, strides.a, 0, config.PIECES, spec, config)
        if config.CAUSAL:
            b_rows = row_pointers(b, n, place, strides.b, spec.VEC)
            c_rows = row_pointers(c, n, place, strides.c, spec.VEC)
            if DECODED:
                others = load_plain(b_rows, mask, strides.b, 0, config.PIECES, config.E, config.BLOCK_E, spec.UNIT)
                values = tiles.load_pieces(c_rows, mask, strides.c, first_f, 1, spec, config)
            else:
                others = tiles.load_pieces(b_rows, mask, strides.b, 0, config.PIECES, spec, config)
                values = load_plain(c_rows, mask, strides.c, first_e, 1, config.E, config.BLOCK_E, spec.UNIT)
        original = (rows[0], rows[0])
        if READS_X:
            x_rows = row_pointers(x, n, place, strides.x, spec.VEC)
            original = load_input(x_rows, mask, strides.x.f, first_f, spec, config.BLOCK_F)
        turns = tiles.cos_sin_from(first, place, steps, within, HALF and not THETA)
        if not DECODED:
            rows = tiles.encode(rows, turns, 0, spec, config)
        if product.LOADED:
            results = tiles.apply_loaded_state(
                rows, initial, index, place.h, first_f, first_e, scales.into, strides.initial, spec, config, DECODED,
                RESULTS,
            )  # fmt: skip
        else:
            results = tiles.apply_state(rows, state, RESULTS)
        if config.CAUSAL:
            if DECODED:
                values = tiles.encode(values, turns, first_f, spec, config)
            else:
                others = tiles.encode(others, turns, 0, spec, config)
            decays = tiles.sum_tile_decays(decay, first, place.last, place, sizes, config)
            before = exp(decays.up_to, HALF)
            behind = exp(decays.behind, HALF)
            pairs = tiles.decay_scores(tiles.score_pairs(rows, others), decays.parts, config, REVERSE, HALF)
            whole = ()
            for p in tl.static_range(RESULTS):
                one = results[p]
                if config.DECAY != "none":
                    one *= (behind if REVERSE else before)[:, None]
                whole = whole + (tiles.multiply_rounding_left(pairs, values[p], one) * scales.scale,)
            weights = before if REVERSE else behind
            state = tiles.update_state(state, others, values, weights, decays.total, config, HALF)
        else:
            whole = ()
            for p in tl.static_range(RESULTS):
                whole = whole + (results[p] * scales.scale,)
        if DECODED:
            dphi = tiles.store_input_gradient(
                out_rows, whole, original, turns, mask, strides.out, first_f, spec, config, THETA
            )
            if THETA:
                t = tl.arange(0, config.BLOCK_T).to(tl.float32)
                at_first = first.to(tl.float64) + place.position.to(tl.float64)
                at_first *= tl.sum(dphi, axis=0).to(tl.float64)
                theta_sum += at_first + tl.sum(dphi * t[:, None], axis=0).to(tl.float64)
        else:
            store_plain(out_rows, whole[0], mask, strides.out, first_e, config.E, config.BLOCK_E, spec.UNIT)
    if cu_seqlens is not None:
        if DECODED:
            BOTH: tl.constexpr = 1 if spec.KIND == "cosine" else 2  # features of an angle
            tiles.zero_rows_past_end(
                out, place, sizes, strides.out, first_f * BOTH, spec.F * BOTH, config.BLOCK_F * BOTH, spec, config
            )
        else:
            tiles.zero_rows_past_end(
                out, place, sizes, strides.out, first_e, config.E, config.BLOCK_E, spec, config
            )
    if final is not None:
        tiles.store_state(
            final, state, place.slot, place.h, first_f, first_e, scales.out_of, strides.final, spec, config, DECODED
        )
    if THETA:
        f = first_f + tl.arange(0, config.BLOCK_F)
        tl.store(partial + (place.slot * sizes.heads + place.h) * spec.F + f, theta_sum, mask=f < spec.F)
