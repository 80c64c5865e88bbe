"""The gradient of queries for Hopper: groups of warps own 64 queries each, and loop over the keys.

While a tile's weights are computed, the gradient of the tile before is added up.
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
from warploom.device.hopper.pipeline import as_factor, matrix, new_ring
from warploom.ops.flash_attention.hopper.forward import QueryKernel, copy_for_queries
from warploom.ops.flash_attention.hopper.masks import (
    OwnQueries,
    first_key,
    own_queries,
    tile_of_step,
    without_first_step,
)
from warploom.ops.flash_attention.hopper.softmax import load_row_values, weights_of
from warploom.ops.flash_attention.hopper.tiles import (
    NARROW_HEAD,
    ROWS,
    Result,
    SplitStrides,
    empty_sum,
    finish_products,
    pack_16bit,
    pieces_of,
    product_layout,
    product_transposed,
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
    receive,
    tile_place,
    tiles_of,
)


class QueryRows(NamedTuple):
    """Rows of the 64 queries that a group of warps owns."""

    queries: OwnQueries
    lse: gl.tensor  # (64,)
    delta: gl.tensor  # (64,)
    q_pieces: gl.tuple  # in registers, or in shared memory
    do_tile: gl.tensor | None


@gluon.jit
def kv_loop(dq, dlogits, count, own, begin, end, kernel, MASKED: gl.constexpr, config: gl.constexpr):
    """Loop over tiles of keys ``end − 1 … begin``, with ``dlogits`` of the tile before, number ``count − 1``."""
    k, v, call, queries = kernel.k, kernel.v, kernel.call, own.queries
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(kernel.q_tiles.shape[4])
    STAGES: gl.constexpr = k.full.shape[0]
    PIECES: gl.constexpr = len(dq)
    dtype: gl.constexpr = k.tiles.dtype
    for i in range(end - begin):
        logits = product_transposed(own.q_pieces, k, count, LAYOUT)  # S = Q Kᵀ
        before = (count + STAGES - 1) % STAGES
        factor = unpack_as_operand(dlogits, dtype, OUT_LAYOUT)
        dq = sum_of_pieces(dq, factor, k.tiles, before)  # dQ += dS K, of the tile before
        dweights = product_transposed((own.do_tile,), v, count, LAYOUT)  # dP = dO Vᵀ
        logits = warpgroup_mma_wait(PIECES + 1, deps=[logits])
        n = first_key(end - 1 - i, queries.seq, call, BLOCK_N)
        weights = weights_of(logits, own.lse, n, queries, call, dtype, MASKED, LAYOUT, config)  # P = 2^(S − lse)
        done = warpgroup_mma_wait(0, deps=dq + (factor, dweights))
        dq, dweights = done[:PIECES], done[PIECES + 1]
        mbarrier.arrive(k.empty.index(before))
        mbarrier.arrive(v.empty.index(count % STAGES))
        dlogits = pack_16bit(weights * (dweights - own.delta[:, None]), dtype)  # dS = P ⊙ (dP − δ)
        count += 1
    return dq, dlogits, count


@gluon.jit
def kv_loop_unpipelined(dq, count, group, own, begin, end, kernel, MASKED: gl.constexpr, config: gl.constexpr):
    """`kv_loop` of a group with nothing in flight from one tile to the next: wide sums leave no registers for it."""
    k, v, call, queries = kernel.k, kernel.v, kernel.call, own.queries
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(kernel.q_tiles.shape[4])
    dtype: gl.constexpr = k.tiles.dtype
    for i in range(end - begin):
        # count >> 30 is zero, which the compiler cannot know: it computes addresses here, and holds none in registers.
        place = group + (count >> 30)
        logits = product_transposed((matrix(kernel.q_tiles, place),), k, count, LAYOUT)  # S = Q Kᵀ
        dweights = product_transposed((matrix(kernel.do_tiles, place),), v, count, LAYOUT)  # dP = dO Vᵀ
        logits = warpgroup_mma_wait(1, deps=[logits])
        n = first_key(end - 1 - i, queries.seq, call, BLOCK_N)
        weights = weights_of(logits, own.lse, n, queries, call, dtype, MASKED, LAYOUT, config)  # P = 2^(S − lse)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        mbarrier.arrive(v.empty.index(count % v.tiles.shape[0]))
        dlogits = as_factor(weights * (dweights - own.delta[:, None]), dtype, OUT_LAYOUT)  # dS = P ⊙ (dP − δ)
        slot = count % k.tiles.shape[0]
        dq = warpgroup_mma(dlogits, matrix(k.tiles, slot), dq, is_async=True)  # dQ += dS K
        dq, dlogits = warpgroup_mma_wait(0, deps=[dq, dlogits])
        mbarrier.arrive(k.empty.index(slot))
        count += 1
    return dq, count


@gluon.jit
def gradient_of_queries(queries, row_lse, row_delta, count, own: gl.constexpr, kernel, config: gl.constexpr):
    """Returns the gradient of 64 queries, with the gradient of one tile of keys in flight beside the weights of the next."""
    scheduler, k, v, call = kernel.scheduler, kernel.k, kernel.v, kernel.call
    STAGES: gl.constexpr = config.STAGES
    PIECES: gl.constexpr = config.PIECES
    IN_REGISTERS: gl.constexpr = config.GROUPS == 2 and PIECES == 1  # three groups leave no registers for queries
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = kernel.q_tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    dtype: gl.constexpr = k.tiles.dtype
    if IN_REGISTERS:
        q_pieces = (matrix(kernel.q_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
        do_tile = matrix(kernel.do_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
        mbarrier.arrive(scheduler.empty.index(0))
    else:
        q_pieces = pieces_of(kernel.q_tiles, own, PIECES)
        do_tile = matrix(kernel.do_tiles, own)
    dq = empty_sum(PIECES, D, OUT_LAYOUT)
    logits = product_transposed(q_pieces, k, count, LAYOUT)
    dweights = product_transposed((do_tile,), v, count, LAYOUT)
    logits, dweights = warpgroup_mma_wait(0, deps=[logits, dweights])
    mbarrier.arrive(v.empty.index(count % STAGES))
    n = first_key(tile_of_step(0, queries, call), queries.seq, call, BLOCK_N)
    queries = without_first_step(queries, call)
    weights = weights_of(logits, row_lse, n, queries, call, dtype, True, LAYOUT, config)
    dlogits = pack_16bit(weights * (dweights - row_delta[:, None]), dtype)
    count += 1
    rows = QueryRows(queries, row_lse, row_delta, q_pieces, do_tile)
    if config.CAUSAL or call.window is not None:  # otherwise the first step alone has a mask
        dq, dlogits, count = kv_loop(dq, dlogits, count, rows, queries.full, queries.end, kernel, True, config)
    dq, dlogits, count = kv_loop(dq, dlogits, count, rows, queries.low, queries.full, kernel, False, config)
    if call.window is not None:
        dq, dlogits, count = kv_loop(dq, dlogits, count, rows, queries.begin, queries.low, kernel, True, config)
    if not IN_REGISTERS:
        mbarrier.arrive(scheduler.empty.index(0))
    before = (count + STAGES - 1) % STAGES
    factor = unpack_as_operand(dlogits, dtype, OUT_LAYOUT)
    dq = finish_products(sum_of_pieces(dq, factor, k.tiles, before))
    mbarrier.arrive(k.empty.index(before))
    return dq, count


@gluon.jit
def gradient_of_wide_queries(queries, row_lse, row_delta, count, own: gl.constexpr, kernel, config: gl.constexpr):
    """Returns the gradient of 64 queries of more than 128 features."""
    call = kernel.call
    D: gl.constexpr = kernel.q_tiles.shape[4]
    begin, low, full, end = queries.begin, queries.low, queries.full, queries.end
    dq = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    rows = QueryRows(queries, row_lse, row_delta, (), None)
    if call.window is not None or call.seqused_k is not None:
        dq, count = kv_loop_unpipelined(dq, count, own, rows, begin, begin + 1, kernel, True, config)
        begin += 1
    dq, count = kv_loop_unpipelined(dq, count, own, rows, full, end, kernel, True, config)
    dq, count = kv_loop_unpipelined(dq, count, own, rows, low, full, kernel, False, config)
    if call.window is not None:
        dq, count = kv_loop_unpipelined(dq, count, own, rows, begin, low, kernel, True, config)
    return (dq,), count


@gluon.jit
def compute_for_queries(own: gl.constexpr, config: gl.constexpr, kernel):
    """Run group number ``own`` of warps of `hopper_query_kernel`. Wide results are stored through the buffers of the queries."""
    scheduler, call, schedule = kernel.scheduler, kernel.call, kernel.call.schedule
    CAUSAL: gl.constexpr = config.CAUSAL
    D: gl.constexpr = kernel.q_tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(kernel.k.tiles.shape[3])
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    tokens = call.lengths.tokens
    count = 0
    tiles = tiles_of(schedule)
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        place = tile_place(work.tile, schedule, CAUSAL)  # the last queries see the most keys
        queries = own_queries(place, own, kernel, config)
        m = queries.m
        row_lse = load_row_values(kernel.lse, place.row, m, tokens, float("inf"), LAYOUT)
        row_delta = load_row_values(kernel.delta, place.row, m, tokens, 0.0, LAYOUT)
        if D > NARROW_HEAD:
            dq, count = gradient_of_wide_queries(queries, row_lse, row_delta, count, own, kernel, config)
        else:
            dq, count = gradient_of_queries(queries, row_lse, row_delta, count, own, kernel, config)
            tma.store_wait(0)  # until the tile before is stored from its buffer
        batch, head = place.row // schedule.heads, place.row % schedule.heads
        if config.PIECES > 1:
            store_pieces(kernel.dq, dq, call.grad_scale, place.split, batch, head, m, tokens, OUT_LAYOUT)
        else:
            store_tile(kernel.dq, dq[0] * call.grad_scale, own, place.split, batch, head, m, tokens, OUT_LAYOUT)
        if D > NARROW_HEAD:
            tma.store_wait(0)
            mbarrier.arrive(scheduler.empty.index(0))
        work = receive(scheduler, work.number + 1)
    if D <= NARROW_HEAD:
        tma.store_wait(0)


@gluon.jit
def hopper_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, counters, seqused_k, units,
    lengths: SeqLens, schedule: Schedule, right: gl.int32, window: Window, scales: Scales,
    dq_strides: SplitStrides, config: gl.constexpr,
):  # fmt: skip
    """Gradients of queries. Descriptors, boxes and parts are as in `forward.hopper_forward_kernel`.

    Of queries in ``PIECES``, ``dq`` is an address, also of a whole result, and ``SPLIT`` is set.

    ``counters[1]`` is zero. It runs beside `hopper_key_kernel`, of which it reads nothing, and does not end before that
    has ended.
    """
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.STAGES
    PIECES: gl.constexpr = config.PIECES
    SOFTCAP: gl.constexpr = config.SOFTCAP
    if config.SPLIT:  # what sums up parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS * PIECES, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], k_desc.layout)
    V_STAGES: gl.constexpr = STAGES if D <= NARROW_HEAD else STAGES - 1  # there is no room for as many wide ones
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    dq_tiles = None
    if not config.SPLIT:
        dq_tiles = q_tiles
        if D <= NARROW_HEAD:
            dq_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], dq.layout)
    scheduler = new_scheduler(counters + 1, 1, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, V_STAGES, GROUPS)
    fence_async_shared()
    call = AttentionCall(
        lengths, schedule, right, scales.logits, scales.gradients, window, seqused_k, None, SOFTCAP, None, units
    )
    kernel = QueryKernel(
        scheduler, q_tiles, do_tiles, k, v, None, None, None, lse, None, delta, None, Result(dq, dq_tiles, dq_strides),
        (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, call,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [(compute_for_queries, (0, config, kernel)), (compute_for_queries, (1, config, kernel)),
             (copy_for_queries, (True, config, kernel))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_for_queries, (0, config, kernel)), (compute_for_queries, (1, config, kernel)),
             (compute_for_queries, (2, config, kernel)), (copy_for_queries, (True, config, kernel))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
