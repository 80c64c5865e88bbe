"""The backward of softmax over the sequence: columns' sums of y · dy, theta's gradient, and that of x."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.ops.lrpe.kernels.backward import pair_gradient
from warploom.ops.lrpe.kernels.angles import load_frequencies
from warploom.ops.lrpe.kernels.rows import store_input
from warploom.ops.lrpe.softmax_sequence.kernels.columns import alternating, column_sum, weights
from warploom.ops.lrpe.softmax_sequence.kernels.tiles import block_rows, read, rows_of, unpacked
from warploom.ops.lrpe.softmax_sequence.kernels.turning import block_angles, first_angles, next_angles


class Sums(NamedTuple):
    """Over a run, (R, W) each: y · dy of both members, and the angles' gradients.

    Of these, if angles are ``STEPPED``, the sum and the sum times the number of the block, else in float64 the sum times the
    position.
    """

    c1: tl.tensor
    c2: tl.tensor
    turned: tl.tensor
    moment: tl.tensor


@triton.jit
def block_gradients(x, g, cosine, sine, known, EXACT: tl.constexpr, call, variant: tl.constexpr):
    """Weights of both members of a block, and the gradients that reach them before the softmax: (R, W) each."""
    x1, x2 = unpacked(x, call.x, False, variant)
    g1, g2 = unpacked(g, call.grad, True, variant)
    d1, d2 = pair_gradient(g1, g2, cosine, sine)
    y1 = weights(x1, known.shift1, known.scale1, EXACT)
    y2 = y1
    if variant.spec.KIND != "cosine":
        y2 = weights(x2, known.shift2, known.scale2, EXACT)
    return y1, y2, d1, d2


@triton.jit
def add_gradients(sums, turning, xs, gs, row, run, tile, known, steps, call, variant: tl.constexpr):
    """Add blocks from token ``row`` on to `Sums`."""
    EXACT: tl.constexpr = variant.EXACT_SUMS
    c1, c2, turned, moment = sums
    for k in tl.static_range(len(xs)):
        position, cosine, sine, turning = next_angles(
            turning, row + k * variant.R, run, tile, call, steps, EXACT, variant
        )
        y1, y2, d1, d2 = block_gradients(xs[k], gs[k], cosine, sine, known, EXACT, call, variant)
        c1 = tl.fma(y1, d1, c1)
        dphi = y1 * d2
        if variant.spec.KIND != "cosine":
            c2 = tl.fma(y2, d2, c2)
            dphi = tl.fma(-y2, d1, dphi)
        if call.dtheta is not None:
            if variant.STEPPED:
                turned += dphi
                moment = tl.fma(dphi, ((row - run.start) // variant.R + k).to(tl.float32), moment)
            else:
                moment += position.to(tl.float64) * dphi.to(tl.float64)
    return Sums(c1, c2, turned, moment), turning


@triton.jit
def store_moment(sums, group, run, tile, steps, call, variant: tl.constexpr):
    """Add a run's part of theta's gradient to its tile's: float64 (B · parts, H, F)."""
    f = (tile.first + tl.arange(0, variant.W))[None, :]
    mask = f < variant.spec.F
    moment = sums.moment.to(tl.float64)
    if variant.STEPPED:
        position, _, _ = block_angles(run.start, run, tile, call, steps, variant.EXACT_SUMS, variant)
        moment = moment * variant.R + position.to(tl.float64) * sums.turned.to(tl.float64)
    moment = tl.sum(moment, axis=0)[None, :]
    to = call.dtheta + ((tile.b * call.sizes.parts + tile.part) * call.sizes.heads + tile.h) * variant.spec.F + f
    moment += tl.load(to, mask=mask & (group > tile.first_group), other=0.0)
    tl.store(to, moment, mask=mask)


@triton.jit
def sum_gradients(xs, gs, group, run, tile, known, call, variant: tl.constexpr):
    """A run's sums of y · dy, (1, P · W); theta's gradient is stored."""
    P: tl.constexpr = 1 if variant.spec.KIND == "cosine" else 2
    steps = load_frequencies(call.angles, tile.h, tile.first, variant.spec, variant.W)
    zeros = tl.zeros((variant.R, variant.W), tl.float32)
    sums = Sums(zeros, zeros, zeros, zeros if variant.STEPPED else zeros.to(tl.float64))
    turning = first_angles(run, tile, call, steps, variant.EXACT_SUMS, variant)
    if len(xs) > 0:
        sums, turning = add_gradients(sums, turning, xs, gs, run.start, run, tile, known, steps, call, variant)
    else:
        for row in tl.range(run.start, run.end, variant.R, num_stages=variant.STAGES):
            x_some = read(call.x, call.x_strides, row, run, tile, 1, False, variant)
            g_some = read(call.grad, call.grad_strides, row, run, tile, 1, True, variant)
            sums, turning = add_gradients(sums, turning, x_some, g_some, row, run, tile, known, steps, call, variant)
    if call.dtheta is not None:
        store_moment(sums, group, run, tile, steps, call, variant)
    c1 = column_sum(sums.c1, variant.EXACT_SUMS)
    if P == 2:
        c1 = alternating(c1, column_sum(sums.c2, variant.EXACT_SUMS), P)
    return c1


@triton.jit
def store_gradients(xs, gs, row, run, tile, known, c1, c2, turning, steps, EXACT: tl.constexpr, call, variant: tl.constexpr):
    """Write y · (dy − c) of blocks from token ``row`` on."""
    spec: tl.constexpr = variant.spec
    rows = rows_of(call.out, call.out_strides, tile, spec.VEC)
    for k in tl.static_range(len(xs)):
        n, mask = block_rows(row + k * variant.R, run, variant.R)
        _, cosine, sine, turning = next_angles(
            turning, row + k * variant.R, run, tile, call, steps, EXACT, variant
        )
        y1, y2, d1, d2 = block_gradients(xs[k], gs[k], cosine, sine, known, EXACT, call, variant)
        to = rows + n.to(tl.int64)[:, None] * (call.out_strides.n * spec.VEC)
        store_input(to, y1 * (d1 - c1), y2 * (d2 - c2), mask, call.out_strides.f, tile.first, spec, variant.W)
    return turning


@triton.jit
def apply_gradient(xs, gs, run, tile, known, c1, c2, steps, EXACT: tl.constexpr, call, variant: tl.constexpr):
    """Write the gradient of x of a run, y · (dy − c), where c (1, W) are the columns' sums of y · dy."""
    turning = first_angles(run, tile, call, steps, EXACT, variant)
    if len(xs) > 0:
        store_gradients(xs, gs, run.start, run, tile, known, c1, c2, turning, steps, EXACT, call, variant)
    else:
        for row in tl.range(run.start, run.end, variant.R, num_stages=variant.STAGES):
            x_some = read(call.x, call.x_strides, row, run, tile, 1, False, variant)
            g_some = read(call.grad, call.grad_strides, row, run, tile, 1, True, variant)
            turning = store_gradients(
                x_some, g_some, row, run, tile, known, c1, c2, turning, steps, EXACT, call, variant
            )
