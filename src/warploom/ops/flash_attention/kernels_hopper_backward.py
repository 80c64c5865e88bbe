"""Backward of flash attention for Hopper, in the manner of `kernels_hopper`; what it computes is in `kernels_backward`.

A group of warps owns 64 queries and walks over the keys (`hopper_query_kernel`), or 64 keys and walks over the queries of all
heads that read them (`hopper_key_kernel`). Products stay in flight across steps: while a tile's weights are computed, the
gradients of the tile before are added up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.ops.flash_attention.kernels_hopper import (
    ROWS,
    WALK,
    announce,
    announced,
    as_factor,
    barriers,
    copy_for_queries,
    copy_own,
    copy_tile,
    init_ring,
    key_steps,
    matrix,
    next_tile,
    place_names,
    power_of_two,
    product_transposed,
    read,
    store_part,
    tile_place,
    wait_empty,
)


@gluon.jit
def walk_keys(
    dq, dlogits, count, q_tile, do_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, shift, delta,
    begin, end, first, keys, right, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of keys ``end − 1 … begin``, with ``dlogits`` of the tile before, number ``count − 1``."""
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    STAGES: gl.constexpr = k_tiles.shape[0]
    for i in range(end - begin):
        logits = product_transposed(q_tile, k_tiles, k_full, count, LAYOUT)
        before = (count + STAGES - 1) % STAGES
        dq = warpgroup_mma(dlogits, matrix(k_tiles, before), dq, is_async=True)
        dweights = product_transposed(do_tile, v_tiles, v_full, count, LAYOUT)
        logits = warpgroup_mma_wait(2, deps=[logits])
        weights = power_of_two(logits * scale - shift[:, None])
        if MASKED:
            key = (end - 1 - i) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
            seen = (key < keys)[None, :]
            if CAUSAL:
                query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                seen = seen & (key[None, :] <= (query + right)[:, None])
            weights = gl.where(seen, weights, 0.0)
        dq, dlogits, dweights = warpgroup_mma_wait(0, deps=[dq, dlogits, dweights])
        mbarrier.arrive(k_empty.index(before))
        mbarrier.arrive(v_empty.index(count % STAGES))
        dlogits = as_factor(weights * (dweights - delta[:, None]), k_tiles.dtype, OUT_LAYOUT)
        count += 1
    return dq, dlogits, count


@gluon.jit
def compute_for_queries(
    own: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, arguments
):
    """Group number ``own`` of warps of `hopper_query_kernel`. ``IN_REGISTERS``: its queries and gradients stay there."""
    (
        ticket, dq_out, shift, delta, q_tiles, do_tiles, k_tiles, v_tiles, dq_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, rows, blocks, section, parts, right, scale, slope, place,
    ) = arguments  # fmt: skip
    GROUPS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, _ = announced(ticket, own_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        entry, head = row // heads, row % heads
        begin, full, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + keys - tokens  # the last query stands at the last key
        local = gl.arange(0, ROWS, ROW_LAYOUT)
        there = m + local < tokens
        cells = row.to(gl.int64) * tokens + m + local
        row_shift = gl.load(shift + cells, mask=there, other=float("inf"))
        row_delta = gl.load(delta + cells, mask=there, other=0.0)
        if IN_REGISTERS:
            q_tile = matrix(q_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            do_tile = matrix(do_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            mbarrier.arrive(own_empty.index(0))
        else:
            q_tile = matrix(q_tiles, own)
            do_tile = matrix(do_tiles, own)
        logits = product_transposed(q_tile, k_tiles, k_full, count, LAYOUT)
        dweights = product_transposed(do_tile, v_tiles, v_full, count, LAYOUT)
        logits, dweights = warpgroup_mma_wait(0, deps=[logits, dweights])
        mbarrier.arrive(v_empty.index(count % STAGES))
        weights = power_of_two(logits * scale - row_shift[:, None])
        key = (end - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = (key < keys)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= (first + local + right)[:, None])
        weights = gl.where(seen, weights, 0.0)
        dlogits = as_factor(weights * (dweights - row_delta[:, None]), k_tiles.dtype, OUT_LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        count += 1
        dq, dlogits, count = walk_keys(
            dq, dlogits, count, q_tile, do_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            row_shift, row_delta, full, end - 1, first, keys, right, scale, True, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        dq, dlogits, count = walk_keys(
            dq, dlogits, count, q_tile, do_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            row_shift, row_delta, begin, full, first, keys, right, scale, False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if not IN_REGISTERS:
            mbarrier.arrive(own_empty.index(0))
        before = (count + STAGES - 1) % STAGES
        dq = warpgroup_mma(dlogits, matrix(k_tiles, before), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(k_empty.index(before))

        if SPLIT:
            store_part(dq_out, dq * slope, part, entry, head, m, tokens, place, OUT_LAYOUT)
        else:
            tma.store_wait(0)
            matrix(dq_tiles, own).store((dq * slope).to(dq_tiles.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(dq_out, [entry, head, m, 0], dq_tiles.index(own))
        done += 1
        tile, _ = announced(ticket, own_full, done)
    if not SPLIT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dq")])
def hopper_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, shift, delta, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dq_size: gl.int32, dq_b: gl.int32, dq_n: gl.int32, dq_h: gl.int32, dq_features: gl.int32,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries. Descriptors, boxes and parts are as in `kernels_hopper.hopper_forward_kernel`.

    ``tickets[1]`` is zero.
    """
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT:
        dq_tiles = q_tiles  # not used: parts go from registers to memory
    else:
        dq_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], dq.layout)
    ticket = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    own_full, own_empty = barriers(1), barriers(1)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    v_full, v_empty = barriers(STAGES), barriers(STAGES)
    init_ring(own_full, own_empty, GROUPS)
    init_ring(k_full, k_empty, GROUPS)
    init_ring(v_full, v_empty, GROUPS)
    fence_async_shared()
    copying = (
        tickets + 1, ticket, (q_desc, do_desc), k_desc, v_desc, (q_tiles, do_tiles), k_tiles, v_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    )  # fmt: skip
    computing = (
        ticket, dq, shift, delta, q_tiles, do_tiles, k_tiles, v_tiles, dq_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, rows, blocks, section, parts, right, scale, slope,
        (dq_size, dq_b, dq_n, dq_h, dq_features),
    )  # fmt: skip
    IN_REGISTERS: gl.constexpr = GROUPS == 2  # three groups have none to spare
    if GROUPS == 2:
        gl.warp_specialize(
            [(compute_for_queries, (0, IN_REGISTERS, CAUSAL, SPLIT, computing)),
             (compute_for_queries, (1, IN_REGISTERS, CAUSAL, SPLIT, computing)),
             (copy_for_queries, (GROUPS, CAUSAL, copying))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_for_queries, (0, IN_REGISTERS, CAUSAL, SPLIT, computing)),
             (compute_for_queries, (1, IN_REGISTERS, CAUSAL, SPLIT, computing)),
             (compute_for_queries, (2, IN_REGISTERS, CAUSAL, SPLIT, computing)),
             (copy_for_queries, (GROUPS, CAUSAL, copying))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip


@gluon.jit
def query_steps(
    block, part, parts, tokens, keys, right, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Of the tiles of queries that part of a walk goes over: the first, the first without a mask, and the end."""
    end = (tokens + BLOCK_M - 1) // BLOCK_M
    begin = end * 0
    full = begin
    if CAUSAL:
        first = block * BLOCK_N - (keys - tokens) - right  # the first query that sees the first key
        begin = gl.minimum(gl.maximum(first, 0) // BLOCK_M, end)
        full = gl.minimum((gl.maximum(first + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M, end)
    span = (end - begin + parts - 1) // parts
    begin = gl.minimum(begin + part * span, end)
    end = gl.minimum(begin + span, end)
    return begin, gl.minimum(gl.maximum(full, begin), end), end


@gluon.jit
def copy_for_keys(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, arguments):
    """The copying warp of `hopper_key_kernel`. Rows' numbers travel with their tile: shifts with queries, δ with gradients."""
    (
        tickets, ticket, q_desc, do_desc, own_descs, shift, delta,
        q_tiles, do_tiles, own_tiles, shifts, deltas,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = heads // group
    tiles = blocks * rows * parts
    tile = gl.program_id(0)
    count = 0
    done = 0
    local = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    while tile < tiles:
        slot = announce(tile, ticket, own_empty, done)
        block, row, part = tile_place(tile, blocks, rows, section, parts, False)
        entry, key_head = row // key_heads, row % key_heads
        begin, _, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_N, BLOCK_M)
        copy_own(own_descs, own_tiles, entry, key_head, block * BLOCK_N, own_full, slot, GROUPS)
        for i in range(group * (end - begin)):
            member = i // (end - begin)
            head = key_head * group + member
            m = (begin + i - member * (end - begin)) * BLOCK_M
            there = m + local < tokens
            cells = (entry * heads + head).to(gl.int64) * tokens + m + local
            row_shift = gl.load(shift + cells, mask=there, other=float("inf"))
            row_delta = gl.load(delta + cells, mask=there, other=0.0)
            shifts.index(wait_empty(q_empty, count)).store(row_shift)
            copy_tile(q_desc, entry, head, m, q_tiles, q_full, q_empty, count)
            deltas.index(wait_empty(do_empty, count)).store(row_delta)
            copy_tile(do_desc, entry, head, m, do_tiles, do_full, do_empty, count)
            count += 1
        done += 1
        tile = next_tile(tickets, tiles)
    slot = announce(tile, ticket, own_empty, done)
    mbarrier.arrive(own_full.index(slot))


@gluon.jit
def walk_queries(
    dk, dv, count, k_tile, v_tile, q_tiles, do_tiles, shifts, deltas, q_full, q_empty, do_full, do_empty,
    begin, end, first, scale, MASKED: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of queries ``begin … end`` of one head. Query ``first`` is the first that sees the first key."""
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    STAGES: gl.constexpr = q_tiles.shape[0]
    for i in range(begin, end):
        slot = count % STAGES
        logits = product_transposed(k_tile, q_tiles, q_full, count, LAYOUT)  # (keys, queries)
        dweights = product_transposed(v_tile, do_tiles, do_full, count, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        row_shift = shifts.index(slot).load(gl.SliceLayout(0, LAYOUT))
        weights = power_of_two(logits * scale - row_shift[None, :])
        if MASKED:
            sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            query = i * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
            weights = gl.where(sees[:, None] <= query[None, :], weights, 0.0)
        factor = as_factor(weights, q_tiles.dtype, OUT_LAYOUT)
        dv = warpgroup_mma(factor, matrix(do_tiles, slot), dv, is_async=True)
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        row_delta = deltas.index(slot).load(gl.SliceLayout(0, LAYOUT))
        dlogits = as_factor(weights * (dweights - row_delta[None, :]), q_tiles.dtype, OUT_LAYOUT)
        dk = warpgroup_mma(dlogits, matrix(q_tiles, slot), dk, is_async=True)
        dv, factor = warpgroup_mma_wait(1, deps=[dv, factor])
        mbarrier.arrive(do_empty.index(slot))
        dk, dlogits = warpgroup_mma_wait(0, deps=[dk, dlogits])
        mbarrier.arrive(q_empty.index(slot))
        count += 1
    return dk, dv, count


@gluon.jit
def compute_for_keys(own: gl.constexpr, GROUPS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, arguments):
    """Group number ``own`` of warps of `hopper_key_kernel`. Results leave through the buffers of its keys and values."""
    (
        ticket, dk_out, dv_out, q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right, scale, slope, dk_place, dv_place,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key_heads = heads // group
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, slot = announced(ticket, own_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, False)
        entry, key_head = row // key_heads, row % key_heads
        begin, full, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_N, BLOCK_M)
        n = block * BLOCK_N + own * ROWS
        first = n - (keys - tokens) - right
        place = slot * GROUPS + own
        k_tile, v_tile = matrix(k_tiles, place), matrix(v_tiles, place)
        dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(group):
            if CAUSAL:
                dk, dv, count = walk_queries(
                    dk, dv, count, k_tile, v_tile, q_tiles, do_tiles, shifts, deltas,
                    q_full, q_empty, do_full, do_empty, begin, full, first, scale, True, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
            dk, dv, count = walk_queries(
                dk, dv, count, k_tile, v_tile, q_tiles, do_tiles, shifts, deltas,
                q_full, q_empty, do_full, do_empty, full, end, first, scale, False, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        # Worked out again rather than held in registers.
        block, row, part = tile_place(read(ticket, slot), blocks, rows, section, parts, False)
        entry, key_head = row // key_heads, row % key_heads
        n = block * BLOCK_N + own * ROWS
        if SPLIT:
            store_part(dv_out, dv, part, entry, key_head, n, keys, dv_place, OUT_LAYOUT)
            store_part(dk_out, dk * slope, part, entry, key_head, n, keys, dk_place, OUT_LAYOUT)
        else:
            v_tile.store(dv.to(v_tiles.dtype))
            k_tile.store((dk * slope).to(k_tiles.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(dv_out, [entry, key_head, n, 0], v_tiles.index(place))
            tma.async_copy_shared_to_global(dk_out, [entry, key_head, n, 0], k_tiles.index(place))
            tma.store_wait(0)
        mbarrier.arrive(own_empty.index(slot))
        done += 1
        tile, slot = announced(ticket, own_full, done)


OWN_STAGES = gl.constexpr(2)  # tiles of keys and values: one that is worked on, and the next


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dk", "dv")])
def hopper_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, shift, delta, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dk_size: gl.int32, dk_b: gl.int32, dk_n: gl.int32, dk_h: gl.int32, dk_features: gl.int32,
    dv_size: gl.int32, dv_b: gl.int32, dv_n: gl.int32, dv_h: gl.int32, dv_features: gl.int32,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, for tiles of GROUPS · 64 keys.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, BLOCK_M, D) for queries and their gradients and of
    (1, 1, 64, D) for keys, values and results; boxes of values are as wide as those of keys. ``tickets[0]`` is zero.
    Parts are as in `kernels_hopper.hopper_forward_kernel`.
    """
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [OWN_STAGES * GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [OWN_STAGES * GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    ticket = gl.allocate_shared_memory(gl.int32, [OWN_STAGES, 1], plain)
    own_full, own_empty = barriers(OWN_STAGES), barriers(OWN_STAGES)
    q_full, q_empty = barriers(STAGES), barriers(STAGES)
    do_full, do_empty = barriers(STAGES), barriers(STAGES)
    init_ring(own_full, own_empty, GROUPS)
    init_ring(q_full, q_empty, GROUPS)
    init_ring(do_full, do_empty, GROUPS)
    fence_async_shared()
    copying = (
        tickets, ticket, q_desc, do_desc, (k_desc, v_desc), shift, delta,
        q_tiles, do_tiles, (k_tiles, v_tiles), shifts, deltas,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    )  # fmt: skip
    computing = (
        ticket, dk, dv, q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right, scale, slope,
        (dk_size, dk_b, dk_n, dk_h, dk_features), (dv_size, dv_b, dv_n, dv_h, dv_features),
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_for_keys, (0, GROUPS, CAUSAL, SPLIT, computing)),
         (compute_for_keys, (1, GROUPS, CAUSAL, SPLIT, computing)),
         (copy_for_keys, (GROUPS, CAUSAL, copying))],
        [4, 1], [240, 24],
    )  # fmt: skip
