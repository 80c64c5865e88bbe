"""Triton kernel of flash attention in forward mode: attention and lse with their tangents, in one pass over the keys.

With tangents dq, dk and dv, logits S have the tangents dS = scale · (dq kᵀ + q dkᵀ), through the cap, and weights P

    do = Σ P ∘ (dS − c) v + Σ P dv,    dlse = c,    c = Σ P ∘ dS

where sums go over the keys of a row. c is known behind the last key only. Until then the mean of dS over the keys so far
stands for it, and what is summed is moved by ``(c_old − c_new) · Σ P v`` where that mean changes. So no large numbers that
cancel are rounded: where one key has all the weight, its dS − c is about zero from then on. ``Σ P v`` is the output.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import INTERPRETED, LOG2_E, power_of_two
from warploom.device.online_softmax import finite_max, update_softmax
from warploom.device.packed import is_in_sequence
from warploom.device.product import product
from warploom.device.rows import Strides
from warploom.ops.flash_attention.triton.forward import LN_2
from warploom.ops.flash_attention.triton.tiles import (
    ForwardStrides,
    Mask,
    Sizes,
    as_factor,
    base_of,
    cap_logits,
    key_bounds,
    load_tile,
    query_place,
    store_tile,
    tile_offsets,
    visible,
)


class DualQueries(NamedTuple):
    """A tile of queries."""

    q: tl.tensor  # (M, D)
    dq: tl.tensor | None  # (M, D)
    position: tl.tensor  # (M,)


class Head(NamedTuple):
    """Keys or values of a head."""

    ptr: tl.tensor  # of row 0, feature 0
    strides: Strides


class DualKeys(NamedTuple):
    """Keys and values of a head, with tangents, each a `Head`."""

    k: Head
    v: Head
    dk: Head | None
    dv: Head | None


class DualSoftmax(NamedTuple):
    """The softmax of a tile of queries so far, with its tangent."""

    acc: tl.tensor  # (M, E): weighted sums of values
    dacc: tl.tensor  # (M, E): Σ P ∘ (dS − mean) v + Σ P dv
    row_sum: tl.tensor  # (M,): of exponentials
    row_max: tl.tensor  # (M,): the largest logits, in powers of two
    mean: tl.tensor  # (M,): of dS, by the weights


@triton.jit
def hide(n):
    """Returns a number as it is, of which the compiler does not know how it grows from step to step.

    It would keep an address of every part of every tile in registers, and add to each of them.
    """
    if not INTERPRETED:
        n = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=tl.int32, is_pure=True, pack=1)
    return n


@triton.jit
def tile_of(x, n, keys, FEATURES: tl.constexpr, F: tl.constexpr, MASKED: tl.constexpr, config: tl.constexpr):
    """Returns the tile of keys or values from number ``n`` on."""
    key = n + tl.arange(0, config.BLOCK_N)
    feature = tl.arange(0, FEATURES)
    if not config.UNIT:
        feature = feature * x.strides.f
    places = key.to(tl.int64)[:, None] * (x.strides.n * config.VEC) + feature[None, :]
    return load_tile(x.ptr + places, n, keys, F, MASKED)


@triton.jit
def move_mean(softmax, rescale, weight, shift, row_max):
    """Returns `DualSoftmax` with sums rescaled, with more weight, and around a mean that is ``shift`` larger."""
    acc = softmax.acc * rescale[:, None]
    dacc = softmax.dacc * rescale[:, None] - acc * shift[:, None]
    return DualSoftmax(acc, dacc, softmax.row_sum * rescale + weight, row_max, softmax.mean + shift)


@triton.jit
def attend_dual(softmax, queries, rows, begin, end, mask, scale, MASKED: tl.constexpr, config: tl.constexpr):
    """Returns `DualSoftmax` with the keys ``begin … end`` (the KV loop)."""
    acc, dacc, row_sum, row_max, mean = (
        softmax.acc, softmax.dacc, softmax.row_sum, softmax.row_max, softmax.mean,
    )  # fmt: skip
    PRECISION: tl.constexpr = config.PRECISION
    BLOCK_N: tl.constexpr = config.BLOCK_N
    HAS_DS: tl.constexpr = queries.dq is not None or rows.dk is not None
    dtype: tl.constexpr = rows.v.ptr.dtype.element_ty
    for n in tl.range(begin, end, BLOCK_N):
        row = hide(n)
        zeros = tl.zeros((acc.shape[0], BLOCK_N), dtype=tl.float32)
        k_tile = tile_of(rows.k, row, mask.keys, config.BLOCK_D, config.D, MASKED, config)
        # (1) S = Q Kᵀ, (2) dS = dQ Kᵀ + Q dKᵀ
        logits = product(queries.q, k_tile.T, zeros, PRECISION)
        dlogits = zeros
        if queries.dq is not None:
            dlogits = product(queries.dq, k_tile.T, dlogits, PRECISION)
        if rows.dk is not None:
            dk_tile = tile_of(rows.dk, row, mask.keys, config.BLOCK_D, config.D, MASKED, config)
            dlogits = product(queries.q, dk_tile.T, dlogits, PRECISION)
        logits, factor = cap_logits(logits, scale, config)
        dfactor = scale * LN_2
        if config.SOFTCAP is not None:
            dlogits *= 1.0 - logits * logits
            dfactor = scale * (config.SOFTCAP * LN_2)
        if config.NEGATIVE:
            dfactor = -dfactor
        if MASKED:
            seen = visible(queries.position[:, None], (n + tl.arange(0, BLOCK_N))[None, :], mask, config)
            logits = tl.where(seen, logits, float("-inf"))
        # (3) P = 2^(S − row_max)
        weights, new_sum, row_max, rescale = update_softmax(logits, factor, row_sum, row_max, MASKED)
        softmax = DualSoftmax(acc, dacc, row_sum, row_max, mean)
        if HAS_DS:
            # (4) P ∘ (dS − c), around the old mean and then around the new one
            dlogits = dlogits * dfactor - mean[:, None]
            if MASKED:
                dlogits = tl.where(seen, dlogits, 0.0)
            shift = tl.sum(weights * dlogits, axis=1) / tl.where(new_sum == 0.0, 1.0, new_sum)
            dweights = weights * (dlogits - shift[:, None])
            softmax = move_mean(softmax, rescale, 0.0, shift, row_max)
            acc, dacc, mean = softmax.acc, softmax.dacc, softmax.mean
        else:
            acc = acc * rescale[:, None]
            dacc = dacc * rescale[:, None]
        row_sum = new_sum
        # (5) O += P V, (6) dO += P ∘ (dS − c) V + P dV
        v_tile = tile_of(rows.v, row, mask.keys, config.BLOCK_E, config.E, MASKED, config)
        p = as_factor(weights, dtype, PRECISION)
        acc = product(p, v_tile, acc, PRECISION)
        if HAS_DS:
            dacc = product(as_factor(dweights, dtype, PRECISION), v_tile, dacc, PRECISION)
        if rows.dv is not None:
            dv_tile = tile_of(rows.dv, row, mask.keys, config.BLOCK_E, config.E, MASKED, config)
            dacc = product(p, dv_tile, dacc, PRECISION)
    return DualSoftmax(acc, dacc, row_sum, row_max, mean)


@triton.jit
def add_sink(softmax, logit, dlogit):
    """Returns `DualSoftmax` with one more logit, which has a tangent and no value."""
    logit = logit.to(tl.float32) * LOG2_E
    new_max = tl.maximum(softmax.row_max, logit)
    base = finite_max(new_max)
    rescale = power_of_two(softmax.row_max - base)
    weight = power_of_two(logit - base)
    new_sum = softmax.row_sum * rescale + weight
    shift = weight * (dlogit.to(tl.float32) - softmax.mean) / tl.where(new_sum == 0.0, 1.0, new_sum)
    return move_mean(softmax, rescale, weight, shift, new_max)


@triton.jit
def jvp_kernel(
    q, k, v, dq, dk, dv, out, lse, dout, dlse, sink, dsink, cu_seqlens_q, cu_seqlens_k, seqused_k,
    sizes: Sizes, strides: ForwardStrides, config: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of one head, and write its output and lse with their tangents.

    ``lse`` and ``dlse`` are (B, H, N), and ``sink`` and ``dsink`` (H,). A tangent has the strides of its tensor. One that
    is None is zero, and costs nothing.
    """
    scale = sizes.scale
    D: tl.constexpr = config.D
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_E: tl.constexpr = config.BLOCK_E
    place = query_place(cu_seqlens_q, cu_seqlens_k, seqused_k, sizes, config)
    batch, head, m, tokens, keys = place.batch, place.head, place.m, place.tokens, place.keys
    first, k_start, kv_head = place.q_start + m, place.k_start, head // sizes.group
    if m < tokens:
        q_offsets = tile_offsets(strides.q, BLOCK_M, BLOCK_D, config)
        q_tile = load_tile(base_of(q, batch, first, head, strides.q, config.VEC) + q_offsets, m, tokens, D, True)
        dq_tile = dq
        if dq is not None:
            dq_tile = load_tile(
                base_of(dq, batch, first, head, strides.q, config.VEC) + q_offsets, m, tokens, D, True
            )
        k_rows = Head(base_of(k, batch, k_start, kv_head, strides.k, config.VEC), strides.k)
        v_rows = Head(base_of(v, batch, k_start, kv_head, strides.v, config.VEC), strides.v)
        dk_rows = dk
        if dk is not None:
            dk_rows = Head(base_of(dk, batch, k_start, kv_head, strides.k, config.VEC), strides.k)
        dv_rows = dv
        if dv is not None:
            dv_rows = Head(base_of(dv, batch, k_start, kv_head, strides.v, config.VEC), strides.v)
        rows = DualKeys(k_rows, v_rows, dk_rows, dv_rows)

        offset = keys - tokens  # the last query stands at the last key
        queries = DualQueries(q_tile, dq_tile, m + offset + tl.arange(0, BLOCK_M))
        mask = Mask(keys, sizes.left, sizes.right)
        last = tl.minimum(m + BLOCK_M, tokens) - 1 + offset
        loop = key_bounds(m + offset, last, mask, 0, 1, config)
        softmax = DualSoftmax(
            tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32),
            tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32),
            tl.zeros((BLOCK_M,), dtype=tl.float32),
            tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32),
            tl.zeros((BLOCK_M,), dtype=tl.float32),
        )
        if config.SHORT:
            softmax = attend_dual(softmax, queries, rows, loop.begin, loop.end, mask, scale, True, config)
        else:
            if config.HAS_LEFT:
                softmax = attend_dual(
                    softmax, queries, rows, loop.begin, loop.full_begin, mask, scale, True, config
                )
            softmax = attend_dual(
                softmax, queries, rows, loop.full_begin, loop.full_end, mask, scale, False, config
            )
            softmax = attend_dual(softmax, queries, rows, loop.full_end, loop.end, mask, scale, True, config)
        if sink is not None:
            logit = tl.load(sink + head)
            dlogit = logit * 0.0
            if dsink is not None:
                dlogit = tl.load(dsink + head)
            if cu_seqlens_q is not None:
                in_sequence = is_in_sequence(place.q_start, cu_seqlens_q, sizes.cu_q_stride, sizes.sequences)
                logit = tl.where(in_sequence, logit.to(tl.float32), float("-inf"))
            softmax = add_sink(softmax, logit, dlogit)

        some = tl.where(
            softmax.row_sum == 0.0, 1.0, softmax.row_sum
        )  # where no key was seen: 0 / 1, and lse −inf + 0
        E: tl.constexpr = config.E
        out_offsets = tile_offsets(strides.out, BLOCK_M, BLOCK_E, config)
        out_ptr = base_of(out, batch, first, head, strides.out, config.VEC)
        store_tile(out_ptr + out_offsets, softmax.acc / some[:, None], m, tokens, E)
        dout_ptr = base_of(dout, batch, first, head, strides.out, config.VEC)
        store_tile(dout_ptr + out_offsets, softmax.dacc / some[:, None], m, tokens, E)
        row = place.row.to(tl.int64) * sizes.tokens + first + tl.arange(0, BLOCK_M)
        in_range = m + tl.arange(0, BLOCK_M) < tokens
        tl.store(lse + row, (softmax.row_max + tl.log2(some)) * LN_2, mask=in_range)
        tl.store(dlse + row, softmax.mean, mask=in_range)
