"""A bias on Hopper: tiles of it in registers, and the keys that it hides from all queries."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.hopper.pipeline import matrix, wait_full
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
