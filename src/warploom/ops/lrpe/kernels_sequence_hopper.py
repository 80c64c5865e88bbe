"""LRPE with softmax over the sequence for Hopper, which reads ``x`` once. Written in Gluon.

A program copies a tile, ``TOKENS`` of a strip of ``W`` angles' columns of one (batch entry, head), into shared memory,
and looks at it twice there: down it to sum the columns, and up again to apply the softmax. The parts of a strip, one
program each, tell each other their sums in between. While some programs wait for others, those that share their
multiprocessor copy, sum or apply.

How sums are told is in `kernels_sequence_words`.

Nobody waits for ever. All parts of a strip need not run at once: a program that has polled for long goes through the
parts' sums, works out those that are missing from device memory, as the programs that it waits for would, to the bit,
and tells them itself. After that it waits only for words of its own, and polls for others' no more than once each. It
is a way out and not a way to go: programs that come to it all work out the same, so launchers see to it that a
strip's parts fit the GPU. What such a program finds again at the end of that way, it keeps in no register meanwhile.

Shapes. Columns come in P members of F angles: P = 1 for ``cosine``, 2 for the pairs of ``rotate``. A member's tile lies
in shared memory as pieces of (PIECE, W), and registers hold (SUB, W) of it at a time. Columns are (1, W) of a member,
or (P, W). Statistics are those of `kernels_sequence`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import int64  # parameters' types go by this name
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from warploom.device.activations import LOG2_E, power_of_two
from warploom.device.hopper import barriers, matrix
from warploom.ops.lrpe.kernels import divide
from warploom.ops.lrpe.kernels_sequence_angles import (
    advanced,
    angles,
    frequencies,
    reversed_angles,
    rows_cos_sin,
    synchronize,
    turned,
    turned_back,
)
from warploom.ops.lrpe.kernels_sequence_words import FOREVER, read_block, sum_of_parts, tell

LARGEST_LOGARITHM = gl.constexpr(100.0)  # of a sum
UNIT = gl.constexpr(8)  # strides travel divided by it: 16 bytes of 16-bit features


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
def log_scales(token, cells, BACKWARD: gl.constexpr, F: gl.constexpr, P: gl.constexpr):
    """What `power` takes for the members' columns, (1, W) each, and their shifts.

    A forward's shift is the column's first token at ``token`` (see `kernels_sequence.column_statistics`), and it
    scales by no sum yet; a backward finds both among the statistics at ``cells``.
    """
    if BACKWARD:
        shift1 = gl.load(cells)
        shift2 = gl.load(cells + (P - 1) * F)
        log1 = gl.fma(shift1, -LOG2_E, logarithm(gl.load(cells + P * F)))
        log2 = gl.fma(shift2, -LOG2_E, logarithm(gl.load(cells + (2 * P - 1) * F)))
    else:
        shift1 = gl.load(token).to(gl.float32)
        shift2 = gl.load(token + (P - 1) * F).to(gl.float32)
        log1 = shift1 * -LOG2_E
        log2 = shift2 * -LOG2_E
    return log1, log2, shift1, shift2


@gluon.jit
def power(x, log_scale):
    """eˣ times 2 to the power of ``log_scale`` (1, W), with one rounding of the exponent for each entry.

    What rounding ``log_scale`` costs is common to a column, and the softmax divides it out.
    """
    return power_of_two(gl.fma(x, LOG2_E, log_scale))


# ----------------------------------------------------------------------------------------------------------
# Sums of columns
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def sum_piece(total1, total2, turning, xs, grads, piece, tokens, left, log1, log2, MASKED: gl.constexpr,
              BACKWARD: gl.constexpr, P: gl.constexpr, SHARED: gl.constexpr, ROWS: gl.constexpr, AXES: gl.constexpr,
              SUB: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Add the rows of a piece to sums (SUB, W): weights, and in a backward their products with their gradients.

    ``turning``: `angles` of the first ``SUB`` rows. Returned with the sums, of the rows behind the last.
    """
    for s in gl.static_range(ROWS // SUB):
        y1 = power(load_rows(xs[0], piece, s, left, SHARED, SUB, LAYOUT), log1)
        y2 = y1
        if P == 2:
            y2 = power(load_rows(xs[1], piece, s, left, SHARED, SUB, LAYOUT), log2)
        if MASKED:
            inside = (s * SUB + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) < left)[:, None]
            y1 = gl.where(inside, y1, 0.0)
            y2 = gl.where(inside, y2, 0.0)
        if BACKWARD:
            g1 = load_rows(grads[0], piece, s, left, SHARED, SUB, LAYOUT)
            g2 = load_rows(grads[1], piece, s, left, SHARED, SUB, LAYOUT)
            cosine, sine = rows_cos_sin(turning, tokens - left + s * SUB, AXES, SUB, LAYOUT)
            d1, d2 = turned_back(g1, g2, cosine, sine)
            total1 = gl.fma(y1, d1, total1)
            if P == 2:
                total2 = gl.fma(y2, d2, total2)
            turning = advanced(turning, AXES)
        else:
            total1 += y1
            if P == 2:
                total2 += y2
    return total1, total2, turning


@gluon.jit
def sum_part(xs, grads, part, tokens, log1, log2, turning, scratch, BACKWARD: gl.constexpr, SHARED: gl.constexpr,
             AXES: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Columns' sums (P, W) over a part, from shared memory or from device memory, to the same bits; see `sum_piece`.

    ``scratch``: (P, SUB, W) of shared memory.
    """
    P: gl.constexpr = scratch.shape[0]
    PIECES: gl.constexpr = xs[0][0].shape[0]
    ROWS: gl.constexpr = xs[0][0].shape[3]
    W: gl.constexpr = xs[0][0].shape[4]
    total1 = gl.zeros([SUB, W], gl.float32, LAYOUT)
    total2 = gl.zeros([SUB, W], gl.float32, LAYOUT)
    start = part * (PIECES * ROWS)
    if SHARED:
        full = gl.minimum((tokens - start) // ROWS, PIECES)
        for masked in gl.static_range(2):
            for piece in range(full if masked else 0, PIECES if masked else full):
                total1, total2, turning = sum_piece(
                    total1, total2, turning, xs, grads, piece, tokens, tokens - start - piece * ROWS, log1, log2,
                    masked, BACKWARD, P, True, ROWS, AXES, SUB, LAYOUT,
                )  # fmt: skip
    else:  # the same sums by fewer registers
        for row in range(start, start + PIECES * ROWS, SUB):
            total1, total2, turning = sum_piece(
                total1, total2, turning, moved(xs, row), moved(grads, row), 0, tokens, tokens - row, log1, log2,
                True, BACKWARD, P, False, SUB, AXES, SUB, LAYOUT,
            )  # fmt: skip
    # Added up by way of shared memory: most of it within a thread, where butterflies would move all columns twice.
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 * WARPS // (P * W)  # threads of a column
    READ: gl.constexpr = gl.BlockedLayout(
        [1, SUB // LANES, 1], [1, LANES, 32 // LANES], [P, 1, WARPS // P], [2, 1, 0]
    )
    synchronize()
    scratch.index(0).store(total1)
    if P == 2:
        scratch.index(1).store(total2)
    synchronize()
    rows = scratch._reinterpret(gl.float32, [P, SUB, W], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).load(READ)
    return gl.sum(rows, 1), turning


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


# ----------------------------------------------------------------------------------------------------------
# Sums told in the place of other parts
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def tell_part(words, tag, xs, grads, theta, column, position, grid, part, tokens, log1, log2, scratch, table,
              BACKWARD: gl.constexpr, AXES: gl.constexpr, E: gl.constexpr, SUB: gl.constexpr,
              LAYOUT: gl.constexpr):  # fmt: skip
    """Tell what a part tells, worked out from device memory to the same bits. ``theta``: `frequencies`."""
    P: gl.constexpr = scratch.shape[0]
    W: gl.constexpr = xs[0][0].shape[4]
    TOKENS: gl.constexpr = xs[0][0].shape[0] * xs[0][0].shape[3]
    synchronize()
    turning = angles(theta, column, position + part * TOKENS, grid, table, False, AXES, E, SUB, LAYOUT)
    sums, _ = sum_part(
        xs, grads, part, tokens, log1, log2, turning, scratch, BACKWARD, False, AXES, SUB, LAYOUT
    )  # fmt: skip
    tell(words + part * (P * W), tag, sums)


@gluon.jit
def tell_all(words, tag, xs, grads, theta, theta_f, column, position, grid, parts, tokens, log1, log2, scratch,
             table, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, BACKWARD: gl.constexpr, AXES: gl.constexpr,
             E: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Tell in the place of all parts whatever they have not told, and of all blocks."""
    P: gl.constexpr = scratch.shape[0]
    W: gl.constexpr = xs[0][0].shape[4]
    for first in range(0, parts, BLOCK):
        end = gl.minimum(first + BLOCK, parts)
        known = read_block(words, first, end, tag, 1, BLOCK, P, W)[1]
        if gl.min(gl.min(known.to(gl.int32), 1), 0) == 0:  # for all threads, from a reduction through shared memory
            for part in range(first, end):
                tell_part(
                    words, tag, xs, grads, frequencies(theta, theta_f, column, W, AXES, E), column, position, grid,
                    part, tokens, log1, log2, scratch, table, BACKWARD, AXES, E, SUB, LAYOUT,
                )  # fmt: skip
            synchronize()
        if BLOCKS:
            sums, known = read_block(words, first, end, tag, FOREVER, BLOCK, P, W)
            tell(words + (parts + first // BLOCK) * (P * W), tag, sums, known)
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
    return boxes1._reinterpret(desc.dtype, PIECES, desc.layout), boxes2._reinterpret(
        desc.dtype, PIECES, desc.layout
    )


@gluon.jit
def run_part(
    x_desc, grad_desc, x, grad, out, statistics, words, theta, parts_inverse, heads_inverse, offset, tag,
    patience, tokens, heads, parts,
    theta_u, theta_f, x_b, x_n, x_h, grad_b, grad_n, grad_h, out_b, out_n, out_h, grid,
    KIND: gl.constexpr, BACKWARD: gl.constexpr, AXES: gl.constexpr, F: gl.constexpr, E: gl.constexpr, TOKENS: gl.constexpr,
    PIECE: gl.constexpr, VEC: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, PARTS_FIRST: gl.constexpr,
):  # fmt: skip
    """One program: a part of a strip of one (batch entry, head). A strip's parts are neighbours."""
    P: gl.constexpr = 1 if KIND == "cosine" else 2
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
    if PARTS_FIRST:
        rest = divide(program, parts_inverse)
        part = program - rest * parts
        strip = rest % STRIPS
        unit = rest // STRIPS
    else:
        strip = program % STRIPS
        unit = divide(program // STRIPS, parts_inverse)
        part = program // STRIPS - unit * parts
    entry = divide(unit, heads_inverse)
    head = unit - entry * heads
    first = strip * W

    scratch = gl.allocate_shared_memory(gl.float32, [P, SUB, W], PLAIN)
    table = scratch._reinterpret(gl.float32, [P * SUB, 1, W], PLAIN)
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
    theta += head * theta_u
    entry_long = entry.to(gl.int64)
    x_first = x + (entry_long * x_b + head.to(gl.int64) * x_h) * UNIT + first
    grad_first = grad + (entry_long * grad_b + head.to(gl.int64) * grad_h) * UNIT + first
    x_stride = x_n.to(gl.int64) * UNIT
    grad_stride = grad_n.to(gl.int64) * UNIT
    xs = ((x1, x_first, x_stride), (x2, x_first + F, x_stride))
    grads = ((g1, grad_first, grad_stride), (g2, grad_first + F, grad_stride))
    cells = statistics + unit.to(gl.int64) * (2 * P * F) + f
    strip_theta = frequencies(theta, theta_f, first, W, AXES, E)
    log1, log2, shift1, shift2 = log_scales(x_first + gl.arange(0, W, COLUMN)[None, :], cells, BACKWARD, F, P)
    # Of the first rows backward, which sums as it goes down. A forward only goes up, to apply.
    start = row if BACKWARD else row + (TOKENS - SUB)
    turning = angles(strip_theta, first, offset + start, grid, table, not BACKWARD, AXES, E, SUB, LAYOUT)

    mbarrier.wait(full, 0)
    total, turning = sum_part(
        xs, grads, part, tokens, log1, log2, turning, scratch, BACKWARD, True, AXES, SUB, LAYOUT
    )  # fmt: skip
    if not BACKWARD and part == 0:
        gl.store(cells, shift1)
        if P == 2:
            gl.store(cells + F, shift2)
    if parts > 1:
        words += (unit * STRIPS + strip).to(gl.int64) * ((parts + (parts + BLOCK - 1) // BLOCK) * (P * W))
        tell(words + part * (P * W), tag, total)
        told = sum_of_parts(words, tag, patience, part, parts, BLOCK, BLOCKS, P, W)
        columns.store(told if BACKWARD else logarithm(told))
    else:
        columns.store(total if BACKWARD else logarithm(total))
    synchronize()
    total1 = columns.slice(0, 1).load(LAYOUT)
    total2 = columns.slice(P - 1, 1).load(LAYOUT)
    if not good_sums(total1, total2, BACKWARD):
        # A part has not told its sums in time, or they are too large, infinite or NaN.
        if parts > 1:
            tell_all(
                words, tag, xs, grads, theta, theta_f, first, offset, grid, parts, tokens, log1, log2, scratch,
                table, BLOCK, BLOCKS, BACKWARD, AXES, E, SUB, LAYOUT,
            )  # fmt: skip
            told = sum_of_parts(words, tag, FOREVER, part, parts, BLOCK, BLOCKS, P, W)
            columns.store(told if BACKWARD else logarithm(told))
            synchronize()
            total1 = columns.slice(0, 1).load(LAYOUT)
            total2 = columns.slice(P - 1, 1).load(LAYOUT)
        high = False
        if not BACKWARD:
            high = not good_sums(total1, total2, BACKWARD)
            if high:
                # Once more, relative to the largest entries. All parts of the strip see the same sums, and each goes
                # down the whole strip in the same order.
                shift1 = largest(xs, tokens, 0, SUB, LAYOUT)
                shift2 = largest(xs, tokens, P - 1, SUB, LAYOUT)
                log1 = shift1 * -LOG2_E
                log2 = shift2 * -LOG2_E
                if part == 0:
                    gl.store(cells, shift1)
                    if P == 2:
                        gl.store(cells + F, shift2)
                total = gl.zeros_like(total)
                for other in range(parts):
                    sums, _ = sum_part(
                        xs, grads, other, tokens, log1, log2, turning, scratch, False, False, AXES, SUB, LAYOUT
                    )  # fmt: skip
                    total += sums
                columns.store(logarithm(total))
                synchronize()
                total1 = columns.slice(0, 1).load(LAYOUT)
                total2 = columns.slice(P - 1, 1).load(LAYOUT)
        # As they were, to the bit: no registers have held them meanwhile.
        if BACKWARD or not high:
            log1, log2, _, _ = log_scales(x_first + gl.arange(0, W, COLUMN)[None, :], cells, BACKWARD, F, P)
        synchronize()
        strip_theta = frequencies(theta, theta_f, first, W, AXES, E)
        turning = angles(strip_theta, first, offset + start, grid, table, not BACKWARD, AXES, E, SUB, LAYOUT)
        if BACKWARD and AXES == 1:
            for _ in range(TOKENS // SUB):
                turning = advanced(turning, AXES)
    if not BACKWARD:
        log1 -= total1
        log2 -= total2
        if part == 0:
            gl.store(cells + P * F, power_of_two(total1 * -1.0))
            if P == 2:
                gl.store(cells + 3 * F, power_of_two(total2 * -1.0))
    else:  # the angles are of the rows behind the part
        turning = reversed_angles(turning, AXES)
        total1 *= -1.0
        total2 *= -1.0

    # Up again.
    n = row + (TOKENS - SUB) + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
    out_stride = out_n.to(gl.int64) * UNIT
    to = out + (entry_long * out_b + head.to(gl.int64) * out_h) * UNIT + first
    to = to + (n.to(gl.int64) * out_stride)[:, None] + gl.arange(0, W, COLUMN)[None, :]
    for below in range(TOKENS // PIECE):
        piece = TOKENS // PIECE - 1 - below
        for s in gl.static_range(PIECE // SUB - 1, -1, -1):
            y1 = power(load_rows(xs[0], piece, s, 0, True, SUB, LAYOUT), log1)
            y2 = y1
            if P == 2:
                y2 = power(load_rows(xs[1], piece, s, 0, True, SUB, LAYOUT), log2)
            cosine, sine = rows_cos_sin(turning, row + piece * PIECE + s * SUB, AXES, SUB, LAYOUT)
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
def good_sums(total1, total2, BACKWARD: gl.constexpr):
    """Whether a backward's sums (1, W) are numbers, or a forward's, of which these are logarithms, small enough."""
    if BACKWARD:
        good = (total1 == total1) & (total2 == total2)
    else:
        good = (total1 < LARGEST_LOGARITHM) & (total2 < LARGEST_LOGARITHM)
    return gl.min(gl.min(good.to(gl.int32), 1), 0) == 1


NUMBERS = (
    "parts_inverse heads_inverse offset tag patience tokens heads parts theta_u theta_f "
    "x_b x_n x_h grad_b grad_n grad_h out_b out_n out_h prefix size1 size2 inverse1 inverse2"
).split()


@gluon.jit(do_not_specialize=[n for n in NUMBERS if not n.startswith("grad")])
def hopper_sequence_forward_kernel(
    x_desc, x, out, statistics, words, theta,
    offset: gl.int32, tag: gl.int32, patience: gl.int32, parts_inverse: int64, heads_inverse: int64,
    tokens: gl.int32, heads: gl.int32, parts: gl.int32,
    theta_u: gl.int32, theta_f: gl.int32, x_b: gl.int32, x_n: gl.int32, x_h: gl.int32,
    out_b: gl.int32, out_n: gl.int32, out_h: gl.int32,
    prefix: gl.int32, size1: gl.int32, size2: gl.int32, inverse1: int64, inverse2: int64,
    KIND: gl.constexpr, AXES: gl.constexpr, F: gl.constexpr, E: gl.constexpr, TOKENS: gl.constexpr, PIECE: gl.constexpr,
    VEC: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, PARTS_FIRST: gl.constexpr,
):  # fmt: skip
    """Output and statistics of a part of a strip."""
    run_part(
        x_desc, x_desc, x, x, out, statistics, words, theta, parts_inverse, heads_inverse, offset, tag,
        patience, tokens, heads, parts,
        theta_u, theta_f, x_b, x_n, x_h, x_b, x_n, x_h, out_b, out_n, out_h,
        (prefix, size1, size2, inverse1, inverse2), KIND, False, AXES, F, E, TOKENS, PIECE, VEC,
        BLOCK, BLOCKS, PARTS_FIRST,
    )  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_sequence_backward_kernel(
    x_desc, grad_desc, x, grad, out, statistics, words, theta,
    offset: gl.int32, tag: gl.int32, patience: gl.int32, parts_inverse: int64, heads_inverse: int64,
    tokens: gl.int32, heads: gl.int32, parts: gl.int32,
    theta_u: gl.int32, theta_f: gl.int32, x_b: gl.int32, x_n: gl.int32, x_h: gl.int32,
    grad_b: gl.int32, grad_n: gl.int32, grad_h: gl.int32, out_b: gl.int32, out_n: gl.int32, out_h: gl.int32,
    prefix: gl.int32, size1: gl.int32, size2: gl.int32, inverse1: int64, inverse2: int64,
    KIND: gl.constexpr, AXES: gl.constexpr, F: gl.constexpr, E: gl.constexpr, TOKENS: gl.constexpr, PIECE: gl.constexpr,
    VEC: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, PARTS_FIRST: gl.constexpr,
):  # fmt: skip
    """Gradient of x of a part of a strip; ``out`` is that gradient."""
    run_part(
        x_desc, grad_desc, x, grad, out, statistics, words, theta, parts_inverse, heads_inverse, offset, tag,
        patience, tokens, heads, parts,
        theta_u, theta_f, x_b, x_n, x_h, grad_b, grad_n, grad_h, out_b, out_n, out_h,
        (prefix, size1, size2, inverse1, inverse2), KIND, True, AXES, F, E, TOKENS, PIECE, VEC,
        BLOCK, BLOCKS, PARTS_FIRST,
    )  # fmt: skip
