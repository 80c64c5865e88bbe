"""The kernel of the gradient of decays, from the states of chunks that are no longer than a tile.

With a pair's share ``w_ij = scale · decay(i, j) ⟨φ(q_i), φ(k_j)⟩ ⟨do_i, v_j⟩``, the gradient of the logarithm of the
decay at ``t`` is the sum over all pairs that it stands between, ``j < t ≤ i``. Of a pair, both tokens may be in the
chunk, or one, or none: then the other side is in the state before the chunk, or in the gradient of the state behind it.
Nothing is subtracted from a sum: what is far larger than the rest of it would leave its rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import load_plain, locate, row_pointers
from warploom.device.decays import exp
from warploom.device.product import dot
from warploom.device.rows import StateStrides, Strides
from warploom.ops.linear_attention.triton import tiles


class DecayStrides(NamedTuple):
    """Strides of the kernel's tensors."""

    q: Strides
    k: Strides
    v: Strides
    grad: Strides
    states: StateStrides


@triton.jit
def decay_kernel(
    q, k, v, grad, states, grad_states, out, theta, offsets, cu_seqlens, decay, offset: tl.int32, scale: tl.float32,
    sizes: tiles.LinearSizes, strides: DecayStrides, spec: tl.constexpr, config: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of the decays of a chunk: of every token to out (B, N, H), or ``BY_HEAD`` their sum to (slots, H).

    ``states`` (slots, H, F, E) are those before the chunks, and ``grad_states`` the gradients of those behind them,
    over the scale.
    """
    HALF: tl.constexpr = q.dtype.element_ty.primitive_bitwidth == 16
    place = locate(offsets, cu_seqlens, offset, sizes)
    steps = tiles.load_steps(theta, place, 0, config.PIECES, sizes, spec, config)
    t = tl.arange(0, config.BLOCK_T)
    n = place.first + t
    mask = n < place.last
    q_rows = row_pointers(q, n, place, strides.q, spec.VEC)
    k_rows = row_pointers(k, n, place, strides.k, spec.VEC)
    v_rows = row_pointers(v, n, place, strides.v, spec.VEC)
    grad_rows = row_pointers(grad, n, place, strides.grad, spec.VEC)
    turns = tiles.cos_sin_from(place.first, place, steps, tiles.cos_sin_within(steps, config, HALF), HALF)
    queries = tiles.encode(
        tiles.load_pieces(q_rows, mask, strides.q, 0, config.PIECES, spec, config), turns, 0, spec, config
    )
    keys = tiles.encode(
        tiles.load_pieces(k_rows, mask, strides.k, 0, config.PIECES, spec, config), turns, 0, spec, config
    )
    decays = tiles.sum_tile_decays(decay, place.first, place.last, place, sizes, config)
    of_values = tl.zeros((config.BLOCK_T, config.BLOCK_T), tl.float32)
    of_queries = tl.zeros((config.BLOCK_T,), tl.float32)
    of_keys = tl.zeros((config.BLOCK_T,), tl.float32)
    across = 0.0
    for first_e in range(0, config.E, config.BLOCK_E):
        values = load_plain(v_rows, mask, strides.v, first_e, 1, config.E, config.BLOCK_E, spec.UNIT)
        grads = load_plain(grad_rows, mask, strides.grad, first_e, 1, config.E, config.BLOCK_E, spec.UNIT)
        before = tiles.load_state(states, place.slot, place.h, 0, first_e, 1.0, strides.states, spec, config, False)
        behind = tiles.load_state(
            grad_states, place.slot, place.h, 0, first_e, 1.0, strides.states, spec, config, False
        )
        of_values = dot(grads[0], tl.trans(values[0]), of_values)
        of_queries += tl.sum(tiles.apply_state(queries, before, 1)[0] * grads[0].to(tl.float32), axis=1)
        of_keys += tl.sum(tiles.apply_state(keys, behind, 1)[0] * values[0].to(tl.float32), axis=1)
        for p in tl.static_range(len(before)):
            across += tl.sum(tl.sum(before[p] * behind[p], axis=1), axis=0)
    pairs = tiles.decay_scores(tiles.score_pairs(queries, keys), decays.parts, config, False, HALF) * of_values
    of_queries *= exp(decays.up_to, HALF)
    of_keys *= exp(decays.behind, HALF)
    up_to = tl.cumsum(pairs, axis=1)  # (i, t): the pairs of i with tokens up to t
    spanning = tl.sum(tl.where(t[:, None] > t[None, :], up_to, 0.0), axis=0) + tl.cumsum(of_keys, axis=0)
    until_here = tl.sum(
        tl.where(t[:, None] + 1 == t[None, :], spanning[:, None], 0.0), axis=0
    )  # of the token before
    from_here = tl.sum(tl.where(t[:, None] >= t[None, :], of_queries[:, None], 0.0), axis=0)
    result = (until_here + from_here + across * exp(decays.total, HALF)) * scale
    if BY_HEAD:
        tl.store(out + place.slot * sizes.heads + place.h, tl.sum(tl.where(mask, result, 0.0), axis=0))
    else:
        if cu_seqlens is not None:
            result = tl.where(mask, result, 0.0)
            start, end = tiles.find_tail(place, sizes)
            mask = mask | ((n >= start) & (n < end))
        row = place.b * sizes.tokens + (place.start + n)
        tl.store(out + row * sizes.heads + place.h, result, mask=mask)
