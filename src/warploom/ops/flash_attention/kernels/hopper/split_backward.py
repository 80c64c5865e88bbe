"""Backward of flash attention for Hopper with float32 factors in pieces; what it computes is in `kernels.backward`.

A factor is the sum of PIECES tensors in bfloat16 (see `warploom.device.product`), which `kernels.pieces_kernel` makes
before. Pieces of 64 own rows of two tensors and two stages of tiles of the others fill the shared memory, so two groups
of warps have the same rows, as for wide rows in `kernels.hopper.backward`: one works out weights, and the other takes
them from shared memory. All products of pieces of a tile are in flight together.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper import tma
from warploom.device.hopper.attention import key_steps, query_steps, tile_place
from warploom.device.hopper.attention_backward import row_numbers, weights_of
from warploom.device.hopper.pipeline import (
    ROWS,
    announce,
    announce_end,
    announced,
    barriers,
    init_ring,
    matrix,
    next_tile,
    power_of_two,
    store_part,
    wait_empty,
    wait_full,
)
from warploom.ops.flash_attention.kernels.hopper.forward import WALK, place_names


@gluon.jit
def copy_pieces(desc, entry, entries, head, row, tiles, slot, full, PIECES: gl.constexpr):
    """Copy the pieces of a tile into buffers ``slot · PIECES …``, of which somebody else expects the bytes."""
    for i in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(
            desc, [i * entries + entry, head, row, 0], full.index(slot), tiles.index(slot * PIECES + i)
        )


@gluon.jit
def copy_stage(desc, entry, entries, head, row, tiles, full, empty, count, PIECES: gl.constexpr):
    """Copy the pieces of a tile once its buffers of a ring are empty."""
    slot = wait_empty(empty, count)
    mbarrier.expect(full.index(slot), PIECES * desc.block_type.nbytes)
    copy_pieces(desc, entry, entries, head, row, tiles, slot, full, PIECES)


@gluon.jit
def product_of_pieces(a_pieces, b_tiles, slot, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Start ``a · bᵀ`` of own rows and of a tile of a ring, the smallest products first."""
    N: gl.constexpr = b_tiles.shape[3]
    b_place = slot * PIECES
    acc = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    for left_out in gl.static_range(PIECES):
        for i in gl.static_range(PIECES - left_out):
            b = matrix(b_tiles, b_place + i).permute([1, 0])
            acc = warpgroup_mma(
                a_pieces[PIECES - 1 - left_out - i], b, acc, use_acc=left_out + i > 0, is_async=True
            )
    return acc


@gluon.jit
def own_pieces(tiles, PIECES: gl.constexpr):
    """The pieces of own rows, in shared memory."""
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces += (matrix(tiles, i),)
    return pieces


@gluon.jit
def own_pieces_in_registers(tiles, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """The pieces of own rows, in registers."""
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces += (matrix(tiles, i).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return pieces


@gluon.jit
def add_product(acc, tile, b_tiles, slot, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """``acc + tile · b`` with a tile of a ring; the sum outside of matrix units, which drop bits where they add."""
    D: gl.constexpr = b_tiles.shape[4]
    b_place = slot * PIECES
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    factors = ()
    for _ in gl.static_range(PIECES):
        piece = tile.to(b_tiles.dtype)
        factors += (gl.convert_layout(piece, operand),)
        tile = tile - piece.to(gl.float32)
    whole = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    for left_out in gl.static_range(PIECES):
        for i in gl.static_range(PIECES - left_out):
            b = matrix(b_tiles, b_place + i)
            whole = warpgroup_mma(
                factors[PIECES - 1 - left_out - i], b, whole, use_acc=left_out + i > 0, is_async=True
            )
    if PIECES == 3:
        whole, _, _, _ = warpgroup_mma_wait(0, deps=[whole, factors[0], factors[1], factors[2]])
    else:
        whole, _, _ = warpgroup_mma_wait(0, deps=[whole, factors[0], factors[1]])
    return acc + whole


@gluon.jit
def walk_queries_in_pieces(
    acc, count, own_tiles, near_tiles, far_tiles, weight_tiles, numbers, inverses,
    near_full, near_empty, far_full, far_empty, weights_full, begin, end, first, scale,
    VALUES: gl.constexpr, MASKED: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """`warploom.device.hopper.attention_backward.walk_queries_for_one`, from the last tile to the first."""
    BLOCK_M: gl.constexpr = near_tiles.shape[3]
    for i in range(end - begin):
        slot = wait_full(near_full, count)
        product = product_of_pieces(
            own_pieces(own_tiles, PIECES), near_tiles, slot, PIECES, LAYOUT
        )  # (keys, queries)
        product = warpgroup_mma_wait(0, deps=[product])
        row_number = numbers.index(slot).load(gl.SliceLayout(0, LAYOUT))
        if VALUES:
            row_inverse = inverses.index(slot).load(gl.SliceLayout(0, LAYOUT))
            mbarrier.arrive(near_empty.index(slot))
            tile = power_of_two(product * scale - row_number[None, :]) * row_inverse[None, :]
            if MASKED:
                sees = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                query = (end - 1 - i) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
                tile = gl.where(sees[:, None] <= query[None, :], tile, 0.0)
            weight_tiles.index(slot).store(tile)
            mbarrier.arrive(weights_full.index(slot))
        else:
            mbarrier.arrive(near_empty.index(slot))
            weights = weight_tiles.index(wait_full(weights_full, count)).load(LAYOUT)
            tile = weights * (product - row_number[None, :])
        wait_full(far_full, count)
        acc = add_product(acc, tile, far_tiles, slot, PIECES, OUT_LAYOUT)
        mbarrier.arrive(far_empty.index(slot))
        count += 1
    return acc, count


@gluon.jit
def copy_for_keys_in_pieces(CAUSAL: gl.constexpr, PIECES: gl.constexpr, arguments):
    """The copying warp. Rows' numbers travel with their tile: shifts and inverses with queries, δ with gradients."""
    (
        tickets, ticket, q_desc, do_desc, k_desc, v_desc, shift, delta, inverse,
        q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas, inverses,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    key_heads = heads // group
    entries = rows // key_heads
    tiles = blocks * rows * parts
    tile = gl.program_id(0)
    count = 0
    done = 0
    local = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    while tile < tiles:
        slot = announce(tile, ticket, own_empty, done)
        block, row, part = tile_place(tile, blocks, rows, section, parts, False)
        entry, key_head = row // key_heads, row % key_heads
        begin, _, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, ROWS, BLOCK_M)
        mbarrier.expect(own_full.index(slot), 2 * PIECES * k_desc.block_type.nbytes)
        copy_pieces(k_desc, entry, entries, key_head, block * ROWS, k_tiles, slot, own_full, PIECES)
        copy_pieces(v_desc, entry, entries, key_head, block * ROWS, v_tiles, slot, own_full, PIECES)
        for i in range(group * (end - begin)):
            member = i // (end - begin)
            head = key_head * group + member
            m = (end - 1 - i + member * (end - begin)) * BLOCK_M
            there = m + local < tokens
            cells = (entry * heads + head).to(gl.int64) * tokens + m + local
            row_shift = gl.load(shift + cells, mask=there, other=float("inf"))
            row_inverse = gl.load(inverse + cells, mask=there, other=0.0)
            row_delta = gl.load(delta + cells, mask=there, other=0.0)
            stage = wait_empty(q_empty, count)
            shifts.index(stage).store(row_shift)
            inverses.index(stage).store(row_inverse)
            copy_stage(q_desc, entry, entries, head, m, q_tiles, q_full, q_empty, count, PIECES)
            deltas.index(wait_empty(do_empty, count)).store(row_delta)
            copy_stage(do_desc, entry, entries, head, m, do_tiles, do_full, do_empty, count, PIECES)
            count += 1
        done += 1
        tile = next_tile(tickets, tiles)
    announce_end(tile, ticket, own_full, own_empty, done)


@gluon.jit
def compute_for_keys_in_pieces(VALUES: gl.constexpr, CAUSAL: gl.constexpr, PIECES: gl.constexpr, arguments):
    """One of two groups of warps with the same 64 keys: for the gradient of their values, or for theirs."""
    (
        ticket, dk_out, dv_out, q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas, inverses, weight_tiles, weights_full,
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
        block, row, part = tile_place(tile, blocks, rows, section, parts, False)
        begin, full, end = query_steps(block, part, parts, tokens, keys, right, CAUSAL, ROWS, BLOCK_M)
        first = block * ROWS - (keys - tokens) - right
        acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(group):
            acc, count = walk_queries_in_pieces(
                acc, count, own_tiles, near_tiles, far_tiles, weight_tiles, numbers, inverses,
                near_full, near_empty, far_full, far_empty, weights_full, full, end, first, scale,
                VALUES, False, PIECES, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
            if CAUSAL:
                acc, count = walk_queries_in_pieces(
                    acc, count, own_tiles, near_tiles, far_tiles, weight_tiles, numbers, inverses,
                    near_full, near_empty, far_full, far_empty, weights_full, begin, full, first, scale,
                    VALUES, True, PIECES, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
        mbarrier.arrive(own_empty.index(slot))
        if not VALUES:
            acc = acc * slope
        entry, head = row // key_heads, row % key_heads
        store_part(out, acc, part, entry, head, block * ROWS, keys, place, OUT_LAYOUT)
        done += 1
        tile, slot = announced(ticket, own_full, done)


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dk", "dv")])
def hopper_pieces_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, shift, delta, inverse, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dk_size: gl.int32, dk_b: gl.int32, dk_n: gl.int32, dk_h: gl.int32, dk_features: gl.int32,
    dv_size: gl.int32, dv_b: gl.int32, dv_n: gl.int32, dv_h: gl.int32, dv_features: gl.int32,
    CAUSAL: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, for tiles of 64 keys.

    Descriptors are of (PIECES · B, H, N, D), with boxes of (1, 1, BLOCK_M, D) for queries and their gradients and of
    (1, 1, 64, D) for keys and values. ``dk`` and ``dv`` are parts, one or several, in float32. ``tickets[0]`` is zero. It
    waits for the launch before it, and the one after it starts where this one leaves multiprocessors idle.
    """
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [PIECES, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [PIECES, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_M, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    inverses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    weight_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BLOCK_M], swizzled)
    ticket = gl.allocate_shared_memory(gl.int32, [1, 1], plain)
    own_full, own_empty = barriers(1), barriers(1)
    q_full, q_empty = barriers(STAGES), barriers(STAGES)
    do_full, do_empty = barriers(STAGES), barriers(STAGES)
    weights_full = barriers(STAGES)
    init_ring(own_full, own_empty, 2)
    init_ring(q_full, q_empty, 2)
    init_ring(do_full, do_empty, 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(weights_full.index(i), count=1)
    fence_async_shared()
    copying = (
        tickets, ticket, q_desc, do_desc, k_desc, v_desc, shift, delta, inverse,
        q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas, inverses,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    )  # fmt: skip
    computing = (
        ticket, dk, dv, q_tiles, do_tiles, k_tiles, v_tiles, shifts, deltas, inverses, weight_tiles, weights_full,
        own_full, own_empty, q_full, q_empty, do_full, do_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right, scale, slope,
        (dk_size, dk_b, dk_n, dk_h, dk_features), (dv_size, dv_b, dv_n, dv_h, dv_features),
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_for_keys_in_pieces, (True, CAUSAL, PIECES, computing)),
         (compute_for_keys_in_pieces, (False, CAUSAL, PIECES, computing)),
         (copy_for_keys_in_pieces, (CAUSAL, PIECES, copying))],
        [4, 1], [232, 40],
    )  # fmt: skip


@gluon.jit
def copy_for_queries_in_pieces(CAUSAL: gl.constexpr, PIECES: gl.constexpr, arguments):
    """The copying warp of `hopper_pieces_query_kernel`."""
    (
        tickets, ticket, q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    entries = rows // heads
    tiles = blocks * rows * parts
    tile = gl.program_id(0)
    count = 0
    done = 0
    while tile < tiles:
        slot = announce(tile, ticket, own_empty, done)
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        entry, head = row // heads, row % heads
        begin, _, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, ROWS, BLOCK_N)
        mbarrier.expect(own_full.index(slot), 2 * PIECES * q_desc.block_type.nbytes)
        copy_pieces(q_desc, entry, entries, head, block * ROWS, q_tiles, slot, own_full, PIECES)
        copy_pieces(do_desc, entry, entries, head, block * ROWS, do_tiles, slot, own_full, PIECES)
        for i in range(end - begin):
            n = (end - 1 - i) * BLOCK_N
            copy_stage(k_desc, entry, entries, head // group, n, k_tiles, k_full, k_empty, count, PIECES)
            copy_stage(v_desc, entry, entries, head // group, n, v_tiles, v_full, v_empty, count, PIECES)
            count += 1
        done += 1
        tile = next_tile(tickets, tiles)
    announce_end(tile, ticket, own_full, own_empty, done)


@gluon.jit
def weigh_keys_in_pieces(
    count, q_pieces, k_tiles, weight_tiles, row_shift, row_inverse, k_full, k_empty, weights_full,
    begin, end, first, keys, right, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of tiles of keys ``end − 1 … begin``, for the other group."""
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    for i in range(end - begin):
        slot = wait_full(k_full, count)
        logits = product_of_pieces(q_pieces, k_tiles, slot, PIECES, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k_empty.index(slot))
        n = (end - 1 - i) * BLOCK_N
        weights = weights_of(logits, row_shift, n, first, keys, right, scale, MASKED, CAUSAL, LAYOUT)
        weight_tiles.index(slot).store(weights * row_inverse[:, None])
        mbarrier.arrive(weights_full.index(slot))
        count += 1
    return count


@gluon.jit
def compute_weights_in_pieces(CAUSAL: gl.constexpr, PIECES: gl.constexpr, arguments):
    """The first of two groups of warps with the same 64 queries, whose pieces it has in registers."""
    (
        ticket, shift, inverse, q_tiles, k_tiles, weight_tiles, weights_full, own_full, own_empty, k_full, k_empty,
        tokens, keys, rows, blocks, section, parts, right, scale,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, slot = announced(ticket, own_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        begin, full, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, ROWS, BLOCK_N)
        m = block * ROWS
        first = m + keys - tokens  # the last query stands at the last key
        row_shift = row_numbers(shift, row, m, tokens, float("inf"), LAYOUT)
        row_inverse = row_numbers(inverse, row, m, tokens, 0.0, LAYOUT)
        q_pieces = own_pieces_in_registers(q_tiles, PIECES, LAYOUT)
        mbarrier.arrive(own_empty.index(slot))
        count = weigh_keys_in_pieces(
            count, q_pieces, k_tiles, weight_tiles, row_shift, row_inverse, k_full, k_empty, weights_full,
            full, end, first, keys, right, scale, True, CAUSAL, PIECES, LAYOUT,
        )  # fmt: skip
        count = weigh_keys_in_pieces(
            count, q_pieces, k_tiles, weight_tiles, row_shift, row_inverse, k_full, k_empty, weights_full,
            begin, full, first, keys, right, scale, False, CAUSAL, PIECES, LAYOUT,
        )  # fmt: skip
        done += 1
        tile, slot = announced(ticket, own_full, done)


@gluon.jit
def compute_gradient_in_pieces(CAUSAL: gl.constexpr, PIECES: gl.constexpr, arguments):
    """The second of two groups of warps with the same 64 queries: adds up their gradient."""
    (
        ticket, dq_out, delta, do_tiles, k_tiles, v_tiles, weight_tiles, weights_full, own_full, own_empty,
        k_full, k_empty, v_full, v_empty, tokens, keys, heads, rows, blocks, section, parts, right, slope, place,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = k_tiles.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = 0
    done = 0
    tiles = blocks * rows * parts
    tile, slot = announced(ticket, own_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        begin, _, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, ROWS, BLOCK_N)
        m = block * ROWS
        row_delta = row_numbers(delta, row, m, tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(end - begin):
            stage = wait_full(v_full, count)
            dweights = product_of_pieces(own_pieces(do_tiles, PIECES), v_tiles, stage, PIECES, LAYOUT)
            dweights = warpgroup_mma_wait(0, deps=[dweights])
            mbarrier.arrive(v_empty.index(stage))
            weights = weight_tiles.index(wait_full(weights_full, count)).load(LAYOUT)
            dlogits = weights * (dweights - row_delta[:, None])
            wait_full(k_full, count)
            dq = add_product(dq, dlogits, k_tiles, stage, PIECES, OUT_LAYOUT)
            mbarrier.arrive(k_empty.index(stage))
            count += 1
        mbarrier.arrive(own_empty.index(slot))
        entry, head = row // heads, row % heads
        store_part(dq_out, dq * slope, part, entry, head, m, tokens, place, OUT_LAYOUT)
        done += 1
        tile, slot = announced(ticket, own_full, done)


@gluon.jit(do_not_specialize=[*WALK, "slope", *place_names("dq")])
def hopper_pieces_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, shift, delta, inverse, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32, slope: gl.float32,
    dq_size: gl.int32, dq_b: gl.int32, dq_n: gl.int32, dq_h: gl.int32, dq_features: gl.int32,
    CAUSAL: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries, for tiles of 64. Descriptors, boxes and parts are as in `hopper_pieces_key_kernel`.

    ``tickets[1]`` is zero. It runs beside `hopper_pieces_key_kernel`, of which it reads nothing, and does not end before
    that has ended.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [PIECES, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [PIECES, 1, 1, ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], v_desc.layout)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    weight_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BLOCK_N], swizzled)
    ticket = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    own_full, own_empty = barriers(1), barriers(1)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    v_full, v_empty = barriers(STAGES), barriers(STAGES)
    weights_full = barriers(STAGES)
    init_ring(own_full, own_empty, 2)
    init_ring(k_full, k_empty, 2)
    init_ring(v_full, v_empty, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(weights_full.index(i), count=1)
    fence_async_shared()
    copying = (
        tickets + 1, ticket, q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    )  # fmt: skip
    weighing = (
        ticket, shift, inverse, q_tiles, k_tiles, weight_tiles, weights_full, own_full, own_empty, k_full, k_empty,
        tokens, keys, rows, blocks, section, parts, right, scale,
    )  # fmt: skip
    adding = (
        ticket, dq, delta, do_tiles, k_tiles, v_tiles, weight_tiles, weights_full, own_full, own_empty,
        k_full, k_empty, v_full, v_empty, tokens, keys, heads, rows, blocks, section, parts, right, slope,
        (dq_size, dq_b, dq_n, dq_h, dq_features),
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_weights_in_pieces, (CAUSAL, PIECES, weighing)),
         (compute_gradient_in_pieces, (CAUSAL, PIECES, adding)),
         (copy_for_queries_in_pieces, (CAUSAL, PIECES, copying))],
        [4, 1], [232, 40],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
