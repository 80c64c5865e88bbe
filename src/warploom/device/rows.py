"""Rows of tensors (B, N, H, F), as kernels address them, and loads and stores of pairs of features.

An angle rotates a pair of numbers. For ``rotate`` and ``interleaved`` the pair is two features of ``x``, (f, f + F) or
(2f, 2f + 1), going in and coming out. For ``cosine`` one feature goes in and the pair (f, f + F) comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Strides(NamedTuple):
    """Strides of a tensor (B, N, H, F). With a ``VEC``, all but that of features come divided by it."""

    b: tl.int64
    n: tl.int64
    h: tl.int64
    f: tl.int64


class RowSpec(NamedTuple):
    """Compile-time choices of functions that read, write and rotate rows."""

    KIND: str  # of encoding: see above
    AXES: int  # coordinates of a token
    VEC: int  # divisor of strides of x and the results, all but those of features
    THETA_VEC: int  # divisor of strides of theta
    UNIT: bool  # whether features are adjacent
    F: int  # angles of a head
    E: int  # frequencies of a head


@triton.jit
def load_pair(rows, mask, stride, first, spec: tl.constexpr, BLOCK_F: tl.constexpr):
    """Returns both members of the pairs from angle ``first`` on, (R, F) each, in the dtype of memory.

    ``rows`` (R, 1) point at feature 0.
    """
    F: tl.constexpr = spec.F
    if spec.KIND == "interleaved":
        f = 2 * first + tl.arange(0, 2 * BLOCK_F)
        inside = mask[:, None] & (f < 2 * F)[None, :]
        both = tl.load(rows + (f if spec.UNIT else f * stride)[None, :], mask=inside, other=0.0)
        one, two = tl.split(both.reshape(rows.shape[0], BLOCK_F, 2))
    else:
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < F)[None, :]
        one = tl.load(rows + (f if spec.UNIT else f * stride)[None, :], mask=inside, other=0.0)
        two = tl.load(rows + ((f + F) if spec.UNIT else (f + F) * stride)[None, :], mask=inside, other=0.0)
    return one, two


@triton.jit
def store_pair(rows, one, two, mask, stride, first, spec: tl.constexpr, BLOCK_F: tl.constexpr):
    """Stores what `load_pair` loads, rounded to the dtype of memory."""
    F: tl.constexpr = spec.F
    dtype = rows.dtype.element_ty
    if spec.KIND == "interleaved":
        f = 2 * first + tl.arange(0, 2 * BLOCK_F)
        both = tl.join(one.to(dtype), two.to(dtype)).reshape(rows.shape[0], 2 * BLOCK_F)
        inside = mask[:, None] & (f < 2 * F)[None, :]
        tl.store(rows + (f if spec.UNIT else f * stride)[None, :], both, mask=inside)
    else:
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < F)[None, :]
        tl.store(rows + (f if spec.UNIT else f * stride)[None, :], one.to(dtype), mask=inside)
        tl.store(rows + ((f + F) if spec.UNIT else (f + F) * stride)[None, :], two.to(dtype), mask=inside)


@triton.jit
def load_input(rows, mask, stride, first, spec: tl.constexpr, BLOCK_F: tl.constexpr):
    """Returns ``x`` from angle ``first`` on as two tiles (R, F): its pairs, or for ``cosine`` its features twice."""
    if spec.KIND == "cosine":
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < spec.F)[None, :]
        one = tl.load(rows + (f if spec.UNIT else f * stride)[None, :], mask=inside, other=0.0)
        two = one
    else:
        one, two = load_pair(rows, mask, stride, first, spec, BLOCK_F)
    return one, two


@triton.jit
def store_input(rows, one, two, mask, stride, first, spec: tl.constexpr, BLOCK_F: tl.constexpr):
    """Stores what `load_input` loads, rounded to the dtype of memory."""
    if spec.KIND == "cosine":
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < spec.F)[None, :]
        tl.store(rows + (f if spec.UNIT else f * stride)[None, :], one.to(rows.dtype.element_ty), mask=inside)
    else:
        store_pair(rows, one, two, mask, stride, first, spec, BLOCK_F)


class StateStrides(NamedTuple):
    """Strides of a state (S, H, F, E). All but that of ``e`` may come divided by a common divisor."""

    s: tl.int64
    h: tl.int64
    f: tl.int64
    e: tl.int64
