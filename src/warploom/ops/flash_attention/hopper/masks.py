"""Loops over tiles of keys or queries: where they begin and end, where masks do, and the masks themselves."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.ops.flash_attention.hopper.bias import HeadBias, bias_of_head
from warploom.ops.flash_attention.hopper.tile_mask import (
    EVERYTHING,
    TILE,
    are_seen,
    are_seen_transposed,
    column_list,
    place_in_list,
    row_list,
)
from warploom.ops.flash_attention.hopper.tiles import ROWS
from warploom.ops.flash_attention.hopper.work import SeqLens, sequence_of, slope_of, slopes_from


class OwnQueries(NamedTuple):
    """64 queries that a group of warps owns, and bounds of their KV loop in tiles of keys.

    There is at least one tile, since a group starts its pipeline with it: for an empty split one that no query sees.
    """

    seq: SeqLens  # or a `PackedSeq`
    begin: gl.int32
    low: gl.int32  # from here on there is no mask
    full: gl.int32  # and from here on there is one again
    end: gl.int32
    m: gl.int32  # the first of them
    first: gl.int32  # the key that it stands at: the last query stands at the last key
    whole: gl.int32  # tiles that see everything, first in the list of a mask's row; without a mask, any number
    skipped: gl.int32  # of these, how many are not gone over
    slope: gl.float32  # of their head; without slopes, any number
    bias: HeadBias  # from the first of them on; without a bias, any number


class OwnKeys(NamedTuple):
    """64 keys that a group of warps owns, and bounds of their loop in tiles of queries."""

    seq: SeqLens  # or a `PackedSeq`
    begin: gl.int32
    full: gl.int32  # from here on there is no mask
    high: gl.int32  # and from here on there is one again
    end: gl.int32
    first: gl.int32  # the query from which on the first key is seen, if attention is causal
    reach: gl.int32  # a key is seen up to so many queries behind that, if there is a window


@gluon.jit
def first_key(tile, seq, call, BLOCK_N: gl.constexpr):
    """Returns where a tile of keys begins.

    If entries have lengths, the last tile ends at the last key, so that no tile holds what lies behind it, which may be
    NaN. What number 0 and tiles before it hold of keys before the first is zeros: the tensor memory accelerator's.
    """
    n = tile * BLOCK_N
    if call.seqused_k is not None:
        n += seq.keys % BLOCK_N - BLOCK_N
    return n


@gluon.jit
def own_queries(place, own: gl.constexpr, kernel, config: gl.constexpr):
    """Returns the queries of group number ``own`` of warps at a place, whose loop is in the order of `tile_of_step`."""
    call = kernel.call
    BLOCK_M: gl.constexpr = config.GROUPS * ROWS
    BLOCK_N: gl.constexpr = kernel.k.tiles.shape[3]
    splits = call.schedule.splits
    CACHED: gl.constexpr = config.CACHE is not None
    seq = sequence_of(place.row // call.schedule.heads, place.block * BLOCK_M, call, CACHED)
    end = seq.keys
    full = seq.keys
    if config.CAUSAL:
        first = place.block * BLOCK_M + seq.keys - seq.tokens
        end = gl.minimum(seq.keys, first + BLOCK_M + call.right)
        full = gl.minimum(seq.keys, gl.maximum(first + call.right + 1, 0))
    if call.window is None and call.seqused_k is None:
        if call.units is None:
            steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
            span = (steps + splits - 1) // splits
            begin = gl.minimum(place.split * span, steps)
            end = gl.maximum(gl.minimum(begin + span, steps), begin + 1)
        else:  # with one split
            begin = seq.first_key // BLOCK_N
            end = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, begin + 1)
        full = gl.minimum(gl.maximum(full // BLOCK_N, begin), end - 1)
        low = begin
    else:
        origin = first_key(place.block * 0, seq, call, BLOCK_N)
        some = origin * 0  # the first key that any query sees, and the first from which on every query does
        every = some
        if call.window is not None:
            lowest = place.block * BLOCK_M + seq.keys - seq.tokens - call.window.left
            some = gl.maximum(lowest, 0)
            every = gl.maximum(lowest + BLOCK_M - 1, 0)
        least = origin * 0  # tiles before all keys
        if call.units is not None:
            some = gl.maximum(some, seq.first_key)
            every = gl.maximum(every, seq.first_key)
            least = seq.first_key // BLOCK_N
        steps = gl.maximum((end - origin + BLOCK_N - 1) // BLOCK_N, least + 1)
        begin = gl.minimum((some - origin) // BLOCK_N, steps - 1)
        span = (steps - begin + splits - 1) // splits
        begin = gl.minimum(begin + place.split * span, steps)
        end = gl.minimum(begin + span, steps)
        if call.seqused_k is not None:  # behind the end there may be keys, before number 0 there are none
            end = gl.where(begin == steps, 0, end)
            begin = gl.where(begin == steps, -1, begin)
        else:
            end = gl.maximum(end, begin + 1)
        full = gl.minimum(gl.maximum((full - origin) // BLOCK_N, begin + 1), end)
        low = gl.minimum(gl.maximum((every - origin + BLOCK_N - 1) // BLOCK_N, begin + 1), full)
    whole = begin
    skipped = begin
    if call.tiles is not None:
        row = place.block * BLOCK_M // TILE
        tiles = row_list(call.tiles, place.row // call.schedule.heads, place.row % call.schedule.heads, row)
        begin = tiles.count * 0
        low = begin
        whole = tiles.whole
        some = tiles.count - whole
        skipped = begin
        # Tiles that see everything, but are cut by the causal bound or the end of the keys, have a mask.
        if config.CAUSAL:
            first = place.block * BLOCK_M + seq.keys - seq.tokens + call.right
            last = gl.minimum(seq.keys, first + BLOCK_M)
            whole = place_in_list(tiles.listed, tiles.whole, (last + TILE - 1) // TILE)
            some = place_in_list(tiles.listed + tiles.whole, some, (last + TILE - 1) // TILE)
            reach = gl.maximum(gl.minimum(seq.keys, first + 1), 0)
            full = place_in_list(tiles.listed, whole, reach // TILE)
            skipped = gl.where(whole + some > 0, tiles.whole - whole, 0)
        else:
            full = whole
            if (seq.keys % TILE > 0) & (whole > 0):
                full -= (gl.load(tiles.listed + whole - 1) == seq.keys // TILE).to(gl.int32)
        end = gl.maximum(whole + some, 1) * (TILE // BLOCK_N)  # without any, one whose keys are hidden
        full *= TILE // BLOCK_N
        if config.SPLIT:
            steps = end
            span = (steps + splits - 1) // splits
            begin = gl.minimum(place.split * span, steps)
            end = gl.minimum(begin + span, steps)
            empty = begin == end  # of such a split one step, whose keys are hidden
            seq = SeqLens(seq.tokens, gl.where(empty, 0, seq.keys))
            begin = gl.where(empty, 0, begin)
            end = gl.where(empty, 1, end)
            low = begin
        full = gl.minimum(gl.maximum(full, begin), end - 1)
    m = place.block * BLOCK_M + own * ROWS
    slope = call.scale  # no None, which Triton 3.6 returns in no tuple
    if call.alibi is not None:
        head = place.row % call.schedule.heads
        slope = slope_of(slopes_from(call.alibi, place.row // call.schedule.heads, head * 0), head)
    bias = call.scale
    if call.bias is not None:
        batch, head = place.row // call.schedule.heads, place.row % call.schedule.heads
        bias = bias_of_head(call.bias, batch, head, m, call.schedule, seq.keys)
    return OwnQueries(seq, begin, low, full, end, m, m + seq.keys - seq.tokens, whole, skipped, slope, bias)


@gluon.jit
def tile_of_step(step, queries, call):
    """Returns the number of the tile of keys of a step: from the last to the first.

    With lengths or a window, the first tile comes before all others. The first step has every mask, so lengths need no
    further loop.
    """
    tile = queries.end - 1 - step
    if call.window is not None or call.seqused_k is not None:
        tile = gl.where(step == 0, queries.begin, queries.end - step)
    return tile


@gluon.jit
def without_first_step(queries, call):
    """Returns queries whose loop has been through the first of its steps."""
    begin, end = queries.begin, queries.end
    if call.window is None and call.seqused_k is None:
        end -= 1
    else:
        begin += 1
    return OwnQueries(
        queries.seq, begin, queries.low, queries.full, end, queries.m, queries.first, queries.whole, queries.skipped,
        queries.slope, queries.bias,
    )  # fmt: skip


@gluon.jit
def own_keys(place, key_heads, own: gl.constexpr, kernel, config: gl.constexpr):
    """Returns the keys of group number ``own`` of warps at a place."""
    call = kernel.call
    BLOCK_N: gl.constexpr = config.GROUPS * ROWS
    BLOCK_M: gl.constexpr = kernel.q.tiles.shape[3]
    seq = sequence_of(place.row // key_heads, place.block * BLOCK_N, call)
    end = (seq.tokens + BLOCK_M - 1) // BLOCK_M
    if call.seqused_k is not None:
        end = gl.where(place.block * BLOCK_N < seq.keys, end, 0)
    high = end
    if call.window is not None:
        # The last query that sees the first key.
        last = place.block * BLOCK_N - (seq.keys - seq.tokens) + call.window.left
        end = gl.minimum((gl.maximum(last + BLOCK_N, 0) + BLOCK_M - 1) // BLOCK_M, end)
        high = gl.maximum(last + 1, 0) // BLOCK_M
    begin = end * 0
    if call.units is not None:
        begin = gl.minimum(seq.first_query // BLOCK_M, end)
    full = begin
    if config.CAUSAL:
        first = (
            place.block * BLOCK_N - (seq.keys - seq.tokens) - call.right
        )  # the first query that sees the first key
        lowest = gl.maximum(first, 0)
        if call.units is not None:
            lowest = gl.maximum(lowest, seq.first_query)
        begin = gl.minimum(lowest // BLOCK_M, end)
        full = gl.minimum((gl.maximum(first + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M, end)
    span = (end - begin + call.schedule.splits - 1) // call.schedule.splits
    begin = gl.minimum(begin + place.split * span, end)
    end = gl.minimum(begin + span, end)
    full = gl.minimum(gl.maximum(full, begin), end)
    if call.window is None:
        high = end
    else:
        high = gl.minimum(gl.maximum(high, full), end)
    if call.tiles is not None:
        tiles = column_list(
            call.tiles, place.row // key_heads, place.row % key_heads, place.block * BLOCK_N // TILE
        )
        begin = place_in_list(tiles.listed, tiles.count, begin * BLOCK_M // TILE) * (TILE // BLOCK_M)
        end = tiles.count * (TILE // BLOCK_M)
        rows = call.tiles.sizes.rows
        if gl.load(tiles.listed + gl.maximum(tiles.count - 1, 0)) == rows - 1:  # steps behind the last query
            behind = rows * (TILE // BLOCK_M) - (seq.tokens + BLOCK_M - 1) // BLOCK_M
            end = gl.maximum(end - behind, begin)
    first = place.block * BLOCK_N + own * ROWS - (seq.keys - seq.tokens) - call.right
    reach = first
    if call.window is not None:
        reach = call.right + call.window.left
    return OwnKeys(seq, begin, full, high, end, first, reach)


@gluon.jit
def visible(n, queries, call, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr, config: gl.constexpr):
    """Returns which keys ``n …`` are there and seen by 64 queries."""
    # Not one with `triton.tiles.visible`: with lengths, what is not there lies before the keys; and bounds are added to rows
    # before these are expanded, which compiles to other code.
    key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if call.seqused_k is None:
        mask = (key < queries.seq.keys)[None, :]
    else:  # see `first_key`
        mask = (key >= 0)[None, :]
    if config.CAUSAL:
        query = queries.first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        mask = mask & (key[None, :] <= (query + call.right)[:, None])
    if call.window is not None:
        query = queries.first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        mask = mask & (key[None, :] >= (query - call.window.left)[:, None])
    return mask


@gluon.jit
def hide(logits, hidden, n, words, queries, call, LAYOUT: gl.constexpr, config: gl.constexpr):
    """Returns logits of keys ``n …``, ``hidden`` where 64 queries do not see them.

    ``words`` are those of a tile of a mask, or None.
    """
    BLOCK_N: gl.constexpr = logits.shape[1]
    seen = visible(n, queries, call, BLOCK_N, LAYOUT, config)
    if words is not None:
        seen = seen & are_seen(words, BLOCK_N, LAYOUT)
    return gl.where(seen, logits, hidden)


@gluon.jit
def hide_transposed(weights, n, m, entry, tiles, LAYOUT: gl.constexpr):
    """Returns weights of 64 keys ``n …`` for queries ``m …``, 0 where the tile's bits hide a key."""
    if entry != EVERYTHING:
        weights = gl.where(
            are_seen_transposed(tiles, entry, n, m, weights.shape[1], LAYOUT), weights, 0.0
        )  # fmt: skip
    return weights


@gluon.jit
def visible_weights(
    weights, m, keys, used, call, LAYOUT: gl.constexpr, config: gl.constexpr, HIDDEN: gl.constexpr = 0.0
):
    """Returns weights of 64 keys for the queries ``m …``, and ``HIDDEN`` where a query does not see a key.

    Only the first ``used`` keys are used, if that is given.
    """
    sees = keys.first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    query = m + gl.arange(0, weights.shape[1], gl.SliceLayout(0, LAYOUT))
    if config.CAUSAL:
        weights = gl.where(sees[:, None] <= query[None, :], weights, HIDDEN)
    if call.window is not None:
        weights = gl.where(query[None, :] <= (sees + keys.reach)[:, None], weights, HIDDEN)
    if used is not None:
        weights = gl.where((gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < used)[:, None], weights, HIDDEN)
    return weights
