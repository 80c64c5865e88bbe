"""Loops over tiles of keys or queries: where they begin and end, where masks do, and the masks themselves."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.ops.flash_attention.hopper.tiles import ROWS


@gluon.jit
def first_key(tile, work, options, BLOCK_N: gl.constexpr):
    """Returns where a tile of keys begins.

    If entries have lengths, the last tile ends at the last key, so that no tile holds what lies behind it, which may be
    NaN. What number 0 and tiles before it hold of keys before the first is zeros: the tensor memory accelerator's.
    """
    n = tile * BLOCK_N
    if options.seqused_k is not None:
        n += work.keys % BLOCK_N - BLOCK_N
    return n


@gluon.jit
def key_steps(block, split, work, options, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns bounds of a split of a KV loop, in tiles of keys: the first, where masks end and begin again, and the end.

    The order is that of `tile_of_step`. There is at least one, since a group starts its pipeline with it: for an empty
    split one that no query sees.
    """
    end = work.keys
    full = work.keys
    if CAUSAL:
        first = block * BLOCK_M + work.keys - work.tokens
        end = gl.minimum(work.keys, first + BLOCK_M + work.right)
        full = gl.minimum(work.keys, gl.maximum(first + work.right + 1, 0))
    if options.window is None and options.seqused_k is None:
        if options.units is None:
            steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
            span = (steps + work.splits - 1) // work.splits
            begin = gl.minimum(split * span, steps)
            end = gl.maximum(gl.minimum(begin + span, steps), begin + 1)
        else:  # with one split
            begin = work.first_key // BLOCK_N
            end = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, begin + 1)
        full = gl.minimum(gl.maximum(full // BLOCK_N, begin), end - 1)
        low = begin
    else:
        origin = first_key(block * 0, work, options, BLOCK_N)
        some = origin * 0  # the first key that any query sees, and the first from which on every query does
        every = some
        if options.window is not None:
            lowest = block * BLOCK_M + work.keys - work.tokens - options.window.left
            some = gl.maximum(lowest, 0)
            every = gl.maximum(lowest + BLOCK_M - 1, 0)
        least = origin * 0  # tiles before all keys
        if options.units is not None:
            some = gl.maximum(some, work.first_key)
            every = gl.maximum(every, work.first_key)
            least = work.first_key // BLOCK_N
        steps = gl.maximum((end - origin + BLOCK_N - 1) // BLOCK_N, least + 1)
        begin = gl.minimum((some - origin) // BLOCK_N, steps - 1)
        span = (steps - begin + work.splits - 1) // work.splits
        begin = gl.minimum(begin + split * span, steps)
        end = gl.minimum(begin + span, steps)
        if options.seqused_k is not None:  # behind the end there may be keys, before number 0 there are none
            end = gl.where(begin == steps, 0, end)
            begin = gl.where(begin == steps, -1, begin)
        else:
            end = gl.maximum(end, begin + 1)
        full = gl.minimum(gl.maximum((full - origin) // BLOCK_N, begin + 1), end)
        low = gl.minimum(gl.maximum((every - origin + BLOCK_N - 1) // BLOCK_N, begin + 1), full)
    return begin, low, full, end


@gluon.jit
def tile_of_step(step, begin, end, options):
    """Returns the number of the tile of keys of a step: from the last to the first.

    With lengths or a window, the first tile comes before all others. The first step has every mask, so lengths need no
    further loop.
    """
    tile = end - 1 - step
    if options.window is not None or options.seqused_k is not None:
        tile = gl.where(step == 0, begin, end - step)
    return tile


@gluon.jit
def rest_of(begin, end, options):
    """Returns the bounds of the tiles of keys without that of the first step."""
    if options.window is None and options.seqused_k is None:
        end -= 1
    else:
        begin += 1
    return begin, end


@gluon.jit
def query_steps(block, split, work, options, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Returns bounds of a split of a loop, in tiles of queries: the first, where masks end and begin again, and the end."""
    end = (work.tokens + BLOCK_M - 1) // BLOCK_M
    if options.seqused_k is not None:
        end = gl.where(block * BLOCK_N < work.keys, end, 0)
    high = end
    if options.window is not None:
        # The last query that sees the first key.
        last = block * BLOCK_N - (work.keys - work.tokens) + options.window.left
        end = gl.minimum((gl.maximum(last + BLOCK_N, 0) + BLOCK_M - 1) // BLOCK_M, end)
        high = gl.maximum(last + 1, 0) // BLOCK_M
    begin = end * 0
    if options.units is not None:
        begin = gl.minimum(work.first_query // BLOCK_M, end)
    full = begin
    if CAUSAL:
        first = block * BLOCK_N - (work.keys - work.tokens) - work.right  # the first query that sees the first key
        lowest = gl.maximum(first, 0)
        if options.units is not None:
            lowest = gl.maximum(lowest, work.first_query)
        begin = gl.minimum(lowest // BLOCK_M, end)
        full = gl.minimum((gl.maximum(first + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M, end)
    span = (end - begin + work.splits - 1) // work.splits
    begin = gl.minimum(begin + split * span, end)
    end = gl.minimum(begin + span, end)
    full = gl.minimum(gl.maximum(full, begin), end)
    if options.window is None:
        high = end
    else:
        high = gl.minimum(gl.maximum(high, full), end)
    return begin, full, high, end


@gluon.jit
def visible(n, first, work, options, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns which keys ``n …`` are there and seen by 64 queries, of which the first stands at the key ``first``."""
    key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if options.seqused_k is None:
        mask = (key < work.keys)[None, :]
    else:  # see `first_key`
        mask = (key >= 0)[None, :]
    if CAUSAL:
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        mask = mask & (key[None, :] <= (query + work.right)[:, None])
    if options.window is not None:
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        mask = mask & (key[None, :] >= (query - options.window.left)[:, None])
    return mask


@gluon.jit
def visible_weights(
    weights, m, first, reach, used, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, HIDDEN: gl.constexpr = 0.0
):
    """Returns weights of 64 keys for the queries ``m …``, and ``HIDDEN`` where a query does not see a key.

    Key i of the 64 is seen from query ``first + i`` on if attention is ``CAUSAL``, and up to query ``first + i + reach`` if
    there is a reach. Only the first ``used`` keys are used.
    """
    sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    query = m + gl.arange(0, weights.shape[1], gl.SliceLayout(0, LAYOUT))
    if CAUSAL:
        weights = gl.where(sees[:, None] <= query[None, :], weights, HIDDEN)
    if reach is not None:
        weights = gl.where(query[None, :] <= (sees + reach)[:, None], weights, HIDDEN)
    if used is not None:
        weights = gl.where((gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < used)[:, None], weights, HIDDEN)
    return weights
