"""Angles of a strip's rows, for softmax over the sequence on Hopper. Written in Gluon.

Registers hold rows (SUB, W) of a tile, and a program goes down and up it by ``SUB`` tokens. What it knows of its angles
meanwhile is a tuple, ``turning``. Where tokens stand in a row, ``AXES`` = 1, all rows are a constant angle on: cosines and
sines come from the two before them. Theta's gradient wants better ones, ``EXACT``: the angles of the first rows, turned by
those of so many steps, of which a program keeps a table. In a grid of two or three axes a step means another angle for
each axis, and at the end of a line yet another: there cosines and sines come from coordinates, anew for each row.

A prefix sits at the origin. In a grid, coordinates see to that; in a row, ``PREFIX``, rows before its end are no longer
turned.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.hopper.pipeline import reinterpret
from warploom.device.phase import (
    HALF_TURN_AND_HALF_A_BIT,
    TURN,
    TWO_POW_MINUS_32,
    cos_sin,
    fast_cos_sin,
    phase_step,
    wrapping_add,
    wrapping_mul,
)
from warploom.ops.lrpe.kernels.angles import divide

MOST_AXES = gl.constexpr(3)
TWO_POW_23 = gl.constexpr(0x4B000000)  # as a float32; an integer below it, added to its bits, is added to it
TWO_POW_55 = gl.constexpr(2.0**55)


class Grid(NamedTuple):
    """How tokens stand: a prefix, sizes of a grid's axes but the first, and what `divide` takes for these."""

    prefix: gl.int32
    size1: gl.int32
    size2: gl.int32
    inverse1: gl.int64
    inverse2: gl.int64


synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # one name for two versions of Triton


@gluon.jit
def turned(a, b, cosine, sine):
    """Pairs (a, b) turned by an angle."""
    return gl.fma(a, cosine, (b * sine) * -1.0), gl.fma(b, cosine, a * sine)


@gluon.jit
def turned_back(a, b, cosine, sine):
    """Pairs (a, b) turned by minus an angle."""
    return gl.fma(a, cosine, b * sine), gl.fma(b, cosine, (a * sine) * -1.0)


@gluon.jit
def frequencies(theta, theta_f, first, W: gl.constexpr, spec: gl.constexpr):
    """Those of a strip's columns (1, W), of a head's at ``theta``: each in one thread of a warp."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    f = first + gl.arange(0, W, gl.SliceLayout(0, LANES))[None, :]
    e = f % spec.E if spec.AXES > 1 else f
    return gl.load(theta + e * theta_f, mask=f < spec.AXES * spec.E, other=0.0)


@gluon.jit
def exact_angles(theta, position, grid, table, steps, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """The angles of ``SUB`` rows of one axis, from ``position`` on, as `exact_cos_sin` takes them.

    ``theta`` and ``table`` as in `angles`. ``steps`` (2 K, 1, W): cosines, then sines, of what so many steps turn by.
    """
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = steps.shape[0] // 2
    W: gl.constexpr = steps.shape[2]
    LANES: gl.constexpr = W if W < 32 else 32
    STEPS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    whole, rest, unit = phase_step(theta)
    table.index(0).store(whole.to(gl.float32, bitcast=True))
    table.index(1).store(rest)
    table.index(2).store(unit)
    synchronize()
    whole = table.index(0).load(STEPS).to(gl.int32, bitcast=True)
    step = gl.arange(0, K, gl.SliceLayout(1, STEPS)) * SUB
    cosine, sine = cos_sin(step[:, None], whole, table.index(1).load(STEPS), table.index(2).load(STEPS), False)
    matrices = reinterpret(steps, gl.float32, [2, K, W], steps.layout)
    matrices.index(0).store(cosine)
    matrices.index(1).store(sine)
    whole = table.index(0).load(LAYOUT).to(gl.int32, bitcast=True)
    n = position + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
    cosine, sine = cos_sin(n[:, None], whole, table.index(1).load(LAYOUT), table.index(2).load(LAYOUT), False)
    synchronize()
    return cosine, sine, grid.prefix


@gluon.jit
def exact_cos_sin(turning, steps, step, row, PREFIX: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """Cosines and sines (SUB, W) so many steps on, of the rows that begin with token ``row``: within 3e-7."""
    K: gl.constexpr = steps.shape[0] // 2
    cosine, sine = turned(
        turning[0], turning[1], steps.index(step).load(LAYOUT), steps.index(K + step).load(LAYOUT)
    )
    if PREFIX:
        cosine, sine = at_origin(cosine, sine, row, turning[2], SUB, LAYOUT)
    return cosine, sine


@gluon.jit
def last_angles(turning, steps, LAYOUT: gl.constexpr):
    """Of `exact_angles`, those of the last rows that ``steps`` lead to, as `rows_cos_sin` takes them to go back."""
    K: gl.constexpr = steps.shape[0] // 2
    cosine, sine = turned(
        turning[0], turning[1], steps.index(K - 1).load(LAYOUT), steps.index(2 * K - 1).load(LAYOUT)
    )
    step_cosine = steps.index(1).load(LAYOUT)
    behind, sine_behind = turned(cosine, sine, step_cosine, steps.index(K + 1).load(LAYOUT))
    return cosine, sine, behind, sine_behind, step_cosine * 2, turning[2]


@gluon.jit
def at_origin(cosine, sine, row, prefix, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """Cosines and sines of rows from token ``row`` on, those of the prefix replaced."""
    behind = (row + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) >= prefix)[:, None]
    return gl.where(behind, cosine, 1.0), gl.where(behind, sine, 0.0)


@gluon.jit
def angles(
    theta, first, position, grid, table, BACK: gl.constexpr, spec: gl.constexpr, SUB: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The angles of ``SUB`` rows as `rows_cos_sin` takes them, for columns from angle ``first`` on.

    ``theta`` are `frequencies`: what one thread makes of each, others read from shared memory, ``table``
    (4 or more, 1, W). For one axis, rows count from ``position``, and those before are ``SUB`` before, or with ``BACK``
    ``SUB`` after, for steps that go back.
    """
    whole, rest, unit = phase_step(theta)
    if spec.AXES == 1:
        kept = cos_sin(gl.full_like(whole, SUB), whole, rest, unit, False)
    else:
        surplus = wrapping_add(wrapping_mul(TWO_POW_23, whole), (rest * TWO_POW_55).to(gl.int32))
        start = gl.sub(HALF_TURN_AND_HALF_A_BIT, surplus, sanitize_overflow=False)
        kept = (start.to(gl.float32, bitcast=True),)
    table.index(0).store(whole.to(gl.float32, bitcast=True))
    table.index(1).store(gl.fma(unit, 0.0, rest))  # NaN where the unit is
    for i in gl.static_range(len(kept)):
        table.index(2 + i).store(kept[i])
    synchronize()
    whole = table.index(0).load(LAYOUT).to(gl.int32, bitcast=True)
    rest = table.index(1).load(LAYOUT)
    if spec.AXES == 1:
        step_cosine = table.index(2).load(LAYOUT)
        step_sine = table.index(3).load(LAYOUT)
        n = position + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
        cosine, sine = cos_sin(n[:, None], whole, rest, TWO_POW_MINUS_32, True)
        if BACK:
            before, sine_before = turned(cosine, sine, step_cosine, step_sine)
        else:
            before, sine_before = turned_back(cosine, sine, step_cosine, step_sine)
        turning = (cosine, sine, before, sine_before, step_cosine * 2, grid.prefix)
    else:
        W: gl.constexpr = table.shape[2]
        start = table.index(2).load(LAYOUT).to(gl.int32, bitcast=True)
        axis = (first + gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]) // spec.E
        turning = (whole, rest, start, axis, grid)
    return turning


@gluon.jit
def advanced(turning, AXES: gl.constexpr):
    """Angles one step on.

    cos(a + d) = 2 cos d · cos a − cos(a − d), in half of the instructions of a turn by d. Rounding errors grow with
    the square of the number of steps: 2e-5 after 32.
    """
    if AXES == 1:
        cosine, sine, before, sine_before, twice, prefix = turning
        turning = (
            gl.fma(twice, cosine, before * -1.0),
            gl.fma(twice, sine, sine_before * -1.0),
            cosine,
            sine,
            twice,
            prefix,
        )
    return turning


@gluon.jit
def reversed_angles(turning, AXES: gl.constexpr):
    """Angles of the rows before, whose steps go back."""
    if AXES == 1:
        cosine, sine, before, sine_before, twice, prefix = turning
        turning = (before, sine_before, cosine, sine, twice, prefix)
    return turning


@gluon.jit
def rows_cos_sin(turning, row, spec: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """Cosines and sines (SUB, W) of the rows that ``turning`` has come to; these begin with token ``row``.

    In a grid this is `cos_sin` for 16 bits in two thirds of the instructions. A coordinate c comes as the bits of the
    float32 2²³ + c, which serve as an integer and as a float; what that adds to a phase was taken from where it starts.
    """
    if spec.AXES == 1:
        cosine, sine = turning[0], turning[1]
        if spec.PREFIX:
            cosine, sine = at_origin(cosine, sine, row, turning[5], SUB, LAYOUT)
    else:
        whole, rest, start, axis, grid = turning
        phase = coordinates(row, axis, grid, spec.AXES, SUB, LAYOUT)
        turns = gl.inline_asm_elementwise(  # the upper 23 bits behind the exponent of one
            "shf.r.wrap.b32 $0, $1, 127, 9;",
            "=f,r",
            [wrapping_add(wrapping_mul(phase, whole), start)],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        turns = gl.fma(phase.to(gl.float32, bitcast=True), rest, turns)
        cosine, sine = fast_cos_sin(gl.fma(turns, TURN, -1.5 * TURN))
    return cosine, sine


@gluon.jit
def coordinates(row, axis, grid, AXES: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """Coordinates of tokens from ``row`` on along the columns' axes (1, W), as the bits of 2²³ + c: int32 (SUB, W).

    Row-major; the prefix sits at the origin.
    """
    i = gl.maximum(row + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) - grid.prefix, 0)
    last = i
    if AXES == 3:
        i = divide(i, grid.inverse2)
        last = last - i * grid.size2
    c0 = divide(i, grid.inverse1)
    c1 = i - c0 * grid.size1
    position = gl.where(axis == 0, (c0 + TWO_POW_23)[:, None], (c1 + TWO_POW_23)[:, None])
    if AXES == 3:
        position = gl.where(axis == 2, (last + TWO_POW_23)[:, None], position)
    return position
