"""Tiles of linear attention: where a program stands, how rows are loaded and encoded, decays, products, states.

Tokens come in tiles (T, features) and tiles in chunks; a program goes through the tiles of one chunk of one head. What
`φ` makes of a tile is a tuple of parts (T, F): two for ``rotate`` (both halves of the pairs) and ``cosine`` (cosines
and sines), one without an encoding. Other tiles are tuples of one part.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import exponential, exponential_float32
from warploom.device.packed import sequence_bounds, sequence_of_tile
from warploom.device.phase import cos_sin, phase_step, wrapping_add
from warploom.device.product import dot, rounded
from warploom.ops.lrpe.kernels.backward import turn_backward
from warploom.ops.lrpe.kernels.forward import activate_input, turn
from warploom.ops.lrpe.kernels.rows import load_input, store_input


class StateStrides(NamedTuple):
    """Of a state (S, H, F, E)."""

    s: tl.int64
    h: tl.int64
    f: tl.int64
    e: tl.int64


class Sizes(NamedTuple):
    """Of a call, and how it is cut. Every number is a run-time value: none of them ever causes a compilation."""

    tokens: tl.int32  # of a batch entry
    heads: tl.int32
    chunks: tl.int32  # of a batch entry
    chunk: tl.int32  # tokens of a chunk
    columns: tl.int32  # blocks of a result's features
    sequences: tl.int32  # packed ones
    cu_stride: tl.int64
    theta_h: tl.int64
    theta_f: tl.int64
    offsets_b: tl.int64
    decay_b: tl.int64
    decay_n: tl.int64
    decay_h: tl.int64


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    KIND: tl.constexpr  # none, rotate, interleaved or cosine
    ACTIVATION: tl.constexpr
    DECAY: tl.constexpr  # none, head or token
    CAUSAL: tl.constexpr
    E: tl.constexpr  # features of a value
    BLOCK_T: tl.constexpr
    BLOCK_F: tl.constexpr  # features of a part of an encoded tile, or of a block of them
    BLOCK_E: tl.constexpr  # features of a value, or of a block of them


class Place(NamedTuple):
    """Where a program stands."""

    b: tl.tensor  # batch entry
    h: tl.tensor  # head
    slot: tl.tensor  # number of the chunk among all
    sequence: tl.tensor  # packed sequence, or batch entry
    start: tl.tensor  # token at which the sequence begins
    first: tl.tensor  # the chunk's first token within the sequence
    last: tl.tensor  # and the one behind its last
    position: tl.tensor  # of the sequence's first token
    column: tl.tensor  # block of features of the result


# ----------------------------------------------------------------------------------------------------------
# Places and rows
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def locate(offsets, cu_seqlens, offset, sizes):
    """This program's place. Blocks of columns, which read the same rows, lie next to each other, then heads."""
    program = tl.program_id(0)
    column = program % sizes.columns
    program = program // sizes.columns
    h = program % sizes.heads
    slot = program // sizes.heads
    if cu_seqlens is not None:
        sequence, c = sequence_of_tile(slot, cu_seqlens, sizes.cu_stride, sizes.sequences, sizes.chunk)
        start, length = sequence_bounds(sequence, cu_seqlens, sizes.cu_stride)
        b = slot * 0
    else:
        b = slot // sizes.chunks
        c = slot - b * sizes.chunks
        sequence, start, length = b, slot * 0, sizes.tokens
    if offsets is not None:
        offset = tl.load(offsets + b.to(tl.int64) * sizes.offsets_b).to(tl.int32)
    first = c * sizes.chunk
    last = tl.minimum(length, first + sizes.chunk)
    return Place(b.to(tl.int64), h.to(tl.int64), slot.to(tl.int64), sequence.to(tl.int64), start, first, last, offset,
                 column)  # fmt: skip


@triton.jit
def row_pointers(ptr, n, place, strides, VEC: tl.constexpr):
    """Pointers (T, 1) to feature 0 of the tokens ``n`` of the place's sequence, in 64 bits."""
    head = ptr + (place.b * (strides.b * VEC) + place.h * (strides.h * VEC))
    return head + ((place.start + n).to(tl.int64) * (strides.n * VEC))[:, None]


@triton.jit
def load_plain(rows, mask, strides, first, FEATURES: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """The features from ``first`` on, as one part (T, BLOCK)."""
    f = first + tl.arange(0, BLOCK)
    ptrs = rows + (f if UNIT else f * strides.f)[None, :]
    return (tl.load(ptrs, mask=mask[:, None] & (f < FEATURES)[None, :], other=0.0),)


@triton.jit
def store_plain(rows, x, mask, strides, first, FEATURES: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """The inverse of `load_plain`."""
    f = first + tl.arange(0, BLOCK)
    ptrs = rows + (f if UNIT else f * strides.f)[None, :]
    tl.store(ptrs, rounded(x, rows.dtype.element_ty), mask=mask[:, None] & (f < FEATURES)[None, :])


# ----------------------------------------------------------------------------------------------------------
# Encoding
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_steps(theta, place, first, sizes, spec: tl.constexpr, variant: tl.constexpr):
    """Phase steps (1, F) of the head's angles from ``first`` on: see `phase_step`. None without an encoding."""
    if variant.KIND == "none":
        steps = None
    else:
        f = first + tl.arange(0, variant.BLOCK_F)
        ptrs = theta + place.h * sizes.theta_h + f * sizes.theta_f
        steps = phase_step(tl.load(ptrs, mask=f < spec.E, other=0.0)[None, :])
    return steps


@triton.jit
def turn_of(n, place, steps, HALF: tl.constexpr):
    """Cosine and sine (T, F) of the tokens ``n`` of the place's sequence; None without an encoding."""
    if steps is None:
        found = None
    else:
        whole, rest, unit = steps
        found = cos_sin(wrapping_add(n, place.position)[:, None], whole, rest, unit, HALF)
    return found


@triton.jit
def encode(x, angles, first, spec: tl.constexpr, variant: tl.constexpr):
    """``φ`` of a tile as `load_input` gives it: its parts, in the dtype of memory."""
    dtype: tl.constexpr = x[0].dtype
    if variant.KIND == "none" and variant.ACTIVATION == "none":
        parts = (x[0],)
    else:
        x1 = x[0].to(tl.float32)
        x2 = x[1].to(tl.float32)
        x1, x2, scale = activate_input(x1, x2, spec, variant.ACTIVATION, variant.BLOCK_F)
        x1 *= scale
        x2 *= scale
        if variant.ACTIVATION == "sigmoid" or variant.ACTIVATION == "softmax":  # not zero where nothing was loaded
            inside = (first + tl.arange(0, variant.BLOCK_F) < spec.F)[None, :]
            x1 = tl.where(inside, x1, 0.0)
            x2 = tl.where(inside, x2, 0.0)
        if variant.KIND == "none":
            parts = (rounded(x1, dtype),)
        else:
            x1, x2 = turn(x1, x2, angles[0], angles[1], spec.KIND)
            parts = (rounded(x1, dtype), rounded(x2, dtype))
    return parts


@triton.jit
def store_decoded(
    rows, grads, x, angles, mask, strides, first, spec: tl.constexpr, variant: tl.constexpr, THETA: tl.constexpr
):  # fmt: skip
    """Store the gradient of a tile from those of its parts, float32; return that of its angles (T, F)."""
    if variant.KIND == "none":
        if variant.ACTIVATION == "none":
            d1 = grads[0]
        else:
            one = tl.full(grads[0].shape, 1.0, tl.float32)
            zero = tl.zeros(grads[0].shape, tl.float32)
            x1 = x[0].to(tl.float32)
            d1, _, _ = turn_backward(
                x1, x1, grads[0], zero, one, zero, spec, variant.ACTIVATION, False, variant.BLOCK_F
            )
        d2 = d1
        dphi = d1
    else:
        x1 = x[0]
        x2 = x[1]
        if variant.ACTIVATION != "none" or THETA:
            x1 = x1.to(tl.float32)
            x2 = x2.to(tl.float32)
        d1, d2, dphi = turn_backward(
            x1, x2, grads[0], grads[1], angles[0], angles[1], spec, variant.ACTIVATION, THETA, variant.BLOCK_F
        )
    dtype: tl.constexpr = rows.dtype.element_ty
    store_input(rows, rounded(d1, dtype), rounded(d2, dtype), mask, strides.f, first, spec, variant.BLOCK_F)
    return dphi


# ----------------------------------------------------------------------------------------------------------
# Decays
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def power(x, HALF: tl.constexpr):
    """eˣ, to float32's accuracy unless results are rounded to 16 bits."""
    if HALF:
        y = exponential(x)
    else:
        y = exponential_float32(x)
    return y


@triton.jit
def tile_decays(decay, first, last, place, sizes, variant: tl.constexpr):
    """Sums (T,) of a tile's logarithms of decays up to and with each token, and of all of them."""
    t = tl.arange(0, variant.BLOCK_T)
    count = last - first
    if variant.DECAY == "none":
        a = tl.zeros((variant.BLOCK_T,), tl.float32)
        total = 0.0
    elif variant.DECAY == "head":
        g = tl.load(decay + place.h * sizes.decay_h).to(tl.float32)
        count = tl.minimum(count, variant.BLOCK_T).to(tl.float32)
        a = g * tl.minimum((t + 1).to(tl.float32), count)
        total = g * count
    else:
        n = (place.start + first + t).to(tl.int64)
        ptrs = decay + place.b * sizes.decay_b + n * sizes.decay_n + place.h * sizes.decay_h
        g = tl.load(ptrs, mask=t < count, other=0.0).to(tl.float32)
        a = tl.cumsum(g, axis=0)
        total = tl.sum(g, axis=0)
    return a, total


@triton.jit
def weigh_pairs(scores, a, variant: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """Scores (T, T) of pairs of a tile, times the decay between them; zero where the row's token sees not the column's.

    A token sees those before it and itself, or if ``REVERSE`` those behind it.
    """
    t = tl.arange(0, variant.BLOCK_T)
    if REVERSE:
        seen = t[:, None] <= t[None, :]
    else:
        seen = t[:, None] >= t[None, :]
    if variant.DECAY != "none":
        between = a[None, :] - a[:, None] if REVERSE else a[:, None] - a[None, :]
        scores *= power(tl.where(seen, between, 0.0), HALF)
    return tl.where(seen, scores, 0.0)


@triton.jit
def weigh_rows(x, weights):
    """A tile, times a weight (T,) for each of its rows, in its dtype."""
    return rounded(x.to(tl.float32) * weights[:, None], x.dtype)


# ----------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def size_of(x):
    """A power of two by which the tile ``x`` fits float16."""
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 140  # so that x over it is below 2¹⁴
    exponent = tl.minimum(tl.maximum(exponent, 0), 113)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def times_rounded(a, x, acc):
    """``a · x + acc``, where ``x`` is float32 and is rounded to the dtype of ``a``."""
    if a.dtype == tl.float16:  # which does not hold every float32
        size = size_of(x)
        acc += dot(a, rounded(x / size, a.dtype), tl.zeros(acc.shape, tl.float32)) * size
    else:
        acc = dot(a, rounded(x, a.dtype), acc)
    return acc


@triton.jit
def rounded_times(x, c, acc):
    """``x · c + acc``, where ``x`` is float32 and is rounded to the dtype of ``c``."""
    if c.dtype == tl.float16:
        size = size_of(x)
        acc += dot(rounded(x / size, c.dtype), c, tl.zeros(acc.shape, tl.float32)) * size
    else:
        acc = dot(rounded(x, c.dtype), c, acc)
    return acc


@triton.jit
def part_of(parts, p: tl.constexpr):
    """Part ``p``, or the only one."""
    if len(parts) > 1:
        part = parts[p]
    else:
        part = parts[0]
    return part


@triton.jit
def score(a, b):
    """Inner products (T, T) of the rows of two tiles."""
    scores = tl.zeros((a[0].shape[0], b[0].shape[0]), tl.float32)
    for p in tl.static_range(len(a)):
        scores = dot(a[p], tl.trans(b[p]), scores)
    return scores


@triton.jit
def advance(state, b, c, weights, total, variant: tl.constexpr, HALF: tl.constexpr):
    """The state behind a tile: what was there, decayed, and ``bᵀ c`` with weights (T,) of the tokens.

    Its parts belong to those of ``b``, or else of ``c``.
    """
    found = ()
    for p in tl.static_range(len(state)):
        one = state[p]
        c_p = part_of(c, p)
        if variant.DECAY != "none":
            one *= power(total, HALF)
            c_p = weigh_rows(c_p, weights)
        found = found + (dot(tl.trans(part_of(b, p)), c_p, one),)
    return found


# ----------------------------------------------------------------------------------------------------------
# States
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def state_rows(p: tl.constexpr, first, spec: tl.constexpr, variant: tl.constexpr):
    """Which features (F,) of φ part ``p`` holds from ``first`` on, and which of them there are."""
    f = first + tl.arange(0, variant.BLOCK_F)
    if variant.KIND == "interleaved":
        rows = 2 * f + p
    else:
        rows = f + p * spec.F
    return rows, f < spec.F


@triton.jit
def state_pointers(
    ptr, index, h, first_f, first_e, p: tl.constexpr, strides, spec: tl.constexpr, variant: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Pointers to part ``p`` of a state, (F, E) or ``TRANSPOSED`` (E, F), and which of them there are."""
    f, f_mask = state_rows(p, first_f, spec, variant)
    e = first_e + tl.arange(0, variant.BLOCK_E)
    e_mask = e < variant.E
    head = ptr + index * strides.s + h * strides.h
    if TRANSPOSED:
        ptrs = head + (f.to(tl.int64) * strides.f)[None, :] + (e.to(tl.int64) * strides.e)[:, None]
        mask = f_mask[None, :] & e_mask[:, None]
    else:
        ptrs = head + (f.to(tl.int64) * strides.f)[:, None] + (e.to(tl.int64) * strides.e)[None, :]
        mask = f_mask[:, None] & e_mask[None, :]
    return ptrs, mask


@triton.jit
def load_state(
    ptr, index, h, first_f, first_e, factor, strides, spec: tl.constexpr, variant: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The parts of a state in float32, times a factor; zeros where there is none."""
    PARTS: tl.constexpr = 1 if variant.KIND == "none" else 2
    state = ()
    for p in tl.static_range(PARTS):
        if ptr is None:
            if TRANSPOSED:
                one = tl.zeros((variant.BLOCK_E, variant.BLOCK_F), tl.float32)
            else:
                one = tl.zeros((variant.BLOCK_F, variant.BLOCK_E), tl.float32)
        else:
            ptrs, mask = state_pointers(ptr, index, h, first_f, first_e, p, strides, spec, variant, TRANSPOSED)
            one = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) * factor
        state = state + (one,)
    return state


@triton.jit
def store_state(
    ptr, state, index, h, first_f, first_e, factor, strides, spec: tl.constexpr, variant: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_state`."""
    for p in tl.static_range(len(state)):
        ptrs, mask = state_pointers(ptr, index, h, first_f, first_e, p, strides, spec, variant, TRANSPOSED)
        tl.store(ptrs, (state[p] * factor).to(ptr.dtype.element_ty), mask=mask)
