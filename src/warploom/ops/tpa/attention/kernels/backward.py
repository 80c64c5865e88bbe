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

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.packed import sequence_bounds, sequence_of_tile
from warploom.device.product import dot, rounded
from warploom.ops.tpa.attention.kernels.forward import (
    load_factor,
    load_product,
    load_weights,
    scaled,
    tiles_of,
    visible,
    walk,
)
from warploom.ops.tpa.kernels.factors import exp

# ----------------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(
    x, first, size, x_n, x_f, ROWS: tl.constexpr,
    F: tl.constexpr, BLOCK_F: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr = True,
):  # fmt: skip
    """Rows (ROWS, F) of one head; the stride of tokens comes divided by ``VEC``."""
    return load_factor(x, first, size, 0, x_n, x_n, x_f, ROWS, F, BLOCK_F, VEC, UNIT, MASKED)


@triton.jit
def load_statistics(statistics, delta, tokens, n, inside):
    """Maximum, inverse denominator and δ of queries of one of all heads, of ``tokens``; of a blind query 0, 0 and δ."""
    top = tl.load(statistics + n, mask=inside, other=0.0)
    total = tl.load(statistics + tokens + n, mask=inside, other=0.0)
    share = tl.div_rn(1.0, tl.where(total == 0.0, float("inf"), total))
    return top, share, tl.load(delta + n, mask=inside, other=0.0)


@triton.jit
def weigh_keys(
    queries, do, ak, bk, av, bv, m_first, first, end, top, share, keys,
    a_r, bk_m, bk_r, bk_d, bv_m, bv_r, bv_e, logit_scale, scale_v, BLOCK_M: tl.constexpr,
    RK: tl.constexpr, RV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights p and gradients dp, (N, M) each, of a tile of queries on one of keys, and the keys' tile and coefficient."""
    k, k_weight = load_product(
        ak, bk, m_first, keys, a_r, bk_m, bk_r, bk_d, BLOCK_M, RK, D, BLOCK_D, VEC, UNIT, MASKED
    )
    v, v_weight = load_product(
        av, bv, m_first, keys, a_r, bv_m, bv_r, bv_e, BLOCK_M, RV, E, BLOCK_E, VEC, UNIT, MASKED
    )
    zeros = tl.zeros((queries.shape[0], BLOCK_M), tl.float32)
    logits = scaled(dot(queries, tl.trans(k), zeros), (k_weight * logit_scale)[None, :], k.dtype)
    p = exp(logits - top[:, None], k.dtype) * share[:, None]
    if MASKED:
        m = m_first + tl.arange(0, BLOCK_M)
        p = tl.where((m[None, :] >= first[:, None]) & (m[None, :] < end[:, None]), p, 0.0)
    dp = scaled(dot(do, tl.trans(v), zeros), (v_weight * scale_v)[None, :], k.dtype)
    return p, dp, k, k_weight


@triton.jit
def factor_gradients(
    gradient, a, b, da, db, first, size, a_r, b_n, b_r, b_f, da_n, da_r, add, TOKENS: tl.constexpr,
    R: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """From the gradient (M, F) of ``A B`` of one head: that of A is stored, that of B too, in ``db`` (M, R, F).

    With ``add`` it is added to what ``db`` holds, where no other program writes.
    """
    f = tl.arange(0, BLOCK_F)
    row = tl.arange(0, TOKENS)  # 32-bit offsets in the tile: 64-bit ones would not fit in registers
    inside = first + row < size
    mask = inside[:, None] & (f < F)[None, :]
    sums = db + tl.cast(first, tl.int64) * (R * F) + (row * (R * F))[:, None] + f[None, :]
    pointers = da + (first + row).to(tl.int64) * da_n
    for r in tl.static_range(R):
        factor = load_factor(b, first, size, r, b_n, b_r, b_f, TOKENS, F, BLOCK_F, VEC, UNIT)
        tl.store(
            pointers + r * da_r,
            rounded(tl.sum(gradient * factor.to(tl.float32), axis=1), da.dtype.element_ty), mask=inside,
        )  # fmt: skip
        weight = load_weights(a, first, size, r, a_r, TOKENS)
        before = tl.load(sums + r * F, mask=mask & add, other=0.0)
        tl.store(sums + r * F, before + gradient * weight[:, None], mask=mask)


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------

_PREPARE_NUMBERS = (
    "tokens heads aq_b aq_n aq_h aq_r bq_b bq_n bq_r bq_d out_b out_n out_h out_e grad_b grad_n grad_h grad_e scale_q"
).split()


@triton.jit(do_not_specialize=_PREPARE_NUMBERS)
def prepare_kernel(
    aq, bq, out, grad, statistics, q, delta, shift, tickets,
    tokens: tl.int32, heads: tl.int32,
    aq_b: tl.int64, aq_n: tl.int64, aq_h: tl.int64, aq_r: tl.int64,
    bq_b: tl.int64, bq_n: tl.int64, bq_r: tl.int64, bq_d: tl.int64,
    out_b: tl.int64, out_n: tl.int64, out_h: tl.int64, out_e: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_e: tl.int64, scale_q: tl.float32,
    RQ: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    Q_VEC: tl.constexpr, Q_UNIT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Q and δ of one token's queries, BLOCK_H of the heads; 16-bit ranks are summed BLOCK_R at a time.

    Strides of ``bq``, and those of ``out`` and ``grad``, come divided by their ``VEC`` but for the last; ``UNIT``: that
    is 1. Without ``grad`` and the other three, Q alone. ``shift`` (B, H, N), which may be None, gets what is subtracted
    from logits in base two for 16-bit weights; a shift of +inf makes those of blind queries zero. ``tickets`` (2,), with
    which kernels for Hopper count their tiles, become zero. With ``OVERLAP`` the launch after it is put in place while
    this one's last programs run, and waits for them.
    """
    if OVERLAP:
        gdc_launch_dependents()
    if tickets is not None:
        tl.store(tickets + tl.arange(0, 2), tl.zeros((2,), tl.int32), mask=tl.program_id(0) == 0)
    shares = tl.cdiv(heads, BLOCK_H)
    program = tl.program_id(0)
    token = program // shares
    batch = (token // tokens).to(tl.int64)
    n = (token % tokens).to(tl.int64)
    h = program % shares * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    there = h < heads
    inside = there[:, None] & (d < D)[None, :]
    features = d if Q_UNIT else d * bq_d
    bq += batch * (bq_b * Q_VEC) + n * (bq_n * Q_VEC)
    if aq is None:  # the rank axis is the heads
        tile = tl.load(bq + (h * (bq_r * Q_VEC))[:, None] + features[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    else:
        tile = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        aq += batch * aq_b + n * aq_n
        if q.dtype.element_ty == tl.float32:  # the bits that `load_queries` made for the forward's logits
            for r in tl.range(0, RQ, num_stages=1):
                a = tl.load(aq + h * aq_h + r * aq_r, mask=there, other=0.0)
                b = tl.load(bq + r * (bq_r * Q_VEC) + features, mask=d < D, other=0.0)
                tile += a[:, None] * b[None, :]
        else:
            for first in range(0, RQ, BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                real = (r < RQ)[:, None] & (d < D)[None, :]
                some = there[:, None] & (r < RQ)[None, :]
                a = tl.load(aq + (h * aq_h)[:, None] + (r * aq_r)[None, :], mask=some, other=0.0)
                b = tl.load(bq + (r * (bq_r * Q_VEC))[:, None] + features[None, :], mask=real, other=0.0)
                tile = dot(a, b, tile)
    rows = batch * heads + h
    tl.store(
        q + (rows * tokens + n)[:, None] * D + d[None, :], rounded(tile * scale_q, q.dtype.element_ty), mask=inside
    )
    if grad is not None:
        e = tl.arange(0, BLOCK_E)
        values = e if O_UNIT else e * out_e
        slopes = e if O_UNIT else e * grad_e
        inside = there[:, None] & (e < E)[None, :]
        out += batch * (out_b * O_VEC) + n * (out_n * O_VEC)
        grad += batch * (grad_b * O_VEC) + n * (grad_n * O_VEC)
        o = tl.load(out + (h * (out_h * O_VEC))[:, None] + values[None, :], mask=inside, other=0.0)
        do = tl.load(grad + (h * (grad_h * O_VEC))[:, None] + slopes[None, :], mask=inside, other=0.0)
        tl.store(delta + rows * tokens + n, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1), mask=there)
    if shift is not None:
        top = tl.load(statistics + rows * 2 * tokens + n, mask=there, other=0.0)
        total = tl.load(statistics + (rows * 2 + 1) * tokens + n, mask=there, other=1.0)
        blind = total == 0.0
        value = tl.where(blind, float("inf"), top + tl.log2(tl.where(blind, 1.0, total)))
        tl.store(shift + rows * tokens + n, value, mask=there)


_BACKWARD_NUMBERS = [
    *"tokens keys heads batches sequences cu_stride a_r bk_b bk_m bk_r bk_d".split(),
    *"bv_b bv_m bv_r bv_e grad_b grad_n grad_h grad_e".split(),
]
_QUERY_NUMBERS = [*_BACKWARD_NUMBERS, *"dq_b dq_n dq_h dq_d logit_scale dq_scale scale_v".split()]


@triton.jit(do_not_specialize=_QUERY_NUMBERS)
def query_kernel(
    q, ak, bk, av, bv, grad, statistics, delta, cu_seqlens, dq,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, batches: tl.int32, sequences: tl.int32, cu_stride: tl.int64,
    a_r: tl.int64,
    bk_b: tl.int64, bk_m: tl.int64, bk_r: tl.int64, bk_d: tl.int64,
    bv_b: tl.int64, bv_m: tl.int64, bv_r: tl.int64, bv_e: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_e: tl.int64,
    dq_b: tl.int64, dq_n: tl.int64, dq_h: tl.int64, dq_d: tl.int64,
    logit_scale: tl.float32, dq_scale: tl.float32, scale_v: tl.float32,
    CAUSAL: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    G_VEC: tl.constexpr, G_UNIT: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr, SUM_DELTA: tl.constexpr,
):  # fmt: skip
    """``dq_scale · ds K`` of one tile of queries of a head, where K is without its scale.

    ``SUM_DELTA``: δ is not ``Σ_e do ⊙ o`` but ``Σ_m p ⊙ dp``, summed here and left for `key_kernel`. That costs a pass,
    and cancels ``dp`` to the last bit where a query sees one key alone. It is divided by ``Σ_m p``: large logits differ
    from the forward's in their last bits, so that weights add up to a little more or less than one.
    """
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
    q += row * tokens * D
    delta += row * tokens
    statistics += row * 2 * tokens
    grad += batch * (grad_b * G_VEC) + h * (grad_h * G_VEC)
    dq += batch * dq_b + h * dq_h
    ak += row * (RK * a_r * 16)
    av += row * (RV * a_r * 16)
    bk += batch * (bk_b * B_VEC)
    bv += batch * (bv_b * B_VEC)
    if cu_seqlens is not None:
        sequence, block = sequence_of_tile(block, cu_seqlens, cu_stride, sequences, BLOCK_N)
        start, tokens = sequence_bounds(sequence, cu_seqlens, cu_stride)
        if block * BLOCK_N >= tokens:
            return
        keys = tokens
        q, grad, dq = q + start.to(tl.int64) * D, grad + start * (grad_n * G_VEC), dq + start * dq_n
        delta, statistics, ak, av = delta + start, statistics + start, ak + start, av + start
        bk, bv = bk + start * (bk_m * B_VEC), bv + start * (bv_m * B_VEC)
    n_first = block * BLOCK_N
    n = n_first + tl.arange(0, BLOCK_N)
    inside = n < tokens
    first, end = visible(n, tokens, keys, CAUSAL, True)
    queries = load_rows(q, n_first, tokens, row * 0 + D, 1, BLOCK_N, D, BLOCK_D, 1, True)
    do = load_rows(grad, n_first, tokens, grad_n, grad_e, BLOCK_N, E, BLOCK_E, G_VEC, G_UNIT)
    top, share, subtract = load_statistics(statistics, delta, all_tokens, n, inside)
    bounds = walk(first, end, BLOCK_M)
    if SUM_DELTA:
        subtract = tl.zeros((BLOCK_N,), tl.float32)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for m_first in range(bounds[0], bounds[3], BLOCK_M):
            p, dp, _, _ = weigh_keys(
                queries, do, ak, bk, av, bv, m_first, first, end, top, share, keys,
                a_r, bk_m, bk_r, bk_d, bv_m, bv_r, bv_e, logit_scale, scale_v, BLOCK_M,
                RK, RV, D, E, BLOCK_D, BLOCK_E, B_VEC, B_UNIT, True,
            )  # fmt: skip
            subtract += tl.sum(p * dp, axis=1)
            total += tl.sum(p, axis=1)
        subtract = tl.div_rn(subtract, tl.where(total == 0.0, 1.0, total))  # p of one key is that total, to the bit
        tl.store(delta + n, subtract, mask=inside)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for part in tl.static_range(1, 3):
        for m_first in range(bounds[part], bounds[part + 1], BLOCK_M):
            p, dp, k, k_weight = weigh_keys(
                queries, do, ak, bk, av, bv, m_first, first, end, top, share, keys,
                a_r, bk_m, bk_r, bk_d, bv_m, bv_r, bv_e, logit_scale, scale_v, BLOCK_M,
                RK, RV, D, E, BLOCK_D, BLOCK_E, B_VEC, B_UNIT, part != 1,
            )  # fmt: skip
            ds = p * (dp - subtract[:, None]) * k_weight[None, :]
            acc = dot(rounded(ds, k.dtype), k, acc)
    d = tl.arange(0, BLOCK_D)
    pointers = dq + (n.to(tl.int64) * dq_n)[:, None] + (d * dq_d)[None, :]
    tl.store(pointers, rounded(acc * dq_scale, dq.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


_KEY_NUMBERS = [
    *_BACKWARD_NUMBERS,
    *"dak_b dak_m dak_h dak_r dav_b dav_m dav_h dav_r groups zero logit_scale dk_scale scale_v".split(),
]


@triton.jit(do_not_specialize=_KEY_NUMBERS)
def key_kernel(
    q, ak, bk, av, bv, grad, statistics, delta, cu_seqlens, dak, dav, dbk, dbv,
    tokens: tl.int32, keys: tl.int32, heads: tl.int32, batches: tl.int32, sequences: tl.int32, cu_stride: tl.int64,
    a_r: tl.int64,
    bk_b: tl.int64, bk_m: tl.int64, bk_r: tl.int64, bk_d: tl.int64,
    bv_b: tl.int64, bv_m: tl.int64, bv_r: tl.int64, bv_e: tl.int64,
    grad_b: tl.int64, grad_n: tl.int64, grad_h: tl.int64, grad_e: tl.int64,
    dak_b: tl.int64, dak_m: tl.int64, dak_h: tl.int64, dak_r: tl.int64,
    dav_b: tl.int64, dav_m: tl.int64, dav_h: tl.int64, dav_r: tl.int64, groups: tl.int32, zero: tl.int32,
    logit_scale: tl.float32, dk_scale: tl.float32, scale_v: tl.float32,
    CAUSAL: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    G_VEC: tl.constexpr, G_UNIT: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of the four factors of one tile of keys, over the heads of one group.

    ``dbk`` (groups, B, M, RK, D) and ``dbv`` (groups, B, M, RV, E), float32, get this group's sums.
    """
    program = tl.program_id(0)
    group = program % groups
    batch = (program // groups % batches).to(tl.int64)
    block = program // groups // batches
    bk += batch * (bk_b * B_VEC)
    bv += batch * (bv_b * B_VEC)
    grad += batch * (grad_b * G_VEC)
    dak += batch * dak_b
    dav += batch * dav_b
    sums = (group * batches.to(tl.int64) + batch) * keys
    dbk += sums * (RK * D)
    dbv += sums * (RV * E)
    all_tokens = tokens
    if cu_seqlens is not None:
        sequence, block = sequence_of_tile(block, cu_seqlens, cu_stride, sequences, BLOCK_M)
        start, keys = sequence_bounds(sequence, cu_seqlens, cu_stride)
        if block * BLOCK_M >= keys:
            return
        tokens = keys
        ak, av, statistics, delta = ak + start, av + start, statistics + start, delta + start
        bk, bv = bk + start * (bk_m * B_VEC), bv + start * (bv_m * B_VEC)
        q, grad = q + start.to(tl.int64) * D, grad + start * (grad_n * G_VEC)
        dak, dav = dak + start * dak_m, dav + start * dav_m
        dbk, dbv = dbk + start.to(tl.int64) * (RK * D), dbv + start.to(tl.int64) * (RV * E)
    m_first = block * BLOCK_M
    first, end = visible(m_first + tl.arange(0, BLOCK_M), keys, tokens, CAUSAL, False)
    bounds = walk(first, end, BLOCK_N)
    first_head = group * heads // groups
    for head in range(first_head, (group + 1) * heads // groups):
        h = head + batch * 0  # int64
        # Addresses that seem to depend on the head: else those of whole tiles are held in registers over all heads.
        here = m_first + head * zero
        row = batch * heads + h
        ak_head = ak + row * (RK * a_r * 16)
        av_head = av + row * (RV * a_r * 16)
        gradients = grad + h * (grad_h * G_VEC)
        k, k_weight = load_product(
            ak_head, bk, here, keys, a_r, bk_m, bk_r, bk_d, BLOCK_M, RK, D, BLOCK_D, B_VEC, B_UNIT
        )
        v, v_weight = load_product(
            av_head, bv, here, keys, a_r, bv_m, bv_r, bv_e, BLOCK_M, RV, E, BLOCK_E, B_VEC, B_UNIT
        )
        dk = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            for n_first in range(bounds[part], bounds[part + 1], BLOCK_N):
                there = n_first + head * zero
                n = there + tl.arange(0, BLOCK_N)
                valid = n < tokens
                queries = load_rows(
                    q + row * all_tokens * D, there, tokens, h * 0 + D, 1, BLOCK_N, D, BLOCK_D, 1, True, part != 1
                )
                do = load_rows(
                    gradients, there, tokens, grad_n, grad_e, BLOCK_N, E, BLOCK_E, G_VEC, G_UNIT, part != 1
                )
                top, share, subtract = load_statistics(
                    statistics + row * 2 * all_tokens, delta + row * all_tokens, all_tokens, n, valid
                )
                logits = dot(k, tl.trans(queries), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                logits = scaled(logits, (k_weight * logit_scale)[:, None], k.dtype)
                p = exp(logits - top[None, :], k.dtype) * share[None, :]
                if part != 1:
                    p = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < end[:, None]), p, 0.0)
                dv = dot(rounded(p, do.dtype), do, dv)
                dp = dot(v, tl.trans(do), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                dp = scaled(dp, (v_weight * scale_v)[:, None], k.dtype)
                ds = p * (dp - subtract[None, :])
                dk = dot(rounded(ds, queries.dtype), queries, dk)
        factor_gradients(
            dk * dk_scale, ak_head, bk, dak + h * dak_h, dbk, here, keys, a_r,
            bk_m, bk_r, bk_d, dak_m, dak_r, head > first_head, BLOCK_M, RK, D, BLOCK_D, B_VEC, B_UNIT,
        )  # fmt: skip
        factor_gradients(
            dv * scale_v, av_head, bv, dav + h * dav_h, dbv, here, keys, a_r,
            bv_m, bv_r, bv_e, dav_m, dav_r, head > first_head, BLOCK_M, RV, E, BLOCK_E, B_VEC, B_UNIT,
        )  # fmt: skip
        tl.debug_barrier()  # the next head adds to what was stored here


_FACTOR_NUMBERS = (
    "tokens heads aq_b aq_n aq_h aq_r bq_b bq_n bq_r bq_d daq_b daq_n daq_h daq_r dbq_b dbq_n dbq_r dbq_d scale_q"
).split()


@triton.jit(do_not_specialize=_FACTOR_NUMBERS)
def factor_kernel(
    dq, aq, bq, daq, dbq,
    tokens: tl.int32, heads: tl.int32,
    aq_b: tl.int64, aq_n: tl.int64, aq_h: tl.int64, aq_r: tl.int64,
    bq_b: tl.int64, bq_n: tl.int64, bq_r: tl.int64, bq_d: tl.int64,
    daq_b: tl.int64, daq_n: tl.int64, daq_h: tl.int64, daq_r: tl.int64,
    dbq_b: tl.int64, dbq_n: tl.int64, dbq_r: tl.int64, dbq_d: tl.int64, scale_q: tl.float32,
    RQ: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Gradients of one token's query factors from dQ (B, N, H, D); BLOCK_R of the ranks.

    Strides of ``bq`` and ``dbq`` come divided by ``VEC`` but for the last; ``UNIT``: that is 1. ``EARLY``: see
    `warploom.runtime.launch.may_start_early`.
    """
    if EARLY:
        gdc_wait()
    R_BLOCKS: tl.constexpr = (RQ + BLOCK_R - 1) // BLOCK_R
    program = tl.program_id(0)
    token = program // R_BLOCKS
    batch = (token // tokens).to(tl.int64)
    n = (token % tokens).to(tl.int64)
    r = program % R_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    feature_mask = (r < RQ)[:, None] & (d < D)[None, :]
    bq += batch * (bq_b * VEC) + n * (bq_n * VEC)
    b = tl.load(bq + (r * (bq_r * VEC))[:, None] + (d if UNIT else d * bq_d)[None, :], mask=feature_mask, other=0.0)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(0, heads, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        head_mask = (h < heads)[:, None] & (r < RQ)[None, :]
        a = tl.load(
            aq + batch * aq_b + n * aq_n + (h * aq_h)[:, None] + (r * aq_r)[None, :], mask=head_mask, other=0.0
        )
        rows = (token.to(tl.int64) * heads + h) * D
        gradient = tl.load(dq + rows[:, None] + d[None, :], mask=(h < heads)[:, None] & (d < D)[None, :], other=0.0)
        total = dot(tl.trans(a), gradient, total)
        da = dot(gradient, tl.trans(b), tl.zeros((BLOCK_H, BLOCK_R), tl.float32)) * scale_q
        pointers = daq + batch * daq_b + n * daq_n + (h * daq_h)[:, None] + (r * daq_r)[None, :]
        tl.store(pointers, rounded(da, daq.dtype.element_ty), mask=head_mask)
    dbq += batch * (dbq_b * VEC) + n * (dbq_n * VEC)
    pointers = dbq + (r * (dbq_r * VEC))[:, None] + (d if UNIT else d * dbq_d)[None, :]
    tl.store(pointers, rounded(total * scale_q, dbq.dtype.element_ty), mask=feature_mask)


@triton.jit
def sum_groups(
    part, out, first, groups, rows, keys, out_b, out_m, out_r, out_f, R: tl.constexpr, F: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rows ``first …`` of the gradient (B, M, R, F) of a feature factor: the sum of ``part`` (groups, B, M, R, F)."""
    row = first.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, BLOCK_F)
    mask = (row < rows)[:, None] & (f < F)[None, :]
    cells = part + (row * F)[:, None] + f[None, :]
    total = tl.zeros((BLOCK, BLOCK_F), tl.float32)
    for _ in tl.range(0, groups, num_stages=4):  # loads of several groups under way at once
        total += tl.load(cells, mask=mask, other=0.0)
        cells += rows * F
    key, r = row // R, row % R
    places = key // keys * (out_b * VEC) + key % keys * (out_m * VEC) + r * (out_r * VEC)
    features = f if UNIT else f * out_f
    tl.store(out + places[:, None] + features[None, :], rounded(total, out.dtype.element_ty), mask=mask)


_SUM_NUMBERS = "batches keys groups k_programs dbk_b dbk_m dbk_r dbk_d dbv_b dbv_m dbv_r dbv_e".split()


@triton.jit(do_not_specialize=_SUM_NUMBERS)
def sum_kernel(
    k_sums, v_sums, dbk, dbv,
    batches: tl.int32, keys: tl.int32, groups: tl.int32, k_programs: tl.int32,
    dbk_b: tl.int64, dbk_m: tl.int64, dbk_r: tl.int64, dbk_d: tl.int64,
    dbv_b: tl.int64, dbv_m: tl.int64, dbv_r: tl.int64, dbv_e: tl.int64,
    RK: tl.constexpr, RV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    VEC: tl.constexpr, UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Gradients of ``bk`` (B, M, RK, D) and ``bv``, BLOCK rows to a program: the sums of groups of heads, added up in order.

    The first ``k_programs`` programs add up those of ``bk``. Strides come divided by ``VEC`` but for the last; ``UNIT``:
    that is 1. ``EARLY``: see `warploom.runtime.launch.may_start_early`.
    """
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    tokens = batches.to(tl.int64) * keys
    if program < k_programs:
        sum_groups(
            k_sums, dbk, program, groups, tokens * RK, keys, dbk_b, dbk_m, dbk_r, dbk_d,
            RK, D, BLOCK, BLOCK_D, VEC, UNIT,
        )  # fmt: skip
    else:
        sum_groups(
            v_sums, dbv, program - k_programs, groups, tokens * RV, keys, dbv_b, dbv_m, dbv_r, dbv_e,
            RV, E, BLOCK, BLOCK_E, VEC, UNIT,
        )  # fmt: skip
