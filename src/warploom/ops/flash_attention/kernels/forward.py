"""Triton kernels of flash attention: the forward pass, and what merges the parts of a split KV loop.

Shapes. Queries come in tiles (M, D), keys in tiles (N, D) and values in tiles (N, E), where ``M`` and ``N`` are
``BLOCK_M`` and ``BLOCK_N``. A program holds one tile of queries, loops over the keys that its queries see and keeps
the softmax running: for each row the largest logit so far, the sum of exponentials relative to it, and their sum with
the values. A sink, one more logit of every row, is added behind the loop. Positions are local to a packed sequence; without packing there is one sequence.

The KV loop is cut where the mask begins and ends (`loop_bounds`), so that the many steps in the middle compute none.
Exponentials are powers of two: ``scale`` comes multiplied by log₂ e. It comes as a size, so that the largest logit can
be found before the multiplication; a negative scale is a variant of its own, and so is a cap of the logits: then
``scale`` comes divided by the cap, and what multiplies the hyperbolic tangent is a constant.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.activations import LOG2_E, power_of_two, tanh
from warploom.device.packed import is_in_sequence, sequence_of_tile, sequence_or_tail
from warploom.device.product import product, rounded, rounded_to_tf32, terms_of

LN_2 = tl.constexpr(0.6931471805599453)
PARTS_AHEAD = tl.constexpr(4)
"""Parts of a result that are on their way from memory together, where parts are merged."""


class Strides(NamedTuple):
    """Of a tensor (B, N, H, F). With a ``VEC``, all but that of features come divided by it."""

    b: tl.int64
    n: tl.int64
    h: tl.int64
    f: tl.int64


class Sizes(NamedTuple):
    """Of a call, and how it is cut. Every number is a run-time value: none of them ever causes a compilation."""

    tokens: tl.int32  # queries of a batch entry
    keys: tl.int32
    heads: tl.int32
    group: tl.int32  # query heads to a key head
    blocks: tl.int32  # tiles of a head
    section: tl.int32  # heads whose keys and values fit in the L2 cache together
    splits: tl.int32  # of a loop
    sequences: tl.int32  # packed ones
    cu_q_stride: tl.int64
    cu_k_stride: tl.int64  # of packed keys; how many pages there are, where keys lie in pages
    left: tl.int32  # a query sees so many keys before its place, as `Variant` says
    right: tl.int32  # and so many behind it
    scale: tl.float32
    batch_size: tl.int32


class Packing(NamedTuple):
    """Of packed queries."""

    sequences: tl.int32
    cu_q_stride: tl.int64


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    HAS_LEFT: tl.constexpr
    HAS_RIGHT: tl.constexpr
    NEGATIVE: tl.constexpr  # scale
    VEC: tl.constexpr  # common divisor of strides
    UNIT: tl.constexpr  # whether features are adjacent
    WIDE: tl.constexpr  # whether offsets within a tile need 64 bits
    D: tl.constexpr
    E: tl.constexpr
    PRECISION: tl.constexpr  # see `warploom.device.product`
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_E: tl.constexpr
    SOFTCAP: tl.constexpr = None  # in powers of two
    PAGE: tl.constexpr = None  # keys of a page, where they lie in pages


# ----------------------------------------------------------------------------------------------------------
# Device functions, for the backward as well
# ----------------------------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """Which keys a query sees, as `Variant` says."""

    keys: tl.int32
    left: tl.int32
    right: tl.int32
    table: tl.tensor | None = None  # of pages of a batch entry
    pages: tl.int64 | None = None  # how many there are


class Rows(NamedTuple):
    """Where the tiles of one head of a tensor lie."""

    ptr: tl.tensor  # of row 0, feature 0
    offsets: tl.tensor  # (rows, features) within a tile
    strides: Strides
    term: tl.int64  # from a term to the next


@triton.jit
def program_order(blocks, heads, section):
    """Block and head of this program, from its number without the split.

    Programs that run at the same time should read the same keys and start with the longest loop. So the heads are
    taken in sections whose keys and values fit in the L2 cache together, and within a section all heads do their
    first block, then all their second.
    """
    program = tl.program_id(0)
    place = program % (section * blocks)
    first = program // (section * blocks) * section
    width = tl.minimum(section, heads - first)
    return place // width, first + place % width


@triton.jit
def tile_bounds(tile, cu_tile, cu_tile_stride, cu_other, cu_other_stride, length, other_length, sequences,
                BLOCK: tl.constexpr):  # fmt: skip
    """First item of a tile, start and length of its sequence, and the same of the sequence it attends to.

    Rows behind the last sequence attend to nothing.
    """
    start = tile * 0
    other_start = start
    if cu_tile is not None:
        sequence, tile = sequence_of_tile(tile, cu_tile, cu_tile_stride, sequences + 1, BLOCK)
        start, length = sequence_or_tail(sequence, cu_tile, cu_tile_stride, sequences, length)
        other_start, other_length = sequence_or_tail(sequence, cu_other, cu_other_stride, sequences, other_length)
        other_length = tl.where(sequence == sequences, 0, other_length)
    return tile * BLOCK, start, length, other_start, other_length


class Place(NamedTuple):
    """Where a program of a kernel that owns queries is."""

    split: tl.int32  # of the KV loop
    row: tl.int32  # batch entry times heads, and head
    batch: tl.int32
    head: tl.int32
    m: tl.int32  # first query of the tile, in its sequence
    q_start: tl.int32  # of the sequence, as is `k_start`
    tokens: tl.int32  # of the sequence
    k_start: tl.int32
    keys: tl.int32


@triton.jit
def query_place(cu_seqlens_q, cu_seqlens_k, seqused_k, sizes, variant: tl.constexpr):
    """The `Place` of this program."""
    block, row = program_order(sizes.blocks * sizes.splits, sizes.batch_size * sizes.heads, sizes.section)
    split = block % sizes.splits
    block = block // sizes.splits
    if variant.HAS_RIGHT:  # the last queries see the most keys
        block = sizes.blocks - 1 - block
    batch, head = row // sizes.heads, row % sizes.heads
    m, q_start, tokens, k_start, keys = tile_bounds(
        block, cu_seqlens_q, sizes.cu_q_stride, cu_seqlens_k, sizes.cu_k_stride, sizes.tokens, sizes.keys,
        sizes.sequences, variant.BLOCK_M,
    )  # fmt: skip
    keys = used_keys(seqused_k, batch, keys)
    return Place(split, row, batch, head, m, q_start, tokens, k_start, keys)


@triton.jit
def used_keys(seqused_k, batch, keys):
    """How many keys a batch entry has."""
    if seqused_k is not None:
        keys = tl.minimum(tl.maximum(tl.load(seqused_k + batch).to(tl.int32), 0), keys)
    return keys


@triton.jit
def within(page, pages):
    """The number of a page, or whatever stands for it, as one of those that there are."""
    return tl.minimum(tl.maximum(page, 0), pages - 1)


@triton.jit
def kv_rows(x, mask, n, VEC: tl.constexpr, FEATURES: tl.constexpr, variant: tl.constexpr):
    """Where a tile of keys or values from number ``n`` on lies, and the tile as `Rows`.

    With pages, the mask's table points at those of a batch entry, and ``x.ptr`` at the first of all pages.
    """
    if variant.PAGE is None:
        ptr = x.ptr + n * (x.strides.n * VEC)
    else:
        key = n + tl.arange(0, variant.BLOCK_N)
        page = tl.load(mask.table + key // variant.PAGE, mask=key < mask.keys, other=0).to(tl.int64)
        row = within(page, mask.pages) * (x.strides.b * VEC) + (key % variant.PAGE).to(tl.int64) * (
            x.strides.n * VEC
        )
        feature = tl.arange(0, FEATURES)
        if not variant.UNIT:
            feature = feature * x.strides.f
        ptr = x.ptr
        x = Rows(ptr, row[:, None] + feature[None, :], x.strides, x.term)
    return ptr, x


@triton.jit
def capped(logits, scale, variant: tl.constexpr):
    """Logits, capped where there is a cap, and their scale: ``2^(logits · scale)`` is a weight."""
    if variant.NEGATIVE:
        logits = -logits
    if variant.SOFTCAP is not None:
        logits = tanh(logits * scale)
        scale = variant.SOFTCAP
    return logits, scale


@triton.jit
def loop_bounds(first, last, low, high, length, split, splits,
                HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Where a loop begins, where its mask ends and begins again, and where it ends.

    Items ``first … last`` see the others ``x`` with ``item − low ≤ x ≤ item + high`` and ``0 ≤ x < length``. From
    the second bound to the third, every item sees every ``x``. All bounds but the last are multiples of ``BLOCK``
    (or equal to it). This is one of ``splits`` of the loop, of whole blocks.
    """
    begin = length * 0
    full_begin = begin
    if HAS_LOW:
        begin = tl.maximum(first - low, 0) // BLOCK * BLOCK
        full_begin = tl.cdiv(tl.maximum(last - low, 0), BLOCK) * BLOCK
    end = length
    full_end = length
    if HAS_HIGH:
        end = tl.minimum(length, tl.maximum(last + high + 1, 0))
        full_end = tl.minimum(length, tl.maximum(first + high + 1, 0))
    full_end = full_end // BLOCK * BLOCK
    span = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), splits) * BLOCK
    begin += split * span
    end = tl.maximum(tl.minimum(end, begin + span), begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def key_bounds(first, last, mask, split, splits, variant: tl.constexpr):
    """`loop_bounds` of the KV loop of queries at ``first … last``."""
    return loop_bounds(
        first, last, mask.left, mask.right, mask.keys, split, splits, variant.HAS_LEFT, variant.HAS_RIGHT,
        variant.BLOCK_N,
    )  # fmt: skip


@triton.jit
def visible(query, key, mask, variant: tl.constexpr):
    """Which keys are there and seen by which queries, whose positions are those of the keys they stand at."""
    seen = key < mask.keys
    if variant.HAS_LEFT:
        seen = seen & (key >= query - mask.left)
    if variant.HAS_RIGHT:
        seen = seen & (key <= query + mask.right)
    return seen


@triton.jit
def tile_offsets(strides, ROWS: tl.constexpr, FEATURES: tl.constexpr, variant: tl.constexpr):
    """Offsets (ROWS, FEATURES) within a tile."""
    return offsets_of(strides, ROWS, FEATURES, variant.VEC, variant.UNIT, variant.WIDE)


@triton.jit
def offsets_of(strides, ROWS: tl.constexpr, FEATURES: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """Offsets (ROWS, FEATURES) within a tile, in 64 bits if ``WIDE``: 32 bits save registers where they suffice."""
    stride_row, stride_feature = strides.n, strides.f
    row = tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    if WIDE:
        row = row.to(tl.int64)
    else:
        stride_row = stride_row.to(tl.int32)
        stride_feature = stride_feature.to(tl.int32)
    if not UNIT:
        feature = feature * stride_feature
    return (row * (stride_row * VEC))[:, None] + feature[None, :]


@triton.jit
def load_tile(pointers, row, rows, F: tl.constexpr, MASKED: tl.constexpr):
    """A tile whose first row is number ``row`` of ``rows``; zeros outside. Unless ``MASKED``, all rows are there."""
    ROWS: tl.constexpr = pointers.shape[0]
    FEATURES: tl.constexpr = pointers.shape[1]
    there = (row + tl.arange(0, ROWS) < rows)[:, None]
    inside = (tl.arange(0, FEATURES) < F)[None, :]
    if MASKED and F != FEATURES:
        tile = tl.load(pointers, mask=there & inside, other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=there, other=0.0)
    elif F != FEATURES:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_factor(ptr, x, row, rows, F: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The tile at ``ptr`` of `Rows` as a factor of a `product`: as one tile, or in bf16 terms made before or here."""
    if PRECISION == "3-term" or PRECISION == "2-term":
        factor = ()
        for i in tl.static_range(2 if PRECISION == "2-term" else 3):
            factor += (load_tile(ptr + i * x.term + x.offsets, row, rows, F, MASKED),)
    elif PRECISION == "3-term here":
        factor = terms_of(load_tile(ptr + x.offsets, row, rows, F, MASKED), 3)
    else:
        factor = load_tile(ptr + x.offsets, row, rows, F, MASKED)
    return factor


@triton.jit
def as_factor(tile, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 tile as a factor of a `product` with one in ``dtype``."""
    if PRECISION == "3-term" or PRECISION == "3-term here":
        factor = terms_of(tile, 3)
    elif PRECISION == "2-term":
        factor = terms_of(tile, 2)
    elif PRECISION == "tf32" and dtype == tl.float32:
        factor = rounded_to_tf32(tile)
    else:
        factor = rounded(tile, dtype)
    return factor


@triton.jit
def transposed(factor, PRECISION: tl.constexpr):
    """A factor of a `product`, transposed."""
    if PRECISION == "3-term" or PRECISION == "3-term here" or PRECISION == "2-term":
        terms = ()
        for i in tl.static_range(len(factor)):
            terms += (factor[i].T,)
        factor = terms
    else:
        factor = factor.T
    return factor


@triton.jit
def store_tile(pointers, tile, row, rows, F: tl.constexpr):
    """The inverse of `load_tile`; rounds to the dtype of memory."""
    ROWS: tl.constexpr = pointers.shape[0]
    FEATURES: tl.constexpr = pointers.shape[1]
    mask = (row + tl.arange(0, ROWS) < rows)[:, None]
    if F != FEATURES:
        mask = mask & (tl.arange(0, FEATURES) < F)[None, :]
    tl.store(pointers, rounded(tile, pointers.dtype.element_ty), mask=mask)


@triton.jit
def base_of(x, batch, row, head, strides, VEC: tl.constexpr):
    """Address of feature 0 of a row, in 64 bits."""
    return x + batch.to(tl.int64) * (strides.b * VEC) + row.to(tl.int64) * (strides.n * VEC) \
        + head.to(tl.int64) * (strides.h * VEC)  # fmt: skip


@triton.jit
def term_stride(sizes, length, heads, F: tl.constexpr, group=1):
    """From a term to the next of a tensor (B, length, heads // group, F)."""
    return tl.cast(sizes.batch_size, tl.int64) * length * (heads // group) * F


@triton.jit
def part_base(x, batch, row, head, split, split_stride, strides, variant: tl.constexpr):
    """`base_of` a row of a result or, if it is split, of one of its parts."""
    return base_of(x, batch, row, head, strides, variant.VEC) + split * (split_stride * variant.VEC)


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


class Softmax(NamedTuple):
    """Of a tile of queries, so far."""

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
    split, row, batch, head, m, q_start, tokens, k_start, keys = place
    if m < tokens:
        q_ptr = base_of(q, batch, q_start + m, head, q_strides, variant.VEC)
        table = None
        kv_batch = batch
        if variant.PAGE is not None:
            table = block_table + batch.to(tl.int64) * (sizes.keys // variant.PAGE)
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
def split_rows(x, terms, program, rows, tokens, heads, strides,
               F: tl.constexpr, TERMS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Block number ``program`` of rows of a tensor in terms, if it has that; the number in the tensor after it."""
    blocks = tl.cdiv(rows, BLOCK_R)
    if (program >= 0) & (program < blocks):
        row = program * BLOCK_R + tl.arange(0, BLOCK_R)
        head, token, batch = row % heads, row // heads % tokens, row // heads // tokens
        feature = tl.arange(0, BLOCK_F)
        mask = (row < rows)[:, None] & (feature < F)[None, :]
        offsets = (batch * strides.b + token * strides.n + head * strides.h)[:, None] + (feature * strides.f)[
            None, :
        ]
        tile = terms_of(tl.load(x + offsets, mask=mask, other=0.0), TERMS)
        ptrs = terms + (row * F)[:, None] + feature[None, :]
        for i in tl.static_range(TERMS):
            tl.store(ptrs + i * rows * F, tile[i], mask=mask)
    return program - blocks


@triton.jit
def terms_kernel(
    q, k, v, grad, q_terms, k_terms, v_terms, grad_terms,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, key_heads: tl.int32, batch_size: tl.int32,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, grad_strides: Strides,
    D: tl.constexpr, E: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Float32 tensors (B, N, H, F) as sums of several in bfloat16 each, terms (TERMS, B, N, H, F) without gaps.

    In the forward there are no gradients of the output. With ``PDL`` it runs beside
    `kernels.backward.prepare_kernel`, of which it reads nothing, and does not end before that has ended.
    """
    program = tl.program_id(0).to(tl.int64)
    query_rows = tl.cast(batch_size, tl.int64) * tokens * heads
    key_rows = tl.cast(batch_size, tl.int64) * keys * key_heads
    program = split_rows(k, k_terms, program, key_rows, keys, key_heads, k_strides, D, TERMS, BLOCK_R, BLOCK_D)
    program = split_rows(v, v_terms, program, key_rows, keys, key_heads, v_strides, E, TERMS, BLOCK_R, BLOCK_E)
    program = split_rows(q, q_terms, program, query_rows, tokens, heads, q_strides, D, TERMS, BLOCK_R, BLOCK_D)
    if grad is not None:
        split_rows(grad, grad_terms, program, query_rows, tokens, heads, grad_strides, E, TERMS, BLOCK_R, BLOCK_E)
    if PDL:
        if tl.program_id(0) == 0:  # one program is enough to hold what is launched next
            gdc_wait()


@triton.jit
def row_offsets(batch, token, head, strides, VEC: tl.constexpr):
    """Offsets (R,) of rows, each of any batch entry, head and token."""
    return batch * (strides.b * VEC) + token * (strides.n * VEC) + head * (strides.h * VEC)


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
def combine_kernel(
    part, part_statistics, out, lse, statistics, sink, cu_seqlens_q,
    rows: tl.int64, tokens: tl.int32, heads: tl.int32, splits: tl.int32, out_split: tl.int64,
    packing: Packing, out_strides: Strides,
    VEC: tl.constexpr, UNIT: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What `forward_kernel` writes for one split, from what it wrote for each of several; always in the same order.

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
