"""The kernel of a step of decoding: few tokens, and a state that is read and written once."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import load_plain, locate, row_pointers, store_plain
from warploom.device.decays import exp
from warploom.device.phase import cos_sin, wrapping_add
from warploom.device.rows import StateStrides, Strides
from warploom.ops.linear_attention.triton import tiles


class StepStrides(NamedTuple):
    """Strides of the kernel's tensors."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    initial: StateStrides
    final: StateStrides


@triton.jit
def step_kernel(
    q, k, v, out, initial, final, theta, offsets, cu_seqlens, decay, offset: tl.int32, scale: tl.float32,
    sizes: tiles.LinearSizes, strides: StepStrides, spec: tl.constexpr, config: tl.constexpr,
):  # fmt: skip
    """Computes a block of columns of outputs and state of a head, token by token: one product-sum a number of the state.

    ``initial`` and ``final`` (S, H, F, E) are the states before the first token and behind the last.
    """
    HALF: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    place = locate(offsets, cu_seqlens, offset, sizes)
    first_e = place.column * config.BLOCK_E
    state = tiles.load_state(
        initial, place.sequence, place.h, 0, first_e, 1.0, strides.initial, spec, config, False
    )
    steps = tiles.load_steps(theta, place, 0, 1, sizes, spec, config)
    for t in range(place.first, place.last):
        n = t + tl.arange(0, 1)
        mask = n < place.last
        turns = ()
        for i in tl.static_range(len(steps)):
            turns = turns + (cos_sin(wrapping_add(n, place.position)[:, None], tiles.step_of(steps, i), HALF),)
        q_rows = row_pointers(q, n, place, strides.q, spec.VEC)
        k_rows = row_pointers(k, n, place, strides.k, spec.VEC)
        v_rows = row_pointers(v, n, place, strides.v, spec.VEC)
        out_rows = row_pointers(out, n, place, strides.out, spec.VEC)
        queries = tiles.encode(
            tiles.load_pieces(q_rows, mask, strides.q, 0, 1, spec, config), turns, 0, spec, config
        )
        keys = tiles.encode(tiles.load_pieces(k_rows, mask, strides.k, 0, 1, spec, config), turns, 0, spec, config)
        values = load_plain(v_rows, mask, strides.v, first_e, 1, config.E, config.BLOCK_E, spec.UNIT)
        total = tiles.sum_tile_decays(decay, t, place.last, place, sizes, config).total
        result = tl.zeros((config.BLOCK_E,), tl.float32)
        after = ()
        for p in tl.static_range(len(state)):
            one = state[p]
            if config.DECAY != "none":
                one *= exp(total, False)
            one += tl.trans(keys[p]).to(tl.float32) * values[0].to(tl.float32)
            result += tl.sum(tl.trans(queries[p]).to(tl.float32) * one, axis=0)
            after = after + (one,)
        state = after
        result = (result * scale)[None, :]
        store_plain(out_rows, result, mask, strides.out, first_e, config.E, config.BLOCK_E, spec.UNIT)
    if cu_seqlens is not None:
        tiles.zero_rows_past_end(out, place, sizes, strides.out, first_e, config.E, config.BLOCK_E, spec, config)
    if final is not None:
        tiles.store_state(
            final, state, place.sequence, place.h, 0, first_e, 1.0, strides.final, spec, config, False
        )
