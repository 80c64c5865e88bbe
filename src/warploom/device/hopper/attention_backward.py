"""Groups of warps that form attention's gradients on Hopper, in the manner of `warploom.device.hopper.attention`.

A group of warps owns 64 queries and loops over the keys, or 64 keys and loops over the queries of all heads that read
them. Products stay in flight across steps: while a tile's weights are computed, the gradients of the tile before are
added up.
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

from warploom.device.hopper import tma
from warploom.device.hopper.attention import (
    Options,
    Work,
    entry_of,
    first_key,
    kept,
    kept_as_factor,
    key_steps,
    query_steps,
    rest_of,
    tile_of_step,
    tile_place,
    tiles_of,
    visible,
)
from warploom.device.hopper.ordered import count_added, wait_until_added
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    Ring,
    RowRing,
    Scheduler,
    as_factor,
    barriers,
    broadcast,
    broadcast_end,
    copy_own,
    copy_tile,
    init_each,
    matrix,
    next_tile,
    power_of_two,
    product_transposed,
    received,
    store_tile,
    take_tile,
    wait_empty,
)
from warploom.device.hopper.softcap import UNSEEN, capped, capped_weights

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
    own_descs: gl.tuple  # of keys and values
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
    logits, lse, n, first, work, options, scale, dtype: gl.constexpr,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of the keys ``n …`` for 64 queries, of which the first stands at the key ``first``.

    With a cap, times its derivative: these weights are only for gradients of logits.
    """
    if options.softcap is not None:
        if MASKED:
            mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
            logits = gl.where(mask, logits, UNSEEN)
        _, weights = capped_weights(logits, lse[:, None], scale, options.softcap, dtype)
    else:
        weights = power_of_two(logits * scale - lse[:, None])
        if MASKED:
            mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
            weights = gl.where(mask, weights, 0.0)
    return weights


@gluon.jit
def visible_weights(
    weights, m, first, reach, used, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, UNSEEN: gl.constexpr = 0.0
):
    """Weights of 64 keys for the queries ``m …``, zero (or ``UNSEEN``) where these do not see them.

    Query ``first`` is the first that sees the first key, unless all do before it, and the one ``reach`` behind it the last.
    Of the keys, so many are ``used``.
    """
    sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    query = m + gl.arange(0, weights.shape[1], gl.SliceLayout(0, LAYOUT))
    if CAUSAL:
        weights = gl.where(sees[:, None] <= query[None, :], weights, UNSEEN)
    if reach is not None:
        weights = gl.where(query[None, :] <= (sees + reach)[:, None], weights, UNSEEN)
    if used is not None:
        weights = gl.where((gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < used)[:, None], weights, UNSEEN)
    return weights


@gluon.jit
def transposed_weights_of(
    logits, lse, m, first, scale, dtype: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    inverse=None, reach=None, softcap=None, CAUSAL: gl.constexpr = True,
):  # fmt: skip
    """Weights of 64 keys for the queries ``m …``, rounded if there is a cap, and these times its derivative; see `visible_weights`."""
    if softcap is not None:
        if MASKED:
            logits = visible_weights(logits, m, first, reach, None, CAUSAL, LAYOUT, UNSEEN)
        weights, slopes = capped_weights(logits, lse[None, :], scale, softcap, dtype)
    else:
        weights = power_of_two(logits * scale - lse[None, :])
        if inverse is not None:
            weights = weights * inverse[None, :]
        if MASKED:
            weights = visible_weights(weights, m, first, reach, None, CAUSAL, LAYOUT)
        slopes = weights
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
        factor = kept_as_factor(dlogits, k.tiles.dtype, OUT_LAYOUT)
        dq = warpgroup_mma(factor, matrix(k.tiles, before), dq, is_async=True)
        dweights = product_transposed(do_tile, v, count, LAYOUT)
        logits = warpgroup_mma_wait(2, deps=[logits])
        n = first_key(end - 1 - i, work, options, BLOCK_N)
        weights = weights_of(logits, lse, n, first, work, options, scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT)
        dq, factor, dweights = warpgroup_mma_wait(0, deps=[dq, factor, dweights])
        mbarrier.arrive(k.empty.index(before))
        mbarrier.arrive(v.empty.index(count % STAGES))
        dlogits = kept(weights * (dweights - delta[:, None]), k.tiles.dtype)
        count += 1
    return dq, dlogits, count


@gluon.jit
def kv_loop_unpipelined(
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
        weights = weights_of(logits, lse, n, first, work, options, scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT)
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
        weights = weights_of(logits, row_lse, n, first, entry, options, scale, k.tiles.dtype, True, CAUSAL, LAYOUT)
        dlogits = kept(weights * (dweights - row_delta[:, None]), k.tiles.dtype)
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
        factor = kept_as_factor(dlogits, k.tiles.dtype, OUT_LAYOUT)
        dq = warpgroup_mma(factor, matrix(k.tiles, before), dq, is_async=True)
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
            dq, count = kv_loop_unpipelined(
                dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, begin, begin + 1, first, entry, options,
                scale, True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
            begin += 1
        dq, count = kv_loop_unpipelined(
            dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, full, end, first, entry, options, scale,
            True, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        dq, count = kv_loop_unpipelined(
            dq, count, own, q_tiles, do_tiles, k, v, row_lse, row_delta, low, full, first, entry, options, scale,
            False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if options.window is not None:
            dq, count = kv_loop_unpipelined(
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
def query_in_order(i, end, group):
    """The tile of queries of step ``i`` from ``end − 1`` down, each for all heads of a group, and which of these.

    Programs take tiles of keys from the first to the last, and add to a tile of queries in that order. Each goes over the
    queries from the last on, which all of them see, one step behind the one before: so none waits long, and what they read
    and add to is in the L2 cache. With one head of a group after the other, the second would begin when the longest loop
    of the first has ended.
    """
    return end - 1 - i // group, i % group


@gluon.jit
def copy_for_keys(
    GROUPS: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr, copies,
    ORDERED: gl.constexpr = False,
):  # fmt: skip
    """The copying warp of a kernel that owns tiles of keys. Rows' numbers travel with their tile: lse with queries, δ with gradients.

    Queries of float32, in ``TERMS``, come from the last to the first: see `kernels.backward.query_loop`.
    """
    scheduler, own_descs, own_tiles, q_desc, do_desc, q, do, lse, delta, inverse, inverses, work, options = copies
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = work.heads // work.group
    batch_size = work.rows // key_heads
    tiles = tiles_of(work)
    if ORDERED:
        tile = take_tile(scheduler)
    else:
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
            if ORDERED:
                m, member = query_in_order(i, end, work.group)
                head = key_head * work.group + member
                m = m * BLOCK_M
            else:
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
        if ORDERED:
            tile = take_tile(scheduler)
        else:
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
            logits, row_lse, i * BLOCK_M, first, scale, dtype, MASKED, LAYOUT, None, reach, softcap, CAUSAL
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


class Exchange(NamedTuple):
    """How groups of warps that own keys form the gradient of queries.

    A group works out the gradients of the logits of its 64 keys, and the gradient of queries takes those of all keys of a
    tile: groups exchange them in shared memory, and each forms its part, 64 queries times 64 features.
    """

    dlogits: gl.shared_memory_descriptor  # (2 · GROUPS, 64, queries), transposed
    full: gl.shared_memory_descriptor  # two barriers, as is the next
    empty: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor  # (GROUPS, 1, 1, 64, D), as is the next
    v_tiles: gl.shared_memory_descriptor
    parts: gl.shared_memory_descriptor  # (stages · GROUPS, 1, 1, 64, 64) float32
    part_full: gl.shared_memory_descriptor  # a barrier for each, as is the next
    part_empty: gl.shared_memory_descriptor


@gluon.jit
def new_exchange(dlogits, k_tiles, v_tiles, parts):
    """An exchange through these buffers, with barriers of its own."""
    GROUPS: gl.constexpr = k_tiles.shape[0]
    full, empty = barriers(2), barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=GROUPS)
        mbarrier.init(empty.index(i), count=GROUPS)
    part_full, part_empty = barriers(parts.shape[0]), barriers(parts.shape[0])
    init_each(part_full)
    init_each(part_empty)
    return Exchange(dlogits, full, empty, k_tiles, v_tiles, parts, part_full, part_empty)


@gluon.jit
def clear_unused(tile, used):
    """Make rows of a tile in shared memory zero where keys are not used: there may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    rows = tile.load(LAYOUT)
    tile.store(gl.where((key < used)[:, None], rows, gl.zeros_like(rows)))


@gluon.jit
def share_dlogits(exchange, dlogits, count, own: gl.constexpr):
    """Give the gradients of a group's logits, of the tile number ``count`` of queries, to all groups."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    stage = wait_empty(exchange.empty, count)
    exchange.dlogits.index(stage * GROUPS + own).store(dlogits)
    fence_async_shared()
    mbarrier.arrive(exchange.full.index(stage))


@gluon.jit
def query_gradient(exchange, count, own: gl.constexpr, zero, there):
    """Start to form a group's part of the gradient of the tile number ``count`` of queries, of anything if it is not ``there``."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = count & 1
    mbarrier.wait(exchange.full.index(stage), count // 2 & 1, pred=there)
    dq = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    for group in gl.static_range(GROUPS):
        dlogits = exchange.dlogits.index(stage * GROUPS + group)
        keys = matrix(exchange.k_tiles, group + zero)
        if dlogits.shape[1] > ROWS:
            dlogits = dlogits.slice(own * ROWS, ROWS, 1)
        else:
            keys = keys.slice(own * ROWS, ROWS, 1)
        dq = warpgroup_mma(dlogits.permute([1, 0]), keys, dq, use_acc=group > 0, is_async=True)
    return dq


@gluon.jit
def publish_part(exchange, dq, count, own: gl.constexpr):
    """Give a group's part of the gradient of the tile number ``count`` of queries to the warp that adds it up."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    STAGES: gl.constexpr = exchange.parts.shape[0] // GROUPS
    mbarrier.arrive(exchange.empty.index(count & 1))
    place = count % STAGES * GROUPS + own
    mbarrier.wait(exchange.part_empty.index(place), (count // STAGES & 1) ^ 1)
    matrix(exchange.parts, place).store(dq)
    fence_async_shared()
    mbarrier.arrive(exchange.part_full.index(place))


@gluon.jit
def all_gradients_loop(
    dk, dv, count, q, do, exchange, begin, full, high, end, heads, first, used, reach, scale, softcap,
    own: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of queries ``end − 1 … begin``, each of all ``heads``, for all gradients.

    Those before ``full`` and from ``high`` on have masks; ``first``, ``reach`` and ``used`` are as in
    `visible_weights`. A tile's gradient of queries is formed one step later, when the other group's logits are there, and
    leaves while the next logits are on their way.
    """
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    MASKS: gl.constexpr = CAUSAL or reach is not None or used is not None
    # With 64 features registers are short: what is needed of the cap's derivative is formed at once.
    CAP_AT_ONCE: gl.constexpr = softcap is not None and dk.shape[1] <= ROWS
    start = count
    steps = heads * (end - begin)
    if steps > 0:
        # count >> 30 is zero. The compiler, which cannot know, works out addresses in the loop and not before.
        k_tile = matrix(exchange.k_tiles, own + (count >> 30))
        logits = product_transposed(k_tile, q, count, LAYOUT)  # (keys, queries)
        logits = warpgroup_mma_wait(0, deps=[logits])
        m = end - 1
        member = m * 0
        for i in range(steps):
            slot = count % STAGES
            zero = count >> 30
            dweights = product_transposed(matrix(exchange.v_tiles, own + zero), do, count, LAYOUT)
            row_lse = q.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
            if CAP_AT_ONCE:
                if MASKS:
                    if (m < full) | (m >= high):
                        logits = visible_weights(logits, m * BLOCK_M, first, reach, used, CAUSAL, LAYOUT, UNSEEN)
                logits, weights = capped_weights(logits, row_lse[None, :], scale, softcap, dtype)
                factor = gl.convert_layout(logits, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
            else:
                if softcap is not None:
                    logits = capped(logits, scale, softcap, 0.0, False)
                    weights = power_of_two(logits - row_lse[None, :])
                else:
                    weights = power_of_two(logits * scale - row_lse[None, :])
                if MASKS:
                    if (m < full) | (m >= high):
                        weights = visible_weights(weights, m * BLOCK_M, first, reach, used, CAUSAL, LAYOUT)
                factor = as_factor(weights, dtype, OUT_LAYOUT)
            dv = warpgroup_mma(factor, matrix(do.tiles, slot), dv, is_async=True)
            dweights = warpgroup_mma_wait(1, deps=[dweights])
            row_delta = do.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
            if softcap is not None and not CAP_AT_ONCE:
                weights = weights * (1.0 - logits * logits * (1.0 / (softcap * softcap)))
            rounded = (weights * (dweights - row_delta[None, :])).to(dtype)
            share_dlogits(exchange, rounded, count, own)
            dlogits = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
            dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)
            dv, factor = warpgroup_mma_wait(1, deps=[dv, factor])
            mbarrier.arrive(do.empty.index(slot))
            dq = query_gradient(exchange, count - 1, own, zero, count > start)
            # Behind the last tile, that tile's again: a branch would end what is in flight.
            more = gl.minimum(steps - 1 - i, 1)
            following = (count + more) % STAGES
            mbarrier.wait(q.full.index(following), (count + more) // STAGES & 1, pred=more > 0)
            q_tile = matrix(q.tiles, following).permute([1, 0])
            zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
            keys = matrix(exchange.k_tiles, own + zero)
            logits = warpgroup_mma(keys, q_tile, zeros, use_acc=False, is_async=True)
            dk, dlogits, dq = warpgroup_mma_wait(1, deps=[dk, dlogits, dq])
            if count > start:
                publish_part(exchange, dq, count - 1, own)
            logits = warpgroup_mma_wait(0, deps=[logits])
            mbarrier.arrive(q.empty.index(slot))
            count += 1
            member += 1
            if member == heads:
                m -= 1
                member = 0
        dq = query_gradient(exchange, count - 1, own, count >> 30, count > start)
        dq = warpgroup_mma_wait(0, deps=[dq])
        publish_part(exchange, dq, count - 1, own)
    return dk, dv, count


class Additions(NamedTuple):
    """What a warp that adds up gradients of queries works on."""

    scheduler: Scheduler
    parts: gl.shared_memory_descriptor  # as in `Exchange`, as are the next two
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    added: gl.tensor  # a descriptor of (B, H, N, D) float32, with boxes of (1, 1, 64, 64)
    tiles_added: (
        gl.tensor
    )  # (GROUPS, B, H, N) int32, zero: at a tile's first query, how many tiles of keys are added
    work: Work
    options: Options


@gluon.jit
def add_query_gradients(own: gl.constexpr, GROUPS: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, call):
    """The warp that adds up the part of the gradient of queries that group number ``own`` forms.

    It alone waits for other programs; its group waits when a part is ready and the buffer is not. Tiles of keys are added
    in their own order, the first of them is stored: memory may hold anything.
    """
    scheduler, parts, full, empty, added, tiles_added, work, options = call
    STAGES: gl.constexpr = full.shape[0] // GROUPS
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = work.heads // work.group
    batch_size = work.rows // key_heads
    tiles = tiles_of(work)
    count = 0
    done = 0
    tile, slot = received(scheduler, done, 1)
    while tile < tiles:
        mbarrier.arrive(scheduler.empty.index(slot))
        block, row, _ = tile_place(tile, work, False)
        batch, key_head = row // key_heads, row % key_heads
        entry = entry_of(work, batch, options)
        begin, _, _, end = query_steps(block, 0, entry, options, CAUSAL, BLOCK_N, BLOCK_M)
        for i in range(work.group * (end - begin)):
            m, member = query_in_order(i, end, work.group)
            m = m * BLOCK_M
            head = key_head * work.group + member
            before = tiles_before(block, m, entry, options, BLOCK_N)
            row_of_count = (own * batch_size + batch) * work.heads + head
            counter = tiles_added + row_of_count.to(gl.int64) * work.tokens + m
            stage = count % STAGES * GROUPS + own
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            wait_until_added(counter, before)
            if BLOCK_M > ROWS:
                add_part(added, batch, head, m + own * ROWS, 0, parts.index(stage), before)
            else:
                add_part(added, batch, head, m, own * ROWS, parts.index(stage), before)
            tma.store_wait(0)
            mbarrier.arrive(empty.index(stage))
            tma.stored()
            count_added(counter)
            count += 1
        done += 1
        tile, slot = received(scheduler, done, 1)


@gluon.jit
def add_part(desc, batch, head, row, feature, tile, before):
    """Add a tile to device memory, or store it if it is the first."""
    if before == 0:
        tma.async_copy_shared_to_global(desc, [batch, head, row, feature], tile)
    else:
        tma.async_add(desc, [batch, head, row, feature], tile)


@gluon.jit
def tiles_before(block, m, work, options, BLOCK_N: gl.constexpr):
    """How many tiles of keys come before this one at the queries ``m …``: those between that `query_steps` has for them."""
    first = block * 0
    if options.window is not None:
        first = gl.maximum(m + work.keys - work.tokens - options.window.left, 0) // BLOCK_N
    return block - first
