"""A Triton kernel that makes bfloat16 terms of float32 tensors, before the loops of attention read them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.product import terms_of
from warploom.ops.flash_attention.triton.tiles import BackwardStrides


class TermsSizes(NamedTuple):
    """Sizes of a call."""

    tokens: tl.int32
    keys: tl.int32
    heads: tl.int32
    key_heads: tl.int32
    batch_size: tl.int32


class TermsTiles(NamedTuple):
    """Compile-time choices of `terms_kernel`."""

    D: tl.constexpr
    E: tl.constexpr
    TERMS: tl.constexpr
    BLOCK_R: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_E: tl.constexpr


@triton.jit
def split_rows(x, terms, program, rows, tokens, heads, strides,
               F: tl.constexpr, TERMS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Store the terms of block number ``program`` of a tensor's rows, if it has that; returns its number in the next tensor."""
    blocks = tl.cdiv(rows, BLOCK_R)
    if (program >= 0) & (program < blocks):
        row = program * BLOCK_R + tl.arange(0, BLOCK_R)
        head, token, batch = row % heads, row // heads % tokens, row // heads // tokens
        feature = tl.arange(0, BLOCK_F)
        mask = (row < rows)[:, None] & (feature < F)[None, :]
        offsets = (batch * strides.b + token * strides.n + head * strides.h)[:, None] + (feature * strides.f)[
            None, :
        ]
        tile = terms_of(tl.load(x + offsets, mask=mask, other=0.0), TERMS)
        ptrs = terms + (row * F)[:, None] + feature[None, :]
        for i in tl.static_range(TERMS):
            tl.store(ptrs + i * rows * F, tile[i], mask=mask)
    return program - blocks


@triton.jit
def terms_kernel(
    q, k, v, grad, q_terms, k_terms, v_terms, grad_terms,
    sizes: TermsSizes, strides: BackwardStrides, tiles: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write float32 tensors (B, N, H, F) as sums of several in bfloat16, terms (TERMS, B, N, H, F) without gaps.

    In the forward there are no gradients of the output. With ``PDL`` it runs beside
    `backward.prepare_kernel`, of which it reads nothing, and does not end before that has ended.
    """
    D: tl.constexpr = tiles.D
    E: tl.constexpr = tiles.E
    TERMS: tl.constexpr = tiles.TERMS
    BLOCK_R: tl.constexpr = tiles.BLOCK_R
    BLOCK_D: tl.constexpr = tiles.BLOCK_D
    BLOCK_E: tl.constexpr = tiles.BLOCK_E
    tokens, keys, heads, key_heads = sizes.tokens, sizes.keys, sizes.heads, sizes.key_heads
    program = tl.program_id(0).to(tl.int64)
    query_rows = tl.cast(sizes.batch_size, tl.int64) * tokens * heads
    key_rows = tl.cast(sizes.batch_size, tl.int64) * keys * key_heads
    program = split_rows(k, k_terms, program, key_rows, keys, key_heads, strides.k, D, TERMS, BLOCK_R, BLOCK_D)
    program = split_rows(v, v_terms, program, key_rows, keys, key_heads, strides.v, E, TERMS, BLOCK_R, BLOCK_E)
    program = split_rows(q, q_terms, program, query_rows, tokens, heads, strides.q, D, TERMS, BLOCK_R, BLOCK_D)
    if grad is not None:
        split_rows(grad, grad_terms, program, query_rows, tokens, heads, strides.grad, E, TERMS, BLOCK_R, BLOCK_E)
    if PDL:
        if tl.program_id(0) == 0:  # one program is enough to hold what is launched next
            gdc_wait()
