"""Backward of flash attention for Hopper, in the manner of `kernels.hopper.forward`; what it computes is in `kernels.backward`.

A group of warps owns 64 queries and walks over the keys (`hopper_query_kernel`), or 64 keys and walks over the queries of all
heads that read them (`hopper_key_kernel`), as in `warploom.device.hopper.attention_backward`. Of keys with more than 128
features, a group's registers hold one gradient alone: two groups have the same keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper import tma
from warploom.device.hopper.attention import query_steps, tile_place
from warploom.device.hopper.attention_backward import (
    OWN_STAGES,
    compute_for_queries,
    compute_for_wide_queries,
    copy_for_keys,
    walk_queries,
    walk_queries_for_one,
)
from warploom.device.hopper.pipeline import NARROW, ROWS, announced, barriers, init_ring, matrix, read, send_tile
from warploom.ops.flash_attention.kernels.hopper.forward import WALK, copy_for_queries, place_names


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dq")])
def hopper_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, shift, delta, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dq_size: gl.int32, dq_b: gl.int32, dq_n: gl.int32, dq_h: gl.int32, dq_features: gl.int32,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries. Descriptors, boxes and parts are as in `kernels.hopper.forward.hopper_forward_kernel`.

    ``tickets[1]`` is zero. It runs beside `hopper_key_kernel`, of which it reads nothing, and does not end before that has
    ended.
    """
    if SPLIT:  # what sums up parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    V_STAGES: gl.constexpr = STAGES if D <= NARROW else STAGES - 1  # there is no room for as many wide ones
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT or D > NARROW:
        dq_tiles = q_tiles  # of parts not used: they go from registers to memory
    else:
        dq_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], dq.layout)
    ticket = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    own_full, own_empty = barriers(1), barriers(1)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    v_full, v_empty = barriers(V_STAGES), barriers(V_STAGES)
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
    if D > NARROW:
        gl.warp_specialize(
            [(compute_for_wide_queries, (0, CAUSAL, SPLIT, computing)),
             (compute_for_wide_queries, (1, CAUSAL, SPLIT, computing)),
             (copy_for_queries, (GROUPS, CAUSAL, True, copying))],
            [4, 1], [240, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [(compute_for_queries, (0, True, CAUSAL, SPLIT, computing)),
             (compute_for_queries, (1, True, CAUSAL, SPLIT, computing)),
             (copy_for_queries, (GROUPS, CAUSAL, True, copying))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:  # three groups leave no registers for queries
        gl.warp_specialize(
            [(compute_for_queries, (0, False, CAUSAL, SPLIT, computing)),
             (compute_for_queries, (1, False, CAUSAL, SPLIT, computing)),
             (compute_for_queries, (2, False, CAUSAL, SPLIT, computing)),
             (copy_for_queries, (GROUPS, CAUSAL, True, copying))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def key_place(tile, key_heads, blocks, rows, section, parts):
    """Block of keys, part of its walk, batch entry and key head of a tile."""
    block, row, part = tile_place(tile, blocks, rows, section, parts, False)
    return block, part, row // key_heads, row % key_heads


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
        block, part, _, _ = key_place(tile, key_heads, blocks, rows, section, parts)
        begin, full, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_N, BLOCK_M)
        first = block * BLOCK_N + own * ROWS - (keys - tokens) - right
        own_slot = slot * GROUPS + own
        k_tile, v_tile = matrix(k_tiles, own_slot), matrix(v_tiles, own_slot)
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
        block, part, entry, head = key_place(read(ticket, slot), key_heads, blocks, rows, section, parts)
        n = block * BLOCK_N + own * ROWS
        send_tile(dv_out, dv, v_tiles, own_slot, part, entry, head, n, keys, dv_place, SPLIT, OUT_LAYOUT)
        send_tile(dk_out, dk * slope, k_tiles, own_slot, part, entry, head, n, keys, dk_place, SPLIT, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(slot))
        done += 1
        tile, slot = announced(ticket, own_full, done)


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dk", "dv")])
def hopper_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, shift, delta, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dk_size: gl.int32, dk_b: gl.int32, dk_n: gl.int32, dk_h: gl.int32, dk_features: gl.int32,
    dv_size: gl.int32, dv_b: gl.int32, dv_n: gl.int32, dv_h: gl.int32, dv_features: gl.int32,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, BLOCK_M, D) for queries and their gradients and of
    (1, 1, 64, D) for keys, values and results; boxes of values are as wide as those of keys. ``tickets[0]`` is zero.
    Parts are as in `kernels.hopper.forward.hopper_forward_kernel`. It waits for the launch before it, and the one after it, of
    `hopper_query_kernel`, starts where this one leaves multiprocessors idle.
    """
    gdc_wait()
    gdc_launch_dependents()
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


@gluon.jit
def compute_for_one(
    VALUES: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, weight_tiles, weights_full, arguments
):
    """One of two groups of warps of `hopper_wide_key_kernel`: for the gradient of values, or of keys.

    Its result leaves through the buffer that it alone reads: the gradient of values through that of keys, and the other
    way round.
    """
    (
        ticket, dk_out, dv_out, q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right, scale, slope, dk_place, dv_place,
    ) = arguments  # fmt: skip
    if VALUES:
        out, own_tiles, near_tiles, far_tiles, numbers = dv_out, k_tiles, q_tiles, do_tiles, shifts
        near_full, near_empty, far_full, far_empty = q_full, q_empty, do_full, do_empty
        place = dv_place
    else:
        out, own_tiles, near_tiles, far_tiles, numbers = dk_out, v_tiles, do_tiles, q_tiles, deltas
        near_full, near_empty, far_full, far_empty = do_full, do_empty, q_full, q_empty
        place = dk_place
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key_heads = heads // group
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, slot = announced(ticket, own_full, done)
    while tile < tiles:
        block, part, _, _ = key_place(tile, key_heads, blocks, rows, section, parts)
        begin, full, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, ROWS, BLOCK_M)
        first = block * ROWS - (keys - tokens) - right
        own_tile = matrix(own_tiles, slot)
        acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(group):
            if CAUSAL:
                acc, count = walk_queries_for_one(
                    acc, count, own_tile, near_tiles, far_tiles, weight_tiles, numbers,
                    near_full, near_empty, far_full, far_empty, weights_full,
                    begin, full, first, scale, VALUES, True, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
            acc, count = walk_queries_for_one(
                acc, count, own_tile, near_tiles, far_tiles, weight_tiles, numbers,
                near_full, near_empty, far_full, far_empty, weights_full,
                full, end, first, scale, VALUES, False, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        if not VALUES:
            acc = acc * slope
        # Worked out again rather than held in registers.
        block, part, entry, head = key_place(read(ticket, slot), key_heads, blocks, rows, section, parts)
        send_tile(out, acc, own_tiles, slot, part, entry, head, block * ROWS, keys, place, SPLIT, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(slot))
        done += 1
        tile, slot = announced(ticket, own_full, done)


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dk", "dv")])
def hopper_wide_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, shift, delta, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dk_size: gl.int32, dk_b: gl.int32, dk_n: gl.int32, dk_h: gl.int32, dk_features: gl.int32,
    dv_size: gl.int32, dv_b: gl.int32, dv_n: gl.int32, dv_h: gl.int32, dv_features: gl.int32,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`hopper_key_kernel` for more than 128 features: two groups of warps have the same 64 keys, and a gradient each."""
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    # There is no room for the next tile of keys and values.
    k_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    # Half a warp has 32 bytes of each of four rows: swizzled, these lie in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    weight_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BLOCK_M], swizzled)
    weights_full = barriers(STAGES)
    ticket = gl.allocate_shared_memory(gl.int32, [1, 1], plain)
    own_full, own_empty = barriers(1), barriers(1)
    q_full, q_empty = barriers(STAGES), barriers(STAGES)
    do_full, do_empty = barriers(STAGES), barriers(STAGES)
    init_ring(own_full, own_empty, 2)
    init_ring(q_full, q_empty, 2)
    init_ring(do_full, do_empty, 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(weights_full.index(i), count=1)
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
        [(compute_for_one, (True, CAUSAL, SPLIT, weight_tiles, weights_full, computing)),
         (compute_for_one, (False, CAUSAL, SPLIT, weight_tiles, weights_full, computing)),
         (copy_for_keys, (GROUPS, CAUSAL, copying))],
        [4, 1], [240, 24],
    )  # fmt: skip
