"""Triton kernel of flash attention's backward for few short walks, bound by the latency of their steps.

A program owns 16 rows, the fewest that a matrix instruction takes, so that there are many programs. Each of its warps
walks on its own: of a step's ``WAYS · BLOCK`` rows, warp ``w`` takes the ``BLOCK`` from ``w · BLOCK`` on, keeps its
own sums, and these are merged once, at the end of the walk. Within the walk warps wait for each other's copies alone.

Tensors have the way as their first axis: keys come in tiles (WAYS, N, D), logits are (WAYS, M, N), sums (WAYS, M, D);
products of three axes run one way a warp. Masks are those of causal or full attention. D is a power of two, the same
for values; features are adjacent and strides narrow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.activations import INTERPRETED, power_of_two
from warploom.device.product import rounded
from warploom.ops.flash_attention.kernels.forward import base_of, load_tile, store_tile, stride_names, tile_offsets

ROWS = tl.constexpr(16)  # of a program


@triton.jit
def products(a, b, c):
    """``a · b + c`` for every way, in float32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c)


@triton.jit
def on_every_way(tile, WAYS: tl.constexpr):
    """A tile (M, D) as (WAYS, M, D)."""
    return tl.broadcast_to(tile[None, :, :], (WAYS, tile.shape[0], tile.shape[1]))


@triton.jit
def rows_of_ways(WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (WAYS, BLOCK) of a step."""
    return tl.arange(0, WAYS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def ways_offsets(stride_row, VEC: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """Offsets (WAYS, BLOCK, D) within the rows of a step. The stride of rows comes divided by ``VEC``."""
    rows = rows_of_ways(WAYS, BLOCK) * (stride_row.to(tl.int32) * VEC)
    return rows[:, :, None] + tl.arange(0, D)[None, None, :]


@triton.jit
def load_ways(pointers, row, rows):
    """The rows of a step; zeros from row number ``rows`` on."""
    there = row + rows_of_ways(pointers.shape[0], pointers.shape[1]) < rows
    return tl.load(pointers, mask=there[:, :, None], other=0.0)


@triton.jit
def walk_keys_ways(
    dq, q, do, k, v, row_shift, row_delta, k_offsets, v_offsets, k_step, v_step, begin, end, position, keys, right,
    scale, CAUSAL: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kernels.backward.walk_keys` of every way."""
    for n in tl.range(begin, end, WAYS * BLOCK):
        k_tile = load_ways(k + n * k_step + k_offsets, n, keys)
        logits = products(q, tl.permute(k_tile, (0, 2, 1)), tl.zeros((WAYS, ROWS, BLOCK), dtype=tl.float32))
        weights = power_of_two(logits * scale - row_shift[None, :, None])
        key = n + rows_of_ways(WAYS, BLOCK)
        seen = (key < keys)[:, None, :]
        if CAUSAL:
            seen = seen & (key[:, None, :] <= (position + right)[None, :, None])
        weights = tl.where(seen, weights, 0.0)
        v_tile = load_ways(v + n * v_step + v_offsets, n, keys)
        dweights = products(do, tl.permute(v_tile, (0, 2, 1)), tl.zeros((WAYS, ROWS, BLOCK), dtype=tl.float32))
        dlogits = weights * (dweights - row_delta[None, :, None])
        dq = products(rounded(dlogits, k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def walk_queries_ways(
    dk, dv, k, v, q, do, shift, delta, q_offsets, do_offsets, q_step, do_step, q_h, do_h, group, begin, end, key,
    tokens, offset, right, scale, CAUSAL: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kernels.backward.walk_queries` of every way."""
    steps = tl.cdiv(end - begin, WAYS * BLOCK)
    for step in tl.range(0, group * steps):
        member = step // steps
        m = begin + (step - member * steps) * (WAYS * BLOCK)
        query = m + rows_of_ways(WAYS, BLOCK)
        row = member.to(tl.int64) * tokens + query
        q_tile = load_ways(q + member * q_h + m * q_step + q_offsets, m, tokens)
        logits = products(k, tl.permute(q_tile, (0, 2, 1)), tl.zeros((WAYS, ROWS, BLOCK), dtype=tl.float32))
        row_shift = tl.load(shift + row, mask=query < tokens, other=float("inf"))
        row_delta = tl.load(delta + row, mask=query < tokens, other=0.0)
        weights = power_of_two(logits * scale - row_shift[:, None, :])
        if CAUSAL:
            weights = tl.where(key[None, :, None] <= (query + offset + right)[:, None, :], weights, 0.0)
        do_tile = load_ways(do + member * do_h + m * do_step + do_offsets, m, tokens)
        dv = products(rounded(weights, do_tile.dtype), do_tile, dv)
        dweights = products(v, tl.permute(do_tile, (0, 2, 1)), tl.zeros((WAYS, ROWS, BLOCK), dtype=tl.float32))
        dlogits = weights * (dweights - row_delta[:, None, :])
        dk = products(rounded(dlogits, q_tile.dtype), q_tile, dk)
    return dk, dv


# Every number is a run-time value of declared type: none of them ever causes a compilation.
NUMBERS = "tokens keys heads group blocks right scale".split()


@triton.jit(do_not_specialize=[*NUMBERS, "key_blocks", "entries", "slope",
                               *stride_names("q", "k", "v", "grad", "dq", "dk", "dv")])  # fmt: skip
def backward_few_kernel(
    q, k, v, grad, shift, delta, dq, dk, dv,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, group: tl.int32, blocks: tl.int32, key_blocks: tl.int32,
    right: tl.int32, scale: tl.float32, slope: tl.float32, entries: tl.int32,
    q_b: tl.int64, q_n: tl.int64, q_h: tl.int64, q_f: tl.int64,
    k_b: tl.int64, k_n: tl.int64, k_h: tl.int64, k_f: tl.int64,
    v_b: tl.int64, v_n: tl.int64, v_h: tl.int64, v_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    dq_b: tl.int64, dq_n: tl.int64, dq_h: tl.int64, dq_f: tl.int64,
    dk_b: tl.int64, dk_n: tl.int64, dk_h: tl.int64, dk_f: tl.int64,
    dv_b: tl.int64, dv_n: tl.int64, dv_h: tl.int64, dv_f: tl.int64,
    CAUSAL: tl.constexpr, VEC: tl.constexpr, D: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Gradients of 16 keys and values of one key head, or behind all those, of 16 queries of one head."""
    if EARLY:
        gdc_wait()
    key_heads = heads // group
    key_programs = key_blocks * entries * key_heads
    offset = keys - tokens  # the last query stands at the last key
    local = tl.arange(0, ROWS)
    if tl.program_id(0) < key_programs:
        block, row = tl.program_id(0) // (entries * key_heads), tl.program_id(0) % (entries * key_heads)
        entry, key_head = row // key_heads, row % key_heads
        n = block * ROWS
        k_base = base_of(k, entry, n, key_head, k_b, k_n, k_h, VEC)
        v_base = base_of(v, entry, n, key_head, v_b, v_n, v_h, VEC)
        k_tile = load_tile(k_base + tile_offsets(k_n, k_f, VEC, True, False, ROWS, D), n, keys, D, True)
        v_tile = load_tile(v_base + tile_offsets(v_n, v_f, VEC, True, False, ROWS, D), n, keys, D, True)
        head = key_head * group
        q_base = base_of(q, entry, n * 0, head, q_b, q_n, q_h, VEC)
        grad_base = base_of(grad, entry, n * 0, head, grad_b, grad_n, grad_h, VEC)
        q_offsets = ways_offsets(q_n, VEC, WAYS, BLOCK, D)
        grad_offsets = ways_offsets(grad_n, VEC, WAYS, BLOCK, D)
        first = (entry.to(tl.int64) * heads + head) * tokens
        begin = n * 0
        if CAUSAL:
            begin = tl.minimum(tl.maximum(n - offset - right, 0), tokens) // BLOCK * BLOCK
        dk_ways = tl.zeros((WAYS, ROWS, D), dtype=tl.float32)
        dv_ways = tl.zeros((WAYS, ROWS, D), dtype=tl.float32)
        dk_ways, dv_ways = walk_queries_ways(
            dk_ways, dv_ways, on_every_way(k_tile, WAYS), on_every_way(v_tile, WAYS), q_base, grad_base,
            shift + first, delta + first, q_offsets, grad_offsets, q_n * VEC, grad_n * VEC, q_h * VEC, grad_h * VEC,
            group, begin, tokens, n + local, tokens, offset, right, scale, CAUSAL, WAYS, BLOCK,
        )  # fmt: skip
        dk_base = base_of(dk, entry, n, key_head, dk_b, dk_n, dk_h, VEC)
        dv_base = base_of(dv, entry, n, key_head, dv_b, dv_n, dv_h, VEC)
        dk_offsets = tile_offsets(dk_n, dk_f, VEC, True, False, ROWS, D)
        dv_offsets = tile_offsets(dv_n, dv_f, VEC, True, False, ROWS, D)
        store_tile(dk_base + dk_offsets, tl.sum(dk_ways, axis=0) * slope, n, keys, D)
        store_tile(dv_base + dv_offsets, tl.sum(dv_ways, axis=0), n, keys, D)
    else:
        program = tl.program_id(0) - key_programs
        block, row = program // (entries * heads), program % (entries * heads)
        if CAUSAL:  # the last queries see the most keys
            block = blocks - 1 - block
        entry, head = row // heads, row % heads
        m = block * ROWS
        position = m + offset + local
        q_base = base_of(q, entry, m, head, q_b, q_n, q_h, VEC)
        grad_base = base_of(grad, entry, m, head, grad_b, grad_n, grad_h, VEC)
        q_tile = load_tile(q_base + tile_offsets(q_n, q_f, VEC, True, False, ROWS, D), m, tokens, D, True)
        own_offsets = tile_offsets(grad_n, grad_f, VEC, True, False, ROWS, D)
        grad_tile = load_tile(grad_base + own_offsets, m, tokens, D, True)
        cells = row.to(tl.int64) * tokens + m + local
        row_shift = tl.load(shift + cells, mask=m + local < tokens, other=float("inf"))
        row_delta = tl.load(delta + cells, mask=m + local < tokens, other=0.0)
        k_base = base_of(k, entry, m * 0, head // group, k_b, k_n, k_h, VEC)
        v_base = base_of(v, entry, m * 0, head // group, v_b, v_n, v_h, VEC)
        end = keys
        if CAUSAL:
            end = tl.minimum(keys, tl.maximum(m + ROWS + offset + right, 0))
        dq_ways = walk_keys_ways(
            tl.zeros((WAYS, ROWS, D), dtype=tl.float32), on_every_way(q_tile, WAYS), on_every_way(grad_tile, WAYS),
            k_base, v_base, row_shift, row_delta, ways_offsets(k_n, VEC, WAYS, BLOCK, D),
            ways_offsets(v_n, VEC, WAYS, BLOCK, D), k_n * VEC, v_n * VEC, 0, end, position, keys, right, scale,
            CAUSAL, WAYS, BLOCK,
        )  # fmt: skip
        dq_base = base_of(dq, entry, m, head, dq_b, dq_n, dq_h, VEC)
        dq_offsets = tile_offsets(dq_n, dq_f, VEC, True, False, ROWS, D)
        store_tile(dq_base + dq_offsets, tl.sum(dq_ways, axis=0) * slope, m, tokens, D)
