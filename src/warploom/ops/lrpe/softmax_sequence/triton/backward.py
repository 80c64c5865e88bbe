"""The backward of softmax over the sequence: columns' sums of y · dy, theta's gradient, and that of x."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.activations import widen
from warploom.device.rotation import rotate_pair_back
from warploom.device.rows import load_pair, store_input
from warploom.ops.lrpe.softmax_sequence.triton.columns import column_sums, weights
from warploom.ops.lrpe.softmax_sequence.triton.tiles import (
    block_angles,
    block_rows,
    first_angles,
    load_x,
    next_angles,
    slab_rows,
)
from warploom.ops.lrpe.triton.angles import load_frequencies


@triton.jit
def load_gradients(row, run, tile, known, cosine, sine, EXACT: tl.constexpr, call, config: tl.constexpr):
    """Returns weights of both members of a block, and the gradients that reach them before the softmax: (R, W) each.

    Gradients are zero behind the run's last token.
    """
    spec: tl.constexpr = config.spec
    n, mask = block_rows(row, run, config.R)
    rows = slab_rows(call.grad, call.grad_strides, tile, spec.VEC)
    rows += n.to(tl.int64)[:, None] * (call.grad_strides.n * spec.VEC)
    g1, g2 = load_pair(rows, mask, call.grad_strides.f, tile.first, spec, config.W)
    x1, x2 = load_x(row, run, tile, call, config)
    d1, d2 = rotate_pair_back(widen(g1), widen(g2), cosine, sine)
    y1 = weights(x1, known.shift1, known.scale1, EXACT)
    y2 = y1
    if spec.KIND != "cosine":
        y2 = weights(x2, known.shift2, known.scale2, EXACT)
    return y1, y2, d1, d2


@triton.jit
def store_moment(turned, moment, group, run, tile, steps, call, config: tl.constexpr):
    """Adds a run's part of theta's gradient to its tile's: float64 (B · parts, H, F). See `sum_gradients`."""
    f = (tile.first + tl.arange(0, config.W))[None, :]
    mask = f < config.spec.F
    moment = moment.to(tl.float64)
    if config.STEPPED:
        position, _, _ = block_angles(run.start, run, tile, call, steps, config.EXACT_SUMS, config)
        moment = moment * config.R + position.to(tl.float64) * turned.to(tl.float64)
    moment = tl.sum(moment, axis=0)[None, :]
    to = call.dtheta + ((tile.b * call.sizes.parts + tile.part) * call.sizes.heads + tile.h) * config.spec.F + f
    moment += tl.load(to, mask=mask & (group > tile.first_group), other=0.0)
    tl.store(to, moment, mask=mask)


@triton.jit
def sum_gradients(group, run, tile, known, call, config: tl.constexpr):
    """Returns a run's sums of y · dy, (1, P · W). Theta's gradient is stored.

    That is the sum of the angles' gradients times their positions. ``STEPPED``, it is that of positions in the first
    block times the sum over all blocks, ``turned``, and of the number of the block, ``moment``.
    """
    EXACT: tl.constexpr = config.EXACT_SUMS
    THETA: tl.constexpr = call.dtheta is not None
    spec: tl.constexpr = config.spec
    steps = load_frequencies(call.angles, tile.h, tile.first, spec, config.W)
    c1 = tl.zeros((config.R, config.W), tl.float32)
    c2 = c1
    turned = c1
    moment = c1 if config.STEPPED else c1.to(tl.float64)
    rotation = first_angles(run, tile, call, steps, EXACT, config)
    for row in tl.range(run.start, run.end, config.R, num_stages=config.STAGES):
        position, cosine, sine, rotation = next_angles(rotation, row, run, tile, call, steps, EXACT, config)
        y1, y2, d1, d2 = load_gradients(row, run, tile, known, cosine, sine, EXACT, call, config)
        c1 = tl.fma(y1, d1, c1)
        dphi = y1 * d2
        if config.P == 2:
            c2 = tl.fma(y2, d2, c2)
            dphi = tl.fma(-y2, d1, dphi)
        if THETA:
            if config.STEPPED:
                turned += dphi
                moment = tl.fma(dphi, ((row - run.start) // config.R).to(tl.float32), moment)
            else:
                moment += position.to(tl.float64) * dphi.to(tl.float64)
    if THETA:
        store_moment(turned, moment, group, run, tile, steps, call, config)
    return column_sums(c1, c2, config.P, EXACT)


@triton.jit
def apply_gradient(run, tile, known, c1, c2, steps, EXACT: tl.constexpr, call, config: tl.constexpr):
    """Writes the gradient of x of a run, y · (dy − c), where c (1, W) are the columns' sums of y · dy."""
    spec: tl.constexpr = config.spec
    rows = slab_rows(call.out, call.out_strides, tile, spec.VEC)
    rotation = first_angles(run, tile, call, steps, EXACT, config)
    for row in tl.range(run.start, run.end, config.R, num_stages=config.STAGES):
        _, cosine, sine, rotation = next_angles(rotation, row, run, tile, call, steps, EXACT, config)
        y1, y2, d1, d2 = load_gradients(row, run, tile, known, cosine, sine, EXACT, call, config)
        n, mask = block_rows(row, run, config.R)
        to = rows + n.to(tl.int64)[:, None] * (call.out_strides.n * spec.VEC)
        store_input(to, y1 * (d1 - c1), y2 * (d2 - c2), mask, call.out_strides.f, tile.first, spec, config.W)
