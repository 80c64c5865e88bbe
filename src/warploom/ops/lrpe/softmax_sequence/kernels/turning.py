"""Angles of a tile's blocks, for softmax over the sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.phase import cos_sin
from warploom.ops.lrpe.kernels.angles import token_positions
from warploom.ops.lrpe.kernels.forward import turn
from warploom.ops.lrpe.softmax_sequence.kernels.tiles import block_rows


@triton.jit
def block_angles(row, run, tile, call, steps, EXACT: tl.constexpr, variant: tl.constexpr):
    """Positions (R, 1 or W) of a block's tokens, and their angles' cosines and sines (R, W)."""
    n, mask = block_rows(row, run, variant.R)
    axis = (tile.first + tl.arange(0, variant.W)) // variant.spec.E
    place = n if call.angles.ids is not None else n - run.group_start
    position = token_positions(place, mask, tile.b, tl.zeros_like(n) + tile.h, axis, call.angles, variant.spec.AXES)
    whole, rest, unit = steps
    cosine, sine = cos_sin(position, whole, rest, unit, not EXACT)
    return position, cosine, sine


@triton.jit
def first_angles(run, tile, call, steps, EXACT: tl.constexpr, variant: tl.constexpr):
    """What `next_angles` takes for a run's first block.

    With ``STEPPED``: its cosines and sines, and those of the angles by which all rows turn from one block to the next.
    """
    if variant.STEPPED:
        _, cosine, sine = block_angles(run.start, run, tile, call, steps, EXACT, variant)
        whole, rest, unit = steps
        step_cosine, step_sine = cos_sin(tl.full((1, 1), variant.R, tl.int32), whole, rest, unit, not EXACT)
        turning = (cosine, sine, step_cosine, step_sine)
    else:
        turning = (run.start,)
    return turning


@triton.jit
def next_angles(turning, row, run, tile, call, steps, EXACT: tl.constexpr, variant: tl.constexpr):
    """A block's positions, unless ``STEPPED``, its cosines and sines (R, W), and what the next block takes.

    To turn on takes half the instructions of a new angle, and none of the special function unit. Rounding errors grow
    with the number of steps: 1e-4 after 128.
    """
    position = 0
    if variant.STEPPED:
        cosine, sine, step_cosine, step_sine = turning
        next_cosine, next_sine = turn(cosine, sine, step_cosine, step_sine, "rotate")
        turning = (next_cosine, next_sine, step_cosine, step_sine)
    else:
        position, cosine, sine = block_angles(row, run, tile, call, steps, EXACT, variant)
    return position, cosine, sine, turning
