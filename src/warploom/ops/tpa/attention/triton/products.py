"""Triton kernels of tensor-product attention: from factors to queries, keys and values, and back.

Attention itself is that of `warploom.ops.flash_attention`. Both kernels own what they write, so that every sum has a
fixed order and two runs agree bit for bit. For a token, with ``X`` its queries, keys or values:

    product_kernel   X = s A B (H, F)
    factor_kernel    dA = s dX Bᵀ (H, R) and dB = s Aᵀ dX (R, F)
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.packed import is_in_sequence
from warploom.device.product import add_outside, exact_dot, round_to
from warploom.ops.tpa.triton.factors import Features, FeatureStrides, HeadStrides

TERMS = tl.constexpr(16)
"""Terms that are added up one after another in a gradient of float32 head factors."""


class OperandStrides(NamedTuple):
    """Strides of head and feature factors, of their product (B, N, H, F), and of the factors' gradients."""

    a: HeadStrides
    b: FeatureStrides
    x: FeatureStrides
    da: HeadStrides
    db: FeatureStrides


class Operands(NamedTuple):
    """Strides of queries, keys and values and of their factors, and the factors' scales."""

    q: OperandStrides
    k: OperandStrides
    v: OperandStrides
    scale_q: tl.float32
    scale_k: tl.float32
    scale_v: tl.float32


class OperandTensors(NamedTuple):
    """Head and feature factors, the gradient of their product, and theirs."""

    a: tl.tensor
    b: tl.tensor
    dx: tl.tensor
    da: tl.tensor
    db: tl.tensor


class SequenceBounds(NamedTuple):
    """Number of packed sequences, and the stride of their bounds."""

    sequences: tl.int32
    cu_stride: tl.int64


class AttentionSizes(NamedTuple):
    """Sizes of a call: queries and keys are those of a batch entry."""

    batches: tl.int32
    tokens: tl.int32
    keys: tl.int32
    heads: tl.int32


class ProductsConfig(NamedTuple):
    """Compile-time choices: `Features` of each operand, and heads and ranks of a step."""

    Q: Features
    K: Features
    V: Features
    BLOCK_H: int
    BLOCK_R: int


# ----------------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def place_of(token, tokens):
    """Returns batch entry and token of a token of the whole batch, in 64 bits."""
    return (token // tokens).to(tl.int64), (token % tokens).to(tl.int64)


@triton.jit
def head_ptrs(ptr, strides, batch, n, h, r):
    """Returns pointers to head factors (h, r) of one token."""
    first = ptr + batch * strides.b + n * strides.n
    return first + (h * strides.h)[:, None] + (r * strides.r)[None, :]


@triton.jit
def feature_ptrs(ptr, strides, batch, n, r, f, X: tl.constexpr):
    """Returns pointers to features (r, f) of one token; of a product, with heads for ranks."""
    first = ptr + batch * (strides.b * X.VEC) + n * (strides.n * X.VEC)
    return first + (r * (strides.r * X.VEC))[:, None] + (f if X.UNIT else f * strides.f)[None, :]


@triton.jit
def form(
    a, b, x, program, tokens, heads, strides, scale,
    X: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_H heads of one token's product. Few ranks, and those of float32, are summed one by one."""
    shares = tl.cdiv(heads, BLOCK_H)
    batch, n = place_of(program // shares, tokens)
    h = program % shares * BLOCK_H + tl.arange(0, BLOCK_H)
    f = tl.arange(0, X.BLOCK_F)
    is_head, is_feature = h < heads, f < X.F
    tile = tl.zeros((BLOCK_H, X.BLOCK_F), tl.float32)
    if X.R <= 4 or x.dtype.element_ty == tl.float32:
        row = tl.arange(0, 1)
        for rank in tl.range(0, X.R, num_stages=1):
            column = tl.load(head_ptrs(a, strides.a, batch, n, h, row + rank), mask=is_head[:, None], other=0.0)
            features = feature_ptrs(b, strides.b, batch, n, row + rank, f, X)
            factor = tl.load(features, mask=is_feature[None, :], other=0.0)
            tile += column.to(tl.float32) * factor.to(tl.float32)
    else:
        for first in range(0, X.R, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            is_rank = r < X.R
            mask = is_head[:, None] & is_rank[None, :]
            rows = tl.load(head_ptrs(a, strides.a, batch, n, h, r), mask=mask, other=0.0)
            mask = is_rank[:, None] & is_feature[None, :]
            features = tl.load(feature_ptrs(b, strides.b, batch, n, r, f, X), mask=mask, other=0.0)
            tile = exact_dot(rows, features, tile)
    mask = is_head[:, None] & is_feature[None, :]
    tl.store(feature_ptrs(x, strides.x, batch, n, h, f, X), round_to(tile * scale, x.dtype.element_ty), mask=mask)


@triton.jit
def sum_over_features(dx, b, strides, batch, n, h, r, is_head, is_rank, X: tl.constexpr):
    """Returns ``dX Bᵀ`` (H, R) of one token in float32, from parts of its features, which are loaded again.

    Sums are made term after term, and parts keep them short: matrix products of PyTorch make parts too.
    """
    total = tl.zeros((h.shape[0], r.shape[0]), tl.float32)
    for first in tl.static_range(0, X.F, TERMS):
        f = first + tl.arange(0, TERMS)
        is_feature = f < X.F
        mask = is_head[:, None] & is_feature[None, :]
        gradient = tl.load(feature_ptrs(dx, strides.x, batch, n, h, f, X), mask=mask, other=0.0)
        mask = is_rank[:, None] & is_feature[None, :]
        features = tl.load(feature_ptrs(b, strides.b, batch, n, r, f, X), mask=mask, other=0.0)
        part = exact_dot(gradient, tl.trans(features), tl.zeros(total.shape, tl.float32))
        total = add_outside(part, total)
    return total


@triton.jit
def form_gradients(
    operand, program, tokens, heads, strides, scale, cu_seqlens, bounds,
    X: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Returns gradients of one token's factors, BLOCK_R of the ranks, from that of their product.

    Behind the last packed sequence, where that is zero, factors are taken to be zero too: they may be NaN.
    """
    shares: tl.constexpr = (X.R + BLOCK_R - 1) // BLOCK_R
    batch, n = place_of(program // shares, tokens)
    r = program % shares * BLOCK_R + tl.arange(0, BLOCK_R)
    f = tl.arange(0, X.BLOCK_F)
    is_rank, is_feature = r < X.R, f < X.F
    is_given = is_rank
    if cu_seqlens is not None:
        is_given = is_rank & is_in_sequence(n, cu_seqlens, bounds.cu_stride, bounds.sequences)
    mask = is_given[:, None] & is_feature[None, :]
    features = tl.load(feature_ptrs(operand.b, strides.b, batch, n, r, f, X), mask=mask, other=0.0)
    total = tl.zeros((BLOCK_R, X.BLOCK_F), tl.float32)
    for first in range(0, heads, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        is_head = h < heads
        pairs = is_head[:, None] & is_given[None, :]
        rows = tl.load(head_ptrs(operand.a, strides.a, batch, n, h, r), mask=pairs, other=0.0)
        some = is_head[:, None] & is_feature[None, :]
        gradient = tl.load(feature_ptrs(operand.dx, strides.x, batch, n, h, f, X), mask=some, other=0.0)
        total = exact_dot(tl.trans(rows), gradient, total)
        if operand.dx.dtype.element_ty == tl.float32 and X.F > TERMS:
            change = sum_over_features(operand.dx, operand.b, strides, batch, n, h, r, is_head, is_given, X) * scale
        else:
            change = exact_dot(gradient, tl.trans(features), tl.zeros((BLOCK_H, BLOCK_R), tl.float32)) * scale
        ptrs = head_ptrs(operand.da, strides.da, batch, n, h, r)
        pairs = is_head[:, None] & is_rank[None, :]
        tl.store(ptrs, round_to(change, operand.da.dtype.element_ty), mask=pairs)
    mask = is_rank[:, None] & is_feature[None, :]
    ptrs = feature_ptrs(operand.db, strides.db, batch, n, r, f, X)
    tl.store(ptrs, round_to(total * scale, operand.db.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def product_kernel(
    ak, av, aq, bk, bv, bq, k, v, q, sizes: AttentionSizes, operands: Operands, config: tl.constexpr
):  # fmt: skip
    """Computes keys, values and, with ``aq``, queries, each from its factors."""
    Q: tl.constexpr = config.Q
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    BLOCK_H: tl.constexpr = config.BLOCK_H
    BLOCK_R: tl.constexpr = config.BLOCK_R
    program = tl.program_id(0)
    heads = sizes.heads
    of_keys = sizes.batches * sizes.keys * tl.cdiv(heads, BLOCK_H)
    if program < of_keys:
        form(ak, bk, k, program, sizes.keys, heads, operands.k, operands.scale_k, K, BLOCK_H, BLOCK_R)
    elif program < 2 * of_keys:
        form(av, bv, v, program - of_keys, sizes.keys, heads, operands.v, operands.scale_v, V, BLOCK_H, BLOCK_R)
    else:
        if aq is not None:
            program -= 2 * of_keys
            form(aq, bq, q, program, sizes.tokens, heads, operands.q, operands.scale_q, Q, BLOCK_H, BLOCK_R)


@triton.jit
def factor_kernel(
    dk, dv, dq, ak, av, aq, bk, bv, bq, dak, dav, daq, dbk, dbv, dbq, cu_seqlens, sizes: AttentionSizes,
    bounds: SequenceBounds, operands: Operands, config: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of all factors from those of queries, keys and values; see `product_kernel`."""
    Q: tl.constexpr = config.Q
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    BLOCK_H: tl.constexpr = config.BLOCK_H
    BLOCK_R: tl.constexpr = config.BLOCK_R
    program = tl.program_id(0)
    heads = sizes.heads
    of_keys = sizes.batches * sizes.keys * ((K.R + BLOCK_R - 1) // BLOCK_R)
    of_values = sizes.batches * sizes.keys * ((V.R + BLOCK_R - 1) // BLOCK_R)
    if program < of_keys:
        form_gradients(
            OperandTensors(ak, bk, dk, dak, dbk), program, sizes.keys, heads, operands.k, operands.scale_k, cu_seqlens, bounds, K,
            BLOCK_H, BLOCK_R,
        )  # fmt: skip
    elif program < of_keys + of_values:
        form_gradients(
            OperandTensors(av, bv, dv, dav, dbv), program - of_keys, sizes.keys, heads, operands.v, operands.scale_v, cu_seqlens, bounds,
            V, BLOCK_H, BLOCK_R,
        )  # fmt: skip
    else:
        if aq is not None:
            program -= of_keys + of_values
            form_gradients(
                OperandTensors(aq, bq, dq, daq, dbq), program, sizes.tokens, heads, operands.q, operands.scale_q, cu_seqlens, bounds, Q,
                BLOCK_H, BLOCK_R,
            )  # fmt: skip
