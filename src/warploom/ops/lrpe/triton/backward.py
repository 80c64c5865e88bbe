"""The backward kernels of LRPE: the gradient of ``x``, and that of theta."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.activations import widen
from warploom.device.packed import is_in_sequence
from warploom.device.phase import cos_sin
from warploom.device.rotation import rotate_backward
from warploom.device.rows import load_input, load_pair, store_input
from warploom.ops.lrpe.triton.angles import (
    AngleNumbers,
    Angles,
    Inverses,
    cos_sin_behind_loads,
    divide_with_rest,
    load_frequencies,
    token_positions,
)
from warploom.ops.lrpe.triton.rows import (
    RowSizes,
    RowStrides,
    Split,
    row_pointers,
    rows_of,
    split_program,
)


@triton.jit
def store_gradient(
    rows, x, grad, cosine, sine, mask, stride,
    spec: tl.constexpr, ACTIVATION: tl.constexpr, THETA: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of one vector and returns that of its angles (R, F), float32."""
    x1, x2, g1, g2 = widen(x[0]), widen(x[1]), widen(grad[0]), widen(grad[1])
    d1, d2, dphi = rotate_backward(x1, x2, g1, g2, cosine, sine, spec, ACTIVATION, THETA, BLOCK_F)
    store_input(rows, d1, d2, mask, stride, 0, spec, BLOCK_F)
    return dphi


@triton.jit
def backward_kernel(
    x, grad, dx, partial, theta, position_ids, offsets, cu_seqlens, offset: tl.int32, sizes: RowSizes,
    numbers: AngleNumbers, inverses: Inverses, split: Split, chunks: tl.int32,
    x_strides: RowStrides, grad_strides: RowStrides, dx_strides: RowStrides, config: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of ``x``, and with ``partial`` sums for that of theta.

    Without ``partial`` a program does one tile of rows. With it a program does every so many-th tile of those that
    share a row of theta, and adds position × (gradient of the angle) in registers, in a fixed order, so that
    it stores one partial sum (F,). Where each head has a row of theta, the tiles are of its tokens.
    """
    S: tl.constexpr = config.S
    spec: tl.constexpr = config.spec
    ACTIVATION: tl.constexpr = config.ACTIVATION
    THETA: tl.constexpr = partial is not None
    HALF: tl.constexpr = dx.dtype.element_ty.primitive_bitwidth == 16 and not THETA
    NEEDS_X: tl.constexpr = THETA or ACTIVATION != "none"
    BY_HEAD: tl.constexpr = THETA and not config.ONE_THETA
    STRAIGHT: tl.constexpr = ACTIVATION == "softmax"  # as in the forward
    GUARDED: tl.constexpr = S - 1 if STRAIGHT else S
    angles = Angles(theta, position_ids, offsets, cu_seqlens, offset, numbers, inverses)
    s_block, chunk = split_program(split, config.TOKENS_INNER)
    s_first = s_block * S
    total = tl.zeros((config.R, config.F), tl.float64)  # positions are large, and their terms cancel
    head = 0
    first_chunk = chunk
    rows = sizes.tokens * sizes.u
    if BY_HEAD:
        first_chunk, head = divide_with_rest(chunk, sizes.u, split.rows_inverse)
        rows = sizes.tokens
    first = first_chunk * config.R
    # Constant bounds where the loop runs once: the compiler moves nothing before a loop that it does not see. It counts
    # up to zero: a counter of rows would step past the last, where 32 bits may have no number.
    for left in range(first - rows if THETA else 0, 0 if THETA else 1, chunks * config.R if THETA else 1):
        first_row = rows + left if THETA else first
        if BY_HEAD:
            n = first_row + tl.arange(0, config.R)
            u = (head + tl.zeros((config.R,), tl.int32)).to(tl.int64)
            mask = n < sizes.tokens
        else:
            n, u, mask = rows_of(first_row, sizes, split.rows_inverse, config.R, config.TOKENS_INNER)
        x_rows = row_pointers(x, n, u, s_first, x_strides, spec.VEC)
        grad_rows = row_pointers(grad, n, u, s_first, grad_strides, spec.VEC)
        dx_rows = row_pointers(dx, n, u, s_first, dx_strides, spec.VEC)
        given = mask
        if cu_seqlens is not None:  # rows behind the last sequence have gradients of zero
            given = mask & is_in_sequence(n, cu_seqlens, numbers.cu_stride, numbers.sequences)
        grads = ()
        xs = ()
        for i in tl.static_range(S):
            ahead = given & (s_first + i < sizes.s)
            pair = load_pair(grad_rows + i * (grad_strides.s * spec.VEC), ahead, grad_strides.f, 0, spec, config.F)
            grads = grads + (pair,)
            if NEEDS_X:
                pair = load_input(x_rows + i * (x_strides.s * spec.VEC), ahead, x_strides.f, 0, spec, config.F)
            xs = xs + (pair,)
        if THETA:
            tl.debug_barrier()  # the first loads do not wait for frequencies; later ones find these in cache
            step = load_frequencies(angles, head, 0, spec, config.F)
            axis = tl.arange(0, config.F) // spec.E
            position = token_positions(n, mask, s_first.to(tl.int64), u, axis, angles, spec.AXES)
            cosine, sine = cos_sin(position, step, HALF)
        else:
            cosine, sine = cos_sin_behind_loads(n, u, mask, s_first.to(tl.int64), angles, spec, config.F, HALF)
        row_total = tl.zeros((config.R, config.F), tl.float32)
        full = s_first + S <= sizes.s if STRAIGHT else False
        if full:
            for i in tl.static_range(S):
                row_total += store_gradient(
                    dx_rows + i * (dx_strides.s * spec.VEC), xs[i], grads[i], cosine, sine, mask, dx_strides.f,
                    spec, ACTIVATION, THETA, config.F,
                )  # fmt: skip
        else:
            for i in tl.static_range(GUARDED):
                if s_first + i < sizes.s:
                    row_total += store_gradient(
                        dx_rows + i * (dx_strides.s * spec.VEC), xs[i], grads[i], cosine, sine, mask, dx_strides.f,
                        spec, ACTIVATION, THETA, config.F,
                    )  # fmt: skip
        if THETA:  # outside the tensor grad was loaded as zero, and so is the gradient of the angle
            total += position.to(tl.float64) * row_total.to(tl.float64)
    if THETA:
        f = tl.arange(0, config.F)
        tl.store(partial + tl.program_id(0).to(tl.int64) * spec.F + f, tl.sum(total, axis=0), mask=f < spec.F)


@triton.jit
def reduce_kernel(
    partial, dtheta, parts: tl.int32, heads: tl.int32,
    AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum (parts, heads, F) over parts, and over the axes of a grid, which share frequencies: (heads, E)."""
    if PDL:
        gdc_wait()
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    head = (tl.program_id(0) // E_BLOCKS).to(tl.int64)
    e = tl.program_id(0) % E_BLOCKS * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_P, BLOCK_E), tl.float64)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        rows = (part.to(tl.int64) * heads + head) * F
        for axis in tl.static_range(AXES):
            mask = (part < parts)[:, None] & ((e < E) & (axis * E + e < F))[None, :]
            total += tl.load(partial + rows[:, None] + (axis * E + e)[None, :], mask=mask, other=0.0)
    tl.store(dtheta + head * E + e, tl.sum(total, axis=0).to(dtheta.dtype.element_ty), mask=e < E)
