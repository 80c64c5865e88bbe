"""Groups of warps that own 64 queries each, and loop over the keys for the gradient of these queries.

While a tile's weights are computed, the gradient of the tile before is added up.
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
    kept,
    kept_as_factor,
    key_steps,
    rest_of,
    tile_of_step,
    tile_place,
    tiles_of,
)
from warploom.device.hopper.attention_backward.weights import load_row_values, weights_of
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    Ring,
    Scheduler,
    as_factor,
    empty_sum,
    finished,
    matrix,
    pieces_of,
    product_layout,
    product_transposed,
    received,
    store_pieces,
    store_tile,
    sum_of_pieces,
)


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


@gluon.jit
def kv_loop(
    dq, dlogits, count, q_pieces, do_tile, k, v, lse, delta, begin, end, first, work, options, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of keys ``end − 1 … begin``, with ``dlogits`` of the tile before, number ``count − 1``."""
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    STAGES: gl.constexpr = k.full.shape[0]
    PIECES: gl.constexpr = len(dq)
    for i in range(end - begin):
        logits = product_transposed(q_pieces, k, count, LAYOUT)
        before = (count + STAGES - 1) % STAGES
        factor = kept_as_factor(dlogits, k.tiles.dtype, OUT_LAYOUT)
        dq = sum_of_pieces(dq, factor, k.tiles, before)
        dweights = product_transposed((do_tile,), v, count, LAYOUT)
        logits = warpgroup_mma_wait(PIECES + 1, deps=[logits])
        n = first_key(end - 1 - i, work, options, BLOCK_N)
        weights = weights_of(logits, lse, n, first, work, options, scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT)
        done = warpgroup_mma_wait(0, deps=dq + (factor, dweights))
        dq, dweights = done[:PIECES], done[PIECES + 1]
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
        # count >> 30 is zero, which the compiler cannot know: it computes addresses here, and holds none in registers.
        place = own + (count >> 30)
        logits = product_transposed((matrix(q_tiles, place),), k, count, LAYOUT)
        dweights = product_transposed((matrix(do_tiles, place),), v, count, LAYOUT)
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
def compute_for_queries(
    own: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call
):
    """Group number ``own`` of warps of `QueryGradients`. ``IN_REGISTERS``: its queries and gradients stay there."""
    scheduler, q_tiles, do_tiles, k, v, lse, delta, result, work, scale, grad_scale, options = call
    GROUPS: gl.constexpr = do_tiles.shape[0]
    STAGES: gl.constexpr = k.full.shape[0]
    PIECES: gl.constexpr = k.tiles.shape[0] // STAGES
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, _ = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        entry = entry_of(work, row // work.heads, block * BLOCK_M, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - entry.tokens  # the last query stands at the last key
        row_lse = load_row_values(lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_delta = load_row_values(delta, row, m, work.tokens, 0.0, LAYOUT)
        if IN_REGISTERS:
            q_pieces = (matrix(q_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
            do_tile = matrix(do_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            mbarrier.arrive(scheduler.empty.index(0))
        else:
            q_pieces = pieces_of(q_tiles, own, PIECES)
            do_tile = matrix(do_tiles, own)
        dq = empty_sum(PIECES, D, OUT_LAYOUT)
        logits = product_transposed(q_pieces, k, count, LAYOUT)
        dweights = product_transposed((do_tile,), v, count, LAYOUT)
        logits, dweights = warpgroup_mma_wait(0, deps=[logits, dweights])
        mbarrier.arrive(v.empty.index(count % STAGES))
        n = first_key(tile_of_step(0, begin, end, options), entry, options, BLOCK_N)
        begin, end = rest_of(begin, end, options)
        weights = weights_of(logits, row_lse, n, first, entry, options, scale, k.tiles.dtype, True, CAUSAL, LAYOUT)
        dlogits = kept(weights * (dweights - row_delta[:, None]), k.tiles.dtype)
        count += 1
        if CAUSAL or options.window is not None:  # otherwise the first step alone has a mask
            dq, dlogits, count = kv_loop(
                dq, dlogits, count, q_pieces, do_tile, k, v, row_lse, row_delta, full, end, first, entry, options, scale,
                True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        dq, dlogits, count = kv_loop(
            dq, dlogits, count, q_pieces, do_tile, k, v, row_lse, row_delta, low, full, first, entry, options, scale,
            False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if options.window is not None:
            dq, dlogits, count = kv_loop(
                dq, dlogits, count, q_pieces, do_tile, k, v, row_lse, row_delta, begin, low, first, entry, options, scale,
                True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        if not IN_REGISTERS:
            mbarrier.arrive(scheduler.empty.index(0))
        before = (count + STAGES - 1) % STAGES
        factor = kept_as_factor(dlogits, k.tiles.dtype, OUT_LAYOUT)
        dq = sum_of_pieces(dq, factor, k.tiles, before)
        dq = finished(dq)
        mbarrier.arrive(k.empty.index(before))
        tma.store_wait(0)  # until the tile before has left its buffer
        batch, head = row // work.heads, row % work.heads
        if PIECES > 1:
            store_pieces(result, dq, grad_scale, split, batch, head, m, work.tokens, OUT_LAYOUT)
        else:
            store_tile(result, dq[0] * grad_scale, own, split, batch, head, m, work.tokens, SPLIT, OUT_LAYOUT)
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
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, _ = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        entry = entry_of(work, row // work.heads, block * BLOCK_M, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - entry.tokens  # the last query stands at the last key
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
