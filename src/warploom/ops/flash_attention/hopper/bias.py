"""A bias on Hopper: tiles of it, the keys that it hides from all queries, and its gradient."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import Ring, bytes_of_slot, matrix, thread_barrier, wait_empty, wait_full
from warploom.device.product import round_to
from warploom.ops.flash_attention.hopper.tiles import ROWS, clear_hidden_rows
from warploom.ops.flash_attention.triton.tiles import ForwardStrides, Sizes, base_of, load_tile, tile_offsets

VECTOR = gl.constexpr(8)
"""Elements in which strides of a bias are counted."""
WORD = tl.constexpr(32)
LEAST = gl.constexpr(-3.4028234663852886e38)


class BiasSteps(NamedTuple):
    """Strides of a bias in `VECTOR` elements; 0 along axes that it does not have."""

    b: gl.int32
    h: gl.int32
    n: gl.int32


class Bias(NamedTuple):
    """Numbers that are added to logits, of adjacent keys."""

    start: gl.tensor  # (B, H, N, M)
    seen: gl.tensor  # (B, Hk, W): see `seen_keys_kernel`
    strides: BiasSteps


class HeadBias(NamedTuple):
    """The bias of a head, from a query on."""

    start: gl.tensor
    seen: gl.tensor
    stride: gl.int32  # from a query to the next


class BiasTiles(NamedTuple):
    """A bias in the backward, and where its gradient goes. A bias of keys is the same for all queries."""

    start: gl.tensor  # a descriptor; of a bias of keys, as in `Bias`
    ring: Ring | None  # of tiles of 64 keys for each group of warps; None for a bias of keys
    out: (
        gl.tensor | None
    )  # a descriptor; for a bias of keys the address of sums (B, H, R, C · 128) of tiles of queries
    seen: gl.tensor
    strides: BiasSteps


class OwnBias(NamedTuple):
    """The bias of a key head."""

    tiles: BiasTiles
    batch: gl.int32
    head: gl.int32  # the first of its heads


@gluon.jit
def bias_from(bias, batch, head, m):
    """Returns the address of a head's bias from a query on."""
    strides = bias.strides
    place = batch.to(gl.int64) * strides.b + head.to(gl.int64) * strides.h + m.to(gl.int64) * strides.n
    return bias.start + place * VECTOR


@gluon.jit
def seen_words(bias, batch, key_head, schedule, keys):
    """Returns the address of a key head's words of `seen_keys_kernel`."""
    words = (keys + 127) // 128 * 4
    key_heads = schedule.heads // schedule.group
    return bias.seen + (batch * key_heads + key_head).to(gl.int64) * words


@gluon.jit
def bias_of_head(bias, batch, head, m, schedule, keys):
    """Returns the bias of a head from query ``m`` on."""
    seen = seen_words(bias, batch, head // schedule.group, schedule, keys)
    return HeadBias(bias_from(bias, batch, head, m), seen, bias.strides.n * VECTOR)


@gluon.jit
def load_bias(n, queries, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the bias of 64 queries and the keys ``n …``, read two keys at a time: one behind the last may be anything."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    there = (queries.m + row < queries.seq.tokens)[:, None]
    there = there & (key // 2 < (queries.seq.keys + 1) // 2)[None, :]
    pointers = queries.bias.start + (row * queries.bias.stride)[:, None] + key[None, :]
    return gl.load(pointers, mask=there, other=0.0)


@gluon.jit
def prefetch_bias(bias, batch, head, m, n, call, ROWS_OF_TILE: gl.constexpr, KEYS: gl.constexpr):
    """Bring a tile of a bias from query ``m`` and key ``n`` on into the L2 cache, by one warp: a line of 128 bytes a thread."""
    LINE: gl.constexpr = 1024 // bias.start.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = (KEYS + LINE - 1) // LINE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [1, 1], [1, 0])
    row = gl.arange(0, ROWS_OF_TILE, gl.SliceLayout(1, LAYOUT))
    line = gl.arange(0, LINES, gl.SliceLayout(0, LAYOUT))
    row = gl.minimum(row, call.lengths.tokens - 1 - m)
    key = gl.minimum(n + line * LINE, call.lengths.keys - 1)
    pointers = (bias_from(bias, batch, head, m) + row * (bias.strides.n * VECTOR))[:, None] + key[None, :]
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_bias(bias, batch, head, m, n, count):
    """Copy the bias of a tile of queries ``m …`` and all groups' keys ``n …``, number ``count`` of the ring."""
    ring, strides = bias.ring, bias.strides
    GROUPS: gl.constexpr = ring.tiles.shape[0] // ring.full.shape[0]
    slot = wait_empty(ring.empty, count)
    mbarrier.expect(ring.full.index(slot), bytes_of_slot((bias.start,), (ring.tiles,), ring.full))
    entry = gl.where(strides.b == 0, 0, batch)
    of_head = gl.where(strides.h == 0, 0, head)
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            bias.start, [entry, of_head, m, n + group * ROWS], ring.full.index(slot), ring.tiles.index(slot * GROUPS + group)
        )  # fmt: skip


@gluon.jit
def take_bias(ring, count, own: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the own tile number ``count`` of a bias, transposed, and gives its buffer back."""
    GROUPS: gl.constexpr = ring.tiles.shape[0] // ring.full.shape[0]
    slot = wait_full(ring.full, count)
    added = matrix(ring.tiles, slot * GROUPS + own).permute([1, 0]).load(LAYOUT)
    thread_barrier()
    mbarrier.arrive(ring.empty.index(slot))
    return added


@gluon.jit
def write_zeros(own, exchange, count, group: gl.constexpr, n, end, heads):
    """Write zeros for keys ``n …`` and tiles of queries before ``end``, which see none of them, of all heads.

    They leave through the buffer in which the next gradients are shared.
    """
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    BLOCK_M: gl.constexpr = exchange.dlogits.shape[3]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if end > 0:
        wait_empty(exchange.empty, count)
        place = (count & 1) * GROUPS + group
        tma.store_wait(0)
        thread_barrier()
        matrix(exchange.dlogits, place).store(gl.zeros([BLOCK_M, ROWS], exchange.dlogits.dtype, LAYOUT))
        fence_async_shared()
        for i in range(end * heads):
            m, member = i // heads * BLOCK_M, i % heads
            tma.async_copy_shared_to_global(
                own.tiles.out, [own.batch, own.head + member, m, n], exchange.dlogits.index(place)
            )
        tma.store_wait(0)
        thread_barrier()


@gluon.jit
def key_bias(own, member, n, keys, LAYOUT: gl.constexpr):
    """Returns the bias of 64 keys ``n …``, which is that of all queries of a head, as a tile."""
    key = n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    start = bias_from(own.tiles, own.batch, own.head + member, own.head * 0)
    return gl.load(start + key, mask=key < keys, other=0.0)[:, None]


@gluon.jit
def store_key_sums(own, member, block, n, dlogits, call, LAYOUT: gl.constexpr):
    """Store the sums of gradients of logits (64, queries) of a tile of queries."""
    BLOCK_M: gl.constexpr = dlogits.shape[1]
    if own.tiles.out is not None:
        blocks = (call.lengths.tokens + BLOCK_M - 1) // BLOCK_M
        row = (own.batch * call.schedule.heads + own.head + member).to(gl.int64) * blocks + block
        width = (call.lengths.keys + 127) // 128 * 128
        key = n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        gl.store(own.tiles.out + row * width + key, gl.sum(dlogits, 1))


@gluon.jit
def all_are_seen(words, n, WORDS: gl.constexpr):
    """Returns whether the bits of all keys ``n …`` are 1, as −1."""
    words += n // WORD
    all_seen = gl.load(words)
    for i in gl.static_range(1, WORDS):
        all_seen = all_seen & gl.load(words + i)
    return all_seen


@gluon.jit
def clear_hidden_values(ring, count, n, words):
    """Make values in tile number ``count`` zero that a bias hides from all queries, if one of them is not finite."""
    BLOCK_N: gl.constexpr = ring.tiles.shape[3]
    if all_are_seen(words, n, BLOCK_N // WORD) != -1:
        clear_hidden_rows(matrix(ring.tiles, wait_full(ring.full, count)), words + n // WORD)


@gluon.jit
def clear_own_hidden(exchange, own: gl.constexpr, n, words):
    """Make own keys ``n …`` and their values zero where a bias hides them from all queries, if one is not finite."""
    if all_are_seen(words, n, ROWS // WORD) != -1:
        clear_hidden_rows(matrix(exchange.k_tiles, own), words + n // WORD)
        clear_hidden_rows(matrix(exchange.v_tiles, own), words + n // WORD)


@triton.jit
def are_finite(x):
    """Returns which rows of a tile have no NaN and no infinity."""
    return tl.max((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, axis=1) == 0


@triton.jit
def seen_keys_kernel(
    k, v, bias, seen, sizes: Sizes, strides: ForwardStrides, steps: BiasSteps, config: tl.constexpr,
):  # fmt: skip
    """Write a bit for each key of a head, 32 in a word: 0 where it or its values are not finite and no query sees it.

    A bias hides it from all queries of all heads that read it, or they come before it in causal attention. Weights of such
    a key are 0, and that times NaN is NaN: so kernels read zeros. ``seen`` (B, Hk, W) has words for whole tiles of 128 keys.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    words = tl.cdiv(sizes.keys, 128) * 4
    program = tl.program_id(0)
    word, row = program % words, program // words
    key_heads = sizes.heads // sizes.group
    batch, key_head = row // key_heads, row % key_heads
    n = word * WORD
    key = n + tl.arange(0, WORD)
    k_ptr = base_of(k, batch, n, key_head, strides.k, config.VEC)
    v_ptr = base_of(v, batch, n, key_head, strides.v, config.VEC)
    k_tile = load_tile(k_ptr + tile_offsets(strides.k, WORD, config.BLOCK_D, config), n, sizes.keys, config.D, True)
    v_tile = load_tile(v_ptr + tile_offsets(strides.v, WORD, config.BLOCK_E, config), n, sizes.keys, config.E, True)
    shown = (are_finite(k_tile) & are_finite(v_tile)).to(tl.int32)
    if tl.min(shown, axis=0) == 0:
        for i in range(sizes.group * tl.cdiv(sizes.tokens, BLOCK_M)):
            head = key_head * sizes.group + i % sizes.group
            query = i // sizes.group * BLOCK_M + tl.arange(0, BLOCK_M)
            of_head = batch.to(tl.int64) * steps.b + head.to(tl.int64) * steps.h
            rows = bias + (of_head + query.to(tl.int64) * steps.n) * VECTOR
            there = (query < sizes.tokens)[:, None] & (key < sizes.keys)[None, :]
            if config.HAS_RIGHT:
                there = there & (key[None, :] <= (query + sizes.keys - sizes.tokens + sizes.right)[:, None])
            added = tl.load(rows[:, None] + key[None, :], mask=there, other=float("-inf"))
            shown = tl.maximum(shown, tl.max((added != float("-inf")).to(tl.int32), axis=0))
    tl.store(seen + program, tl.sum(shown << tl.arange(0, WORD), axis=0))


class BiasSums(NamedTuple):
    """Sizes of the parts of a bias's gradient (B, H, R, C) and of that gradient."""

    heads: tl.int32  # H
    rows: tl.int32  # R
    width: tl.int64  # C, which may be more than keys
    tokens: tl.int32  # rows of the gradient
    keys: tl.int32
    reach: tl.int32  # the last key that the first query sees
    own_heads: tl.int32  # heads of the gradient
    entries: tl.int32  # that are summed
    members: tl.int32  # heads that are summed


@triton.jit
def sum_bias_kernel(
    parts, dbias, sizes: BiasSums, SUM_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the sums of parts of a bias's gradient over its broadcast axes, with ``SUM_ROWS`` of all rows, in one order.

    Otherwise parts of keys that a row does not see by its place may be anything.
    """
    columns = tl.cdiv(sizes.keys, BLOCK_N)
    program = tl.program_id(0)
    key = program % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    place = program // columns
    blocks = tl.cdiv(sizes.tokens, BLOCK_R)
    first = place % blocks * BLOCK_R
    steps = tl.cdiv(sizes.rows, BLOCK_R) if SUM_ROWS else 1
    place = place // blocks
    head, batch = place % sizes.own_heads, place // sizes.own_heads
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for i in tl.range(sizes.entries * sizes.members, loop_unroll_factor=1 if SUM_ROWS else 4):
        entry = batch * sizes.entries + i // sizes.members
        row_of_parts = (entry * sizes.heads + head * sizes.members + i % sizes.members).to(tl.int64) * sizes.rows
        for step in range(steps):
            row = first + step * BLOCK_R + tl.arange(0, BLOCK_R)
            there = (row < sizes.rows)[:, None] & (key < sizes.keys)[None, :]
            if not SUM_ROWS:
                there = there & (key[None, :] <= (row + sizes.reach)[:, None])
            places = ((row_of_parts + row) * sizes.width)[:, None] + key[None, :]
            total += tl.load(parts + places, mask=there, other=0.0).to(tl.float32)
    target = dbias + place.to(tl.int64) * sizes.tokens * sizes.keys
    if SUM_ROWS:
        tl.store(target + key, round_to(tl.sum(total, axis=0), dbias.dtype.element_ty), mask=key < sizes.keys)
    else:
        row = first + tl.arange(0, BLOCK_R)
        there = (row < sizes.tokens)[:, None] & (key < sizes.keys)[None, :]
        places = (row.to(tl.int64) * sizes.keys)[:, None] + key[None, :]
        tl.store(target + places, round_to(total, dbias.dtype.element_ty), mask=there)
