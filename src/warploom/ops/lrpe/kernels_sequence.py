"""Triton kernels of LRPE with softmax over the sequence.

Softmax over the tokens needs two looks at ``x``: one for each column's sum, one to apply it. Only the
first should reach device memory. There are two ways:

- ``strip_kernel``: a program owns a strip of columns of one (batch entry, head) and walks down it twice. What it
  has just read is still in cache when it comes back, as long as all strips in flight fit there: short sequences.
- ``chunk_kernel`` to reduce tiles of rows, ``combine_kernel``, and ``chunk_kernel`` to apply: long sequences, and
  packed ones. The application begins where the reduction ended, with what is still in cache.

Shapes. A column is a feature of one (group, head); a group is a batch entry or a packed sequence. Columns come in
P members of F angles: P = 1 for ``cosine``, 2 for the pairs of ``rotate``; a tile is (R, F) per member. Statistics
are float32, (groups, H, 2, P, F): a shift and the reciprocal of the sum of e^(x − shift). The backward has one sum a column instead,
(groups, H, P, F): that of y · dy, which softmax subtracts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.activations import LOG2_E, exponential_float32, power_of_two
from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin, phase_step
from warploom.ops.lrpe.kernels import (
    load_input,
    load_pair,
    pair_gradient,
    store_input,
    store_pair,
    token_positions,
    turn,
)

LARGEST_SUM = tl.constexpr(2.0**100)

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
    return shift1, shift2, scale1, scale2


@triton.jit
def power(x, shift):
    """e^(x − shift) in float32, as exact as the dtype of ``x`` can tell."""
    if x.dtype == tl.float32:
        y = exponential_float32(x - shift)
    else:
        y = power_of_two(tl.fma(x.to(tl.float32), LOG2_E, -(shift * LOG2_E)))
    return y


@triton.jit
def weights_pair(x1, x2, shift1, shift2, scale1, scale2, KIND: tl.constexpr):
    """Softmax of both members' tiles from their columns' shifts and reciprocal sums."""
    y1 = power(x1, shift1) * scale1
    y2 = y1
    if KIND != "cosine":
        y2 = power(x2, shift2) * scale2
    return y1, y2


@triton.jit
def overflows(total1, total2):
    """Whether a sum of powers is too large for its shift, infinite or NaN."""
    good = (total1 < LARGEST_SUM) & (total2 < LARGEST_SUM)
    return tl.max(tl.where(good, 0, 1), axis=0) != 0


@triton.jit
def masked_maximum(x, mask):
    """Maximum over the rows of a tile (R, F): (F,). −inf where there are none, made zero: it is a shift."""
    top = tl.max(tl.where(mask[:, None], x.to(tl.float32), float("-inf")), axis=0)
    return tl.where(top == float("-inf"), 0.0, top)


# ----------------------------------------------------------------------------------------------------------
# A tile of tokens of one (batch entry, head): reduced over its rows, or applied
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_frequencies(theta, h, first, theta_u, theta_f, AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
                     THETA_VEC: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Phase steps of a head (1, F): see `phase_step`."""
    f = first + tl.arange(0, BLOCK_F)
    turned = (f // E < AXES) & (f < F)
    e = f if E >= F else f % E
    cells = theta + h * (theta_u * THETA_VEC) + (e if THETA_VEC > 1 else e * theta_f)
    return phase_step(tl.load(cells, mask=turned, other=0.0)[None, :])


@triton.jit
def reduce_forward(x_rows, first_row, mask, x_f, KIND: tl.constexpr, UNIT: tl.constexpr,
                   F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Columns' shifts and sums of powers over the rows of a tile: (F,) each.

    The shift is taken from the column's ``first_row`` (1, 1), which is usually as good as the maximum and costs no
    reduction: a sum then has at least one term near one, and only overflows where the column rises by 69 or more.
    """
    x1, x2 = load_input(x_rows, mask, x_f, 0, KIND, UNIT, F, BLOCK_F)
    one = tl.full((1,), True, tl.int1)
    f1, f2 = load_input(first_row, one, x_f, 0, KIND, UNIT, F, BLOCK_F)
    shift1 = f1.to(tl.float32)
    shift2 = f2.to(tl.float32)
    inside = mask[:, None]
    total1 = tl.sum(tl.where(inside, power(x1, shift1), 0.0), axis=0)
    total2 = total1
    if KIND != "cosine":
        total2 = tl.sum(tl.where(inside, power(x2, shift2), 0.0), axis=0)
    shift1 = tl.reshape(shift1, (BLOCK_F,))
    shift2 = tl.reshape(shift2, (BLOCK_F,))
    if overflows(total1, total2):
        shift1 = masked_maximum(x1, mask)
        total1 = tl.sum(tl.where(inside, power(x1, shift1[None, :]), 0.0), axis=0)
        if KIND != "cosine":
            shift2 = masked_maximum(x2, mask)
            total2 = tl.sum(tl.where(inside, power(x2, shift2[None, :]), 0.0), axis=0)
        # Entries of −inf alone have no shift, lest it be larger than those of other chunks.
        shift1 = tl.where(total1 == 0.0, float("-inf"), shift1)
        shift2 = tl.where(total2 == 0.0, float("-inf"), shift2)
    return shift1, shift2, total1, total2


@triton.jit
def tile_angles(
    n, mask, b, h, theta, ids, offsets, cu_seqlens, theta_u, theta_f, ids_s, ids_n, ids_u, ids_k,
    offsets_s, offsets_u, offset, prefix, size1, size2, size3, sequences, cu_stride,
    AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr, THETA_VEC: tl.constexpr, HALF: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Positions (R, 1 or F) of tokens of one (batch entry, head), and their angles' cosines and sines (R, F)."""
    whole, rest, unit = load_frequencies(theta, h, 0, theta_u, theta_f, AXES, F, E, THETA_VEC, BLOCK_F)
    position = token_positions(
        n, mask, b, tl.zeros_like(n) + h, tl.arange(0, BLOCK_F) // E, ids, offsets, cu_seqlens,
        ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
        offset, prefix, size1, size2, size3, sequences, cu_stride, AXES,
    )  # fmt: skip
    cosine, sine = cos_sin(position, whole, rest, unit, HALF)
    return position, cosine, sine


@triton.jit
def gradient_of_weights(x_rows, grad_rows, mask, x_f, grad_f, cosine, sine, shift1, shift2, scale1, scale2,
                        first, KIND: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr,
                        BLOCK_F: tl.constexpr):  # fmt: skip
    """Weights of both members, and the gradients that reach them before the softmax: (R, F) each."""
    g1, g2 = load_pair(grad_rows, mask, grad_f, first, UNIT, KIND == "interleaved", F, BLOCK_F)
    x1, x2 = load_input(x_rows, mask, x_f, first, KIND, UNIT, F, BLOCK_F)
    d1, d2 = pair_gradient(g1.to(tl.float32), g2.to(tl.float32), cosine, sine)
    y1, y2 = weights_pair(x1, x2, shift1, shift2, scale1, scale2, KIND)
    return y1, y2, d1, d2


@triton.jit
def reduce_backward(y1, y2, d1, d2, mask, c1, c2, KIND: tl.constexpr):
    """Columns' sums of y · dy after the rows of one more tile."""
    c1 += tl.sum(tl.where(mask[:, None], y1 * d1, 0.0), axis=0)
    if KIND != "cosine":
        c2 += tl.sum(tl.where(mask[:, None], y2 * d2, 0.0), axis=0)
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


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------

_INTEGERS = (  # all of them run-time values, and never a reason to compile
    "offset tokens heads batch theta_u theta_f ids_s ids_n ids_u ids_k offsets_s offsets_u table_n table_u "
    "prefix size1 size2 size3 sequences cu_stride "
    "x_b x_n x_h x_f grad_b grad_n grad_h grad_f out_b out_n out_h out_f"
).split()


@triton.jit(do_not_specialize=["heads", "chunk_rows", "cu_stride", "slots"])
def combine_kernel(
    partial, columns, cu_seqlens,
    heads: tl.int32, chunk_rows: tl.int32, cu_stride: tl.int64, slots: tl.int32,
    BACKWARD: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One (group, head)'s columns a program, from its chunks' partial results, in the order of the chunks."""
    K: tl.constexpr = 1 if BACKWARD else 2
    unit = tl.program_id(0)
    group, h = (unit // heads).to(tl.int64), unit % heads
    first_slot = group * slots  # `chunk_kernel` says which slots
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + group * cu_stride).to(tl.int32)
        end = tl.load(cu_seqlens + (group + 1) * cu_stride).to(tl.int32)
        first_slot = start // chunk_rows + group
        slots = tl.where(end > start, (end - 1) // chunk_rows - start // chunk_rows + 1, 0)
    partial += h * (K * P * F)
    columns += (group * heads + h) * (K * P * F)
    f = tl.arange(0, BLOCK_F)
    for member in tl.static_range(P):
        top = tl.full((BLOCK_F,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_F,), tl.float32)
        for start in range(0, slots, BLOCK_P):
            slot = start + tl.arange(0, BLOCK_P)
            inside = (slot < slots)[:, None] & (f < F)[None, :]
            cells = (
                partial
                + ((first_slot + slot).to(tl.int64) * (heads * K * P * F))[:, None]
                + (member * F + f)[None, :]
            )
            if BACKWARD:
                total += tl.sum(tl.load(cells, mask=inside, other=0.0), axis=0)
            else:
                tops = tl.load(cells, mask=inside, other=float("-inf"))
                sums = tl.load(cells + P * F, mask=inside, other=0.0)
                new = tl.maximum(top, tl.max(tops, axis=0))
                shift = tl.where(new == float("-inf"), 0.0, new)
                total = total * power(top, shift)
                total += tl.sum(sums * power(tops, shift[None, :]), axis=0)
                top = new
        if BACKWARD:
            tl.store(columns + member * F + f, total, mask=f < F)
        else:
            tl.store(columns + member * F + f, top, mask=f < F)
            tl.store(columns + (P + member) * F + f, tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total)), mask=f < F)


@triton.jit(do_not_specialize=[*_INTEGERS, "chunks"])
def chunk_kernel(
    x, grad, out, statistics, sums, partial, dtheta, theta, ids, offsets, cu_seqlens,
    offset: tl.int32, tokens: tl.int32, heads: tl.int32, batch: tl.int32, theta_u: tl.int64, theta_f: tl.int64,
    ids_s: tl.int64, ids_n: tl.int64, ids_u: tl.int64, ids_k: tl.int64,
    offsets_s: tl.int64, offsets_u: tl.int64, table_n: tl.int64, table_u: tl.int64,
    prefix: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32, sequences: tl.int32,
    cu_stride: tl.int64,
    x_b: tl.int64, x_n: tl.int64, x_h: tl.int64, x_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_f: tl.int64,
    chunks: tl.int32,
    KIND: tl.constexpr, REDUCES: tl.constexpr, BACKWARD: tl.constexpr, AXES: tl.constexpr,
    VEC: tl.constexpr, THETA_VEC: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Reduce (``REDUCES``) or apply one chunk, a tile of ``BLOCK_R`` tokens of one (batch entry, head).

    A chunk leaves one set of partial columns for each packed sequence it touches, in slot chunk + sequence: both
    only grow from token to token, so no two share a slot.
    """
    P: tl.constexpr = 1 if KIND == "cosine" else 2
    PACKED: tl.constexpr = cu_seqlens is not None
    THETA: tl.constexpr = dtheta is not None
    HALF: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16 and not THETA
    # Heads fastest: neighbours in memory. The application starts where the reduction ended, which the cache holds.
    program = tl.program_id(0)
    if not REDUCES:
        program = batch * heads * chunks - 1 - program
    chunk = program // heads % chunks
    unit = program // (heads * chunks) * heads + program % heads
    b, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    n = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = n < tokens
    n_wide = n.to(tl.int64)
    x_entry = x + (b * (x_b * VEC) + h * (x_h * VEC))
    x_rows = x_entry + (n_wide * (x_n * VEC))[:, None]
    out_rows = out + (b * (out_b * VEC) + h * (out_h * VEC)) + (n_wide * (out_n * VEC))[:, None]
    grad_rows = x_rows
    if BACKWARD:
        grad_rows = grad + (b * (grad_b * VEC) + h * (grad_h * VEC)) + (n_wide * (grad_n * VEC))[:, None]

    # The group of a row: its batch entry, or its own packed sequence.
    group = b + tl.zeros((1,), tl.int64)
    first_group = 0
    last_group = 0
    if PACKED:
        sequence = sequence_of(tl.minimum(n, tokens - 1), cu_seqlens, cu_stride, sequences)
        group = sequence.to(tl.int64)
        first_group = tl.min(sequence, axis=0)
        last_group = tl.max(sequence, axis=0)
    column = (group * heads + h)[:, None]

    if BACKWARD:
        position, cosine, sine = tile_angles(
            n, mask, b, h, theta, ids, offsets, cu_seqlens, theta_u, theta_f, ids_s, ids_n, ids_u, ids_k,
            offsets_s, offsets_u, offset, prefix, size1, size2, size3, sequences, cu_stride,
            AXES, F, E, THETA_VEC, HALF, BLOCK_F,
        )  # fmt: skip
        shift1, shift2, scale1, scale2 = load_statistics(statistics, column, 0, F, BLOCK_F, P)
        y1, y2, d1, d2 = gradient_of_weights(
            x_rows, grad_rows, mask, x_f, grad_f, cosine, sine, shift1, shift2, scale1, scale2, 0,
            KIND, UNIT, F, BLOCK_F,
        )  # fmt: skip
        if REDUCES:
            for g in range(first_group, last_group + 1):
                to = partial + ((b * chunks + chunk + g) * heads + h) * (P * F)
                own = mask
                if PACKED:
                    own = mask & (sequence == g)
                zero = tl.zeros((BLOCK_F,), tl.float32)
                c1, c2 = reduce_backward(y1, y2, d1, d2, own, zero, zero, KIND)
                store_columns(to, c1, c2, 0, F, BLOCK_F, P)
        else:
            c1, c2 = load_columns(sums + column * (P * F), 0, F, BLOCK_F, P)
            e1 = softmax_gradient(y1, d1, c1)
            e2 = softmax_gradient(y2, d2, c2)
            store_input(out_rows, e1, e2, mask, out_f, 0, KIND, UNIT, F, BLOCK_F)
            if THETA:
                dphi = tl.where(mask[:, None], angle_gradient(y1, y2, d1, d2, KIND), 0.0)
                f = tl.arange(0, BLOCK_F)
                part = (b * chunks + chunk) * heads + h
                total = tl.sum(position.to(tl.float64) * dphi.to(tl.float64), axis=0)
                tl.store(dtheta + part * F + f, total, mask=f < F)
    elif REDUCES:
        for g in range(first_group, last_group + 1):
            to = partial + ((b * chunks + chunk + g) * heads + h) * (2 * P * F)
            own = mask
            if PACKED:
                own = mask & (sequence == g)
            start = chunk * BLOCK_R
            if PACKED:  # a sequence without tokens leaves a slot that nobody reads
                start = tl.maximum(start, tl.load(cu_seqlens + g * cu_stride).to(tl.int32))
                start = tl.minimum(start, tokens - 1)
            first_row = x_entry + (start.to(tl.int64) * (x_n * VEC) + tl.zeros((1, 1), tl.int64))
            shift1, shift2, total1, total2 = reduce_forward(
                x_rows, first_row, own, x_f, KIND, UNIT, F, BLOCK_F
            )  # fmt: skip
            store_columns(to, shift1, shift2, 0, F, BLOCK_F, P)
            store_columns(to + P * F, total1, total2, 0, F, BLOCK_F, P)
    else:
        x1, x2 = load_input(x_rows, mask, x_f, 0, KIND, UNIT, F, BLOCK_F)
        position, cosine, sine = tile_angles(
            n, mask, b, h, theta, ids, offsets, cu_seqlens, theta_u, theta_f, ids_s, ids_n, ids_u, ids_k,
            offsets_s, offsets_u, offset, prefix, size1, size2, size3, sequences, cu_stride,
            AXES, F, E, THETA_VEC, HALF, BLOCK_F,
        )  # fmt: skip
        shift1, shift2, scale1, scale2 = load_statistics(statistics, column, 0, F, BLOCK_F, P)
        y1, y2 = weights_pair(x1, x2, shift1, shift2, scale1, scale2, KIND)
        o1, o2 = turn(y1, y2, cosine, sine, KIND)
        store_pair(out_rows, o1, o2, mask, out_f, 0, UNIT, KIND == "interleaved", F, BLOCK_F)


@triton.jit
def sum_strip(x_rows, tokens, x_n, x_f, shift1, shift2, first, KIND: tl.constexpr, VEC: tl.constexpr,
              UNIT: tl.constexpr, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
              STAGES: tl.constexpr):  # fmt: skip
    """Sums of powers of a strip's columns, (F,) each, from ``x_rows`` at token 0."""
    total1 = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    total2 = total1
    for start in tl.range(0, tokens, BLOCK_R, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_R)
        rows = x_rows + n.to(tl.int64)[:, None] * (x_n * VEC)
        x1, x2 = load_input(rows, n < tokens, x_f, first, KIND, UNIT, F, BLOCK_F)
        total1 += tl.where((n < tokens)[:, None], power(x1, shift1), 0.0)
        if KIND != "cosine":
            total2 += tl.where((n < tokens)[:, None], power(x2, shift2), 0.0)
    total1 = tl.sum(total1, axis=0)
    if KIND == "cosine":
        total2 = total1
    else:
        total2 = tl.sum(total2, axis=0)
    return total1, total2


@triton.jit(do_not_specialize=_INTEGERS)
def strip_kernel(
    x, grad, out, statistics, dtheta, theta, ids, offsets,
    offset: tl.int32, tokens: tl.int32, heads: tl.int32, batch: tl.int32, theta_u: tl.int64, theta_f: tl.int64,
    ids_s: tl.int64, ids_n: tl.int64, ids_u: tl.int64, ids_k: tl.int64,
    offsets_s: tl.int64, offsets_u: tl.int64, table_n: tl.int64, table_u: tl.int64,
    prefix: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32, sequences: tl.int32,
    cu_stride: tl.int64,
    x_b: tl.int64, x_n: tl.int64, x_h: tl.int64, x_f: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_f: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_f: tl.int64,
    KIND: tl.constexpr, BACKWARD: tl.constexpr, AXES: tl.constexpr,
    VEC: tl.constexpr, THETA_VEC: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk twice down ``BLOCK_F`` angles' columns of one (batch entry, head): to reduce them, and to apply."""
    P: tl.constexpr = 1 if KIND == "cosine" else 2
    THETA: tl.constexpr = dtheta is not None
    HALF: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16 and not THETA
    STRIPS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    program = tl.program_id(0)  # strips fastest: neighbours in memory
    first = program % STRIPS * BLOCK_F
    unit = program // STRIPS
    b, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    x_rows = x + (b * (x_b * VEC) + h * (x_h * VEC))
    out_rows = out + (b * (out_b * VEC) + h * (out_h * VEC))
    grad_rows = x_rows
    if BACKWARD:
        grad_rows = grad + (b * (grad_b * VEC) + h * (grad_h * VEC))
    f = first + tl.arange(0, BLOCK_F)
    whole, rest, unit_of_phase = load_frequencies(theta, h, first, theta_u, theta_f, AXES, F, E, THETA_VEC, BLOCK_F)
    column = unit.to(tl.int64) + tl.zeros((1, 1), tl.int64)
    zero = tl.zeros((BLOCK_F,), tl.float32)

    # Down once: the columns' statistics.
    if BACKWARD:
        shift1, shift2, scale1, scale2 = load_statistics(statistics, column, first, F, BLOCK_F, P)
        c1 = zero
        c2 = zero
        for start in tl.range(0, tokens, BLOCK_R, num_stages=STAGES):
            n = start + tl.arange(0, BLOCK_R)
            mask = n < tokens
            n_wide = n.to(tl.int64)[:, None]
            position = token_positions(
                n, mask, b, tl.zeros_like(n) + h, f // E, ids, offsets, None, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
                offset, prefix, size1, size2, size3, sequences, cu_stride, AXES,
            )  # fmt: skip
            cosine, sine = cos_sin(position, whole, rest, unit_of_phase, HALF)
            y1, y2, d1, d2 = gradient_of_weights(
                x_rows + n_wide * (x_n * VEC), grad_rows + n_wide * (grad_n * VEC), mask, x_f, grad_f,
                cosine, sine, shift1, shift2, scale1, scale2, first, KIND, UNIT, F, BLOCK_F,
            )  # fmt: skip
            c1, c2 = reduce_backward(y1, y2, d1, d2, mask, c1, c2, KIND)
        c1 = c1[None, :]
        c2 = c2[None, :]
    else:
        # Shifts from the first token; where a sum overflows, once more with the maxima: see `reduce_forward`.
        one = tl.full((1,), True, tl.int1)
        f1, f2 = load_input(x_rows + tl.zeros((1, 1), tl.int64), one, x_f, first, KIND, UNIT, F, BLOCK_F)
        shift1 = f1.to(tl.float32)
        shift2 = f2.to(tl.float32)
        total1, total2 = sum_strip(
            x_rows, tokens, x_n, x_f, shift1, shift2, first, KIND, VEC, UNIT, F, BLOCK_R, BLOCK_F, STAGES
        )  # fmt: skip
        if overflows(total1, total2):
            top1 = tl.full((BLOCK_R, BLOCK_F), float("-inf"), tl.float32)
            top2 = top1
            for start in tl.range(0, tokens, BLOCK_R, num_stages=STAGES):
                n = start + tl.arange(0, BLOCK_R)
                rows = x_rows + n.to(tl.int64)[:, None] * (x_n * VEC)
                x1, x2 = load_input(rows, n < tokens, x_f, first, KIND, UNIT, F, BLOCK_F)
                top1 = tl.where((n < tokens)[:, None], tl.maximum(top1, x1.to(tl.float32)), top1)
                top2 = tl.where((n < tokens)[:, None], tl.maximum(top2, x2.to(tl.float32)), top2)
            every = tl.full((BLOCK_R,), True, tl.int1)
            shift1 = masked_maximum(top1, every)[None, :]
            shift2 = masked_maximum(top2, every)[None, :]
            total1, total2 = sum_strip(
                x_rows, tokens, x_n, x_f, shift1, shift2, first, KIND, VEC, UNIT, F, BLOCK_R, BLOCK_F, STAGES
            )  # fmt: skip
        inside = first + tl.arange(0, BLOCK_F) < F
        scale1 = tl.div_rn(1.0, tl.where(inside, total1, 1.0))
        scale2 = tl.div_rn(1.0, tl.where(inside, total2, 1.0))
        columns = statistics + unit.to(tl.int64) * (2 * P * F)
        store_columns(columns, tl.reshape(shift1, (BLOCK_F,)), tl.reshape(shift2, (BLOCK_F,)), first, F, BLOCK_F, P)
        store_columns(columns + P * F, scale1, scale2, first, F, BLOCK_F, P)
        scale1 = scale1[None, :]
        scale2 = scale2[None, :]

    # Down again: apply them.
    total = tl.zeros((BLOCK_R, BLOCK_F), tl.float64)
    for start in tl.range(0, tokens, BLOCK_R, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_R)
        mask = n < tokens
        n_wide = n.to(tl.int64)[:, None]
        position = token_positions(
            n, mask, b, tl.zeros_like(n) + h, f // E, ids, offsets, None, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
            offset, prefix, size1, size2, size3, sequences, cu_stride, AXES,
        )  # fmt: skip
        cosine, sine = cos_sin(position, whole, rest, unit_of_phase, HALF)
        to = out_rows + n_wide * (out_n * VEC)
        if BACKWARD:
            y1, y2, d1, d2 = gradient_of_weights(
                x_rows + n_wide * (x_n * VEC), grad_rows + n_wide * (grad_n * VEC), mask, x_f, grad_f,
                cosine, sine, shift1, shift2, scale1, scale2, first, KIND, UNIT, F, BLOCK_F,
            )  # fmt: skip
            e1 = softmax_gradient(y1, d1, c1)
            e2 = softmax_gradient(y2, d2, c2)
            store_input(to, e1, e2, mask, out_f, first, KIND, UNIT, F, BLOCK_F)
            if THETA:
                dphi = tl.where(mask[:, None], angle_gradient(y1, y2, d1, d2, KIND), 0.0)
                total += position.to(tl.float64) * dphi.to(tl.float64)
        else:
            x1, x2 = load_input(x_rows + n_wide * (x_n * VEC), mask, x_f, first, KIND, UNIT, F, BLOCK_F)
            y1, y2 = weights_pair(x1, x2, shift1, shift2, scale1, scale2, KIND)
            o1, o2 = turn(y1, y2, cosine, sine, KIND)
            store_pair(to, o1, o2, mask, out_f, first, UNIT, KIND == "interleaved", F, BLOCK_F)
    if THETA:
        tl.store(dtheta + unit.to(tl.int64) * F + f, tl.sum(total, axis=0), mask=f < F)
