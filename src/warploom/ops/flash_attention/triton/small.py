"""Triton kernel of flash attention's backward for small problems, bound by the latency of a loop's steps.

A program owns 16 rows, the fewest that a matrix instruction takes, so that there are many programs. Each of its warps
loops on its own: of a step's ``WARPS · BLOCK`` rows, warp ``w`` takes the ``BLOCK`` from ``w · BLOCK`` on. It keeps its
own sums, which are merged once, at the end. Within the loop warps wait only for each other's copies.

The first axis of tensors is the warp: keys come in tiles (WARPS, N, D), logits are (WARPS, M, N), sums (WARPS, M, D).
The compiler gives each warp one matrix of a product of three axes. Masks are those of causal or full attention. D is a power of two, the same
for values; features are adjacent and strides narrow.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.activations import INTERPRETED, power_of_two
from warploom.device.product import round_to
from warploom.device.rows import Strides
from warploom.ops.flash_attention.triton.backward import Queries, QueryTile
from warploom.ops.flash_attention.triton.tiles import (
    BackwardStrides,
    Rows,
    base_of,
    load_tile,
    offsets_of,
    store_tile,
)

ROWS = tl.constexpr(16)  # of a program


class SmallSizes(NamedTuple):
    """Sizes of a call, and how it is cut."""

    tokens: tl.int32
    keys: tl.int32
    heads: tl.int32
    group: tl.int32  # query heads to a key head
    blocks: tl.int32  # of a head's queries
    key_blocks: tl.int32
    right: tl.int32  # a query sees so many keys behind its place
    scale: tl.float32  # of the logits, in powers of two
    grad_scale: tl.float32  # of the gradients of queries and keys
    batch_size: tl.int32


class SmallTiles(NamedTuple):
    """Compile-time choices of the kernel."""

    CAUSAL: tl.constexpr
    VEC: tl.constexpr  # common divisor of strides
    D: tl.constexpr
    WARPS: tl.constexpr
    BLOCK: tl.constexpr  # rows of a warp in a step


@triton.jit
def products(a, b, c):
    """Returns ``a · b + c`` for every warp, in float32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c)


@triton.jit
def for_every_warp(tile, WARPS: tl.constexpr):
    """Returns a tile (M, D) as (WARPS, M, D)."""
    return tl.broadcast_to(tile[None, :, :], (WARPS, tile.shape[0], tile.shape[1]))


@triton.jit
def rows_of_warps(WARPS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the numbers (WARPS, BLOCK) of a step's rows."""
    return tl.arange(0, WARPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def offsets_of_warps(strides, VEC: tl.constexpr, WARPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """Returns offsets (WARPS, BLOCK, D) within the rows of a step."""
    rows = rows_of_warps(WARPS, BLOCK) * (strides.n.to(tl.int32) * VEC)
    return rows[:, :, None] + tl.arange(0, D)[None, None, :]


@triton.jit
def rows_by_warp(ptr, strides, VEC: tl.constexpr, WARPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """Returns the `Rows` from ``ptr`` on of a head of a tensor, in steps (WARPS, BLOCK, D)."""
    return Rows(ptr, offsets_of_warps(strides, VEC, WARPS, BLOCK, D), strides, 0)


@triton.jit
def load_by_warp(ptr, x, row, rows):
    """Returns the rows at ``ptr`` of a step; zeros from row number ``rows`` on."""
    ptrs = ptr + x.offsets
    mask = row + rows_of_warps(ptrs.shape[0], ptrs.shape[1]) < rows
    return tl.load(ptrs, mask=mask[:, :, None], other=0.0)


@triton.jit
def own_offsets(strides, VEC: tl.constexpr, D: tl.constexpr):
    """Returns offsets (ROWS, D) of the rows of a program."""
    return offsets_of(strides, ROWS, D, VEC, True, False)


@triton.jit
def kv_loop_by_warp(dq, queries, k, v, end, sizes, tiles: tl.constexpr):
    """Add what `backward.kv_loop` adds, in every warp, from the first key on."""
    VEC: tl.constexpr = tiles.VEC
    WARPS: tl.constexpr = tiles.WARPS
    BLOCK: tl.constexpr = tiles.BLOCK
    k_step, v_step = k.strides.n * VEC, v.strides.n * VEC
    for n in tl.range(0, end, WARPS * BLOCK):
        k_tile = load_by_warp(k.ptr + n * k_step, k, n, sizes.keys)
        logits = tl.zeros((WARPS, ROWS, BLOCK), dtype=tl.float32)
        logits = products(queries.q, tl.permute(k_tile, (0, 2, 1)), logits)
        weights = power_of_two(logits * sizes.scale - queries.lse[None, :, None])
        key = n + rows_of_warps(WARPS, BLOCK)
        mask = (key < sizes.keys)[:, None, :]
        if tiles.CAUSAL:
            mask = mask & (key[:, None, :] <= (queries.position + sizes.right)[None, :, None])
        weights = tl.where(mask, weights, 0.0)
        v_tile = load_by_warp(v.ptr + n * v_step, v, n, sizes.keys)
        dweights = tl.zeros((WARPS, ROWS, BLOCK), dtype=tl.float32)
        dweights = products(queries.do, tl.permute(v_tile, (0, 2, 1)), dweights)
        dlogits = weights * (dweights - queries.delta[None, :, None])
        dq = products(round_to(dlogits, k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def query_loop_by_warp(dk, dv, k, v, queries, begin, key, sizes, tiles: tl.constexpr):
    """Add what `backward.query_loop` adds, in every warp, up to the last query."""
    VEC: tl.constexpr = tiles.VEC
    WARPS: tl.constexpr = tiles.WARPS
    BLOCK: tl.constexpr = tiles.BLOCK
    q, do, tokens = queries.q, queries.do, queries.tokens
    q_step, do_step = q.strides.n * VEC, do.strides.n * VEC
    q_head, do_head = q.strides.h * VEC, do.strides.h * VEC
    steps = tl.cdiv(tokens - begin, WARPS * BLOCK)
    for step in tl.range(0, queries.group * steps):
        member = step // steps
        m = begin + (step - member * steps) * (WARPS * BLOCK)
        query = m + rows_of_warps(WARPS, BLOCK)
        row = member.to(tl.int64) * queries.row_h + query
        q_tile = load_by_warp(q.ptr + member * q_head + m * q_step, q, m, tokens)
        logits = products(k, tl.permute(q_tile, (0, 2, 1)), tl.zeros((WARPS, ROWS, BLOCK), dtype=tl.float32))
        row_lse = tl.load(queries.lse + row, mask=query < tokens, other=float("inf"))
        row_delta = tl.load(queries.delta + row, mask=query < tokens, other=0.0)
        weights = power_of_two(logits * sizes.scale - row_lse[:, None, :])
        if tiles.CAUSAL:
            seen = key[None, :, None] <= (query + queries.offset + sizes.right)[:, None, :]
            weights = tl.where(seen, weights, 0.0)
        do_tile = load_by_warp(do.ptr + member * do_head + m * do_step, do, m, tokens)
        dv = products(round_to(weights, do_tile.dtype), do_tile, dv)
        dweights = products(v, tl.permute(do_tile, (0, 2, 1)), tl.zeros((WARPS, ROWS, BLOCK), dtype=tl.float32))
        dlogits = weights * (dweights - row_delta[:, None, :])
        dk = products(round_to(dlogits, q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def backward_small_kernel(
    q, k, v, grad, lse, delta, dq, dk, dv,
    sizes: SmallSizes, strides: BackwardStrides, dq_strides: Strides, dk_strides: Strides, dv_strides: Strides,
    tiles: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the gradients of 16 keys and values of one key head, or behind all those, of 16 queries of one head."""
    if PDL:
        gdc_wait()
    VEC: tl.constexpr = tiles.VEC
    D: tl.constexpr = tiles.D
    WARPS: tl.constexpr = tiles.WARPS
    BLOCK: tl.constexpr = tiles.BLOCK
    tokens, keys, heads, group = sizes.tokens, sizes.keys, sizes.heads, sizes.group
    right, batch_size = sizes.right, sizes.batch_size
    key_heads = heads // group
    key_programs = sizes.key_blocks * batch_size * key_heads
    offset = keys - tokens  # the last query stands at the last key
    local = tl.arange(0, ROWS)
    if tl.program_id(0) < key_programs:
        block, row = tl.program_id(0) // (batch_size * key_heads), tl.program_id(0) % (batch_size * key_heads)
        batch, key_head = row // key_heads, row % key_heads
        n = block * ROWS
        k_ptr = base_of(k, batch, n, key_head, strides.k, VEC)
        v_ptr = base_of(v, batch, n, key_head, strides.v, VEC)
        k_tile = load_tile(k_ptr + own_offsets(strides.k, VEC, D), n, keys, D, True)
        v_tile = load_tile(v_ptr + own_offsets(strides.v, VEC, D), n, keys, D, True)
        head = key_head * group
        q_ptr = base_of(q, batch, n * 0, head, strides.q, VEC)
        do_ptr = base_of(grad, batch, n * 0, head, strides.grad, VEC)
        q_rows = rows_by_warp(q_ptr, strides.q, VEC, WARPS, BLOCK, D)
        do_rows = rows_by_warp(do_ptr, strides.grad, VEC, WARPS, BLOCK, D)
        first = (batch.to(tl.int64) * heads + head) * tokens
        begin = n * 0
        if tiles.CAUSAL:
            begin = tl.minimum(tl.maximum(n - offset - right, 0), tokens) // BLOCK * BLOCK
        dk_warps = tl.zeros((WARPS, ROWS, D), dtype=tl.float32)
        dv_warps = tl.zeros((WARPS, ROWS, D), dtype=tl.float32)
        dk_warps, dv_warps = query_loop_by_warp(
            dk_warps, dv_warps, for_every_warp(k_tile, WARPS), for_every_warp(v_tile, WARPS),
            Queries(q_rows, do_rows, lse + first, delta + first, None, tokens, group, tokens, offset),
            begin, n + local, sizes, tiles,
        )  # fmt: skip
        dk_ptr = base_of(dk, batch, n, key_head, dk_strides, VEC)
        dv_ptr = base_of(dv, batch, n, key_head, dv_strides, VEC)
        dk_offsets, dv_offsets = own_offsets(dk_strides, VEC, D), own_offsets(dv_strides, VEC, D)
        store_tile(dk_ptr + dk_offsets, tl.sum(dk_warps, axis=0) * sizes.grad_scale, n, keys, D)
        store_tile(dv_ptr + dv_offsets, tl.sum(dv_warps, axis=0), n, keys, D)
    else:
        program = tl.program_id(0) - key_programs
        block, row = program // (batch_size * heads), program % (batch_size * heads)
        if tiles.CAUSAL:  # the last queries see the most keys
            block = sizes.blocks - 1 - block
        batch, head = row // heads, row % heads
        m = block * ROWS
        position = m + offset + local
        q_ptr = base_of(q, batch, m, head, strides.q, VEC)
        do_ptr = base_of(grad, batch, m, head, strides.grad, VEC)
        q_tile = load_tile(q_ptr + own_offsets(strides.q, VEC, D), m, tokens, D, True)
        do_tile = load_tile(do_ptr + own_offsets(strides.grad, VEC, D), m, tokens, D, True)
        rows = row.to(tl.int64) * tokens + m + local
        row_lse = tl.load(lse + rows, mask=m + local < tokens, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=m + local < tokens, other=0.0)
        k_ptr = base_of(k, batch, m * 0, head // group, strides.k, VEC)
        v_ptr = base_of(v, batch, m * 0, head // group, strides.v, VEC)
        end = keys
        if tiles.CAUSAL:
            end = tl.minimum(keys, tl.maximum(m + ROWS + offset + right, 0))
        dq_warps = kv_loop_by_warp(
            tl.zeros((WARPS, ROWS, D), dtype=tl.float32),
            QueryTile(
                for_every_warp(q_tile, WARPS), for_every_warp(do_tile, WARPS), row_lse, row_delta, position
            ),
            rows_by_warp(k_ptr, strides.k, VEC, WARPS, BLOCK, D), rows_by_warp(v_ptr, strides.v, VEC, WARPS, BLOCK, D),
            end, sizes, tiles,
        )  # fmt: skip
        dq_ptr = base_of(dq, batch, m, head, dq_strides, VEC)
        store_tile(
            dq_ptr + own_offsets(dq_strides, VEC, D), tl.sum(dq_warps, axis=0) * sizes.grad_scale, m, tokens, D
        )
