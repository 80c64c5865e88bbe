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
from warploom.device.packed import is_in_sequence
from warploom.device.product import product, rounded
from warploom.device.rows import Strides
from warploom.ops.flash_attention.triton.tiles import (
    Mask,
    Rows,
    Sizes,
    as_factor,
    base_of,
    capped,
    key_bounds,
    kv_rows,
    load_factor,
    part_base,
    query_place,
    row_offsets,
    store_tile,
    term_stride,
    tile_offsets,
    transposed,
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
def softmax_step(softmax, logits, n, position, mask, scale, MASKED: tl.constexpr, variant: tl.constexpr):
    """Weights (M, N) of keys from number ``n`` on, and `Softmax` with them but without their values.

    ``row_max`` is kept as rounded, so that sums are rescaled by exactly 1 where it stays the same: ``max * scale −
    row_max``, one fused operation, is the rounding of that product instead of zero.
    """
    acc, row_sum, row_max = softmax
    logits, factor = capped(logits, scale, variant)
    if MASKED:
        key = n + tl.arange(0, variant.BLOCK_N)
        logits = tl.where(visible(position[:, None], key[None, :], mask, variant), logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * factor)
    base = new_max
    if MASKED:  # a row that has seen no key yet: −inf − (−inf) must not become NaN
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = power_of_two(logits * factor - base[:, None])
    rescale = power_of_two(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    return weights, Softmax(acc * rescale[:, None], row_sum, new_max)


@triton.jit
def attend(softmax, q, k, v, begin, end, position, mask, scale, MASKED: tl.constexpr, variant: tl.constexpr):
    """KV loop over keys ``begin … end``."""
    acc, row_sum, row_max = softmax
    PRECISION: tl.constexpr = variant.PRECISION
    BLOCK_N: tl.constexpr = variant.BLOCK_N
    for n in tl.range(begin, end, BLOCK_N):
        k_ptr, k_rows = kv_rows(k, mask, n, variant.VEC, variant.BLOCK_D, variant)
        k_tile = load_factor(k_ptr, k_rows, n, mask.keys, variant.D, MASKED, PRECISION)
        logits = tl.zeros((acc.shape[0], BLOCK_N), dtype=tl.float32)
        logits = product(q, transposed(k_tile, PRECISION), logits, PRECISION)
        weights, softmax = softmax_step(
            Softmax(acc, row_sum, row_max), logits, n, position, mask, scale, MASKED, variant
        )
        acc, row_sum, row_max = softmax
        v_ptr, v_rows = kv_rows(v, mask, n, variant.VEC, variant.BLOCK_E, variant)
        v_tile = load_factor(v_ptr, v_rows, n, mask.keys, variant.E, MASKED, PRECISION)
        acc = product(as_factor(weights, v.ptr.dtype.element_ty, PRECISION), v_tile, acc, PRECISION)
    return Softmax(acc, row_sum, row_max)


@triton.jit
def with_sink(softmax, sink):
    """`Softmax` with one more logit, which has no value, for each row or all of them."""
    acc, row_sum, row_max = softmax
    logit = sink.to(tl.float32) * LOG2_E
    new_max = tl.maximum(row_max, logit)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = power_of_two(row_max - base)
    return Softmax(acc * rescale[:, None], row_sum * rescale + power_of_two(logit - base), new_max)


@triton.jit
def store_results(softmax, sink, head, out, offsets, mask, lse, statistics, row, in_range, rows, in_sequence=None):
    """Rows of the output, with their sink, and what is left beside them; ``row`` is a number in ``lse``.

    Rows that are not ``in_sequence``, if that is given, have no sink.
    """
    if sink is not None:
        logit = tl.load(sink + head)
        if in_sequence is not None:
            logit = tl.where(in_sequence, logit.to(tl.float32), float("-inf"))
        softmax = with_sink(softmax, logit)
    acc, row_sum, row_max = softmax
    some = tl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: 0 / 1, and lse −inf + 0
    tl.store(out + offsets, rounded(acc / some[:, None], out.dtype.element_ty), mask=mask)
    tl.store(statistics + row, row_max, mask=in_range)
    tl.store(statistics + rows + row, row_sum, mask=in_range)
    tl.store(lse + row, (row_max + tl.log2(some)) * LN_2, mask=in_range)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, statistics, sink, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
    sizes: Sizes, out_split: tl.int64,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, out_strides: Strides,
    variant: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, over one split of its KV loop.

    With ``PRECISION`` in terms made before, ``k`` and ``v`` are what `terms_kernel` made of them, and so are their strides.
    Writes ``out`` (splits, B, N, H, E), ``lse`` (B, H, N) if there is one split, and ``statistics`` (splits, 2, B, H, N):
    row_max in powers of two, and row_sum relative to that. ``sink`` (H,) comes with one split alone. With
    ``PAGE``, ``k`` and ``v`` are (pages, PAGE, H, F), and ``block_table`` (B, M / PAGE) says which are whose.
    """
    if PDL:  # with the launch that merges parts, which waits for this one
        gdc_launch_dependents()
    heads, group, scale = sizes.heads, sizes.group, sizes.scale
    D: tl.constexpr = variant.D
    E: tl.constexpr = variant.E
    BLOCK_M: tl.constexpr = variant.BLOCK_M
    BLOCK_N: tl.constexpr = variant.BLOCK_N
    BLOCK_D: tl.constexpr = variant.BLOCK_D
    BLOCK_E: tl.constexpr = variant.BLOCK_E
    place = query_place(cu_seqlens_q, cu_seqlens_k, seqused_k, sizes, variant)
    split, row, batch, kv_batch, head = place.split, place.row, place.batch, place.kv_batch, place.head
    m, q_start, tokens, k_start, keys = place.m, place.q_start, place.tokens, place.k_start, place.keys
    if m < tokens:
        q_ptr = base_of(q, batch, q_start + m, head, q_strides, variant.VEC)
        table = None
        if variant.PAGE is not None:
            table = block_table + kv_batch.to(tl.int64) * (sizes.keys // variant.PAGE)
            kv_batch = batch * 0
        k_ptr = base_of(k, kv_batch, k_start, head // group, k_strides, variant.VEC)
        v_ptr = base_of(v, kv_batch, k_start, head // group, v_strides, variant.VEC)
        k_offsets = tile_offsets(k_strides, BLOCK_N, BLOCK_D, variant)
        v_offsets = tile_offsets(v_strides, BLOCK_N, BLOCK_E, variant)
        q_offsets = tile_offsets(q_strides, BLOCK_M, BLOCK_D, variant)
        q_rows = Rows(q_ptr, q_offsets, q_strides, term_stride(sizes, sizes.tokens, heads, D))
        q_tile = load_factor(q_ptr, q_rows, m, tokens, D, True, variant.PRECISION)
        k_rows = Rows(k_ptr, k_offsets, k_strides, term_stride(sizes, sizes.keys, heads, D, group))
        v_rows = Rows(v_ptr, v_offsets, v_strides, term_stride(sizes, sizes.keys, heads, E, group))

        offset = keys - tokens  # the last query stands at the last key
        position = m + offset + tl.arange(0, BLOCK_M)
        last = tl.minimum(m + BLOCK_M, tokens) - 1 + offset
        mask = Mask(keys, sizes.left, sizes.right, table, sizes.cu_k_stride)
        begin, full_begin, full_end, end = key_bounds(m + offset, last, mask, split, sizes.splits, variant)
        acc = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
        row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        softmax = Softmax(acc, row_sum, row_max)
        if SHORT:
            softmax = attend(softmax, q_tile, k_rows, v_rows, begin, end, position, mask, scale, True, variant)
        else:
            if variant.HAS_LEFT:
                softmax = attend(
                    softmax, q_tile, k_rows, v_rows, begin, full_begin, position, mask, scale, True, variant
                )
            softmax = attend(
                softmax, q_tile, k_rows, v_rows, full_begin, full_end, position, mask, scale, False, variant
            )
            softmax = attend(softmax, q_tile, k_rows, v_rows, full_end, end, position, mask, scale, True, variant)
        if sink is not None:
            logit = tl.load(sink + head)
            if cu_seqlens_q is not None:
                in_sequence = is_in_sequence(q_start, cu_seqlens_q, sizes.cu_q_stride, sizes.sequences)
                logit = tl.where(in_sequence, logit.to(tl.float32), float("-inf"))
            softmax = with_sink(softmax, logit)
        acc, row_sum, row_max = softmax

        out_ptr = part_base(out, batch, q_start + m, head, split, out_split, out_strides, variant)
        out_offsets = tile_offsets(out_strides, BLOCK_M, BLOCK_E, variant)
        some = tl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: 0 / 1, and lse −inf + 0
        store_tile(out_ptr + out_offsets, acc / some[:, None], m, tokens, E)
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
    rows: tl.int64, tokens: tl.int32, heads: tl.int32, splits: tl.int32, out_split: tl.int64,
    packing: Packing, out_strides: Strides,
    VEC: tl.constexpr, UNIT: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write what `forward_kernel` does for one split, from what it wrote for several; always in the same order.

    A row is a (batch entry, head, token), tokens fastest, as in ``lse``. Parts are in float32, with the strides of
    ``out``. ``cu_seqlens_q`` comes with a sink alone, if queries are packed.
    """
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_range = row < rows
    token, head, batch = row % tokens, row // tokens % heads, row // tokens // heads
    feature = tl.arange(0, BLOCK_E)
    mask = in_range[:, None] & (feature < E)[None, :]
    starts = row_offsets(batch, token, head, out_strides, VEC)
    offsets = starts[:, None] + (feature if UNIT else feature * out_strides.f)[None, :]
    row_max = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_R,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for first in range(0, splits, AHEAD):
        maxima, sums, tiles = (), (), ()
        for i in tl.static_range(AHEAD):
            split = first + i
            left = split < splits
            maxima += (
                tl.load(part_statistics + split * 2 * rows + row, mask=in_range & left, other=float("-inf")),
            )
            sums += (tl.load(part_statistics + (split * 2 + 1) * rows + row, mask=in_range & left, other=0.0),)
            tiles += (tl.load(part + split * (out_split * VEC) + offsets, mask=mask & left, other=0.0),)
        before = row_max
        for i in tl.static_range(AHEAD):
            row_max = tl.maximum(row_max, maxima[i])
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        rescale = power_of_two(before - base)
        row_sum *= rescale
        acc *= rescale[:, None]
        for i in tl.static_range(AHEAD):
            weight = sums[i] * power_of_two(maxima[i] - base)
            row_sum += weight
            acc += weight[:, None] * tiles[i]
    softmax = Softmax(acc, row_sum, row_max)
    in_sequence = None
    if cu_seqlens_q is not None:
        in_sequence = is_in_sequence(token, cu_seqlens_q, packing.cu_q_stride, packing.sequences)
    store_results(softmax, sink, head, out, offsets, mask, lse, statistics, row, in_range, rows, in_sequence)
