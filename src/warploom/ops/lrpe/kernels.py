"""Triton kernels of LRPE and their launchers. No validation, no autograd.

Shapes. A tile is (S, R, F): R rows of F angles each, and S vectors of ``x`` to a row that share its angles, so
that an angle is computed once for all of them. Which axis of ``x`` is shared depends on theta. With one frequency
row per head the batch is shared: S runs over the batch and a row is a (token, head), heads fastest. With one row
for all heads the heads are: S runs over the heads and a row is a (batch entry, token), tokens fastest. Either way
neighbouring rows are neighbours in memory, which DRAM rewards. The kernels only see strides; ``u`` stands for the
head or batch entry of a row.

An angle turns a pair of numbers. For ``rotate`` the pair is two features of ``x``, (f, f + F) or (2f, 2f + 1),
going in and coming out. For ``cosine`` one feature goes in and the pair (f, f + F) comes out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from warploom.device.activations import activate, activate_backward, softmax, softmax_pair
from warploom.device.phase import cos_sin, phase_step
from warploom.launch import Kernel, multiprocessors

# --------------------------------------------------------------------------------------------------------------
# Device functions
# --------------------------------------------------------------------------------------------------------------


@triton.jit
def sequence_of(n, cu_seqlens, sequences):
    """Packed sequence of each token (int32, (R,)): the last whose start is not behind it. Binary search."""
    low = tl.zeros_like(n)
    high = low + sequences
    width = sequences
    while width > 0:
        middle = (low + high) // 2
        reached = tl.load(cu_seqlens + middle).to(tl.int32) <= n
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        width = width // 2
    return low


@triton.jit
def token_positions(
    n, mask, s, u, axis, ids, offsets, cu_seqlens,
    ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
    offset, prefix, size1, size2, size3, sequences,
    AXES: tl.constexpr,
):  # fmt: skip
    """Coordinates of tokens ``n`` (R,): int32 (R, 1), or (R, F) in several dimensions, where ``axis`` is (F,)."""
    if ids is not None:
        rows = ids + s * ids_s + u * ids_u + n.to(tl.int64) * ids_n
        if AXES == 1:
            position = tl.load(rows, mask=mask, other=0).to(tl.int32)[:, None]
        else:
            pointers = rows[:, None] + (axis * ids_k)[None, :]
            position = tl.load(pointers, mask=mask[:, None] & (axis < AXES)[None, :], other=0).to(tl.int32)
    else:
        i = n - prefix
        if cu_seqlens is not None:
            start = tl.load(cu_seqlens + sequence_of(n, cu_seqlens, sequences), mask=mask, other=0)
            i -= start.to(tl.int32)
        if AXES == 1:
            if offsets is not None:
                offset = tl.load(offsets + s * offsets_s + u * offsets_u, mask=mask, other=0).to(tl.int32)
            position = tl.where(i >= 0, i + offset, 0)[:, None]
        else:  # row-major coordinates in the grid; the prefix sits at the origin
            i = tl.maximum(i, 0)
            if AXES == 4:
                c3 = (i % size3)[:, None]
                i = i // size3
            if AXES >= 3:
                c2 = (i % size2)[:, None]
                i = i // size2
            a = axis[None, :]
            position = tl.where(a == 0, (i // size1)[:, None], (i % size1)[:, None])
            if AXES >= 3:
                position = tl.where(a == 2, c2, position)
            if AXES == 4:
                position = tl.where(a == 3, c3, position)
    return position


@triton.jit
def tile_angles(
    n, u, mask, s, theta, ids, offsets, cu_seqlens, table,
    theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
    offset, prefix, size1, size2, size3, sequences,
    AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Position (R, 1 or F), cosine and sine (R, F) of the angles of the rows (``n``, ``u``), for entry ``s``."""
    f = tl.arange(0, BLOCK_F)
    axis = f // E
    turned = (axis < AXES) & (f < F)
    inside = mask[:, None] & turned[None, :]
    position = token_positions(
        n, mask, s, u, axis, ids, offsets, cu_seqlens, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
        offset, prefix, size1, size2, size3, sequences, AXES,
    )  # fmt: skip
    if table is not None:
        cells = table + (n.to(tl.int64) * table_n + u * table_u)[:, None] + f[None, :]
        cosine = tl.load(cells, mask=inside, other=1.0)
        sine = tl.load(cells + F, mask=inside, other=0.0)
    else:
        frequency = tl.load(theta + (u * theta_u)[:, None] + ((f % E) * theta_f)[None, :], mask=inside, other=0.0)
        step, unit = phase_step(frequency)
        cosine, sine = cos_sin(position, step, unit)
    return position, cosine, sine


@triton.jit
def load_pair(rows, mask, stride, UNIT: tl.constexpr, INTERLEAVED: tl.constexpr,
              F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Both members of every pair, float32 (S, R, F) each. ``rows`` (S, R, 1) point at feature 0."""
    if INTERLEAVED:
        f = tl.arange(0, 2 * BLOCK_F)
        step = f if UNIT else f * stride
        both = tl.load(rows + step[None, None, :], mask=mask & (f < 2 * F)[None, None, :], other=0.0)
        both = both.to(tl.float32).reshape(rows.shape[0], rows.shape[1], BLOCK_F, 2)
        first, second = tl.split(both)
    else:
        f = tl.arange(0, BLOCK_F)
        inside = mask & (f < F)[None, None, :]
        first = tl.load(rows + (f if UNIT else f * stride)[None, None, :], mask=inside, other=0.0)
        second = tl.load(rows + ((f + F) if UNIT else (f + F) * stride)[None, None, :], mask=inside, other=0.0)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
    return first, second


@triton.jit
def store_pair(rows, first, second, mask, stride, UNIT: tl.constexpr, INTERLEAVED: tl.constexpr,
               F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """The inverse of `load_pair`; rounds to the dtype behind ``rows``."""
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        f = tl.arange(0, 2 * BLOCK_F)
        both = tl.join(first.to(dtype), second.to(dtype)).reshape(rows.shape[0], rows.shape[1], 2 * BLOCK_F)
        step = f if UNIT else f * stride
        tl.store(rows + step[None, None, :], both, mask=mask & (f < 2 * F)[None, None, :])
    else:
        f = tl.arange(0, BLOCK_F)
        inside = mask & (f < F)[None, None, :]
        tl.store(rows + (f if UNIT else f * stride)[None, None, :], first.to(dtype), mask=inside)
        tl.store(rows + ((f + F) if UNIT else (f + F) * stride)[None, None, :], second.to(dtype), mask=inside)


@triton.jit
def load_single(rows, mask, stride, UNIT: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """Features (S, R, F) in float32."""
    f = tl.arange(0, BLOCK_F)
    step = f if UNIT else f * stride
    return tl.load(rows + step[None, None, :], mask=mask & (f < F)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def row_pointers(base, s, n, u, stride_s, stride_n, stride_u, VEC: tl.constexpr):
    """Pointers (S, R, 1) to feature 0 of every vector, in 64 bits. Strides come divided by ``VEC``."""
    rows = n.to(tl.int64) * (stride_n * VEC) + u * (stride_u * VEC)
    return base + ((s.to(tl.int64) * (stride_s * VEC))[:, None] + rows[None, :])[:, :, None]


@triton.jit
def token_and_unique(first_row, tokens, unique, BLOCK_R: tl.constexpr, TOKENS_INNER: tl.constexpr):
    """Token (int32), ``u`` (int64) and validity of the rows of a tile, (R,) each."""
    row = first_row + tl.arange(0, BLOCK_R)
    inner = tokens if TOKENS_INNER else unique
    slow = row // inner
    fast = row - slow * inner
    if TOKENS_INNER:
        n, u = fast, slow
        mask = u < unique
    else:
        n, u = slow, fast
        mask = n < tokens
    return n, u.to(tl.int64), mask


@triton.jit
def backward_tile(
    x, grad, dx, s, n, u, rows_mask, cosine, sine,
    x_s, x_n, x_u, x_f, grad_s, grad_n, grad_u, grad_f, dx_s, dx_n, dx_u, dx_f,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, THETA: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
    F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of ``x``; return the gradient of its angles, (S, R, F), if ``THETA``."""
    INTERLEAVED: tl.constexpr = KIND == "interleaved"
    inside = (tl.arange(0, BLOCK_F) < F)[None, None, :]
    grad_rows = row_pointers(grad, s, n, u, grad_s, grad_n, grad_u, VEC)
    dx_rows = row_pointers(dx, s, n, u, dx_s, dx_n, dx_u, VEC)
    x_rows = row_pointers(x, s, n, u, x_s, x_n, x_u, VEC)
    g1, g2 = load_pair(grad_rows, rows_mask, grad_f, UNIT, INTERLEAVED, F, BLOCK_F)
    d1 = g1 * cosine + g2 * sine
    d2 = g2 * cosine - g1 * sine
    dphi = d2
    if KIND == "cosine":
        if ACTIVATION != "none" or THETA:
            x1 = load_single(x_rows, rows_mask, x_f, UNIT, F, BLOCK_F)
            if ACTIVATION == "softmax":
                y1 = softmax(tl.where(inside, x1, float("-inf")))
            else:
                y1 = activate(x1, ACTIVATION)
            if THETA:
                dphi = y1 * d2
            if ACTIVATION == "softmax":
                d1 = y1 * (d1 - tl.sum(y1 * d1, axis=2, keep_dims=True))
            else:
                d1 = activate_backward(x1, d1, ACTIVATION)
        f = tl.arange(0, BLOCK_F)
        step = f if UNIT else f * dx_f
        tl.store(dx_rows + step[None, None, :], d1.to(dx.dtype.element_ty), mask=rows_mask & inside)
    else:
        if ACTIVATION != "none" or THETA:
            x1, x2 = load_pair(x_rows, rows_mask, x_f, UNIT, INTERLEAVED, F, BLOCK_F)
            if ACTIVATION == "softmax":
                y1, y2 = softmax_pair(
                    tl.where(inside, x1, float("-inf")), tl.where(inside, x2, float("-inf"))
                )
            else:
                y1 = activate(x1, ACTIVATION)
                y2 = activate(x2, ACTIVATION)
            if THETA:
                dphi = y1 * d2 - y2 * d1
            if ACTIVATION == "softmax":
                mean = tl.sum(y1 * d1 + y2 * d2, axis=2, keep_dims=True)
                d1 = y1 * (d1 - mean)
                d2 = y2 * (d2 - mean)
            else:
                d1 = activate_backward(x1, d1, ACTIVATION)
                d2 = activate_backward(x2, d2, ACTIVATION)
        store_pair(dx_rows, d1, d2, rows_mask, dx_f, UNIT, INTERLEAVED, F, BLOCK_F)
    return dphi


# --------------------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------------------

# Every integer is a run-time value of declared width: none of them ever causes a compilation.
_INTEGERS = (
    "tokens unique shared theta_u theta_f ids_s ids_n ids_u ids_k offsets_s offsets_u table_n table_u "
    "offset prefix size1 size2 size3 sequences"
).split()
_FORWARD_INTEGERS = [*_INTEGERS, *"x_s x_n x_u x_f out_s out_n out_u out_f".split()]
_BACKWARD_INTEGERS = [
    *_INTEGERS,
    *"chunks x_s x_n x_u x_f grad_s grad_n grad_u grad_f dx_s dx_n dx_u dx_f".split(),
]


@triton.jit(do_not_specialize=_FORWARD_INTEGERS)
def forward_kernel(
    x, out, theta, ids, offsets, cu_seqlens, table,
    tokens: tl.int32, unique: tl.int32, shared: tl.int32, theta_u: tl.int64, theta_f: tl.int64,
    ids_s: tl.int64, ids_n: tl.int64, ids_u: tl.int64, ids_k: tl.int64,
    offsets_s: tl.int64, offsets_u: tl.int64, table_n: tl.int64, table_u: tl.int64,
    offset: tl.int32, prefix: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32, sequences: tl.int32,
    x_s: tl.int64, x_n: tl.int64, x_u: tl.int64, x_f: tl.int64,
    out_s: tl.int64, out_n: tl.int64, out_u: tl.int64, out_f: tl.int64,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, AXES: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    TOKENS_INNER: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """``out = turn(activation(x), φ)``; one tile a program, the shared axis moving fastest, then the rows."""
    INTERLEAVED: tl.constexpr = KIND == "interleaved"
    shared_blocks = tl.cdiv(shared, BLOCK_S)
    program = tl.program_id(0)
    s_first = (program % shared_blocks) * BLOCK_S
    s = s_first + tl.arange(0, BLOCK_S)
    n, u, row_mask = token_and_unique(program // shared_blocks * BLOCK_R, tokens, unique, BLOCK_R, TOKENS_INNER)
    mask = (s < shared)[:, None, None] & row_mask[None, :, None]
    inside = (tl.arange(0, BLOCK_F) < F)[None, None, :]

    x_rows = row_pointers(x, s, n, u, x_s, x_n, x_u, VEC)
    out_rows = row_pointers(out, s, n, u, out_s, out_n, out_u, VEC)
    # The loads of x come first, so that they are in flight while the angles are computed.
    if KIND == "cosine":
        x1 = load_single(x_rows, mask, x_f, UNIT, F, BLOCK_F)
    else:
        x1, x2 = load_pair(x_rows, mask, x_f, UNIT, INTERLEAVED, F, BLOCK_F)
    _, cosine, sine = tile_angles(
        n, u, row_mask, s_first.to(tl.int64), theta, ids, offsets, cu_seqlens, table,
        theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
        offset, prefix, size1, size2, size3, sequences, AXES, F, E, BLOCK_F,
    )  # fmt: skip
    cosine = cosine[None, :, :]
    sine = sine[None, :, :]
    if KIND == "cosine":
        if ACTIVATION == "softmax":
            x1 = softmax(tl.where(inside, x1, float("-inf")))
        else:
            x1 = activate(x1, ACTIVATION)
        store_pair(out_rows, x1 * cosine, x1 * sine, mask, out_f, UNIT, False, F, BLOCK_F)
    else:
        if ACTIVATION == "softmax":
            x1, x2 = softmax_pair(tl.where(inside, x1, float("-inf")), tl.where(inside, x2, float("-inf")))
        else:
            x1 = activate(x1, ACTIVATION)
            x2 = activate(x2, ACTIVATION)
        first = x1 * cosine - x2 * sine
        second = x1 * sine + x2 * cosine
        store_pair(out_rows, first, second, mask, out_f, UNIT, INTERLEAVED, F, BLOCK_F)


@triton.jit(do_not_specialize=_BACKWARD_INTEGERS)
def backward_kernel(
    x, grad, dx, partial, theta, ids, offsets, cu_seqlens, table,
    tokens: tl.int32, unique: tl.int32, shared: tl.int32, theta_u: tl.int64, theta_f: tl.int64,
    ids_s: tl.int64, ids_n: tl.int64, ids_u: tl.int64, ids_k: tl.int64,
    offsets_s: tl.int64, offsets_u: tl.int64, table_n: tl.int64, table_u: tl.int64,
    offset: tl.int32, prefix: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32, sequences: tl.int32,
    chunks: tl.int32,
    x_s: tl.int64, x_n: tl.int64, x_u: tl.int64, x_f: tl.int64,
    grad_s: tl.int64, grad_n: tl.int64, grad_u: tl.int64, grad_f: tl.int64,
    dx_s: tl.int64, dx_n: tl.int64, dx_u: tl.int64, dx_f: tl.int64,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, AXES: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    TOKENS_INNER: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Gradient of ``x``, and with ``partial`` (chunks · shared blocks · R, F) sums for that of theta.

    Without ``partial`` a program does one tile. With it a program does every ``chunks``-th tile, adding
    position × (gradient of the angle) in registers: few partial sums leave the chip, in a fixed order. Then
    ``chunks · R`` is a multiple of the heads, so that each row of the tile keeps its head all along.
    """
    shared_blocks = tl.cdiv(shared, BLOCK_S)
    program = tl.program_id(0)
    s_block = program % shared_blocks
    chunk = program // shared_blocks
    s_first = s_block * BLOCK_S
    s = s_first + tl.arange(0, BLOCK_S)
    if partial is None:
        n, u, row_mask = token_and_unique(chunk * BLOCK_R, tokens, unique, BLOCK_R, TOKENS_INNER)
        mask = (s < shared)[:, None, None] & row_mask[None, :, None]
        _, cosine, sine = tile_angles(
            n, u, row_mask, s_first.to(tl.int64), theta, ids, offsets, cu_seqlens, table,
            theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
            offset, prefix, size1, size2, size3, sequences, AXES, F, E, BLOCK_F,
        )  # fmt: skip
        backward_tile(
            x, grad, dx, s, n, u, mask, cosine[None, :, :], sine[None, :, :],
            x_s, x_n, x_u, x_f, grad_s, grad_n, grad_u, grad_f, dx_s, dx_n, dx_u, dx_f,
            KIND, ACTIVATION, False, VEC, UNIT, F, BLOCK_F,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_R, BLOCK_F), tl.float64)  # positions are large, and their terms cancel
        for first_row in range(chunk * BLOCK_R, tokens * unique, chunks * BLOCK_R):
            n, u, row_mask = token_and_unique(first_row, tokens, unique, BLOCK_R, TOKENS_INNER)
            mask = (s < shared)[:, None, None] & row_mask[None, :, None]
            position, cosine, sine = tile_angles(
                n, u, row_mask, s_first.to(tl.int64), theta, ids, offsets, cu_seqlens, table,
                theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
                offset, prefix, size1, size2, size3, sequences, AXES, F, E, BLOCK_F,
            )  # fmt: skip
            dphi = backward_tile(
                x, grad, dx, s, n, u, mask, cosine[None, :, :], sine[None, :, :],
                x_s, x_n, x_u, x_f, grad_s, grad_n, grad_u, grad_f, dx_s, dx_n, dx_u, dx_f,
                KIND, ACTIVATION, True, VEC, UNIT, F, BLOCK_F,
            )  # fmt: skip
            # Outside the tensor grad was loaded as zero, so dphi is zero there whatever the activation made of x.
            total += position.to(tl.float64) * tl.sum(dphi, axis=0).to(tl.float64)
        f = tl.arange(0, BLOCK_F)
        row = (s_block * chunks + chunk).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        tl.store(partial + row[:, None] * F + f[None, :], total, mask=(f < F)[None, :])


forward_launch = Kernel(forward_kernel)
backward_launch = Kernel(backward_kernel)

# --------------------------------------------------------------------------------------------------------------
# Launchers
# --------------------------------------------------------------------------------------------------------------

MAX_AXES = 4  # axes of a grid that the kernels unravel themselves
MAX_FEATURES = 8192  # angles of one head that fit in a tile


class Positions(NamedTuple):
    """Where tokens stand: what the public arguments come down to."""

    ids: torch.Tensor | None = None  # (N,), (B, N) or (B, N, k)
    offsets: torch.Tensor | None = None  # () or (B,)
    cu_seqlens: torch.Tensor | None = None  # (sequences + 1,)
    offset: int = 0
    prefix: int = 0
    grid: tuple[int, ...] = ()

    def axes(self) -> int:
        """Number of coordinates of a token."""
        if self.ids is not None:
            return self.ids.shape[2] if self.ids.dim() == 3 else 1
        return len(self.grid) or 1

    def per_batch(self) -> bool:
        """Whether the batch entries stand at different positions."""
        if self.ids is not None:
            return self.ids.dim() > 1 and self.ids.shape[0] > 1
        return self.offsets is not None and self.offsets.numel() > 1


class Geometry(NamedTuple):
    """How a call is cut into tiles: sizes, the roles of batch and heads, and the block sizes."""

    batch: int
    tokens: int
    heads: int
    heads_shared: bool  # whether S runs over the heads (else over the batch)
    block_s: int
    block_r: int
    block_f: int
    features: int  # angles per head: D for cosine, D / 2 for rotate

    @property
    def unique(self) -> int:
        return self.batch if self.heads_shared else self.heads

    @property
    def shared(self) -> int:
        return self.heads if self.heads_shared else self.batch

    @property
    def row_blocks(self) -> int:
        return -(-self.tokens * self.unique // self.block_r)

    @property
    def shared_blocks(self) -> int:
        return -(-self.shared // self.block_s)

    def order(self, batch: int, tokens: int, heads: int) -> tuple[int, int, int]:
        """Per-axis numbers in the kernels' order (s, n, u)."""
        return (heads, tokens, batch) if self.heads_shared else (batch, tokens, heads)


def _geometry(x: torch.Tensor, theta: torch.Tensor, positions: Positions, kind: str, rows: int) -> Geometry:
    batch, tokens = x.shape[0], x.shape[1]
    heads = x.shape[2] if x.dim() == 4 else 1
    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    per_head = theta.dim() == 2 and theta.shape[0] > 1
    per_batch = positions.per_batch()
    heads_shared = not per_head and heads > 1
    block_f = triton.next_power_of_2(features)
    # 128 threads with 8 features each; rows that share angles are held together.
    block_r = max(1, 1024 // block_f)
    block_s = rows if heads_shared or not per_batch else 1
    if block_f > 1024:
        block_s = 1
    return Geometry(batch, tokens, heads, heads_shared, block_s, block_r, block_f, features)


def _strides(tensor: torch.Tensor, geometry: Geometry) -> tuple[int, int, int, int]:
    """Strides (s, n, u, feature) in elements; an axis of size one gets stride 0, since it is never taken."""
    stride = tensor.stride()
    sizes = tensor.shape
    b = stride[0] if sizes[0] > 1 else 0
    n = stride[1] if sizes[1] > 1 else 0
    h = stride[2] if len(sizes) == 4 and sizes[2] > 1 else 0
    return (*geometry.order(b, n, h), stride[-1] if sizes[-1] > 1 else 1)


def _packed_strides(
    tensors: tuple[torch.Tensor, ...], geometry: Geometry
) -> tuple[int, bool, list[int]]:
    """Common divisor for vector access, whether features are adjacent everywhere, and all strides over it."""
    strides = [_strides(t, geometry) for t in tensors]
    unit = all(s[3] == 1 for s in strides)
    vec = 16 if unit and all(v % 16 == 0 for s in strides for v in s[:3]) else 1
    return vec, unit, [v for s in strides for v in (s[0] // vec, s[1] // vec, s[2] // vec, s[3])]


def _angle_integers(
    theta: torch.Tensor, positions: Positions, geometry: Geometry, table: torch.Tensor | None
) -> tuple[int, ...]:
    """Arguments ``tokens … sequences`` of the kernels."""
    theta_h = theta.stride(0) if theta.dim() == 2 and theta.shape[0] > 1 else 0
    ids, offsets = positions.ids, positions.offsets
    ids_b = ids_n = ids_k = offsets_b = 0
    if ids is not None:
        ids_b = ids.stride(0) if ids.dim() > 1 and ids.shape[0] > 1 else 0
        ids_n = ids.stride(1) if ids.dim() > 1 else ids.stride(0)
        ids_k = ids.stride(2) if ids.dim() == 3 else 0
    if offsets is not None and offsets.numel() > 1:
        offsets_b = offsets.stride(0)
    ids_s, _, ids_u = geometry.order(ids_b, 0, 0)
    offsets_s, _, offsets_u = geometry.order(offsets_b, 0, 0)
    table_n = table_u = 0
    if table is not None:
        table_n, table_u = table.stride(0), 0 if table.shape[1] == 1 else table.stride(1)
    size1, size2, size3 = (*positions.grid[1:], 1, 1, 1)[:3]
    cu_seqlens = positions.cu_seqlens
    return (
        geometry.tokens, geometry.unique, geometry.shared,
        0 if geometry.heads_shared else theta_h, theta.stride(-1),
        ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
        positions.offset, positions.prefix, size1, size2, size3,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
    )  # fmt: skip


def empty_in_order(x: torch.Tensor, features: int) -> torch.Tensor:
    """Uninitialised ``(*x.shape[:-1], features)`` whose axes lie in memory in the order of those of ``x``."""
    shape = (*x.shape[:-1], features)
    if x.is_contiguous():
        return x.new_empty(shape)
    axes = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
    inverse = sorted(range(x.dim()), key=lambda position: axes[position])
    return x.new_empty([shape[axis] for axis in axes]).permute(inverse)


def forward(
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the forward kernel. ``table`` (N, 1 or H, 2F) float32 replaces the angles by stored cosines and sines."""
    geometry = _geometry(x, theta, positions, kind, rows=4)
    out = empty_in_order(x, 2 * geometry.features)
    vec, unit, strides = _packed_strides((x, out), geometry)
    forward_launch(
        geometry.shared_blocks * geometry.row_blocks,
        (x, out, theta, positions.ids, positions.offsets, positions.cu_seqlens, table),
        (*_angle_integers(theta, positions, geometry, table), *strides),
        (
            kind, activation, positions.axes(), vec, unit, geometry.features, theta.shape[-1],
            geometry.heads_shared, geometry.block_s, geometry.block_r, geometry.block_f,
        ),
    )  # fmt: skip
    return out


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    theta_gradient: bool,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the backward kernel: gradient of ``x``, and that of ``theta`` when asked for."""
    geometry = _geometry(x, theta, positions, kind, rows=2 if activation != "none" or theta_gradient else 4)
    dx = empty_in_order(x, x.shape[-1])
    vec, unit, strides = _packed_strides((x, grad, dx), geometry)
    chunks = geometry.row_blocks
    partial = None
    if theta_gradient:
        chunks = _theta_chunks(geometry, x.device)
        rows = geometry.shared_blocks * chunks * geometry.block_r
        partial = torch.empty((rows, geometry.features), dtype=torch.float64, device=x.device)
    backward_launch(
        geometry.shared_blocks * chunks,
        (x, grad, dx, partial, theta, positions.ids, positions.offsets, positions.cu_seqlens, table),
        (*_angle_integers(theta, positions, geometry, table), chunks, *strides),
        (
            kind, activation, positions.axes(), vec, unit, geometry.features, theta.shape[-1],
            geometry.heads_shared, geometry.block_s, geometry.block_r, geometry.block_f,
        ),
    )  # fmt: skip
    return dx, None if partial is None else _reduce_theta(partial, theta, positions.axes(), geometry)


def _theta_chunks(geometry: Geometry, device: torch.device) -> int:
    """How many programs share the rows: enough to fill the GPU, and a whole number of turns through the heads."""
    step = 1 if geometry.heads_shared else math.lcm(geometry.unique, geometry.block_r) // geometry.block_r
    wanted = min(geometry.row_blocks, -(-6 * multiprocessors(device) // max(geometry.shared_blocks, 1)))
    return max(-(-wanted // step), 1) * step


def _reduce_theta(partial: torch.Tensor, theta: torch.Tensor, axes: int, geometry: Geometry) -> torch.Tensor:
    """Add the partial sums, and fold the axes of a grid back onto theta. Float64, in an order that never varies."""
    per_head = theta.dim() == 2 and theta.shape[0] > 1
    total = partial.view(-1, theta.shape[0] if per_head else 1, geometry.features).sum(0)  # (1 or H, F)
    used = axes * theta.shape[-1]
    total = torch.nn.functional.pad(total[:, :used], (0, max(0, used - geometry.features)))
    return total.unflatten(1, (axes, theta.shape[-1])).sum(1).reshape(theta.shape).to(theta.dtype)
