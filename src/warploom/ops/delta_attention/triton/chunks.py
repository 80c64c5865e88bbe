"""The kernel that makes what chunks hold apart from states, all chunks at once.

Within a chunk the corrected values ``U`` obey ``(1 + L) U = β (V − K̃ S)``, with ``S`` the state before it, ``L_tj = β_t
⟨k_t, k_j⟩`` over the decay between for ``j < t``, and ``K̃`` the keys over the decay since its start. With ``T = (1 +
L)⁻¹`` they are ``T β V − (T β K̃) S``: of the chunk alone, and of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import locate
from warploom.device.phase import wrapping_add
from warploom.device.product import dot, round_to
from warploom.device.rows import Strides
from warploom.ops.delta_attention.triton import tiles


class ChunkStrides(NamedTuple):
    """Strides of the kernel's rows."""

    q: Strides
    k: Strides
    v: Strides


@triton.jit
def chunk_kernel(
    q, k, v, beta, decay, theta, offsets, cu_seqlens, from_start, until_end, scores, corrected, predicted, kept, inverse,
    decayed, offset: tl.int32, sizes: tiles.DeltaSizes, strides: ChunkStrides, config: tl.constexpr,
):  # fmt: skip
    """Writes what one chunk of one head holds, in buffers (slots, H, T, …).

    ``from_start`` (T, D) are queries and ``until_end`` keys over the decays since the chunk's start and until its end,
    ``scores`` (T, T) of queries with keys, ``corrected`` (T, E) is ``T β V`` and ``predicted`` (T, D) ``T β K̃``. ``kept``
    are the decays over the whole chunk, (slots, H, 1) or (slots, H, D). For the backward, ``inverse`` (2T, T) is ``T``
    and below it ``A``, the pairs of keys, and ``decayed`` (T, D) is ``K̃``.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    NARROW: tl.constexpr = dtype.primitive_bitwidth == 16
    BLOCK_T: tl.constexpr = config.BLOCK_T
    BLOCK_D: tl.constexpr = config.BLOCK_D
    place = locate(offsets, cu_seqlens, offset, sizes)
    slot, h = place.slot, place.h
    t = tl.arange(0, BLOCK_T)
    n = place.first + t
    mask = n < place.last
    of_group = h // sizes.group
    position = wrapping_add(n, place.position)
    k_rows = tiles.head_rows(k, n, place, of_group, strides.k, config.VEC)
    q_rows = tiles.head_rows(q, n, place, of_group, strides.q, config.VEC)
    v_rows = tiles.head_rows(v, n, place, h, strides.v, config.VEC)
    k_inverse = tiles.inverse_lengths(k_rows, mask, strides.k.f, config)
    q_inverse = tiles.inverse_lengths(q_rows, mask, strides.q.f, config)
    b = tiles.load_beta(beta, n, mask, place, sizes)
    of_keys = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    of_queries = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    # (1) decays since the start, until the end, and over all: those of a head are the same for all features
    if config.DECAY != "feature":
        of_head = tiles.load_decays(decay, n, t, mask, place, sizes, config)
        since, until, whole = tiles.decays_of_chunk(of_head, config, NARROW)
    for first in range(0, config.WIDE_D, BLOCK_D):
        f = first + tl.arange(0, BLOCK_D)
        keys = tiles.load_encoded(k_rows, f, k_inverse, mask, position, theta, of_group, strides.k.f, sizes, config)
        queries = tiles.load_encoded(
            q_rows, f, q_inverse, mask, position, theta, of_group, strides.q.f, sizes, config
        )
        keys, queries = round_to(keys, dtype), round_to(queries, dtype)
        if config.DECAY == "feature":
            g = tiles.load_decays(decay, n, f, mask, place, sizes, config)
            since, until, whole = tiles.decays_of_chunk(g, config, NARROW)
        else:
            g = of_head
        to = tiles.work_rows(from_start, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D)
        tl.store(to, round_to(queries.to(tl.float32) * since, dtype))
        to = tiles.work_rows(until_end, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D)
        tl.store(to, round_to(keys.to(tl.float32) * until, dtype))
        from_here = round_to(keys.to(tl.float32) * since, dtype)
        tl.store(tiles.work_rows(predicted, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D), from_here)
        if decayed is not None:
            tl.store(tiles.work_rows(decayed, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D), from_here)
        if config.DECAY == "feature":
            tl.store(kept + (slot * sizes.heads + h) * config.WIDE_D + f[None, :], whole)
        # (2) A and P: pairs of keys, and of queries with keys
        of_keys, of_queries = tiles.add_pairs(of_keys, of_queries, queries, keys, g, config, NARROW)
    if config.DECAY == "head":
        tl.store(kept + (slot * sizes.heads + h) + tl.arange(0, 1)[:, None], whole)
        of_keys, of_queries = tiles.decay_pairs(of_keys, of_queries, of_head, NARROW)
    of_keys = tl.where(t[:, None] > t[None, :], of_keys, 0.0)
    of_queries = tl.where(t[:, None] >= t[None, :], of_queries, 0.0)
    # (3) T = (1 + β A)⁻¹, with the place of P for what threads give each other
    place_of_scores = scores + (slot * sizes.heads + h) * (BLOCK_T * BLOCK_T)
    scratch = place_of_scores.to(tl.pointer_type(tl.float32), bitcast=True)
    solution = tiles.invert(of_keys * b[:, None], scratch, BLOCK_T, config.LEVELS)
    tl.debug_barrier()
    tl.store(tiles.work_rows(scores, slot, h, sizes, t, t, BLOCK_T, BLOCK_T), round_to(of_queries, dtype))
    if inverse is not None:
        to = tiles.work_rows(inverse, slot, h, sizes, t, t, 2 * BLOCK_T, BLOCK_T)
        tl.store(to, round_to(solution, dtype))
        to = tiles.work_rows(inverse, slot, h, sizes, BLOCK_T + t, t, 2 * BLOCK_T, BLOCK_T)
        tl.store(to, round_to(of_keys, dtype))
    weighted = round_to(solution * b[None, :], dtype)
    # (4) T β K̃ in the place of K̃, and T β V
    tl.debug_barrier()
    for first in range(0, config.WIDE_D, BLOCK_D):
        at = tiles.work_rows(predicted, slot, h, sizes, t, first + tl.arange(0, BLOCK_D), BLOCK_T, config.WIDE_D)
        from_here = tl.load(at)
        tl.debug_barrier()
        own = dot(weighted, from_here, tl.zeros((BLOCK_T, BLOCK_D), tl.float32))
        tl.store(at, round_to(own, dtype))
    for first in range(0, config.E, config.BLOCK_E):
        e = first + tl.arange(0, config.BLOCK_E)
        values = tiles.load_features(v_rows, e, mask, strides.v.f, config.E, config.UNIT)
        result = dot(weighted, values, tl.zeros((BLOCK_T, config.BLOCK_E), tl.float32))
        ptrs = tiles.work_rows(corrected, slot, h, sizes, t, e, BLOCK_T, config.WIDE)
        tl.store(ptrs, round_to(result, dtype))
