"""`shared_keys` for rows of keys in pieces: while a tile's weights are computed, those of the tile before are multiplied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from warploom.device.hopper.attention import entry_of, kept, kept_as_factor, query_steps, tile_place, tiles_of
from warploom.device.hopper.attention_backward.all_gradients import weights_and_slopes
from warploom.device.hopper.attention_backward.keys import used_rows
from warploom.device.hopper.pipeline import (
    ROWS,
    empty_sum,
    pieces_of,
    product_layout,
    product_transposed,
    received,
    store_pieces,
    sum_of_pieces,
    wait_full,
)


@gluon.jit
def factor_of(
    product, count, m, near, weights, full, high, first, reach, scale, softcap,
    VALUES: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What a near product of tile number ``count``, number ``m`` of its queries, becomes: weights, or gradients of logits."""
    dtype: gl.constexpr = near.tiles.dtype
    stage = count % near.full.shape[0]
    row_values = near.row_values.index(stage)
    if VALUES:
        tile, slopes = weights_and_slopes(
            product, row_values, m, full, high, first, None, reach, scale, softcap, dtype, CAUSAL, LAYOUT
        )
        mbarrier.arrive(near.empty.index(stage))
        weights.tiles.index(stage).store(slopes)
        mbarrier.arrive(weights.full.index(stage))
    else:
        row_delta = row_values.load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(near.empty.index(stage))
        slopes = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
        tile = slopes * (product - row_delta[None, :])
    return tile.to(gl.float32)


@gluon.jit
def query_loop_in_pieces(
    acc, count, own_tiles, slot, own_empty, near, far, weights, begin, full, high, end, heads, first, reach, scale,
    softcap, VALUES: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """`shared_keys.query_loop_for_one` over tiles of queries ``begin … end`` of all ``heads``, of which one follows the other.

    Those before ``full`` and from ``high`` on have masks. The own tile is given back when the last near product is there.
    """
    STAGES: gl.constexpr = near.full.shape[0]
    NEAR: gl.constexpr = near.tiles.shape[0] // STAGES
    FAR: gl.constexpr = far.tiles.shape[0] // STAGES
    dtype: gl.constexpr = near.tiles.dtype
    steps = heads * (end - begin)
    if steps > 0:
        own = pieces_of(own_tiles, slot, NEAR)
        m = begin
        product = product_transposed(own, near, count, LAYOUT)  # (keys, queries)
        product = warpgroup_mma_wait(0, deps=[product])
        new = factor_of(
            product, count, m, near, weights, full, high, first, reach, scale, softcap, VALUES, CAUSAL, LAYOUT
        )
        tile = kept(new, dtype)
        for _ in range(steps - 1):
            m += 1
            m = gl.where(m == end, begin, m)
            product = product_transposed(own, near, count + 1, LAYOUT)
            far_slot = wait_full(far.full, count)
            factor = kept_as_factor(tile, dtype, OUT_LAYOUT)
            acc = sum_of_pieces(acc, factor, far.tiles, far_slot)
            product = warpgroup_mma_wait(FAR, deps=[product])
            new = factor_of(
                product, count + 1, m, near, weights, full, high, first, reach, scale, softcap,
                VALUES, CAUSAL, LAYOUT,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=acc + (factor,))[:FAR]
            mbarrier.arrive(far.empty.index(far_slot))
            tile = kept(new, dtype)
            count += 1
        mbarrier.arrive(own_empty)
        far_slot = wait_full(far.full, count)
        factor = kept_as_factor(tile, dtype, OUT_LAYOUT)
        acc = sum_of_pieces(acc, factor, far.tiles, far_slot)
        acc = warpgroup_mma_wait(0, deps=acc + (factor,))[:FAR]
        mbarrier.arrive(far.empty.index(far_slot))
        count += 1
    else:
        mbarrier.arrive(own_empty)
    return acc, count


@gluon.jit
def compute_in_pieces(VALUES: gl.constexpr, CAUSAL: gl.constexpr, call):
    """`shared_keys.compute_for_one` for keys in pieces.

    Its result leaves through no buffer: while it does, the next keys and values are copied.
    """
    scheduler, k_tiles, v_tiles, q, do, _, weights, dk, dv, work, scale, grad_scale, options = call
    result, own_tiles, near, far = (dv, k_tiles, q, do) if VALUES else (dk, v_tiles, do, q)
    PIECES: gl.constexpr = far.tiles.shape[0] // far.full.shape[0]
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    WIDTH: gl.constexpr = far.tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(WIDTH)
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
        acc = empty_sum(PIECES, WIDTH, OUT_LAYOUT)
        acc, count = query_loop_in_pieces(
            acc, count, own_tiles, slot, scheduler.empty.index(slot), near, far, weights, begin, full, high, end,
            work.group, first, reach, scale, options.softcap, VALUES, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        batch, head = row // key_heads, row % key_heads
        if options.seqused_k is not None:
            entry = entry_of(work, batch, block * ROWS, options)
            acc = used_rows(acc, block * ROWS, entry.keys, OUT_LAYOUT)
        factor = 1.0 if VALUES else grad_scale
        store_pieces(result, acc, factor, split, batch, head, block * ROWS, work.keys, OUT_LAYOUT)
        done += 1
        tile, slot = received(scheduler, done)
