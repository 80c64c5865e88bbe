"""Groups of warps that form attention's gradients on Hopper, in the manner of `warploom.device.hopper.attention`.

A group of warps owns 64 queries and walks over the keys, or 64 keys and walks over the queries of all heads that read
them. Products stay in flight across steps: while a tile's weights are computed, the gradients of the tile before are
added up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from warploom.device.hopper import tma
from warploom.device.hopper.attention import key_steps, query_steps, tile_place
from warploom.device.hopper.pipeline import (
    ROWS,
    announce,
    announce_end,
    announced,
    as_factor,
    copy_own,
    copy_tile,
    matrix,
    next_tile,
    power_of_two,
    product_transposed,
    send_tile,
    wait_empty,
    wait_full,
)

OWN_STAGES = gl.constexpr(2)  # tiles of keys and values: one that is worked on, and the next


@gluon.jit
def weights_of(
    logits, shift, n, first, keys, right, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr
):
    """Weights of the keys ``n …`` for 64 queries, of which the first stands at the key ``first``."""
    weights = power_of_two(logits * scale - shift[:, None])
    if MASKED:
        key = n + gl.arange(0, logits.shape[1], gl.SliceLayout(0, LAYOUT))
        seen = (key < keys)[None, :]
        if CAUSAL:
            query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            seen = seen & (key[None, :] <= (query + right)[:, None])
        weights = gl.where(seen, weights, 0.0)
    return weights


@gluon.jit
def walk_keys(
    dq, dlogits, count, q_tile, do_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, shift, delta,
    begin, end, first, keys, right, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of keys ``end − 1 … begin``, with ``dlogits`` of the tile before, number ``count − 1``."""
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    STAGES: gl.constexpr = k_tiles.shape[0]
    for i in range(end - begin):
        logits = product_transposed(q_tile, k_tiles, k_full, count, LAYOUT)
        before = (count + STAGES - 1) % STAGES
        dq = warpgroup_mma(dlogits, matrix(k_tiles, before), dq, is_async=True)
        dweights = product_transposed(do_tile, v_tiles, v_full, count, LAYOUT)
        logits = warpgroup_mma_wait(2, deps=[logits])
        n = (end - 1 - i) * BLOCK_N
        weights = weights_of(logits, shift, n, first, keys, right, scale, MASKED, CAUSAL, LAYOUT)
        dq, dlogits, dweights = warpgroup_mma_wait(0, deps=[dq, dlogits, dweights])
        mbarrier.arrive(k_empty.index(before))
        mbarrier.arrive(v_empty.index(count % STAGES))
        dlogits = as_factor(weights * (dweights - delta[:, None]), k_tiles.dtype, OUT_LAYOUT)
        count += 1
    return dq, dlogits, count


@gluon.jit
def walk_keys_in_turn(
    dq, count, own, q_tiles, do_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, shift, delta,
    begin, end, first, keys, right, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """`walk_keys` with nothing in flight from one tile to the next: wide sums leave no registers for it."""
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    for i in range(end - begin):
        # count >> 30 is zero. The compiler, which cannot know, works out addresses here and not, for all registers, before.
        place = own + (count >> 30)
        logits = product_transposed(matrix(q_tiles, place), k_tiles, k_full, count, LAYOUT)
        dweights = product_transposed(matrix(do_tiles, place), v_tiles, v_full, count, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        n = (end - 1 - i) * BLOCK_N
        weights = weights_of(logits, shift, n, first, keys, right, scale, MASKED, CAUSAL, LAYOUT)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        mbarrier.arrive(v_empty.index(count % v_tiles.shape[0]))
        dlogits = as_factor(weights * (dweights - delta[:, None]), k_tiles.dtype, OUT_LAYOUT)
        slot = count % k_tiles.shape[0]
        dq = warpgroup_mma(dlogits, matrix(k_tiles, slot), dq, is_async=True)
        dq, dlogits = warpgroup_mma_wait(0, deps=[dq, dlogits])
        mbarrier.arrive(k_empty.index(slot))
        count += 1
    return dq, count


@gluon.jit
def row_numbers(numbers, row, m, tokens, other, LAYOUT: gl.constexpr):
    """A number of each of 64 queries of a head, from number ``m`` on; ``other`` where there is none."""
    local = m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(numbers + row.to(gl.int64) * tokens + local, mask=local < tokens, other=other)


@gluon.jit
def compute_for_queries(
    own: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, arguments
):
    """Group number ``own`` of warps of a kernel that owns tiles of queries. ``IN_REGISTERS``: its queries and gradients stay there."""
    (
        ticket, dq_out, shift, delta, q_tiles, do_tiles, k_tiles, v_tiles, dq_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, rows, blocks, section, parts, right, scale, slope, place,
    ) = arguments  # fmt: skip
    GROUPS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, _ = announced(ticket, own_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        begin, full, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + keys - tokens  # the last query stands at the last key
        row_shift = row_numbers(shift, row, m, tokens, float("inf"), LAYOUT)
        row_delta = row_numbers(delta, row, m, tokens, 0.0, LAYOUT)
        if IN_REGISTERS:
            q_tile = matrix(q_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            do_tile = matrix(do_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            mbarrier.arrive(own_empty.index(0))
        else:
            q_tile = matrix(q_tiles, own)
            do_tile = matrix(do_tiles, own)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        logits = product_transposed(q_tile, k_tiles, k_full, count, LAYOUT)
        dweights = product_transposed(do_tile, v_tiles, v_full, count, LAYOUT)
        logits, dweights = warpgroup_mma_wait(0, deps=[logits, dweights])
        mbarrier.arrive(v_empty.index(count % STAGES))
        n = (end - 1) * BLOCK_N
        weights = weights_of(logits, row_shift, n, first, keys, right, scale, True, CAUSAL, LAYOUT)
        dlogits = as_factor(weights * (dweights - row_delta[:, None]), k_tiles.dtype, OUT_LAYOUT)
        count += 1
        if CAUSAL:  # otherwise the first tile alone, of the last keys, has a mask
            dq, dlogits, count = walk_keys(
                dq, dlogits, count, q_tile, do_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                row_shift, row_delta, full, end - 1, first, keys, right, scale, True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        dq, dlogits, count = walk_keys(
            dq, dlogits, count, q_tile, do_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            row_shift, row_delta, begin, full, first, keys, right, scale, False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if not IN_REGISTERS:
            mbarrier.arrive(own_empty.index(0))
        before = (count + STAGES - 1) % STAGES
        dq = warpgroup_mma(dlogits, matrix(k_tiles, before), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(k_empty.index(before))
        tma.store_wait(0)  # until the tile before has left its buffer
        entry, head = row // heads, row % heads
        send_tile(dq_out, dq * slope, dq_tiles, own, part, entry, head, m, tokens, place, SPLIT, OUT_LAYOUT)
        done += 1
        tile, _ = announced(ticket, own_full, done)
    tma.store_wait(0)


@gluon.jit
def compute_for_wide_queries(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, arguments):
    """`compute_for_queries` for more than 128 features; results leave through the buffers of the queries, ``dq_tiles``."""
    (
        ticket, dq_out, shift, delta, q_tiles, do_tiles, k_tiles, v_tiles, dq_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, rows, blocks, section, parts, right, scale, slope, place,
    ) = arguments  # fmt: skip
    GROUPS: gl.constexpr = q_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, _ = announced(ticket, own_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        begin, full, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + keys - tokens  # the last query stands at the last key
        row_shift = row_numbers(shift, row, m, tokens, float("inf"), LAYOUT)
        row_delta = row_numbers(delta, row, m, tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dq, count = walk_keys_in_turn(
            dq, count, own, q_tiles, do_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            row_shift, row_delta, full, end, first, keys, right, scale, True, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        dq, count = walk_keys_in_turn(
            dq, count, own, q_tiles, do_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            row_shift, row_delta, begin, full, first, keys, right, scale, False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        entry, head = row // heads, row % heads
        send_tile(dq_out, dq * slope, dq_tiles, own, part, entry, head, m, tokens, place, SPLIT, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(0))
        done += 1
        tile, _ = announced(ticket, own_full, done)


@gluon.jit
def copy_for_keys(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, arguments):
    """The copying warp of a kernel that owns tiles of keys. Rows' numbers travel with their tile: shifts with queries, δ with gradients."""
    (
        tickets, ticket, q_desc, do_desc, own_descs, shift, delta,
        q_tiles, do_tiles, own_tiles, shifts, deltas,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = heads // group
    tiles = blocks * rows * parts
    tile = gl.program_id(0)
    count = 0
    done = 0
    local = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    while tile < tiles:
        slot = announce(tile, ticket, own_empty, done)
        block, row, part = tile_place(tile, blocks, rows, section, parts, False)
        entry, key_head = row // key_heads, row % key_heads
        begin, _, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_N, BLOCK_M)
        copy_own(own_descs, own_tiles, entry, key_head, block * BLOCK_N, own_full, slot, GROUPS)
        for i in range(group * (end - begin)):
            member = i // (end - begin)
            head = key_head * group + member
            m = (begin + i - member * (end - begin)) * BLOCK_M
            there = m + local < tokens
            cells = (entry * heads + head).to(gl.int64) * tokens + m + local
            row_shift = gl.load(shift + cells, mask=there, other=float("inf"))
            row_delta = gl.load(delta + cells, mask=there, other=0.0)
            shifts.index(wait_empty(q_empty, count)).store(row_shift)
            copy_tile(q_desc, entry, head, m, q_tiles, q_full, q_empty, count)
            deltas.index(wait_empty(do_empty, count)).store(row_delta)
            copy_tile(do_desc, entry, head, m, do_tiles, do_full, do_empty, count)
            count += 1
        done += 1
        tile = next_tile(tickets, tiles)
    announce_end(tile, ticket, own_full, own_empty, done)


@gluon.jit
def walk_queries(
    dk, dv, count, k_tile, v_tile, q_tiles, do_tiles, shifts, deltas, q_full, q_empty, do_full, do_empty,
    begin, end, first, scale, MASKED: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of queries ``begin … end`` of one head. Query ``first`` is the first that sees the first key."""
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    STAGES: gl.constexpr = q_tiles.shape[0]
    for i in range(begin, end):
        slot = count % STAGES
        logits = product_transposed(k_tile, q_tiles, q_full, count, LAYOUT)  # (keys, queries)
        dweights = product_transposed(v_tile, do_tiles, do_full, count, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        row_shift = shifts.index(slot).load(gl.SliceLayout(0, LAYOUT))
        weights = power_of_two(logits * scale - row_shift[None, :])
        if MASKED:
            sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            query = i * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
            weights = gl.where(sees[:, None] <= query[None, :], weights, 0.0)
        factor = as_factor(weights, q_tiles.dtype, OUT_LAYOUT)
        dv = warpgroup_mma(factor, matrix(do_tiles, slot), dv, is_async=True)
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        row_delta = deltas.index(slot).load(gl.SliceLayout(0, LAYOUT))
        dlogits = as_factor(weights * (dweights - row_delta[None, :]), q_tiles.dtype, OUT_LAYOUT)
        dk = warpgroup_mma(dlogits, matrix(q_tiles, slot), dk, is_async=True)
        dv, factor = warpgroup_mma_wait(1, deps=[dv, factor])
        mbarrier.arrive(do_empty.index(slot))
        dk, dlogits = warpgroup_mma_wait(0, deps=[dk, dlogits])
        mbarrier.arrive(q_empty.index(slot))
        count += 1
    return dk, dv, count


@gluon.jit
def walk_queries_for_one(
    acc, count, own_tile, near_tiles, far_tiles, weight_tiles, numbers,
    near_full, near_empty, far_full, far_empty, weights_full,
    begin, end, first, scale, VALUES: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of queries ``begin … end`` of one head for one of two gradients; another group forms the other.

    With ``VALUES`` the own tile is of keys, near tiles are queries, far tiles their gradients, and ``acc`` is the gradient
    of values. Otherwise the own tile is of values, near and far change places, and ``acc`` is the gradient of keys.

    Weights go from the first group to the second through ``weight_tiles``, and nobody waits for such a buffer to be
    empty: when tiles of queries have come into the buffers of its number, the second group had done with those before.
    """
    BLOCK_M: gl.constexpr = near_tiles.shape[3]
    STAGES: gl.constexpr = near_tiles.shape[0]
    for i in range(begin, end):
        slot = count % STAGES
        product = product_transposed(own_tile, near_tiles, near_full, count, LAYOUT)  # (keys, queries)
        product = warpgroup_mma_wait(0, deps=[product])
        row_number = numbers.index(slot).load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(near_empty.index(slot))
        if VALUES:
            weights = power_of_two(product * scale - row_number[None, :])
            if MASKED:
                sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                query = i * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
                weights = gl.where(sees[:, None] <= query[None, :], weights, 0.0)
            weight_tiles.index(slot).store(weights)
            mbarrier.arrive(weights_full.index(slot))
            factor = as_factor(weights, far_tiles.dtype, OUT_LAYOUT)
        else:
            weights = weight_tiles.index(wait_full(weights_full, count)).load(LAYOUT)
            factor = as_factor(weights * (product - row_number[None, :]), far_tiles.dtype, OUT_LAYOUT)
        acc = warpgroup_mma(factor, matrix(far_tiles, wait_full(far_full, count)), acc, is_async=True)
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
        mbarrier.arrive(far_empty.index(slot))
        count += 1
    return acc, count
