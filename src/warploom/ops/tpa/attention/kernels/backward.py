"""Triton kernels of tensor-product attention: the backward pass.

Five kernels, each of which owns what it writes, so that every sum has a fixed order and two runs agree bit for bit:

    prepare_kernel   Q (B, H, N, D) formed once, and δ = Σ_e do ⊙ o (B, H, N); before a forward for Hopper Q alone
    query_kernel     dQ of a tile of queries of one head
    factor_kernel    of one token: dA_Q = s_q dQ B_Qᵀ (H, R) and dB_Q = s_q A_Qᵀ dQ (R, D)
    key_kernel       dK and dV of a tile of keys on chip, head after head of a group of heads; with them dA_K, dA_V, and
                     dB_K, dB_V summed over the group
    sum_kernel       dB_K and dB_V, from those sums

With p the weights and ``dp = do Vᵀ``: ``ds = p ⊙ (dp − δ)``, ``dQ = scale · ds K``, ``dK = scale · dsᵀ Q``,
``dV = pᵀ do``. Tiles of keys and values are pairs of a tile and a coefficient, as in `attention.kernels.forward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.packed import sequence_bounds, sequence_of_tile
from warploom.device.product import dot, rounded
from warploom.ops.tpa.attention.kernels.forward import (
    HeadRows,
    Product,
    Sizes,
    load_features,
    load_heads,
    load_product,
    logits_dot,
    loop_bounds,
    tiles_of,
    visible,
)
from warploom.ops.tpa.kernels.factors import Factors, Features, FeatureStrides, HeadStrides, exp, scaled


class KeyStrides(NamedTuple):
    """Of what `key_kernel` reads and writes."""

    bk: FeatureStrides
    bv: FeatureStrides
    grad: FeatureStrides
    dak: HeadStrides
    dav: HeadStrides


class KeyScales(NamedTuple):
    """What `key_kernel` multiplies: logits, also by what makes powers of two of them; the gradient of keys; values."""

    logits: tl.float32
    dk: tl.float32
    v: tl.float32


class Rows(NamedTuple):
    """What the forward left of rows of weights: maxima and inverse denominators of the softmax, and δ."""

    row_max: Any
    inverse_sum: Any
    delta: Any


# ----------------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_statistics(statistics, delta, tokens, n, mask):
    """`Rows` of the queries ``n`` of one head, of ``tokens``; 0, 0 and δ for a query that sees no key."""
    row_max = tl.load(statistics + n, mask=mask, other=0.0)
    row_sum = tl.load(statistics + tokens + n, mask=mask, other=0.0)
    inverse_sum = tl.div_rn(1.0, tl.where(row_sum == 0.0, float("inf"), row_sum))
    return Rows(row_max, inverse_sum, tl.load(delta + n, mask=mask, other=0.0))


@triton.jit
def weights_of(
    q, do, k_factors, v_factors, m_first, first, end, rows, keys, logit_scale, scale_v,
    K: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights p and gradients dp, (N, M) each, of a tile of queries on one of keys, and the keys' tile and coefficient."""
    k, k_weight = load_product(k_factors, m_first, keys, K, BLOCK_M, MASKED)
    v, v_weight = load_product(v_factors, m_first, keys, V, BLOCK_M, MASKED)
    zeros = tl.zeros((q.shape[0], BLOCK_M), tl.float32)
    logits = scaled(logits_dot(q, tl.trans(k), zeros, K), (k_weight * logit_scale)[None, :], k.dtype)
    p = exp(logits - rows.row_max[:, None], k.dtype) * rows.inverse_sum[:, None]
    if MASKED:
        m = m_first + tl.arange(0, BLOCK_M)
        p = tl.where((m[None, :] >= first[:, None]) & (m[None, :] < end[:, None]), p, 0.0)
    dp = scaled(dot(do, tl.trans(v), zeros), (v_weight * scale_v)[None, :], k.dtype)
    return p, dp, k, k_weight


@triton.jit
def factor_gradients(
    gradient, x, da, db, first, size, add, B: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """From the gradient (M, F) of ``A B`` of one head: that of A is stored, that of B too, in ``db`` (M, R, F).

    With ``add`` it is added to what ``db`` holds, where no other program writes.
    """
    f = tl.arange(0, B.BLOCK_F)
    row = tl.arange(0, TOKENS)  # 32-bit offsets in the tile: 64-bit ones would not fit in registers
    row_mask = first + row < size
    mask = row_mask[:, None] & (f < B.F)[None, :]
    sums = db + tl.cast(first, tl.int64) * (B.R * B.F) + (row * (B.R * B.F))[:, None] + f[None, :]
    ptrs = da.ptr + (first + row).to(tl.int64) * da.strides.n
    for r in tl.static_range(B.R):
        factor = load_features(x.features, first, size, r, B, TOKENS)
        tl.store(
            ptrs + r * da.strides.r,
            rounded(tl.sum(gradient * factor.to(tl.float32), axis=1), da.ptr.dtype.element_ty), mask=row_mask,
        )  # fmt: skip
        weight = load_heads(x.heads, first, size, r, TOKENS)
        before = tl.load(sums + r * B.F, mask=mask & add, other=0.0)
        tl.store(sums + r * B.F, before + gradient * weight[:, None], mask=mask)


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def prepare_kernel(
    aq, bq, out, grad, statistics, q, delta, lse, counters,
    tokens: tl.int32, heads: tl.int32,
    aq_strides: HeadStrides, bq_strides: FeatureStrides, out_strides: FeatureStrides, grad_strides: FeatureStrides,
    scale_q: tl.float32,
    Q: tl.constexpr, G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Q and δ of one token's queries, BLOCK_H of the heads; 16-bit ranks are summed BLOCK_R at a time.

    Q are the `Features` of ``bq``, G those of ``out`` and ``grad``. Without ``grad`` and the other three, Q alone. ``lse``
    (B, H, N), which may be None, gets what is subtracted from logits in base two for 16-bit weights; +inf makes those of
    queries that see no key zero. ``counters`` (2,), with which kernels for Hopper count their tiles, become zero. With ``PDL`` the launch after it is put in place while
    this one's last programs run, and waits for them.
    """
    if PDL:
        gdc_launch_dependents()
    if counters is not None:
        tl.store(counters + tl.arange(0, 2), tl.zeros((2,), tl.int32), mask=tl.program_id(0) == 0)
    shares = tl.cdiv(heads, BLOCK_H)
    program = tl.program_id(0)
    token = program // shares
    batch = (token // tokens).to(tl.int64)
    n = (token % tokens).to(tl.int64)
    h = program % shares * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, Q.BLOCK_F)
    head_mask = h < heads
    mask = head_mask[:, None] & (d < Q.F)[None, :]
    features = d if Q.UNIT else d * bq_strides.f
    bq += batch * (bq_strides.b * Q.VEC) + n * (bq_strides.n * Q.VEC)
    if aq is None:  # the rank axis is the heads
        tile = tl.load(bq + (h * (bq_strides.r * Q.VEC))[:, None] + features[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    else:
        tile = tl.zeros((BLOCK_H, Q.BLOCK_F), tl.float32)
        aq += batch * aq_strides.b + n * aq_strides.n
        if q.dtype.element_ty == tl.float32:  # the bits that `load_queries` made for the forward's logits
            for r in tl.range(0, Q.R, num_stages=1):
                a = tl.load(aq + h * aq_strides.h + r * aq_strides.r, mask=head_mask, other=0.0)
                b = tl.load(bq + r * (bq_strides.r * Q.VEC) + features, mask=d < Q.F, other=0.0)
                tile += a[:, None] * b[None, :]
        else:
            for first in range(0, Q.R, BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                real = (r < Q.R)[:, None] & (d < Q.F)[None, :]
                some = head_mask[:, None] & (r < Q.R)[None, :]
                a = tl.load(aq + (h * aq_strides.h)[:, None] + (r * aq_strides.r)[None, :], mask=some, other=0.0)
                b = tl.load(bq + (r * (bq_strides.r * Q.VEC))[:, None] + features[None, :], mask=real, other=0.0)
                tile = dot(a, b, tile)
    rows = batch * heads + h
    tl.store(
        q + (rows * tokens + n)[:, None] * Q.F + d[None, :], rounded(tile * scale_q, q.dtype.element_ty), mask=mask
    )
    if grad is not None:
        e = tl.arange(0, G.BLOCK_F)
        values = e if G.UNIT else e * out_strides.f
        grad_values = e if G.UNIT else e * grad_strides.f
        mask = head_mask[:, None] & (e < G.F)[None, :]
        out += batch * (out_strides.b * G.VEC) + n * (out_strides.n * G.VEC)
        grad += batch * (grad_strides.b * G.VEC) + n * (grad_strides.n * G.VEC)
        o = tl.load(out + (h * (out_strides.r * G.VEC))[:, None] + values[None, :], mask=mask, other=0.0)
        do = tl.load(grad + (h * (grad_strides.r * G.VEC))[:, None] + grad_values[None, :], mask=mask, other=0.0)
        tl.store(delta + rows * tokens + n, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1), mask=head_mask)
    if lse is not None:
        row_max = tl.load(statistics + rows * 2 * tokens + n, mask=head_mask, other=0.0)
        row_sum = tl.load(statistics + (rows * 2 + 1) * tokens + n, mask=head_mask, other=1.0)
        no_keys = row_sum == 0.0
        value = tl.where(no_keys, float("inf"), row_max + tl.log2(tl.where(no_keys, 1.0, row_sum)))
        tl.store(lse + rows * tokens + n, value, mask=head_mask)


@triton.jit
def query_kernel(
    q, ak, bk, av, bv, grad, statistics, delta, cu_seqlens, dq,
    sizes: Sizes, bk_strides: FeatureStrides, bv_strides: FeatureStrides, grad_strides: FeatureStrides,
    dq_strides: FeatureStrides, logit_scale: tl.float32, dq_scale: tl.float32, scale_v: tl.float32,
    CAUSAL: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SUM_DELTA: tl.constexpr,
):  # fmt: skip
    """``dq_scale · ds K`` of one tile of queries of a head, where K is without its scale.

    ``SUM_DELTA``: δ is not ``Σ_e do ⊙ o`` but ``Σ_m p ⊙ dp``, summed here and left for `key_kernel`. That costs a pass,
    and cancels ``dp`` to the last bit where a query sees one key alone. It is divided by ``Σ_m p``: large logits differ
    from the forward's in their last bits, so that weights add up to a little more or less than one.
    """
    tokens, keys, heads, batches, sequences, cu_stride, head_stride = sizes
    blocks = tiles_of(tokens, cu_seqlens, sequences, BLOCK_N)
    program = tl.program_id(0)
    head = program % heads
    batch = (program // heads % batches).to(tl.int64)
    block = program // heads // batches
    if CAUSAL:  # the longest first
        block = blocks - 1 - block
    h = head.to(tl.int64)
    row = batch * heads + h
    all_tokens = tokens
    q += row * tokens * K.F
    delta += row * tokens
    statistics += row * 2 * tokens
    grad += batch * (grad_strides.b * G.VEC) + h * (grad_strides.r * G.VEC)
    dq += batch * dq_strides.b + h * dq_strides.r
    ak += row * (K.R * head_stride * 16)
    av += row * (V.R * head_stride * 16)
    bk += batch * (bk_strides.b * K.VEC)
    bv += batch * (bv_strides.b * K.VEC)
    if cu_seqlens is not None:
        sequence, block = sequence_of_tile(block, cu_seqlens, cu_stride, sequences, BLOCK_N)
        start, tokens = sequence_bounds(sequence, cu_seqlens, cu_stride)
        if block * BLOCK_N >= tokens:
            return
        keys = tokens
        q, grad, dq = (
            q + start.to(tl.int64) * K.F,
            grad + start * (grad_strides.n * G.VEC),
            dq + start * dq_strides.n,
        )
        delta, statistics, ak, av = delta + start, statistics + start, ak + start, av + start
        bk, bv = bk + start * (bk_strides.n * K.VEC), bv + start * (bv_strides.n * K.VEC)
    n_first = block * BLOCK_N
    n = n_first + tl.arange(0, BLOCK_N)
    row_mask = n < tokens
    first, end = visible(n, tokens, keys, CAUSAL, True)
    Q: tl.constexpr = Features(1, K.F, K.BLOCK_F, 1, True)
    stride = row * 0 + K.F
    queries = load_features(Factors(q, FeatureStrides(stride, stride, stride, 1)), n_first, tokens, 0, Q, BLOCK_N)
    grad_rows = Factors(grad, grad_strides)
    do = load_features(grad_rows, n_first, tokens, 0, G, BLOCK_N)
    rows = load_statistics(statistics, delta, all_tokens, n, row_mask)
    k_factors = Product(HeadRows(ak, head_stride), Factors(bk, bk_strides))
    v_factors = Product(HeadRows(av, head_stride), Factors(bv, bv_strides))
    bounds = loop_bounds(first, end, BLOCK_M)
    delta_rows = rows.delta
    if SUM_DELTA:
        delta_rows = tl.zeros((BLOCK_N,), tl.float32)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for m_first in range(bounds[0], bounds[3], BLOCK_M):
            p, dp, _, _ = weights_of(
                queries, do, k_factors, v_factors, m_first, first, end, rows, keys, logit_scale, scale_v,
                K, V, BLOCK_M, True,
            )  # fmt: skip
            delta_rows += tl.sum(p * dp, axis=1)
            total += tl.sum(p, axis=1)
        # p of one key is that total, to the bit
        delta_rows = tl.div_rn(delta_rows, tl.where(total == 0.0, 1.0, total))
        tl.store(delta + n, delta_rows, mask=row_mask)
    acc = tl.zeros((BLOCK_N, K.BLOCK_F), tl.float32)
    for part in tl.static_range(1, 3):
        for m_first in range(bounds[part], bounds[part + 1], BLOCK_M):
            p, dp, k, k_weight = weights_of(
                queries, do, k_factors, v_factors, m_first, first, end, rows, keys, logit_scale, scale_v,
                K, V, BLOCK_M, part != 1,
            )  # fmt: skip
            ds = p * (dp - delta_rows[:, None]) * k_weight[None, :]
            acc = dot(rounded(ds, k.dtype), k, acc)
    d = tl.arange(0, K.BLOCK_F)
    ptrs = dq + (n.to(tl.int64) * dq_strides.n)[:, None] + (d * dq_strides.f)[None, :]
    tl.store(ptrs, rounded(acc * dq_scale, dq.dtype.element_ty), mask=row_mask[:, None] & (d < K.F)[None, :])


@triton.jit
def key_kernel(
    q, ak, bk, av, bv, grad, statistics, delta, cu_seqlens, dak, dav, dbk, dbv,
    sizes: Sizes, strides: KeyStrides, groups: tl.int32, zero: tl.int32, scales: KeyScales,
    CAUSAL: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of the four factors of one tile of keys, over the heads of one group.

    ``dbk`` (groups, B, M, K.R, D) and ``dbv`` (groups, B, M, V.R, E), float32, get this group's sums.
    """
    Q: tl.constexpr = Features(1, K.F, K.BLOCK_F, 1, True)
    tokens, keys, heads, batches, sequences, cu_stride, head_stride = sizes
    program = tl.program_id(0)
    group = program % groups
    batch = (program // groups % batches).to(tl.int64)
    block = program // groups // batches
    bk += batch * (strides.bk.b * K.VEC)
    bv += batch * (strides.bv.b * K.VEC)
    grad += batch * (strides.grad.b * G.VEC)
    dak += batch * strides.dak.b
    dav += batch * strides.dav.b
    sums = (group * batches.to(tl.int64) + batch) * keys
    dbk += sums * (K.R * K.F)
    dbv += sums * (V.R * V.F)
    all_tokens = tokens
    if cu_seqlens is not None:
        sequence, block = sequence_of_tile(block, cu_seqlens, cu_stride, sequences, BLOCK_M)
        start, keys = sequence_bounds(sequence, cu_seqlens, cu_stride)
        if block * BLOCK_M >= keys:
            return
        tokens = keys
        ak, av, statistics, delta = ak + start, av + start, statistics + start, delta + start
        bk, bv = bk + start * (strides.bk.n * K.VEC), bv + start * (strides.bv.n * K.VEC)
        q, grad = q + start.to(tl.int64) * K.F, grad + start * (strides.grad.n * G.VEC)
        dak, dav = dak + start * strides.dak.n, dav + start * strides.dav.n
        dbk, dbv = dbk + start.to(tl.int64) * (K.R * K.F), dbv + start.to(tl.int64) * (V.R * V.F)
    m_first = block * BLOCK_M
    first, end = visible(m_first + tl.arange(0, BLOCK_M), keys, tokens, CAUSAL, False)
    bounds = loop_bounds(first, end, BLOCK_N)
    first_head = group * heads // groups
    for head in range(first_head, (group + 1) * heads // groups):
        h = head + batch * 0  # int64
        # Addresses that seem to depend on the head: else those of whole tiles are held in registers over all heads.
        here = m_first + head * zero
        row = batch * heads + h
        k_factors = Product(HeadRows(ak + row * (K.R * head_stride * 16), head_stride), Factors(bk, strides.bk))
        v_factors = Product(HeadRows(av + row * (V.R * head_stride * 16), head_stride), Factors(bv, strides.bv))
        grad_rows = Factors(grad + h * (strides.grad.r * G.VEC), strides.grad)
        k, k_weight = load_product(k_factors, here, keys, K, BLOCK_M)
        v, v_weight = load_product(v_factors, here, keys, V, BLOCK_M)
        dk = tl.zeros((BLOCK_M, K.BLOCK_F), tl.float32)
        dv = tl.zeros((BLOCK_M, V.BLOCK_F), tl.float32)
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            for n_first in range(bounds[part], bounds[part + 1], BLOCK_N):
                there = n_first + head * zero
                n = there + tl.arange(0, BLOCK_N)
                row_mask = n < tokens
                q_ptr = q + row * all_tokens * K.F
                stride = h * 0 + K.F
                q_rows = Factors(q_ptr, FeatureStrides(stride, stride, stride, 1))
                queries = load_features(q_rows, there, tokens, 0, Q, BLOCK_N, part != 1)
                do = load_features(grad_rows, there, tokens, 0, G, BLOCK_N, part != 1)
                rows = load_statistics(
                    statistics + row * 2 * all_tokens, delta + row * all_tokens, all_tokens, n, row_mask
                )
                if k.dtype == tl.float32:  # with the factors in the forward's order, to have its bits
                    logits = logits_dot(queries, tl.trans(k), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), K)
                    logits = tl.trans(logits)
                else:
                    logits = logits_dot(k, tl.trans(queries), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), K)
                logits = scaled(logits, (k_weight * scales.logits)[:, None], k.dtype)
                p = exp(logits - rows.row_max[None, :], k.dtype) * rows.inverse_sum[None, :]
                if part != 1:
                    p = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < end[:, None]), p, 0.0)
                dv = dot(rounded(p, do.dtype), do, dv)
                dp = dot(v, tl.trans(do), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                dp = scaled(dp, (v_weight * scales.v)[:, None], k.dtype)
                ds = p * (dp - rows.delta[None, :])
                dk = dot(rounded(ds, queries.dtype), queries, dk)
        factor_gradients(
            dk * scales.dk, k_factors, Factors(dak + h * strides.dak.h, strides.dak), dbk, here, keys,
            head > first_head, K, BLOCK_M,
        )  # fmt: skip
        factor_gradients(
            dv * scales.v, v_factors, Factors(dav + h * strides.dav.h, strides.dav), dbv, here, keys,
            head > first_head, V, BLOCK_M,
        )  # fmt: skip
        tl.debug_barrier()  # the next head adds to what was stored here


@triton.jit
def factor_kernel(
    dq, aq, bq, daq, dbq, tokens: tl.int32, heads: tl.int32,
    aq_strides: HeadStrides, bq_strides: FeatureStrides, daq_strides: HeadStrides, dbq_strides: FeatureStrides,
    scale_q: tl.float32, Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of one token's query factors from dQ (B, N, H, D); BLOCK_R of the ranks.

    Q are the `Features` of ``bq`` and ``dbq``. ``PDL``: see `warploom.runtime.launch.has_pdl`.
    """
    if PDL:
        gdc_wait()
    R_BLOCKS: tl.constexpr = (Q.R + BLOCK_R - 1) // BLOCK_R
    program = tl.program_id(0)
    token = program // R_BLOCKS
    batch = (token // tokens).to(tl.int64)
    n = (token % tokens).to(tl.int64)
    r = program % R_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, Q.BLOCK_F)
    feature_mask = (r < Q.R)[:, None] & (d < Q.F)[None, :]
    bq += batch * (bq_strides.b * Q.VEC) + n * (bq_strides.n * Q.VEC)
    b = tl.load(
        bq + (r * (bq_strides.r * Q.VEC))[:, None] + (d if Q.UNIT else d * bq_strides.f)[None, :],
        mask=feature_mask,
        other=0.0,
    )
    total = tl.zeros((BLOCK_R, Q.BLOCK_F), tl.float32)
    for first in range(0, heads, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        head_mask = (h < heads)[:, None] & (r < Q.R)[None, :]
        a = tl.load(
            aq
            + batch * aq_strides.b
            + n * aq_strides.n
            + (h * aq_strides.h)[:, None]
            + (r * aq_strides.r)[None, :],
            mask=head_mask,
            other=0.0,
        )
        rows = (token.to(tl.int64) * heads + h) * Q.F
        gradient = tl.load(
            dq + rows[:, None] + d[None, :], mask=(h < heads)[:, None] & (d < Q.F)[None, :], other=0.0
        )
        total = dot(tl.trans(a), gradient, total)
        da = dot(gradient, tl.trans(b), tl.zeros((BLOCK_H, BLOCK_R), tl.float32)) * scale_q
        ptrs = (
            daq
            + batch * daq_strides.b
            + n * daq_strides.n
            + (h * daq_strides.h)[:, None]
            + (r * daq_strides.r)[None, :]
        )
        tl.store(ptrs, rounded(da, daq.dtype.element_ty), mask=head_mask)
    dbq += batch * (dbq_strides.b * Q.VEC) + n * (dbq_strides.n * Q.VEC)
    ptrs = dbq + (r * (dbq_strides.r * Q.VEC))[:, None] + (d if Q.UNIT else d * dbq_strides.f)[None, :]
    tl.store(ptrs, rounded(total * scale_q, dbq.dtype.element_ty), mask=feature_mask)


@triton.jit
def sum_groups(sums, out, first, groups, rows, keys, B: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``first …`` of the gradient (B, M, R, F) of a feature factor: ``sums`` (groups, B, M, R, F) over the groups."""
    row = first.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, B.BLOCK_F)
    mask = (row < rows)[:, None] & (f < B.F)[None, :]
    ptrs = sums + (row * B.F)[:, None] + f[None, :]
    total = tl.zeros((BLOCK, B.BLOCK_F), tl.float32)
    for _ in tl.range(0, groups, num_stages=4):  # loads of several groups under way at once
        total += tl.load(ptrs, mask=mask, other=0.0)
        ptrs += rows * B.F
    key, r = row // B.R, row % B.R
    strides = out.strides
    offsets = key // keys * (strides.b * B.VEC) + key % keys * (strides.n * B.VEC) + r * (strides.r * B.VEC)
    features = f if B.UNIT else f * strides.f
    tl.store(out.ptr + offsets[:, None] + features[None, :], rounded(total, out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    k_sums, v_sums, dbk, dbv,
    batches: tl.int32, keys: tl.int32, groups: tl.int32, k_programs: tl.int32,
    dbk_strides: FeatureStrides, dbv_strides: FeatureStrides,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of ``bk`` (B, M, RK, D) and ``bv``, BLOCK rows to a program: the sums of groups of heads, added up in order.

    The first ``k_programs`` programs add up those of ``bk``. K and V are `Features`. ``PDL``: see
    `warploom.runtime.launch.has_pdl`.
    """
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    tokens = batches.to(tl.int64) * keys
    if program < k_programs:
        sum_groups(k_sums, Factors(dbk, dbk_strides), program, groups, tokens * K.R, keys, K, BLOCK)
    else:
        sum_groups(v_sums, Factors(dbv, dbv_strides), program - k_programs, groups, tokens * V.R, keys, V, BLOCK)
