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
from warploom.device.hopper.pipeline import Ring, as_factor, matrix, new_ring
from warploom.ops.flash_attention.hopper.forward import QueryCopies, copy_for_queries
from warploom.ops.flash_attention.hopper.masks import first_key, key_steps, rest_of, tile_of_step
from warploom.ops.flash_attention.hopper.tiles import (
    NARROW_HEAD,
    ROWS,
    Result,
    SplitStrides,
    empty_sum,
    finished,
    pack_16bit,
    pieces_of,
    product_layout,
    product_transposed,
    store_pieces,
    store_tile,
    sum_of_pieces,
    unpack_as_operand,
)
from warploom.ops.flash_attention.hopper.weights import load_row_values, weights_of
from warploom.ops.flash_attention.hopper.work import (
    Options,
    Scheduler,
    Window,
    Work,
    entry_of,
    new_scheduler,
    received,
    tile_place,
    tiles_of,
)


class QueryGradients(NamedTuple):
    """Tensors that groups of warps that own queries share."""

    scheduler: Scheduler
    q_tiles: gl.shared_memory_descriptor  # one for each group
    do_tiles: gl.shared_memory_descriptor  # one for each group
    k: Ring
    v: Ring
    lse: gl.tensor
    delta: gl.tensor
    dq: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient
    options: Options


class OwnQueries(NamedTuple):
    """64 queries that a group of warps owns."""

    q_pieces: gl.tuple
    do_tile: gl.tensor  # in registers, or in shared memory
    lse: gl.tensor  # (64,)
    delta: gl.tensor  # (64,)
    first: gl.int32  # the key that the first of them stands at
    seq: Work  # of their batch entry, or packed sequence


@gluon.jit
def kv_loop(dq, dlogits, count, own, begin, end, call, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Loop over tiles of keys ``end − 1 … begin``, with ``dlogits`` of the tile before, number ``count − 1``."""
    k, v, options = call.k, call.v, call.options
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(call.q_tiles.shape[4])
    STAGES: gl.constexpr = k.full.shape[0]
    PIECES: gl.constexpr = len(dq)
    for i in range(end - begin):
        logits = product_transposed(own.q_pieces, k, count, LAYOUT)  # S = Q Kᵀ
        before = (count + STAGES - 1) % STAGES
        factor = unpack_as_operand(dlogits, k.tiles.dtype, OUT_LAYOUT)
        dq = sum_of_pieces(dq, factor, k.tiles, before)  # dQ += dS K, of the tile before
        dweights = product_transposed((own.do_tile,), v, count, LAYOUT)  # dP = dO Vᵀ
        logits = warpgroup_mma_wait(PIECES + 1, deps=[logits])
        n = first_key(end - 1 - i, own.seq, options, BLOCK_N)
        weights = weights_of(  # P = 2^(S − lse)
            logits, own.lse, n, own.first, own.seq, options, call.scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT
        )
        done = warpgroup_mma_wait(0, deps=dq + (factor, dweights))
        dq, dweights = done[:PIECES], done[PIECES + 1]
        mbarrier.arrive(k.empty.index(before))
        mbarrier.arrive(v.empty.index(count % STAGES))
        dlogits = pack_16bit(weights * (dweights - own.delta[:, None]), k.tiles.dtype)  # dS = P ⊙ (dP − δ)
        count += 1
    return dq, dlogits, count


@gluon.jit
def kv_loop_unpipelined(
    dq, count, group, own, begin, end, call, MASKED: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """`kv_loop` of a group with nothing in flight from one tile to the next: wide sums leave no registers for it."""
    k, v, options = call.k, call.v, call.options
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(call.q_tiles.shape[4])
    for i in range(end - begin):
        # count >> 30 is zero, which the compiler cannot know: it computes addresses here, and holds none in registers.
        place = group + (count >> 30)
        logits = product_transposed((matrix(call.q_tiles, place),), k, count, LAYOUT)
        dweights = product_transposed((matrix(call.do_tiles, place),), v, count, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        n = first_key(end - 1 - i, own.seq, options, BLOCK_N)
        weights = weights_of(
            logits, own.lse, n, own.first, own.seq, options, call.scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT
        )
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        mbarrier.arrive(v.empty.index(count % v.tiles.shape[0]))
        dlogits = as_factor(weights * (dweights - own.delta[:, None]), k.tiles.dtype, OUT_LAYOUT)
        slot = count % k.tiles.shape[0]
        dq = warpgroup_mma(dlogits, matrix(k.tiles, slot), dq, is_async=True)
        dq, dlogits = warpgroup_mma_wait(0, deps=[dq, dlogits])
        mbarrier.arrive(k.empty.index(slot))
        count += 1
    return dq, count


@gluon.jit
def compute_for_queries(
    own: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call
):
    """Run group number ``own`` of warps of `QueryGradients`. ``IN_REGISTERS``: its queries and gradients stay there."""
    scheduler, q_tiles, do_tiles, k = call.scheduler, call.q_tiles, call.do_tiles, call.k
    v, lse, delta, result = call.v, call.lse, call.delta, call.dq
    work, scale, grad_scale, options = call.work, call.scale, call.grad_scale, call.options
    GROUPS: gl.constexpr = do_tiles.shape[0]
    STAGES: gl.constexpr = k.full.shape[0]
    PIECES: gl.constexpr = k.tiles.shape[0] // STAGES
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, _ = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        entry = entry_of(work, row // work.heads, block * BLOCK_M, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - entry.tokens  # the last query stands at the last key
        row_lse = load_row_values(lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_delta = load_row_values(delta, row, m, work.tokens, 0.0, LAYOUT)
        if IN_REGISTERS:
            q_pieces = (matrix(q_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
            do_tile = matrix(do_tiles, own).load(gl.DotOperandLayout(0, LAYOUT, 2))
            mbarrier.arrive(scheduler.empty.index(0))
        else:
            q_pieces = pieces_of(q_tiles, own, PIECES)
            do_tile = matrix(do_tiles, own)
        dq = empty_sum(PIECES, D, OUT_LAYOUT)
        logits = product_transposed(q_pieces, k, count, LAYOUT)
        dweights = product_transposed((do_tile,), v, count, LAYOUT)
        logits, dweights = warpgroup_mma_wait(0, deps=[logits, dweights])
        mbarrier.arrive(v.empty.index(count % STAGES))
        n = first_key(tile_of_step(0, begin, end, options), entry, options, BLOCK_N)
        begin, end = rest_of(begin, end, options)
        weights = weights_of(logits, row_lse, n, first, entry, options, scale, k.tiles.dtype, True, CAUSAL, LAYOUT)
        dlogits = pack_16bit(weights * (dweights - row_delta[:, None]), k.tiles.dtype)
        count += 1
        own_queries = OwnQueries(q_pieces, do_tile, row_lse, row_delta, first, entry)
        if CAUSAL or options.window is not None:  # otherwise the first step alone has a mask
            dq, dlogits, count = kv_loop(dq, dlogits, count, own_queries, full, end, call, True, CAUSAL)
        dq, dlogits, count = kv_loop(dq, dlogits, count, own_queries, low, full, call, False, CAUSAL)
        if options.window is not None:
            dq, dlogits, count = kv_loop(dq, dlogits, count, own_queries, begin, low, call, True, CAUSAL)
        if not IN_REGISTERS:
            mbarrier.arrive(scheduler.empty.index(0))
        before = (count + STAGES - 1) % STAGES
        factor = unpack_as_operand(dlogits, k.tiles.dtype, OUT_LAYOUT)
        dq = sum_of_pieces(dq, factor, k.tiles, before)
        dq = finished(dq)
        mbarrier.arrive(k.empty.index(before))
        tma.store_wait(0)  # until the tile before has left its buffer
        batch, head = row // work.heads, row % work.heads
        if PIECES > 1:
            store_pieces(result, dq, grad_scale, split, batch, head, m, work.tokens, OUT_LAYOUT)
        else:
            store_tile(result, dq[0] * grad_scale, own, split, batch, head, m, work.tokens, SPLIT, OUT_LAYOUT)
        done += 1
        tile, _ = received(scheduler, done)
    tma.store_wait(0)


@gluon.jit
def compute_for_wide_queries(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call):
    """`compute_for_queries` for more than 128 features; results leave through the buffers of the queries."""
    scheduler, q_tiles, k, lse = call.scheduler, call.q_tiles, call.k, call.lse
    delta, result, work, grad_scale = call.delta, call.dq, call.work, call.grad_scale
    options = call.options
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = q_tiles.shape[4]
    BLOCK_M: gl.constexpr = q_tiles.shape[0] * ROWS
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, _ = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        entry = entry_of(work, row // work.heads, block * BLOCK_M, options)
        begin, low, full, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + entry.keys - entry.tokens  # the last query stands at the last key
        row_lse = load_row_values(lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_delta = load_row_values(delta, row, m, work.tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        own_queries = OwnQueries((), None, row_lse, row_delta, first, entry)
        if options.window is not None or options.seqused_k is not None:
            dq, count = kv_loop_unpipelined(dq, count, own, own_queries, begin, begin + 1, call, True, CAUSAL)
            begin += 1
        dq, count = kv_loop_unpipelined(dq, count, own, own_queries, full, end, call, True, CAUSAL)
        dq, count = kv_loop_unpipelined(dq, count, own, own_queries, low, full, call, False, CAUSAL)
        if options.window is not None:
            dq, count = kv_loop_unpipelined(dq, count, own, own_queries, begin, low, call, True, CAUSAL)
        batch, head = row // work.heads, row % work.heads
        store_tile(result, dq * grad_scale, own, split, batch, head, m, work.tokens, SPLIT, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(scheduler.empty.index(0))
        done += 1
        tile, _ = received(scheduler, done)


@gluon.jit
def hopper_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, counters, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32, dq_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries. Descriptors, boxes and parts are as in `forward.hopper_forward_kernel`.

    Of queries in ``PIECES``, ``dq`` is an address, also of a whole result, and ``SPLIT`` is set.

    ``counters[1]`` is zero. It runs beside `hopper_key_kernel`, of which it reads nothing, and does not end before that
    has ended.
    """
    if SPLIT:  # what sums up parts is put in place while this still runs, and waits for it
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
    if SPLIT or D > NARROW_HEAD:
        dq_tiles = q_tiles  # of parts not used: they go from registers to memory
    else:
        dq_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], dq.layout)
    scheduler = new_scheduler(counters + 1, 1, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, V_STAGES, GROUPS)
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = QueryCopies(scheduler, (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, k, v, work, options)
    result = Result(dq, dq_tiles, dq_strides)
    call = QueryGradients(scheduler, q_tiles, do_tiles, k, v, lse, delta, result, work, scale, grad_scale, options)
    if D > NARROW_HEAD:
        gl.warp_specialize(
            [(compute_for_wide_queries, (0, CAUSAL, SPLIT, call)),
             (compute_for_wide_queries, (1, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, True, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [(compute_for_queries, (0, PIECES == 1, CAUSAL, SPLIT, call)),
             (compute_for_queries, (1, PIECES == 1, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, True, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:  # three groups leave no registers for queries
        gl.warp_specialize(
            [(compute_for_queries, (0, False, CAUSAL, SPLIT, call)),
             (compute_for_queries, (1, False, CAUSAL, SPLIT, call)),
             (compute_for_queries, (2, False, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, True, 1, copies))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
