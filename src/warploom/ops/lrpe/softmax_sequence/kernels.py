"""Triton kernels of LRPE with softmax over the sequence: one forward, one backward.

Softmax over the tokens needs two looks at ``x``: one for each column's sum, one to apply it. Only the first should
reach device memory. A column is a feature of one (batch entry or packed sequence, head); a feature slab has ``W``
angles of a head, and so the columns of P members: P = 1 for ``cosine``, 2 for the pairs of ``rotate``. Its tokens are
cut into tiles. Tiles are numbered (batch entry, head, part of the sequence, slab), slabs fastest, and every program
takes each ``programs``-th of them.

In each turn a program reduces one tile to partial sums, publishes these, and applies the softmax to the tile that it
reduced ``lag`` turns before. By then all tiles of that sequence have been reduced in the same or an earlier turn, so
that programs hardly wait for each other, and little has been read since: the tile comes from the L2 cache. Programs
that wait are launched cooperatively: all of them run. Where a tile holds all tokens nobody waits, and nothing is
published.

Statistics are float32 (groups, H, 2, P, F): a shift, and the reciprocal of the sum of e^(x − shift). A group is a batch
entry or a packed sequence. Partial sums are float32 (B · H · slabs, slots, 2, P, W) forward, a shift and a sum, and
(…, 1, P, W) backward, the sum of y · dy. A slot is that of a part; of packed sequences, part + sequence: both only grow
from token to token, so no two share one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import INTERPRETED, LOG2_E, exponential_float32, power_of_two, widen
from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin
from warploom.ops.lrpe.kernels.angles import (
    AngleNumbers,
    Angles,
    Inverses,
    Spec,
    divide,
    load_frequencies,
    token_positions,
)
from warploom.ops.lrpe.kernels.backward import pair_gradient
from warploom.ops.lrpe.kernels.forward import turn
from warploom.ops.lrpe.kernels.rows import Strides, load_input, load_pair, store_input, store_pair

LARGEST_SUM = tl.constexpr(2.0**32)
SLOTS = tl.constexpr(32)  # read at once
WIDEN_BFLOAT16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
WIDEN_FLOAT16 = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)
MINUS_LN_2 = tl.constexpr(-0.6931471805599453)


class Sizes(NamedTuple):
    """How the work is cut; the inverses are for `divide`."""

    tokens: tl.int32
    heads: tl.int32
    heads_inverse: tl.int64
    parts: tl.int32
    parts_inverse: tl.int64
    part_tokens: tl.int32
    slots: tl.int32
    tiles: tl.int32
    turns: tl.int32
    lag: tl.int32


class Block(NamedTuple):
    """Rows and angles that a program computes at once.

    A tile of ``HELD`` blocks, or fewer, stays in registers from its sums to the softmax. With none it is read twice, in
    loops that have loads of so many blocks under way.
    """

    R: int
    W: int
    HELD: int
    WORDS: Spec | None
    """Of x as words of two features, which are what is held."""
    STAGES: int


class Tile(NamedTuple):
    """Tokens ``start`` to ``end`` of a slab, whose angles begin with ``first``, and the groups that they belong to."""

    b: tl.tensor
    h: tl.tensor
    first: tl.tensor
    part: tl.tensor
    slab: tl.tensor
    """Its number among those of all heads."""
    start: tl.tensor
    end: tl.tensor
    first_group: tl.tensor
    last_group: tl.tensor


class Run(NamedTuple):
    """The tokens of one group in a tile."""

    start: tl.tensor
    end: tl.tensor
    group: tl.tensor
    group_start: tl.tensor
    first_slot: tl.tensor
    """Of the group; the tile's own is ``slot``."""
    slot: tl.tensor
    slots: tl.tensor


class Statistics(NamedTuple):
    """Of both members' columns, (1, W) each."""

    shift1: tl.tensor
    shift2: tl.tensor
    scale1: tl.tensor
    scale2: tl.tensor


# ----------------------------------------------------------------------------------------------------------
# Tiles, and what programs tell each other
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of(number, cu_seqlens, numbers, sizes, spec: tl.constexpr, block: tl.constexpr):
    """The tile of a number."""
    SLABS: tl.constexpr = (spec.F + block.W - 1) // block.W
    rest = number // SLABS
    unit = divide(rest, sizes.parts_inverse)
    part = rest - unit * sizes.parts
    b = divide(unit, sizes.heads_inverse)
    start = part * sizes.part_tokens
    end = tl.minimum(start + sizes.part_tokens, sizes.tokens)
    first_group = b
    last_group = b
    if cu_seqlens is not None:
        touched = sequence_of(
            start + tl.arange(0, 2) * (end - 1 - start), cu_seqlens, numbers.cu_stride, numbers.sequences
        )
        first_group = tl.min(touched, axis=0)
        last_group = tl.max(touched, axis=0)
    slab = number - rest * SLABS
    return Tile(
        b.to(tl.int64), (unit - b * sizes.heads).to(tl.int64), slab * block.W, part, unit * SLABS + slab, start, end,
        first_group, last_group,
    )  # fmt: skip


@triton.jit
def run_of(group, tile, cu_seqlens, numbers, sizes):
    """The tokens of a group in a tile."""
    group = tile.start * 0 + group
    start, end, group_start, group_end = tile.start, tile.end, tile.start * 0, sizes.tokens
    first_slot = tile.start * 0
    slot = tile.part
    if cu_seqlens is not None:
        group_start = tl.load(cu_seqlens + group * numbers.cu_stride).to(tl.int32)
        group_end = tl.load(cu_seqlens + (group + 1) * numbers.cu_stride).to(tl.int32)
        start = tl.minimum(
            tl.maximum(start, group_start), sizes.tokens - 1
        )  # behind the end if there are no tokens
        end = tl.minimum(end, group_end)
        first_slot = group_start // sizes.part_tokens + group
        slot += group
    slots = (group_end + sizes.part_tokens - 1) // sizes.part_tokens - group_start // sizes.part_tokens
    return Run(start, end, group.to(tl.int64), group_start, first_slot, slot, slots)


@triton.jit
def slot_pointer(partial, slot, tile, sizes, K: tl.constexpr, W: tl.constexpr):
    """Where the partial sums of a slot begin, (K, W)."""
    return partial + (tile.slab.to(tl.int64) * sizes.slots + slot) * (K * W)


@triton.jit
def arrive(arrived, tile):
    """Publish what the program has written: count one more tile of the slab as reduced."""
    tl.debug_barrier()
    tl.atomic_add(arrived + tile.slab, 1, sem="release")


@triton.jit
def wait(arrived, tile, parts):
    """Wait until all tiles of the slab have been reduced. They are, in turns of running programs that wait for none."""
    while tl.atomic_add(arrived + tile.slab, 0, sem="acquire") < parts:
        pass
    tl.debug_barrier()


# ----------------------------------------------------------------------------------------------------------
# Columns: float32 vectors, one number per feature
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def column_offsets(first, F: tl.constexpr, W: tl.constexpr):
    """Features of a slab (1, W) and which of them there are."""
    f = (first + tl.arange(0, W))[None, :]
    return f, f < F


@triton.jit
def load_columns(base, f, mask, F, P: tl.constexpr):
    """Both members' columns (1, W), the second ``F`` behind the first."""
    c1 = tl.load(base + f, mask=mask, other=0.0)
    c2 = c1
    if P == 2:
        c2 = tl.load(base + F + f, mask=mask, other=0.0)
    return c1, c2


@triton.jit
def store_columns(base, c1, c2, f, mask, F, P: tl.constexpr):
    """The inverse of `load_columns`."""
    tl.store(base + f, c1, mask=mask)
    if P == 2:
        tl.store(base + F + f, c2, mask=mask)


@triton.jit
def corrected_power(x, shift, scale):
    """scale · e^(x − shift) of 16-bit ``x``, to 3 units in the last place: what rounding the exponent costs is put back."""
    x = widen(x) - shift
    x = tl.where(x < -200.0, -200.0, x)  # the result is zero long before
    exponent = x * LOG2_E
    y = power_of_two(exponent) * scale
    return tl.fma(y, tl.fma(exponent, MINUS_LN_2, x), y)


@triton.jit
def power(x, shift, EXACT: tl.constexpr):
    """e^(x − shift) in float32. The difference is taken first: of 16-bit numbers it is exact, however large they are.

    ``EXACT``: for results in float32; 1 of 16-bit numbers, 2 of others.
    """
    if EXACT == 0:
        y = power_of_two((widen(x) - shift) * LOG2_E)
    elif EXACT == 1:
        y = corrected_power(x, shift, 1.0)
    else:
        y = exponential_float32(x - shift)
    return y


@triton.jit
def weights(x, shift, scale, EXACT: tl.constexpr):
    """Softmax of a tile. ``scale`` from `scale_of`."""
    if EXACT == 0:
        y = power_of_two(tl.fma(widen(x) - shift, LOG2_E, scale))
    elif EXACT == 1:
        y = corrected_power(x, shift, scale)
    else:
        y = exponential_float32(x - shift) * scale
    return y


@triton.jit
def scale_of(scale, EXACT: tl.constexpr):
    """A reciprocal sum as `weights` takes it: itself or, in the exponent, its logarithm."""
    return scale if EXACT else tl.log2(scale)


@triton.jit
def prepared(known, EXACT: tl.constexpr):
    """Statistics as `weights` take them."""
    return Statistics(known.shift1, known.shift2, scale_of(known.scale1, EXACT), scale_of(known.scale2, EXACT))


@triton.jit
def column_sum(terms, EXACT: tl.constexpr):
    """Sum of a block (R, W) over its rows, float32 (1, W); ``EXACT``: rounded once."""
    if EXACT:
        terms = terms.to(tl.float64)
    return tl.sum(terms, axis=0).to(tl.float32)[None, :]


@triton.jit
def largest(top):
    """Maxima over the rows of a block (R, W): (1, W). −inf where there is nothing else, made zero: it is a shift."""
    top = tl.max(top, axis=0)[None, :]
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def combine_statistics(slots, count, f, P: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr):
    """Shift and sum of powers of one member's columns ``f`` (1, W), from those of ``count`` slots, in their order."""
    top = tl.full(f.shape, float("-inf"), tl.float32)
    total = tl.zeros(f.shape, tl.float32)
    for first in range(0, count, SLOTS):
        slot = (first + tl.arange(0, SLOTS))[:, None]
        ptrs = slots + slot * (2 * P * W) + f
        tops = tl.load(ptrs, mask=slot < count, other=float("-inf"))
        sums = tl.load(ptrs + P * W, mask=slot < count, other=0.0)
        new = tl.maximum(top, tl.max(tops, axis=0)[None, :])
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * power(top, shift, EXACT) + column_sum(sums * power(tops, shift, EXACT), EXACT)
        top = new
    return top, total


@triton.jit
def combine_sums(slots, count, f, P: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr):
    """Sums of one member's columns ``f`` (1, W) over ``count`` slots, in their order."""
    total = tl.zeros(f.shape, tl.float32)
    for first in range(0, count, SLOTS):
        slot = (first + tl.arange(0, SLOTS))[:, None]
        total += column_sum(tl.load(slots + slot * (P * W) + f, mask=slot < count, other=0.0), EXACT)
    return total


# ----------------------------------------------------------------------------------------------------------
# Runs: the tokens of one group in a tile
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def rows_of(base, strides, tile, VEC: tl.constexpr):
    """Token 0 of a tile's batch entry and head, (1, 1)."""
    return base + (tile.b * (strides.s * VEC) + tile.h * (strides.u * VEC) + tl.zeros((1, 1), tl.int64))


@triton.jit
def blocks_of(run, TAIL: tl.constexpr, block: tl.constexpr):
    """Where a run's full blocks begin and end, or what is left behind them, whose rows have to be masked."""
    full = run.start + tl.maximum(run.end - run.start, 0) // block.R * block.R
    start, end = run.start, full
    if TAIL:
        start, end = full, run.end
    return start, end


@triton.jit
def block_rows(row, run, MASKED: tl.constexpr, block: tl.constexpr):
    """Tokens of a block (R,), and which of them are the run's. The others read what the run's last token does."""
    n = row + tl.arange(0, block.R)
    if MASKED:
        mask = n < run.end
    else:
        mask = tl.full((block.R,), True, tl.int1)
    return n, mask


@triton.jit
def load_block(rows, strides, row, run, first, MASKED: tl.constexpr, spec: tl.constexpr, block: tl.constexpr):
    """``x`` of a block, (R, W) twice, in the dtype of memory. Rows behind the run's last token are as that."""
    n, _ = block_rows(row, run, MASKED, block)
    if MASKED:
        n = tl.minimum(n, run.end - 1)
    all_rows = tl.full((block.R,), True, tl.int1)
    return load_input(
        rows + n.to(tl.int64)[:, None] * (strides.n * spec.VEC), all_rows, strides.f, first, spec, block.W
    )


@triton.jit
def hold(base, strides, run, tile, PAIRS: tl.constexpr, spec: tl.constexpr, block: tl.constexpr):
    """All blocks of a tile in words of two features, int32: what `unpacked` takes, of each.

    The compiler would keep 16-bit numbers in a register each. ``PAIRS``: of gradients, which are zero behind the last
    token; rows of ``x`` are there as its last.
    """
    held = ()
    TOGETHER: tl.constexpr = 1 if spec.KIND == "interleaved" else 2
    W: tl.constexpr = block.W // TOGETHER
    words: tl.constexpr = block.WORDS
    for k in tl.static_range(block.HELD):
        rows = rows_of(base.to(tl.pointer_type(tl.int32)), strides, tile, words.VEC)
        n, mask = block_rows(run.start + k * block.R, run, True, block)
        if not PAIRS:
            n = tl.minimum(n, run.end - 1)
            mask = tl.full((block.R,), True, tl.int1)
        rows += n.to(tl.int64)[:, None] * (strides.n * words.VEC)
        if PAIRS and spec.KIND == "cosine":
            pair = load_pair(rows, mask, strides.f, tile.first // TOGETHER, words, W)
        else:
            pair = load_input(rows, mask, strides.f, tile.first // TOGETHER, words, W)
        held = held + (pair,)
    return held


@triton.jit
def halves(word, dtype: tl.constexpr):
    """Both numbers of words in float32. Volatile: they would be kept since they were last asked for."""
    if INTERPRETED:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        low, high = tl.inline_asm_elementwise(
            WIDEN_BFLOAT16 if dtype == tl.bfloat16 else WIDEN_FLOAT16,
            "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def unpacked(pair, dtype: tl.constexpr, PAIRS: tl.constexpr, spec: tl.constexpr):
    """Both members' numbers (R, W) in float32."""
    low, high = halves(pair[0], dtype)
    if spec.KIND == "interleaved":
        one, two = low, high
    else:
        one = tl.interleave(low, high)
        two = one
        if PAIRS or spec.KIND != "cosine":
            low, high = halves(pair[1], dtype)
            two = tl.interleave(low, high)
    return one, two


@triton.jit
def add_powers(
    totals, x, row, run, shift1, shift2, MASKED: tl.constexpr, spec: tl.constexpr, EXACT: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Add a block's powers, of the run's tokens, to (R, W) of both members."""
    total1, total2 = totals
    _, mask = block_rows(row, run, MASKED, block)
    one = mask.to(tl.float32)[:, None]  # a product and a sum are one instruction
    total1 = tl.fma(power(x[0], shift1, EXACT), one, total1)
    if spec.KIND != "cosine":
        total2 = tl.fma(power(x[1], shift2, EXACT), one, total2)
    return total1, total2


@triton.jit
def sum_powers(
    xs, rows, strides, run, shift1, shift2, first, spec: tl.constexpr, EXACT: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Columns' sums of powers, (1, W) each: of blocks that are held, or read."""
    zeros = tl.zeros((block.R, block.W), tl.float32)
    totals = (zeros, zeros)
    for k in tl.static_range(len(xs)):
        x = unpacked(xs[k], rows.dtype.element_ty, False, spec)
        totals = add_powers(totals, x, run.start + k * block.R, run, shift1, shift2, True, spec, EXACT, block)
    if len(xs) == 0:
        for TAIL in tl.static_range(2):
            start, end = blocks_of(run, TAIL, block)
            for row in tl.range(start, end, block.R, num_stages=1 if TAIL else block.STAGES):
                x = load_block(rows, strides, row, run, first, TAIL, spec, block)
                totals = add_powers(totals, x, row, run, shift1, shift2, TAIL, spec, EXACT, block)
    total1 = column_sum(totals[0], EXACT)
    total2 = total1
    if spec.KIND != "cosine":
        total2 = column_sum(totals[1], EXACT)
    return total1, total2


@triton.jit
def column_statistics(
    xs, rows, strides, run, first, spec: tl.constexpr, EXACT: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Columns' shifts and sums of powers, (1, W) each.

    The shift is the column's first entry, which is usually as good as the maximum and costs no reduction: a sum then
    has at least one term near one, and is only too large where the column rises by 22 or so.
    """
    one = tl.full((1,), True, tl.int1)
    first_row = rows + run.start.to(tl.int64) * (strides.n * spec.VEC)
    f1, f2 = load_input(first_row, one, strides.f, first, spec, block.W)
    shift1 = f1.to(tl.float32)
    shift2 = f2.to(tl.float32)
    total1, total2 = sum_powers(xs, rows, strides, run, shift1, shift2, first, spec, EXACT, block)
    good = (total1 < LARGEST_SUM) & (total2 < LARGEST_SUM)
    if tl.min(tl.min(good.to(tl.int32), axis=1), axis=0) == 0:  # too large for its shift, infinite or NaN
        top1 = tl.full((block.R, block.W), float("-inf"), tl.float32)
        top2 = top1
        for row in tl.range(run.start, run.end, block.R):
            x1, x2 = load_block(rows, strides, row, run, first, True, spec, block)
            top1 = tl.maximum(top1, x1.to(tl.float32))
            top2 = tl.maximum(top2, x2.to(tl.float32))
        shift1 = largest(top1)
        shift2 = largest(top2)
        total1, total2 = sum_powers((), rows, strides, run, shift1, shift2, first, spec, EXACT, block)
    # Entries of −inf alone have no shift, or it could be larger than those of other parts.
    shift1 = tl.where(total1 == 0.0, float("-inf"), shift1)
    shift2 = tl.where(total2 == 0.0, float("-inf"), shift2)
    return shift1, shift2, total1, total2


# ----------------------------------------------------------------------------------------------------------
# Angles
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def block_angles(row, run, tile, angles, steps, spec: tl.constexpr, EXACT: tl.constexpr, block: tl.constexpr):
    """Positions (R, 1 or W) of a block's tokens, and their angles' cosines and sines (R, W)."""
    n, mask = block_rows(row, run, True, block)
    axis = (tile.first + tl.arange(0, block.W)) // spec.E
    place = n if angles.ids is not None else n - run.group_start
    position = token_positions(place, mask, tile.b, tl.zeros_like(n) + tile.h, axis, angles, spec.AXES)
    whole, rest, unit = steps
    cosine, sine = cos_sin(position, whole, rest, unit, not EXACT)
    return position, cosine, sine


@triton.jit
def first_angles(
    run, tile, angles, steps, spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """What `next_angles` takes for a run's first block.

    With ``STEPPED``: its cosines and sines, and those of the angles by which all rows turn from one block to the next.
    """
    if STEPPED:
        _, cosine, sine = block_angles(run.start, run, tile, angles, steps, spec, EXACT, block)
        whole, rest, unit = steps
        step_cosine, step_sine = cos_sin(tl.full((1, 1), block.R, tl.int32), whole, rest, unit, not EXACT)
        turning = (cosine, sine, step_cosine, step_sine)
    else:
        turning = (run.start,)
    return turning


@triton.jit
def next_angles(
    turning, row, run, tile, angles, steps,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A block's positions, unless ``STEPPED``, its cosines and sines (R, W), and what the next block takes.

    To turn on takes half the instructions of a new angle, and none of the special function unit. Rounding errors grow
    with the number of steps: 1e-4 after 128.
    """
    position = 0
    if STEPPED:
        cosine, sine, step_cosine, step_sine = turning
        next_cosine, next_sine = turn(cosine, sine, step_cosine, step_sine, "rotate")
        turning = (next_cosine, next_sine, step_cosine, step_sine)
    else:
        position, cosine, sine = block_angles(row, run, tile, angles, steps, spec, EXACT, block)
    return position, cosine, sine, turning


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def store_weights(
    x_block, rows, strides, row, run, first, cosine, sine, known, spec: tl.constexpr, EXACT: tl.constexpr,
    block: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write a block's turned weights."""
    n, mask = block_rows(row, run, MASKED, block)
    y1 = weights(x_block[0], known.shift1, known.scale1, EXACT)
    y2 = y1
    if spec.KIND != "cosine":
        y2 = weights(x_block[1], known.shift2, known.scale2, EXACT)
    o1, o2 = turn(y1, y2, cosine, sine, spec.KIND)
    to = rows + n.to(tl.int64)[:, None] * (strides.n * spec.VEC)
    store_pair(to, o1, o2, mask, strides.f, first, spec, block.W)


@triton.jit
def apply_softmax(
    xs, x, out, x_strides, out_strides, run, tile, known, angles, steps,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the turned weights of a run, whose columns' statistics are known."""
    x_rows = rows_of(x, x_strides, tile, spec.VEC)
    out_rows = rows_of(out, out_strides, tile, spec.VEC)
    known = prepared(known, EXACT)
    turning = first_angles(run, tile, angles, steps, spec, EXACT, STEPPED, block)
    for k in tl.static_range(len(xs)):
        row = run.start + k * block.R
        _, cosine, sine, turning = next_angles(
            turning, row, run, tile, angles, steps, spec, EXACT, STEPPED, block
        )
        x_block = unpacked(xs[k], x.dtype.element_ty, False, spec)
        store_weights(
            x_block, out_rows, out_strides, row, run, tile.first, cosine, sine, known, spec, EXACT, block, True
        )
    if len(xs) == 0:
        for TAIL in tl.static_range(2):
            start, end = blocks_of(run, TAIL, block)
            for row in tl.range(start, end, block.R, num_stages=1 if TAIL else block.STAGES):
                x_block = load_block(x_rows, x_strides, row, run, tile.first, TAIL, spec, block)
                _, cosine, sine, turning = next_angles(
                    turning, row, run, tile, angles, steps, spec, EXACT, STEPPED and not TAIL, block
                )
                store_weights(
                    x_block, out_rows, out_strides, row, run, tile.first, cosine, sine, known, spec, EXACT, block,
                    TAIL,
                )  # fmt: skip


@triton.jit
def publish_run(
    group, xs, x, partial, cu_seqlens, tile, numbers, sizes, x_strides,
    spec: tl.constexpr, EXACT: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Reduce a run to its columns' statistics, and write these."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    W: tl.constexpr = block.W
    f, _ = column_offsets(0, W, W)
    run = run_of(group, tile, cu_seqlens, numbers, sizes)
    shift1, shift2, total1, total2 = column_statistics(
        xs, rows_of(x, x_strides, tile, spec.VEC), x_strides, run, tile.first, spec, EXACT, block
    )
    to = slot_pointer(partial, run.slot, tile, sizes, 2 * P, W)
    store_columns(to, shift1, shift2, f, f < W, W, P)
    store_columns(to + P * W, total1, total2, f, f < W, W, P)


@triton.jit
def publish_statistics(
    xs, x, partial, arrived, cu_seqlens, tile, numbers, sizes, x_strides,
    spec: tl.constexpr, EXACT: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Reduce a tile to its columns' statistics, and write these."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    W: tl.constexpr = block.W
    f, _ = column_offsets(0, W, W)
    if cu_seqlens is None:
        publish_run(tile.first_group, xs, x, partial, cu_seqlens, tile, numbers, sizes, x_strides, spec, EXACT, block)
    else:
        for group in range(tile.first_group, tile.last_group + 1):
            publish_run(group, xs, x, partial, cu_seqlens, tile, numbers, sizes, x_strides, spec, EXACT, block)
    arrive(arrived, tile)


@triton.jit
def finish_run(
    group, xs, x, out, statistics, partial, cu_seqlens, tile, angles, steps, numbers, sizes, x_strides, out_strides,
    spec: tl.constexpr, EXACT: tl.constexpr, EXACT_SUMS: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the output of a run, and the first tile of a group its statistics."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    F: tl.constexpr = spec.F
    W: tl.constexpr = block.W
    run = run_of(group, tile, cu_seqlens, numbers, sizes)
    if partial is None:
        shift1, shift2, total1, total2 = column_statistics(
            xs, rows_of(x, x_strides, tile, spec.VEC), x_strides, run, tile.first, spec, EXACT_SUMS, block
        )
    else:
        f, _ = column_offsets(0, W, W)
        slots = slot_pointer(partial, run.first_slot, tile, sizes, 2 * P, W)
        shift1, total1 = combine_statistics(slots, run.slots, f, P, W, EXACT_SUMS)
        shift2, total2 = shift1, total1
        if P == 2:
            shift2, total2 = combine_statistics(slots + W, run.slots, f, P, W, EXACT_SUMS)
    f, mask = column_offsets(tile.first, F, W)
    scale1 = tl.div_rn(1.0, tl.where(mask & (total1 != 0.0), total1, 1.0))
    scale2 = tl.div_rn(1.0, tl.where(mask & (total2 != 0.0), total2, 1.0))
    if run.slot == run.first_slot:
        to = statistics + (run.group * sizes.heads + tile.h) * (2 * P * F)
        store_columns(to, shift1, shift2, f, mask, F, P)
        store_columns(to + P * F, scale1, scale2, f, mask, F, P)
    known = Statistics(shift1, shift2, scale1, scale2)
    apply_softmax(
        xs, x, out, x_strides, out_strides, run, tile, known, angles, steps, spec, EXACT, STEPPED, block
    )


@triton.jit
def sequence_forward_kernel(
    x, out, statistics, partial, arrived, theta, ids, offsets, cu_seqlens, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, inverses: Inverses, x_strides: Strides, out_strides: Strides,
    spec: tl.constexpr, EXACT: tl.constexpr, EXACT_SUMS: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Output and statistics. ``partial`` and ``arrived`` (B · H · slabs,) zeros: None where a tile holds all tokens."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    F: tl.constexpr = spec.F
    W: tl.constexpr = block.W
    ALONE: tl.constexpr = partial is None
    angles = Angles(theta, ids, offsets, None, None, offset, numbers, inverses)
    for i in range(sizes.turns + sizes.lag):
        number = i * tl.num_programs(0) + tl.program_id(0)
        if not ALONE:
            if not block.HELD:
                if number < sizes.tiles:
                    tile = tile_of(number, cu_seqlens, numbers, sizes, spec, block)
                    publish_statistics(
                        (), x, partial, arrived, cu_seqlens, tile, numbers, sizes, x_strides, spec, EXACT_SUMS, block
                    )
                number -= sizes.lag * tl.num_programs(0)
        if (number >= 0) & (number < sizes.tiles):
            tile = tile_of(number, cu_seqlens, numbers, sizes, spec, block)
            held_run = run_of(tile.first_group, tile, cu_seqlens, numbers, sizes)
            xs = hold(x, x_strides, held_run, tile, False, spec, block)
            if block.HELD:
                tl.debug_barrier()  # or the assembler moves loads behind the first sums
            if not ALONE:
                if block.HELD:
                    publish_statistics(
                        xs, x, partial, arrived, cu_seqlens, tile, numbers, sizes, x_strides, spec, EXACT_SUMS, block
                    )
            steps = load_frequencies(angles, tile.h, tile.first, spec, W)
            if not ALONE:
                wait(arrived, tile, sizes.parts)
            if cu_seqlens is None:
                finish_run(
                    tile.first_group, xs, x, out, statistics, partial, cu_seqlens, tile, angles, steps, numbers, sizes,
                    x_strides, out_strides, spec, EXACT, EXACT_SUMS, STEPPED, block,
                )  # fmt: skip
            else:
                for group in range(tile.first_group, tile.last_group + 1):
                    finish_run(
                        group, xs, x, out, statistics, partial, cu_seqlens, tile, angles, steps, numbers, sizes,
                        x_strides, out_strides, spec, EXACT, EXACT_SUMS, STEPPED, block,
                    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_gradients(rows, strides, row, run, first, MASKED: tl.constexpr, spec: tl.constexpr, block: tl.constexpr):
    """What reaches a block's outputs, (R, W) twice, in the dtype of memory; zeros behind the run's last token."""
    n, mask = block_rows(row, run, MASKED, block)
    return load_pair(rows + n.to(tl.int64)[:, None] * (strides.n * spec.VEC), mask, strides.f, first, spec, block.W)


@triton.jit
def block_gradients(x, g, cosine, sine, known, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Weights of both members, and the gradients that reach them before the softmax: (R, W) each."""
    d1, d2 = pair_gradient(widen(g[0]), widen(g[1]), cosine, sine)
    y1 = weights(x[0], known.shift1, known.scale1, EXACT)
    y2 = y1
    if KIND != "cosine":
        y2 = weights(x[1], known.shift2, known.scale2, EXACT)
    return y1, y2, d1, d2


@triton.jit
def add_gradients(
    sums, x, g, step, position, cosine, sine, known,
    KIND: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, THETA: tl.constexpr,
):  # fmt: skip
    """Add a block's y · dy, and its angles' gradients times their positions, to (R, W) each.

    With ``STEPPED`` the latter are two sums: of the gradients, and of these times the block's number.
    """
    c1, c2, turned, moment = sums
    y1, y2, d1, d2 = block_gradients(x, g, cosine, sine, known, KIND, EXACT)
    c1 = tl.fma(y1, d1, c1)
    dphi = y1 * d2
    if KIND != "cosine":
        c2 = tl.fma(y2, d2, c2)
        dphi = tl.fma(-y2, d1, dphi)
    if THETA:
        if STEPPED:
            turned += dphi
            moment = tl.fma(dphi, step, moment)
        else:
            moment += position.to(tl.float64) * dphi.to(tl.float64)
    return c1, c2, turned, moment


@triton.jit
def sum_gradients(
    xs, gs, x_rows, grad_rows, x_strides, grad_strides, run, tile, known, angles, steps, moment,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, THETA: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Columns' sums of y · dy, (1, W) each, and theta's gradient of each place in a block, added to ``moment``."""
    KIND: tl.constexpr = spec.KIND
    zeros = tl.zeros((block.R, block.W), tl.float32)
    wide = zeros.to(tl.float64) if THETA and not STEPPED else zeros
    sums = (zeros, zeros, zeros, wide)
    turning = first_angles(run, tile, angles, steps, spec, EXACT, STEPPED, block)
    for k in tl.static_range(len(xs)):
        position, cosine, sine, turning = next_angles(
            turning, run.start + k * block.R, run, tile, angles, steps, spec, EXACT, STEPPED, block
        )
        x = unpacked(xs[k], x_rows.dtype.element_ty, False, spec)
        g = unpacked(gs[k], grad_rows.dtype.element_ty, True, spec)
        sums = add_gradients(sums, x, g, float(k), position, cosine, sine, known, KIND, EXACT, STEPPED, THETA)
    if len(xs) == 0:
        for TAIL in tl.static_range(2):
            start, end = blocks_of(run, TAIL, block)
            for row in tl.range(start, end, block.R, num_stages=1 if TAIL else block.STAGES):
                x = load_block(x_rows, x_strides, row, run, tile.first, TAIL, spec, block)
                g = load_gradients(grad_rows, grad_strides, row, run, tile.first, TAIL, spec, block)
                position, cosine, sine, turning = next_angles(
                    turning, row, run, tile, angles, steps, spec, EXACT, STEPPED and not TAIL, block
                )
                step = ((row - run.start) // block.R).to(tl.float32)
                sums = add_gradients(sums, x, g, step, position, cosine, sine, known, KIND, EXACT, STEPPED, THETA)
    c1, c2, turned, by_step = sums
    if THETA:
        if STEPPED:
            position, _, _ = block_angles(run.start, run, tile, angles, steps, spec, EXACT, block)
            moment += position.to(tl.float64) * turned.to(tl.float64) + by_step.to(tl.float64) * block.R
        else:
            moment += by_step
    c1 = column_sum(c1, EXACT)
    if spec.KIND == "cosine":
        c2 = c1
    else:
        c2 = column_sum(c2, EXACT)
    return c1, c2, moment


@triton.jit
def load_statistics(statistics, run, tile, heads, spec: tl.constexpr, W: tl.constexpr):
    """The statistics of a run's columns."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    f, mask = column_offsets(tile.first, spec.F, W)
    base = statistics + (run.group * heads + tile.h) * (2 * P * spec.F)
    shift1, shift2 = load_columns(base, f, mask, spec.F, P)
    scale1, scale2 = load_columns(base + P * spec.F, f, mask, spec.F, P)
    return Statistics(shift1, shift2, scale1, scale2)


@triton.jit
def store_gradients(
    x, g, rows, strides, row, run, first, c1, c2, cosine, sine, known, spec: tl.constexpr, EXACT: tl.constexpr,
    block: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write a block's y · (dy − c)."""
    n, mask = block_rows(row, run, MASKED, block)
    y1, y2, d1, d2 = block_gradients(x, g, cosine, sine, known, spec.KIND, EXACT)
    to = rows + n.to(tl.int64)[:, None] * (strides.n * spec.VEC)
    store_input(to, y1 * (d1 - c1), y2 * (d2 - c2), mask, strides.f, first, spec, block.W)


@triton.jit
def apply_gradient(
    xs, gs, x, grad, dx, x_strides, grad_strides, dx_strides, run, tile, known, c1, c2, angles, steps,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x of a run, y · (dy − c), where c (1, W) are the columns' sums of y · dy."""
    x_rows = rows_of(x, x_strides, tile, spec.VEC)
    grad_rows = rows_of(grad, grad_strides, tile, spec.VEC)
    dx_rows = rows_of(dx, dx_strides, tile, spec.VEC)
    known = prepared(known, EXACT)
    turning = first_angles(run, tile, angles, steps, spec, EXACT, STEPPED, block)
    for k in tl.static_range(len(xs)):
        row = run.start + k * block.R
        _, cosine, sine, turning = next_angles(
            turning, row, run, tile, angles, steps, spec, EXACT, STEPPED, block
        )
        x_block = unpacked(xs[k], x.dtype.element_ty, False, spec)
        g_block = unpacked(gs[k], grad.dtype.element_ty, True, spec)
        store_gradients(
            x_block, g_block, dx_rows, dx_strides, row, run, tile.first, c1, c2, cosine, sine, known, spec, EXACT,
            block, True,
        )  # fmt: skip
    if len(xs) == 0:
        for TAIL in tl.static_range(2):
            start, end = blocks_of(run, TAIL, block)
            for row in tl.range(start, end, block.R, num_stages=1 if TAIL else block.STAGES):
                x_block = load_block(x_rows, x_strides, row, run, tile.first, TAIL, spec, block)
                g_block = load_gradients(grad_rows, grad_strides, row, run, tile.first, TAIL, spec, block)
                _, cosine, sine, turning = next_angles(
                    turning, row, run, tile, angles, steps, spec, EXACT, STEPPED and not TAIL, block
                )
                store_gradients(
                    x_block, g_block, dx_rows, dx_strides, row, run, tile.first, c1, c2, cosine, sine, known, spec,
                    EXACT, block, TAIL,
                )  # fmt: skip


@triton.jit
def reduce_gradients(
    xs, gs, x, grad, x_strides, grad_strides, statistics, run, tile, heads, angles, steps, moment,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, THETA: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`sum_gradients` of a run, with its statistics."""
    known = load_statistics(statistics, run, tile, heads, spec, block.W)
    return sum_gradients(
        xs, gs, rows_of(x, x_strides, tile, spec.VEC), rows_of(grad, grad_strides, tile, spec.VEC), x_strides,
        grad_strides, run, tile, prepared(known, EXACT), angles, steps, moment, spec, EXACT, STEPPED, THETA, block,
    )  # fmt: skip


@triton.jit
def store_moment(dtheta, moment, tile, sizes, spec: tl.constexpr, W: tl.constexpr):
    """Write a tile's part of theta's gradient: float64 (B · parts, H, F)."""
    f, mask = column_offsets(tile.first, spec.F, W)
    to = dtheta + ((tile.b * sizes.parts + tile.part) * sizes.heads + tile.h) * spec.F
    tl.store(to + f, tl.sum(moment, axis=0)[None, :], mask=mask)


@triton.jit
def publish_gradient_run(
    group, xs, gs, x, grad, statistics, partial, cu_seqlens, tile, angles, steps, moment, numbers, sizes, x_strides,
    grad_strides,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, THETA: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Reduce a run to its columns' sums of y · dy, and write these."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    W: tl.constexpr = block.W
    f, _ = column_offsets(0, W, W)
    run = run_of(group, tile, cu_seqlens, numbers, sizes)
    c1, c2, moment = reduce_gradients(
        xs, gs, x, grad, x_strides, grad_strides, statistics, run, tile, sizes.heads, angles, steps, moment, spec,
        EXACT, STEPPED, THETA, block,
    )  # fmt: skip
    store_columns(slot_pointer(partial, run.slot, tile, sizes, P, W), c1, c2, f, f < W, W, P)
    return moment


@triton.jit
def publish_gradients(
    xs, gs, x, grad, statistics, partial, arrived, dtheta, cu_seqlens, tile, angles, steps, numbers, sizes,
    x_strides, grad_strides,
    spec: tl.constexpr, EXACT: tl.constexpr, STEPPED: tl.constexpr, THETA: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Reduce a tile to its columns' sums of y · dy, and write these and its part of theta's gradient."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    W: tl.constexpr = block.W
    moment = tl.zeros((block.R, W), tl.float64) if THETA else 0.0
    if cu_seqlens is None:
        moment = publish_gradient_run(
            tile.first_group, xs, gs, x, grad, statistics, partial, cu_seqlens, tile, angles, steps, moment, numbers,
            sizes, x_strides, grad_strides, spec, EXACT, STEPPED, THETA, block,
        )  # fmt: skip
    else:
        for group in range(tile.first_group, tile.last_group + 1):
            moment = publish_gradient_run(
                group, xs, gs, x, grad, statistics, partial, cu_seqlens, tile, angles, steps, moment, numbers, sizes,
                x_strides, grad_strides, spec, EXACT, STEPPED, THETA, block,
            )  # fmt: skip
    arrive(arrived, tile)
    if THETA:
        store_moment(dtheta, moment, tile, sizes, spec, W)


@triton.jit
def finish_gradient_run(
    group, xs, gs, x, grad, dx, statistics, partial, cu_seqlens, tile, angles, steps, moment, numbers, sizes,
    x_strides, grad_strides, dx_strides,
    spec: tl.constexpr, EXACT: tl.constexpr, EXACT_SUMS: tl.constexpr, STEPPED: tl.constexpr, THETA: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x of a run."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    W: tl.constexpr = block.W
    run = run_of(group, tile, cu_seqlens, numbers, sizes)
    if partial is None:
        c1, c2, moment = reduce_gradients(
            xs, gs, x, grad, x_strides, grad_strides, statistics, run, tile, sizes.heads, angles, steps,
            moment, spec, EXACT_SUMS, STEPPED, THETA, block,
        )  # fmt: skip
    else:
        f, _ = column_offsets(0, W, W)
        slots = slot_pointer(partial, run.first_slot, tile, sizes, P, W)
        c1 = combine_sums(slots, run.slots, f, P, W, EXACT_SUMS)
        c2 = c1
        if P == 2:
            c2 = combine_sums(slots + W, run.slots, f, P, W, EXACT_SUMS)
    known = load_statistics(statistics, run, tile, sizes.heads, spec, W)
    apply_gradient(
        xs, gs, x, grad, dx, x_strides, grad_strides, dx_strides, run, tile, known, c1, c2, angles, steps,
        spec, EXACT, STEPPED, block,
    )  # fmt: skip
    return moment


@triton.jit
def sequence_backward_kernel(
    x, grad, dx, statistics, partial, arrived, dtheta, theta, ids, offsets, cu_seqlens, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, inverses: Inverses, x_strides: Strides, grad_strides: Strides, dx_strides: Strides,
    spec: tl.constexpr, EXACT: tl.constexpr, EXACT_SUMS: tl.constexpr, STEPPED: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and partial sums of theta's, ``dtheta``, or None; ``partial`` and ``arrived`` as forward."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    W: tl.constexpr = block.W
    THETA: tl.constexpr = dtheta is not None
    ALONE: tl.constexpr = partial is None
    # A lone token's gradient is zero if both are taken alike: its weight is one, and its sum is what reaches it.
    EXACT_DX: tl.constexpr = EXACT_SUMS if ALONE else EXACT
    angles = Angles(theta, ids, offsets, None, None, offset, numbers, inverses)
    for i in range(sizes.turns + sizes.lag):
        number = i * tl.num_programs(0) + tl.program_id(0)
        if not ALONE:
            if not block.HELD:
                if number < sizes.tiles:
                    tile = tile_of(number, cu_seqlens, numbers, sizes, spec, block)
                    steps = load_frequencies(angles, tile.h, tile.first, spec, W)
                    publish_gradients(
                        (), (), x, grad, statistics, partial, arrived, dtheta, cu_seqlens, tile, angles, steps,
                        numbers, sizes, x_strides, grad_strides, spec, EXACT_SUMS, STEPPED, THETA, block,
                    )  # fmt: skip
                number -= sizes.lag * tl.num_programs(0)
        if (number >= 0) & (number < sizes.tiles):
            tile = tile_of(number, cu_seqlens, numbers, sizes, spec, block)
            held_run = run_of(tile.first_group, tile, cu_seqlens, numbers, sizes)
            xs = hold(x, x_strides, held_run, tile, False, spec, block)
            gs = hold(grad, grad_strides, held_run, tile, True, spec, block)
            if block.HELD:
                tl.debug_barrier()
            steps = load_frequencies(angles, tile.h, tile.first, spec, W)
            moment = tl.zeros((block.R, W), tl.float64) if THETA else 0.0
            if not ALONE:
                if block.HELD:
                    publish_gradients(
                        xs, gs, x, grad, statistics, partial, arrived, dtheta, cu_seqlens, tile, angles, steps,
                        numbers, sizes, x_strides, grad_strides, spec, EXACT_SUMS, STEPPED, THETA, block,
                    )  # fmt: skip
                wait(arrived, tile, sizes.parts)
            if cu_seqlens is None:
                moment = finish_gradient_run(
                    tile.first_group, xs, gs, x, grad, dx, statistics, partial, cu_seqlens, tile, angles, steps, moment,
                    numbers, sizes, x_strides, grad_strides, dx_strides, spec, EXACT_DX, EXACT_SUMS, STEPPED, THETA,
                    block,
                )  # fmt: skip
            else:
                for group in range(tile.first_group, tile.last_group + 1):
                    moment = finish_gradient_run(
                        group, xs, gs, x, grad, dx, statistics, partial, cu_seqlens, tile, angles, steps, moment,
                        numbers, sizes, x_strides, grad_strides, dx_strides, spec, EXACT_DX, EXACT_SUMS, STEPPED,
                        THETA, block,
                    )  # fmt: skip
            if ALONE:
                if THETA:
                    store_moment(dtheta, moment, tile, sizes, spec, W)
