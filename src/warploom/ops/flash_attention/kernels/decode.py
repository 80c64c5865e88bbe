"""Triton kernel of flash attention for few queries on many keys: decoding.

Shapes. A row is a pair (query, head) of the heads that share a head of keys, heads fastest. Rows come in tiles (M, D), so
that keys (N, D) and values (N, E) are read once for all of them. Memory is the limit: one loop with masks, and small tiles.

Chunks. The keys that a tile sees are cut into chunks, by their number and by sizes of the call that are not the batch's. The
softmax of a chunk starts afresh. ``NODE`` chunks are joined to a node from left to right, then all nodes, always by
`kernels.forward.join`. A program takes a chunk, a node or all of them, and `kernels.forward.combine_kernel` joins what is left:
the same bits, with as many programs as the size of the batch asks for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from warploom.device.product import product, terms_of
from warploom.ops.flash_attention.kernels.forward import (
    Mask,
    Rows,
    Sizes,
    Softmax,
    Strides,
    as_factor,
    base_of,
    join,
    kv_rows,
    loop_bounds,
    nothing,
    row_offsets,
    softmax_step,
    store_results,
    tile_offsets,
    transposed,
    used_keys,
)


@triton.jit
def load_rows(ptrs, there, F: tl.constexpr, PRECISION: tl.constexpr):
    """A tile (rows, features) of those rows that are ``there``, zeros outside, as a factor of a `product`."""
    mask = there[:, None]
    if F != ptrs.shape[1]:
        mask = mask & (tl.arange(0, ptrs.shape[1]) < F)[None, :]
    factor = tl.load(ptrs, mask=mask, other=0.0)
    if PRECISION == "3-term here":
        factor = terms_of(factor, 3)
    return factor


@triton.jit
def load_keys(x, table, n, there, keys, F: tl.constexpr, FEATURES: tl.constexpr, variant: tl.constexpr):
    """A tile of keys or values from number ``n`` on. One that lies in one page is looked up once."""
    if variant.PAGE is None or variant.PAGE % variant.BLOCK_N != 0:
        ptr, x = kv_rows(x, table, n, keys, variant.VEC, FEATURES, variant)
    else:
        page = tl.load(table + n // variant.PAGE).to(tl.int64)
        ptr = x.ptr + page * (x.strides.b * variant.VEC) + (n % variant.PAGE) * (x.strides.n * variant.VEC)
    return load_rows(ptr + x.offsets, there, F, variant.PRECISION)


@triton.jit
def decode_kernel(
    q, k, v, out, lse, statistics, sink, seqused_k, block_table,
    sizes: Sizes, parts: tl.int32, chunks: tl.int32, out_split: tl.int64,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, out_strides: Strides,
    variant: tl.constexpr, NODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head of keys, over one of ``parts`` of its KV loop, of so many ``chunks`` of ``sizes.splits``.

    Reads and writes what `kernels.forward.forward_kernel` does. Without ``lse``, rows are left as `Softmax` in parts: ``out``
    (parts, B, N, H, E) in float32, not divided by sums, and ``statistics`` (parts, 2, B, H, N).
    """
    if PDL:  # with the launch that joins parts, which waits for this one
        gdc_launch_dependents()
    BLOCK_M: tl.constexpr = variant.BLOCK_M
    BLOCK_N: tl.constexpr = variant.BLOCK_N
    BLOCK_E: tl.constexpr = variant.BLOCK_E
    VEC: tl.constexpr = variant.VEC
    PRECISION: tl.constexpr = variant.PRECISION
    heads, group, tokens = sizes.heads, sizes.group, sizes.tokens
    # Programs that run together read keys that lie together.
    key_heads = heads // group
    block = tl.program_id(0) % sizes.blocks
    place = tl.program_id(0) // sizes.blocks
    key_head = place % key_heads
    part = place // key_heads % parts
    batch = (place // key_heads // parts).to(tl.int64)

    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_range = r < tokens * group
    token = r // group
    head = key_head * group + r % group
    keys = used_keys(seqused_k, batch, sizes.keys)
    offset = keys - tokens  # the last query stands at the last key
    first = block * BLOCK_M // group + offset
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // group, tokens - 1) + offset
    mask = Mask(keys, sizes.left, sizes.right)
    begin, _, _, end = loop_bounds(
        first, last, sizes.left, sizes.right, keys, 0, 1, variant.HAS_LEFT, variant.HAS_RIGHT, BLOCK_N
    )
    span = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), sizes.splits) * BLOCK_N
    start = tl.minimum(begin + part * chunks * span, end)
    stop = tl.minimum(start + chunks * span, end)
    lowest = first - sizes.left if variant.HAS_LEFT else begin  # that any row sees

    feature = tl.arange(0, variant.BLOCK_D)
    q_ptrs = q + row_offsets(batch, token, head, q_strides, VEC)[:, None]
    q_ptrs += (feature if variant.UNIT else feature * q_strides.f)[None, :]
    q_tile = load_rows(q_ptrs, in_range, variant.D, PRECISION)
    table = None
    kv_batch = batch
    if variant.PAGE is not None:
        table = block_table + batch * (sizes.keys // variant.PAGE)
        kv_batch = batch * 0
    k_ptr = base_of(k, kv_batch, begin * 0, key_head, k_strides, VEC)
    v_ptr = base_of(v, kv_batch, begin * 0, key_head, v_strides, VEC)
    k_rows = Rows(k_ptr, tile_offsets(k_strides, BLOCK_N, variant.BLOCK_D, variant), k_strides, 0)
    v_rows = Rows(v_ptr, tile_offsets(v_strides, BLOCK_N, BLOCK_E, variant), v_strides, 0)

    chunk = nothing(BLOCK_M, BLOCK_E)
    node = nothing(BLOCK_M, BLOCK_E)
    whole = nothing(BLOCK_M, BLOCK_E)
    for n in tl.range(start, stop, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        there = (key >= lowest) & (key < end)
        k_tile = load_keys(k_rows, table, n, there, keys, variant.D, variant.BLOCK_D, variant)
        logits = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        logits = product(q_tile, transposed(k_tile, PRECISION), logits, PRECISION)
        weights, chunk = softmax_step(chunk, logits, n, token + offset, mask, sizes.scale, True, variant)
        v_tile = load_keys(v_rows, table, n, there, keys, variant.E, BLOCK_E, variant)
        factor = as_factor(weights, v.dtype.element_ty, PRECISION)
        chunk = Softmax(product(factor, v_tile, chunk.acc, PRECISION), chunk.row_sum, chunk.row_max)
        past = n + BLOCK_N - begin
        if past % span == 0:
            node = join(node, chunk)
            chunk = nothing(BLOCK_M, BLOCK_E)
            if past % (span * NODE) == 0:
                whole = join(whole, node)
                node = nothing(BLOCK_M, BLOCK_E)
    whole = join(whole, join(node, chunk))

    feature = tl.arange(0, BLOCK_E)
    offsets = part * (out_split * VEC) + row_offsets(batch, token, head, out_strides, VEC)[:, None]
    offsets += (feature if variant.UNIT else feature * out_strides.f)[None, :]
    out_mask = in_range[:, None] & (feature < variant.E)[None, :]
    row = (batch * heads + head) * tokens + token
    rows = tl.cast(sizes.batch_size, tl.int64) * heads * tokens
    if lse is None:
        tl.store(out + offsets, whole.acc, mask=out_mask)
        tl.store(statistics + part * 2 * rows + row, whole.row_max, mask=in_range)
        tl.store(statistics + (part * 2 + 1) * rows + row, whole.row_sum, mask=in_range)
    else:
        store_results(whole, sink, head, out, offsets, out_mask, lse, statistics, row, in_range, rows)
