"""The kernel of all gradients on Hopper, of chunks of 64 tokens, from states and their gradients.

The formulas are those of `triton.gradients`. A program takes a chunk and all heads of values that share a head of keys.
What pairs of tokens give to queries and keys is added up over these heads first, and multiplied with the rows once.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.decays import exp
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, init_each, matrix, thread_barrier
from warploom.ops.delta_attention.hopper.matrices import find_chunk
from warploom.ops.delta_attention.hopper.scan import BACKWARD_FACTORS, BLOCK_T, SUMS, WHOLE
from warploom.ops.delta_attention.triton.tiles import DeltaSizes, exact_terms

PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # of a chunk's tokens
MATRIX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # of these, in shared memory
TERMS = gl.constexpr(2)  # of numbers that are summed up by products


class HeadTiles(NamedTuple):
    """Shared memory of a head of values, each tile (1, 1, 1, rows, columns)."""

    grad: gl.shared_memory_descriptor  # (T, E)
    updates: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor  # dR
    v: gl.shared_memory_descriptor  # from where its gradients leave
    states: gl.shared_memory_descriptor  # (E, D)
    grad_states: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # barriers of the queries and keys, the rows, and the states


@gluon.jit
def copy_head(descs, tiles, place, h):
    """Starts to copy the rows of a head."""
    full = tiles.full.index(1)
    mbarrier.expect(full, 4 * descs[0].block_type.nbytes)
    for i in gl.static_range(4):
        if i == 1 or i == 2:
            at = [place.slot, h, 0, 0]
        else:
            at = [place.b, h, place.token, 0]
        tma.async_copy_global_to_shared(descs[i], at, full, tiles[i].index(0))


@gluon.jit
def copy_states(descs, tiles, place, h):
    """Starts to copy the states of a head."""
    full = tiles.full.index(2)
    mbarrier.expect(full, 2 * descs[4].block_type.nbytes)
    for i in gl.static_range(4, 6):
        tma.async_copy_global_to_shared(descs[i], [place.slot, h, 0, 0], full, tiles[i].index(0))


@gluon.jit
def multiply(a, b, LAYOUT: gl.constexpr):
    """Returns the product of two matrices in shared memory."""
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)])


@gluon.jit
def load_rows(tile, LAYOUT: gl.constexpr):
    """Returns rows in shared memory, in float32."""
    return tile.load(LAYOUT).to(gl.float32)


@gluon.jit
def sum_of_rows(x):
    """Returns the sums (T,) of rows, as `PAIRS` has them."""
    return gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, PAIRS))


@gluon.jit
def decays_between(numbers, DECAYS: gl.constexpr):
    """Returns the decays (T, T) from the column's token to the row's, 0 where that is before it."""
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    row, column = gl.arange(0, BLOCK_T, ROWS), gl.arange(0, BLOCK_T, COLUMNS)
    decays = gl.full([BLOCK_T, BLOCK_T], 1.0, gl.float32, PAIRS)
    if DECAYS:
        coarse, fine = numbers.slice(SUMS, BLOCK_T), numbers.slice(SUMS + BLOCK_T, BLOCK_T)
        between = coarse.load(ROWS)[:, None] - coarse.load(COLUMNS)[None, :]
        between += fine.load(ROWS)[:, None] - fine.load(COLUMNS)[None, :]
        decays = exp(between, True)
    return gl.where(row[:, None] >= column[None, :], decays, 0.0)


@gluon.jit
def hopper_gradient_kernel(
    q_desc, k_desc, grad_desc, updates_desc, rests_desc, v_desc, states_desc, grad_states_desc, factors, dv_desc, dq_desc,
    dk_desc, dbeta, ddecay, sizes: DeltaSizes, DECAYS: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of a chunk's queries, keys (B, N, Hk, D), values, β and decays of heads (B, N, H).

    ``factors`` are those of `hopper.matrices` for the backward, ``rests`` the gradients ``dR`` of `hopper.reverse`.
    """
    dtype: gl.constexpr = k_desc.dtype
    D: gl.constexpr = k_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    OF_KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    OF_VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, E // 2, 16])
    OF_STATES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    KEY_ROWS: gl.constexpr = gl.SliceLayout(1, OF_KEYS)
    VALUE_ROWS: gl.constexpr = gl.SliceLayout(1, OF_VALUES)
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    PAIR_ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    PAIR_COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    descs = (grad_desc, updates_desc, rests_desc, v_desc, states_desc, grad_states_desc)
    place = find_chunk(sizes)
    full = barriers(3)
    init_each(full)
    fence_async_shared()
    thread_barrier()
    q = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, D], k_desc.layout)
    tiles = HeadTiles(
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, E], grad_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, E], updates_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, E], rests_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, E], v_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, E, D], states_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, E, D], grad_states_desc.layout),
        full,
    )
    mbarrier.expect(full.index(0), 2 * k_desc.block_type.nbytes)
    at = [place.b, place.keys, place.token, 0]
    tma.async_copy_global_to_shared(k_desc, at, full.index(0), k.index(0))
    tma.async_copy_global_to_shared(q_desc, at, full.index(0), q.index(0))
    copy_head(descs, tiles, place, place.head)
    copy_states(descs, tiles, place, place.head)
    row = gl.arange(0, BLOCK_T, PAIR_ROWS)[:, None]
    column = gl.arange(0, BLOCK_T, PAIR_COLUMNS)[None, :]
    # Products with this add up what lies before a column, and two terms of weights with it their sums.
    earlier = gl.allocate_shared_memory(dtype, [1, BLOCK_T, BLOCK_T], MATRIX)
    earlier.index(0).store(gl.where(row < column, 1.0, 0.0).to(dtype))
    weights = gl.allocate_shared_memory(dtype, [TERMS, BLOCK_T, BLOCK_T], MATRIX)
    mbarrier.wait(full.index(0), 0)
    dq = gl.zeros([BLOCK_T, D], gl.float32, OF_KEYS)
    dk = gl.zeros([BLOCK_T, D], gl.float32, OF_KEYS)
    dkeys = gl.zeros([BLOCK_T, BLOCK_T], gl.float32, PAIRS)
    dqueries = gl.zeros([BLOCK_T, BLOCK_T], gl.float32, PAIRS)
    numbers = gl.allocate_shared_memory(gl.float32, [BACKWARD_FACTORS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    token = place.token + gl.arange(0, BLOCK_T, TOKENS)
    first = (place.b.to(gl.int64) * sizes.tokens + token) * sizes.heads
    x = gl.arange(0, BACKWARD_FACTORS, gl.BlockedLayout([2], [32], [8], [0]))
    given = gl.load(factors + (place.slot.to(gl.int64) * sizes.heads + place.head) * BACKWARD_FACTORS + x)
    for h in range(place.head, place.end):
        phase = (h - place.head) & 1
        # 0, which the compiler does not know: descriptors of all products would be kept through the loop, and spilled.
        zero = h >> 30
        queries, keys = matrix(q, zero), matrix(k, zero)
        grad, updates, rests = matrix(tiles.grad, zero), matrix(tiles.updates, zero), matrix(tiles.rests, zero)
        v, states, grad_states = matrix(tiles.v, zero), matrix(tiles.states, zero), matrix(tiles.grad_states, zero)
        numbers.store(given)  # from there threads take them in several orders, with few addresses
        following = gl.minimum(h + 1, place.end - 1)
        given = gl.load(factors + (place.slot.to(gl.int64) * sizes.heads + following) * BACKWARD_FACTORS + x)
        mbarrier.wait(full.index(1), phase)
        mbarrier.wait(full.index(2), phase)
        since, beta, until = (
            numbers.slice(0, BLOCK_T), numbers.slice(BLOCK_T, BLOCK_T), numbers.slice(2 * BLOCK_T, BLOCK_T)
        )  # fmt: skip
        # (1) dQ̃ = dO Sᵀ, dK̃ = −β dR Sᵀ, dK̂ = U dSᵀ
        part = multiply(grad, states, OF_KEYS) * since.load(KEY_ROWS)[:, None]
        dq += part
        before = sum_of_rows(part * load_rows(queries, OF_KEYS))
        part = multiply(rests, states, OF_KEYS) * -(since.load(KEY_ROWS) * beta.load(KEY_ROWS))[:, None]
        dk += part
        before += sum_of_rows(part * load_rows(keys, OF_KEYS))
        part = multiply(updates, grad_states, OF_KEYS) * until.load(KEY_ROWS)[:, None]
        dk += part
        behind = sum_of_rows(part * load_rows(keys, OF_KEYS))
        # (2) dβ = rowsum(dR ∘ (V − K̃ S)), dV = β dR
        known = multiply(keys, states.permute([1, 0]), OF_VALUES) * since.load(VALUE_ROWS)[:, None]
        db = sum_of_rows(load_rows(rests, OF_VALUES) * (load_rows(v, OF_VALUES) - known))
        across = 0.0
        if DECAYS:
            sums = gl.zeros([E // 4], gl.float32, gl.SliceLayout(1, OF_STATES))
            for i in gl.static_range(4):  # no more of them fit in registers
                one = load_rows(states.slice(i * (E // 4), E // 4, dim=0), OF_STATES)
                sums += gl.sum(one * load_rows(grad_states.slice(i * (E // 4), E // 4, dim=0), OF_STATES), 1)
            across = gl.sum(sums, 0) * gl.sum(numbers.slice(WHOLE, 1).load(TOKENS), 0)
        thread_barrier()
        if h + 1 < place.end:
            copy_states(descs, tiles, place, h + 1)
        weight = beta.load(VALUE_ROWS) * sizes.scale
        v.store((load_rows(rests, OF_VALUES) * weight[:, None]).to(dtype))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(dv_desc, [place.b, h, place.token, 0], tiles.v.index(0))
        # (3) dP = dO Uᵀ, dL = −dR Uᵀ, and the share of β in L = β A
        decays = decays_between(numbers, DECAYS)
        dscores = gl.where(row >= column, multiply(grad, updates.permute([1, 0]), PAIRS), 0.0)
        dlower = gl.where(row > column, -multiply(rests, updates.permute([1, 0]), PAIRS), 0.0)
        pairs_of_keys = multiply(keys, keys.permute([1, 0]), PAIRS)  # anew, since no more numbers fit in registers
        db += gl.sum(dlower * decays * pairs_of_keys, 1)
        dlower *= beta.load(PAIR_ROWS)[:, None]
        dlower *= decays
        dscores *= decays
        dkeys += dlower
        dqueries += dscores
        db = gl.convert_layout(db * sizes.scale, TOKENS)
        gl.store(dbeta + first + h, db.to(dbeta.dtype.element_ty), mask=token < sizes.tokens)
        # (4) decays: pairs of tokens before t with those from t on, first by rows, then by columns
        if DECAYS:
            pairs_of_queries = multiply(queries, keys.permute([1, 0]), PAIRS)
            both = gl.where(row > column, dlower * pairs_of_keys + dscores * pairs_of_queries, 0.0)
            terms = exact_terms(both, TERMS)
            for i in gl.static_range(TERMS):
                weights.index(i).store(terms[i])
            fence_async_shared()
            thread_barrier()
            own = multiply(weights.index(zero + 1), earlier.index(zero), PAIRS)
            own = warpgroup_mma(weights.index(zero), earlier.index(zero), own, is_async=True)
            own = warpgroup_mma_wait(0, deps=[own])
            own = gl.where(row >= column, own + before[:, None], behind[:, None])
            dg = gl.sum(own, 0) + across
            dg = gl.convert_layout(dg * sizes.scale, TOKENS)
            gl.store(ddecay + first + h, dg, mask=token < sizes.tokens)
        tma.store_wait(0)
        thread_barrier()
        if h + 1 < place.end:
            copy_head(descs, tiles, place, h + 1)
    # (5) what pairs of tokens give to queries and keys
    weights.index(0).store(dkeys.to(dtype))
    weights.index(1).store(dqueries.to(dtype))
    fence_async_shared()
    thread_barrier()
    of_keys, of_queries = weights.index(0), weights.index(1)
    queries, keys = matrix(q, 0), matrix(k, 0)
    dq = warpgroup_mma(of_queries, keys, dq, is_async=True)
    dk = warpgroup_mma(of_keys, keys, dk, is_async=True)
    dk = warpgroup_mma(of_keys.permute([1, 0]), keys, dk, is_async=True)
    dk = warpgroup_mma(of_queries.permute([1, 0]), queries, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    to_queries = gl.allocate_shared_memory(dq_desc.dtype, [1, 1, 1, BLOCK_T, D], dq_desc.layout)
    to_keys = gl.allocate_shared_memory(dk_desc.dtype, [1, 1, 1, BLOCK_T, D], dk_desc.layout)
    matrix(to_queries, 0).store((dq * sizes.scale).to(dq_desc.dtype))
    matrix(to_keys, 0).store((dk * sizes.scale).to(dk_desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(dq_desc, at, to_queries.index(0))
    tma.async_copy_shared_to_global(dk_desc, at, to_keys.index(0))
    tma.store_wait(0)
