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
from warploom.device.hopper.pipeline import as_factor, copy_tile, matrix, wait_empty
from warploom.ops.flash_attention.hopper.masks import query_steps
from warploom.ops.flash_attention.hopper.ordered_sums import query_in_order
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    RowRing,
    SplitStrides,
    copy_own,
    new_row_ring,
    product_layout,
    product_transposed,
    store_tile,
)
from warploom.ops.flash_attention.hopper.weights import transposed_weights_of
from warploom.ops.flash_attention.hopper.work import (
    Options,
    Scheduler,
    Window,
    Work,
    broadcast,
    broadcast_end,
    entry_of,
    new_scheduler,
    next_tile,
    read,
    received,
    take_tile,
    tile_place,
    tiles_of,
)

OWN_STAGES = gl.constexpr(2)  # tiles of keys and values: one that is worked on, and the next


class KeyCopies(NamedTuple):
    """Tensors that the copying warp of a kernel that owns tiles of keys copies, and buffers."""

    scheduler: Scheduler
    own_descs: gl.tuple  # of keys and values
    own_tiles: gl.tuple
    q_desc: gl.tensor
    do_desc: gl.tensor
    q: RowRing  # with the lse of each row
    do: RowRing  # with δ
    lse: gl.tensor
    delta: gl.tensor
    inverse: gl.tensor | None
    inverses: gl.shared_memory_descriptor | None  # (stages, rows), beside q's lse
    work: Work
    options: Options


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
def copy_for_keys(
    GROUPS: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr, copies,
    ORDERED: gl.constexpr = False,
):  # fmt: skip
    """The copying warp of a kernel that owns tiles of keys. With a tile of queries comes lse, with one of gradients δ."""
    scheduler, own_descs, own_tiles, q_desc = copies.scheduler, copies.own_descs, copies.own_tiles, copies.q_desc
    do_desc, q, do, lse = copies.do_desc, copies.q, copies.do, copies.lse
    delta, inverse, inverses, work = copies.delta, copies.inverse, copies.inverses, copies.work
    options = copies.options
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = work.heads // work.group
    batch_size = work.rows // key_heads
    tiles = tiles_of(work)
    if ORDERED:
        tile = take_tile(scheduler)
    else:
        tile = gl.program_id(0)
    count = 0
    done = 0
    local = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        block, row, split = tile_place(tile, work, False)
        batch, key_head = row // key_heads, row % key_heads
        entry = entry_of(work, batch, block * BLOCK_N, options)
        begin, _, _, end = query_steps(block, split, entry, options, CAUSAL, BLOCK_N, BLOCK_M)
        copy_own(
            own_descs, own_tiles, batch, key_head, block * BLOCK_N, scheduler.full, slot, GROUPS, batch_size, TERMS
        )
        for i in range(work.group * (end - begin)):
            m, member = query_of_step(i, begin, end, work.group, ORDERED, TERMS)
            head = key_head * work.group + member
            m = m * BLOCK_M
            mask = m + local < work.tokens
            offsets = (batch * work.heads + head).to(gl.int64) * work.tokens + m + local
            row_lse = gl.load(lse + offsets, mask=mask, other=float("inf"))
            if inverse is not None:
                row_inverse = gl.load(inverse + offsets, mask=mask, other=0.0)
            row_delta = gl.load(delta + offsets, mask=mask, other=0.0)
            stage = wait_empty(q.empty, count)
            q.row_values.index(stage).store(row_lse)
            if inverse is not None:
                inverses.index(stage).store(row_inverse)
            copy_tile(q_desc, batch, head, m, q, count, batch_size, TERMS)
            do.row_values.index(wait_empty(do.empty, count)).store(row_delta)
            copy_tile(do_desc, batch, head, m, do, count, batch_size, TERMS)
            count += 1
        done += 1
        if ORDERED:
            tile = take_tile(scheduler)
        else:
            tile = next_tile(scheduler, tiles)
    broadcast_end(scheduler, tile, done)


class KeyGradients(NamedTuple):
    """Tensors that groups of warps that own keys share."""

    scheduler: Scheduler
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    q: RowRing  # with the lse of each row
    do: RowRing  # with δ
    dk: Result
    dv: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient of keys
    options: Options


class OwnKeys(NamedTuple):
    """64 keys that a group of warps owns."""

    k_tile: gl.shared_memory_descriptor
    v_tile: gl.shared_memory_descriptor
    first: gl.int32  # as in `masks.visible_weights`
    reach: gl.int32 | None  # as in `masks.visible_weights`


@gluon.jit
def query_loop(dk, dv, count, own, begin, end, call, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Loop over tiles of queries ``begin … end`` of one head."""
    q, do = call.q, call.do
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(q.tiles.shape[4])
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    for i in range(begin, end):
        slot = count % STAGES
        logits = product_transposed((own.k_tile,), q, count, LAYOUT)  # Sᵀ = K Qᵀ
        dweights = product_transposed((own.v_tile,), do, count, LAYOUT)  # dPᵀ = V dOᵀ
        logits = warpgroup_mma_wait(1, deps=[logits])
        row_lse = q.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = transposed_weights_of(  # P = 2^(S − lse)
            logits, row_lse, i * BLOCK_M, own.first, call.scale, dtype, MASKED, LAYOUT,
            None, own.reach, call.options.softcap, CAUSAL,
        )  # fmt: skip
        factor = as_factor(weights, dtype, OUT_LAYOUT)
        dv = warpgroup_mma(factor, matrix(do.tiles, slot), dv, is_async=True)  # dV += Pᵀ dO
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        row_delta = do.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
        dlogits = as_factor(slopes * (dweights - row_delta[None, :]), dtype, OUT_LAYOUT)
        dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)  # dK += dSᵀ Q
        dv, factor = warpgroup_mma_wait(1, deps=[dv, factor])
        mbarrier.arrive(do.empty.index(slot))
        dk, dlogits = warpgroup_mma_wait(0, deps=[dk, dlogits])
        mbarrier.arrive(q.empty.index(slot))
        count += 1
    return dk, dv, count


@gluon.jit
def used_rows(gradients, n, keys, LAYOUT: gl.constexpr):
    """Gradients of keys ``n …``, zero behind the last: rows of keys that are not used may hold NaN."""
    used = (n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < keys)[:, None]
    found = ()
    for i in gl.static_range(len(gradients)):
        found += (gl.where(used, gradients[i], 0.0),)
    return found


@gluon.jit
def compute_for_keys(own: gl.constexpr, GROUPS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, call):
    """Group number ``own`` of warps of `hopper_key_kernel`. Results leave through the buffers of its keys and values."""
    scheduler, k_tiles, v_tiles, q = call.scheduler, call.k_tiles, call.v_tiles, call.q
    dk_result, dv_result, work, grad_scale = call.dk, call.dv, call.work, call.grad_scale
    options = call.options
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    D: gl.constexpr = q.tiles.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = work.heads // work.group
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, False)
        entry = entry_of(work, row // key_heads, block * BLOCK_N, options)
        begin, full, high, end = query_steps(block, split, entry, options, CAUSAL, BLOCK_N, BLOCK_M)
        first = block * BLOCK_N + own * ROWS - (entry.keys - entry.tokens) - work.right
        reach = None
        if options.window is not None:
            reach = work.right + options.window.left
        own_slot = slot * GROUPS + own
        k_tile, v_tile = matrix(k_tiles, own_slot), matrix(v_tiles, own_slot)
        dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        own_keys = OwnKeys(k_tile, v_tile, first, reach)
        for _ in range(work.group):
            if CAUSAL:
                dk, dv, count = query_loop(dk, dv, count, own_keys, begin, full, call, True, CAUSAL)
            dk, dv, count = query_loop(dk, dv, count, own_keys, full, high, call, False, CAUSAL)
            if options.window is not None:
                dk, dv, count = query_loop(dk, dv, count, own_keys, high, end, call, True, CAUSAL)
        # Worked out again rather than held in registers.
        block, row, split = tile_place(read(scheduler, slot), work, False)
        batch, head = row // key_heads, row % key_heads
        n = block * BLOCK_N + own * ROWS
        if options.seqused_k is not None:
            entry = entry_of(work, batch, block * BLOCK_N, options)
            dk, dv = used_rows((dk, dv), n, entry.keys, OUT_LAYOUT)
        store_tile(dv_result, dv, own_slot, split, batch, head, n, work.keys, SPLIT, OUT_LAYOUT)
        store_tile(dk_result, dk * grad_scale, own_slot, split, batch, head, n, work.keys, SPLIT, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(scheduler.empty.index(slot))
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def hopper_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, counters, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32,
    dk_strides: SplitStrides, dv_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, BLOCK_M, D) for queries and their gradients and of
    (1, 1, 64, D) for keys, values and results; boxes of values are as wide as those of keys. ``counters[0]`` is zero.
    Parts are as in `forward.hopper_forward_kernel`. It waits for the launch before it, and the one after it, of
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
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(counters, OWN_STAGES, GROUPS)
    q, do = new_row_ring(q_tiles, STAGES, GROUPS, lses), new_row_ring(do_tiles, STAGES, GROUPS, deltas)
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = KeyCopies(
        scheduler, (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, q, do, lse, delta, None, None, work, options,
    )  # fmt: skip
    dk_result = Result(dk, k_tiles, dk_strides)
    dv_result = Result(dv, v_tiles, dv_strides)
    call = KeyGradients(scheduler, k_tiles, v_tiles, q, do, dk_result, dv_result, work, scale, grad_scale, options)
    gl.warp_specialize(
        [(compute_for_keys, (0, GROUPS, CAUSAL, SPLIT, call)),
         (compute_for_keys, (1, GROUPS, CAUSAL, SPLIT, call)),
         (copy_for_keys, (GROUPS, CAUSAL, 1, copies))],
        [4, 1], [240, 24],
    )  # fmt: skip
