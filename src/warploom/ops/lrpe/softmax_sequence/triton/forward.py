"""The forward of softmax over the sequence: columns' statistics, and the weights turned."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.online_softmax import finite_max
from warploom.device.rotation import rotate
from warploom.device.rows import load_input, store_pair
from warploom.ops.lrpe.softmax_sequence.triton.columns import column_sums, power, weights
from warploom.ops.lrpe.softmax_sequence.triton.tiles import (
    block_rows,
    first_angles,
    load_x,
    next_angles,
    slab_rows,
)

LARGEST_SUM = tl.constexpr(2.0**32)


@triton.jit
def sum_powers(run, tile, shift1, shift2, call, config: tl.constexpr):
    """Returns columns' sums of powers, (1, P · W)."""
    total1 = tl.zeros((config.R, config.W), tl.float32)
    total2 = total1
    for row in tl.range(run.start, run.end, config.R, num_stages=config.STAGES):
        x1, x2 = load_x(row, run, tile, call, config)
        _, mask = block_rows(row, run, config.R)
        one = mask.to(tl.float32)[:, None]  # a product and a sum are one instruction
        total1 = tl.fma(power(x1, shift1, config.EXACT_SUMS), one, total1)
        if config.P == 2:
            total2 = tl.fma(power(x2, shift2, config.EXACT_SUMS), one, total2)
    return column_sums(total1, total2, config.P, config.EXACT_SUMS)


@triton.jit
def largest_entries(run, tile, call, config: tl.constexpr):
    """Returns the largest entries of both members' columns, (1, W) each. −inf where there is nothing else is made zero: it is a shift."""
    top1 = tl.full((config.R, config.W), float("-inf"), tl.float32)
    top2 = top1
    for row in tl.range(run.start, run.end, config.R, num_stages=1):
        x1, x2 = load_x(row, run, tile, call, config)
        top1 = tl.maximum(top1, x1)
        top2 = tl.maximum(top2, x2)
    top1 = tl.max(top1, axis=0)[None, :]
    top2 = tl.max(top2, axis=0)[None, :]
    return finite_max(top1), finite_max(top2)


@triton.jit
def column_statistics(run, tile, call, config: tl.constexpr):
    """Returns columns' shifts and sums of powers, (1, P · W) each.

    The shift of 16-bit numbers is the column's first entry, which is usually as good as the largest and costs no
    reduction: a sum then has at least one term near one, and is only too large where the column rises by 22 or so.
    Differences of float32 are rounded, least where the power is large: there the shift is the largest entry.
    """
    spec: tl.constexpr = config.spec
    if config.EXACT_SUMS == 2:
        shift1, shift2 = largest_entries(run, tile, call, config)
        total = sum_powers(run, tile, shift1, shift2, call, config)
    else:
        strides = call.x_strides
        first_row = slab_rows(call.x, strides, tile, spec.VEC) + run.start.to(tl.int64) * (strides.n * spec.VEC)
        f1, f2 = load_input(first_row, tl.full((1,), True, tl.int1), strides.f, tile.first, spec, config.W)
        shift1 = f1.to(tl.float32)
        shift2 = f2.to(tl.float32)
        total = sum_powers(run, tile, shift1, shift2, call, config)
        good = (total < LARGEST_SUM).to(tl.int32)
        if tl.min(tl.min(good, axis=1), axis=0) == 0:  # too large for its shift, infinite or NaN
            shift1, shift2 = largest_entries(run, tile, call, config)
            total = sum_powers(run, tile, shift1, shift2, call, config)
    # Entries of −inf alone have no shift, or it could be larger than those of other parts.
    shift = tl.interleave(shift1, shift2) if config.P == 2 else shift1
    return tl.where(total == 0.0, float("-inf"), shift), total


@triton.jit
def apply_softmax(run, tile, known, steps, call, config: tl.constexpr):
    """Writes the turned weights of a run, whose columns' statistics are known."""
    spec: tl.constexpr = config.spec
    KIND: tl.constexpr = spec.KIND
    EXACT: tl.constexpr = config.EXACT
    rows = slab_rows(call.out, call.out_strides, tile, spec.VEC)
    rotation = first_angles(run, tile, call, steps, EXACT, config)
    for row in tl.range(run.start, run.end, config.R, num_stages=config.STAGES):
        x1, x2 = load_x(row, run, tile, call, config)
        _, cosine, sine, rotation = next_angles(rotation, row, run, tile, call, steps, EXACT, config)
        y1 = weights(x1, known.shift1, known.scale1, EXACT)
        y2 = y1
        if KIND != "cosine":
            y2 = weights(x2, known.shift2, known.scale2, EXACT)
        o1, o2 = rotate(y1, y2, cosine, sine, KIND)
        n, mask = block_rows(row, run, config.R)
        to = rows + n.to(tl.int64)[:, None] * (call.out_strides.n * spec.VEC)
        store_pair(to, o1, o2, mask, call.out_strides.f, tile.first, spec, config.W)
