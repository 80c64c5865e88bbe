"""Triton kernels of attention with a mask, a bias or slopes: masks by tiles, biases, slopes; forward and backward.

They are the kernels of `forward` and `backward` with other loops: over the tiles that a row (or column) of a `BlockMask`
lists, and over nothing else. Logits are formed by one function for all of them. It adds the slopes and the bias behind the
cap, and hides keys by position, by a bias of −inf and, in tiles that see some of their keys, by bits.

A tile of queries or keys is within one of 128, so a tile of the mask is some steps of a loop. Zeros are loaded for keys and
values that no query sees and for queries that see nothing, so that NaN in them reaches nothing. Where it is a bias that
hides them, that is found for each tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import LOG2_E, power_of_two, tanh
from warploom.device.online_softmax import update_softmax
from warploom.device.product import product, round_to
from warploom.ops.flash_attention.triton.backward import uncap_gradients
from warploom.ops.flash_attention.triton.forward import Softmax, store_results
from warploom.ops.flash_attention.triton.tiles import (
    ForwardStrides,
    Mask,
    Sizes,
    as_factor,
    base_of,
    load_tile,
    loop_bounds,
    store_tile,
    tile_offsets,
    used_keys,
    visible,
)


class BiasStrides(NamedTuple):
    """Strides of a bias (B, H, N, M), 0 where it is broadcast."""

    b: tl.int64
    h: tl.int64
    n: tl.int64
    m: tl.int64


class MaskingSizes(NamedTuple):
    """Strides and sizes of a mask, a bias and slopes."""

    mask_b: tl.int32  # rows of batch entries and heads of a mask from one entry to the next, 0 for one mask for all
    mask_h: tl.int32
    mask_rows: tl.int32  # of tiles
    mask_columns: tl.int32
    alibi_b: tl.int64
    alibi_h: tl.int64
    bias: BiasStrides
    bias_batches: tl.int32  # batch entries of a bias
    bias_heads: tl.int32
    grad_scale: tl.float32  # of the gradients of queries and keys


class HeadMasking(NamedTuple):
    """Mask, bias and slope of a head: pointers, a slope in powers of two, and strides.

    Every kernel makes it itself: a function that did would return None for what a call lacks, which Triton 3.6 cannot.
    """

    bias: tl.tensor | None
    slope: tl.tensor | None
    bits: tl.tensor | None
    column_bits: tl.tensor | None
    bias_n: tl.int64
    bias_m: tl.int64


@triton.jit
def bias_of(bias, batch, head, sizes, VEC: tl.constexpr):
    """Returns the address of a head's bias."""
    return bias + (batch.to(tl.int64) * sizes.bias.b + head.to(tl.int64) * sizes.bias.h) * VEC


@triton.jit
def slope_of(alibi, batch, head, sizes):
    """Returns a head's slope, in powers of two."""
    return tl.load(alibi + batch * sizes.alibi_b + head * sizes.alibi_h).to(tl.float32) * LOG2_E


@triton.jit
def load_seen_keys(pointers, n, masking, mask, F: tl.constexpr):
    """Returns the tile of keys or values from key ``n`` on, with zeros for those that no query sees."""
    if masking.column_bits is None:
        tile = load_tile(pointers, n, mask.keys, F, True)
    else:
        key = n + tl.arange(0, pointers.shape[0])
        there = key < mask.keys
        words = tl.load(masking.column_bits + key // 32, mask=there, other=0)
        there = there & (((words >> (key % 32)) & 1) != 0)
        tile = tl.load(pointers, mask=there[:, None] & (tl.arange(0, pointers.shape[1]) < F)[None, :], other=0.0)
    return tile


@triton.jit
def load_bias(masking, query, key, n, tokens, mask, config: tl.constexpr):
    """Returns a tile of a bias (M, N) in float32, −inf outside."""
    BLOCK_N: tl.constexpr = key.shape[0]
    rows = masking.bias + query.to(tl.int64)[:, None] * (masking.bias_n * config.BIAS_VEC)
    if config.BIAS_UNIT:
        pointers = rows + key[None, :]
    else:
        pointers = rows + key.to(tl.int64)[None, :] * masking.bias_m
    there = (query < tokens)[:, None]
    if n + BLOCK_N <= mask.keys:  # a mask of keys would load one number at a time
        added = tl.load(pointers, mask=there, other=float("-inf"))
    else:
        added = tl.load(pointers, mask=there & (key < mask.keys)[None, :], other=float("-inf"))
    return added.to(tl.float32)


@triton.jit
def load_bits(bits, query, key, slot):
    """Returns which keys the queries see in a tile of a mask with bits."""
    places = slot.to(tl.int64) * 512 + (query % 128 * 4)[:, None] + (key % 128 // 32)[None, :]
    return ((tl.load(bits + places) >> (key % 32)[None, :]) & 1) != 0


@triton.jit
def mask_logits(products, query, key, n, slot, masking, tokens, mask, scale, config: tl.constexpr):
    """Returns logits (M, N) in powers of two, −inf where keys are hidden; which are seen; and what was capped, by the cap.

    ``query`` (M,) and ``key`` (N,), from ``n`` on, are numbers of rows, ``slot`` is the entry of their tile, and None
    without a mask.
    """
    position = query + (mask.keys - tokens)  # the last query stands at the last key
    capped = products * scale
    logits = capped
    if config.SOFTCAP is not None:
        capped = tanh(capped)
        logits = capped * config.SOFTCAP
    seen = visible(position[:, None], key[None, :], mask, config) & (query < tokens)[:, None]
    if masking.slope is not None:
        logits += masking.slope * (key[None, :] - position[:, None]).to(tl.float32)
    if masking.bias is not None:
        added = load_bias(masking, query, key, n, tokens, mask, config)
        seen = seen & (added != float("-inf"))
        added *= LOG2_E
        # The smallest finite number, which others use to hide keys, is not −∞: a row of it alone has equal weights.
        logits += tl.where(added == float("-inf"), -3.4028234e38, added)
    if masking.bits is not None:
        if slot >= 0:
            seen = seen & load_bits(masking.bits, query, key, slot)
    return tl.where(seen, logits, float("-inf")), seen, capped


@triton.jit
def some(seen, AXIS: tl.constexpr):
    """Returns whether something is seen along an axis of a tile."""
    return tl.max(seen.to(tl.int32), axis=AXIS) > 0


@triton.jit
def listed_within(listed, count, low, high):
    """Returns the first and the end of those tiles of a list that have a row between ``low`` and ``high``."""
    begin = count * 0
    end = count
    for first in range(0, count, 64):
        place = first + tl.arange(0, 64)
        there = place < count
        tile = tl.load(listed + place, mask=there, other=0) * 128
        begin += tl.sum((there & (tile + 128 <= low)).to(tl.int32), axis=0)
        end -= tl.sum((there & (tile >= high)).to(tl.int32), axis=0)
    return begin, tl.maximum(end, begin)


@triton.jit
def loop_of(listed, low, high, BLOCK: tl.constexpr):
    """Returns the first and the last step of a loop over rows ``low … high``, in blocks, of all tiles or those listed."""
    if listed is None:
        begin, end = low // BLOCK, tl.cdiv(high, BLOCK)
    else:
        begin, end = listed_within(listed + 1, tl.load(listed), low, high)
        begin *= 128 // BLOCK
        end *= 128 // BLOCK
    return begin, tl.maximum(end, begin)


@triton.jit
def step_of(listed, tiles, stride, i, BLOCK: tl.constexpr):
    """Returns the first row of step ``i`` of a loop, and the entry of its tile, or 0 where there is no mask."""
    slot = i * 0
    first = i * BLOCK
    if listed is not None:
        tile = tl.load(listed + 1 + i // (128 // BLOCK))
        slot = tl.load(tiles + tile * stride)
        first = tile * 128 + i % (128 // BLOCK) * BLOCK
    return first, slot


@triton.jit
def mask_row(batch, head, sizes):
    """Returns the number of the mask of a head among all masks, in 64 bits."""
    return (batch * sizes.mask_b + head * sizes.mask_h).to(tl.int64)


@triton.jit
def column_bits_of(column_bits, batch, head, sizes):
    """Returns the address of the bits of the keys that a head sees."""
    return column_bits + mask_row(batch, head, sizes) * (sizes.mask_columns * 4)


@triton.jit
def keys_seen(m, tokens, mask, config: tl.constexpr):
    """Returns bounds of the keys that a tile of queries sees by position."""
    offset = mask.keys - tokens
    last = tl.minimum(m + config.BLOCK_M, tokens) - 1 + offset
    loop = loop_bounds(
        m + offset, last, mask.left, mask.right, mask.keys, 0, 1, config.HAS_LEFT, config.HAS_RIGHT, 1
    )
    return loop.begin, loop.end


@triton.jit
def masked_forward_kernel(
    q, k, v, out, lse, statistics, sink, seqused_k, tiles, listed, bits, column_bits, bias, alibi,
    sizes: Sizes, masking_sizes: MaskingSizes, strides: ForwardStrides, config: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of one head: `forward_kernel` on listed tiles of keys.

    ``tiles`` (B, H, R, C), ``listed`` (B, H, R, 2 + 2 C), ``bits`` (P, 128, 4) and ``column_bits``
    (B, H, C, 4) are those of a mask.
    """
    heads, tokens, scale = sizes.heads, sizes.tokens, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    PRECISION: tl.constexpr = config.PRECISION
    program = tl.program_id(0)
    block, row = program % sizes.blocks, program // sizes.blocks
    batch, head = row // heads, row % heads
    m = (sizes.blocks - 1 - block) * BLOCK_M  # the last queries may see the most keys
    if bias is not None:
        bias = bias_of(bias, batch, head, masking_sizes, config.BIAS_VEC)
    slope = alibi
    if alibi is not None:
        slope = slope_of(alibi, batch, head, masking_sizes)
    if column_bits is not None:
        column_bits = column_bits_of(column_bits, batch, head, masking_sizes)
    masking = HeadMasking(bias, slope, bits, column_bits, masking_sizes.bias.n, masking_sizes.bias.m)
    mask = Mask(used_keys(seqused_k, batch, sizes.keys), sizes.left, sizes.right)
    if listed is not None:
        of_row = mask_row(batch, head, masking_sizes) * masking_sizes.mask_rows + m // 128
        listed += of_row * (2 * masking_sizes.mask_columns + 2)
        tiles += of_row * masking_sizes.mask_columns
    query = m + tl.arange(0, BLOCK_M)
    q_ptr = base_of(q, batch, m, head, strides.q, config.VEC)
    k_ptr = base_of(k, batch, m * 0, head // sizes.group, strides.k, config.VEC)
    v_ptr = base_of(v, batch, m * 0, head // sizes.group, strides.v, config.VEC)
    k_offsets = tile_offsets(strides.k, BLOCK_N, config.BLOCK_D, config)
    v_offsets = tile_offsets(strides.v, BLOCK_N, config.BLOCK_E, config)
    q_tile = load_tile(q_ptr + tile_offsets(strides.q, BLOCK_M, config.BLOCK_D, config), m, tokens, D, True)
    acc = tl.zeros((BLOCK_M, config.BLOCK_E), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    low, high = keys_seen(m, tokens, mask, config)
    begin, end = loop_of(listed, low, high, BLOCK_N)
    for i in tl.range(begin, end):
        n, slot = step_of(listed, tiles, 1, i, BLOCK_N)
        k_tile = load_seen_keys(k_ptr + n * (strides.k.n * config.VEC) + k_offsets, n, masking, mask, D)
        v_tile = load_seen_keys(v_ptr + n * (strides.v.n * config.VEC) + v_offsets, n, masking, mask, E)
        products = product(q_tile, k_tile.T, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), PRECISION)
        logits, seen, _ = mask_logits(
            products, query, n + tl.arange(0, BLOCK_N), n, slot, masking, tokens, mask, scale, config
        )  # fmt: skip
        weights, row_sum, row_max, rescale = update_softmax(logits, 1.0, row_sum, row_max, True)
        if bias is not None:
            v_tile = tl.where(some(seen, 0)[:, None], v_tile, tl.zeros_like(v_tile))
        weights = as_factor(weights, v.dtype.element_ty, PRECISION)
        acc = product(weights, v_tile, acc * rescale[:, None], PRECISION)
    out_ptr = base_of(out, batch, m, head, strides.out, config.VEC)
    in_range = query < tokens
    inside = in_range[:, None] & (tl.arange(0, config.BLOCK_E) < E)[None, :]
    store_results(
        Softmax(acc, row_sum, row_max), sink, head, out_ptr, tile_offsets(strides.out, BLOCK_M, config.BLOCK_E, config),
        inside, lse, statistics, row.to(tl.int64) * tokens + query, in_range,
        tl.cast(sizes.batch_size, tl.int64) * heads * tokens,
    )  # fmt: skip


class MaskedQueries(NamedTuple):
    """Queries of a head, and their numbers."""

    q: tl.tensor  # (M, D)
    do: tl.tensor  # (M, E)
    lse: tl.tensor  # (M,)
    delta: tl.tensor  # (M,)
    inverse: tl.tensor  # (M,)


@triton.jit
def load_rows(q_ptrs, do_ptrs, lse, delta, inverse, row, m, tokens, config: tl.constexpr):
    """Returns `MaskedQueries` from query ``m`` on, whose numbers begin at ``row``; zeros for those that see nothing."""
    query = m + tl.arange(0, config.BLOCK_M)
    in_range = query < tokens
    row_lse = tl.load(lse + row + query, mask=in_range, other=float("inf"))
    sees = (row_lse < float("inf"))[:, None]
    q_tile = tl.load(q_ptrs, mask=sees & (tl.arange(0, config.BLOCK_D) < config.D)[None, :], other=0.0)
    do_tile = tl.load(do_ptrs, mask=sees & (tl.arange(0, config.BLOCK_E) < config.E)[None, :], other=0.0)
    row_delta = tl.load(delta + row + query, mask=in_range, other=0.0)
    factor = row_delta * 0.0 + 1.0
    if inverse is not None:
        factor = tl.load(inverse + row + query, mask=in_range, other=0.0)
    return MaskedQueries(q_tile, do_tile, row_lse, row_delta, factor)


@triton.jit
def gradients_of_logits(
    rows, k_tile, v_tile, query, key, n, slot, masking, tokens, mask, scale, config: tl.constexpr
):
    """Returns weights (M, N), gradients of logits, those of products of queries and keys but for the scale, and what is seen."""
    PRECISION: tl.constexpr = config.PRECISION
    zeros = tl.zeros((config.BLOCK_M, config.BLOCK_N), dtype=tl.float32)
    products = product(rows.q, k_tile.T, zeros, PRECISION)
    logits, seen, capped = mask_logits(products, query, key, n, slot, masking, tokens, mask, scale, config)
    weights = power_of_two(logits - rows.lse[:, None]) * rows.inverse[:, None]
    weights = tl.where(seen, weights, 0.0)
    dweights = product(rows.do, v_tile.T, zeros, PRECISION)
    dlogits = tl.where(seen, weights * (dweights - rows.delta[:, None]), 0.0)
    dproducts = dlogits
    if config.SOFTCAP is not None:
        dproducts = tl.where(seen, uncap_gradients(dlogits, capped, config), 0.0)
    return weights, dlogits, dproducts, seen


@triton.jit
def masked_query_kernel(
    q, k, v, grad, lse, delta, inverse, dq, seqused_k, tiles, listed, bits, column_bits, bias, alibi,
    sizes: Sizes, masking_sizes: MaskingSizes, strides: ForwardStrides, config: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of queries of one head. ``strides.out`` are those of ``grad``; dq has no gaps."""
    heads, tokens, scale = sizes.heads, sizes.tokens, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    PRECISION: tl.constexpr = config.PRECISION
    program = tl.program_id(0)
    block, row = program % sizes.blocks, program // sizes.blocks
    batch, head = row // heads, row % heads
    m = (sizes.blocks - 1 - block) * BLOCK_M
    if bias is not None:
        bias = bias_of(bias, batch, head, masking_sizes, config.BIAS_VEC)
    slope = alibi
    if alibi is not None:
        slope = slope_of(alibi, batch, head, masking_sizes)
    if column_bits is not None:
        column_bits = column_bits_of(column_bits, batch, head, masking_sizes)
    masking = HeadMasking(bias, slope, bits, column_bits, masking_sizes.bias.n, masking_sizes.bias.m)
    mask = Mask(used_keys(seqused_k, batch, sizes.keys), sizes.left, sizes.right)
    if listed is not None:
        of_row = mask_row(batch, head, masking_sizes) * masking_sizes.mask_rows + m // 128
        listed += of_row * (2 * masking_sizes.mask_columns + 2)
        tiles += of_row * masking_sizes.mask_columns
    query = m + tl.arange(0, BLOCK_M)
    q_ptrs = base_of(q, batch, m, head, strides.q, config.VEC) + tile_offsets(
        strides.q, BLOCK_M, config.BLOCK_D, config
    )
    do_ptrs = base_of(grad, batch, m, head, strides.out, config.VEC) + tile_offsets(
        strides.out, BLOCK_M, config.BLOCK_E, config
    )
    k_ptr = base_of(k, batch, m * 0, head // sizes.group, strides.k, config.VEC)
    v_ptr = base_of(v, batch, m * 0, head // sizes.group, strides.v, config.VEC)
    k_offsets = tile_offsets(strides.k, BLOCK_N, config.BLOCK_D, config)
    v_offsets = tile_offsets(strides.v, BLOCK_N, config.BLOCK_E, config)
    rows = load_rows(q_ptrs, do_ptrs, lse, delta, inverse, row.to(tl.int64) * tokens, m, tokens, config)
    dq_tile = tl.zeros((BLOCK_M, config.BLOCK_D), dtype=tl.float32)
    low, high = keys_seen(m, tokens, mask, config)
    begin, end = loop_of(listed, low, high, BLOCK_N)
    for i in tl.range(begin, end):
        n, slot = step_of(listed, tiles, 1, i, BLOCK_N)
        k_tile = load_seen_keys(k_ptr + n * (strides.k.n * config.VEC) + k_offsets, n, masking, mask, D)
        v_tile = load_seen_keys(v_ptr + n * (strides.v.n * config.VEC) + v_offsets, n, masking, mask, E)
        key = n + tl.arange(0, BLOCK_N)
        _, _, dproducts, seen = gradients_of_logits(
            rows, k_tile, v_tile, query, key, n, slot, masking, tokens, mask, scale, config
        )
        if bias is not None:
            k_tile = tl.where(some(seen, 0)[:, None], k_tile, tl.zeros_like(k_tile))
        dq_tile = product(as_factor(dproducts, k.dtype.element_ty, PRECISION), k_tile, dq_tile, PRECISION)
    feature = tl.arange(0, config.BLOCK_D)
    places = ((batch.to(tl.int64) * tokens + query) * heads + head)[:, None] * D + feature[None, :]
    store_tile(dq + places, dq_tile * masking_sizes.grad_scale, m, tokens, D)


@triton.jit
def queries_seeing(n, tokens, mask, config: tl.constexpr):
    """Returns bounds of the queries that see a tile of keys by position."""
    offset = mask.keys - tokens
    last = tl.minimum(n + config.BLOCK_N, mask.keys) - 1 - offset
    loop = loop_bounds(n - offset, last, mask.right, mask.left, tokens, 0, 1, config.HAS_RIGHT, config.HAS_LEFT, 1)
    return loop.begin, tl.where(n < mask.keys, loop.end, loop.begin)


@triton.jit
def masked_key_kernel(
    q, k, v, grad, lse, delta, inverse, dk, dv, seqused_k, tiles, listed, bits, bias, alibi,
    sizes: Sizes, masking_sizes: MaskingSizes, strides: ForwardStrides, config: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of keys and values of one head, one query head after another.

    ``listed`` (B, H, C, 1 + 2 R) are those of a mask's columns. dk and dv have no gaps.
    """
    tokens, scale = sizes.tokens, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    PRECISION: tl.constexpr = config.PRECISION
    program = tl.program_id(0)
    key_heads = sizes.heads // sizes.group
    n, row = program % sizes.blocks * BLOCK_N, program // sizes.blocks
    batch, key_head = row // key_heads, row % key_heads
    mask = Mask(used_keys(seqused_k, batch, sizes.keys), sizes.left, sizes.right)
    key = n + tl.arange(0, BLOCK_N)
    k_ptr = base_of(k, batch, n, key_head, strides.k, config.VEC)
    v_ptr = base_of(v, batch, n, key_head, strides.v, config.VEC)
    k_tile = load_tile(k_ptr + tile_offsets(strides.k, BLOCK_N, config.BLOCK_D, config), n, mask.keys, D, True)
    v_tile = load_tile(v_ptr + tile_offsets(strides.v, BLOCK_N, config.BLOCK_E, config), n, mask.keys, E, True)
    q_offsets = tile_offsets(strides.q, BLOCK_M, config.BLOCK_D, config)
    do_offsets = tile_offsets(strides.out, BLOCK_M, config.BLOCK_E, config)
    dk_tile = tl.zeros((BLOCK_N, config.BLOCK_D), dtype=tl.float32)
    dv_tile = tl.zeros((BLOCK_N, config.BLOCK_E), dtype=tl.float32)
    low, high = queries_seeing(n, tokens, mask, config)
    for number in range(sizes.group):
        head = key_head * sizes.group + number
        own_bias = bias
        if bias is not None:
            own_bias = bias_of(bias, batch, head, masking_sizes, config.BIAS_VEC)
        slope = alibi
        if alibi is not None:
            slope = slope_of(alibi, batch, head, masking_sizes)
        masking = HeadMasking(own_bias, slope, bits, None, masking_sizes.bias.n, masking_sizes.bias.m)
        own_listed = listed
        own_tiles = tiles
        if listed is not None:
            of_head = mask_row(batch, head, masking_sizes)
            of_column = of_head * masking_sizes.mask_columns + n // 128
            own_listed = listed + of_column * (2 * masking_sizes.mask_rows + 1)
            own_tiles = tiles + of_head * masking_sizes.mask_rows * masking_sizes.mask_columns + n // 128
        q_ptr = base_of(q, batch, n * 0, head, strides.q, config.VEC)
        do_ptr = base_of(grad, batch, n * 0, head, strides.out, config.VEC)
        begin, end = loop_of(own_listed, low, high, BLOCK_M)
        for i in tl.range(begin, end):
            m, slot = step_of(own_listed, own_tiles, masking_sizes.mask_columns, i, BLOCK_M)
            rows = load_rows(
                q_ptr + m * (strides.q.n * config.VEC) + q_offsets,
                do_ptr + m * (strides.out.n * config.VEC) + do_offsets,
                lse, delta, inverse, (batch * sizes.heads + head).to(tl.int64) * tokens, m, tokens, config,
            )  # fmt: skip
            query = m + tl.arange(0, BLOCK_M)
            weights, _, dproducts, _ = gradients_of_logits(
                rows, k_tile, v_tile, query, key, n, slot, masking, tokens, mask, scale, config
            )
            dv_tile = product(as_factor(weights.T, q.dtype.element_ty, PRECISION), rows.do, dv_tile, PRECISION)
            dk_tile = product(as_factor(dproducts.T, q.dtype.element_ty, PRECISION), rows.q, dk_tile, PRECISION)
    at = ((batch.to(tl.int64) * sizes.keys + key) * key_heads + key_head)[:, None]
    store_tile(
        dk + at * D + tl.arange(0, config.BLOCK_D)[None, :], dk_tile * masking_sizes.grad_scale, n, sizes.keys, D
    )
    store_tile(dv + at * E + tl.arange(0, config.BLOCK_E)[None, :], dv_tile, n, sizes.keys, E)


@triton.jit
def masked_bias_kernel(
    q, k, v, grad, lse, delta, inverse, dbias, seqused_k, tiles, bits, bias, alibi,
    sizes: Sizes, masking_sizes: MaskingSizes, strides: ForwardStrides, config: tl.constexpr, SUM_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of a bias, summed over the axes along which that is broadcast, always in one order.

    Gradients of logits are formed again, one batch entry after another, and their heads and, with ``SUM_ROWS``, rows.
    ``dbias`` has the shape of the bias and no gaps.
    """
    tokens, heads, scale = sizes.tokens, sizes.heads, sizes.scale
    D: tl.constexpr = config.D
    E: tl.constexpr = config.E
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    program = tl.program_id(0)
    columns = tl.cdiv(sizes.keys, BLOCK_N)
    n, place = program % columns * BLOCK_N, program // columns
    first_row = place % sizes.blocks * BLOCK_M
    place = place // sizes.blocks
    end_row = first_row + 1
    if SUM_ROWS:
        end_row = tokens
    own_head, own_batch = place % masking_sizes.bias_heads, place // masking_sizes.bias_heads
    per_head, per_batch = heads // masking_sizes.bias_heads, sizes.batch_size // masking_sizes.bias_batches
    key = n + tl.arange(0, BLOCK_N)
    k_offsets = tile_offsets(strides.k, BLOCK_N, config.BLOCK_D, config)
    v_offsets = tile_offsets(strides.v, BLOCK_N, config.BLOCK_E, config)
    q_offsets = tile_offsets(strides.q, BLOCK_M, config.BLOCK_D, config)
    do_offsets = tile_offsets(strides.out, BLOCK_M, config.BLOCK_E, config)
    total = tl.zeros((1 if SUM_ROWS else BLOCK_M, BLOCK_N), dtype=tl.float32)
    for entry in range(per_batch):
        batch = own_batch * per_batch + entry
        mask = Mask(used_keys(seqused_k, batch, sizes.keys), sizes.left, sizes.right)
        for number in range(per_head):
            head = own_head * per_head + number
            own_bias = bias
            if bias is not None:
                own_bias = bias_of(bias, batch, head, masking_sizes, config.BIAS_VEC)
            slope = alibi
            if alibi is not None:
                slope = slope_of(alibi, batch, head, masking_sizes)
            masking = HeadMasking(own_bias, slope, bits, None, masking_sizes.bias.n, masking_sizes.bias.m)
            k_ptr = base_of(k, batch, n, head // sizes.group, strides.k, config.VEC)
            v_ptr = base_of(v, batch, n, head // sizes.group, strides.v, config.VEC)
            for step in range(tl.cdiv(end_row - first_row, BLOCK_M)):
                m = first_row + step * BLOCK_M
                low, high = keys_seen(m, tokens, mask, config)
                slot = m * 0
                if tiles is not None:
                    at = mask_row(batch, head, masking_sizes) * masking_sizes.mask_rows + m // 128
                    slot = tl.load(tiles + at * masking_sizes.mask_columns + n // 128)
                if (slot != -2) & (n < high) & (n + BLOCK_N > low):
                    k_tile = load_tile(k_ptr + k_offsets, n, mask.keys, D, True)
                    v_tile = load_tile(v_ptr + v_offsets, n, mask.keys, E, True)
                    rows = load_rows(
                        base_of(q, batch, m, head, strides.q, config.VEC) + q_offsets,
                        base_of(grad, batch, m, head, strides.out, config.VEC) + do_offsets,
                        lse, delta, inverse, (batch * heads + head).to(tl.int64) * tokens, m, tokens, config,
                    )  # fmt: skip
                    query = m + tl.arange(0, BLOCK_M)
                    _, dlogits, _, _ = gradients_of_logits(
                        rows, k_tile, v_tile, query, key, n, slot, masking, tokens, mask, scale, config
                    )
                    if SUM_ROWS:
                        total += tl.sum(dlogits, axis=0)[None, :]
                    else:
                        total += dlogits
    if SUM_ROWS:
        at = (place.to(tl.int64) * sizes.keys + key)[None, :]
        tl.store(dbias + at, round_to(total, dbias.dtype.element_ty), mask=(key < sizes.keys)[None, :])
    else:
        row = first_row + tl.arange(0, BLOCK_M)
        at = (place.to(tl.int64) * tokens + row)[:, None] * sizes.keys + key[None, :]
        there = (row < tokens)[:, None] & (key < sizes.keys)[None, :]
        tl.store(dbias + at, round_to(total, dbias.dtype.element_ty), mask=there)
