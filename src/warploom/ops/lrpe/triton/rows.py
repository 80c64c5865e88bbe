"""Rows of LRPE's tiles: their tokens, and their addresses.

A tile is (R, F): R rows of F angles each. A program computes the angles of its rows once, for the S
vectors of ``x`` that share each row's: those along the broadcast axis, which depends on theta. With one frequency
row per head it is the batch: S runs over the batch and a row is a (token, head), heads fastest. With one row
for all heads it is the heads: S runs over the heads and a row is a (batch entry, token), tokens fastest. Either way
neighbouring rows are neighbours in memory. The kernels only see strides; ``u`` is a place on the row axis, the head
or the batch entry of a row, and ``s`` one on the broadcast axis, the other of the two.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.rows import RowSpec
from warploom.ops.lrpe.triton.angles import divide


class RowStrides(NamedTuple):
    """Strides of a tensor; all but that of features come divided by ``VEC`` of `RowSpec`."""

    s: tl.int64
    n: tl.int64
    u: tl.int64
    f: tl.int64


class RowSizes(NamedTuple):
    """Sizes of the axes that rows and S run over."""

    tokens: tl.int32
    u: tl.int32
    s: tl.int32


class Split(NamedTuple):
    """Divisors that split programs into blocks of S and of rows, and rows into tokens and ``u``."""

    blocks: tl.int32  # blocks of the axis that moves faster
    blocks_inverse: tl.int64
    rows_inverse: tl.int64  # for the size of the faster of tokens and ``u``


class LrpeConfig(NamedTuple):
    """Compile-time choices of a kernel."""

    spec: RowSpec
    ACTIVATION: str
    TOKENS_INNER: bool  # whether S runs over the heads, and rows count tokens fastest
    ONE_THETA: bool  # whether all heads share a row of theta
    S: int  # vectors of x for each row of a tile
    R: int  # rows of a tile
    F: int  # angles of a row, as a block


@triton.jit
def split_program(split, TOKENS_INNER: tl.constexpr):
    """Returns the block of S and the block of rows of this program. Whatever lies closer together in memory moves faster.

    That is S where it runs over the heads of a token, and the rows where S runs over the batch: a copy kernel
    that takes the batch first takes 590 µs for what takes 578 µs this way and 570 µs without a batch axis.
    """
    program = tl.program_id(0)
    slow = divide(program, split.blocks_inverse)
    fast = program - slow * split.blocks
    if TOKENS_INNER:
        s_block, row_block = fast, slow
    else:
        s_block, row_block = slow, fast
    return s_block, row_block


@triton.jit
def rows_of(first_row, sizes, inverse, BLOCK_R: tl.constexpr, TOKENS_INNER: tl.constexpr):
    """Returns token (int32), ``u`` (int64) and validity of the rows of a tile, (R,) each.

    The last tile may reach beyond 2³¹, and rows become negative there.
    """
    row = first_row + tl.arange(0, BLOCK_R)
    slow = divide(row, inverse)
    if TOKENS_INNER:
        n, u = row - slow * sizes.tokens, slow
        mask = (u < sizes.u) & (row >= 0)
    else:
        n, u = slow, row - slow * sizes.u
        mask = (n < sizes.tokens) & (row >= 0)
    return n, u.to(tl.int64), mask


@triton.jit
def row_pointers(base, n, u, s, strides, VEC: tl.constexpr):
    """Returns pointers (R, 1) to feature 0 of every row of entry ``s``, in 64 bits."""
    rows = base + (n.to(tl.int64) * (strides.n * VEC) + u * (strides.u * VEC))[:, None]
    return rows + s.to(tl.int64) * (strides.s * VEC)
