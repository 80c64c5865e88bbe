"""Angles of LRPE: where tokens stand, their frequencies, and the cosines and sines of both.

Theta has one row of frequencies for each head, or one for all of them. A row of angles is that of a token and of
``u``, the head or the batch entry; ``s`` is the other of the two (`triton.rows`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin, phase_step, wrapping_add, wrapping_mul


class AngleNumbers(NamedTuple):
    """Strides of the tensors that angles are made of, and the grid in which tokens stand."""

    theta_u: tl.int64  # over ``THETA_VEC`` of `RowSpec`
    theta_f: tl.int64
    ids_s: tl.int64
    ids_n: tl.int64
    ids_u: tl.int64
    ids_k: tl.int64
    offsets_s: tl.int64
    offsets_u: tl.int64
    prefix: tl.int32
    size1: tl.int32  # sizes of the grid's axes but the first
    size2: tl.int32
    size3: tl.int32
    sequences: tl.int32
    cu_stride: tl.int64


class Inverses(NamedTuple):
    """Divisors for `divide`: sizes of a grid's axes but the first."""

    size1: tl.int64
    size2: tl.int64
    size3: tl.int64


class Angles(NamedTuple):
    """Sources of angles: tensors, the offset, and their numbers."""

    theta: tl.tensor
    position_ids: tl.tensor
    offsets: tl.tensor
    cu_seqlens: tl.tensor
    offset: tl.tensor
    numbers: AngleNumbers
    inverses: Inverses


@triton.jit
def divide(n, inverse):
    """Returns ``n // d`` for 0 ≤ n < 2³¹, by the number that `warploom.ops.lrpe.engine.inverse_of` makes of d.

    The processor has no instruction for it: what the compiler makes of ``//`` is a chain of thirty or so, through the
    slowest of its units, which everything that a program reads would wait for.
    """
    twice = wrapping_mul(n, 2).to(tl.uint32)  # which holds it
    return (tl.umulhi(twice, (inverse >> 5).to(tl.uint32)) >> (inverse & 31).to(tl.int32)).to(tl.int32)


@triton.jit
def divide_with_rest(n, by, inverse):
    """Returns ``n // by`` and ``n % by``, for n ≥ 0."""
    quotient = divide(n, inverse)
    return quotient, n - quotient * by


@triton.jit
def position_of(given):
    """Returns a position as a tensor gives it, in int64 if that is of 64 bits, or in int32."""
    return given if given.dtype == tl.int64 else given.to(tl.int32)


@triton.jit
def token_positions(n, mask, s, u, axis, angles, AXES: tl.constexpr):
    """Returns the coordinates of tokens ``n`` (R,): (R, 1), or (R, F) in several dimensions, where ``axis`` is (F,).

    They are int32, or int64 where a tensor gives them that has or may lead beyond.
    """
    numbers = angles.numbers
    if angles.position_ids is not None:
        rows = angles.position_ids + s * numbers.ids_s + u * numbers.ids_u + n.to(tl.int64) * numbers.ids_n
        if AXES == 1:
            position = position_of(tl.load(rows, mask=mask, other=0))[:, None]
        else:
            pointers = rows[:, None] + (axis * numbers.ids_k)[None, :]
            position = position_of(tl.load(pointers, mask=mask[:, None] & (axis < AXES)[None, :], other=0))
    else:
        i = n - numbers.prefix
        if angles.cu_seqlens is not None:
            sequence = sequence_of(n, angles.cu_seqlens, numbers.cu_stride, numbers.sequences)
            start = tl.load(angles.cu_seqlens + sequence * numbers.cu_stride, mask=mask, other=0)
            i -= start.to(tl.int32)
        if AXES == 1:
            if angles.offsets is not None:
                pointers = angles.offsets + s * numbers.offsets_s + u * numbers.offsets_u
                position = i + tl.load(pointers, mask=mask, other=0).to(tl.int64)
            else:
                # Tokens of the prefix, and those behind the last, may have no position of 32 bits: these are not used.
                position = wrapping_add(i, angles.offset)
            position = tl.where(i >= 0, position, 0)[:, None]
        else:  # row-major coordinates in the grid; the prefix sits at the origin
            inverses = angles.inverses
            i = tl.maximum(i, 0)
            if AXES == 4:
                i, c3 = divide_with_rest(i, numbers.size3, inverses.size3)
            if AXES >= 3:
                i, c2 = divide_with_rest(i, numbers.size2, inverses.size2)
            c0, c1 = divide_with_rest(i, numbers.size1, inverses.size1)
            a = axis[None, :]
            position = tl.where(a == 0, c0[:, None], c1[:, None])
            if AXES >= 3:
                position = tl.where(a == 2, c2[:, None], position)
            if AXES == 4:
                position = tl.where(a == 3, c3[:, None], position)
    return position


@triton.jit
def cos_sin_behind_loads(n, u, mask, s, angles, spec: tl.constexpr, BLOCK_F: tl.constexpr, HALF: tl.constexpr):
    """Returns cosine and sine (R, F) of the rows (``n``, ``u``) for entry ``s``, once the loads before are under way.

    Without the barrier the assembler moves those loads behind what is computed from the frequencies: they would wait
    for these to come from memory.
    """
    tl.debug_barrier()
    numbers = angles.numbers
    f = tl.arange(0, BLOCK_F)
    axis = f // spec.E
    turned = (axis < spec.AXES) & (f < spec.F)
    e = f if spec.E >= spec.F else f % spec.E
    if spec.THETA_VEC == 1:
        # Not so where E is odd. It makes neighbouring threads read neighbouring frequencies, in the layout of x;
        # each is read by itself all the same, since nothing is known of the alignment.
        e = tl.max_contiguous(e * numbers.theta_f, 2)
    ptrs = angles.theta + (u * (numbers.theta_u * spec.THETA_VEC))[:, None] + e[None, :]
    frequency = tl.load(ptrs, mask=mask[:, None] & turned[None, :], other=0.0)
    position = token_positions(n, mask, s, u, axis, angles, spec.AXES)
    return cos_sin(position, phase_step(frequency), HALF)


@triton.jit
def load_frequencies(angles, h, first, spec: tl.constexpr, BLOCK_F: tl.constexpr):
    """Returns the `PhaseStep` of a head (1, F) from angle ``first`` on."""
    f = first + tl.arange(0, BLOCK_F)
    turned = (f // spec.E < spec.AXES) & (f < spec.F)
    e = f if spec.E >= spec.F else f % spec.E
    ptrs = (
        angles.theta
        + h * (angles.numbers.theta_u * spec.THETA_VEC)
        + (e if spec.THETA_VEC > 1 else e * angles.numbers.theta_f)
    )
    return phase_step(tl.load(ptrs, mask=turned, other=0.0)[None, :])
