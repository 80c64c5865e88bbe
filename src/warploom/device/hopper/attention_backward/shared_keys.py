"""Two groups of warps that share 64 keys: one adds up the gradient of their values, the other that of the keys."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from warploom.device.hopper import tma
from warploom.device.hopper.attention import Options, Work, entry_of, query_steps, tile_place, tiles_of
from warploom.device.hopper.attention_backward.keys import used_rows
from warploom.device.hopper.attention_backward.shared_weights import Weights
from warploom.device.hopper.attention_backward.terms import add_product, product_of_terms
from warploom.device.hopper.attention_backward.weights import transposed_weights_of
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    RowRing,
    Scheduler,
    pieces_of,
    product_layout,
    read,
    received,
    store_tile,
    wait_full,
)


class SharedKeyGradients(NamedTuple):
    """What the two groups of warps with the same 64 keys share."""

    scheduler: Scheduler
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    q: RowRing  # with the lse of each row
    do: RowRing  # with δ
    inverses: gl.shared_memory_descriptor | None  # (stages, rows), beside q's lse; of several terms
    weights: Weights
    dk: Result
    dv: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient of keys
    options: Options


@gluon.jit
def query_loop_for_one(
    acc, count, own_tiles, slot, near, far, inverses, weights, begin, end, first, reach, scale, softcap,
    VALUES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr,
    LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of queries ``begin … end`` of one head for one of two gradients; the other group forms the other.

    With ``VALUES`` the own tile is of keys, near tiles are queries, far tiles their gradients, and ``acc`` is the gradient
    of values. Otherwise the own tile is of values, near and far change places, and ``acc`` is the gradient of keys. Of
    several terms the last tile comes first.
    """
    BLOCK_M: gl.constexpr = near.tiles.shape[3]
    for i in range(begin if TERMS == 1 else 0, end if TERMS == 1 else end - begin):
        stage = wait_full(near.full, count)
        product = product_of_terms(pieces_of(own_tiles, slot, TERMS), near.tiles, stage, TERMS, LAYOUT, VALUES)
        product = warpgroup_mma_wait(0, deps=[product])  # (keys, queries)
        row_value = near.row_values.index(stage).load(gl.SliceLayout(0, LAYOUT))
        if VALUES:
            row_inverse = None
            if TERMS > 1:
                row_inverse = inverses.index(stage).load(gl.SliceLayout(0, LAYOUT))
            mbarrier.arrive(near.empty.index(stage))
            m = (i if TERMS == 1 else end - 1 - i) * BLOCK_M
            tile, slopes = transposed_weights_of(
                product, row_value, m, first, scale, near.tiles.dtype, MASKED, LAYOUT,
                row_inverse, reach, softcap, CAUSAL,
            )  # fmt: skip
            weights.tiles.index(stage).store(slopes)
            mbarrier.arrive(weights.full.index(stage))
        else:
            mbarrier.arrive(near.empty.index(stage))
            tile = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
            tile = tile * (product - row_value[None, :])
        acc = add_product(acc, tile, far, count, TERMS, OUT_LAYOUT)
        count += 1
    return acc, count


@gluon.jit
def compute_for_one(VALUES: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, TERMS: gl.constexpr, call):
    """One of two groups of warps with the same 64 keys: for the gradient of their values, or for theirs.

    Its result leaves through the buffer that it alone reads: the gradient of values through that of keys, and the other
    way round.
    """
    scheduler, k_tiles, v_tiles, q, do, inverses, weights, dk, dv, work, scale, grad_scale, options = call
    result, own_tiles, near, far = (dv, k_tiles, q, do) if VALUES else (dk, v_tiles, do, q)
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    D: gl.constexpr = q.tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = work.heads // work.group
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, False)
        entry = entry_of(work, row // key_heads, block * ROWS, options)
        begin, full, high, end = query_steps(block, split, entry, options, CAUSAL, ROWS, BLOCK_M)
        first = block * ROWS - (entry.keys - entry.tokens) - work.right
        reach = None
        if options.window is not None:
            reach = work.right + options.window.left
        acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(work.group):
            if CAUSAL and TERMS == 1:
                acc, count = query_loop_for_one(
                    acc, count, own_tiles, slot, near, far, inverses, weights, begin, full, first, reach, scale,
                    options.softcap, VALUES, True, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
            acc, count = query_loop_for_one(
                acc, count, own_tiles, slot, near, far, inverses, weights, full, high, first, reach, scale,
                options.softcap, VALUES, False, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
            if options.window is not None:
                acc, count = query_loop_for_one(
                    acc, count, own_tiles, slot, near, far, inverses, weights, high, end, first, reach, scale,
                    options.softcap, VALUES, True, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
            if CAUSAL and TERMS > 1:
                acc, count = query_loop_for_one(
                    acc, count, own_tiles, slot, near, far, inverses, weights, begin, full, first, reach, scale,
                    options.softcap, VALUES, True, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
        if TERMS > 1:  # results leave through no buffer
            mbarrier.arrive(scheduler.empty.index(slot))
        if not VALUES:
            acc = acc * grad_scale
        if TERMS == 1:  # worked out again rather than held in registers
            block, row, split = tile_place(read(scheduler, slot), work, False)
        batch, head = row // key_heads, row % key_heads
        if options.seqused_k is not None:
            entry = entry_of(work, batch, block * ROWS, options)
            (acc,) = used_rows((acc,), block * ROWS, entry.keys, OUT_LAYOUT)
        store_tile(result, acc, slot, split, batch, head, block * ROWS, work.keys, SPLIT, OUT_LAYOUT)
        if TERMS == 1:
            tma.store_wait(0)
            mbarrier.arrive(scheduler.empty.index(slot))
        done += 1
        tile, slot = received(scheduler, done)
