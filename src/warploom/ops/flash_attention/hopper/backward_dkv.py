"""Gradients of keys and values for Hopper: groups of warps own 64 keys each, and loop over the queries that read them.

The copying warp serves all kernels that own keys.
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
from warploom.device.hopper.pipeline import Ring, as_factor, copy_tile, matrix, new_ring, wait_empty
from warploom.ops.flash_attention.hopper.bias import copy_bias
from warploom.ops.flash_attention.hopper.masks import own_keys
from warploom.ops.flash_attention.hopper.softmax import transposed_weights_of
from warploom.ops.flash_attention.hopper.tile_mask import TILE, column_list, tile_at
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    SplitStrides,
    copy_own,
    product_layout,
    product_transposed,
    store_tile,
)
from warploom.ops.flash_attention.hopper.work import (
    AttentionCall,
    Scales,
    Schedule,
    Scheduler,
    SeqLens,
    Window,
    broadcast,
    broadcast_end,
    new_scheduler,
    next_tile,
    read,
    receive,
    sequence_of,
    take_tile,
    tile_place,
    tiles_of,
)

OWN_STAGES = gl.constexpr(2)  # tiles of keys and values: one that is worked on, and the next


class QueryBuffers(NamedTuple):
    """Buffers of tiles of queries, for the warp that copies: see `KeyKernel`."""

    q: Ring
    lses: gl.shared_memory_descriptor
    do: Ring
    deltas: gl.shared_memory_descriptor


class KeyKernel(NamedTuple):
    """Tensors and buffers of a kernel whose groups of warps own keys; None where it has no use for them."""

    scheduler: Scheduler
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    q: Ring
    lses: gl.shared_memory_descriptor  # (stages, rows) float32, beside tiles of q
    do: Ring
    deltas: gl.shared_memory_descriptor  # (stages, rows) float32, beside tiles of do
    weights: gl.tuple | None  # see `backward_shared.Weights`
    exchange: gl.tuple | None  # see `backward_fused.Exchange`
    dk: Result
    dv: Result
    own_descs: gl.tuple  # of keys and values
    own_tiles: gl.tuple
    q_desc: gl.tensor
    do_desc: gl.tensor
    copied: QueryBuffers
    lse: gl.tensor
    delta: gl.tensor
    inverse: gl.tensor | None
    inverses: gl.shared_memory_descriptor | None  # (stages, rows), beside q's lse
    added: gl.tensor | None  # see `backward_fused.hopper_backward_kernel`
    tiles_added: gl.tensor | None
    call: AttentionCall
    bias: gl.tuple | None = None  # see `bias.BiasTiles`


@gluon.jit
def query_in_order(i, end, group):
    """The tile of queries of step ``i`` from ``end − 1`` down, each for all heads of a group, and which of these.

    Programs take tiles of keys from the first to the last, and add to a tile of queries in that order. Each begins with the
    last queries, which see all keys, and is one step behind the program before. So none waits long, and what they read and
    add to is in the L2 cache. With one head of a group after the other, the second would begin when the longest loop of the
    first has ended.
    """
    return end - 1 - i // group, i % group


@gluon.jit
def query_of_step(i, begin, end, group, ORDERED: gl.constexpr, TERMS: gl.constexpr):
    """The tile of queries of step ``i`` of a loop over tiles ``begin … end`` of a group's heads, and which of these.

    Unless it is ``ORDERED``, one head comes after the other. Queries of float32, in ``TERMS``, come from the last to the
    first: see `triton.backward.query_loop`.
    """
    if ORDERED:
        m, member = query_in_order(i, end, group)
    else:
        member = i // (end - begin)
        if TERMS > 1:
            m = end - 1 - i + member * (end - begin)
        else:
            m = begin + i - member * (end - begin)
    return m, member


@gluon.jit
def copy_for_keys(config: gl.constexpr, kernel):
    """The copying warp of a kernel that owns tiles of keys. With a tile of queries comes lse, with one of gradients δ."""
    scheduler, call, schedule = kernel.scheduler, kernel.call, kernel.call.schedule
    copied = kernel.copied
    q, do = copied.q, copied.do
    TERMS: gl.constexpr = config.TERMS
    ORDERED: gl.constexpr = config.ORDERED
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    BLOCK_N: gl.constexpr = config.GROUPS * ROWS
    HAS_TILES_OF_BIAS: gl.constexpr = config.BIAS is not None and config.BIAS != 0
    tokens = call.lengths.tokens
    key_heads = schedule.heads // schedule.group
    batch_size = schedule.rows // key_heads
    tiles = tiles_of(schedule)
    if ORDERED:
        tile = take_tile(scheduler)
    else:
        tile = gl.program_id(0)
    count = 0
    done = 0
    local = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        place = tile_place(tile, schedule, False)
        batch, key_head = place.row // key_heads, place.row % key_heads
        keys = own_keys(place, key_heads, 0, kernel, config)
        copy_own(kernel, batch, key_head, place.block * BLOCK_N, slot, batch_size, config)
        if call.tiles is not None:
            tiles_of_column = column_list(call.tiles, batch, key_head, place.block * BLOCK_N // TILE)
        for i in range(schedule.group * (keys.end - keys.begin)):
            m, member = query_of_step(i, keys.begin, keys.end, schedule.group, ORDERED, TERMS)
            head = key_head * schedule.group + member
            if call.tiles is None:
                m = m * BLOCK_M
            else:
                m = tile_at(tiles_of_column, m, BLOCK_M)
            mask = m + local < tokens
            offsets = (batch * schedule.heads + head).to(gl.int64) * tokens + m + local
            row_lse = gl.load(kernel.lse + offsets, mask=mask, other=float("inf"))
            if kernel.inverse is not None:
                row_inverse = gl.load(kernel.inverse + offsets, mask=mask, other=0.0)
            row_delta = gl.load(kernel.delta + offsets, mask=mask, other=0.0)
            stage = wait_empty(q.empty, count)
            copied.lses.index(stage).store(row_lse)
            if kernel.inverse is not None:
                kernel.inverses.index(stage).store(row_inverse)
            copy_tile(kernel.q_desc, batch, head, m, q, count, batch_size, TERMS)
            if HAS_TILES_OF_BIAS:
                copy_bias(kernel.bias, batch, head, m, place.block * BLOCK_N, count)
            copied.deltas.index(wait_empty(do.empty, count)).store(row_delta)
            copy_tile(kernel.do_desc, batch, head, m, do, count, batch_size, TERMS)
            count += 1
        done += 1
        if ORDERED:
            tile = take_tile(scheduler)
        else:
            tile = next_tile(scheduler, tiles)
    broadcast_end(scheduler, tile, done)


@gluon.jit
def query_loop(
    dk, dv, count, k_tile, v_tile, keys, begin, end, kernel, MASKED: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """Loop over tiles of queries ``begin … end`` of one head."""
    q, do = kernel.q, kernel.do
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(q.tiles.shape[4])
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    for i in range(begin, end):
        slot = count % STAGES
        logits = product_transposed((k_tile,), q, count, LAYOUT)  # Sᵀ = K Qᵀ
        dweights = product_transposed((v_tile,), do, count, LAYOUT)  # dPᵀ = V dOᵀ
        logits = warpgroup_mma_wait(1, deps=[logits])
        row_lse = kernel.lses.index(slot).load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = transposed_weights_of(  # P = 2^(S − lse)
            logits, row_lse, i * BLOCK_M, keys, kernel.call, dtype, MASKED, LAYOUT, config
        )
        factor = as_factor(weights, dtype, OUT_LAYOUT)
        dv = warpgroup_mma(factor, matrix(do.tiles, slot), dv, is_async=True)  # dV += Pᵀ dO
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        row_delta = kernel.deltas.index(slot).load(gl.SliceLayout(0, LAYOUT))
        dlogits = as_factor(slopes * (dweights - row_delta[None, :]), dtype, OUT_LAYOUT)  # dSᵀ = Pᵀ ⊙ (dPᵀ − δ)
        dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)  # dK += dSᵀ Q
        dv, factor = warpgroup_mma_wait(1, deps=[dv, factor])
        mbarrier.arrive(do.empty.index(slot))
        dk, dlogits = warpgroup_mma_wait(0, deps=[dk, dlogits])
        mbarrier.arrive(q.empty.index(slot))
        count += 1
    return dk, dv, count


@gluon.jit
def zero_unused_rows(gradients, n, keys, LAYOUT: gl.constexpr):
    """Gradients of keys ``n …``, zero behind the last: rows of keys that are not used may hold NaN."""
    used = (n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < keys)[:, None]
    found = ()
    for i in gl.static_range(len(gradients)):
        found += (gl.where(used, gradients[i], 0.0),)
    return found


@gluon.jit
def compute_for_keys(own: gl.constexpr, config: gl.constexpr, kernel):
    """Group number ``own`` of warps of `hopper_key_kernel`. Results are stored through the buffers of its keys and values."""
    scheduler, call, schedule = kernel.scheduler, kernel.call, kernel.call.schedule
    GROUPS: gl.constexpr = config.GROUPS
    D: gl.constexpr = kernel.q.tiles.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = schedule.heads // schedule.group
    count = 0
    tiles = tiles_of(schedule)
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        keys = own_keys(tile_place(work.tile, schedule, False), key_heads, own, kernel, config)
        slot = work.slot * GROUPS + own
        k_tile, v_tile = matrix(kernel.k_tiles, slot), matrix(kernel.v_tiles, slot)
        dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(schedule.group):
            if config.CAUSAL:
                dk, dv, count = query_loop(
                    dk, dv, count, k_tile, v_tile, keys, keys.begin, keys.full, kernel, True, config
                )
            dk, dv, count = query_loop(
                dk, dv, count, k_tile, v_tile, keys, keys.full, keys.high, kernel, False, config
            )
            if call.window is not None:
                dk, dv, count = query_loop(
                    dk, dv, count, k_tile, v_tile, keys, keys.high, keys.end, kernel, True, config
                )
        # Worked out again rather than held in registers.
        place = tile_place(read(scheduler, work.slot), schedule, False)
        batch, head = place.row // key_heads, place.row % key_heads
        n = place.block * BLOCK_N + own * ROWS
        if call.seqused_k is not None:
            seq = sequence_of(batch, place.block * BLOCK_N, call)
            dk, dv = zero_unused_rows((dk, dv), n, seq.keys, OUT_LAYOUT)
        rows = call.lengths.keys
        store_tile(kernel.dv, dv, slot, place.split, batch, head, n, rows, OUT_LAYOUT)
        store_tile(kernel.dk, dk * call.grad_scale, slot, place.split, batch, head, n, rows, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(scheduler.empty.index(work.slot))
        work = receive(scheduler, work.number + 1)


@gluon.jit
def hopper_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, counters, seqused_k, units,
    lengths: SeqLens, schedule: Schedule, right: gl.int32, window: Window, scales: Scales,
    dk_strides: SplitStrides, dv_strides: SplitStrides, config: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, BLOCK_M, D) for queries and their gradients and of
    (1, 1, 64, D) for keys, values and results; boxes of values are as wide as those of keys. ``counters[0]`` is zero.
    Parts are as in `forward.hopper_forward_kernel`. It waits for the launch before it, and the one after it, of
    `hopper_query_kernel`, starts where this one leaves multiprocessors idle.
    """
    gdc_wait()
    gdc_launch_dependents()
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.STAGES
    SOFTCAP: gl.constexpr = config.SOFTCAP
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [OWN_STAGES * GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [OWN_STAGES * GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(counters, OWN_STAGES, GROUPS)
    q, do = new_ring(q_tiles, STAGES, GROUPS), new_ring(do_tiles, STAGES, GROUPS)
    fence_async_shared()
    call = AttentionCall(
        lengths, schedule, right, scales.logits, scales.gradients, window, seqused_k, None, SOFTCAP, None, units
    )
    dk_result = Result(dk, None if config.SPLIT else k_tiles, dk_strides)
    dv_result = Result(dv, None if config.SPLIT else v_tiles, dv_strides)
    kernel = KeyKernel(
        scheduler, k_tiles, v_tiles, q, lses, do, deltas, None, None, dk_result, dv_result,
        (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, QueryBuffers(q, lses, do, deltas), lse, delta, None, None,
        None, None, call,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_for_keys, (0, config, kernel)), (compute_for_keys, (1, config, kernel)), (copy_for_keys, (config, kernel))],
        [4, 1], [240, 24],
    )  # fmt: skip
