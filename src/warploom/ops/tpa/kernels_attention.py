"""Triton kernel of tensor-product attention for training and prefill: the forward pass.

Shapes. A program has a tile of BLOCK_N queries of one head and walks over tiles of BLOCK_M keys. A tile of keys (M, D)
or of values (M, E) comes as a pair: a tile in the dtype of memory and a coefficient (M,) that multiplies its rows,

    rank one    K[m] = s_k ak[m] · bk[m]             the factor as it was loaded, with s_k ak as coefficient
    beyond      K[m] = s_k · Σ_r ak[m, r] bk[m, r]   formed on chip, with s_k as coefficient

and coefficients multiply logits or weights in float32, which rounds nothing: at rank one no key is ever formed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.packed import sequence_bounds, sequence_of
from warploom.device.product import dot, rounded
from warploom.ops.tpa.kernels import exp

# ----------------------------------------------------------------------------------------------------------
# Device functions, of the backward kernels too
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_factor(b, token, rank, inside, b_n, b_r, b_f,
                F: tl.constexpr, BLOCK_F: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Feature factors (TOKENS, F) of one rank; strides of tokens and ranks come divided by ``VEC``."""
    f = tl.arange(0, BLOCK_F)
    rows = b + rank * (b_r * VEC) + (token.to(tl.int64) * (b_n * VEC))[:, None]
    mask = inside[:, None]
    if F != BLOCK_F:
        mask = mask & (f < F)[None, :]
    return tl.load(rows + (f if UNIT else f * b_f)[None, :], mask=mask, other=0.0)


@triton.jit
def load_product(
    a, b, token, inside, a_n, a_r, b_n, b_r, b_f,
    R: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Keys or values of a tile of tokens, without their scale: a tile (TOKENS, F) and a coefficient (TOKENS,)."""
    if R == 1:
        tile = load_factor(b, token, 0, inside, b_n, b_r, b_f, F, BLOCK_F, VEC, UNIT)
        coefficient = tl.load(a + token.to(tl.int64) * a_n, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((token.shape[0], BLOCK_F), tl.float32)
        for r in tl.static_range(R):
            factor = load_factor(b, token, r, inside, b_n, b_r, b_f, F, BLOCK_F, VEC, UNIT)
            weight = tl.load(a + token.to(tl.int64) * a_n + r * a_r, mask=inside, other=0.0)
            total += weight.to(tl.float32)[:, None] * factor.to(tl.float32)
        tile = rounded(total, b.dtype.element_ty)
        coefficient = tl.full((token.shape[0],), 1.0, tl.float32)
    return tile, coefficient


@triton.jit
def load_queries(
    a, b, head, token, inside, a_n, a_h, a_r, b_n, b_r, b_f, scale_q,
    R: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Q of a tile of tokens (TOKENS, F) in the dtype of memory. Without ``a``, the rank axis of ``b`` is the heads."""
    if a is None:
        q = load_factor(b, token, head, inside, b_n, b_r, b_f, F, BLOCK_F, VEC, UNIT).to(tl.float32)
    else:
        q = tl.zeros((token.shape[0], BLOCK_F), tl.float32)
        for r in tl.range(0, R, num_stages=1):
            factor = load_factor(b, token, r, inside, b_n, b_r, b_f, F, BLOCK_F, VEC, UNIT)
            weight = tl.load(
                a + token.to(tl.int64) * a_n + head.to(tl.int64) * a_h + r * a_r, mask=inside, other=0.0
            )
            q += weight.to(tl.float32)[:, None] * factor.to(tl.float32)
    return rounded(q * scale_q, b.dtype.element_ty)


@triton.jit
def visible_keys(n, tokens, keys, cu_seqlens, cu_stride, sequences, CAUSAL: tl.constexpr):
    """Query ``n`` sees the keys from ``first`` to ``end`` - 1: (N,) int32 each; none outside the tensor."""
    if cu_seqlens is None:
        first = tl.zeros_like(n)
        end = tl.zeros_like(n) + keys
    else:
        sequence = sequence_of(tl.minimum(n, tokens - 1), cu_seqlens, cu_stride, sequences)
        first, length = sequence_bounds(sequence, cu_seqlens, cu_stride)
        end = first + length
    if CAUSAL:
        end = tl.minimum(end, n + (keys - tokens + 1))
    return first, tl.where(n < tokens, end, 0)


# ----------------------------------------------------------------------------------------------------------
# Kernel
# ----------------------------------------------------------------------------------------------------------

# Every number is a run-time value of declared width: none of them ever causes a compilation.
_FORWARD_NUMBERS = (
    "tokens keys heads batches sequences cu_stride aq_b aq_n aq_h aq_r bq_b bq_n bq_r bq_d ak_b ak_m ak_h ak_r "
    "bk_b bk_m bk_r bk_d av_b av_m av_h av_r bv_b bv_m bv_r bv_e out_b out_n out_h out_e logit_scale scale_q scale_v"
).split()


@triton.jit(do_not_specialize=_FORWARD_NUMBERS)
def forward_kernel(
    aq, bq, ak, bk, av, bv, cu_seqlens, out, statistics,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, batches: tl.int32, sequences: tl.int32, cu_stride: tl.int64,
    aq_b: tl.int64, aq_n: tl.int64, aq_h: tl.int64, aq_r: tl.int64,
    bq_b: tl.int64, bq_n: tl.int64, bq_r: tl.int64, bq_d: tl.int64,
    ak_b: tl.int64, ak_m: tl.int64, ak_h: tl.int64, ak_r: tl.int64,
    bk_b: tl.int64, bk_m: tl.int64, bk_r: tl.int64, bk_d: tl.int64,
    av_b: tl.int64, av_m: tl.int64, av_h: tl.int64, av_r: tl.int64,
    bv_b: tl.int64, bv_m: tl.int64, bv_r: tl.int64, bv_e: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_e: tl.int64,
    logit_scale: tl.float32, scale_q: tl.float32, scale_v: tl.float32,
    CAUSAL: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    Q_VEC: tl.constexpr, Q_UNIT: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr,
):  # fmt: skip
    """Output and softmax statistics (B, H, 2, N), maximum and denominator, for one tile of queries of a head.

    The two are kept apart because their logarithm would cost the backward digits. ``logit_scale`` is that of logits
    and of K. A query that sees no key has a denominator of 0.
    """
    blocks = tl.cdiv(tokens, BLOCK_N)
    program = tl.program_id(0)
    head = program % heads  # neighbours share the feature factors they read
    batch = (program // heads % batches).to(tl.int64)
    block = program // heads // batches
    if CAUSAL:  # the longest first
        block = blocks - 1 - block
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < tokens
    first, end = visible_keys(n, tokens, keys, cu_seqlens, cu_stride, sequences, CAUSAL)
    if aq is not None:
        aq += batch * aq_b
    q = load_queries(
        aq, bq + batch * (bq_b * Q_VEC), head, n, inside, aq_n, aq_h, aq_r, bq_n, bq_r, bq_d, scale_q,
        RQ, D, BLOCK_D, Q_VEC, Q_UNIT,
    )  # fmt: skip
    ak += batch * ak_b + head.to(tl.int64) * ak_h
    av += batch * av_b + head.to(tl.int64) * av_h
    bk += batch * (bk_b * B_VEC)
    bv += batch * (bv_b * B_VEC)

    acc = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    start = tl.min(tl.where(inside, first, keys)) // BLOCK_M * BLOCK_M
    for m_first in range(start, tl.max(end), BLOCK_M):
        m = m_first + tl.arange(0, BLOCK_M)
        valid = m < keys
        k, weight = load_product(ak, bk, m, valid, ak_m, ak_r, bk_m, bk_r, bk_d, RK, D, BLOCK_D, B_VEC, B_UNIT)
        logits = dot(q, tl.trans(k), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)) * (weight * logit_scale)[None, :]
        seen = (m[None, :] >= first[:, None]) & (m[None, :] < end[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = exp(logits - base[:, None], k.dtype)
        keep = exp(top - base, k.dtype)
        total = total * keep + tl.sum(p, axis=1)
        top = highest
        v, weight = load_product(av, bv, m, valid, av_m, av_r, bv_m, bv_r, bv_e, RV, E, BLOCK_E, B_VEC, B_UNIT)
        if RV == 1:
            p *= weight[None, :]
        acc = dot(rounded(p, v.dtype), v, acc * keep[:, None])

    acc *= (scale_v / tl.where(total == 0.0, 1.0, total))[:, None]
    e = tl.arange(0, BLOCK_E)
    pointers = (
        out + batch * out_b + head.to(tl.int64) * out_h + (n.to(tl.int64) * out_n)[:, None] + (e * out_e)[None, :]
    )
    tl.store(pointers, rounded(acc, out.dtype.element_ty), mask=inside[:, None] & (e < E)[None, :])
    statistics += (batch * heads + head) * 2 * tokens + n
    tl.store(statistics, tl.where(total == 0.0, 0.0, top), mask=inside)
    tl.store(statistics + tokens, total, mask=inside)
