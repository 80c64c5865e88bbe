"""Gradients for Hopper where two groups of warps share a tile of 64 keys, or of 64 queries.

This is for two kinds of call:

- Keys of more than 128 features: a group's registers do not hold the gradients of keys and of values.
- Float32: a factor is the sum of ``TERMS`` bfloat16 tensors, which `triton.terms.terms_kernel` makes before. Shared memory
  has no room for the rows of two groups.

One group computes weights and, of keys, adds up the gradient of the values. The other takes the weights from shared memory
and adds up the gradient of the keys, or of the queries. All products of terms of a tile are in flight together.
"""

from __future__ import annotations

from typing import NamedTuple

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
from warploom.device.hopper.pipeline import as_factor, barriers, init_each, matrix, new_ring, wait_full
from warploom.ops.flash_attention.hopper.backward_dkv import (
    KeyKernel,
    QueryBuffers,
    copy_for_keys,
    zero_unused_rows,
)
from warploom.ops.flash_attention.hopper.forward import QueryKernel, copy_for_queries
from warploom.ops.flash_attention.hopper.masks import own_keys, own_queries
from warploom.ops.flash_attention.hopper.softmax import (
    load_row_values,
    transposed_weights_of,
    weights_and_slopes,
    weights_of,
)
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    SplitStrides,
    empty_sum,
    pack_16bit,
    pieces_of,
    product_layout,
    product_transposed,
    store_part,
    store_pieces,
    store_tile,
    sum_of_pieces,
    unpack_as_operand,
)
from warploom.ops.flash_attention.hopper.work import (
    AttentionCall,
    Scales,
    Schedule,
    SeqLens,
    Window,
    new_scheduler,
    read,
    receive,
    sequence_of,
    tile_place,
    tiles_of,
)


@gluon.jit
def product_of_terms(
    a_terms, b_tiles, slot, TERMS: gl.constexpr, LAYOUT: gl.constexpr, SWAPPED: gl.constexpr = False,
    TRANSPOSED: gl.constexpr = True,
):  # fmt: skip
    """Start ``a · bᵀ``, or ``a · b``, of own rows and of a tile of a ring, the smallest products first.

    ``SWAPPED``: in the order that the same products have in ``b · aᵀ``, so that the bits are the same.
    """
    N: gl.constexpr = b_tiles.shape[3] if TRANSPOSED else b_tiles.shape[4]
    acc = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    for left_out in gl.static_range(TERMS):
        for i in gl.static_range(TERMS - left_out):
            if SWAPPED:
                a, of_b = a_terms[i], TERMS - 1 - left_out - i
            else:
                a, of_b = a_terms[TERMS - 1 - left_out - i], i
            b = matrix(b_tiles, slot * TERMS + of_b)
            if TRANSPOSED:
                b = b.permute([1, 0])
            acc = warpgroup_mma(a, b, acc, use_acc=left_out + i > 0, is_async=True)
    return acc


@gluon.jit
def add_product(acc, tile, ring, count, TERMS: gl.constexpr, LAYOUT: gl.constexpr):
    """``acc + tile · b`` with the tile number ``count`` of a ring, which is empty then.

    Of several terms, the sum is formed outside of matrix units, which drop bits where they add.
    """
    if TERMS == 1:
        factor = as_factor(tile, ring.tiles.dtype, LAYOUT)
        slot = wait_full(ring.full, count)
        acc = warpgroup_mma(factor, matrix(ring.tiles, slot), acc, is_async=True)
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
    else:
        slot = wait_full(ring.full, count)
        factors = ()
        for _ in gl.static_range(TERMS):
            term = tile.to(ring.tiles.dtype)
            factors += (gl.convert_layout(term, gl.DotOperandLayout(0, LAYOUT, 2)),)
            tile = tile - term.to(gl.float32)
        whole = product_of_terms(factors, ring.tiles, slot, TERMS, LAYOUT, False, False)
        acc = acc + warpgroup_mma_wait(0, deps=(whole,) + factors)[0]
    mbarrier.arrive(ring.empty.index(slot))
    return acc


class Weights(NamedTuple):
    """Buffers by which weights go from the first group to the second.

    No group waits for such a buffer to be empty: when tiles have come into the buffers of its number, the second group had
    done with those before.
    """

    tiles: gl.shared_memory_descriptor  # (stages, 64, rows of a tile) float32
    full: gl.shared_memory_descriptor  # a barrier for each stage


@gluon.jit
def weight_buffers(STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Tiles of weights."""
    # Half a warp has 32 bytes of each of four rows: swizzled, these lie in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BLOCK], swizzled)


@gluon.jit
def query_loop_for_one(
    acc, count, slot, begin, end, keys, kernel, VALUES: gl.constexpr, MASKED: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """Loop over tiles of queries ``begin … end`` of one head for one of two gradients; the other group forms the other.

    With ``VALUES`` the own tile is of keys, near tiles are queries, far tiles their gradients, and ``acc`` is the gradient
    of values. Otherwise the own tile is of values, near and far change places, and ``acc`` is the gradient of keys. Of
    several terms the last tile comes first.
    """
    own_tiles, near, far = (
        (kernel.k_tiles, kernel.q, kernel.do) if VALUES else (kernel.v_tiles, kernel.do, kernel.q)
    )
    row_values = kernel.lses if VALUES else kernel.deltas
    weights, call = kernel.weights, kernel.call
    TERMS: gl.constexpr = config.TERMS
    BLOCK_M: gl.constexpr = near.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(kernel.q.tiles.shape[4])
    for i in range(begin if TERMS == 1 else 0, end if TERMS == 1 else end - begin):
        stage = wait_full(near.full, count)
        product = product_of_terms(pieces_of(own_tiles, slot, TERMS), near.tiles, stage, TERMS, LAYOUT, VALUES)
        product = warpgroup_mma_wait(0, deps=[product])  # (keys, queries)
        row_value = row_values.index(stage).load(gl.SliceLayout(0, LAYOUT))
        if VALUES:
            row_inverse = None
            if TERMS > 1:
                row_inverse = kernel.inverses.index(stage).load(gl.SliceLayout(0, LAYOUT))
            mbarrier.arrive(near.empty.index(stage))
            m = (i if TERMS == 1 else end - 1 - i) * BLOCK_M
            tile, slopes = transposed_weights_of(
                product, row_value, m, keys, call, near.tiles.dtype, MASKED, LAYOUT, config, row_inverse
            )
            weights.tiles.index(stage).store(slopes)
            mbarrier.arrive(weights.full.index(stage))
        else:
            mbarrier.arrive(near.empty.index(stage))
            tile = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
            tile = tile * (product - row_value[None, :])
        acc = add_product(acc, tile, far, count, TERMS, OUT_LAYOUT)
        count += 1
    return acc, count


@gluon.jit
def factor_of(product, count, m, keys, kernel, VALUES: gl.constexpr, config: gl.constexpr):
    """Returns weights, or gradients of logits, from a near product of tile number ``count``, number ``m`` of its queries."""
    near, weights = kernel.q if VALUES else kernel.do, kernel.weights
    dtype: gl.constexpr = near.tiles.dtype
    LAYOUT: gl.constexpr = product_layout(near.tiles.shape[3])
    stage = count % near.full.shape[0]
    row_values = kernel.lses.index(stage) if VALUES else kernel.deltas.index(stage)
    if VALUES:
        tile, slopes = weights_and_slopes(product, row_values, m, keys, None, kernel.call, dtype, LAYOUT, config)
        mbarrier.arrive(near.empty.index(stage))
        weights.tiles.index(stage).store(slopes)
        mbarrier.arrive(weights.full.index(stage))
    else:
        row_delta = row_values.load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(near.empty.index(stage))
        slopes = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
        tile = slopes * (product - row_delta[None, :])
    return tile.to(gl.float32)


@gluon.jit
def query_loop_in_pieces(acc, count, slot, keys, kernel, VALUES: gl.constexpr, config: gl.constexpr):
    """`query_loop_for_one` over tiles of queries of all heads, of which one follows the other.

    The own tile is given back when the last near product is there.
    """
    own_tiles, near, far = (
        (kernel.k_tiles, kernel.q, kernel.do) if VALUES else (kernel.v_tiles, kernel.do, kernel.q)
    )
    own_empty, heads = kernel.scheduler.empty.index(slot), kernel.call.schedule.group
    STAGES: gl.constexpr = near.full.shape[0]
    LAYOUT: gl.constexpr = product_layout(near.tiles.shape[3])
    OUT_LAYOUT: gl.constexpr = product_layout(far.tiles.shape[4])
    NEAR: gl.constexpr = near.tiles.shape[0] // STAGES
    FAR: gl.constexpr = far.tiles.shape[0] // STAGES
    dtype: gl.constexpr = near.tiles.dtype
    steps = heads * (keys.end - keys.begin)
    if steps > 0:
        own = pieces_of(own_tiles, slot, NEAR)
        m = keys.begin
        product = product_transposed(own, near, count, LAYOUT)  # (keys, queries)
        product = warpgroup_mma_wait(0, deps=[product])
        new = factor_of(product, count, m, keys, kernel, VALUES, config)
        tile = pack_16bit(new, dtype)
        for _ in range(steps - 1):
            m += 1
            m = gl.where(m == keys.end, keys.begin, m)
            product = product_transposed(own, near, count + 1, LAYOUT)
            far_slot = wait_full(far.full, count)
            factor = unpack_as_operand(tile, dtype, OUT_LAYOUT)
            acc = sum_of_pieces(acc, factor, far.tiles, far_slot)
            product = warpgroup_mma_wait(FAR, deps=[product])
            new = factor_of(product, count + 1, m, keys, kernel, VALUES, config)
            acc = warpgroup_mma_wait(0, deps=acc + (factor,))[:FAR]
            mbarrier.arrive(far.empty.index(far_slot))
            tile = pack_16bit(new, dtype)
            count += 1
        mbarrier.arrive(own_empty)
        far_slot = wait_full(far.full, count)
        factor = unpack_as_operand(tile, dtype, OUT_LAYOUT)
        acc = sum_of_pieces(acc, factor, far.tiles, far_slot)
        acc = warpgroup_mma_wait(0, deps=acc + (factor,))[:FAR]
        mbarrier.arrive(far.empty.index(far_slot))
        count += 1
    else:
        mbarrier.arrive(own_empty)
    return acc, count


@gluon.jit
def compute_for_one(VALUES: gl.constexpr, config: gl.constexpr, kernel):
    """One of two groups of warps with the same 64 keys: for the gradient of their values, or for theirs.

    Its result is stored through the buffer that it alone reads: the gradient of values through that of keys, and the other
    way round. In pieces, or of several terms, it is stored from registers: while it is, the next keys and values are
    copied.
    """
    scheduler, call, schedule = kernel.scheduler, kernel.call, kernel.call.schedule
    result, far = (kernel.dv, kernel.do) if VALUES else (kernel.dk, kernel.q)
    TERMS: gl.constexpr = config.TERMS
    IN_PIECES: gl.constexpr = config.PIECES > 1
    CAUSAL: gl.constexpr = config.CAUSAL
    WIDTH: gl.constexpr = far.tiles.shape[4]
    PIECES: gl.constexpr = far.tiles.shape[0] // (far.full.shape[0] * TERMS)
    OUT_LAYOUT: gl.constexpr = product_layout(WIDTH)
    key_heads = schedule.heads // schedule.group
    count = 0
    tiles = tiles_of(schedule)
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        slot = work.slot
        place = tile_place(work.tile, schedule, False)
        keys = own_keys(place, key_heads, 0, kernel, config)
        sums = empty_sum(PIECES, WIDTH, OUT_LAYOUT)
        if IN_PIECES:
            sums, count = query_loop_in_pieces(sums, count, slot, keys, kernel, VALUES, config)
        else:
            acc = sums[0]
            for _ in range(schedule.group):
                if CAUSAL and TERMS == 1:
                    acc, count = query_loop_for_one(
                        acc, count, slot, keys.begin, keys.full, keys, kernel, VALUES, True, config
                    )
                acc, count = query_loop_for_one(
                    acc, count, slot, keys.full, keys.high, keys, kernel, VALUES, False, config
                )
                if call.window is not None:
                    acc, count = query_loop_for_one(
                        acc, count, slot, keys.high, keys.end, keys, kernel, VALUES, True, config
                    )
                if CAUSAL and TERMS > 1:
                    acc, count = query_loop_for_one(
                        acc, count, slot, keys.begin, keys.full, keys, kernel, VALUES, True, config
                    )
            if TERMS > 1:
                mbarrier.arrive(scheduler.empty.index(slot))
            if not VALUES:
                acc = acc * call.grad_scale
            if TERMS == 1:  # worked out again rather than held in registers
                place = tile_place(read(scheduler, slot), schedule, False)
            sums = (acc,)
        batch, head = place.row // key_heads, place.row % key_heads
        n = place.block * ROWS
        if call.seqused_k is not None:
            sums = zero_unused_rows(sums, n, sequence_of(batch, n, call).keys, OUT_LAYOUT)
        if IN_PIECES:
            factor = 1.0 if VALUES else call.grad_scale
            store_pieces(result, sums, factor, place.split, batch, head, n, call.lengths.keys, OUT_LAYOUT)
        else:
            store_tile(result, sums[0], slot, place.split, batch, head, n, call.lengths.keys, OUT_LAYOUT)
            if TERMS == 1:
                tma.store_wait(0)
                mbarrier.arrive(scheduler.empty.index(slot))
        work = receive(scheduler, work.number + 1)


@gluon.jit
def hopper_shared_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, inverse, counters, seqused_k, units,
    lengths: SeqLens, schedule: Schedule, right: gl.int32, window: Window, scales: Scales,
    dk_strides: SplitStrides, dv_strides: SplitStrides, config: gl.constexpr,
):  # fmt: skip
    """`backward_dkv.hopper_key_kernel` for tiles of 64 keys; there is no room for the next tile of them.

    Boxes of queries and keys may be as wide as one of ``PIECES`` of a row. Then ``dk`` and ``dv`` are addresses, also of
    whole results, and ``SPLIT`` is set.

    With several ``TERMS``, there are no options, descriptors are of (TERMS · B, H, N, D), and ``dk`` and ``dv`` are parts, one or several.
    """
    gdc_wait()
    gdc_launch_dependents()
    STAGES: gl.constexpr = config.STAGES
    TERMS: gl.constexpr = config.TERMS
    PIECES: gl.constexpr = config.PIECES
    SOFTCAP: gl.constexpr = config.SOFTCAP
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [TERMS * PIECES, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, E], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS * PIECES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_M, E], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    inverses = None
    if TERMS > 1:
        inverses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    weight_tiles = weight_buffers(STAGES, BLOCK_M)
    if TERMS == 1:
        weights_full = barriers(STAGES)
    scheduler = new_scheduler(counters, 1, 2)
    q, do = new_ring(q_tiles, STAGES, 2), new_ring(do_tiles, STAGES, 2)
    if TERMS > 1:
        weights_full = barriers(STAGES)
    init_each(weights_full)
    fence_async_shared()
    call = AttentionCall(
        lengths, schedule, right, scales.logits, scales.gradients, window, seqused_k, None, SOFTCAP, None, units
    )
    dk_result = Result(dk, None if config.SPLIT else v_tiles, dk_strides)
    dv_result = Result(dv, None if config.SPLIT else k_tiles, dv_strides)
    kernel = KeyKernel(
        scheduler, k_tiles, v_tiles, q, lses, do, deltas, Weights(weight_tiles, weights_full), None, dk_result, dv_result,
        (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, QueryBuffers(q, lses, do, deltas), lse, delta,
        inverse, inverses, None, None, call,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_for_one, (True, config, kernel)), (compute_for_one, (False, config, kernel)), (copy_for_keys, (config, kernel))],
        [4, 1], [240, 24] if TERMS == 1 else [232, 40],
    )  # fmt: skip


@gluon.jit
def weigh_keys(
    count, q_terms, row_lse, row_inverse, begin, end, queries, kernel, MASKED: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """Weights of tiles of keys ``end − 1 … begin``, for the other group."""
    k, weights, call = kernel.k, kernel.weights, kernel.call
    TERMS: gl.constexpr = config.TERMS
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    for i in range(end - begin):
        slot = wait_full(k.full, count)
        logits = product_of_terms(q_terms, k.tiles, slot, TERMS, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k.empty.index(slot))
        n = (end - 1 - i) * BLOCK_N
        tile = weights_of(logits, row_lse, n, queries, call, k.tiles.dtype, MASKED, LAYOUT, config)
        weights.tiles.index(slot).store(tile * row_inverse[:, None])
        mbarrier.arrive(weights.full.index(slot))
        count += 1
    return count


@gluon.jit
def compute_weights(config: gl.constexpr, kernel):
    """The first of two groups of warps with the same 64 queries, whose terms it has in registers."""
    scheduler, call, schedule = kernel.scheduler, kernel.call, kernel.call.schedule
    TERMS: gl.constexpr = config.TERMS
    CAUSAL: gl.constexpr = config.CAUSAL
    LAYOUT: gl.constexpr = product_layout(kernel.k.tiles.shape[3])
    count = 0
    tiles = tiles_of(schedule)
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        place = tile_place(work.tile, schedule, CAUSAL)
        queries = own_queries(place, 0, kernel, config)
        row_lse = load_row_values(kernel.lse, place.row, queries.m, call.lengths.tokens, float("inf"), LAYOUT)
        row_inverse = load_row_values(kernel.inverse, place.row, queries.m, call.lengths.tokens, 0.0, LAYOUT)
        q_terms = ()
        for i in gl.static_range(TERMS):
            q_terms += (matrix(kernel.q_tiles, i).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
        mbarrier.arrive(scheduler.empty.index(work.slot))
        count = weigh_keys(
            count, q_terms, row_lse, row_inverse, queries.full, queries.end, queries, kernel, True, config
        )  # fmt: skip
        count = weigh_keys(
            count, q_terms, row_lse, row_inverse, queries.begin, queries.full, queries, kernel, False, config
        )  # fmt: skip
        work = receive(scheduler, work.number + 1)


@gluon.jit
def compute_gradient(config: gl.constexpr, kernel):
    """The second of two groups of warps with the same 64 queries: adds up their gradient."""
    scheduler, call, schedule = kernel.scheduler, kernel.call, kernel.call.schedule
    k, v, weights = kernel.k, kernel.v, kernel.weights
    TERMS: gl.constexpr = config.TERMS
    CAUSAL: gl.constexpr = config.CAUSAL
    D: gl.constexpr = k.tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(k.tiles.shape[3])
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    tokens = call.lengths.tokens
    count = 0
    tiles = tiles_of(schedule)
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        place = tile_place(work.tile, schedule, CAUSAL)
        queries = own_queries(place, 0, kernel, config)
        row_delta = load_row_values(kernel.delta, place.row, queries.m, tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(queries.end - queries.begin):
            stage = wait_full(v.full, count)
            dweights = product_of_terms(pieces_of(kernel.do_tiles, 0, TERMS), v.tiles, stage, TERMS, LAYOUT)
            dweights = warpgroup_mma_wait(0, deps=[dweights])
            mbarrier.arrive(v.empty.index(stage))
            tile_weights = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
            dlogits = tile_weights * (dweights - row_delta[:, None])
            dq = add_product(dq, dlogits, k, count, TERMS, OUT_LAYOUT)
            count += 1
        mbarrier.arrive(scheduler.empty.index(work.slot))
        batch, head = place.row // schedule.heads, place.row % schedule.heads
        store_part(kernel.dq, dq * call.grad_scale, place.split, batch, head, queries.m, tokens, OUT_LAYOUT)
        work = receive(scheduler, work.number + 1)


@gluon.jit
def hopper_shared_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, inverse, counters,
    lengths: SeqLens, schedule: Schedule, right: gl.int32, scales: Scales,
    dq_strides: SplitStrides, config: gl.constexpr,
):  # fmt: skip
    """Gradients of queries, for tiles of 64. Descriptors, boxes and parts are as in `hopper_shared_key_kernel`.

    ``counters[1]`` is zero. It runs beside `hopper_shared_key_kernel`, of which it reads nothing, and does not end before
    that has ended.
    """
    gdc_launch_dependents()
    TERMS: gl.constexpr = config.TERMS
    STAGES: gl.constexpr = config.STAGES
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_N, D], v_desc.layout)
    weight_tiles = weight_buffers(STAGES, BLOCK_N)
    scheduler = new_scheduler(counters + 1, 1, 2)
    k, v = new_ring(k_tiles, STAGES, 2), new_ring(v_tiles, STAGES, 1)
    weights_full = barriers(STAGES)
    init_each(weights_full)
    fence_async_shared()
    call = AttentionCall(lengths, schedule, right, scales.logits, scales.gradients)
    kernel = QueryKernel(
        scheduler, q_tiles, do_tiles, k, v, None, Weights(weight_tiles, weights_full), None, lse, None, delta, inverse, Result(dq, None, dq_strides),
        (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, call,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_weights, (config, kernel)), (compute_gradient, (config, kernel)), (copy_for_queries, (True, config, kernel))],
        [4, 1], [232, 40],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
