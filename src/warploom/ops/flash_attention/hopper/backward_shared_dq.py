"""The gradient of float32 queries for Hopper, where two groups of warps share a tile of 64 queries.

One computes weights, the other takes them from shared memory and adds up the gradient; see `backward_shared_dkv`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper.pipeline import Ring, barriers, new_ring, wait_full
from warploom.ops.flash_attention.hopper.backward_shared_dkv import Weights, new_weights, weight_buffers
from warploom.ops.flash_attention.hopper.forward import QueryCopies, copy_for_queries
from warploom.ops.flash_attention.hopper.masks import key_steps
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
    Options,
    Scheduler,
    Work,
    new_scheduler,
    received,
    tile_place,
    tiles_of,
)


class SharedQueryGradients(NamedTuple):
    """Tensors that the two groups of warps with the same 64 queries share."""

    scheduler: Scheduler
    q_tiles: gl.shared_memory_descriptor
    do_tiles: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    weights: Weights
    lse: gl.tensor
    delta: gl.tensor
    inverse: gl.tensor
    dq: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient


@gluon.jit
def weigh_keys(
    count, q_terms, row_lse, row_inverse, begin, end, first, call,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Weights of tiles of keys ``end − 1 … begin``, for the other group."""
    k, weights, work, scale = call.k, call.weights, call.work, call.scale
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    for i in range(end - begin):
        slot = wait_full(k.full, count)
        logits = product_of_terms(q_terms, k.tiles, slot, TERMS, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k.empty.index(slot))
        n = (end - 1 - i) * BLOCK_N
        tile = weights_of(logits, row_lse, n, first, work, Options(), scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT)
        weights.tiles.index(slot).store(tile * row_inverse[:, None])
        mbarrier.arrive(weights.full.index(slot))
        count += 1
    return count


@gluon.jit
def compute_weights(CAUSAL: gl.constexpr, TERMS: gl.constexpr, call):
    """The first of two groups of warps with the same 64 queries, whose terms it has in registers."""
    scheduler, k, work = call.scheduler, call.k, call.work
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        begin, _, full, end = key_steps(block, split, work, Options(), CAUSAL, ROWS, BLOCK_N)
        m = block * ROWS
        first = m + work.keys - work.tokens  # the last query stands at the last key
        row_lse = load_row_values(call.lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_inverse = load_row_values(call.inverse, row, m, work.tokens, 0.0, LAYOUT)
        q_terms = own_terms_in_registers(call.q_tiles, TERMS, LAYOUT)
        mbarrier.arrive(scheduler.empty.index(slot))
        count = weigh_keys(
            count, q_terms, row_lse, row_inverse, full, end, first, call, True, CAUSAL, TERMS
        )  # fmt: skip
        count = weigh_keys(
            count, q_terms, row_lse, row_inverse, begin, full, first, call, False, CAUSAL, TERMS
        )  # fmt: skip
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def compute_gradient(CAUSAL: gl.constexpr, TERMS: gl.constexpr, call):
    """The second of two groups of warps with the same 64 queries: adds up their gradient."""
    scheduler, k, v, weights, work = call.scheduler, call.k, call.v, call.weights, call.work
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = k.tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        begin, _, _, end = key_steps(block, split, work, Options(), CAUSAL, ROWS, BLOCK_N)
        m = block * ROWS
        row_delta = load_row_values(call.delta, row, m, work.tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(end - begin):
            stage = wait_full(v.full, count)
            dweights = product_of_terms(pieces_of(call.do_tiles, 0, TERMS), v.tiles, stage, TERMS, LAYOUT)
            dweights = warpgroup_mma_wait(0, deps=[dweights])
            mbarrier.arrive(v.empty.index(stage))
            tile_weights = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
            dlogits = tile_weights * (dweights - row_delta[:, None])
            dq = add_product(dq, dlogits, k, count, TERMS, OUT_LAYOUT)
            count += 1
        mbarrier.arrive(scheduler.empty.index(slot))
        batch, head = row // work.heads, row % work.heads
        store_part(call.dq, dq * call.grad_scale, split, batch, head, m, work.tokens, OUT_LAYOUT)
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def hopper_shared_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, inverse, counters,
    work: Work, scale: gl.float32, grad_scale: gl.float32, dq_strides: SplitStrides,
    CAUSAL: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries, for tiles of 64. Descriptors, boxes and parts are as in `hopper_shared_key_kernel`.

    ``counters[1]`` is zero. It runs beside `hopper_shared_key_kernel`, of which it reads nothing, and does not end before
    that has ended.
    """
    gdc_launch_dependents()
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
    copies = QueryCopies(scheduler, (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, k, v, work, Options())
    result = Result(dq, q_tiles, dq_strides)
    call = SharedQueryGradients(
        scheduler, q_tiles, do_tiles, k, v, weights, lse, delta, inverse, result, work, scale, grad_scale
    )
    gl.warp_specialize(
        [(compute_weights, (CAUSAL, TERMS, call)), (compute_gradient, (CAUSAL, TERMS, call)),
         (copy_for_queries, (1, CAUSAL, True, TERMS, copies))],
        [4, 1], [232, 40],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
