"""LRPE with softmax over the sequence for Hopper, which reads ``x`` once. Written in Gluon.

A program copies a tile, ``TOKENS`` of a strip of ``W`` angles' columns of one (batch entry, head), into shared memory,
and looks at it twice there: down it to sum the columns, and up again to apply the softmax. The parts of a strip, one
program each, tell each other their sums in between. While some programs wait for others, those that share their
multiprocessor copy, sum or apply.

How sums are told. A part writes its sums where all parts of the strip read, each as one word of 64 bits: the sum below,
and above it the tag of the launch. A word has arrived when it bears the tag, so nothing is cleared between launches,
and no order of one word after another is relied on. The words are added in an order that never varies.

Nobody waits for ever. All parts of a strip need not run at once: a program that has polled for long works out the
sums that it misses from device memory, as the programs that it waits for would, to the bit, and tells them itself.
After that it waits only for words of its own, and polls for others' no more than once each. It is a way out and not a
way to go: programs that come to it all work out the same, so launchers see to it that a strip's parts fit the GPU.

Shapes. Columns come in P members of F angles: P = 1 for ``cosine``, 2 for the pairs of ``rotate``. A member's tile lies
in shared memory as pieces of (PIECE, W), and registers hold (SUB, W) of it at a time. Columns are (W,). Statistics are
those of `kernels_sequence`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from warploom.device.activations import LOG2_E, power_of_two
from warploom.device.hopper import barriers, matrix
from warploom.device.phase import cos_sin, phase_step

LARGEST_SUM = gl.constexpr(2.0**100)
BLOCK = gl.constexpr(8)  # parts, whose sums are read at once
FOREVER = gl.constexpr(2**31 - 1)
UNIT = gl.constexpr(8)  # strides travel divided by it: 16 bytes of 16-bit features
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # one name for two versions of Triton

# ----------------------------------------------------------------------------------------------------------
# Rows of a tile, and their angles
# ----------------------------------------------------------------------------------------------------------


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
    return rows.to(gl.float32)


@gluon.jit
def moved(sources, rows):
    """Both members' sources, so many rows further on in device memory."""
    pieces1, address1, stride = sources[0]
    pieces2, address2, _ = sources[1]
    return (pieces1, address1 + stride * rows, stride), (pieces2, address2 + stride * rows, stride)


@gluon.jit
def power(x, log_scale):
    """eˣ times 2 to the power of ``log_scale`` (W,), with one rounding of the exponent for each entry.

    What rounding ``log_scale`` costs is common to a column, and the softmax divides it out.
    """
    return power_of_two(gl.fma(x, LOG2_E, log_scale[None, :]))


@gluon.jit
def angles(theta, known, position, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Cosines and sines (ROWS, W) of positions from ``position`` on, of the frequencies at ``theta`` (W,)."""
    whole, rest, unit = phase_step(gl.load(theta, mask=known, other=0.0))
    n = position + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return cos_sin(n[:, None], whole[None, :], rest[None, :], unit[None, :], True)


@gluon.jit
def turned(a, b, cosine, sine):
    """Pairs (a, b) turned by an angle."""
    return gl.fma(a, cosine, -(b * sine)), gl.fma(b, cosine, a * sine)


# ----------------------------------------------------------------------------------------------------------
# Sums of columns
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def sum_piece(total1, total2, cosine, sine, step, xs, grads, piece, left, log1, log2, MASKED: gl.constexpr,
              BACKWARD: gl.constexpr, P: gl.constexpr, SHARED: gl.constexpr, SUB: gl.constexpr,
              LAYOUT: gl.constexpr):  # fmt: skip
    """Add the rows of a piece to sums (SUB, W): weights, and in a backward their products with their gradients.

    ``cosine, sine``: of the first ``SUB`` rows. Returned with the sums, of the rows behind the last.
    """
    ROWS: gl.constexpr = xs[0][0].shape[3]
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
            d1, d2 = turned(g1, g2, cosine, -sine)
            total1 = gl.fma(y1, d1, total1)
            if P == 2:
                total2 = gl.fma(y2, d2, total2)
            cosine, sine = turned(cosine, sine, step[0], step[1])
        else:
            total1 += y1
            if P == 2:
                total2 += y2
    return total1, total2, cosine, sine


@gluon.jit
def sum_part(xs, grads, part, tokens, log1, log2, cosine, sine, step, BACKWARD: gl.constexpr,
             P: gl.constexpr, SHARED: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Columns' sums (W,) over a part, from shared memory or from device memory, to the same bits; see `sum_piece`."""
    PIECES: gl.constexpr = xs[0][0].shape[0]
    ROWS: gl.constexpr = xs[0][0].shape[3]
    W: gl.constexpr = xs[0][0].shape[4]
    total1 = gl.zeros([SUB, W], gl.float32, LAYOUT)
    total2 = gl.zeros([SUB, W], gl.float32, LAYOUT)
    for piece in range(PIECES):
        row = (part * PIECES + piece) * ROWS
        xs_there = xs
        grads_there = grads
        if not SHARED:
            xs_there = moved(xs, row)
            grads_there = moved(grads, row)
        left = tokens - row
        if left >= ROWS:
            total1, total2, cosine, sine = sum_piece(
                total1, total2, cosine, sine, step, xs_there, grads_there, piece, left, log1, log2,
                False, BACKWARD, P, SHARED, SUB, LAYOUT,
            )  # fmt: skip
        else:
            total1, total2, cosine, sine = sum_piece(
                total1, total2, cosine, sine, step, xs_there, grads_there, piece, left, log1, log2,
                True, BACKWARD, P, SHARED, SUB, LAYOUT,
            )  # fmt: skip
    return gl.sum(total1, 0), gl.sum(total2, 0), cosine, sine


@gluon.jit
def largest(xs, tokens, member: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr):
    """A member's largest entries (W,) from device memory. −inf where there is nothing else, made zero."""
    W: gl.constexpr = xs[0][0].shape[4]
    top = gl.full([SUB, W], float("-inf"), gl.float32, LAYOUT)
    for row in range(0, tokens, SUB):
        left = tokens - row
        inside = (gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT)) < left)[:, None]
        x = load_rows(moved(xs, row)[member], 0, 0, left, False, SUB, LAYOUT)
        top = gl.where(inside, gl.maximum(top, x), top)
    top = gl.max(top, 0)
    return gl.where(top == float("-inf"), 0.0, top)


# ----------------------------------------------------------------------------------------------------------
# Sums told to other parts
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def tell(to, tag, sums, LAYOUT: gl.constexpr):
    """Write sums (n,) as words from ``to`` on."""
    below = sums.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.atomic_xchg(to + gl.arange(0, sums.shape[0], LAYOUT), (tag.to(gl.int64) << 32) | below, sem="relaxed")


@gluon.jit
def read_words(cells, tag, polls):
    """The sums among words, and the tags above them, once these are ``tag`` or after so many polls.

    A thread reads two adjacent words at a time.
    """
    address = cells.to(gl.int64, bitcast=True)
    tags = gl.full_like(address, 0).to(gl.int32) + tag
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred enough;
            .reg .b32 count;
            .reg .b64 word0, word1;
            mov.b32 count, 0;
        again:
            ld.relaxed.gpu.global.v2.b64 {word0, word1}, [$4];
            mov.b64 {$0, $2}, word0;
            mov.b64 {$1, $3}, word1;
            setp.eq.s32 enough, $2, $6;
            setp.eq.and.s32 enough, $3, $6, enough;
            @enough bra done;
            add.s32 count, count, 1;
            setp.ge.s32 enough, count, $8;
            @!enough bra again;
        done:
        }
        """,
        "=&r,=&r,=&r,=&r,l,l,r,r,r,r",
        [address, tags, tags - tag + polls],
        dtype=(gl.float32, gl.int32),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def read_block(words, first, end, tag, polls, N: gl.constexpr, WORDS: gl.constexpr):
    """Rows ``first`` to ``end`` of words (…, N), at most as many as make a block: added (N,), and if any is missing."""
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, WORDS))
    inside = row < end
    row = gl.where(inside, row, first)
    cells = words + (row * N)[:, None] + gl.arange(0, N, gl.SliceLayout(0, WORDS))[None, :]
    sums, tags = read_words(cells, tag, polls)
    missing = gl.max(gl.max((tags != tag).to(gl.int32), 1), 0) != 0
    return gl.sum(gl.where(inside[:, None], sums, 0.0), 0), missing


@gluon.jit
def sum_of_block(words, first, tag, patience, xs, grads, theta, known, position, parts, tokens, log1, log2, step,
                 BACKWARD: gl.constexpr, P: gl.constexpr, SUB: gl.constexpr, LAYOUT: gl.constexpr,
                 WORDS: gl.constexpr):  # fmt: skip
    """What the parts of a block tell, added (P · W,). What is missing after ``patience`` polls is told here.

    Returned with the patience that is left: parts that did not come in time do not run, nor do those after them.
    """
    W: gl.constexpr = xs[0][0].shape[4]
    TOKENS: gl.constexpr = xs[0][0].shape[0] * xs[0][0].shape[3]
    end = gl.minimum(first + BLOCK, parts)
    total, missing = read_block(words, first, end, tag, patience, P * W, WORDS)
    if missing:  # every warp sees the same: it comes out of a reduction through shared memory
        patience = gl.minimum(patience, 1)
        for late in range(first, end):
            cosine, sine = angles(theta, known, position + late * TOKENS, SUB, LAYOUT)
            total1, total2, cosine, sine = sum_part(
                xs, grads, late, tokens, log1, log2, cosine, sine, step, BACKWARD, P, False, SUB, LAYOUT
            )  # fmt: skip
            tell(words + late * (P * W), tag, total1, gl.SliceLayout(0, LAYOUT))
            if P == 2:
                tell(words + (late * (P * W) + W), tag, total2, gl.SliceLayout(0, LAYOUT))
        synchronize()
        total, missing = read_block(words, first, end, tag, FOREVER, P * W, WORDS)
    return total, patience


@gluon.jit
def sum_of_parts(words, tag, patience, xs, grads, theta, known, position, part, parts, tokens, log1, log2, step,
                 BLOCKS: gl.constexpr, BACKWARD: gl.constexpr, P: gl.constexpr, SUB: gl.constexpr,
                 LAYOUT: gl.constexpr):  # fmt: skip
    """What all parts tell, added in an order that never varies: (P · W,).

    ``BLOCKS``: they may be more than a block. Then the first part of each block adds that up, and tells the sum as a
    word behind those of the parts.
    """
    N: gl.constexpr = P * xs[0][0].shape[4]
    VEC: gl.constexpr = 2 if N <= 64 else N // 32
    WORDS: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // N, N // VEC], [gl.num_warps(), 1], [1, 0])
    # Two threads with the same words might see one in time and the other not.
    gl.static_assert(BLOCK * N >= gl.num_warps() * 32 * VEC, "a word must be read by one thread alone")
    if not BLOCKS:
        total, patience = sum_of_block(
            words, 0, tag, patience, xs, grads, theta, known, position, parts, tokens, log1, log2,
            step, BACKWARD, P, SUB, LAYOUT, WORDS,
        )  # fmt: skip
    else:
        told = words + parts * N
        if part % BLOCK == 0:
            sums, patience = sum_of_block(
                words, part, tag, patience, xs, grads, theta, known, position, parts, tokens, log1, log2,
                step, BACKWARD, P, SUB, LAYOUT, WORDS,
            )  # fmt: skip
            tell(told + part // BLOCK * N, tag, sums, gl.SliceLayout(0, WORDS))
        blocks = (parts + BLOCK - 1) // BLOCK
        total = gl.zeros([N], gl.float32, gl.SliceLayout(0, WORDS))
        for first in range(0, blocks, BLOCK):
            end = gl.minimum(first + BLOCK, blocks)
            some, missing = read_block(told, first, end, tag, patience, N, WORDS)
            if missing:
                patience = gl.minimum(patience, 1)
                for late in range(first, end):
                    sums, patience = sum_of_block(
                        words, late * BLOCK, tag, patience, xs, grads, theta, known, position, parts, tokens, log1,
                        log2, step, BACKWARD, P, SUB, LAYOUT, WORDS,
                    )  # fmt: skip
                    tell(told + late * N, tag, sums, gl.SliceLayout(0, WORDS))
                synchronize()
                some, missing = read_block(told, first, end, tag, FOREVER, N, WORDS)
            total += some
    return total


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
    x_desc, grad_desc, x, grad, out, statistics, words, theta, offset, tag, patience, tokens, heads, parts,
    theta_u, theta_f, x_b, x_n, x_h, grad_b, grad_n, grad_h, out_b, out_n, out_h,
    KIND: gl.constexpr, BACKWARD: gl.constexpr, F: gl.constexpr, E: gl.constexpr, TOKENS: gl.constexpr,
    PIECE: gl.constexpr, VEC: gl.constexpr, BLOCKS: gl.constexpr,
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
    SUB: gl.constexpr = WARPS * 32 * VEC // W
    dtype: gl.constexpr = x_desc.dtype
    program = gl.program_id(0)
    strip = program % STRIPS
    unit = program // STRIPS // parts
    part = program // STRIPS - unit * parts
    entry = unit // heads
    head = unit - entry * heads
    first = strip * W

    columns = gl.allocate_shared_memory(gl.float32, [P * W], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = barriers(1).index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    row = part * TOKENS
    mbarrier.expect(full, MEMBERS * (TOKENS // BOX) * x_desc.block_type.nbytes)
    x1, x2 = copy_tile(x_desc, full, P, PIECE, TOKENS, entry, head, row, first, F)
    g1, g2 = x1, x2
    if BACKWARD:
        g1, g2 = copy_tile(grad_desc, full, 2, PIECE, TOKENS, entry, head, row, first, F)

    # While they come: what there is to know of the columns.
    f = first + gl.arange(0, W, COLUMN)
    known = f < E
    theta += head * theta_u + f * theta_f
    entry = entry.to(gl.int64)
    x_first = x + (entry * x_b + head.to(gl.int64) * x_h) * UNIT + first
    grad_first = grad + (entry * grad_b + head.to(gl.int64) * grad_h) * UNIT + first
    x_stride = x_n.to(gl.int64) * UNIT
    grad_stride = grad_n.to(gl.int64) * UNIT
    xs = ((x1, x_first, x_stride), (x2, x_first + F, x_stride))
    grads = ((g1, grad_first, grad_stride), (g2, grad_first + F, grad_stride))
    cells = statistics + unit.to(gl.int64) * (2 * P * F) + f
    SECOND: gl.constexpr = (P - 1) * F
    if BACKWARD:
        log1 = gl.fma(gl.load(cells), -LOG2_E, gl.log2(gl.load(cells + P * F)))
        log2 = gl.fma(gl.load(cells + SECOND), -LOG2_E, gl.log2(gl.load(cells + (P * F + SECOND))))
    else:  # the columns' first tokens; see `kernels_sequence.column_statistics`
        token = x_first + gl.arange(0, W, COLUMN)
        shift1 = gl.load(token).to(gl.float32)
        shift2 = gl.load(token + SECOND).to(gl.float32)
        log1 = shift1 * -LOG2_E
        log2 = shift2 * -LOG2_E
    step_cosine, step_sine = angles(theta, known, SUB, 1, LAYOUT)
    step = (step_cosine, step_sine)
    # Of the first rows backward, which sums as it goes down. A forward only goes up, to apply.
    start = row if BACKWARD else row + TOKENS
    cosine, sine = angles(theta, known, offset + start, SUB, LAYOUT)

    mbarrier.wait(full, 0)
    total1, total2, cosine, sine = sum_part(
        xs, grads, part, tokens, log1, log2, cosine, sine, step, BACKWARD, P, True, SUB, LAYOUT
    )  # fmt: skip
    if parts > 1:
        words += (unit * STRIPS + strip).to(gl.int64) * ((parts + (parts + BLOCK - 1) // BLOCK) * (P * W))
        tell(words + part * (P * W), tag, total1, COLUMN)
        if P == 2:
            tell(words + (part * (P * W) + W), tag, total2, COLUMN)
        total = sum_of_parts(
            words, tag, patience, xs, grads, theta, known, offset, part, parts, tokens, log1, log2, step,
            BLOCKS, BACKWARD, P, SUB, LAYOUT,
        )  # fmt: skip
        columns.store(total)
        synchronize()
        total1 = columns.slice(0, W).load(COLUMN)
        total2 = columns.slice((P - 1) * W, W).load(COLUMN)
    if not BACKWARD:
        good = (total1 < LARGEST_SUM) & (total2 < LARGEST_SUM)
        if gl.min(good.to(gl.int32), 0) == 0:
            # Too large for their shifts, infinite or NaN: once more, relative to the largest entries. All parts of
            # the strip see the same sums, and each goes down the whole strip in the same order.
            shift1 = largest(xs, tokens, 0, SUB, LAYOUT)
            shift2 = largest(xs, tokens, P - 1, SUB, LAYOUT)
            log1 = shift1 * -LOG2_E
            log2 = shift2 * -LOG2_E
            total1 = gl.zeros([W], gl.float32, COLUMN)
            total2 = total1
            for other in range(parts):
                sum1, sum2, _, _ = sum_part(
                    xs, grads, other, tokens, log1, log2, cosine, sine, step, False, P, False, SUB, LAYOUT
                )  # fmt: skip
                total1 += sum1
                total2 += sum2
        log1 -= gl.log2(total1)
        log2 -= gl.log2(total2)
        if part == 0:
            gl.store(cells, shift1)
            gl.store(cells + P * F, 1.0 / total1)
            if P == 2:
                gl.store(cells + F, shift2)
                gl.store(cells + 3 * F, 1.0 / total2)

    # Up again.
    out_first = out + (entry * out_b + head.to(gl.int64) * out_h) * UNIT + first
    out_stride = out_n.to(gl.int64) * UNIT
    for below in range(TOKENS // PIECE):
        piece = TOKENS // PIECE - 1 - below
        for s in gl.static_range(PIECE // SUB - 1, -1, -1):
            cosine, sine = turned(cosine, sine, step[0], -step[1])
            y1 = power(load_rows(xs[0], piece, s, 0, True, SUB, LAYOUT), log1)
            y2 = y1
            if P == 2:
                y2 = power(load_rows(xs[1], piece, s, 0, True, SUB, LAYOUT), log2)
            if BACKWARD:
                d1 = load_rows(grads[0], piece, s, 0, True, SUB, LAYOUT)
                d2 = load_rows(grads[1], piece, s, 0, True, SUB, LAYOUT)
                d1, d2 = turned(d1, d2, cosine, -sine)
                o1 = y1 * (d1 - total1[None, :])
                o2 = y2 * (d2 - total2[None, :])
            elif P == 1:
                o1 = y1 * cosine
                o2 = y1 * sine
            else:
                o1, o2 = turned(y1, y2, cosine, sine)
            n = row + piece * PIECE + s * SUB + gl.arange(0, SUB, gl.SliceLayout(1, LAYOUT))
            to = out_first + (n.to(gl.int64) * out_stride)[:, None] + gl.arange(0, W, COLUMN)[None, :]
            gl.store(to, o1.to(dtype), mask=(n < tokens)[:, None])
            if OUT_P == 2:
                gl.store(to + F, o2.to(dtype), mask=(n < tokens)[:, None])
    mbarrier.invalidate(full)  # so that its memory is not used for anything else before


NUMBERS = (
    "offset tag patience tokens heads parts theta_u theta_f x_b x_n x_h grad_b grad_n grad_h out_b out_n out_h"
).split()


@gluon.jit(do_not_specialize=[n for n in NUMBERS if not n.startswith("grad")])
def hopper_sequence_forward_kernel(
    x_desc, x, out, statistics, words, theta,
    offset: gl.int32, tag: gl.int32, patience: gl.int32, tokens: gl.int32, heads: gl.int32, parts: gl.int32,
    theta_u: gl.int32, theta_f: gl.int32, x_b: gl.int32, x_n: gl.int32, x_h: gl.int32,
    out_b: gl.int32, out_n: gl.int32, out_h: gl.int32,
    KIND: gl.constexpr, F: gl.constexpr, E: gl.constexpr, TOKENS: gl.constexpr, PIECE: gl.constexpr,
    VEC: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Output and statistics of a part of a strip."""
    run_part(
        x_desc, x_desc, x, x, out, statistics, words, theta, offset, tag, patience, tokens, heads, parts,
        theta_u, theta_f, x_b, x_n, x_h, x_b, x_n, x_h, out_b, out_n, out_h, KIND, False, F, E, TOKENS, PIECE, VEC, BLOCKS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_sequence_backward_kernel(
    x_desc, grad_desc, x, grad, out, statistics, words, theta,
    offset: gl.int32, tag: gl.int32, patience: gl.int32, tokens: gl.int32, heads: gl.int32, parts: gl.int32,
    theta_u: gl.int32, theta_f: gl.int32, x_b: gl.int32, x_n: gl.int32, x_h: gl.int32,
    grad_b: gl.int32, grad_n: gl.int32, grad_h: gl.int32, out_b: gl.int32, out_n: gl.int32, out_h: gl.int32,
    KIND: gl.constexpr, F: gl.constexpr, E: gl.constexpr, TOKENS: gl.constexpr, PIECE: gl.constexpr,
    VEC: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Gradient of x of a part of a strip; ``out`` is that gradient."""
    run_part(
        x_desc, grad_desc, x, grad, out, statistics, words, theta, offset, tag, patience, tokens, heads, parts,
        theta_u, theta_f, x_b, x_n, x_h, grad_b, grad_n, grad_h, out_b, out_n, out_h,
        KIND, True, F, E, TOKENS, PIECE, VEC, BLOCKS,
    )  # fmt: skip
