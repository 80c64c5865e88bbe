"""Triton kernels of the backward of flash attention.

With weights ``P = softmax(S)``, ``S = scale · Q Kᵀ``, and ``dP = dO Vᵀ``: ``dV = Pᵀ dO``, ``dS = P ⊙ (dP − δ)`` with
``δ = rowsum(dO ⊙ O) − dlse``, ``dQ = scale · dS K`` and ``dK = scale · dSᵀ Q``. Weights are computed again from the
statistics of their rows: ``2^(S − lse)`` with lse in powers of two, for float32 with row_max in its place and times
``inverse = 1 / row_sum``, because the rounding of a logarithm would show; ``S`` has the bits of the forward's. Keys
and values loop over the queries (`key_kernel`), queries loop over the keys (`query_kernel`): two products more than one
kernel for both would need, and no atomic additions, so that the same inputs always give the same bits. On Hopper there is
one kernel for both, which adds in one order (`hopper.backward_fused`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.activations import LOG2_E, power_of_two
from warploom.device.product import product, product_as_transposed, round_to
from warploom.device.rows import Strides
from warploom.ops.flash_attention.triton.tiles import (
    PARTS_AHEAD,
    BackwardStrides,
    LseRows,
    Mask,
    Rows,
    Sizes,
    as_factor,
    base_of,
    cap_logits,
    key_bounds,
    load_factor,
    loop_bounds,
    part_base,
    program_order,
    query_place,
    row_offsets,
    store_tile,
    term_stride,
    tile_bounds,
    tile_offsets,
    transpose,
    used_keys,
    visible,
)


class StatisticStrides(NamedTuple):
    """Strides of a number for each row (B, H, N)."""

    b: tl.int64
    h: tl.int64
    n: tl.int64


@triton.jit
def prepare_kernel(
    out, grad, statistics, dlse, lse, delta, inverse, counters, tiles_added,
    lse_rows: LseRows, dlse_strides: StatisticStrides, out_strides: Strides, grad_strides: Strides,
    tiles: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find what every row needs: ``δ``, lse and inverse of its weights; an lse of +inf makes weights zero.

    ``counters`` (2,), with which the kernels for Hopper count their tiles, and ``tiles_added`` (2, rows), by which one
    of them adds in order, become zero. With ``PDL`` the launch after it may be put in place while this one still runs.
    """
    if PDL:
        gdc_launch_dependents()
    if counters is not None and tl.program_id(0) == 0:
        tl.store(counters + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))
    VEC: tl.constexpr = tiles.VEC
    UNIT: tl.constexpr = tiles.UNIT
    BLOCK_R: tl.constexpr = tiles.BLOCK_R
    BLOCK_E: tl.constexpr = tiles.BLOCK_F
    rows, tokens, heads = lse_rows.count, lse_rows.tokens, lse_rows.heads
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_range = row < rows
    token, head, batch = row % tokens, row // tokens % heads, row // tokens // heads
    feature = tl.arange(0, BLOCK_E)
    mask = in_range[:, None] & (feature < tiles.F)[None, :]
    out_rows = row_offsets(batch, token, head, out_strides, VEC)
    grad_rows = row_offsets(batch, token, head, grad_strides, VEC)
    out_ptrs = out + out_rows[:, None] + (feature if UNIT else feature * out_strides.f)[None, :]
    grad_ptrs = grad + grad_rows[:, None] + (feature if UNIT else feature * grad_strides.f)[None, :]
    o = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    if PRECISION == "bf16":  # as the products take it, so that dP − δ is zero where a query sees one key
        do = round_to(do, tl.bfloat16).to(tl.float32)
    sums = tl.sum(o * do, axis=1)
    if dlse is not None:
        dlse_ptrs = dlse + batch * dlse_strides.b + head * dlse_strides.h + token * dlse_strides.n
        sums -= tl.load(dlse_ptrs, mask=in_range, other=0.0)
    row_max = tl.load(statistics + row, mask=in_range, other=0.0)
    row_sum = tl.load(statistics + rows + row, mask=in_range, other=0.0)
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    if inverse is not None:
        tl.store(inverse + row, 1.0 / row_sum, mask=in_range)
    else:
        row_max += tl.log2(row_sum)
    if tiles_added is not None:
        tl.store(tiles_added + row, tl.zeros_like(empty).to(tl.int32), mask=in_range)
        tl.store(tiles_added + rows + row, tl.zeros_like(empty).to(tl.int32), mask=in_range)
    tl.store(delta + row, tl.where(empty, 0.0, sums), mask=in_range)
    tl.store(lse + row, tl.where(empty, float("inf"), row_max), mask=in_range)


@triton.jit
def round_kernel(
    added, tiles_added, dq, lse_rows: LseRows, scale: tl.float32, dq_strides: Strides,
    tiles: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of queries from the sums ``added`` (B, H, N, D), which lack the scale.

    ``tiles_added`` (B, H, N) at the first of ``BLOCK_M`` queries says how many tiles were added; where none were,
    ``added`` holds anything.
    """
    VEC: tl.constexpr = tiles.VEC
    UNIT: tl.constexpr = tiles.UNIT
    D: tl.constexpr = tiles.F
    BLOCK_R: tl.constexpr = tiles.BLOCK_R
    BLOCK_D: tl.constexpr = tiles.BLOCK_F
    rows, tokens, heads = lse_rows.count, lse_rows.tokens, lse_rows.heads
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head, batch = row % tokens, row // tokens % heads, row // tokens // heads
    feature = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (feature < D)[None, :]
    dq_rows = row_offsets(batch, token, head, dq_strides, VEC)
    dq_ptrs = dq + dq_rows[:, None] + (feature if UNIT else feature * dq_strides.f)[None, :]
    if PDL:
        gdc_wait()
    some = tl.load(tiles_added + row - token % BLOCK_M, mask=row < rows, other=0) > 0
    gradient = tl.load(added + row[:, None] * D + feature[None, :], mask=mask & some[:, None], other=0.0)
    tl.store(dq_ptrs, round_to(gradient * scale, dq.dtype.element_ty), mask=mask)


@triton.jit
def sink_kernel(sink, statistics, delta, dsink, lse_rows: LseRows, in_head: tl.int32, BLOCK: tl.constexpr):
    """Write the gradient of a head's sink: ``−Σ w · δ`` over its rows, where ``w = exp(sink − lse)`` is the sink's weight."""
    rows, tokens, heads = lse_rows.count, lse_rows.tokens, lse_rows.heads
    head = tl.program_id(0)
    logit = tl.load(sink + head).to(tl.float32) * LOG2_E
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, in_head, BLOCK):
        place = start + tl.arange(0, BLOCK)
        in_range = place < in_head
        row = ((place // tokens).to(tl.int64) * heads + head) * tokens + place % tokens
        row_max = tl.load(statistics + row, mask=in_range, other=0.0)
        row_sum = tl.load(statistics + rows + row, mask=in_range, other=0.0)
        empty = row_sum == 0.0  # no key is seen, and the sink is −inf
        weight = tl.where(empty, 0.0, power_of_two(logit - row_max) / tl.where(empty, 1.0, row_sum))
        sums -= weight * tl.load(delta + row, mask=in_range, other=0.0)
    tl.store(dsink + head, round_to(tl.sum(sums), dsink.dtype.element_ty))


class Queries(NamedTuple):
    """Tensors of the queries of a key head, from the first of a sequence on."""

    q: Rows
    do: Rows
    lse: tl.tensor  # (group, tokens): pointers
    delta: tl.tensor  # (group, tokens): pointers
    inverse: tl.tensor | None  # (group, tokens): pointers
    row_h: tl.int64  # from a head to the next, of the last three
    group: tl.int32
    tokens: tl.int32  # of this sequence
    offset: tl.int32  # query 0 stands at this key


@triton.jit
def uncap_gradients(dlogits, logits, config: tl.constexpr):
    """Returns gradients of logits, from those of capped logits; see `cap_logits`."""
    if config.SOFTCAP is not None:
        dlogits = dlogits * (1.0 - logits * logits)
    return dlogits


@triton.jit
def query_loop(dk, dv, k, v, queries, begin, end, key, mask, scale, MASKED: tl.constexpr, config: tl.constexpr):
    """Add the gradients of keys (N, D), without the scale, and of values (N, E) from queries ``begin … end``.

    One loop goes over every head of a group, which keeps registers free. The last queries come first: in causal
    attention these see the most keys and give each the smallest weight, so that sums grow with what is added to them,
    and what float32 rounds off stays small however long the loop is.
    """
    q, do = queries.q, queries.do
    PRECISION: tl.constexpr = config.PRECISION
    BLOCK_M: tl.constexpr = config.BLOCK_M
    q_step, do_step = q.strides.n * config.VEC, do.strides.n * config.VEC
    q_head, do_head = q.strides.h * config.VEC, do.strides.h * config.VEC
    steps = tl.cdiv(end - begin, BLOCK_M)
    for step in tl.range(0, queries.group * steps):
        place = step // queries.group
        member = step - place * queries.group
        m = begin + (steps - 1 - place) * BLOCK_M
        query = m + tl.arange(0, BLOCK_M)
        row = member * queries.row_h + query
        q_ptr = q.ptr + member * q_head + m * q_step
        q_tile = load_factor(q_ptr, q, m, queries.tokens, config.D, MASKED, PRECISION)
        logits = tl.zeros((dk.shape[0], BLOCK_M), dtype=tl.float32)
        logits = product_as_transposed(k, transpose(q_tile, PRECISION), logits, PRECISION)
        logits, factor = cap_logits(logits, scale, config)
        if MASKED:
            row_lse = tl.load(queries.lse + row, mask=query < queries.tokens, other=float("inf"))
            row_delta = tl.load(queries.delta + row, mask=query < queries.tokens, other=0.0)
        else:
            row_lse = tl.load(queries.lse + row)
            row_delta = tl.load(queries.delta + row)
        weights = power_of_two(logits * factor - row_lse[None, :])  # (N, M)
        if queries.inverse is not None:
            weights *= tl.load(queries.inverse + row, mask=query < queries.tokens, other=0.0)[None, :]
        if MASKED:
            seen = visible((query + queries.offset)[None, :], key[:, None], mask, config)
            weights = tl.where(seen, weights, 0.0)
        do_ptr = do.ptr + member * do_head + m * do_step
        do_tile = load_factor(do_ptr, do, m, queries.tokens, config.E, MASKED, PRECISION)
        dv = product(as_factor(weights, do.ptr.dtype.element_ty, PRECISION), do_tile, dv, PRECISION)
        dweights = tl.zeros((dk.shape[0], BLOCK_M), dtype=tl.float32)
        dweights = product(v, transpose(do_tile, PRECISION), dweights, PRECISION)
        dlogits = uncap_gradients(weights * (dweights - row_delta[None, :]), logits, config)
        dk = product(as_factor(dlogits, q.ptr.dtype.element_ty, PRECISION), q_tile, dk, PRECISION)
    return dk, dv


class KeyParts(NamedTuple):
    """Distances from a part of the gradients to the next, where loops are split."""

    dk: tl.int64
    dv: tl.int64


@triton.jit
def key_kernel(
    q, k, v, grad, lse, delta, inverse, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_k,
    sizes: Sizes, grad_scale: tl.float32, parts: KeyParts, strides: BackwardStrides, dk_strides: Strides, dv_strides: Strides, config: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of keys and values of one key head.

    They come from one split of the loop over the queries of every query head of its group. Gradients of keys that are
    not used are not written.

    With ``PDL`` the launch after it, of `query_kernel`, starts where this one leaves multiprocessors idle. Before, it
    waits for what both read; keys and values of its own are on their way by then, unless they come in terms made before.
    """
    heads, group, scale = sizes.heads, sizes.group, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    PRECISION: tl.constexpr = config.PRECISION
    key_heads = heads // group
    block, row = program_order(sizes.blocks * sizes.splits, sizes.batch_size * key_heads, sizes.section)
    split = block % sizes.splits
    block = block // sizes.splits
    batch, key_head = row // key_heads, row % key_heads
    bounds = tile_bounds(
        block, cu_seqlens_k, sizes.cu_k_stride, cu_seqlens_q, sizes.cu_q_stride, sizes.keys, sizes.tokens,
        sizes.sequences, BLOCK_N,
    )  # fmt: skip
    n, k_start, q_start, tokens = bounds.first, bounds.start, bounds.other_start, bounds.other_length
    keys = used_keys(seqused_k, batch, bounds.length)
    if n < keys:
        MADE: tl.constexpr = PRECISION == "3-term" or PRECISION == "2-term"
        k_ptr = base_of(k, batch, k_start + n, key_head, strides.k, config.VEC)
        v_ptr = base_of(v, batch, k_start + n, key_head, strides.v, config.VEC)
        q_term, do_term = term_stride(sizes, sizes.tokens, heads, D), term_stride(sizes, sizes.tokens, heads, E)
        k_term, v_term = term_stride(sizes, sizes.keys, key_heads, D), term_stride(sizes, sizes.keys, key_heads, E)
        if PDL and MADE:
            gdc_wait()
        k_rows = Rows(k_ptr, tile_offsets(strides.k, BLOCK_N, BLOCK_D, config), strides.k, k_term)
        v_rows = Rows(v_ptr, tile_offsets(strides.v, BLOCK_N, BLOCK_E, config), strides.v, v_term)
        k_tile = load_factor(k_ptr, k_rows, n, keys, D, True, PRECISION)
        v_tile = load_factor(v_ptr, v_rows, n, keys, E, True, PRECISION)
        if PDL:
            if not MADE:
                gdc_wait()
            gdc_launch_dependents()

        offset = keys - tokens  # the last query stands at the last key
        key = n + tl.arange(0, BLOCK_N)
        last = tl.minimum(n + BLOCK_N, keys) - 1 - offset
        loop = loop_bounds(
            n - offset, last, sizes.right, sizes.left, tokens, split, sizes.splits, config.HAS_RIGHT,
            config.HAS_LEFT, BLOCK_M,
        )  # fmt: skip
        mask = Mask(keys, sizes.left, sizes.right)
        head = key_head * group
        q_ptr = base_of(q, batch, q_start, head, strides.q, config.VEC)
        do_ptr = base_of(grad, batch, q_start, head, strides.grad, config.VEC)
        q_rows = Rows(q_ptr, tile_offsets(strides.q, BLOCK_M, BLOCK_D, config), strides.q, q_term)
        do_rows = Rows(do_ptr, tile_offsets(strides.grad, BLOCK_M, BLOCK_E, config), strides.grad, do_term)
        first = (batch.to(tl.int64) * heads + head) * sizes.tokens + q_start
        head_inverse = None if inverse is None else inverse + first
        dk_tile = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        dv_tile = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
        queries = Queries(
            q_rows, do_rows, lse + first, delta + first, head_inverse, tl.cast(sizes.tokens, tl.int64), group, tokens,
            offset,
        )  # fmt: skip
        if config.SHORT:
            dk_tile, dv_tile = query_loop(
                dk_tile, dv_tile, k_tile, v_tile, queries, loop.begin, loop.end, key, mask, scale, True, config
            )
        else:
            dk_tile, dv_tile = query_loop(
                dk_tile, dv_tile, k_tile, v_tile, queries, loop.full_end, loop.end, key, mask, scale, True, config
            )
            dk_tile, dv_tile = query_loop(
                dk_tile, dv_tile, k_tile, v_tile, queries, loop.full_begin, loop.full_end, key, mask, scale, False,
                config,
            )  # fmt: skip
            if config.HAS_RIGHT:
                dk_tile, dv_tile = query_loop(
                    dk_tile, dv_tile, k_tile, v_tile, queries, loop.begin, loop.full_begin, key, mask, scale, True,
                    config,
                )  # fmt: skip
        row = k_start + n
        dk_ptr = part_base(dk, batch, row, key_head, split, parts.dk, dk_strides, config)
        store_tile(dk_ptr + tile_offsets(dk_strides, BLOCK_N, BLOCK_D, config), dk_tile * grad_scale, n, keys, D)
        dv_ptr = part_base(dv, batch, row, key_head, split, parts.dv, dv_strides, config)
        store_tile(dv_ptr + tile_offsets(dv_strides, BLOCK_N, BLOCK_E, config), dv_tile, n, keys, E)
    elif PDL:
        gdc_wait()
        gdc_launch_dependents()


class QueryTile(NamedTuple):
    """A tile of queries."""

    q: tl.tensor  # (M, D), or terms of it
    do: tl.tensor  # (M, E), or terms of it
    lse: tl.tensor  # (M,)
    delta: tl.tensor  # (M,)
    position: tl.tensor  # the key that a query stands at


@triton.jit
def kv_loop(dq, rows, k, v, begin, end, mask, scale, MASKED: tl.constexpr, config: tl.constexpr):
    """Add the gradients of queries (M, D), without the scale, from keys ``begin … end``."""
    PRECISION: tl.constexpr = config.PRECISION
    BLOCK_N: tl.constexpr = config.BLOCK_N
    k_step, v_step = k.strides.n * config.VEC, v.strides.n * config.VEC
    for n in tl.range(begin, end, BLOCK_N):
        k_tile = load_factor(k.ptr + n * k_step, k, n, mask.keys, config.D, MASKED, PRECISION)
        logits = tl.zeros((dq.shape[0], BLOCK_N), dtype=tl.float32)
        logits = product(rows.q, transpose(k_tile, PRECISION), logits, PRECISION)
        logits, factor = cap_logits(logits, scale, config)
        weights = power_of_two(logits * factor - rows.lse[:, None])  # (M, N)
        if MASKED:
            key = n + tl.arange(0, BLOCK_N)
            weights = tl.where(visible(rows.position[:, None], key[None, :], mask, config), weights, 0.0)
        v_tile = load_factor(v.ptr + n * v_step, v, n, mask.keys, config.E, MASKED, PRECISION)
        dweights = tl.zeros((dq.shape[0], BLOCK_N), dtype=tl.float32)
        dweights = product(rows.do, transpose(v_tile, PRECISION), dweights, PRECISION)
        dlogits = uncap_gradients(weights * (dweights - rows.delta[:, None]), logits, config)
        dq = product(as_factor(dlogits, k.ptr.dtype.element_ty, PRECISION), k_tile, dq, PRECISION)
    return dq


@triton.jit
def query_kernel(
    q, k, v, grad, lse, delta, inverse, dq, cu_seqlens_q, cu_seqlens_k, seqused_k,
    sizes: Sizes, grad_scale: tl.float32, dq_split: tl.int64, strides: BackwardStrides, dq_strides: Strides,
    config: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of queries of one head, over one split of its KV loop.

    With ``PDL`` it runs beside `key_kernel`, of which it reads nothing, and does not end before that has ended;
    what sums up parts may be put in place while it still runs.
    """
    if PDL:
        gdc_launch_dependents()
    heads, group, scale = sizes.heads, sizes.group, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    PRECISION: tl.constexpr = config.PRECISION
    place = query_place(cu_seqlens_q, cu_seqlens_k, seqused_k, sizes, config)
    split, row, batch, head = place.split, place.row, place.batch, place.head
    m, q_start, tokens, k_start, keys = place.m, place.q_start, place.tokens, place.k_start, place.keys
    if m < tokens:
        q_ptr = base_of(q, batch, q_start + m, head, strides.q, config.VEC)
        do_ptr = base_of(grad, batch, q_start + m, head, strides.grad, config.VEC)
        k_ptr = base_of(k, batch, k_start, head // group, strides.k, config.VEC)
        v_ptr = base_of(v, batch, k_start, head // group, strides.v, config.VEC)
        k_offsets = tile_offsets(strides.k, BLOCK_N, BLOCK_D, config)
        v_offsets = tile_offsets(strides.v, BLOCK_N, BLOCK_E, config)
        q_offsets = tile_offsets(strides.q, BLOCK_M, BLOCK_D, config)
        do_offsets = tile_offsets(strides.grad, BLOCK_M, BLOCK_E, config)
        q_rows = Rows(q_ptr, q_offsets, strides.q, term_stride(sizes, sizes.tokens, heads, D))
        do_rows = Rows(do_ptr, do_offsets, strides.grad, term_stride(sizes, sizes.tokens, heads, E))
        q_tile = load_factor(q_ptr, q_rows, m, tokens, D, True, PRECISION)
        do_tile = load_factor(do_ptr, do_rows, m, tokens, E, True, PRECISION)
        k_rows = Rows(k_ptr, k_offsets, strides.k, term_stride(sizes, sizes.keys, heads, D, group))
        v_rows = Rows(v_ptr, v_offsets, strides.v, term_stride(sizes, sizes.keys, heads, E, group))
        first = row.to(tl.int64) * sizes.tokens + q_start + m
        local = tl.arange(0, BLOCK_M)
        in_range = m + local < tokens
        row_lse = tl.load(lse + first + local, mask=in_range, other=float("inf"))
        row_delta = tl.load(delta + first + local, mask=in_range, other=0.0)

        offset = keys - tokens  # the last query stands at the last key
        position = m + offset + local
        last = tl.minimum(m + BLOCK_M, tokens) - 1 + offset
        mask = Mask(keys, sizes.left, sizes.right)
        loop = key_bounds(m + offset, last, mask, split, sizes.splits, config)
        rows = QueryTile(q_tile, do_tile, row_lse, row_delta, position)
        dq_tile = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if config.SHORT:
            dq_tile = kv_loop(dq_tile, rows, k_rows, v_rows, loop.begin, loop.end, mask, scale, True, config)
        else:
            if config.HAS_LEFT:
                dq_tile = kv_loop(
                    dq_tile, rows, k_rows, v_rows, loop.begin, loop.full_begin, mask, scale, True, config
                )
            dq_tile = kv_loop(
                dq_tile, rows, k_rows, v_rows, loop.full_begin, loop.full_end, mask, scale, False, config
            )
            dq_tile = kv_loop(dq_tile, rows, k_rows, v_rows, loop.full_end, loop.end, mask, scale, True, config)
        if inverse is not None:
            dq_tile *= tl.load(inverse + first + local, mask=in_range, other=0.0)[:, None]
        dq_ptr = part_base(dq, batch, q_start + m, head, split, dq_split, dq_strides, config)
        store_tile(dq_ptr + tile_offsets(dq_strides, BLOCK_M, BLOCK_D, config), dq_tile * grad_scale, m, tokens, D)
    if PDL:
        if tl.program_id(0) == 0:  # one program is enough to hold what is launched next
            gdc_wait()


@triton.jit
def add_parts(part, out, program, size, splits, BLOCK: tl.constexpr):
    """Store block number ``program`` of the sum of parts (splits, size), if it has that; returns its number in the next sum."""
    blocks = tl.cdiv(size, BLOCK)
    if (program >= 0) & (program < blocks):
        i = program * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, splits, PARTS_AHEAD):
            ahead = ()
            for j in tl.static_range(PARTS_AHEAD):
                mask = (i < size) & (first + j < splits)
                ahead += (tl.load(part + (first + j) * size + i, mask=mask, other=0.0),)
            for j in tl.static_range(PARTS_AHEAD):
                acc += ahead[j]
        tl.store(out + i, round_to(acc, out.dtype.element_ty), mask=i < size)
    return program - blocks


@triton.jit
def sum_kernel(
    dq_parts, dk_parts, dv_parts, dq, dk, dv,
    dq_size: tl.int64, dk_size: tl.int64, dv_size: tl.int64,
    dq_splits: tl.int32, dk_splits: tl.int32, dv_splits: tl.int32, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the parts (splits, size) of gradients, always in the same order. What is not in parts is None."""
    if PDL:
        gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    if dq_parts is not None:
        program = add_parts(dq_parts, dq, program, dq_size, dq_splits, BLOCK)
    if dk_parts is not None:
        program = add_parts(dk_parts, dk, program, dk_size, dk_splits, BLOCK)
    if dv_parts is not None:
        add_parts(dv_parts, dv, program, dv_size, dv_splits, BLOCK)
