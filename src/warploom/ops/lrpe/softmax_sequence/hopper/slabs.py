"""Softmax over the sequence for Hopper, which reads ``x`` once: tiles stay in shared memory between sum and result.

Tiles and statistics are those of `softmax_sequence.triton`. A program takes each ``programs``-th tile. It sums the
tile's columns, tells the sums to the programs of the slab's other parts, waits for theirs, and writes the tile's results.
Meanwhile other programs of its multiprocessor copy or compute. A tile that holds all tokens waits for nobody.

Waiting ends: the launch is cooperative, so all programs run, and the tiles of a head, neighbours, are no more than
programs. So no program has two of them, and what it has before is of earlier heads. Of the first head that is not
complete, each tile is summed at last, since none before it waits for this head.

Rows (SUB, W) are in registers, and columns (1, W) of a member or (P · W,) of both.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from warploom.device.activations import widen
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, init_each, matrix, thread_barrier
from warploom.device.online_softmax import finite_max
from warploom.device.phase import cos_sin, phase_step, wrapping_add
from warploom.device.rotation import rotate, rotate_pair_back
from warploom.device.rows import RowSpec
from warploom.ops.lrpe.softmax_sequence.triton.columns import power, weights
from warploom.ops.lrpe.softmax_sequence.triton.tiles import SequenceSizes, tile_of
from warploom.ops.lrpe.triton.angles import AngleNumbers
from warploom.ops.lrpe.triton.rows import RowStrides

LARGEST_SUM = gl.constexpr(2.0**32)  # see `triton.forward.column_statistics`
WARPS = gl.constexpr(4)
VEC = gl.constexpr(4)  # adjacent features of a thread
STEPS = gl.constexpr(4)  # blocks of rows in a round of a loop over a tile
SLOTS = gl.constexpr(16)  # parts whose words are read at once
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class SlabConfig(NamedTuple):
    """Compile-time choices of a kernel."""

    spec: RowSpec
    P: int  # members of an angle: 1 for ``cosine``, 2 for the pairs of ``rotate``
    TOKENS: int  # of a tile
    SUB: int  # tokens that are in registers at once
    W: int  # angles of a slab


class SlabCall(NamedTuple):
    """Arguments of a kernel, and its shared memory. ``out`` is the gradient of x in a backward, ``grad`` None in a forward."""

    x: gl.tensor  # a descriptor, as ``grad``
    grad: gl.tensor
    out: gl.tensor
    statistics: gl.tensor
    words: gl.tensor  # see `tell`; None where a tile holds all tokens
    theta: gl.tensor
    cu_seqlens: gl.tensor  # None, for `tile_of`
    offset: gl.tensor
    sizes: SequenceSizes
    numbers: AngleNumbers
    out_strides: RowStrides
    x_tile: gl.shared_memory_descriptor  # (members · blocks, 1, 1, SUB, W)
    grad_tile: gl.shared_memory_descriptor  # the same, of both members
    full: gl.shared_memory_descriptor  # the barrier of both
    columns: gl.shared_memory_descriptor  # (2, P · W) in float32


@gluon.constexpr_function
def row_layout(config):
    """Returns the layout of rows (SUB, W)."""
    lanes = config.W // VEC.value
    return gl.BlockedLayout([1, VEC.value], [32 // lanes, lanes], [WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def word_layout(config):
    """Returns the layout of words (SLOTS, P · W), in which a warp holds all slots of its columns."""
    width = min(config.P * config.W // WARPS.value, 32)
    return gl.BlockedLayout([SLOTS.value * width // 32, 1], [32 // width, width], [1, WARPS.value], [1, 0])


@gluon.jit
def copy_members(desc, to, tile, MEMBERS: gl.constexpr, call, config: gl.constexpr):
    """Start to copy a tile's members."""
    BOX: gl.constexpr = desc.block_type.shape[2]
    BOXES: gl.constexpr = config.TOKENS // BOX
    boxes = tma.boxes_in(to, desc)
    for i in gl.static_range(MEMBERS * BOXES):
        row, feature = tile.start + i % BOXES * BOX, tile.first + i // BOXES * config.spec.F
        at = [tile.b.to(gl.int32), tile.h.to(gl.int32), row, feature]
        tma.async_copy_global_to_shared(desc, at, call.full, boxes.index(i))


@gluon.jit
def copy_tile(number, call, config: gl.constexpr):
    """Start to copy a tile, if there is one of that number."""
    P: gl.constexpr = config.P
    MEMBERS: gl.constexpr = P if call.grad is None else P + 2
    if number < call.sizes.tiles:
        tile = tile_of(number, call, config)
        mbarrier.expect(call.full, MEMBERS * config.TOKENS * config.W * 2)
        copy_members(call.x, call.x_tile, tile, P, call, config)
        if call.grad is not None:
            copy_members(call.grad, call.grad_tile, tile, 2, call, config)


class SlabAngles(NamedTuple):
    """Cosines and sines of rows, of the rows before, and twice the cosine of the angle between them, (1, W)."""

    cosine: gl.tensor
    sine: gl.tensor
    cosine_before: gl.tensor
    sine_before: gl.tensor
    twice: gl.tensor


@gluon.jit
def first_angles(step, tile, call, config: gl.constexpr):
    """Returns the angles of a tile's first rows; ``step``: columns' `phase_step`."""
    LAYOUT: gl.constexpr = row_layout(config)
    n = wrapping_add(tile.start + gl.arange(0, config.SUB, gl.SliceLayout(1, LAYOUT)), call.offset)
    cosine, sine = cos_sin(n[:, None], step, True)
    step_cosine, step_sine = cos_sin(gl.full([1, config.W], config.SUB, gl.int32, LAYOUT), step, True)
    before, sine_before = rotate_pair_back(cosine, sine, step_cosine, step_sine)
    return SlabAngles(cosine, sine, before, sine_before, step_cosine * 2.0)


@gluon.jit
def next_angles(angles):
    """Returns the angles of the next rows: cos(a + d) = 2 cos d · cos a − cos(a − d), half of a rotation's instructions."""
    cosine = gl.fma(angles.twice, angles.cosine, -angles.cosine_before)
    sine = gl.fma(angles.twice, angles.sine, -angles.sine_before)
    return SlabAngles(cosine, sine, angles.cosine, angles.sine, angles.twice)


@gluon.jit
def load_rows(tile, member: gl.constexpr, block, config: gl.constexpr):
    """Returns a block of a member's rows in float32, (SUB, W)."""
    rows = matrix(tile, member * (config.TOKENS // config.SUB) + block)
    return widen(rows.load(row_layout(config)))


@gluon.jit
def load_weights(block, known, call, config: gl.constexpr):
    """Returns both members' weights, (SUB, W) each. ``known``: shifts of both members, log₂ of scales of both."""
    y1 = weights(load_rows(call.x_tile, 0, block, config), known[0], known[2], 0)
    y2 = y1
    if config.P == 2:
        y2 = weights(load_rows(call.x_tile, 1, block, config), known[1], known[3], 0)
    return y1, y2


@gluon.jit
def load_gradients(block, angles, call, config: gl.constexpr):
    """Returns the gradients that reach both members before the softmax, (SUB, W) each."""
    g1 = load_rows(call.grad_tile, 0, block, config)
    g2 = load_rows(call.grad_tile, 1, block, config)
    return rotate_pair_back(g1, g2, angles.cosine, angles.sine)


@gluon.jit
def count_rounds(tile, config: gl.constexpr):
    """Returns how many rounds of `STEPS` blocks a tile's tokens take."""
    return (tile.end - tile.start + (config.SUB * STEPS - 1)) // (config.SUB * STEPS)


@gluon.jit
def are_tokens(block, tile, config: gl.constexpr):
    """Returns which rows of a block are tokens, (SUB, 1)."""
    n = tile.start + block * config.SUB + gl.arange(0, config.SUB, gl.SliceLayout(1, row_layout(config)))
    return (n < tile.end)[:, None]


@gluon.jit
def sum_tile(known, step, tile, call, config: gl.constexpr):
    """Returns both members' sums over a tile, (1, W): of weights y, or in a backward of y · dy."""
    LAYOUT: gl.constexpr = row_layout(config)
    total1 = gl.zeros([config.SUB, config.W], gl.float32, LAYOUT)
    total2 = total1
    angles = first_angles(step, tile, call, config)
    whole = (tile.end - tile.start) // (config.SUB * STEPS)
    for MASKED in gl.static_range(2):
        for i in range(whole if MASKED else 0, count_rounds(tile, config) if MASKED else whole):
            for s in gl.static_range(STEPS):
                block = i * STEPS + s
                y1, y2 = load_weights(block, known, call, config)
                if MASKED:
                    inside = are_tokens(block, tile, config)
                    y1 = gl.where(inside, y1, 0.0)
                    y2 = gl.where(inside, y2, 0.0)
                if call.grad is not None:
                    d1, d2 = load_gradients(block, angles, call, config)
                    angles = next_angles(angles)
                    y1 *= d1
                    y2 *= d2
                total1 += y1
                total2 += y2
    return gl.sum(total1, 0)[None, :], gl.sum(total2, 0)[None, :]


@gluon.jit
def find_largest(member: gl.constexpr, tile, call, config: gl.constexpr):
    """Returns a member's largest entries of a tile, (1, W). −inf where there is nothing else is made zero."""
    top = gl.full([config.SUB, config.W], float("-inf"), gl.float32, row_layout(config))
    for block in range(config.TOKENS // config.SUB):
        x = load_rows(call.x_tile, member, block, config)
        top = gl.where(are_tokens(block, tile, config), gl.maximum(top, x), top)
    return finite_max(gl.max(top, 0))[None, :]


@gluon.jit
def load_first(member: gl.constexpr, call, config: gl.constexpr):
    """Returns a member's first row, (1, W): no swizzle moves it."""
    rows = tma.matrix_in(call.x_tile.index(member * (config.TOKENS // config.SUB)), PLAIN)
    return widen(rows.slice(0, 1).load(row_layout(config)))


@gluon.jit
def column_statistics(step, tile, call, config: gl.constexpr):
    """Returns shifts of both members' columns and sums of powers, (1, W) each: see `triton.forward.column_statistics`."""
    shift1 = load_first(0, call, config)
    shift2 = load_first(config.P - 1, call, config)
    one = gl.zeros_like(shift1)  # the logarithm of no scale
    total1, total2 = sum_tile((shift1, shift2, one, one), step, tile, call, config)
    good = (total1 < LARGEST_SUM) & (total2 < LARGEST_SUM)
    if gl.min(gl.min(good.to(gl.int32), 1), 0) == 0:  # too large for its shift, infinite or NaN
        shift1 = find_largest(0, tile, call, config)
        shift2 = find_largest(config.P - 1, tile, call, config)
        total1, total2 = sum_tile((shift1, shift2, one, one), step, tile, call, config)
    shift1 = gl.where(total1 == 0.0, float("-inf"), shift1)
    shift2 = gl.where(total2 == 0.0, float("-inf"), shift2)
    return shift1, shift2, total1, total2


@gluon.jit
def keep_columns(row: gl.constexpr, one, two, call, config: gl.constexpr):
    """Keeps both members' numbers, (1, W) each, in a row of shared memory."""
    W: gl.constexpr = config.W
    call.columns.slice(row, 1).slice(0, W, 1).store(one)
    if config.P == 2:
        call.columns.slice(row, 1).slice(W, W, 1).store(two)


@gluon.jit
def share_columns(one, two, call, config: gl.constexpr):
    """Returns two numbers of each column, (P · W,), as rows take them: of both members, (1, W) each."""
    W: gl.constexpr = config.W
    LAST: gl.constexpr = (config.P - 1) * W
    LAYOUT: gl.constexpr = row_layout(config)
    thread_barrier()
    call.columns.slice(0, 1).store(one[None, :])
    call.columns.slice(1, 1).store(two[None, :])
    thread_barrier()
    first, second = call.columns.slice(0, 1), call.columns.slice(1, 1)
    return (
        first.slice(0, W, 1).load(LAYOUT), first.slice(LAST, W, 1).load(LAYOUT),
        second.slice(0, W, 1).load(LAYOUT), second.slice(LAST, W, 1).load(LAYOUT),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# What programs tell each other
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def tell(top, total, tile, call, config: gl.constexpr):
    """Tells the other parts of the slab shifts and sums of columns, (P · W,), a word of 64 bits each.

    A word is complete in itself, so it matters to nobody which one comes first. It has come if it is not zero, which
    none is: where a sum is zero, a forward's shift is −inf, and a backward's is one.
    """
    C: gl.constexpr = config.P * config.W
    low = total.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    words = (top.to(gl.int32, bitcast=True).to(gl.int64) << 32) | low
    to = call.words + (tile.slab.to(gl.int64) * call.sizes.parts + tile.part) * C
    gl.atomic_xchg(to + gl.arange(0, C, gl.SliceLayout(0, word_layout(config))), words, sem="relaxed")


@gluon.jit
def read_words(first, tile, call, config: gl.constexpr):
    """Returns shifts and sums of `SLOTS` parts from ``first`` on, (SLOTS, P · W) each, when all have come."""
    C: gl.constexpr = config.P * config.W
    LAYOUT: gl.constexpr = word_layout(config)
    part = first + gl.arange(0, SLOTS, gl.SliceLayout(1, LAYOUT))
    inside = (part < call.sizes.parts)[:, None]
    ptrs = call.words + tile.slab.to(gl.int64) * (call.sizes.parts * C)
    ptrs = ptrs + (part * C)[:, None] + gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    words = gl.load(ptrs, mask=inside, other=1, volatile=True)
    while gl.min(gl.min((words != 0).to(gl.int32), 0), 0) == 0:
        words = gl.load(ptrs, mask=inside, other=1, volatile=True)
    tops = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    sums = words.to(gl.int32).to(gl.float32, bitcast=True)
    return gl.where(inside, tops, float("-inf")), gl.where(inside, sums, 0.0)


@gluon.jit
def combine_parts(tile, call, config: gl.constexpr):
    """Returns columns' shifts and sums, (P · W,), of all parts in their order. This part's are in ``call.columns``."""
    LAYOUT: gl.constexpr = word_layout(config)
    thread_barrier()
    top = gl.sum(call.columns.slice(0, 1).load(LAYOUT), 0)  # of one row
    total = gl.sum(call.columns.slice(1, 1).load(LAYOUT), 0)
    if call.words is not None:
        tell(top, total, tile, call, config)
        top = gl.full_like(top, float("-inf"))
        total = gl.zeros_like(total)
        for first in range(0, call.sizes.parts, SLOTS):
            tops, sums = read_words(first, tile, call, config)
            new = gl.maximum(top, gl.max(tops, 0))
            shift = finite_max(new)
            total = total * power(top, shift, 0) + gl.sum(sums * power(tops, shift[None, :], 0), 0)
            top = new
    return top, total


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def write_tile(known, c1, c2, step, tile, call, config: gl.constexpr):
    """Writes a tile's results; ``c1`` and ``c2``: a backward's sums of both members, (1, W)."""
    LAYOUT: gl.constexpr = row_layout(config)
    UNIT: gl.constexpr = config.spec.VEC
    n = gl.arange(0, config.SUB, gl.SliceLayout(1, LAYOUT))
    stride = call.out_strides.n * UNIT
    to = call.out + (tile.b * call.out_strides.s + tile.h * call.out_strides.u) * UNIT
    to = to + tile.start.to(gl.int64) * stride + tile.first
    to = to + (n.to(gl.int64) * stride)[:, None] + gl.arange(0, config.W, gl.SliceLayout(0, LAYOUT))[None, :]
    dtype: gl.constexpr = call.out.dtype.element_ty
    angles = first_angles(step, tile, call, config)
    for i in range(count_rounds(tile, config)):
        for s in gl.static_range(STEPS):
            block = i * STEPS + s
            y1, y2 = load_weights(block, known, call, config)
            if call.grad is None:
                o1, o2 = rotate(y1, y2, angles.cosine, angles.sine, config.spec.KIND)
            else:
                d1, d2 = load_gradients(block, angles, call, config)
                o1 = y1 * (d1 - c1)
                o2 = y2 * (d2 - c2)
            angles = next_angles(angles)
            inside = are_tokens(block, tile, config)
            gl.store(to, o1.to(dtype), mask=inside)
            if config.P == 2 or call.grad is None:
                gl.store(to + config.spec.F, o2.to(dtype), mask=inside)
            to += stride * config.SUB


@gluon.jit
def run_tile(number, phase, call, config: gl.constexpr):
    """Sums a tile, waits for the other parts of its slab, and writes its results."""
    F: gl.constexpr = config.spec.F
    P: gl.constexpr = config.P
    W: gl.constexpr = config.W
    tile = tile_of(number, call, config)
    c = gl.arange(0, P * W, gl.SliceLayout(0, word_layout(config)))
    cells = call.statistics + (tile.b * call.sizes.heads + tile.h) * (2 * P * F)
    cells = cells + (c // W * F + tile.first + c % W)
    f = tile.first + gl.arange(0, W, gl.SliceLayout(0, row_layout(config)))[None, :]
    theta = call.theta + tile.h * (call.numbers.theta_u * config.spec.THETA_VEC) + f * call.numbers.theta_f
    step = phase_step(gl.load(theta, mask=f < config.spec.E, other=0.0))
    if call.grad is None:
        mbarrier.wait(call.full, phase)
        top1, top2, total1, total2 = column_statistics(step, tile, call, config)
    else:
        known = share_columns(gl.load(cells), gl.log2(gl.load(cells + P * F)), call, config)
        mbarrier.wait(call.full, phase)
        total1, total2 = sum_tile(known, step, tile, call, config)
        top1 = gl.full_like(total1, 1.0)
        top2 = top1
        thread_barrier()
    keep_columns(0, top1, top2, call, config)
    keep_columns(1, total1, total2, call, config)
    top, total = combine_parts(tile, call, config)
    if call.grad is None:
        scale = 1.0 / gl.where(total != 0.0, total, 1.0)
        if tile.part == 0:
            gl.store(cells, top)
            gl.store(cells + P * F, scale)
        known = share_columns(top, gl.log2(scale), call, config)
        c1, c2 = total1, total2
    else:
        c1, c2, _, _ = share_columns(total, total, call, config)
    write_tile(known, c1, c2, step, tile, call, config)


@gluon.jit
def run_tiles(x, grad, out, statistics, words, theta, offset, sizes, numbers, out_strides, config: gl.constexpr):
    """Runs all tiles of a program."""
    BLOCKS: gl.constexpr = config.TOKENS // config.SUB
    full = barriers(1)
    init_each(full)
    fence_async_shared()
    thread_barrier()
    x_tile = gl.allocate_shared_memory(x.dtype, [config.P * BLOCKS, 1, 1, config.SUB, config.W], x.layout)
    grad_tile = x_tile
    if grad is not None:
        grad_tile = gl.allocate_shared_memory(x.dtype, [2 * BLOCKS, 1, 1, config.SUB, config.W], x.layout)
    columns = gl.allocate_shared_memory(gl.float32, [2, config.P * config.W], PLAIN)
    call = SlabCall(
        x, grad, out, statistics, words, theta, None, offset, sizes, numbers, out_strides, x_tile, grad_tile, full.index(0), columns
    )  # fmt: skip
    number = gl.program_id(0)
    copy_tile(number, call, config)
    for i in range(sizes.rounds):
        if number < sizes.tiles:
            run_tile(number, i & 1, call, config)
            thread_barrier()
            copy_tile(number + gl.num_programs(0), call, config)
        number += gl.num_programs(0)


@gluon.jit
def slab_forward_kernel(
    x, theta, position_ids, offsets, cu_seqlens, out, statistics, partial, words, offset: gl.int32, sizes: SequenceSizes,
    numbers: AngleNumbers, out_strides: RowStrides, config: gl.constexpr,
):  # fmt: skip
    """Computes the output and statistics. What lies between ``theta`` and ``out`` is None, and so is ``partial``."""
    run_tiles(x, None, out, statistics, words, theta, offset, sizes, numbers, out_strides, config)


@gluon.jit
def slab_backward_kernel(
    x, theta, position_ids, offsets, cu_seqlens, grad, dx, statistics, partial, words, dtheta, offset: gl.int32,
    sizes: SequenceSizes, numbers: AngleNumbers, dx_strides: RowStrides, config: gl.constexpr,
):  # fmt: skip
    """Computes the gradient of x. What lies between ``theta`` and ``grad`` is None, and so are ``partial`` and ``dtheta``."""
    run_tiles(x, grad, dx, statistics, words, theta, offset, sizes, numbers, dx_strides, config)
