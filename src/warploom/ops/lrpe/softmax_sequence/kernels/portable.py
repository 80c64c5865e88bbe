"""Triton kernels of LRPE with softmax over the sequence.

Softmax over the tokens needs two looks at ``x``: one for each column's sum, one to apply it. Only the
first should reach device memory. There are two ways:

- ``strip_kernel``: a program owns a strip of columns of one (batch entry, head) and walks down it twice. What it
  has just read is still in cache when it comes back, as long as all strips in flight fit there: short sequences.
- ``reduce_chunk_kernel``, ``combine_kernel`` and ``apply_kernel``: long sequences, and packed ones. The application
  begins where the reduction ended, with what is still in cache.

Shapes. A column is a feature of one (group, head); a group is a batch entry or a packed sequence. Columns come in
P members of F angles: P = 1 for ``cosine``, 2 for the pairs of ``rotate``; a tile is (R, F) per member. Statistics
are float32, (groups, H, 2, P, F): a shift and the reciprocal of the sum of
e^(x − shift). The backward has one sum a column instead, (groups, H, P, F): that of y · dy, which softmax subtracts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import exponential, exponential_float32
from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin
from warploom.ops.lrpe.kernels.angles import AngleNumbers, Angles, load_frequencies, token_positions
from warploom.ops.lrpe.kernels.backward import pair_gradient
from warploom.ops.lrpe.kernels.forward import turn
from warploom.ops.lrpe.kernels.rows import Strides, load_input, load_pair, store_input, store_pair

LARGEST_SUM = tl.constexpr(2.0**32)


class Sizes(NamedTuple):
    """Of the axes of x but features."""

    tokens: tl.int32
    heads: tl.int32
    batch: tl.int32


class Tile(NamedTuple):
    """Rows and angles that a program computes at a time, and loads under way at once in its loops."""

    R: int
    F: int
    STAGES: int = 1


class Statistics(NamedTuple):
    """Of both members' columns, (1 or R, F) each."""

    shift1: tl.tensor
    shift2: tl.tensor
    scale1: tl.tensor
    scale2: tl.tensor


class Strip(NamedTuple):
    """Columns of one (batch entry, head) from angle ``first`` on."""

    b: tl.tensor
    h: tl.tensor
    first: tl.tensor
    steps: tl.tensor
    """Of their phases, from `load_frequencies`."""


# ----------------------------------------------------------------------------------------------------------
# Columns: small float32 vectors, one number per feature
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_columns(base, first, F: tl.constexpr, BLOCK_F: tl.constexpr, P: tl.constexpr):
    """Both members' columns from ``base`` (1 or R, 1), which points at feature 0: (1 or R, F) each."""
    f = (first + tl.arange(0, BLOCK_F))[None, :]
    c1 = tl.load(base + f, mask=f < F, other=0.0)
    c2 = c1
    if P == 2:
        c2 = tl.load(base + F + f, mask=f < F, other=0.0)
    return c1, c2


@triton.jit
def store_columns(base, c1, c2, first, F: tl.constexpr, BLOCK_F: tl.constexpr, P: tl.constexpr):
    """The inverse of `load_columns` for columns (F,) each."""
    f = first + tl.arange(0, BLOCK_F)
    tl.store(base + f, c1, mask=f < F)
    if P == 2:
        tl.store(base + F + f, c2, mask=f < F)


@triton.jit
def load_statistics(statistics, column, first, F: tl.constexpr, BLOCK_F: tl.constexpr, P: tl.constexpr):
    """Both members' shifts and reciprocal sums of the (group, head) numbers ``column`` (1 or R, 1)."""
    base = statistics + column * (2 * P * F)
    shift1, shift2 = load_columns(base, first, F, BLOCK_F, P)
    scale1, scale2 = load_columns(base + P * F, first, F, BLOCK_F, P)
    return Statistics(shift1, shift2, scale1, scale2)


@triton.jit
def power(x, shift, EXACT: tl.constexpr):
    """e^(x − shift) in float32. The difference is taken first: of 16-bit numbers it is exact, however large they are.

    ``EXACT``: for results in float32.
    """
    if EXACT:
        y = exponential_float32(x.to(tl.float32) - shift)
    else:
        y = exponential(x.to(tl.float32) - shift)
    return y


@triton.jit
def weights_pair(x1, x2, statistics, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Softmax of both members' tiles."""
    y1 = power(x1, statistics.shift1, EXACT) * statistics.scale1
    y2 = y1
    if KIND != "cosine":
        y2 = power(x2, statistics.shift2, EXACT) * statistics.scale2
    return y1, y2


@triton.jit
def column_sum(terms, EXACT: tl.constexpr):
    """Sum of a tile (R, F) over its rows, float32 (F,); ``EXACT``: rounded once."""
    if EXACT:
        terms = terms.to(tl.float64)
    return tl.sum(terms, axis=0).to(tl.float32)


@triton.jit
def overflows(total1, total2):
    """Whether a sum of powers is too large for its shift, infinite or NaN."""
    good = (total1 < LARGEST_SUM) & (total2 < LARGEST_SUM)
    return tl.max(tl.where(good, 0, 1), axis=0) != 0


@triton.jit
def shift_of(top):
    """Maxima over the rows of a tile (R, F): (1, F). −inf where there is nothing else, made zero: it is a shift."""
    top = tl.max(top, axis=0)[None, :]
    return tl.where(top == float("-inf"), 0.0, top)


# ----------------------------------------------------------------------------------------------------------
# Tiles of tokens of one (batch entry, head)
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def sum_powers(
    x_rows, strides, start, end, shift1, shift2, first, spec: tl.constexpr, EXACT: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Columns' sums of powers over tokens ``start`` to ``end``, (F,) each; ``x_rows`` (1, 1) point at token 0."""
    total1 = tl.zeros((tile.R, tile.F), tl.float64 if EXACT else tl.float32)
    total2 = total1
    for row in tl.range(start, end, tile.R, num_stages=tile.STAGES):
        n = row + tl.arange(0, tile.R)
        inside = (n < end)[:, None]
        rows = x_rows + n.to(tl.int64)[:, None] * (strides.n * spec.VEC)
        x1, x2 = load_input(rows, n < end, strides.f, first, spec, tile.F)
        total1 += tl.where(inside, power(x1, shift1, EXACT), 0.0)
        if spec.KIND != "cosine":
            total2 += tl.where(inside, power(x2, shift2, EXACT), 0.0)
    total1 = column_sum(total1, EXACT)
    if spec.KIND == "cosine":
        total2 = total1
    else:
        total2 = column_sum(total2, EXACT)
    return total1, total2


@triton.jit
def column_statistics(
    x_rows, strides, start, end, first, spec: tl.constexpr, EXACT: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Columns' shifts and sums of powers over tokens ``start`` to ``end``, (F,) each.

    The shift is the column's first entry, which is usually as good as the maximum and costs no reduction: a sum then
    has at least one term near one, and is only too large where the column rises by 22 or so.
    """
    one = tl.full((1,), True, tl.int1)
    first_row = x_rows + start.to(tl.int64) * (strides.n * spec.VEC)
    f1, f2 = load_input(first_row, one, strides.f, first, spec, tile.F)
    shift1 = f1.to(tl.float32)
    shift2 = f2.to(tl.float32)
    total1, total2 = sum_powers(x_rows, strides, start, end, shift1, shift2, first, spec, EXACT, tile)
    if overflows(total1, total2):
        top1 = tl.full((tile.R, tile.F), float("-inf"), tl.float32)
        top2 = top1
        for row in tl.range(start, end, tile.R, num_stages=tile.STAGES):
            n = row + tl.arange(0, tile.R)
            inside = (n < end)[:, None]
            rows = x_rows + n.to(tl.int64)[:, None] * (strides.n * spec.VEC)
            x1, x2 = load_input(rows, n < end, strides.f, first, spec, tile.F)
            top1 = tl.where(inside, tl.maximum(top1, x1.to(tl.float32)), top1)
            top2 = tl.where(inside, tl.maximum(top2, x2.to(tl.float32)), top2)
        shift1 = shift_of(top1)
        shift2 = shift_of(top2)
        total1, total2 = sum_powers(x_rows, strides, start, end, shift1, shift2, first, spec, EXACT, tile)
    return tl.reshape(shift1, (tile.F,)), tl.reshape(shift2, (tile.F,)), total1, total2


@triton.jit
def tile_angles(n, mask, strip, angles, spec: tl.constexpr, EXACT: tl.constexpr, BLOCK_F: tl.constexpr):
    """Positions (R, 1 or F) of tokens, and their angles' cosines and sines (R, F)."""
    axis = (strip.first + tl.arange(0, BLOCK_F)) // spec.E
    position = token_positions(n, mask, strip.b, tl.zeros_like(n) + strip.h, axis, angles, spec.AXES)
    whole, rest, unit = strip.steps
    cosine, sine = cos_sin(position, whole, rest, unit, not EXACT)
    return position, cosine, sine


@triton.jit
def gradient_of_weights(
    x_rows, grad_rows, mask, x_f, grad_f, cosine, sine, statistics, first,
    spec: tl.constexpr, EXACT: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Weights of both members, and the gradients that reach them before the softmax: (R, F) each."""
    g1, g2 = load_pair(grad_rows, mask, grad_f, first, spec, BLOCK_F)
    x1, x2 = load_input(x_rows, mask, x_f, first, spec, BLOCK_F)
    d1, d2 = pair_gradient(g1.to(tl.float32), g2.to(tl.float32), cosine, sine)
    y1, y2 = weights_pair(x1, x2, statistics, spec.KIND, EXACT)
    return y1, y2, d1, d2


@triton.jit
def sum_gradients(
    x_rows, grad_rows, x_strides, grad_strides, start, end, statistics, strip, angles,
    spec: tl.constexpr, EXACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Columns' sums of y · dy over tokens ``start`` to ``end``, (F,) each."""
    c1 = tl.zeros((tile.R, tile.F), tl.float64 if EXACT else tl.float32)
    c2 = c1
    for row in tl.range(start, end, tile.R, num_stages=tile.STAGES):
        n = row + tl.arange(0, tile.R)
        mask = n < end
        n_wide = n.to(tl.int64)[:, None]
        _, cosine, sine = tile_angles(n, mask, strip, angles, spec, EXACT, tile.F)
        y1, y2, d1, d2 = gradient_of_weights(
            x_rows + n_wide * (x_strides.n * spec.VEC), grad_rows + n_wide * (grad_strides.n * spec.VEC), mask,
            x_strides.f, grad_strides.f, cosine, sine, statistics, strip.first, spec, EXACT, tile.F,
        )  # fmt: skip
        c1 += tl.where(mask[:, None], y1 * d1, 0.0)
        if spec.KIND != "cosine":
            c2 += tl.where(mask[:, None], y2 * d2, 0.0)
    c1 = column_sum(c1, EXACT)
    if spec.KIND == "cosine":
        c2 = c1
    else:
        c2 = column_sum(c2, EXACT)
    return c1, c2


@triton.jit
def angle_gradient(y1, y2, d1, d2, KIND: tl.constexpr):
    """Gradient of the angle (R, F)."""
    if KIND == "cosine":
        dphi = y1 * d2
    else:
        dphi = tl.fma(y1, d2, -(y2 * d1))
    return dphi


@triton.jit
def softmax_gradient(y, d, c):
    """Gradient of a column's entries from that of its weights and the column's sum of y · dy."""
    return y * (d - c)


@triton.jit
def store_gradient(
    out_rows, y1, y2, d1, d2, c1, c2, mask, out_f, position, first,
    spec: tl.constexpr, THETA: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x of a tile (R, F), from weights y and their gradients d, and the columns' sums ``c``.

    Load ``c`` after the tile: nothing needs it before, and the tile is what takes long to come.
    Returns what the tile adds to the gradient of theta, (R, F) in float64, where ``THETA``.
    """
    e1 = softmax_gradient(y1, d1, c1)
    e2 = softmax_gradient(y2, d2, c2)
    store_input(out_rows, e1, e2, mask, out_f, first, spec, BLOCK_F)
    moment = 0.0
    if THETA:
        dphi = tl.where(mask[:, None], angle_gradient(y1, y2, d1, d2, spec.KIND), 0.0)
        moment = position.to(tl.float64) * dphi.to(tl.float64)
    return moment


@triton.jit
def store_softmax(
    x_rows, out_rows, mask, x_f, out_f, cosine, sine, statistics, first,
    spec: tl.constexpr, EXACT: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write the turned weights of a tile (R, F) whose columns' statistics are known."""
    x1, x2 = load_input(x_rows, mask, x_f, first, spec, BLOCK_F)
    y1, y2 = weights_pair(x1, x2, statistics, spec.KIND, EXACT)
    o1, o2 = turn(y1, y2, cosine, sine, spec.KIND)
    store_pair(out_rows, o1, o2, mask, out_f, first, spec, BLOCK_F)


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def combine_kernel(
    partial, columns, cu_seqlens,
    heads: tl.int32, chunk_rows: tl.int32, cu_stride: tl.int64, slots: tl.int32,
    BACKWARD: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One member's columns of a (group, head), from its chunks' partial results, in the order of the chunks."""
    K: tl.constexpr = 1 if BACKWARD else 2
    member = tl.program_id(0) % P
    unit = tl.program_id(0) // P
    group, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    first_slot = group * slots  # `reduce_chunk_kernel` says which slots
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + group * cu_stride).to(tl.int32)
        end = tl.load(cu_seqlens + (group + 1) * cu_stride).to(tl.int32)
        first_slot = start // chunk_rows + group
        slots = tl.where(end > start, (end - 1) // chunk_rows - start // chunk_rows + 1, 0)
    f = tl.arange(0, BLOCK_F)
    partial += h * (K * P * F) + (member * F + f)[None, :]
    columns += (group * heads + h) * (K * P * F) + member * F + f
    top = tl.full((BLOCK_F,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float64)
    for start in range(0, slots, BLOCK_P):
        slot = start + tl.arange(0, BLOCK_P)
        inside = (slot < slots)[:, None] & (f < F)[None, :]
        cells = partial + ((first_slot + slot) * heads * (K * P * F))[:, None]
        if BACKWARD:
            total += tl.sum(tl.load(cells, mask=inside, other=0.0).to(tl.float64), axis=0)
        else:
            tops = tl.load(cells, mask=inside, other=float("-inf"))
            sums = tl.load(cells + P * F, mask=inside, other=0.0)
            new = tl.maximum(top, tl.max(tops, axis=0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            total = total * exponential_float32(top - shift)
            total += tl.sum(sums.to(tl.float64) * exponential_float32(tops - shift[None, :]), axis=0)
            top = new
    if BACKWARD:
        tl.store(columns, total.to(tl.float32), mask=f < F)
    else:
        tl.store(columns, top, mask=f < F)
        tl.store(columns + P * F, (1.0 / tl.where(total == 0.0, 1.0, total)).to(tl.float32), mask=f < F)


@triton.jit
def reduce_chunk_kernel(
    x, grad, statistics, partial, theta, ids, offsets, cu_seqlens, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, x_strides: Strides, grad_strides: Strides, out_strides: Strides,
    chunks: tl.int32, chunk_rows: tl.int32,
    spec: tl.constexpr, BACKWARD: tl.constexpr, EXACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Partial columns of a chunk, ``chunk_rows`` tokens of one (batch entry, head).

    A chunk leaves one set of them for each packed sequence it touches, in slot chunk + sequence: both only grow from
    token to token, so no two share a slot.
    """
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    F: tl.constexpr = spec.F
    PACKED: tl.constexpr = cu_seqlens is not None
    heads, tokens, cu_stride = sizes.heads, sizes.tokens, numbers.cu_stride
    program = tl.program_id(0)  # heads fastest: neighbours in memory
    chunk = program // heads % chunks
    unit = program // (heads * chunks) * heads + program % heads
    b, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    x_rows = x + (b * (x_strides.s * spec.VEC) + h * (x_strides.u * spec.VEC) + tl.zeros((1, 1), tl.int64))
    chunk_start = chunk * chunk_rows
    chunk_end = tl.minimum(chunk_start + chunk_rows, tokens)

    # A group is a batch entry, or a packed sequence.
    first_group = 0
    last_group = 0
    if PACKED:
        ends = tl.minimum(chunk_start + tl.arange(0, 2) * (chunk_rows - 1), tokens - 1)
        touched = sequence_of(ends, cu_seqlens, cu_stride, numbers.sequences)
        first_group = tl.min(touched, axis=0)
        last_group = tl.max(touched, axis=0)
    if BACKWARD:
        angles = Angles(theta, ids, offsets, cu_seqlens, None, offset, numbers, None)
        grad_rows = grad + (
            b * (grad_strides.s * spec.VEC) + h * (grad_strides.u * spec.VEC) + tl.zeros((1, 1), tl.int64)
        )
        strip = Strip(b, h, 0, load_frequencies(angles, h, 0, spec, tile.F))
    for g in range(first_group, last_group + 1):
        to = partial + ((b * chunks + chunk + g) * heads + h) * ((1 if BACKWARD else 2) * P * F)
        start = chunk_start
        end = chunk_end
        group = b + tl.zeros((1, 1), tl.int64)
        if PACKED:  # a sequence without tokens leaves a slot that nobody reads
            start = tl.maximum(start, tl.load(cu_seqlens + g * cu_stride).to(tl.int32))
            start = tl.minimum(start, tokens - 1)
            end = tl.minimum(end, tl.load(cu_seqlens + (g + 1) * cu_stride).to(tl.int32))
            group = g + tl.zeros((1, 1), tl.int64)
        if BACKWARD:
            known = load_statistics(statistics, group * heads + h, 0, F, tile.F, P)
            c1, c2 = sum_gradients(
                x_rows, grad_rows, x_strides, grad_strides, start, end, known, strip, angles, spec, EXACT, tile
            )
            store_columns(to, c1, c2, 0, F, tile.F, P)
        else:
            shift1, shift2, total1, total2 = column_statistics(x_rows, x_strides, start, end, 0, spec, EXACT, tile)
            # Entries of −inf alone have no shift, or it could be larger than those of other chunks.
            shift1 = tl.where(total1 == 0.0, float("-inf"), shift1)
            shift2 = tl.where(total2 == 0.0, float("-inf"), shift2)
            store_columns(to, shift1, shift2, 0, F, tile.F, P)
            store_columns(to + P * F, total1, total2, 0, F, tile.F, P)


@triton.jit
def apply_kernel(
    x, grad, out, statistics, sums, dtheta, theta, ids, offsets, cu_seqlens, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, x_strides: Strides, grad_strides: Strides, out_strides: Strides, tiles: tl.int32,
    spec: tl.constexpr, BACKWARD: tl.constexpr, EXACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The result from the columns' statistics (and ``sums``, backward): a tile of one (batch entry, head)."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    F: tl.constexpr = spec.F
    VEC: tl.constexpr = spec.VEC
    THETA: tl.constexpr = dtheta is not None
    heads, tokens = sizes.heads, sizes.tokens
    angles = Angles(theta, ids, offsets, cu_seqlens, None, offset, numbers, None)
    # From the last tile to the first: the reduction ended there, and left it in the cache.
    program = sizes.batch * heads * tiles - 1 - tl.program_id(0)
    block = program // heads % tiles
    unit = program // (heads * tiles) * heads + program % heads
    b, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    n = block * tile.R + tl.arange(0, tile.R)
    mask = n < tokens
    n_wide = n.to(tl.int64)[:, None]
    x_rows = x + (b * (x_strides.s * VEC) + h * (x_strides.u * VEC)) + n_wide * (x_strides.n * VEC)
    out_rows = out + (b * (out_strides.s * VEC) + h * (out_strides.u * VEC)) + n_wide * (out_strides.n * VEC)

    # The group of a row: its batch entry, or its own packed sequence.
    group = b + tl.zeros((1,), tl.int64)
    if cu_seqlens is not None:
        last = tl.minimum(n, tokens - 1)
        group = sequence_of(last, cu_seqlens, numbers.cu_stride, numbers.sequences).to(tl.int64)
    column = (group * heads + h)[:, None]
    known = load_statistics(statistics, column, 0, F, tile.F, P)
    strip = Strip(b, h, 0, load_frequencies(angles, h, 0, spec, tile.F))
    position, cosine, sine = tile_angles(n, mask, strip, angles, spec, EXACT, tile.F)
    if BACKWARD:
        grad_rows = (
            grad + (b * (grad_strides.s * VEC) + h * (grad_strides.u * VEC)) + n_wide * (grad_strides.n * VEC)
        )
        y1, y2, d1, d2 = gradient_of_weights(
            x_rows, grad_rows, mask, x_strides.f, grad_strides.f, cosine, sine, known, 0, spec, EXACT, tile.F
        )
        c1, c2 = load_columns(sums + column * (P * F), 0, F, tile.F, P)
        moment = store_gradient(
            out_rows, y1, y2, d1, d2, c1, c2, mask, out_strides.f, position, 0, spec, THETA, tile.F
        )
        if THETA:
            f = tl.arange(0, tile.F)
            part = (b * tiles + block) * heads + h
            tl.store(dtheta + part * F + f, tl.sum(moment, axis=0), mask=f < F)
    else:
        store_softmax(
            x_rows, out_rows, mask, x_strides.f, out_strides.f, cosine, sine, known, 0, spec, EXACT, tile.F
        )


@triton.jit
def strip_kernel(
    x, grad, out, statistics, dtheta, theta, ids, offsets, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, x_strides: Strides, grad_strides: Strides, out_strides: Strides,
    spec: tl.constexpr, BACKWARD: tl.constexpr, EXACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Walk twice down ``tile.F`` angles' columns of one (batch entry, head): to reduce them, and to apply."""
    P: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    F: tl.constexpr = spec.F
    VEC: tl.constexpr = spec.VEC
    THETA: tl.constexpr = dtheta is not None
    STRIPS: tl.constexpr = (F + tile.F - 1) // tile.F
    heads, tokens = sizes.heads, sizes.tokens
    angles = Angles(theta, ids, offsets, None, None, offset, numbers, None)
    program = tl.program_id(0)  # strips fastest: neighbours in memory
    first = program % STRIPS * tile.F
    unit = program // STRIPS
    b, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    one_row = tl.zeros((1, 1), tl.int64)
    x_rows = x + (b * (x_strides.s * VEC) + h * (x_strides.u * VEC) + one_row)
    out_rows = out + (b * (out_strides.s * VEC) + h * (out_strides.u * VEC) + one_row)
    strip = Strip(b, h, first, load_frequencies(angles, h, first, spec, tile.F))

    # Down once: the columns' statistics.
    if BACKWARD:
        grad_rows = grad + (b * (grad_strides.s * VEC) + h * (grad_strides.u * VEC) + one_row)
        known = load_statistics(statistics, unit + one_row, first, F, tile.F, P)
        c1, c2 = sum_gradients(
            x_rows, grad_rows, x_strides, grad_strides, 0, tokens, known, strip, angles, spec, EXACT, tile
        )
        c1 = c1[None, :]
        c2 = c2[None, :]
    else:
        shift1, shift2, total1, total2 = column_statistics(
            x_rows, x_strides, tokens * 0, tokens, first, spec, EXACT, tile
        )
        inside = first + tl.arange(0, tile.F) < F
        scale1 = tl.div_rn(1.0, tl.where(inside, total1, 1.0))
        scale2 = tl.div_rn(1.0, tl.where(inside, total2, 1.0))
        columns = statistics + unit.to(tl.int64) * (2 * P * F)
        store_columns(columns, shift1, shift2, first, F, tile.F, P)
        store_columns(columns + P * F, scale1, scale2, first, F, tile.F, P)
        known = Statistics(shift1[None, :], shift2[None, :], scale1[None, :], scale2[None, :])

    # Down again: apply them.
    total = tl.zeros((tile.R, tile.F), tl.float64)
    for start in tl.range(0, tokens, tile.R, num_stages=tile.STAGES):
        n = start + tl.arange(0, tile.R)
        mask = n < tokens
        n_wide = n.to(tl.int64)[:, None]
        position, cosine, sine = tile_angles(n, mask, strip, angles, spec, EXACT, tile.F)
        to = out_rows + n_wide * (out_strides.n * VEC)
        rows = x_rows + n_wide * (x_strides.n * VEC)
        if BACKWARD:
            y1, y2, d1, d2 = gradient_of_weights(
                rows, grad_rows + n_wide * (grad_strides.n * VEC), mask, x_strides.f, grad_strides.f,
                cosine, sine, known, first, spec, EXACT, tile.F,
            )  # fmt: skip
            moment = store_gradient(
                to, y1, y2, d1, d2, c1, c2, mask, out_strides.f, position, first, spec, THETA, tile.F
            )
            if THETA:
                total += moment
        else:
            store_softmax(
                rows, to, mask, x_strides.f, out_strides.f, cosine, sine, known, first, spec, EXACT, tile.F
            )
    if THETA:
        f = first + tl.arange(0, tile.F)
        tl.store(dtheta + unit.to(tl.int64) * F + f, tl.sum(total, axis=0), mask=f < F)
