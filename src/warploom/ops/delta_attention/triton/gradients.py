"""Kernels of gradients, all chunks at once, from states and their gradients: of pairs of tokens, and of features.

With ``S`` the state before a chunk and ``dS`` the gradient of that behind it, both given, and all over the scale,
``dR = Tᵀ dU`` is the gradient of ``β (V − K̃ S)``. Then ``dV = β dR``, ``dL = −dR Uᵀ``, ``dP = dO Uᵀ``, ``dQ̃ = dO Sᵀ``,
``dK̃ = −β dR Sᵀ``, ``dK̂ = U dSᵀ``: queries, keys and decays follow from these.

A decay's gradient is the sum over all pairs that it stands between, of tokens and of tokens and states. Nothing is
subtracted from a sum: what is far larger than the rest of it would leave its rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import locate
from warploom.device.decays import exp
from warploom.device.product import round_to
from warploom.device.rows import Strides
from warploom.ops.delta_attention.triton import tiles


class DeltaPairStrides(NamedTuple):
    """Strides of the rows of `pair_kernel`."""

    v: Strides
    grad: Strides
    dv: Strides


class DeltaFeatureStrides(NamedTuple):
    """Strides of the rows of `feature_kernel`."""

    q: Strides
    k: Strides
    grad: Strides
    dq: Strides
    dk: Strides


@triton.jit
def pair_kernel(
    v, beta, decay, cu_seqlens, grad, scores, inverse, decayed, states, updates, grad_updates, corrections, pairs, dv, dbeta,
    ddecay, sizes: tiles.DeltaSizes, strides: DeltaPairStrides, config: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one chunk's values, β and pairs of tokens.

    ``corrections`` (slots, H, T, E) are ``−β dR``. ``pairs`` (slots, H, 2T, T) are the gradients of pairs of keys, and
    below them of queries with keys; those of pairs without the decays of a head. ``ddecay`` (B, N, H, parts) gets the
    first part of the gradient of these.
    """
    dtype: tl.constexpr = v.dtype.element_ty
    NARROW: tl.constexpr = dtype.primitive_bitwidth == 16
    BLOCK_T: tl.constexpr = config.BLOCK_T
    place = locate(None, cu_seqlens, 0, sizes)
    slot, h = place.slot, place.h
    t = tl.arange(0, BLOCK_T)
    n = place.first + t
    mask = n < place.last
    owned = tiles.owned_rows(n, place, sizes)
    v_rows = tiles.head_rows(v, n, place, h, strides.v, config.VEC)
    grad_rows = tiles.head_rows(grad, n, place, h, strides.grad, config.VEC)
    dv_rows = tiles.head_rows(dv, n, place, h, strides.dv, config.VEC)
    b = tiles.load_beta(beta, n, mask, place, sizes)
    solution = tl.load(tiles.work_rows(inverse, slot, h, sizes, t, t, 2 * BLOCK_T, BLOCK_T))
    dlower = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    dscores = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    db = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, config.E, config.BLOCK_E):
        e = first + tl.arange(0, config.BLOCK_E)
        there = e < config.E  # scans, whose blocks are narrower, write no more
        update = tl.load(
            tiles.work_rows(updates, slot, h, sizes, t, e, BLOCK_T, config.WIDE), mask=there[None, :], other=0.0
        )
        dupdate = tl.load(
            tiles.work_rows(grad_updates, slot, h, sizes, t, e, BLOCK_T, config.WIDE),
            mask=there[None, :],
            other=0.0,
        )
        given = tiles.load_features(grad_rows, e, mask, strides.grad.f, config.E, config.UNIT)
        values = tiles.load_features(v_rows, e, mask, strides.v.f, config.E, config.UNIT).to(tl.float32)
        zeros = tl.zeros((BLOCK_T, config.BLOCK_E), tl.float32)
        # (1) dR = Tᵀ dU, dV = β dR
        dr = tiles.multiply(tl.trans(solution), dupdate, zeros, dtype)
        own = dr * b[:, None]
        tiles.store_features(dv_rows, own * sizes.scale, e, owned, strides.dv.f, config.E, config.UNIT)
        to = tiles.work_rows(corrections, slot, h, sizes, t, e, BLOCK_T, config.WIDE)
        tl.store(to, round_to(-own, corrections.dtype.element_ty))
        # (2) dβ = rowsum(dR ∘ (V − K̃ S))
        known = zeros
        for start in range(0, config.WIDE_D, config.BLOCK_D):
            f = start + tl.arange(0, config.BLOCK_D)
            keys = tl.load(tiles.work_rows(decayed, slot, h, sizes, t, f, BLOCK_T, config.WIDE_D))
            state = tl.load(
                tiles.work_rows(states, slot, h, sizes, e, f, config.WIDE, config.WIDE_D),
                mask=there[:, None],
                other=0.0,
            )
            known = tiles.multiply(keys, tl.trans(state), known, dtype)
        db += tl.sum(dr * (values - known), axis=1)
        # (3) dP = dO Uᵀ, dL = −dR Uᵀ
        dscores = tiles.multiply(given, tl.trans(update), dscores, dtype)
        dlower = tiles.multiply(-dr, tl.trans(update), dlower, dtype)
    # (4) dA = β dL, and the share of β in L = β A
    of_keys = tl.load(tiles.work_rows(inverse, slot, h, sizes, BLOCK_T + t, t, 2 * BLOCK_T, BLOCK_T)).to(tl.float32)
    earlier = t[:, None] > t[None, :]
    dlower = tl.where(earlier, dlower, 0.0)
    dscores = tl.where(t[:, None] >= t[None, :], dscores, 0.0)
    db += tl.sum(dlower * of_keys, axis=1)
    dlower *= b[:, None]
    token = (place.b * sizes.tokens + place.start + n) * sizes.heads + h
    tl.store(dbeta + token, (db * sizes.scale).to(dbeta.dtype.element_ty), mask=owned)
    if config.DECAY == "head":
        of_queries = tl.load(tiles.work_rows(scores, slot, h, sizes, t, t, BLOCK_T, BLOCK_T)).to(tl.float32)
        weights = tl.where(earlier, dlower * of_keys + dscores * of_queries, 0.0)
        # Pairs of tokens before t with those from t on: first by columns, then by rows.
        before = tl.trans(tiles.sum_rows(t[None, :] < t[:, None], tl.trans(weights), NARROW))
        dg = tl.sum(tl.where(t[:, None] >= t[None, :], before, 0.0), axis=0)
        tl.store(ddecay + token * config.PARTS, tl.where(mask, dg * sizes.scale, 0.0), mask=owned)
        between = tiles.decays_between(tiles.load_decays(decay, n, t, mask, place, sizes, config), NARROW)
        dlower *= between
        dscores *= between
    to = tiles.work_rows(pairs, slot, h, sizes, t, t, 2 * BLOCK_T, BLOCK_T)
    tl.store(to, round_to(dlower, pairs.dtype.element_ty))
    to = tiles.work_rows(pairs, slot, h, sizes, BLOCK_T + t, t, 2 * BLOCK_T, BLOCK_T)
    tl.store(to, round_to(dscores, pairs.dtype.element_ty))


@triton.jit
def add_pairs_of_head(queries, keys, dlower, dscores, zeros):
    """Returns the gradients (T, F) of queries and keys from those of their pairs."""
    dtype: tl.constexpr = keys.dtype
    dk = tiles.multiply(dlower, keys, zeros, dtype)
    dk = tiles.multiply(tl.trans(dlower), keys, dk, dtype)
    dk = tiles.multiply(tl.trans(dscores), queries, dk, dtype)
    dq = tiles.multiply(dscores, keys, zeros, dtype)
    return dq, dk


@triton.jit
def add_pairs_of_features(queries, keys, g, dlower, dscores, config: tl.constexpr, NARROW: tl.constexpr):
    """Returns the gradients (T, F) of queries, keys and decays from those of pairs, where decays are in the factors."""
    dtype: tl.constexpr = keys.dtype
    BLOCK_T: tl.constexpr = config.BLOCK_T
    t = tl.arange(0, BLOCK_T)
    zeros = tl.zeros((BLOCK_T, config.BLOCK_D), tl.float32)
    own = tl.sum(tl.where(t[:, None] == t[None, :], dscores.to(tl.float32), 0.0), axis=1)[:, None]
    wide_keys = keys.to(tl.float32)
    wide_queries = queries.to(tl.float32)
    dq = own * wide_keys
    dk = own * wide_queries
    dg = zeros
    for level in range(config.LEVELS):
        between = tiles.tokens_to_middle(level, BLOCK_T)
        decays = exp(tiles.sum_rows(between, g, NARROW), NARROW)
        decayed = round_to(wide_keys * decays, dtype)
        asking = round_to(wide_queries * decays, dtype)
        across = tiles.across_middle(level, BLOCK_T)
        of_keys = tl.where(across, dlower, 0.0).to(dlower.dtype)
        of_queries = tl.where(across, dscores, 0.0).to(dscores.dtype)
        ddecayed = tiles.multiply(of_keys, decayed, zeros, dtype)
        ddecayed = tiles.multiply(tl.trans(of_keys), decayed, ddecayed, dtype)
        ddecayed = tiles.multiply(tl.trans(of_queries), asking, ddecayed, dtype)
        dasking = tiles.multiply(of_queries, decayed, zeros, dtype)
        ddecayed *= decays
        dasking *= decays
        dk += ddecayed
        dq += dasking
        of_decays = ddecayed * wide_keys + dasking * wide_queries
        dg += tiles.sum_rows(tl.trans(between), of_decays, NARROW)
    return dq, dk, dg


@triton.jit
def feature_kernel(
    q, k, decay, cu_seqlens, grad, states, updates, grad_states, corrections, pairs, dq, dk, ddecay,
    sizes: tiles.DeltaSizes, strides: DeltaFeatureStrides, config: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of some features of one chunk's queries and keys.

    ``q`` and ``k`` (B, N, Hk, D) are encoded; ``dq`` and ``dk`` (B, N, H, D) are gradients of that, for each head of
    values. ``ddecay`` is (B, N, H, D), or (B, N, H, parts) with a part for each block of features.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    NARROW: tl.constexpr = dtype.primitive_bitwidth == 16
    BLOCK_T: tl.constexpr = config.BLOCK_T
    BLOCK_D: tl.constexpr = config.BLOCK_D
    VEC: tl.constexpr = config.VEC
    place = locate(None, cu_seqlens, 0, sizes)
    slot, h = place.slot, place.h
    t = tl.arange(0, BLOCK_T)
    f = place.column * BLOCK_D + tl.arange(0, BLOCK_D)
    n = place.first + t
    mask = n < place.last
    owned = tiles.owned_rows(n, place, sizes)
    of_group = h // sizes.group
    grad_rows = tiles.head_rows(grad, n, place, h, strides.grad, VEC)
    from_start = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    since_start = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    until_end = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    across = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, config.E, config.BLOCK_E):
        e = first + tl.arange(0, config.BLOCK_E)
        state = tl.load(tiles.work_rows(states, slot, h, sizes, e, f, config.WIDE, config.WIDE_D))
        dstate = tl.load(tiles.work_rows(grad_states, slot, h, sizes, e, f, config.WIDE, config.WIDE_D))
        update = tl.load(tiles.work_rows(updates, slot, h, sizes, t, e, BLOCK_T, config.WIDE))
        correction = tl.load(tiles.work_rows(corrections, slot, h, sizes, t, e, BLOCK_T, config.WIDE))
        given = tiles.load_features(grad_rows, e, mask, strides.grad.f, config.E, config.UNIT)
        # (1) dQ̃ = dO Sᵀ, dK̃ = −β dR Sᵀ, dK̂ = U dSᵀ
        from_start = tiles.multiply(given, state, from_start, dtype)
        since_start = tiles.multiply(correction, state, since_start, dtype)
        until_end = tiles.multiply(update, dstate, until_end, dtype)
        if config.DECAY != "none":
            across += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=0)
    k_rows = tiles.head_rows(k, n, place, of_group, strides.k, VEC)
    keys = tiles.load_features(k_rows, f, mask, strides.k.f, config.D, config.UNIT)
    q_rows = tiles.head_rows(q, n, place, of_group, strides.q, VEC)
    queries = tiles.load_features(q_rows, f, mask, strides.q.f, config.D, config.UNIT)
    dlower = tl.load(tiles.work_rows(pairs, slot, h, sizes, t, t, 2 * BLOCK_T, BLOCK_T))
    dscores = tl.load(tiles.work_rows(pairs, slot, h, sizes, BLOCK_T + t, t, 2 * BLOCK_T, BLOCK_T))
    g = tiles.load_decays(decay, n, f, mask, place, sizes, config)
    since, until, whole = tiles.decays_of_chunk(g, config, NARROW)
    # (2) pairs of tokens within the chunk
    dg = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    if config.DECAY == "feature":
        of_q, of_k, dg = add_pairs_of_features(queries, keys, g, dlower, dscores, config, NARROW)
    else:
        of_q, of_k = add_pairs_of_head(queries, keys, dlower, dscores, dg)
    # (3) pairs of tokens and states
    from_start *= since
    since_start *= since
    until_end *= until
    of_q += from_start
    of_k += since_start + until_end
    q_to = tiles.head_rows(dq, n, place, h, strides.dq, VEC)
    k_to = tiles.head_rows(dk, n, place, h, strides.dk, VEC)
    tiles.store_features(q_to, of_q * sizes.scale, f, owned, strides.dq.f, config.D, config.UNIT)
    tiles.store_features(k_to, of_k * sizes.scale, f, owned, strides.dk.f, config.D, config.UNIT)
    if config.DECAY != "none":
        wide_keys = keys.to(tl.float32)
        before = from_start * queries.to(tl.float32) + since_start * wide_keys
        behind = until_end * wide_keys
        states_only = across[None, :] * whole
        token = (place.b * sizes.tokens + place.start + n) * sizes.heads + h
        if config.DECAY == "head":
            before = tl.sum(before, axis=1)[:, None]
            behind = tl.sum(behind, axis=1)[:, None]
            total = tl.sum(tl.where(t[:, None] >= t[None, :], before, 0.0), axis=0)
            total += tl.sum(tl.where(t[:, None] < t[None, :], behind, 0.0), axis=0)
            total += tl.sum(states_only + tl.zeros((BLOCK_T, BLOCK_D), tl.float32), axis=1)
            ptrs = ddecay + token * config.PARTS + (place.column + 1)
            tl.store(ptrs, tl.where(mask, total * sizes.scale, 0.0), mask=owned)
        else:
            dg += tiles.sum_rows(t[None, :] >= t[:, None], before, NARROW)
            dg += tiles.sum_rows(t[None, :] < t[:, None], behind, NARROW)
            dg = tl.where(mask[:, None], (dg + states_only) * sizes.scale, 0.0)
            ptrs = ddecay + token[:, None] * config.D + f[None, :]
            tl.store(ptrs, dg, mask=owned[:, None] & (f < config.D)[None, :])
