"""Triton kernels of the backward of flash attention.

With weights ``P = softmax(S)``, ``S = scale · Q Kᵀ``, and ``dP = dO Vᵀ``: ``dV = Pᵀ dO``, ``dS = P ⊙ (dP − δ)`` with
``δ = rowsum(dO ⊙ O) − dlse``, ``dQ = scale · dS K`` and ``dK = scale · dSᵀ Q``. Weights are computed again from the
statistics of their rows: ``2^(S − shift)``, for float32 with the forward's shift and times ``inverse``, because the
rounding of a logarithm would show. Keys and values walk over the queries (`key_kernel`), queries walk over the keys
(`query_kernel`): two products more than one kernel for both would need, and no atomic additions, so that the same
inputs always give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.activations import power_of_two
from warploom.device.product import product, rounded
from warploom.ops.flash_attention.kernels.forward import (
    PARTS_AHEAD,
    SIZES,
    as_factor,
    base_of,
    load_factor,
    program_order,
    store_tile,
    stride_names,
    tile_bounds,
    tile_offsets,
    transposed,
    visible,
    walk_bounds,
)


@triton.jit(
    do_not_specialize=[
        "rows", "tokens", "heads", "dlse_b", "dlse_h", "dlse_n", *stride_names("out", "grad"),
    ]
)  # fmt: skip
def prepare_kernel(
    out, grad, statistics, dlse, shift, delta, inverse, tickets,
    rows: tl.int64, tokens: tl.int32, heads: tl.int32, dlse_b: tl.int64, dlse_h: tl.int64, dlse_n: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    VEC: tl.constexpr, UNIT: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """What every row needs: ``δ``, shift and inverse of its weights; a shift of +inf makes weights zero.

    A row is a (batch entry, head, token), tokens fastest. ``tickets`` (2,), with which the kernels for Hopper count
    their tiles, become zero. With ``OVERLAP`` the launch after it may be put in place while this one still runs.
    """
    if OVERLAP:
        gdc_launch_dependents()
    if tickets is not None and tl.program_id(0) == 0:
        tl.store(tickets + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = row < rows
    token, head, entry = row % tokens, row // tokens % heads, row // tokens // heads
    feature = tl.arange(0, BLOCK_E)
    inside = there[:, None] & (feature < E)[None, :]
    out_rows = entry * (out_b * VEC) + token * (out_n * VEC) + head * (out_h * VEC)
    grad_rows = entry * (grad_b * VEC) + token * (grad_n * VEC) + head * (grad_h * VEC)
    out_cells = out + out_rows[:, None] + (feature if UNIT else feature * out_f)[None, :]
    grad_cells = grad + grad_rows[:, None] + (feature if UNIT else feature * grad_f)[None, :]
    o = tl.load(out_cells, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(grad_cells, mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(o * do, axis=1)
    if dlse is not None:
        sums -= tl.load(dlse + entry * dlse_b + head * dlse_h + token * dlse_n, mask=there, other=0.0)
    top = tl.load(statistics + row, mask=there, other=0.0)
    total = tl.load(statistics + rows + row, mask=there, other=0.0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if inverse is not None:
        tl.store(inverse + row, 1.0 / total, mask=there)
    else:
        top += tl.log2(total)
    tl.store(delta + row, tl.where(empty, 0.0, sums), mask=there)
    tl.store(shift + row, tl.where(empty, float("inf"), top), mask=there)


@triton.jit
def walk_queries(
    dk, dv, k, v, q, do, shift, delta, inverse, q_offsets, do_offsets, q_step, do_step, q_piece, do_piece,
    q_h, do_h, row_h, group, begin, end, offset, key, tokens, keys, left, right, scale,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Walk over queries ``begin … end`` of every head of a group, one loop for all, which keeps registers free.

    Gradients of keys (N, D), without the scale, and of values (N, E). The last queries come first: in causal attention
    these see the most keys and give each the smallest weight, so that sums grow with what is added to them, and what
    float32 rounds off stays small however long the walk is.
    """
    steps = tl.cdiv(end - begin, BLOCK_M)
    for step in tl.range(0, group * steps):
        place = step // group
        member = step - place * group
        m = begin + (steps - 1 - place) * BLOCK_M
        query = m + tl.arange(0, BLOCK_M)
        row = member * row_h + query
        q_tile = load_factor(q + member * q_h + m * q_step, q_offsets, m, tokens, q_piece, D, MASKED, PRECISION)
        logits = tl.zeros((dk.shape[0], BLOCK_M), dtype=tl.float32)
        logits = product(k, transposed(q_tile, PRECISION), logits, PRECISION)
        if NEGATIVE:
            logits = -logits
        if MASKED:
            row_shift = tl.load(shift + row, mask=query < tokens, other=float("inf"))
            row_delta = tl.load(delta + row, mask=query < tokens, other=0.0)
        else:
            row_shift = tl.load(shift + row)
            row_delta = tl.load(delta + row)
        weights = power_of_two(logits * scale - row_shift[None, :])  # (N, M)
        if inverse is not None:
            weights *= tl.load(inverse + row, mask=query < tokens, other=0.0)[None, :]
        if MASKED:
            seen = visible((query + offset)[None, :], key[:, None], keys, left, right, HAS_LEFT, HAS_RIGHT)
            weights = tl.where(seen, weights, 0.0)
        do_tile = load_factor(
            do + member * do_h + m * do_step, do_offsets, m, tokens, do_piece, E, MASKED, PRECISION
        )
        dv = product(as_factor(weights, do.dtype.element_ty, PRECISION), do_tile, dv, PRECISION)
        dweights = tl.zeros((dk.shape[0], BLOCK_M), dtype=tl.float32)
        dweights = product(v, transposed(do_tile, PRECISION), dweights, PRECISION)
        dlogits = weights * (dweights - row_delta[None, :])
        dk = product(as_factor(dlogits, q.dtype.element_ty, PRECISION), q_tile, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=[*SIZES, "entries", "slope", "dk_split", "dv_split",
                               *stride_names("q", "k", "v", "grad", "dk", "dv")])  # fmt: skip
def key_kernel(
    q, k, v, grad, shift, delta, inverse, dk, dv, cu_seqlens_q, cu_seqlens_k,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, group: tl.int32, blocks: tl.int32, section: tl.int32,
    splits: tl.int32, sequences: tl.int32, cu_q_stride: tl.int64, cu_k_stride: tl.int64,
    left: tl.int32, right: tl.int32, scale: tl.float32,
    entries: tl.int32, slope: tl.float32, dk_split: tl.int64, dv_split: tl.int64,
    q_b: tl.int64, q_n: tl.int64, q_h: tl.int64, q_f: tl.int64,
    k_b: tl.int64, k_n: tl.int64, k_h: tl.int64, k_f: tl.int64,
    v_b: tl.int64, v_n: tl.int64, v_h: tl.int64, v_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    dk_b: tl.int64, dk_n: tl.int64, dk_h: tl.int64, dk_f: tl.int64,
    dv_b: tl.int64, dv_n: tl.int64, dv_h: tl.int64, dv_f: tl.int64,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SHORT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key head, over one part of the queries of every query head of its group.

    With ``OVERLAP`` the launch after it, of `query_kernel`, starts where this one leaves multiprocessors idle. Before, it
    waits for what both read; keys and values of its own are on their way by then, unless they are in pieces.
    """
    key_heads = heads // group
    block, row = program_order(blocks * splits, entries * key_heads, section)
    split = block % splits
    block = block // splits
    entry, key_head = row // key_heads, row % key_heads
    n, k_start, keys_here, q_start, tokens_here = tile_bounds(
        block, cu_seqlens_k, cu_k_stride, cu_seqlens_q, cu_q_stride, keys, tokens, sequences, BLOCK_N
    )
    if n < keys_here:
        k_base = base_of(k, entry, k_start + n, key_head, k_b, k_n, k_h, VEC)
        v_base = base_of(v, entry, k_start + n, key_head, v_b, v_n, v_h, VEC)
        q_piece = tl.cast(entries, tl.int64) * tokens * heads * D
        grad_piece = tl.cast(entries, tl.int64) * tokens * heads * E
        k_piece = tl.cast(entries, tl.int64) * keys * key_heads * D
        v_piece = tl.cast(entries, tl.int64) * keys * key_heads * E
        MADE: tl.constexpr = PRECISION == "pieces" or PRECISION == "pairs"
        if OVERLAP and MADE:
            gdc_wait()
        k_offsets = tile_offsets(k_n, k_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_D)
        v_offsets = tile_offsets(v_n, v_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_E)
        k_tile = load_factor(k_base, k_offsets, n, keys_here, k_piece, D, True, PRECISION)
        v_tile = load_factor(v_base, v_offsets, n, keys_here, v_piece, E, True, PRECISION)
        if OVERLAP:
            if not MADE:
                gdc_wait()
            gdc_launch_dependents()

        offset = keys_here - tokens_here  # the last query stands at the last key
        key = n + tl.arange(0, BLOCK_N)
        last = tl.minimum(n + BLOCK_N, keys_here) - 1 - offset
        begin, full_begin, full_end, end = walk_bounds(
            n - offset, last, right, left, tokens_here, split, splits, HAS_RIGHT, HAS_LEFT, BLOCK_M
        )
        head = key_head * group
        q_base = base_of(q, entry, q_start, head, q_b, q_n, q_h, VEC)
        grad_base = base_of(grad, entry, q_start, head, grad_b, grad_n, grad_h, VEC)
        q_offsets = tile_offsets(q_n, q_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_D)
        grad_offsets = tile_offsets(grad_n, grad_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_E)
        first = (entry.to(tl.int64) * heads + head) * tokens + q_start
        row_h = tl.cast(tokens, tl.int64)
        head_inverse = None if inverse is None else inverse + first
        dk_tile = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        dv_tile = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
        if SHORT:
            dk_tile, dv_tile = walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, q_base, grad_base, shift + first, delta + first, head_inverse,
                q_offsets, grad_offsets, q_n * VEC, grad_n * VEC, q_piece, grad_piece, q_h * VEC, grad_h * VEC, row_h, group,
                begin, end, offset, key, tokens_here, keys_here, left, right, scale,
                True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_M,
            )  # fmt: skip
        else:
            dk_tile, dv_tile = walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, q_base, grad_base, shift + first, delta + first, head_inverse,
                q_offsets, grad_offsets, q_n * VEC, grad_n * VEC, q_piece, grad_piece, q_h * VEC, grad_h * VEC, row_h, group,
                full_end, end, offset, key, tokens_here, keys_here, left, right, scale,
                True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_M,
            )  # fmt: skip
            dk_tile, dv_tile = walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, q_base, grad_base, shift + first, delta + first, head_inverse,
                q_offsets, grad_offsets, q_n * VEC, grad_n * VEC, q_piece, grad_piece, q_h * VEC, grad_h * VEC, row_h, group,
                full_begin, full_end, offset, key, tokens_here, keys_here, left, right, scale,
                False, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_M,
            )  # fmt: skip
            if HAS_RIGHT:
                dk_tile, dv_tile = walk_queries(
                    dk_tile, dv_tile, k_tile, v_tile, q_base, grad_base, shift + first, delta + first, head_inverse,
                    q_offsets, grad_offsets, q_n * VEC, grad_n * VEC, q_piece, grad_piece, q_h * VEC, grad_h * VEC, row_h, group,
                    begin, full_begin, offset, key, tokens_here, keys_here, left, right, scale,
                    True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_M,
                )  # fmt: skip
        dk_base = base_of(dk, entry, k_start + n, key_head, dk_b, dk_n, dk_h, VEC) + split * (dk_split * VEC)
        dk_offsets = tile_offsets(dk_n, dk_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_D)
        store_tile(dk_base + dk_offsets, dk_tile * slope, n, keys_here, D)
        dv_base = base_of(dv, entry, k_start + n, key_head, dv_b, dv_n, dv_h, VEC) + split * (dv_split * VEC)
        dv_offsets = tile_offsets(dv_n, dv_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_E)
        store_tile(dv_base + dv_offsets, dv_tile, n, keys_here, E)
    elif OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def walk_keys(
    dq, q, do, k, v, row_shift, row_delta, k_offsets, v_offsets, k_step, v_step, k_piece, v_piece,
    begin, end, position, keys, left, right, scale,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Walk over keys ``begin … end``: gradients of queries (M, D), without the scale."""
    for n in tl.range(begin, end, BLOCK_N):
        k_tile = load_factor(k + n * k_step, k_offsets, n, keys, k_piece, D, MASKED, PRECISION)
        logits = tl.zeros((dq.shape[0], BLOCK_N), dtype=tl.float32)
        logits = product(q, transposed(k_tile, PRECISION), logits, PRECISION)
        if NEGATIVE:
            logits = -logits
        weights = power_of_two(logits * scale - row_shift[:, None])  # (M, N)
        if MASKED:
            key = n + tl.arange(0, BLOCK_N)
            seen = visible(position[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
            weights = tl.where(seen, weights, 0.0)
        v_tile = load_factor(v + n * v_step, v_offsets, n, keys, v_piece, E, MASKED, PRECISION)
        dweights = tl.zeros((dq.shape[0], BLOCK_N), dtype=tl.float32)
        dweights = product(do, transposed(v_tile, PRECISION), dweights, PRECISION)
        dlogits = weights * (dweights - row_delta[:, None])
        dq = product(as_factor(dlogits, k.dtype.element_ty, PRECISION), k_tile, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=[*SIZES, "entries", "slope", "dq_split",
                               *stride_names("q", "k", "v", "grad", "dq")])  # fmt: skip
def query_kernel(
    q, k, v, grad, shift, delta, inverse, dq, cu_seqlens_q, cu_seqlens_k,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, group: tl.int32, blocks: tl.int32, section: tl.int32,
    splits: tl.int32, sequences: tl.int32, cu_q_stride: tl.int64, cu_k_stride: tl.int64,
    left: tl.int32, right: tl.int32, scale: tl.float32,
    entries: tl.int32, slope: tl.float32, dq_split: tl.int64,
    q_b: tl.int64, q_n: tl.int64, q_h: tl.int64, q_f: tl.int64,
    k_b: tl.int64, k_n: tl.int64, k_h: tl.int64, k_f: tl.int64,
    v_b: tl.int64, v_n: tl.int64, v_h: tl.int64, v_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    dq_b: tl.int64, dq_n: tl.int64, dq_h: tl.int64, dq_f: tl.int64,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SHORT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, over one part of its keys: the gradient of the queries.

    With ``OVERLAP`` it runs beside `key_kernel`, of which it reads nothing, and does not end before that has ended;
    what sums up parts may be put in place while it still runs.
    """
    if OVERLAP:
        gdc_launch_dependents()
    block, row = program_order(blocks * splits, entries * heads, section)
    split = block % splits
    block = block // splits
    if HAS_RIGHT:  # the last queries see the most keys
        block = blocks - 1 - block
    entry, head = row // heads, row % heads
    m, q_start, tokens_here, k_start, keys_here = tile_bounds(
        block, cu_seqlens_q, cu_q_stride, cu_seqlens_k, cu_k_stride, tokens, keys, sequences, BLOCK_M
    )
    if m < tokens_here:
        q_base = base_of(q, entry, q_start + m, head, q_b, q_n, q_h, VEC)
        grad_base = base_of(grad, entry, q_start + m, head, grad_b, grad_n, grad_h, VEC)
        k_base = base_of(k, entry, k_start, head // group, k_b, k_n, k_h, VEC)
        v_base = base_of(v, entry, k_start, head // group, v_b, v_n, v_h, VEC)
        k_offsets = tile_offsets(k_n, k_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_D)
        v_offsets = tile_offsets(v_n, v_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_E)
        q_offsets = tile_offsets(q_n, q_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_D)
        grad_offsets = tile_offsets(grad_n, grad_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_E)
        q_piece = tl.cast(entries, tl.int64) * tokens * heads * D
        grad_piece = tl.cast(entries, tl.int64) * tokens * heads * E
        q_tile = load_factor(q_base, q_offsets, m, tokens_here, q_piece, D, True, PRECISION)
        grad_tile = load_factor(grad_base, grad_offsets, m, tokens_here, grad_piece, E, True, PRECISION)
        k_piece = tl.cast(entries, tl.int64) * keys * (heads // group) * D
        v_piece = tl.cast(entries, tl.int64) * keys * (heads // group) * E
        first = row.to(tl.int64) * tokens + q_start + m
        local = tl.arange(0, BLOCK_M)
        there = m + local < tokens_here
        row_shift = tl.load(shift + first + local, mask=there, other=float("inf"))
        row_delta = tl.load(delta + first + local, mask=there, other=0.0)

        offset = keys_here - tokens_here  # the last query stands at the last key
        position = m + offset + local
        last = tl.minimum(m + BLOCK_M, tokens_here) - 1 + offset
        begin, full_begin, full_end, end = walk_bounds(
            m + offset, last, left, right, keys_here, split, splits, HAS_LEFT, HAS_RIGHT, BLOCK_N
        )
        dq_tile = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if SHORT:
            dq_tile = walk_keys(
                dq_tile, q_tile, grad_tile, k_base, v_base, row_shift, row_delta, k_offsets, v_offsets,
                k_n * VEC, v_n * VEC, k_piece, v_piece, begin, end, position, keys_here, left, right, scale,
                True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
            )  # fmt: skip
        else:
            if HAS_LEFT:
                dq_tile = walk_keys(
                    dq_tile, q_tile, grad_tile, k_base, v_base, row_shift, row_delta, k_offsets, v_offsets,
                    k_n * VEC, v_n * VEC, k_piece, v_piece, begin, full_begin, position, keys_here, left, right, scale,
                    True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
                )  # fmt: skip
            dq_tile = walk_keys(
                dq_tile, q_tile, grad_tile, k_base, v_base, row_shift, row_delta, k_offsets, v_offsets,
                k_n * VEC, v_n * VEC, k_piece, v_piece, full_begin, full_end, position, keys_here, left, right, scale,
                False, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
            )  # fmt: skip
            dq_tile = walk_keys(
                dq_tile, q_tile, grad_tile, k_base, v_base, row_shift, row_delta, k_offsets, v_offsets,
                k_n * VEC, v_n * VEC, k_piece, v_piece, full_end, end, position, keys_here, left, right, scale,
                True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
            )  # fmt: skip
        if inverse is not None:
            dq_tile *= tl.load(inverse + first + local, mask=there, other=0.0)[:, None]
        dq_base = base_of(dq, entry, q_start + m, head, dq_b, dq_n, dq_h, VEC) + split * (dq_split * VEC)
        dq_offsets = tile_offsets(dq_n, dq_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_D)
        store_tile(dq_base + dq_offsets, dq_tile * slope, m, tokens_here, D)
    if OVERLAP:
        if tl.program_id(0) == 0:  # one program is enough to hold what is launched next
            gdc_wait()


@triton.jit
def add_parts(part, out, program, size, splits, BLOCK: tl.constexpr):
    """Block number ``program`` of the sum of parts (splits, size), if it has that; the number in the sum after it."""
    blocks = tl.cdiv(size, BLOCK)
    if (program >= 0) & (program < blocks):
        i = program * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, splits, PARTS_AHEAD):
            ahead = ()
            for j in tl.static_range(PARTS_AHEAD):
                there = (i < size) & (first + j < splits)
                ahead += (tl.load(part + (first + j) * size + i, mask=there, other=0.0),)
            for j in tl.static_range(PARTS_AHEAD):
                acc += ahead[j]
        tl.store(out + i, rounded(acc, out.dtype.element_ty), mask=i < size)
    return program - blocks


@triton.jit(do_not_specialize=[f"{name}_{what}" for name in ("dq", "dk", "dv") for what in ("size", "splits")])
def sum_kernel(
    dq_parts, dk_parts, dv_parts, dq, dk, dv,
    dq_size: tl.int64, dk_size: tl.int64, dv_size: tl.int64,
    dq_splits: tl.int32, dk_splits: tl.int32, dv_splits: tl.int32, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums of the parts (splits, size) of gradients, always in the same order. What is not in parts is None."""
    if EARLY:
        gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    if dq_parts is not None:
        program = add_parts(dq_parts, dq, program, dq_size, dq_splits, BLOCK)
    if dk_parts is not None:
        program = add_parts(dk_parts, dk, program, dk_size, dk_splits, BLOCK)
    if dv_parts is not None:
        add_parts(dv_parts, dv, program, dv_size, dv_splits, BLOCK)
