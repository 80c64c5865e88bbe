"""Rows of a tile of LRPE with softmax over the sequence on Hopper: their weights, and sums of columns. Written in Gluon.

A tile of a member of the pairs lies in shared memory as pieces (PIECE, W); registers hold (SUB, W) of it at a time.

``EXACT`` is for theta's gradient, which is in float32: a forward's sums, which it rests on, and a backward's weights and
angles on the way down, where that gradient is summed. What becomes 16 bits is worked out as without it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.activations import LOG2_E, power_of_two
from warploom.device.hopper.pipeline import matrix, reinterpret
from warploom.ops.lrpe.softmax_sequence.kernels.hopper.angles import (
    advanced,
    exact_cos_sin,
    rows_cos_sin,
    synchronize,
    turned_back,
)

LN_2 = gl.constexpr(0.6931471805599453)
NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)

# ----------------------------------------------------------------------------------------------------------
# Rows of a tile, and their powers
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def widened(rows):
    """16-bit rows in float32. Of bfloat16, a shift or a mask each; the compiler would move every second one first."""
    if rows.dtype == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [rows],
            dtype=gl.int32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(gl.float32, bitcast=True)
    else:
        wide = rows.to(gl.float32)
    return wide


@gluon.jit
def load_rows(source, piece, s: gl.constexpr, left, SHARED: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows s · SUB … of a piece of a member's tile as float32 (SUB, W), from shared memory or from device memory.

    ``source``: the tile's pieces, the address of this one in device memory, and how far its rows lie apart; there it
    has ``left`` tokens, and zeros after them.
    """
    pieces, address, stride = source
    W: gl.constexpr = pieces.shape[4]
    if SHARED:
        rows = matrix(pieces, piece).slice(s * SUB, SUB).load(LAYOUT)
    else:
        n = s * SUB + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
        f = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))
        cells = address + n.to(gl.int64)[:, None] * stride + f[None, :]
        rows = gl.load(cells, mask=(n < left)[:, None], other=0.0)
    return widened(rows)


@gluon.jit
def moved(sources, rows):
    """Both members' sources, so many rows further on in device memory."""
    pieces1, address1, stride = sources[0]
    pieces2, address2, _ = sources[1]
    return (pieces1, address1 + stride * rows, stride), (pieces2, address2 + stride * rows, stride)


@gluon.jit
def logarithm(x):
    """log₂x, at most 2⁻²² of itself off, or of one for x near one."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """1 / x, rounded once."""
    return gl.inline_asm_elementwise("rcp.rn.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_column(token, cells, BACKWARD: gl.constexpr, F: gl.constexpr, P: gl.constexpr):
    """A member's shifts and scales (1, W).

    A forward's shift is the column's first token at ``token`` (see `softmax_sequence.kernels.portable.column_statistics`), and it
    scales by no sum yet; a backward finds both among the statistics at ``cells``.
    """
    if BACKWARD:
        shift = gl.load(cells)
        scale = gl.load(cells + P * F)
    else:
        shift = gl.load(token).to(gl.float32)
        scale = gl.full_like(shift, 1.0)
    return shift, scale


@gluon.jit
def log_scale(column, BACKWARD: gl.constexpr):
    """What `power` takes for a member's columns, from their shifts and scales."""
    if BACKWARD:
        log = gl.fma(column[0], -LOG2_E, logarithm(column[1]))
    else:
        log = column[0] * -LOG2_E
    return log


@gluon.jit
def power(x, log_scale):
    """eˣ times 2 to the power of ``log_scale`` (1, W), with one rounding of the exponent for each entry.

    What rounding ``log_scale`` costs is common to a column, and the softmax divides it out.
    """
    return power_of_two(gl.fma(x, LOG2_E, log_scale))


@gluon.jit
def exact_power(x, column):
    """Powers e^(x − shift), times a scale (1, W each), to about 3 units in the last place.

    What rounding the exponent has cost is found again, and multiplied in. Far below the shift, where the result is
    zero, that would be infinite.
    """
    shift, scale = column
    x = gl.maximum(x - shift, -200.0, propagate_nan=NAN_STAYS)
    exponent = x * LOG2_E
    y = power_of_two(exponent) * scale
    return gl.fma(y, gl.fma(exponent, -LN_2, x), y)


@gluon.jit
def weights(x, column, EXACT: gl.constexpr):
    """A member's weights (SUB, W). ``column``: (1, W), what `power` takes, or `exact_power`."""
    if EXACT:
        y = exact_power(x, column)
    else:
        y = power(x, column)
    return y


# ----------------------------------------------------------------------------------------------------------
# Sums of columns
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def sum_piece(
    sums, turning, steps, xs, grads, piece, step, tokens, left, columns, MASKED: gl.constexpr,
    BACKWARD: gl.constexpr, P: gl.constexpr, SHARED: gl.constexpr, ROWS: gl.constexpr, spec: gl.constexpr,
    SUB: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the rows of a piece, from step ``step`` of the tile on, to `sum_part`'s sums.

    ``turning``: `angles` of the first ``SUB`` rows. Returned with the sums, of the rows behind the last. With ``EXACT``
    it is `exact_angles` of the tile's first rows, before and after.
    """
    total1, total2, moment1, moment2 = sums
    for s in gl.static_range(ROWS // SUB):
        y1 = weights(load_rows(xs[0], piece, s, left, SHARED, SUB, LAYOUT), columns[0], spec.EXACT)
        y2 = y1
        if P == 2:
            y2 = weights(load_rows(xs[1], piece, s, left, SHARED, SUB, LAYOUT), columns[1], spec.EXACT)
        if MASKED:
            inside = (s * SUB + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) < left)[:, None]
            y1 = gl.where(inside, y1, 0.0)
            y2 = gl.where(inside, y2, 0.0)
        if BACKWARD:
            g1 = load_rows(grads[0], piece, s, left, SHARED, SUB, LAYOUT)
            g2 = load_rows(grads[1], piece, s, left, SHARED, SUB, LAYOUT)
            row = tokens - left + s * SUB
            if spec.EXACT:
                cosine, sine = exact_cos_sin(turning, steps, step + s, row, spec.PREFIX, SUB, LAYOUT)
            else:
                cosine, sine = rows_cos_sin(turning, row, spec, SUB, LAYOUT)
                turning = advanced(turning, spec.AXES)
            d1, d2 = turned_back(g1, g2, cosine, sine)
            total1 = gl.fma(y1, d1, total1)
            if P == 2:
                total2 = gl.fma(y2, d2, total2)
            if spec.EXACT:  # the gradient of the angle, and that times the step
                gradient = y1 * d2
                if P == 2:
                    gradient = gl.fma(y2 * -1.0, d1, gradient)
                if spec.PREFIX:
                    behind = row + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) >= turning[2]
                    gradient = gl.where(behind[:, None], gradient, 0.0)
                moment1 += gradient
                moment2 += gradient * (step + s).to(gl.float32)
        else:
            total1 += y1
            if P == 2:
                total2 += y2
    return (total1, total2, moment1, moment2), turning


@gluon.jit
def sum_part(
    xs, grads, part, tokens, columns, turning, steps, scratch, BACKWARD: gl.constexpr, SHARED: gl.constexpr,
    spec: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Sums of columns over a part, from shared memory or from device memory, to the same bits; see `sum_piece`.

    Of weights, or in a backward of their products with their gradients: (P, W). With ``EXACT`` there also (SUB, W) of
    the angles' gradients, and of these times their step. ``scratch``: (P, SUB, W) of shared memory.
    """
    P: gl.constexpr = scratch.shape[0]
    PIECES: gl.constexpr = xs[0][0].shape[0]
    ROWS: gl.constexpr = xs[0][0].shape[3]
    W: gl.constexpr = xs[0][0].shape[4]
    zeros = gl.zeros([SUB, W], gl.float32, LAYOUT)
    sums = (zeros, zeros, zeros, zeros)
    start = part * (PIECES * ROWS)
    if SHARED:
        full = gl.minimum((tokens - start) // ROWS, PIECES)
        for masked in gl.static_range(2):
            for piece in range(full if masked else 0, PIECES if masked else full):
                sums, turning = sum_piece(
                    sums, turning, steps, xs, grads, piece, piece * (ROWS // SUB), tokens, tokens - start - piece * ROWS,
                    columns, masked, BACKWARD, P, True, ROWS, spec, SUB, LAYOUT,
                )  # fmt: skip
    else:  # the same sums by fewer registers
        for row in range(start, start + PIECES * ROWS, SUB):
            sums, turning = sum_piece(
                sums, turning, steps, moved(xs, row), moved(grads, row), 0, (row - start) // SUB, tokens, tokens - row,
                columns, True, BACKWARD, P, False, SUB, spec, SUB, LAYOUT,
            )  # fmt: skip
    # Added up by way of shared memory: most of it within a thread, where butterflies would move all columns twice.
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 * WARPS // (P * W)  # threads of a column
    READ: gl.constexpr = gl.BlockedLayout(
        [1, SUB // LANES, 1], [1, LANES, 32 // LANES], [P, 1, WARPS // P], [2, 1, 0]
    )
    synchronize()
    scratch.index(0).store(sums[0])
    if P == 2:
        scratch.index(1).store(sums[1])
    synchronize()
    rows = reinterpret(scratch, gl.float32, [P, SUB, W], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).load(READ)
    return gl.sum(rows, 1), sums[2], sums[3], turning


@gluon.jit
def store_moment(to, moment1, moment2, position, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """A part's share of theta's gradient, float64 at ``to`` (W,), from `sum_part`'s sums of angles' gradients.

    Rows count from ``position`` on; a step is ``SUB`` of them.
    """
    n = position + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
    share = n.to(gl.float64)[:, None] * moment1.to(gl.float64) + moment2.to(gl.float64) * SUB
    gl.store(to, gl.sum(share, 0))


@gluon.jit
def largest(xs, tokens, member: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """A member's largest entries (1, W) from device memory. −inf where there is nothing else, made zero."""
    W: gl.constexpr = xs[0][0].shape[4]
    top = gl.full([SUB, W], float("-inf"), gl.float32, LAYOUT)
    for row in range(0, tokens, SUB):
        left = tokens - row
        inside = (gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) < left)[:, None]
        x = load_rows(moved(xs, row)[member], 0, 0, left, False, SUB, LAYOUT)
        top = gl.where(inside, gl.maximum(top, x), top)
    top = gl.max(top, 0)[None, :]
    return gl.where(top == float("-inf"), 0.0, top)
