"""Triton kernels of the forward of flash attention: attention, and what merges the parts of a split KV loop.

A program holds one tile of queries, loops over the keys that its queries see and keeps the softmax running: for each row
the largest logit so far, the sum of exponentials relative to it, and their sum with the values. A sink, one more logit of
every row, is added behind the loop.

The KV loop is cut where the mask begins and ends (`tiles.loop_bounds`), so that the many steps in the middle compute none.
Exponentials are powers of two: ``scale`` comes multiplied by log₂ e. It comes as a size, so that the largest logit can
be found before the multiplication; a negative scale is a variant of its own, and so is a cap of the logits: then
``scale`` comes divided by the cap, and what multiplies the hyperbolic tangent is a constant.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.activations import LOG2_E, power_of_two
from warploom.device.online_softmax import finite_max, update_softmax
from warploom.device.packed import is_in_sequence
from warploom.device.product import product, round_to
from warploom.device.rows import Strides
from warploom.ops.flash_attention.triton.tiles import (
    ForwardStrides,
    LseRows,
    Mask,
    Rows,
    Sizes,
    as_factor,
    base_of,
    cap_logits,
    element_offsets,
    key_bounds,
    kv_rows,
    load_factor,
    part_base,
    query_place,
    store_tile,
    term_stride,
    tile_offsets,
    transpose,
    visible,
)

LN_2 = tl.constexpr(0.6931471805599453)


class Packing(NamedTuple):
    """Bounds of packed queries."""

    sequences: tl.int32
    cu_q_stride: tl.int64


class Softmax(NamedTuple):
    """The softmax of a tile of queries, so far."""

    acc: tl.tensor  # (M, E): weighted sums of values
    row_sum: tl.tensor  # (M,): of exponentials
    row_max: tl.tensor  # (M,): the largest logits, in powers of two


@triton.jit
def softmax_step(softmax, logits, n, position, mask, scale, MASKED: tl.constexpr, config: tl.constexpr):
    """Returns weights (M, N) of keys from number ``n`` on, and `Softmax` with them but without their values."""
    logits, factor = cap_logits(logits, scale, config)
    if MASKED:
        key = n + tl.arange(0, config.BLOCK_N)
        logits = tl.where(visible(position[:, None], key[None, :], mask, config), logits, float("-inf"))
    weights, row_sum, row_max, rescale = update_softmax(logits, factor, softmax.row_sum, softmax.row_max, MASKED)
    return weights, Softmax(softmax.acc * rescale[:, None], row_sum, row_max)


@triton.jit
def attend(softmax, q, k, v, begin, end, position, mask, scale, MASKED: tl.constexpr, config: tl.constexpr):
    """Returns `Softmax` with the keys ``begin … end`` (the KV loop)."""
    acc, row_sum, row_max = softmax.acc, softmax.row_sum, softmax.row_max
    PRECISION: tl.constexpr = config.PRECISION
    BLOCK_N: tl.constexpr = config.BLOCK_N
    for n in tl.range(begin, end, BLOCK_N):
        k_ptr, k_rows = kv_rows(k, mask, n, config.VEC, config.BLOCK_D, config)
        k_tile = load_factor(k_ptr, k_rows, n, mask.keys, config.D, MASKED, PRECISION)
        logits = tl.zeros((acc.shape[0], BLOCK_N), dtype=tl.float32)
        logits = product(q, transpose(k_tile, PRECISION), logits, PRECISION)
        softmax = Softmax(acc, row_sum, row_max)
        weights, softmax = softmax_step(softmax, logits, n, position, mask, scale, MASKED, config)
        row_sum, row_max = softmax.row_sum, softmax.row_max
        v_ptr, v_rows = kv_rows(v, mask, n, config.VEC, config.BLOCK_E, config)
        v_tile = load_factor(v_ptr, v_rows, n, mask.keys, config.E, MASKED, PRECISION)
        acc = product(as_factor(weights, v.ptr.dtype.element_ty, PRECISION), v_tile, softmax.acc, PRECISION)
    return Softmax(acc, row_sum, row_max)


@triton.jit
def with_sink(softmax, sink):
    """Returns `Softmax` with one more logit, which has no value, for each row or all of them."""
    logit = sink.to(tl.float32) * LOG2_E
    new_max = tl.maximum(softmax.row_max, logit)
    base = finite_max(new_max)
    rescale = power_of_two(softmax.row_max - base)
    acc = softmax.acc * rescale[:, None]
    return Softmax(acc, softmax.row_sum * rescale + power_of_two(logit - base), new_max)


@triton.jit
def store_results(softmax, sink, head, out, offsets, mask, lse, statistics, row, in_range, rows, in_sequence=None):
    """Store rows of the output, with their sink, their lse and statistics; ``row`` is a number in ``lse``.

    Rows that are not ``in_sequence``, if that is given, have no sink.
    """
    if sink is not None:
        logit = tl.load(sink + head)
        if in_sequence is not None:
            logit = tl.where(in_sequence, logit.to(tl.float32), float("-inf"))
        softmax = with_sink(softmax, logit)
    some = tl.where(softmax.row_sum == 0.0, 1.0, softmax.row_sum)  # where no key was seen: 0 / 1, and lse −inf + 0
    tl.store(out + offsets, round_to(softmax.acc / some[:, None], out.dtype.element_ty), mask=mask)
    tl.store(statistics + row, softmax.row_max, mask=in_range)
    tl.store(statistics + rows + row, softmax.row_sum, mask=in_range)
    tl.store(lse + row, (softmax.row_max + tl.log2(some)) * LN_2, mask=in_range)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, statistics, sink, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
    sizes: Sizes, out_split: tl.int64, strides: ForwardStrides, config: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of one head to the keys of one split of its KV loop.

    With ``PRECISION`` in terms made before, ``k`` and ``v`` are what `terms_kernel` made of them, and so are their strides.
    Writes ``out`` (splits, B, N, H, E), ``lse`` (B, H, N) if there is one split, and ``statistics`` (splits, 2, B, H, N):
    row_max in powers of two, and row_sum relative to that. ``sink`` (H,) comes with one split alone. With
    ``PAGE``, ``k`` and ``v`` are (pages, PAGE, H, F), and ``block_table`` (B, M / PAGE) says which are whose.
    """
    if PDL:  # with the launch that merges parts, which waits for this one
        gdc_launch_dependents()
    heads, group, scale = sizes.heads, sizes.group, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    place = query_place(cu_seqlens_q, cu_seqlens_k, seqused_k, sizes, config)
    split, row, batch, kv_batch, head = place.split, place.row, place.batch, place.kv_batch, place.head
    m, q_start, tokens, k_start, keys = place.m, place.q_start, place.tokens, place.k_start, place.keys
    if m < tokens:
        q_ptr = base_of(q, batch, q_start + m, head, strides.q, config.VEC)
        table = None
        if config.PAGE is not None:
            table = block_table + kv_batch.to(tl.int64) * (sizes.keys // config.PAGE)
            kv_batch = batch * 0
        k_ptr = base_of(k, kv_batch, k_start, head // group, strides.k, config.VEC)
        v_ptr = base_of(v, kv_batch, k_start, head // group, strides.v, config.VEC)
        k_offsets = tile_offsets(strides.k, BLOCK_N, BLOCK_D, config)
        v_offsets = tile_offsets(strides.v, BLOCK_N, BLOCK_E, config)
        q_offsets = tile_offsets(strides.q, BLOCK_M, BLOCK_D, config)
        q_rows = Rows(q_ptr, q_offsets, strides.q, term_stride(sizes, sizes.tokens, heads, D))
        q_tile = load_factor(q_ptr, q_rows, m, tokens, D, True, config.PRECISION)
        k_rows = Rows(k_ptr, k_offsets, strides.k, term_stride(sizes, sizes.keys, heads, D, group))
        v_rows = Rows(v_ptr, v_offsets, strides.v, term_stride(sizes, sizes.keys, heads, E, group))

        offset = keys - tokens  # the last query stands at the last key
        position = m + offset + tl.arange(0, BLOCK_M)
        last = tl.minimum(m + BLOCK_M, tokens) - 1 + offset
        mask = Mask(keys, sizes.left, sizes.right, table, sizes.cu_k_stride)
        loop = key_bounds(m + offset, last, mask, split, sizes.splits, config)
        acc = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
        row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        softmax = Softmax(acc, row_sum, row_max)
        if config.SHORT:
            softmax = attend(
                softmax, q_tile, k_rows, v_rows, loop.begin, loop.end, position, mask, scale, True, config
            )
        else:
            if config.HAS_LEFT:
                softmax = attend(
                    softmax,
                    q_tile,
                    k_rows,
                    v_rows,
                    loop.begin,
                    loop.full_begin,
                    position,
                    mask,
                    scale,
                    True,
                    config,
                )
            softmax = attend(
                softmax,
                q_tile,
                k_rows,
                v_rows,
                loop.full_begin,
                loop.full_end,
                position,
                mask,
                scale,
                False,
                config,
            )
            softmax = attend(
                softmax, q_tile, k_rows, v_rows, loop.full_end, loop.end, position, mask, scale, True, config
            )
        if sink is not None:
            logit = tl.load(sink + head)
            if cu_seqlens_q is not None:
                in_sequence = is_in_sequence(q_start, cu_seqlens_q, sizes.cu_q_stride, sizes.sequences)
                logit = tl.where(in_sequence, logit.to(tl.float32), float("-inf"))
            softmax = with_sink(softmax, logit)
        row_sum, row_max = softmax.row_sum, softmax.row_max

        out_ptr = part_base(out, batch, q_start + m, head, split, out_split, strides.out, config)
        out_offsets = tile_offsets(strides.out, BLOCK_M, BLOCK_E, config)
        some = tl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: 0 / 1, and lse −inf + 0
        store_tile(out_ptr + out_offsets, softmax.acc / some[:, None], m, tokens, E)
        size = tl.cast(sizes.batch_size, tl.int64) * heads * sizes.tokens
        rows = row.to(tl.int64) * sizes.tokens + q_start + m + tl.arange(0, BLOCK_M)
        in_range = m + tl.arange(0, BLOCK_M) < tokens
        tl.store(statistics + split * 2 * size + rows, row_max, mask=in_range)
        tl.store(statistics + (split * 2 + 1) * size + rows, row_sum, mask=in_range)
        if lse is not None:
            tl.store(lse + rows, (row_max + tl.log2(some)) * LN_2, mask=in_range)


@triton.jit
def combine_kernel(
    part, part_statistics, out, lse, statistics, sink, cu_seqlens_q,
    lse_rows: LseRows, splits: tl.int32, out_split: tl.int64, packing: Packing, out_strides: Strides,
    tiles: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write what `forward_kernel` does for one split, from what it wrote for several; always in the same order.

    Parts are in float32, with the strides of ``out``. ``cu_seqlens_q`` comes with a sink alone, if queries are packed.
    """
    if PDL:
        gdc_wait()
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
    offsets = element_offsets(batch, token, head, out_strides, feature, VEC, UNIT)
    row_max = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_R,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for first in range(0, splits, AHEAD):
        accs, sums, maxima = (), (), ()
        for i in tl.static_range(AHEAD):
            split = first + i
            left = split < splits
            maxima += (
                tl.load(part_statistics + split * 2 * rows + row, mask=in_range & left, other=float("-inf")),
            )
            sums += (tl.load(part_statistics + (split * 2 + 1) * rows + row, mask=in_range & left, other=0.0),)
            accs += (tl.load(part + split * (out_split * VEC) + offsets, mask=mask & left, other=0.0),)
        before = row_max
        for i in tl.static_range(AHEAD):
            row_max = tl.maximum(row_max, maxima[i])
        base = finite_max(row_max)
        rescale = power_of_two(before - base)
        row_sum *= rescale
        acc *= rescale[:, None]
        for i in tl.static_range(AHEAD):
            weight = sums[i] * power_of_two(maxima[i] - base)
            row_sum += weight
            acc += weight[:, None] * accs[i]
    softmax = Softmax(acc, row_sum, row_max)
    in_sequence = None
    if cu_seqlens_q is not None:
        in_sequence = is_in_sequence(token, cu_seqlens_q, packing.cu_q_stride, packing.sequences)
    store_results(softmax, sink, head, out, offsets, mask, lse, statistics, row, in_range, rows, in_sequence)
