"""Groups of warps that attend, on Hopper: what flash attention and attention over factors share of their forward.

A group owns 64 queries, and finds tiles of keys and values in rings of buffers (see `warploom.device.hopper.pipeline`); it does
not matter who put them there. It keeps two products in flight: while the logits of one tile of keys become weights, the
weights of the tile before are multiplied with their values. Keys are walked from the last to the first, so that the
masked tiles come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import (
    NARROW,
    ROWS,
    announced,
    as_factor,
    matrix,
    power_of_two,
    product_transposed,
    send_tile,
    wait_full,
)

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_place(tile, blocks, rows, section, parts, CAUSAL: gl.constexpr):
    """Block, row (of batch entries and heads) and part of a tile's walk, in the order of flash attention's `program_order`."""
    place = tile % (section * blocks * parts)
    first = tile // (section * blocks * parts) * section
    width = gl.minimum(section, rows - first)
    block = place // width // parts
    part = place // width % parts
    if CAUSAL:  # the last queries see the most keys
        block = blocks - 1 - block
    return block, first + place % width, part


@gluon.jit
def key_steps(
    block, part, parts, tokens, keys, right, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Of the tiles of keys that part of a walk goes over: the first, the first with a mask, and the end.

    There is at least one, since a group starts its pipeline with it: for an empty part one that nobody sees.
    """
    end = keys
    full = keys
    if CAUSAL:
        first = block * BLOCK_M + keys - tokens
        end = gl.minimum(keys, first + BLOCK_M + right)
        full = gl.minimum(keys, gl.maximum(first + right + 1, 0))
    steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
    span = (steps + parts - 1) // parts
    begin = gl.minimum(part * span, steps)
    end = gl.maximum(gl.minimum(begin + span, steps), begin + 1)
    return begin, gl.minimum(gl.maximum(full // BLOCK_N, begin), end - 1), end


@gluon.jit
def query_steps(
    block, part, parts, tokens, keys, right, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Of the tiles of queries that part of a walk goes over: the first, the first without a mask, and the end."""
    end = (tokens + BLOCK_M - 1) // BLOCK_M
    begin = end * 0
    full = begin
    if CAUSAL:
        first = block * BLOCK_N - (keys - tokens) - right  # the first query that sees the first key
        begin = gl.minimum(gl.maximum(first, 0) // BLOCK_M, end)
        full = gl.minimum((gl.maximum(first + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M, end)
    span = (end - begin + parts - 1) // parts
    begin = gl.minimum(begin + part * span, end)
    end = gl.minimum(begin + span, end)
    return begin, gl.minimum(gl.maximum(full, begin), end), end


@gluon.jit
def weigh(logits, total, top, first, n, keys, right, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
          LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """Weights of a tile; sums of exponentials and largest logits with it; by how much earlier sums shrink.

    ``first`` is the position of the first query, where it stands among the keys.
    """
    if MASKED:
        key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = (key < keys)[None, :]
        if CAUSAL:
            query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            seen = seen & (key[None, :] <= (query + right)[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1))
    shift = new_top * scale
    if MASKED:  # a row that has seen no key yet: −inf − (−inf) must not become NaN
        shift = gl.where(new_top == float("-inf"), 0.0, shift)
    weights = power_of_two(logits * scale - shift[:, None])
    shrink = power_of_two(top * scale - shift)
    return weights, total * shrink + gl.sum(weights, 1), new_top, shrink


@gluon.jit
def attend(
    acc, weights, total, top, count, turn, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    begin, end, first, keys, right, scale,
    own: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of keys ``end − 1 … begin``, with the weights of the tile before, whose number is ``count``."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    GROUPS: gl.constexpr = turns.shape[0]
    for i in range(end - begin):
        if GROUPS > 2:
            mbarrier.wait(turns.index(own), turn & 1)
            turn += 1
        logits = product_transposed(q_tile, k_tiles, k_full, count + 1, LAYOUT)
        slot = wait_full(v_full, count)
        acc = warpgroup_mma(weights, matrix(v_tiles, slot), acc, is_async=True)
        if GROUPS > 2:
            mbarrier.arrive(turns.index((own + 1) % GROUPS))
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k_empty.index((count + 1) % STAGES))
        n = (end - 1 - i) * BLOCK_N
        new, total, top, shrink = weigh(
            logits, total, top, first, n, keys, right, scale, MASKED, CAUSAL, LAYOUT, BLOCK_N
        )
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(slot))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        weights = as_factor(new, v_tiles.dtype, OUT_LAYOUT)
        count += 1
    return acc, weights, total, top, count, turn


@gluon.jit
def compute_tiles(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, arguments):
    """Group number ``own`` of warps."""
    (
        ticket, out, lse, statistics, q_tiles, k_tiles, v_tiles, out_tiles,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
        tokens, keys, heads, rows, blocks, section, parts, right, scale, place,
    ) = arguments  # fmt: skip
    GROUPS: gl.constexpr = turns.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    E: gl.constexpr = v_tiles.shape[4]
    OWN_BUFFERS: gl.constexpr = q_tiles.shape[4] <= NARROW
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if own == GROUPS - 1:  # the first turn is that of group 0
        mbarrier.arrive(turns.index(0))
    tiles = blocks * rows * parts
    count = 0
    turn = 0
    done = 0
    tile, q_slot = announced(ticket, q_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        entry, head = row // heads, row % heads
        begin, full, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + keys - tokens  # the last query stands at the last key
        q_tile = matrix(q_tiles, q_slot * GROUPS + own)
        acc = gl.zeros([ROWS, E], gl.float32, OUT_LAYOUT)
        total = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)

        logits = product_transposed(q_tile, k_tiles, k_full, count, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k_empty.index(count % STAGES))
        new, total, top, _ = weigh(
            logits, total, top, first, (end - 1) * BLOCK_N, keys, right, scale, True, CAUSAL, LAYOUT, BLOCK_N
        )
        weights = as_factor(new, v_tiles.dtype, OUT_LAYOUT)
        if CAUSAL:  # otherwise the first tile alone, of the last keys, has a mask
            acc, weights, total, top, count, turn = attend(
                acc, weights, total, top, count, turn, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
                full, end - 1, first, keys, right, scale, own, True, CAUSAL, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        acc, weights, total, top, count, turn = attend(
            acc, weights, total, top, count, turn, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
            begin, full, first, keys, right, scale, own, False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if OWN_BUFFERS:
            mbarrier.arrive(q_empty.index(q_slot))
        slot = wait_full(v_full, count)
        acc = warpgroup_mma(weights, matrix(v_tiles, slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot))
        count += 1

        some = gl.where(total == 0.0, 1.0, total)  # where no key was seen: 0 / 1, and lse −inf + 0
        acc = acc * gl.convert_layout(1.0 / some, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if OWN_BUFFERS:
            tma.store_wait(0)  # until the tile before has left its buffer
        send_tile(out, acc, out_tiles, own, part, entry, head, m, tokens, place, SPLIT, OUT_LAYOUT)
        if not OWN_BUFFERS:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(q_slot))

        local = gl.arange(0, ROWS, ROW_LAYOUT)
        there = m + local < tokens
        cells = row.to(gl.int64) * tokens + m + local
        size = rows.to(gl.int64) * tokens
        top = top * scale
        gl.store(statistics + part * 2 * size + cells, top, mask=there)
        gl.store(statistics + (part * 2 + 1) * size + cells, total, mask=there)
        if not SPLIT:
            gl.store(lse + cells, (top + gl.log2(some)) * LN_2, mask=there)
        done += 1
        tile, q_slot = announced(ticket, q_full, done)
    tma.store_wait(0)
