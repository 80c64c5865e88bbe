"""Groups of warps that own 64 keys each, and form all gradients with five products."""

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
from warploom.device.hopper.attention import Options, Work, entry_of, query_steps, tile_place, tiles_of
from warploom.device.hopper.attention_backward.exchange import (
    Exchange,
    clear_unused,
    publish_part,
    query_gradient,
    share_dlogits,
    stage_of,
)
from warploom.device.hopper.attention_backward.weights import visible_weights
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    RowRing,
    Scheduler,
    as_factor,
    matrix,
    power_of_two,
    product_layout,
    product_transposed,
    read,
    received,
    store_tile,
    wait_empty,
)
from warploom.device.hopper.softcap import HIDDEN, capped, capped_weights


class AllGradients(NamedTuple):
    """What groups of warps that own keys share where they form all gradients."""

    scheduler: Scheduler
    q: RowRing  # with the lse of each row
    do: RowRing  # with δ
    exchange: Exchange
    dk: Result
    dv: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient of keys
    options: Options


@gluon.jit
def weights_and_slopes(
    logits, lses, m, full, high, first, used, reach, scale, softcap, dtype: gl.constexpr,
    CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of 64 keys for tile number ``m`` of queries, rounded if there is a cap, and these times the cap's derivative.

    Tiles before ``full`` and from ``high`` on have masks. ``lses`` are in shared memory: with a cap they come into registers
    behind its branches.
    """
    BLOCK_M: gl.constexpr = logits.shape[1]
    MASKS: gl.constexpr = CAUSAL or reach is not None or used is not None
    if softcap is not None:
        logits = capped(logits, scale, 1.0, 0.0, False)
        if MASKS:
            if (m < full) | (m >= high):
                logits = visible_weights(logits, m * BLOCK_M, first, reach, used, CAUSAL, LAYOUT, HIDDEN)
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = capped_weights(logits, row_lse[None, :], softcap, dtype)
    else:
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights = power_of_two(logits * scale - row_lse[None, :])
        if MASKS:
            if (m < full) | (m >= high):
                weights = visible_weights(weights, m * BLOCK_M, first, reach, used, CAUSAL, LAYOUT)
        slopes = weights
    return weights, slopes


@gluon.jit
def all_gradients_loop(
    dk, dv, count, q, do, exchange, begin, full, high, end, heads, first, used, reach, scale, softcap,
    own: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of queries ``end − 1 … begin``, each of all ``heads``, for all gradients.

    Those before ``full`` and from ``high`` on have masks; ``first``, ``reach`` and ``used`` are as in
    `visible_weights`. A tile's gradient of queries is formed one step later, when the other group's gradients of logits are
    there, and leaves while gradients of keys and the next logits are computed.
    """
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    start = count
    steps = heads * (end - begin)
    if steps > 0:
        # count >> 30 is zero. The compiler, which cannot know, works out addresses in the loop and not before.
        k_tile = matrix(exchange.k_tiles, own + (count >> 30))
        logits = product_transposed((k_tile,), q, count, LAYOUT)  # (keys, queries)
        logits = warpgroup_mma_wait(0, deps=[logits])
        m = end - 1
        member = m * 0
        for i in range(steps):
            slot, phase = stage_of(count, STAGES)
            zero = count >> 30
            values = matrix(exchange.v_tiles, own + zero)
            mbarrier.wait(do.full.index(slot), phase)
            do_tile = matrix(do.tiles, slot)
            zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
            dweights = warpgroup_mma(values, do_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
            weights, slopes = weights_and_slopes(
                logits, q.row_values.index(slot), m, full, high, first, used, reach, scale, softcap, dtype, CAUSAL, LAYOUT,
            )  # fmt: skip
            factor = as_factor(weights, dtype, OUT_LAYOUT)
            dv = warpgroup_mma(factor, do_tile, dv, is_async=True)
            dweights = warpgroup_mma_wait(1, deps=[dweights])
            row_delta = do.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
            rounded = (slopes * (dweights - row_delta[None, :])).to(dtype)
            share_dlogits(exchange, rounded, count, own)
            # The first of these products, so that it leaves beside the others.
            dq = query_gradient(exchange, count - 1, own, zero, count > start)
            dlogits = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
            dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)
            dv, factor = warpgroup_mma_wait(2, deps=[dv, factor])
            mbarrier.arrive(do.empty.index(slot))
            # Behind the last tile, that tile's again: a branch would end what is in flight.
            more = gl.minimum(steps - 1 - i, 1)
            following, phase = stage_of(count + more, STAGES)
            mbarrier.wait(q.full.index(following), phase, pred=more > 0)
            q_tile = matrix(q.tiles, following).permute([1, 0])
            keys = matrix(exchange.k_tiles, own + zero)
            logits = warpgroup_mma(keys, q_tile, zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(2, deps=[dq])
            if count > start:
                publish_part(exchange, dq, count - 1, own)
            logits, dk, dlogits = warpgroup_mma_wait(0, deps=[logits, dk, dlogits])
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


@gluon.jit
def compute_all(own: gl.constexpr, CAUSAL: gl.constexpr, ENDS: gl.constexpr, call):
    """Group number ``own`` of warps of `hopper_backward_kernel`. Results leave by the buffers of its keys and values.

    What is behind the last key is zeros, and so are its logits: where all others are far below, its weight is infinite, and
    times zero it is NaN. If such a tile ``ENDS`` within, and no other mask hides that, weights there are zero.
    """
    scheduler, q, do, exchange, dk_result, dv_result, work, scale, grad_scale, options = call
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    D: gl.constexpr = q.tiles.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = work.heads // work.group
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, _ = tile_place(tile, work, False)
        entry = entry_of(work, row // key_heads, block * BLOCK_N, options)
        begin, full, high, end = query_steps(block, 0, entry, options, CAUSAL, BLOCK_N, BLOCK_M)
        first = block * BLOCK_N + own * ROWS - (entry.keys - entry.tokens) - work.right
        reach = None
        if options.window is not None:
            reach = work.right + options.window.left
        used = None
        if ENDS or options.seqused_k is not None:
            used = entry.keys - block * BLOCK_N - own * ROWS
            if used < ROWS:
                if options.seqused_k is not None:
                    clear_unused(matrix(exchange.k_tiles, own), used)
                    clear_unused(matrix(exchange.v_tiles, own), used)
                    fence_async_shared()
                full = high
        dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dk, dv, count = all_gradients_loop(
            dk, dv, count, q, do, exchange, begin, full, high, end, work.group, first, used, reach, scale,
            options.softcap, own, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        # Worked out again rather than held in registers.
        block, row, _ = tile_place(read(scheduler, slot), work, False)
        batch, head = row // key_heads, row % key_heads
        n = block * BLOCK_N + own * ROWS
        store_tile(dv_result, dv, own, 0, batch, head, n, work.keys, False, OUT_LAYOUT)
        if count > 0:  # the other group has read the keys
            wait_empty(exchange.empty, count + 1)
        store_tile(dk_result, dk * grad_scale, own, 0, batch, head, n, work.keys, False, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(scheduler.empty.index(slot))
        done += 1
        tile, slot = received(scheduler, done)
