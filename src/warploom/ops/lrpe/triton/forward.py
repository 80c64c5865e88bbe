"""The forward kernel of LRPE: ``out = rotate(activation(x), φ)``."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.activations import widen
from warploom.device.packed import is_in_sequence
from warploom.device.rotation import activate_input, rotate
from warploom.device.rows import load_input, store_pair
from warploom.ops.lrpe.triton.angles import AngleNumbers, Angles, Inverses, cos_sin_behind_loads
from warploom.ops.lrpe.triton.rows import (
    RowSizes,
    RowStrides,
    Split,
    row_pointers,
    rows_of,
    split_program,
)


@triton.jit
def store_rotated(
    rows, x, cosine, sine, mask, stride, spec: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """Activates one vector, ``x`` as `load_input` gave it, and stores it turned."""
    x1, x2, scale = activate_input(widen(x[0]), widen(x[1]), spec, ACTIVATION, BLOCK_F)
    o1, o2 = rotate(x1 * scale, x2 * scale, cosine, sine, spec.KIND)
    store_pair(rows, o1, o2, mask, stride, 0, spec, BLOCK_F)


@triton.jit
def forward_kernel(
    x, out, theta, position_ids, offsets, cu_seqlens, offset: tl.int32, sizes: RowSizes, numbers: AngleNumbers,
    inverses: Inverses, split: Split, x_strides: RowStrides, out_strides: RowStrides,
    config: tl.constexpr,
):  # fmt: skip
    """Encodes one tile of rows a program, for ``config.S`` of the entries that share it."""
    S: tl.constexpr = config.S
    spec: tl.constexpr = config.spec
    ACTIVATION: tl.constexpr = config.ACTIVATION
    angles = Angles(theta, position_ids, offsets, cu_seqlens, offset, numbers, inverses)
    HALF: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    s_block, row_block = split_program(split, config.TOKENS_INNER)
    s_first = s_block * S
    n, u, mask = rows_of(row_block * config.R, sizes, split.rows_inverse, config.R, config.TOKENS_INNER)
    x_rows = row_pointers(x, n, u, s_first, x_strides, spec.VEC)
    out_rows = row_pointers(out, n, u, s_first, out_strides, spec.VEC)

    given = mask
    if cu_seqlens is not None:  # rows behind the last sequence are not read, and become zero
        given = mask & is_in_sequence(n, cu_seqlens, numbers.cu_stride, numbers.sequences)
    xs = ()
    for i in tl.static_range(S):
        ahead = given & (s_first + i < sizes.s)
        xs = xs + (load_input(x_rows + i * (x_strides.s * spec.VEC), ahead, x_strides.f, 0, spec, config.F),)
    cosine, sine = cos_sin_behind_loads(n, u, mask, s_first.to(tl.int64), angles, spec, config.F, HALF)
    if cu_seqlens is not None:
        cosine = tl.where(given[:, None], cosine, 0.0)
        sine = tl.where(given[:, None], sine, 0.0)
    # Without branches the sums of one vector's softmax across threads take place while those of another do.
    STRAIGHT: tl.constexpr = ACTIVATION == "softmax"
    GUARDED: tl.constexpr = S - 1 if STRAIGHT else S
    full = s_first + S <= sizes.s if STRAIGHT else False
    if full:
        for i in tl.static_range(S):
            rows = out_rows + i * (out_strides.s * spec.VEC)
            store_rotated(rows, xs[i], cosine, sine, mask, out_strides.f, spec, ACTIVATION, config.F)
    else:
        for i in tl.static_range(GUARDED):
            if s_first + i < sizes.s:
                rows = out_rows + i * (out_strides.s * spec.VEC)
                store_rotated(rows, xs[i], cosine, sine, mask, out_strides.f, spec, ACTIVATION, config.F)
