"""The gradient of float32 queries for Hopper, where two groups of warps share a tile of 64 queries.

One computes weights, the other takes them from shared memory and adds up the gradient; see `backward_shared_dkv`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper.pipeline import barriers, new_ring, wait_full
from warploom.ops.flash_attention.hopper.backward_shared_dkv import new_weights, weight_buffers
from warploom.ops.flash_attention.hopper.forward import QueryKernel, copy_for_queries
from warploom.ops.flash_attention.hopper.masks import own_queries
from warploom.ops.flash_attention.hopper.terms import add_product, own_terms_in_registers, product_of_terms
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    SplitStrides,
    pieces_of,
    product_layout,
    store_part,
)
from warploom.ops.flash_attention.hopper.weights import load_row_values, weights_of
from warploom.ops.flash_attention.hopper.work import (
    AttentionCall,
    Scales,
    Schedule,
    SeqLens,
    new_scheduler,
    receive,
    tile_place,
    tiles_of,
)


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
        q_terms = own_terms_in_registers(kernel.q_tiles, TERMS, LAYOUT)
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
    weights = new_weights(weight_tiles, barriers(STAGES))
    fence_async_shared()
    call = AttentionCall(lengths, schedule, right, scales.logits, scales.gradients)
    kernel = QueryKernel(
        scheduler, q_tiles, do_tiles, k, v, None, weights, None, lse, None, delta, inverse, Result(dq, None, dq_strides),
        (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, call,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_weights, (config, kernel)), (compute_gradient, (config, kernel)), (copy_for_queries, (True, config, kernel))],
        [4, 1], [232, 40],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
