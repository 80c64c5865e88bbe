"""Triton kernels of flash attention: the forward pass, and what merges the parts of a split.

Shapes. Queries come in tiles (M, D), keys in tiles (N, D) and values in tiles (N, E), where ``M`` and ``N`` are
``BLOCK_M`` and ``BLOCK_N``. A program holds one tile of queries, walks over the keys that its queries see and keeps
the softmax running: for each row the largest logit so far, the sum of exponentials relative to it, and their sum with
the values. Positions are local to a packed sequence; without packing there is one sequence.

The walk is cut where the mask begins and ends (`walk_bounds`), so that the many steps in the middle compute none.
Exponentials are powers of two: ``scale`` comes multiplied by log₂ e. It comes as a size, so that the largest logit can
be found before the multiplication; a negative scale is a variant of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.activations import power_of_two
from warploom.device.packed import sequence_bounds, sequence_of_tile
from warploom.device.product import pieces_of, product, rounded, rounded_to_tf32

LN_2 = tl.constexpr(0.6931471805599453)

# ----------------------------------------------------------------------------------------------------------
# Device functions, for the backward as well
# ----------------------------------------------------------------------------------------------------------


PARTS_AHEAD = tl.constexpr(4)
"""Parts of a result that are on their way from memory together, where parts are merged."""


@triton.jit
def program_order(blocks, heads, section):
    """Block and head of this program, from its number without the split.

    Programs that run at the same time should read the same keys and start with the longest walk. So the heads are
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
    """First item of a tile, start and length of its sequence, and the same of the sequence it attends to."""
    start = tile * 0
    other_start = start
    if cu_tile is not None:
        sequence, tile = sequence_of_tile(tile, cu_tile, cu_tile_stride, sequences, BLOCK)
        start, length = sequence_bounds(sequence, cu_tile, cu_tile_stride)
        other_start, other_length = sequence_bounds(sequence, cu_other, cu_other_stride)
    return tile * BLOCK, start, length, other_start, other_length


@triton.jit
def walk_bounds(first, last, low, high, length, split, splits,
                HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Where a walk begins, where its mask ends and begins again, and where it ends.

    Items ``first … last`` see the others ``x`` with ``item − low ≤ x ≤ item + high`` and ``0 ≤ x < length``. From
    the second bound to the third, every item sees every ``x``. All bounds but the last are multiples of ``BLOCK``
    (or equal to it). With ``splits`` the walk is cut in as many parts, of whole blocks, and this is one of them.
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
def visible(query, key, keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys are there and seen by which queries, whose positions are those of the keys they stand at."""
    seen = key < keys
    if HAS_LEFT:
        seen = seen & (key >= query - left)
    if HAS_RIGHT:
        seen = seen & (key <= query + right)
    return seen


@triton.jit
def tile_offsets(stride_row, stride_feature, VEC: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
                 ROWS: tl.constexpr, FEATURES: tl.constexpr):  # fmt: skip
    """Offsets (ROWS, FEATURES) within a tile, in 64 bits if ``WIDE``: 32 bits save registers where they suffice.

    The stride of rows comes divided by ``VEC``.
    """
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
def load_factor(x, offsets, row, rows, distance, F: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """A tile as a factor of a `product`: if that takes pieces, several tiles, ``distance`` apart in memory, or cut here."""
    if PRECISION == "pieces" or PRECISION == "pairs":
        factor = ()
        for i in tl.static_range(2 if PRECISION == "pairs" else 3):
            factor += (load_tile(x + i * distance + offsets, row, rows, F, MASKED),)
    elif PRECISION == "cut":
        factor = pieces_of(load_tile(x + offsets, row, rows, F, MASKED), 3)
    else:
        factor = load_tile(x + offsets, row, rows, F, MASKED)
    return factor


@triton.jit
def as_factor(tile, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 tile as a factor of a `product` with one in ``dtype``."""
    if PRECISION == "pieces" or PRECISION == "cut":
        factor = pieces_of(tile, 3)
    elif PRECISION == "pairs":
        factor = pieces_of(tile, 2)
    elif PRECISION == "tf32" and dtype == tl.float32:
        factor = rounded_to_tf32(tile)
    else:
        factor = rounded(tile, dtype)
    return factor


@triton.jit
def transposed(factor, PRECISION: tl.constexpr):
    """A factor of a `product`, transposed."""
    if PRECISION == "pieces" or PRECISION == "cut" or PRECISION == "pairs":
        pieces = ()
        for i in tl.static_range(len(factor)):
            pieces += (factor[i].T,)
        factor = pieces
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
def base_of(x, entry, row, head, stride_b, stride_n, stride_h, VEC: tl.constexpr):
    """Address of feature 0 of a row, in 64 bits. Strides come divided by ``VEC``."""
    return x + entry.to(tl.int64) * (stride_b * VEC) + row.to(tl.int64) * (stride_n * VEC) \
        + head.to(tl.int64) * (stride_h * VEC)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def attend(
    acc, total, shift, q, k, v, k_offsets, v_offsets, k_step, v_step, k_piece, v_piece,
    begin, end, position, keys, left, right, scale,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Walk over keys ``begin … end``: sums with values (M, E), sums of exponentials and largest logits (M,).

    The largest logit, ``shift``, is in powers of two. It is kept as rounded, so that sums shrink by exactly 1 where
    it stays the same: ``top * scale − shift``, one fused operation, is the rounding of that product instead of zero.
    """
    for n in tl.range(begin, end, BLOCK_N):
        k_tile = load_factor(k + n * k_step, k_offsets, n, keys, k_piece, D, MASKED, PRECISION)
        logits = tl.zeros((acc.shape[0], BLOCK_N), dtype=tl.float32)
        logits = product(q, transposed(k_tile, PRECISION), logits, PRECISION)
        if NEGATIVE:
            logits = -logits
        if MASKED:
            key = n + tl.arange(0, BLOCK_N)
            seen = visible(position[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
            logits = tl.where(seen, logits, float("-inf"))
        new_shift = tl.maximum(shift, tl.max(logits, axis=1) * scale)
        base = new_shift
        if MASKED:  # a row that has seen no key yet: −inf − (−inf) must not become NaN
            base = tl.where(new_shift == float("-inf"), 0.0, new_shift)
        weights = power_of_two(logits * scale - base[:, None])
        shrink = power_of_two(shift - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        v_tile = load_factor(v + n * v_step, v_offsets, n, keys, v_piece, E, MASKED, PRECISION)
        acc = product(as_factor(weights, v.dtype.element_ty, PRECISION), v_tile, acc, PRECISION)
        shift = new_shift
    return acc, total, shift


# Every number is a run-time value of declared type: none of them ever causes a compilation.
SIZES = ("tokens keys heads group blocks section splits sequences cu_q_stride cu_k_stride left right scale").split()


def stride_names(*names: str) -> list[str]:
    """Parameters that hold the strides (b, n, h, feature) of tensors."""
    return [f"{name}_{axis}" for name in names for axis in "bnhf"]


@triton.jit(do_not_specialize=[*SIZES, "entries", "out_split", *stride_names("q", "k", "v", "out")])
def forward_kernel(
    q, k, v, out, lse, statistics, cu_seqlens_q, cu_seqlens_k,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, group: tl.int32, blocks: tl.int32, section: tl.int32,
    splits: tl.int32, sequences: tl.int32, cu_q_stride: tl.int64, cu_k_stride: tl.int64,
    left: tl.int32, right: tl.int32, scale: tl.float32,
    entries: tl.int32, out_split: tl.int64,
    q_b: tl.int64, q_n: tl.int64, q_h: tl.int64, q_f: tl.int64,
    k_b: tl.int64, k_n: tl.int64, k_h: tl.int64, k_f: tl.int64,
    v_b: tl.int64, v_n: tl.int64, v_h: tl.int64, v_f: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_f: tl.int64,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SHORT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, over one part of its keys.

    With ``PRECISION`` ``pieces``, ``k`` and ``v`` are what `pieces_kernel` made of them, and so are their strides.
    Writes ``out`` (parts, B, N, H, E), ``lse`` (B, H, N) if there is one part, and ``statistics`` (parts, 2, B, H, N):
    the largest logit of a row in powers of two, and the sum of its exponentials relative to that.
    """
    if OVERLAP:  # with the launch that merges parts, which waits for this one
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
        k_base = base_of(k, entry, k_start, head // group, k_b, k_n, k_h, VEC)
        v_base = base_of(v, entry, k_start, head // group, v_b, v_n, v_h, VEC)
        k_offsets = tile_offsets(k_n, k_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_D)
        v_offsets = tile_offsets(v_n, v_f, VEC, UNIT, WIDE, BLOCK_N, BLOCK_E)
        q_offsets = tile_offsets(q_n, q_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_D)
        q_piece = tl.cast(entries, tl.int64) * tokens * heads * D
        q_tile = load_factor(q_base, q_offsets, m, tokens_here, q_piece, D, True, PRECISION)
        k_piece = tl.cast(entries, tl.int64) * keys * (heads // group) * D
        v_piece = tl.cast(entries, tl.int64) * keys * (heads // group) * E

        offset = keys_here - tokens_here  # the last query stands at the last key
        position = m + offset + tl.arange(0, BLOCK_M)
        last = tl.minimum(m + BLOCK_M, tokens_here) - 1 + offset
        begin, full_begin, full_end, end = walk_bounds(
            m + offset, last, left, right, keys_here, split, splits, HAS_LEFT, HAS_RIGHT, BLOCK_N
        )
        acc = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        shift = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        if SHORT:
            acc, total, shift = attend(
                acc, total, shift, q_tile, k_base, v_base, k_offsets, v_offsets, k_n * VEC, v_n * VEC, k_piece, v_piece,
                begin, end, position, keys_here, left, right, scale, True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
            )  # fmt: skip
        else:
            if HAS_LEFT:
                acc, total, shift = attend(
                    acc, total, shift, q_tile, k_base, v_base, k_offsets, v_offsets, k_n * VEC, v_n * VEC, k_piece, v_piece,
                    begin, full_begin, position, keys_here, left, right, scale, True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
                )  # fmt: skip
            acc, total, shift = attend(
                acc, total, shift, q_tile, k_base, v_base, k_offsets, v_offsets, k_n * VEC, v_n * VEC, k_piece, v_piece,
                full_begin, full_end, position, keys_here, left, right, scale, False, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
            )  # fmt: skip
            acc, total, shift = attend(
                acc, total, shift, q_tile, k_base, v_base, k_offsets, v_offsets, k_n * VEC, v_n * VEC, k_piece, v_piece,
                full_end, end, position, keys_here, left, right, scale, True, HAS_LEFT, HAS_RIGHT, NEGATIVE, D, E, PRECISION, BLOCK_N,
            )  # fmt: skip

        out_base = base_of(out, entry, q_start + m, head, out_b, out_n, out_h, VEC) + split * (out_split * VEC)
        out_offsets = tile_offsets(out_n, out_f, VEC, UNIT, WIDE, BLOCK_M, BLOCK_E)
        some = tl.where(total == 0.0, 1.0, total)  # where no key was seen: 0 / 1, and lse −inf + 0
        store_tile(out_base + out_offsets, acc / some[:, None], m, tokens_here, E)
        size = tl.cast(entries, tl.int64) * heads * tokens
        rows = row.to(tl.int64) * tokens + q_start + m + tl.arange(0, BLOCK_M)
        there = m + tl.arange(0, BLOCK_M) < tokens_here
        tl.store(statistics + split * 2 * size + rows, shift, mask=there)
        tl.store(statistics + (split * 2 + 1) * size + rows, total, mask=there)
        if lse is not None:
            tl.store(lse + rows, (shift + tl.log2(some)) * LN_2, mask=there)


@triton.jit
def cut_rows(x, pieces, program, rows, tokens, heads, x_b, x_n, x_h, x_f,
             F: tl.constexpr, PIECES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Block number ``program`` of rows of a tensor in pieces, if it has that; the number in the tensor after it."""
    blocks = tl.cdiv(rows, BLOCK_R)
    if (program >= 0) & (program < blocks):
        row = program * BLOCK_R + tl.arange(0, BLOCK_R)
        head, token, entry = row % heads, row // heads % tokens, row // heads // tokens
        feature = tl.arange(0, BLOCK_F)
        inside = (row < rows)[:, None] & (feature < F)[None, :]
        cells = (entry * x_b + token * x_n + head * x_h)[:, None] + (feature * x_f)[None, :]
        cut = pieces_of(tl.load(x + cells, mask=inside, other=0.0), PIECES)
        out = pieces + (row * F)[:, None] + feature[None, :]
        for i in tl.static_range(PIECES):
            tl.store(out + i * rows * F, cut[i], mask=inside)
    return program - blocks


@triton.jit(do_not_specialize=["tokens", "keys", "heads", "key_heads", "entries",
                               *stride_names("q", "k", "v", "grad")])  # fmt: skip
def pieces_kernel(
    q, k, v, grad, q_pieces, k_pieces, v_pieces, grad_pieces,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, key_heads: tl.int32, entries: tl.int32,
    q_b: tl.int64, q_n: tl.int64, q_h: tl.int64, q_f: tl.int64,
    k_b: tl.int64, k_n: tl.int64, k_h: tl.int64, k_f: tl.int64,
    v_b: tl.int64, v_n: tl.int64, v_h: tl.int64, v_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    D: tl.constexpr, E: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Float32 tensors (B, N, H, F) as sums of several in bfloat16 each, pieces (PIECES, B, N, H, F) without gaps.

    In the forward there are no gradients of the output. With ``OVERLAP`` it runs beside
    `kernels.backward.prepare_kernel`, of which it reads nothing, and does not end before that has ended.
    """
    program = tl.program_id(0).to(tl.int64)
    query_rows = tl.cast(entries, tl.int64) * tokens * heads
    key_rows = tl.cast(entries, tl.int64) * keys * key_heads
    program = cut_rows(
        k, k_pieces, program, key_rows, keys, key_heads, k_b, k_n, k_h, k_f, D, PIECES, BLOCK_R, BLOCK_D
    )
    program = cut_rows(
        v, v_pieces, program, key_rows, keys, key_heads, v_b, v_n, v_h, v_f, E, PIECES, BLOCK_R, BLOCK_E
    )
    program = cut_rows(
        q, q_pieces, program, query_rows, tokens, heads, q_b, q_n, q_h, q_f, D, PIECES, BLOCK_R, BLOCK_D
    )
    if grad is not None:
        cut_rows(
            grad, grad_pieces, program, query_rows, tokens, heads, grad_b, grad_n, grad_h, grad_f, E, PIECES, BLOCK_R, BLOCK_E
        )  # fmt: skip
    if OVERLAP:
        if tl.program_id(0) == 0:  # one program is enough to hold what is launched next
            gdc_wait()


@triton.jit(do_not_specialize=["rows", "tokens", "heads", "splits", "out_split", *stride_names("out")])
def combine_kernel(
    part, part_statistics, out, lse, statistics,
    rows: tl.int64, tokens: tl.int32, heads: tl.int32, splits: tl.int32, out_split: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_f: tl.int64,
    VEC: tl.constexpr, UNIT: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What `forward_kernel` writes for one part, from what it wrote for each of several; always in the same order.

    A row is a (batch entry, head, token), tokens fastest, as in ``lse``. Parts are in float32, with the strides of
    ``out``.
    """
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = row < rows
    token, head, entry = row % tokens, row // tokens % heads, row // tokens // heads
    feature = tl.arange(0, BLOCK_E)
    inside = there[:, None] & (feature < E)[None, :]
    starts = entry * (out_b * VEC) + token * (out_n * VEC) + head * (out_h * VEC)
    cells = starts[:, None] + (feature if UNIT else feature * out_f)[None, :]
    top = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for first in range(0, splits, PARTS_AHEAD):
        tops, totals, tiles = (), (), ()
        for i in tl.static_range(PARTS_AHEAD):
            split = first + i
            left = split < splits
            tops += (tl.load(part_statistics + split * 2 * rows + row, mask=there & left, other=float("-inf")),)
            totals += (tl.load(part_statistics + (split * 2 + 1) * rows + row, mask=there & left, other=0.0),)
            tiles += (tl.load(part + split * (out_split * VEC) + cells, mask=inside & left, other=0.0),)
        before = top
        for i in tl.static_range(PARTS_AHEAD):
            top = tl.maximum(top, tops[i])
        shift = tl.where(top == float("-inf"), 0.0, top)
        shrink = power_of_two(before - shift)
        total *= shrink
        acc *= shrink[:, None]
        for i in tl.static_range(PARTS_AHEAD):
            weight = totals[i] * power_of_two(tops[i] - shift)
            total += weight
            acc += weight[:, None] * tiles[i]
    some = tl.where(total == 0.0, 1.0, total)  # where no key was seen: 0 / 1, and lse −inf + 0
    tl.store(out + cells, rounded(acc / some[:, None], out.dtype.element_ty), mask=inside)
    tl.store(statistics + row, top, mask=there)
    tl.store(statistics + rows + row, total, mask=there)
    tl.store(lse + row, (top + tl.log2(some)) * LN_2, mask=there)
