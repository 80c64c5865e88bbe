"""Triton kernel of tensor-product attention for training and prefill: the forward pass.

Shapes. A program has a tile of BLOCK_N queries of one head and loops over tiles of BLOCK_M keys. To a tile of a packed
sequence there are no other tokens. A tile of keys (M, D) or of values (M, E) comes as a pair: a tile in the dtype of
memory and a coefficient (M,) that multiplies its rows,

    rank one    K[m] = s_k ak[m] · bk[m]             the factor as it was loaded, with s_k ak as coefficient
    beyond      K[m] = s_k · Σ_r ak[m, r] bk[m, r]   formed on chip, with s_k as coefficient

and coefficients multiply logits or weights in float32, which rounds nothing: at rank one no key is ever formed. Head
factors of keys and values come as (B, H, R, M) in float32, so that a tile of keys finds those of its head side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.device.packed import sequence_bounds, sequence_of_tile
from warploom.device.product import dot, exact_dot, rounded
from warploom.ops.tpa.kernels.factors import Factors, FeatureStrides, HeadStrides, exp, scaled


class Sizes(NamedTuple):
    """Sizes of a call, and strides that belong to no tensor of factors."""

    tokens: tl.int32
    keys: tl.int32
    heads: tl.int32
    batch: tl.int32
    sequences: tl.int32  # packed ones; 0 without
    cu_stride: tl.int64
    head_stride: tl.int64  # of ranks in head factors (B, H, R, M), divided by 16


class HeadRows(NamedTuple):
    """Head factors (R, M) of one head, float32, tokens adjacent; the stride of ranks comes divided by 16."""

    ptr: Any
    r: tl.int64


class Product(NamedTuple):
    """Keys or values of one head, as factors in memory."""

    heads: HeadRows
    features: Factors


# ----------------------------------------------------------------------------------------------------------
# Device functions, of the backward kernels too
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_features(
    b, first, size, rank, B: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr = True
):  # fmt: skip
    """Feature factors (TOKENS, F) of one rank, from token ``first`` on of ``size``. Without ``MASKED`` all are there."""
    tile = b.ptr + first * (b.strides.n * B.VEC) + rank * (b.strides.r * B.VEC)
    n = tl.arange(0, TOKENS)
    f = tl.arange(0, B.BLOCK_F)
    if B.UNIT:
        ptrs = tile + ((n * (b.strides.n.to(tl.int32) * B.VEC))[:, None] + f[None, :])
    else:
        ptrs = tile + ((n * (b.strides.n * B.VEC))[:, None] + (f * b.strides.f)[None, :])
    if MASKED:
        factor = tl.load(ptrs, mask=(first + n < size)[:, None] & (f < B.F)[None, :], other=0.0)
    elif B.F != B.BLOCK_F:
        factor = tl.load(ptrs, mask=(f < B.F)[None, :], other=0.0)
    else:
        factor = tl.load(ptrs)
    return factor


@triton.jit
def load_heads(a, first, size, rank, TOKENS: tl.constexpr, MASKED: tl.constexpr = True):
    """Head factors (TOKENS,) of one rank, float32."""
    n = tl.arange(0, TOKENS)
    ptrs = a.ptr + rank * (a.r * 16) + first + n
    if MASKED:
        factor = tl.load(ptrs, mask=first + n < size, other=0.0)
    else:
        factor = tl.load(ptrs)
    return factor


@triton.jit
def load_product(x, first, size, B: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr = True):
    """Keys or values of a tile of tokens, without their scale: a tile (TOKENS, F) and a coefficient (TOKENS,)."""
    if B.R == 1:
        tile = load_features(x.features, first, size, 0, B, TOKENS, MASKED)
        coefficient = load_heads(x.heads, first, size, 0, TOKENS, MASKED)
    else:
        total = tl.zeros((TOKENS, B.BLOCK_F), tl.float32)
        for r in tl.static_range(B.R):
            factor = load_features(x.features, first, size, r, B, TOKENS, MASKED)
            total += load_heads(x.heads, first, size, r, TOKENS, MASKED)[:, None] * factor.to(tl.float32)
        tile = rounded(total, x.features.ptr.dtype.element_ty)
        coefficient = tl.full((TOKENS,), 1.0, tl.float32)
    return tile, coefficient


@triton.jit
def logits_dot(a, b, acc, K: tl.constexpr):
    """``a · b + acc`` for logits. Float32 units take those of float32 where registers suffice.

    A weight's relative error is the absolute one of its logit, so that large logits need all their bits.
    """
    if a.dtype == tl.float32 and ((K.BLOCK_F <= 16 and K.R <= 8) or (K.BLOCK_F <= 64 and K.R == 1)):
        acc = exact_dot(a, b, acc)
    else:
        acc = dot(a, b, acc)
    return acc


@triton.jit
def load_queries(a, b, head, first, size, scale_q, Q: tl.constexpr, TOKENS: tl.constexpr):
    """Q of a tile of tokens (TOKENS, F) in the dtype of memory. Without ``a``, the rank axis of ``b`` is the heads."""
    if a.ptr is None:
        q = load_features(b, first, size, head, Q, TOKENS).to(tl.float32)
    else:
        token = first + tl.arange(0, TOKENS)
        heads = a.ptr + token.to(tl.int64) * a.strides.n + head.to(tl.int64) * a.strides.h
        q = tl.zeros((TOKENS, Q.BLOCK_F), tl.float32)
        for r in tl.range(0, Q.R, num_stages=1):
            factor = load_features(b, first, size, r, Q, TOKENS)
            weight = tl.load(heads + r * a.strides.r, mask=token < size, other=0.0)
            q += weight.to(tl.float32)[:, None] * factor.to(tl.float32)
    return rounded(q * scale_q, b.ptr.dtype.element_ty)


@triton.jit
def visible(i, size, others, CAUSAL: tl.constexpr, QUERIES: tl.constexpr):
    """Which ``others`` token ``i`` of ``size`` sees: from ``first`` to ``end`` - 1, int32 of the shape of i.

    ``QUERIES``: the tokens are queries and the others keys, or the other way round. Tokens behind the last see what
    the last one sees.
    """
    i = tl.minimum(i, size - 1)
    first = tl.zeros_like(i)
    end = tl.zeros_like(i) + others
    if CAUSAL and QUERIES:
        end = tl.minimum(end, i + (others - size + 1))
    elif CAUSAL:
        first = tl.maximum(first, i - (size - others))
    return first, end


@triton.jit
def tiles_of(tokens, cu_seqlens, sequences, BLOCK: tl.constexpr):
    """Tiles of ``BLOCK`` tokens; none holds tokens of two packed sequences, see `warploom.device.packed`."""
    if cu_seqlens is None:
        tiles = tl.cdiv(tokens, BLOCK)
    else:
        tiles = tokens // BLOCK + sequences
    return tiles


@triton.jit
def loop_bounds(first, end, BLOCK: tl.constexpr):
    """Bounds of a loop over tiles of ``BLOCK`` others: its start, where all tokens see a tile, where they no longer do, and its end.

    The four bounds rise and are multiples of ``BLOCK`` but the last: masks are for the tiles outside the inner two.
    """
    start = tl.min(first) // BLOCK * BLOCK
    stop = tl.maximum(tl.max(end), start)
    whole = tl.minimum(tl.cdiv(tl.max(first), BLOCK) * BLOCK, tl.cdiv(stop, BLOCK) * BLOCK)
    rest = tl.maximum(tl.minimum(tl.min(end), stop) // BLOCK * BLOCK, whole)
    return start, whole, rest, stop


# ----------------------------------------------------------------------------------------------------------
# Kernel
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def forward_kernel(
    aq, bq, ak, bk, av, bv, cu_seqlens, out, statistics,
    sizes: Sizes, aq_strides: HeadStrides, bq_strides: FeatureStrides, bk_strides: FeatureStrides,
    bv_strides: FeatureStrides, out_strides: FeatureStrides,
    logit_scale: tl.float32, scale_q: tl.float32, scale_v: tl.float32,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Output and softmax statistics (B, H, 2, N), maximum and denominator, for one tile of queries of a head.

    The two are kept apart because their logarithm would cost the backward digits. ``logit_scale`` is that of logits
    and of K. A query that sees no key has a denominator of 0. Q, K and V are `Features`.
    """
    tokens, keys, heads, batches, sequences, cu_stride, head_stride = sizes
    blocks = tiles_of(tokens, cu_seqlens, sequences, BLOCK_N)
    program = tl.program_id(0)
    head = program % heads  # neighbours share the feature factors they read
    batch = (program // heads % batches).to(tl.int64)
    block = program // heads // batches
    if CAUSAL:  # the longest first
        block = blocks - 1 - block
    ak += (batch * heads + head) * (K.R * head_stride * 16)
    av += (batch * heads + head) * (V.R * head_stride * 16)
    statistics += (batch * heads + head) * 2 * tokens
    row_sums = statistics + tokens
    if cu_seqlens is not None:
        sequence, block = sequence_of_tile(block, cu_seqlens, cu_stride, sequences, BLOCK_N)
        start, tokens = sequence_bounds(sequence, cu_seqlens, cu_stride)
        if block * BLOCK_N >= tokens:
            return
        keys = tokens
        ak, av, statistics, row_sums = ak + start, av + start, statistics + start, row_sums + start
        bq, bk, bv = (
            bq + start * (bq_strides.n * Q.VEC),
            bk + start * (bk_strides.n * K.VEC),
            bv + start * (bv_strides.n * K.VEC),
        )
        out += start * out_strides.n
        if aq is not None:
            aq += start * aq_strides.n
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = n < tokens
    first, end = visible(n, tokens, keys, CAUSAL, True)
    if aq is not None:
        aq += batch * aq_strides.b
    bq_factors = Factors(bq + batch * (bq_strides.b * Q.VEC), bq_strides)
    q = load_queries(Factors(aq, aq_strides), bq_factors, head, block * BLOCK_N, tokens, scale_q, Q, BLOCK_N)
    bk += batch * (bk_strides.b * K.VEC)
    bv += batch * (bv_strides.b * K.VEC)
    k_factors = Product(HeadRows(ak, head_stride), Factors(bk, bk_strides))
    v_factors = Product(HeadRows(av, head_stride), Factors(bv, bv_strides))

    acc = tl.zeros((BLOCK_N, V.BLOCK_F), tl.float32)
    row_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_N,), tl.float32)
    bounds = loop_bounds(first, end, BLOCK_M)
    for part in tl.static_range(1, 3):
        for m_first in range(bounds[part], bounds[part + 1], BLOCK_M):
            m = m_first + tl.arange(0, BLOCK_M)
            k, k_weight = load_product(k_factors, m_first, keys, K, BLOCK_M, part != 1)
            logits = logits_dot(q, tl.trans(k), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), K)
            logits = scaled(logits, (k_weight * logit_scale)[None, :], k.dtype)
            if part != 1:
                mask = (m[None, :] >= first[:, None]) & (m[None, :] < end[:, None])
                logits = tl.where(mask, logits, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(logits, axis=1))
            base = new_max
            if part != 1:
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exp(logits - base[:, None], k.dtype)
            rescale = exp(row_max - base, k.dtype)
            row_sum = row_sum * rescale + tl.sum(p, axis=1)
            row_max = new_max
            v, v_weight = load_product(v_factors, m_first, keys, V, BLOCK_M, part != 1)
            if V.R == 1:
                p *= v_weight[None, :]
            acc = dot(rounded(p, v.dtype), v, acc * rescale[:, None])

    acc *= (scale_v / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    e = tl.arange(0, V.BLOCK_F)
    ptrs = (
        out
        + batch * out_strides.b
        + head.to(tl.int64) * out_strides.r
        + (n.to(tl.int64) * out_strides.n)[:, None]
        + (e * out_strides.f)[None, :]
    )
    tl.store(ptrs, rounded(acc, out.dtype.element_ty), mask=row_mask[:, None] & (e < V.F)[None, :])
    tl.store(statistics + n, tl.where(row_sum == 0.0, 0.0, row_max), mask=row_mask)
    tl.store(row_sums + n, row_sum, mask=row_mask)
