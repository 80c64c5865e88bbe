"""The forward of softmax over the sequence: columns' statistics, and the weights turned."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.ops.lrpe.kernels.forward import turn
from warploom.ops.lrpe.kernels.rows import load_input, store_pair
from warploom.ops.lrpe.softmax_sequence.kernels.columns import alternating, column_sum, power, scale_of, weights
from warploom.ops.lrpe.softmax_sequence.kernels.tiles import block_rows, read, rows_of, unpacked
from warploom.ops.lrpe.softmax_sequence.kernels.turning import first_angles, next_angles

LARGEST_SUM = tl.constexpr(2.0**32)


@triton.jit
def add_powers(totals, xs, row, run, shift1, shift2, call, variant: tl.constexpr):
    """Add the powers of blocks from token ``row`` on, of both members, to (R, W) each."""
    total1, total2 = totals
    for k in tl.static_range(len(xs)):
        _, mask = block_rows(row + k * variant.R, run, variant.R)
        one = mask.to(tl.float32)[:, None]  # a product and a sum are one instruction
        x1, x2 = unpacked(xs[k], call.x, False, variant)
        total1 = tl.fma(power(x1, shift1, variant.EXACT_SUMS), one, total1)
        if variant.spec.KIND != "cosine":
            total2 = tl.fma(power(x2, shift2, variant.EXACT_SUMS), one, total2)
    return total1, total2


@triton.jit
def sum_powers(xs, run, tile, shift1, shift2, call, variant: tl.constexpr):
    """Columns' sums of powers, (1, W) each: of blocks that are held, or read."""
    zeros = tl.zeros((variant.R, variant.W), tl.float32)
    totals = (zeros, zeros)
    if len(xs) > 0:
        totals = add_powers(totals, xs, run.start, run, shift1, shift2, call, variant)
    else:
        for row in tl.range(run.start, run.end, variant.R, num_stages=variant.STAGES):
            some = read(call.x, call.x_strides, row, run, tile, 1, False, variant)
            totals = add_powers(totals, some, row, run, shift1, shift2, call, variant)
    total1 = column_sum(totals[0], variant.EXACT_SUMS)
    total2 = total1
    if variant.spec.KIND != "cosine":
        total2 = column_sum(totals[1], variant.EXACT_SUMS)
    return total1, total2


@triton.jit
def largest(top):
    """Maxima over the rows of a block (R, W): (1, W). −inf where there is nothing else, made zero: it is a shift."""
    top = tl.max(top, axis=0)[None, :]
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def column_statistics(xs, run, tile, call, variant: tl.constexpr):
    """Columns' shifts and sums of powers, (1, P · W) each.

    The shift is the column's first entry, which is usually as good as the maximum and costs no reduction: a sum then
    has at least one term near one, and is only too large where the column rises by 22 or so.
    """
    spec: tl.constexpr = variant.spec
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    first_row = rows_of(call.x, call.x_strides, tile, spec.VEC) + run.start.to(tl.int64) * (call.x_strides.n * spec.VEC)
    one = tl.full((1,), True, tl.int1)
    f1, f2 = load_input(first_row, one, call.x_strides.f, tile.first, spec, variant.W)
    shift1 = f1.to(tl.float32)
    shift2 = f2.to(tl.float32)
    if variant.EXACT_SUMS < 2:
        total1, total2 = sum_powers(xs, run, tile, shift1, shift2, call, variant)
        good = (total1 < LARGEST_SUM) & (total2 < LARGEST_SUM)
    else:  # differences of float32 are rounded, but near the largest entry
        total1, total2 = shift1, shift2
        good = tl.zeros((1, variant.W), tl.int1)
    if tl.min(tl.min(good.to(tl.int32), axis=1), axis=0) == 0:  # too large for its shift, infinite or NaN
        top1 = tl.full((variant.R, variant.W), float("-inf"), tl.float32)
        top2 = top1
        for row in tl.range(run.start, run.end, variant.R, num_stages=variant.STAGES):
            some = read(call.x, call.x_strides, row, run, tile, 1, False, variant)
            x1, x2 = unpacked(some[0], call.x, False, variant)
            top1 = tl.maximum(top1, x1)
            top2 = tl.maximum(top2, x2)
        shift1 = largest(top1)
        shift2 = largest(top2)
        total1, total2 = sum_powers((), run, tile, shift1, shift2, call, variant)
    shift = alternating(shift1, shift2, P)
    total = alternating(total1, total2, P)
    # Entries of −inf alone have no shift, or it could be larger than those of other parts.
    return tl.where(total == 0.0, float("-inf"), shift), total


@triton.jit
def store_weights(xs, row, run, tile, known, turning, steps, call, variant: tl.constexpr):
    """Write the turned weights of blocks from token ``row`` on."""
    spec: tl.constexpr = variant.spec
    KIND: tl.constexpr = spec.KIND
    out_rows = rows_of(call.out, call.out_strides, tile, spec.VEC)
    for k in tl.static_range(len(xs)):
        n, mask = block_rows(row + k * variant.R, run, variant.R)
        _, cosine, sine, turning = next_angles(
            turning, row + k * variant.R, run, tile, call, steps, variant.EXACT, variant
        )
        x1, x2 = unpacked(xs[k], call.x, False, variant)
        y1 = weights(x1, known.shift1, known.scale1, variant.EXACT)
        y2 = y1
        if KIND != "cosine":
            y2 = weights(x2, known.shift2, known.scale2, variant.EXACT)
        o1, o2 = turn(y1, y2, cosine, sine, KIND)
        to = out_rows + n.to(tl.int64)[:, None] * (call.out_strides.n * spec.VEC)
        store_pair(to, o1, o2, mask, call.out_strides.f, tile.first, spec, variant.W)
    return turning


@triton.jit
def apply_softmax(xs, run, tile, known, steps, call, variant: tl.constexpr):
    """Write the output of a run, whose columns' statistics are known."""
    turning = first_angles(run, tile, call, steps, variant.EXACT, variant)
    if len(xs) > 0:
        store_weights(xs, run.start, run, tile, known, turning, steps, call, variant)
    else:
        for row in tl.range(run.start, run.end, variant.R, num_stages=variant.STAGES):
            some = read(call.x, call.x_strides, row, run, tile, 1, False, variant)
            turning = store_weights(some, row, run, tile, known, turning, steps, call, variant)
