"""Groups of warps that form attention's gradients on Hopper, in the manner of `warploom.device.hopper.attention`.

A group of warps owns 64 queries and loops over the keys, or 64 keys and loops over the queries of all heads that read
them. Products stay in flight across steps: while a tile's weights are computed, the gradients of the tile before are
added up.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from warploom.device.hopper import tma
from warploom.device.hopper.attention import (
    Options,
    Work,
    entry_of,
    first_key,
    key_steps,
    query_steps,
    rest_of,
    tile_of_step,
    tile_place,
    tiles_of,
    visible,
)
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    Ring,
    RowRing,
    Scheduler,
    as_factor,
    broadcast,
    broadcast_end,
    copy_own,
    copy_tile,
    matrix,
    next_tile,
    power_of_two,
    product_transposed,
    received,
    store_tile,
    tanh,
    wait_empty,
)

OWN_STAGES = gl.constexpr(2)  # tiles of keys and values: one that is worked on, and the next


class QueryGradients(NamedTuple):
    """What groups of warps that own queries share."""

    scheduler: Scheduler
    q_tiles: gl.shared_memory_descriptor  # one for each group, as is the next
    do_tiles: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    lse: gl.tensor
    delta: gl.tensor
    dq: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient
    options: Options


class KeyCopies(NamedTuple):
    """What the copying warp of a kernel that owns tiles of keys copies, and where to."""

    scheduler: Scheduler
    own_descs: gl.tuple  # of keys and values, if they are copied
    own_tiles: gl.tuple
    q_desc: gl.tensor
    do_desc: gl.tensor
    q: RowRing  # with the lse of each row
    do: RowRing  # with δ
    lse: gl.tensor
    delta: gl.tensor
    inverse: gl.tensor | None
    inverses: gl.shared_memory_descriptor | None  # (stages, rows), beside q's lse
    work: Work
    options: Options


@gluon.jit
def weights_of(
    logits, lse, n, first, work, options, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr
):
    """Weights of the keys ``n …`` for 64 queries, of which the first stands at the key ``first``.

    With a cap, times its derivative: these weights are only for gradients of logits.
    """
    if options.softcap is not None:
        logits = tanh(logits * scale)
        scale = options.softcap
    weights = power_of_two(logits * scale - lse[:, None])
    if MASKED:
        mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
        weights = gl.where(mask, weights, 0.0)
    if options.softcap is not None:
        weights = weights * (1.0 - logits * logits)
    return weights


@gluon.jit
def transposed_weights_of(
    logits, lse, m, first, scale, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    inverse=None, reach=None, softcap=None, CAUSAL: gl.constexpr = True,
):  # fmt: skip
    """Weights of 64 keys for the queries ``m …``, and these times the derivative of the cap.

    Query ``first`` is the first that sees the first key, unless all do before it, and the one ``reach`` behind it the last.
    """
    if softcap is not None:
        logits = tanh(logits * scale)
        scale = softcap
    weights = power_of_two(logits * scale - lse[None, :])
    if inverse is not None:
        weights = weights * inverse[None, :]
    if MASKED:
        sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        query = m + gl.arange(0, logits.shape[1], gl.SliceLayout(0, LAYOUT))
        if CAUSAL:
            weights = gl.where(sees[:, None] <= query[None, :], weights, 0.0)
        if reach is not None:
            weights = gl.where(query[None, :] <= (sees + reach)[:, None], weights, 0.0)
    slopes = weights
    if softcap is not None:
        slopes = weights * (1.0 - logits * logits)
    return weights, slopes


@gluon.jit
def kv_loop(
    dq, dlogits, count, q_tile, do_tile, k, v, lse, delta, begin, end, first, work, options, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of keys ``end − 1 … begin``, with ``dlogits`` of the tile before, number ``count − 1``."""
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    STAGES: gl.constexpr = k.tiles.shape[0]
    for i in range(end - begin):
        logits = product_transposed(q_tile, k, count, LAYOUT)
        before = (count + STAGES - 1) % STAGES
        dq = warpgroup_mma(dlogits, matrix(k.tiles, before), dq, is_async=True)
        dweights = product_transposed(do_tile, v, count, LAYOUT)
        logits = warpgroup_mma_wait(2, deps=[logits])
        n = first_key(end - 1 - i, work, options, BLOCK_N)
        weights = weights_of(logits, lse, n, first, work, options, scale, MASKED, CAUSAL, LAYOUT)
        dq, dlogits, dweights = warpgroup_mma_wait(0, deps=[dq, dlogits, dweights])
        mbarrier.arrive(k.empty.index(before))
        mbarrier.arrive(v.empty.index(count % STAGES))
        dlogits = as_factor(weights * (dweights - delta[:, None]), k.tiles.dtype, OUT_LAYOUT)
        count += 1
    return dq, dlogits, count


@gluon.jit
def kv_loop_in_turn(
    dq, count, own, q_tiles, do_tiles, k, v, lse, delta, begin, end, first, work, options, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """`kv_loop` with nothing in flight from one tile to the next: wide sums leave no registers for it."""
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    for i in range(end - begin):
        # count >> 30 is zero. The compiler, which cannot know, works out addresses here and not, for all registers, before.
        place = own + (count >> 30)
        logits = product_transposed(matrix(q_tiles, place), k, count, LAYOUT)
        dweights = product_transposed(matrix(do_tiles, place), v, count, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        n = first_key(end - 1 - i, work, options, BLOCK_N)
        weights = weights_of(logits, lse, n, first, work, options, scale, MASKED, CAUSAL, LAYOUT)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        mbarrier.arrive(v.empty.index(count % v.tiles.shape[0]))
        dlogits = as_factor(weights * (dweights - delta[:, None]), k.tiles.dtype, OUT_LAYOUT)
        slot = count % k.tiles.shape[0]
        dq = warpgroup_mma(dlogits, matrix(k.tiles, slot), dq, is_async=True)
        dq, dlogits = warpgroup_mma_wait(0, deps=[dq, dlogits])
        mbarrier.arrive(k.empty.index(slot))
        count += 1
    return dq, count


@gluon.jit
def load_row_values(values, row, m, tokens, other, LAYOUT: gl.constexpr):
    """One value for each of 64 queries of a head, from query ``m`` on; ``other`` behind the last query."""
    local = m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(values + row.to(gl.int64) * tokens + local, mask=local < tokens, other=other)


@gluon.jit
def compute_for_queries(
    own: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call
):
    """Group number ``own`` of warps of `QueryGradients`. ``IN_REGISTERS``: its queries and gradients stay there."""
    scheduler, q_tiles, do_tiles, k, v, lse, delta, result, work, scale, grad_scale, options = call
    GROUPS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k.tiles.shape[0]
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, _ = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        entry = entry_of(work, row // work.heads, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - work.tokens  # the last query stands at the last key
        row_lse = load_row_values(lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_delta = load_row_values(delta, row, m, work.tokens, 0.0, LAYOUT)
        if IN_REGISTERS:
            q_tile = matrix(q_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            do_tile = matrix(do_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            mbarrier.arrive(scheduler.empty.index(0))
        else:
            q_tile = matrix(q_tiles, own)
            do_tile = matrix(do_tiles, own)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        logits = product_transposed(q_tile, k, count, LAYOUT)
        dweights = product_transposed(do_tile, v, count, LAYOUT)
        logits, dweights = warpgroup_mma_wait(0, deps=[logits, dweights])
        mbarrier.arrive(v.empty.index(count % STAGES))
        n = first_key(tile_of_step(0, begin, end, options), entry, options, BLOCK_N)
        begin, end = rest_of(begin, end, options)
        weights = weights_of(logits, row_lse, n, first, entry, options, scale, True, CAUSAL, LAYOUT)
        dlogits = as_factor(weights * (dweights - row_delta[:, None]), k.tiles.dtype, OUT_LAYOUT)
        count += 1
        if CAUSAL or options.window is not None:  # otherwise the first step alone has a mask
            dq, dlogits, count = kv_loop(
                dq, dlogits, count, q_tile, do_tile, k, v, row_lse, row_delta, full, end, first, entry, options, scale,
                True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        dq, dlogits, count = kv_loop(
            dq, dlogits, count, q_tile, do_tile, k, v, row_lse, row_delta, low, full, first, entry, options, scale,
            False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if options.window is not None:
            dq, dlogits, count = kv_loop(
                dq, dlogits, count, q_tile, do_tile, k, v, row_lse, row_delta, begin, low, first, entry, options, scale,
                True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        if not IN_REGISTERS:
            mbarrier.arrive(scheduler.empty.index(0))
        before = (count + STAGES - 1) % STAGES
        dq = warpgroup_mma(dlogits, matrix(k.tiles, before), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(k.empty.index(before))
        tma.store_wait(0)  # until the tile before has left its buffer
        batch, head = row // work.heads, row % work.heads
        store_tile(result, dq * grad_scale, own, split, batch, head, m, work.tokens, SPLIT, OUT_LAYOUT)
        done += 1
        tile, _ = received(scheduler, done)
    tma.store_wait(0)


@gluon.jit
def compute_for_wide_queries(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call):
    """`compute_for_queries` for more than 128 features; results leave through the buffers of the queries."""
    scheduler, q_tiles, do_tiles, k, v, lse, delta, result, work, scale, grad_scale, options = call
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = q_tiles.shape[0] * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, _ = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        entry = entry_of(work, row // work.heads, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - work.tokens  # the last query stands at the last key
        row_lse = load_row_values(lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_delta = load_row_values(delta, row, m, work.tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        if options.window is not None or options.seqused_k is not None:
            dq, count = kv_loop_in_turn(
                dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, begin, begin + 1, first, entry, options,
                scale, True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
            begin += 1
        dq, count = kv_loop_in_turn(
            dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, full, end, first, entry, options, scale,
            True, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        dq, count = kv_loop_in_turn(
            dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, low, full, first, entry, options, scale,
            False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if options.window is not None:
            dq, count = kv_loop_in_turn(
                dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, begin, low, first, entry, options, scale,
                True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        batch, head = row // work.heads, row % work.heads
        store_tile(result, dq * grad_scale, own, split, batch, head, m, work.tokens, SPLIT, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(scheduler.empty.index(0))
        done += 1
        tile, _ = received(scheduler, done)


@gluon.jit
def copy_for_keys(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr, copies):
    """The copying warp of a kernel that owns tiles of keys. Rows' numbers travel with their tile: lse with queries, δ with gradients.

    Queries of float32, in ``TERMS``, come from the last to the first: see `kernels.backward.query_loop`.
    """
    scheduler, own_descs, own_tiles, q_desc, do_desc, q, do, lse, delta, inverse, inverses, work, options = copies
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = work.heads // work.group
    batch_size = work.rows // key_heads
    tiles = tiles_of(work)
    tile = gl.program_id(0)
    count = 0
    done = 0
    local = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        block, row, split = tile_place(tile, work, False)
        batch, key_head = row // key_heads, row % key_heads
        entry = entry_of(work, batch, options)
        begin, _, _, end = query_steps(block, split, entry, options, CAUSAL, BLOCK_N, BLOCK_M)
        copy_own(
            own_descs, own_tiles, batch, key_head, block * BLOCK_N, scheduler.full, slot, GROUPS, batch_size, TERMS
        )
        for i in range(work.group * (end - begin)):
            member = i // (end - begin)
            head = key_head * work.group + member
            if TERMS > 1:
                m = (end - 1 - i + member * (end - begin)) * BLOCK_M
            else:
                m = (begin + i - member * (end - begin)) * BLOCK_M
            mask = m + local < work.tokens
            offsets = (batch * work.heads + head).to(gl.int64) * work.tokens + m + local
            row_lse = gl.load(lse + offsets, mask=mask, other=float("inf"))
            if inverse is not None:
                row_inverse = gl.load(inverse + offsets, mask=mask, other=0.0)
            row_delta = gl.load(delta + offsets, mask=mask, other=0.0)
            stage = wait_empty(q.empty, count)
            q.row_values.index(stage).store(row_lse)
            if inverse is not None:
                inverses.index(stage).store(row_inverse)
            copy_tile(q_desc, batch, head, m, q, count, batch_size, TERMS)
            do.row_values.index(wait_empty(do.empty, count)).store(row_delta)
            copy_tile(do_desc, batch, head, m, do, count, batch_size, TERMS)
            count += 1
        done += 1
        tile = next_tile(scheduler, tiles)
    broadcast_end(scheduler, tile, done)


@gluon.jit
def query_loop(
    dk, dv, count, k_tile, v_tile, q, do, begin, end, first, scale,
    MASKED: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
    reach=None, softcap=None, CAUSAL: gl.constexpr = True,
):  # fmt: skip
    """Loop over tiles of queries ``begin … end`` of one head; ``first`` and ``reach`` as in `transposed_weights_of`."""
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    for i in range(begin, end):
        slot = count % STAGES
        logits = product_transposed(k_tile, q, count, LAYOUT)  # (keys, queries)
        dweights = product_transposed(v_tile, do, count, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        row_lse = q.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = transposed_weights_of(
            logits, row_lse, i * BLOCK_M, first, scale, MASKED, LAYOUT, None, reach, softcap, CAUSAL
        )
        factor = as_factor(weights, dtype, OUT_LAYOUT)
        dv = warpgroup_mma(factor, matrix(do.tiles, slot), dv, is_async=True)
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        row_delta = do.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
        dlogits = as_factor(slopes * (dweights - row_delta[None, :]), dtype, OUT_LAYOUT)
        dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)
        dv, factor = warpgroup_mma_wait(1, deps=[dv, factor])
        mbarrier.arrive(do.empty.index(slot))
        dk, dlogits = warpgroup_mma_wait(0, deps=[dk, dlogits])
        mbarrier.arrive(q.empty.index(slot))
        count += 1
    return dk, dv, count
