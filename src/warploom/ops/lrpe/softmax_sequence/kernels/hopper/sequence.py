"""LRPE with softmax over the sequence for Hopper, which reads ``x`` once. Written in Gluon.

A program copies a tile, ``TOKENS`` of a strip of ``W`` angles' columns of one (batch entry, head), into shared memory,
and looks at it twice there: down it to sum the columns, and up again to apply the softmax. The parts of a strip, one
program each, tell each other their sums in between. While some programs wait for others, those that share their
multiprocessor copy, sum or apply.

How sums are told is in `softmax_sequence.kernels.hopper.mailbox`.

Nobody waits for ever. All parts of a strip need not run at once: a program that has polled for long goes through the
parts' sums, works out those that are missing from device memory, as the programs that it waits for would, to the bit,
and tells them itself. After that it waits only for words of its own, and polls for others' no more than once each. It
is a way out and not a way to go: programs that come to it all work out the same, so launchers see to it that a
strip's parts fit the GPU. What such a program finds again at the end of that way, it keeps in no register meanwhile.

Shapes. Columns come in P members of F angles: P = 1 for ``cosine``, 2 for the pairs of ``rotate``. A member's tile lies
in shared memory as pieces of (PIECE, W), and registers hold (SUB, W) of it at a time. Columns are (1, W) of a member,
or (P, W). Statistics are those of `softmax_sequence.kernels.portable`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from warploom.device.activations import power_of_two
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, reinterpret
from warploom.ops.lrpe.kernels.angles import divide
from warploom.ops.lrpe.softmax_sequence.kernels.hopper.angles import (
    Grid,
    advanced,
    angles,
    exact_angles,
    frequencies,
    last_angles,
    reversed_angles,
    rows_cos_sin,
    synchronize,
    turned,
)
from warploom.ops.lrpe.softmax_sequence.kernels.hopper.mailbox import FOREVER, read_block, sum_of_parts, tell
from warploom.ops.lrpe.softmax_sequence.kernels.hopper.rows import (
    largest,
    load_column,
    load_rows,
    log_scale,
    logarithm,
    power,
    reciprocal,
    store_moment,
    sum_part,
)

LARGEST_LOGARITHM = gl.constexpr(100.0)  # of a sum
UNIT = gl.constexpr(8)  # strides travel divided by it: 16 bytes of 16-bit features


class Sizes(NamedTuple):
    """Of a call, and what `divide` takes for two of them."""

    parts_inverse: gl.int64
    heads_inverse: gl.int64
    tokens: gl.int32
    heads: gl.int32
    parts: gl.int32


class ThetaStrides(NamedTuple):
    """Of heads and of frequencies."""

    u: gl.int32
    f: gl.int32


class Strides(NamedTuple):
    """Of x or a result, over `UNIT`; features are adjacent."""

    b: gl.int32
    n: gl.int32
    h: gl.int32


class Spec(NamedTuple):
    """What the kernels are compiled for."""

    KIND: str
    AXES: int
    F: int
    E: int
    PREFIX: bool
    """Whether rows before the end of a prefix have to be kept from turning."""
    EXACT: bool
    """For a gradient of theta."""


class Tile(NamedTuple):
    """What a program does."""

    TOKENS: int
    PIECE: int
    """Tokens of a turn of its loops."""
    VEC: int
    """Adjacent features of a thread."""
    BLOCK: int
    """Parts whose sums are read at once."""
    BLOCKS: bool
    """Whether there are more parts than these."""
    PARTS_FIRST: bool
    """Whether neighbouring programs take parts of one strip, or strips of the same tokens."""


# ----------------------------------------------------------------------------------------------------------
# Sums told in the place of other parts
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def tell_part(
    words, tag, xs, grads, theta, first, position, grid, part, tokens, columns, scratch, table, steps,
    BACKWARD: gl.constexpr, spec: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tell what a part tells, worked out from device memory to the same bits. ``theta``: `frequencies`."""
    P: gl.constexpr = scratch.shape[0]
    W: gl.constexpr = xs[0][0].shape[4]
    TOKENS: gl.constexpr = xs[0][0].shape[0] * xs[0][0].shape[3]
    synchronize()
    if BACKWARD and spec.EXACT:
        turning = exact_angles(theta, position + part * TOKENS, grid, table, steps, SUB, LAYOUT)
    else:
        turning = angles(theta, first, position + part * TOKENS, grid, table, False, spec, SUB, LAYOUT)
    sums, _, _, _ = sum_part(
        xs, grads, part, tokens, columns, turning, steps, scratch, BACKWARD, False, spec, SUB, LAYOUT
    )
    tell(words + part * (P * W), tag, sums)


@gluon.jit
def tell_all(
    words, tag, xs, grads, theta, theta_f, first_f, position, grid, parts, tokens, columns, scratch, table, steps,
    BACKWARD: gl.constexpr, spec: gl.constexpr, tile: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tell in the place of all parts whatever they have not told, and of all blocks."""
    P: gl.constexpr = scratch.shape[0]
    W: gl.constexpr = xs[0][0].shape[4]
    for first in range(0, parts, tile.BLOCK):
        end = gl.minimum(first + tile.BLOCK, parts)
        known = read_block(words, first, end, tag, 1, tile.BLOCK, P, W)[1]
        if gl.min(gl.min(known.to(gl.int32), 1), 0) == 0:  # for all threads, from a reduction through shared memory
            for part in range(first, end):
                tell_part(
                    words, tag, xs, grads, frequencies(theta, theta_f, first_f, W, spec), first_f, position, grid,
                    part, tokens, columns, scratch, table, steps, BACKWARD, spec, SUB, LAYOUT,
                )  # fmt: skip
            synchronize()
        if tile.BLOCKS:
            sums, known = read_block(words, first, end, tag, FOREVER, tile.BLOCK, P, W)
            tell(words + (parts + first // tile.BLOCK) * (P * W), tag, sums, known)
    synchronize()


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_tile(desc, full, MEMBERS: gl.constexpr, PIECE: gl.constexpr, TOKENS: gl.constexpr, entry, head, row, first,
              F: gl.constexpr):  # fmt: skip
    """Start to copy the members' tiles, (pieces, 1, 1, PIECE, W) of shared memory each, which are returned."""
    BOX: gl.constexpr = desc.block_type.shape[2]
    W: gl.constexpr = desc.block_type.shape[3]
    PIECES: gl.constexpr = [TOKENS // PIECE, 1, 1, PIECE, W]
    boxes1 = gl.allocate_shared_memory(desc.dtype, [TOKENS // BOX, 1, 1, BOX, W], desc.layout)
    boxes2 = boxes1
    if MEMBERS == 2:
        boxes2 = gl.allocate_shared_memory(desc.dtype, [TOKENS // BOX, 1, 1, BOX, W], desc.layout)
    for box in gl.static_range(TOKENS // BOX):
        at = row + box * BOX
        tma.async_copy_global_to_shared(desc, [entry, head, at, first], full, boxes1.index(box))
        if MEMBERS == 2:
            tma.async_copy_global_to_shared(desc, [entry, head, at, F + first], full, boxes2.index(box))
    return reinterpret(boxes1, desc.dtype, PIECES, desc.layout), reinterpret(
        boxes2, desc.dtype, PIECES, desc.layout
    )


@gluon.jit
def run_part(
    x_desc, grad_desc, x, grad, out, statistics, words, theta, dtheta, offset, tag, patience, sizes, theta_strides,
    x_strides, grad_strides, out_strides, grid, BACKWARD: gl.constexpr, spec: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """One program: a part of a strip of one (batch entry, head). A strip's parts are neighbours."""
    AXES: gl.constexpr = spec.AXES
    F: gl.constexpr = spec.F
    EXACT: gl.constexpr = spec.EXACT
    TOKENS: gl.constexpr = tile.TOKENS
    PIECE: gl.constexpr = tile.PIECE
    VEC: gl.constexpr = tile.VEC
    BLOCK: gl.constexpr = tile.BLOCK
    tokens, heads, parts = sizes.tokens, sizes.heads, sizes.parts
    P: gl.constexpr = 1 if spec.KIND == "cosine" else 2
    OUT_P: gl.constexpr = P if BACKWARD else 2
    MEMBERS: gl.constexpr = P + 2 if BACKWARD else P
    BOX: gl.constexpr = x_desc.block_type.shape[2]
    W: gl.constexpr = x_desc.block_type.shape[3]
    STRIPS: gl.constexpr = F // W
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // W, W // VEC], [WARPS, 1], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SUB: gl.constexpr = WARPS * 32 * VEC // W
    dtype: gl.constexpr = x_desc.dtype
    program = gl.program_id(0)
    if tile.PARTS_FIRST:
        rest = divide(program, sizes.parts_inverse)
        part = program - rest * parts
        strip = rest % STRIPS
        unit = rest // STRIPS
    else:
        strip = program % STRIPS
        unit = divide(program // STRIPS, sizes.parts_inverse)
        part = program // STRIPS - unit * parts
    entry = divide(unit, sizes.heads_inverse)
    head = unit - entry * heads
    first = strip * W

    scratch = gl.allocate_shared_memory(gl.float32, [P, SUB, W], PLAIN)
    table = reinterpret(scratch, gl.float32, [P * SUB, 1, W], PLAIN)
    steps = table
    if BACKWARD and EXACT:
        steps = gl.allocate_shared_memory(gl.float32, [2 * (TOKENS // SUB), 1, W], PLAIN)
    columns = gl.allocate_shared_memory(gl.float32, [P, W], PLAIN)
    full = barriers(1).index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    row = part * TOKENS
    mbarrier.expect(full, MEMBERS * (TOKENS // BOX) * x_desc.block_type.nbytes)
    x1, x2 = copy_tile(x_desc, full, P, PIECE, TOKENS, entry, head, row, first, F)
    g1, g2 = x1, x2
    if BACKWARD:
        g1, g2 = copy_tile(grad_desc, full, 2, PIECE, TOKENS, entry, head, row, first, F)

    synchronize()  # or the assembler would put off some copies until the frequencies have come

    # While they come: what there is to know of the columns.
    f = first + gl.arange(0, W, COLUMN)[None, :]
    theta += head * theta_strides.u
    entry_long = entry.to(gl.int64)
    x_first = x + (entry_long * x_strides.b + head.to(gl.int64) * x_strides.h) * UNIT + first
    grad_first = grad + (entry_long * grad_strides.b + head.to(gl.int64) * grad_strides.h) * UNIT + first
    x_stride = x_strides.n.to(gl.int64) * UNIT
    grad_stride = grad_strides.n.to(gl.int64) * UNIT
    xs = ((x1, x_first, x_stride), (x2, x_first + F, x_stride))
    grads = ((g1, grad_first, grad_stride), (g2, grad_first + F, grad_stride))
    cells = statistics + unit.to(gl.int64) * (2 * P * F) + f
    if AXES == 1:
        offset -= grid.prefix  # of the token behind the prefix
    strip_theta = frequencies(theta, theta_strides.f, first, W, spec)
    token = x_first + gl.arange(0, W, COLUMN)[None, :]
    column1 = load_column(token, cells, BACKWARD, F, P)
    column2 = load_column(token + (P - 1) * F, cells + (P - 1) * F, BACKWARD, F, P)
    log1 = log_scale(column1, BACKWARD)
    log2 = log_scale(column2, BACKWARD)
    # Of the first rows backward, which sums as it goes down. A forward only goes up, to apply.
    start = row if BACKWARD else row + (TOKENS - SUB)
    if BACKWARD and EXACT:
        turning = exact_angles(strip_theta, offset + start, grid, table, steps, SUB, LAYOUT)
    else:
        turning = angles(strip_theta, first, offset + start, grid, table, not BACKWARD, spec, SUB, LAYOUT)

    mbarrier.wait(full, 0)
    total, moment1, moment2, turning = sum_part(
        xs, grads, part, tokens, (column1, column2) if EXACT else (log1, log2), turning, steps, scratch, BACKWARD, True,
        spec, SUB, LAYOUT,
    )  # fmt: skip
    if not BACKWARD and part == 0:
        gl.store(cells, column1[0])
        if P == 2:
            gl.store(cells + F, column2[0])
    if parts > 1:
        words += (unit * STRIPS + strip).to(gl.int64) * ((parts + (parts + BLOCK - 1) // BLOCK) * (P * W))
        tell(words + part * (P * W), tag, total)
    if BACKWARD and EXACT:  # while others tell
        to = dtheta + ((entry_long * parts + part) * heads + head) * F + first + gl.arange(0, W, COLUMN)
        store_moment(to, moment1, moment2, offset + row, SUB, LAYOUT)
    if parts > 1:
        told = sum_of_parts(words, tag, patience, part, parts, BLOCK, tile.BLOCKS, P, W)
        store_totals(columns, told, BACKWARD, EXACT)
    else:
        store_totals(columns, total, BACKWARD, EXACT)
    total1, total2 = load_totals(columns, BACKWARD, EXACT, LAYOUT)
    if not good_sums(total1, total2, BACKWARD):
        # A part has not told its sums in time, or they are too large, infinite or NaN.
        if parts > 1:
            tell_all(
                words, tag, xs, grads, theta, theta_strides.f, first, offset, grid, parts, tokens,
                (column1, column2) if EXACT else (log1, log2), scratch, table, steps, BACKWARD, spec, tile, SUB, LAYOUT,
            )  # fmt: skip
            told = sum_of_parts(words, tag, FOREVER, part, parts, BLOCK, tile.BLOCKS, P, W)
            store_totals(columns, told, BACKWARD, EXACT)
            total1, total2 = load_totals(columns, BACKWARD, EXACT, LAYOUT)
        high = False
        if not BACKWARD:
            high = not good_sums(total1, total2, BACKWARD)
            if high:
                # Once more, relative to the largest entries. All parts of the strip see the same sums, and each goes
                # down the whole strip in the same order.
                column1 = largest(xs, tokens, 0, SUB, LAYOUT), column1[1]
                column2 = largest(xs, tokens, P - 1, SUB, LAYOUT), column2[1]
                log1 = log_scale(column1, BACKWARD)
                log2 = log_scale(column2, BACKWARD)
                if part == 0:
                    gl.store(cells, column1[0])
                    if P == 2:
                        gl.store(cells + F, column2[0])
                total = gl.zeros_like(total)
                for other in range(parts):
                    sums, _, _, _ = sum_part(
                        xs, grads, other, tokens, (column1, column2) if EXACT else (log1, log2), turning, steps, scratch,
                        False, False, spec, SUB, LAYOUT,
                    )  # fmt: skip
                    total += sums
                store_totals(columns, total, BACKWARD, EXACT)
                total1, total2 = load_totals(columns, BACKWARD, EXACT, LAYOUT)
        # As they were, to the bit: no registers have held them meanwhile.
        if BACKWARD or not high:
            log1 = log_scale(load_column(token, cells, BACKWARD, F, P), BACKWARD)
            log2 = log_scale(load_column(token + (P - 1) * F, cells + (P - 1) * F, BACKWARD, F, P), BACKWARD)
        synchronize()
        strip_theta = frequencies(theta, theta_strides.f, first, W, spec)
        if BACKWARD and EXACT:
            turning = exact_angles(strip_theta, offset + start, grid, table, steps, SUB, LAYOUT)
        else:
            turning = angles(strip_theta, first, offset + start, grid, table, not BACKWARD, spec, SUB, LAYOUT)
            if BACKWARD and AXES == 1:
                for _ in range(TOKENS // SUB):
                    turning = advanced(turning, AXES)
    if not BACKWARD:
        log1 -= total1
        log2 -= total2
        if part == 0:
            if EXACT:
                scale1 = reciprocal(columns.slice(0, 1).load(LAYOUT))
                scale2 = reciprocal(columns.slice(P - 1, 1).load(LAYOUT))
            else:
                scale1 = power_of_two(total1 * -1.0)
                scale2 = power_of_two(total2 * -1.0)
            gl.store(cells + P * F, scale1)
            if P == 2:
                gl.store(cells + 3 * F, scale2)
    else:  # the angles are of the rows behind the part
        if EXACT:
            turning = last_angles(turning, steps, LAYOUT)
        else:
            turning = reversed_angles(turning, AXES)
        total1 *= -1.0
        total2 *= -1.0

    # Up again.
    n = row + (TOKENS - SUB) + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
    out_stride = out_strides.n.to(gl.int64) * UNIT
    to = out + (entry_long * out_strides.b + head.to(gl.int64) * out_strides.h) * UNIT + first
    to = to + (n.to(gl.int64) * out_stride)[:, None] + gl.arange(0, W, COLUMN)[None, :]
    for below in range(TOKENS // PIECE):
        piece = TOKENS // PIECE - 1 - below
        for s in gl.static_range(PIECE // SUB - 1, -1, -1):
            y1 = power(load_rows(xs[0], piece, s, 0, True, SUB, LAYOUT), log1)
            y2 = y1
            if P == 2:
                y2 = power(load_rows(xs[1], piece, s, 0, True, SUB, LAYOUT), log2)
            cosine, sine = rows_cos_sin(turning, row + piece * PIECE + s * SUB, spec, SUB, LAYOUT)
            if BACKWARD:
                d1 = load_rows(grads[0], piece, s, 0, True, SUB, LAYOUT)
                d2 = load_rows(grads[1], piece, s, 0, True, SUB, LAYOUT)
                # The gradients turned back, less the sums, without an instruction for the difference.
                o1 = y1 * gl.fma(d1, cosine, gl.fma(d2, sine, total1))
                o2 = y2 * gl.fma(d2, cosine, gl.fma(d1 * -1.0, sine, total2))
            elif P == 1:
                o1 = y1 * cosine
                o2 = y1 * sine
            else:
                o1, o2 = turned(y1, y2, cosine, sine)
            turning = advanced(turning, AXES)
            gl.store(to, o1.to(dtype), mask=(n < tokens)[:, None])
            if OUT_P == 2:
                gl.store(to + F, o2.to(dtype), mask=(n < tokens)[:, None])
            to -= out_stride * SUB
            n -= SUB
    mbarrier.invalidate(full)  # so that its memory is not used for anything else before


@gluon.jit
def store_totals(columns, total, BACKWARD: gl.constexpr, EXACT: gl.constexpr):
    """Keep a strip's sums (P, W) in ``columns`` of shared memory, or of a forward their logarithms, unless exact."""
    columns.store(total if BACKWARD or EXACT else logarithm(total))


@gluon.jit
def load_totals(columns, BACKWARD: gl.constexpr, EXACT: gl.constexpr, LAYOUT: gl.constexpr):
    """Both members' sums (1, W) that `store_totals` keeps; of a forward their logarithms."""
    P: gl.constexpr = columns.shape[0]
    synchronize()
    total1 = columns.slice(0, 1).load(LAYOUT)
    total2 = columns.slice(P - 1, 1).load(LAYOUT)
    if EXACT and not BACKWARD:
        total1 = logarithm(total1)
        total2 = logarithm(total2)
    return total1, total2


@gluon.jit
def good_sums(total1, total2, BACKWARD: gl.constexpr):
    """Whether a backward's sums (1, W) are numbers, or a forward's, of which these are logarithms, small enough."""
    if BACKWARD:
        good = (total1 == total1) & (total2 == total2)
    else:
        good = (total1 < LARGEST_LOGARITHM) & (total2 < LARGEST_LOGARITHM)
    return gl.min(gl.min(good.to(gl.int32), 1), 0) == 1


@gluon.jit
def hopper_sequence_forward_kernel(
    x_desc, x, out, statistics, words, theta, offset: gl.int32, tag: gl.int32, patience: gl.int32, sizes: Sizes,
    theta_strides: ThetaStrides, x_strides: Strides, out_strides: Strides, grid: Grid,
    spec: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """Output and statistics of a part of a strip."""
    run_part(
        x_desc, x_desc, x, x, out, statistics, words, theta, None, offset, tag, patience, sizes, theta_strides,
        x_strides, x_strides, out_strides, grid, False, spec, tile,
    )  # fmt: skip


@gluon.jit
def hopper_sequence_backward_kernel(
    x_desc, grad_desc, x, grad, out, statistics, words, theta, dtheta, offset: gl.int32, tag: gl.int32,
    patience: gl.int32, sizes: Sizes, theta_strides: ThetaStrides, x_strides: Strides, grad_strides: Strides,
    out_strides: Strides, grid: Grid, spec: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """Gradient of x of a part of a strip; ``out`` is that gradient. ``dtheta``: float64 (B, parts, H, F), if exact."""
    run_part(
        x_desc, grad_desc, x, grad, out, statistics, words, theta, dtheta, offset, tag, patience, sizes, theta_strides,
        x_strides, grad_strides, out_strides, grid, True, spec, tile,
    )  # fmt: skip
