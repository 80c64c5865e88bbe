"""All gradients in one kernel for Hopper, with five products: groups of warps own 64 keys each."""

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
from warploom.device.hopper.pipeline import as_factor, matrix, wait_empty
from warploom.ops.flash_attention.hopper.backward_dkv import KeyKernel, copy_for_keys
from warploom.ops.flash_attention.hopper.exchange import (
    clear_unused,
    new_exchange,
    publish_part,
    query_gradient,
    share_dlogits,
    stage_of,
)
from warploom.ops.flash_attention.hopper.masks import OwnKeys, own_keys
from warploom.ops.flash_attention.hopper.ordered_sums import add_query_gradients
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    new_row_ring,
    product_layout,
    product_transposed,
    store_tile,
)
from warploom.ops.flash_attention.hopper.weights import weights_and_slopes
from warploom.ops.flash_attention.hopper.work import (
    AttentionCall,
    Scales,
    Schedule,
    SeqLens,
    Window,
    new_scheduler,
    read,
    receive,
    tile_place,
    tiles_of,
    whole_loop,
)


@gluon.jit
def all_gradients_loop(dk, dv, count, keys, kernel, own: gl.constexpr, config: gl.constexpr):
    """Loop of group number ``own`` over tiles of queries from the last to the first, each of all heads.

    A tile's gradient of queries is formed one step later, when the other group's gradients of logits are there, and
    leaves while gradients of keys and the next logits are computed.
    """
    q, do, exchange, heads = kernel.q, kernel.do, kernel.exchange, kernel.call.schedule.group
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(q.tiles.shape[4])
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    start = count
    steps = heads * (keys.end - keys.begin)
    if steps > 0:
        # count >> 30 is zero. The compiler, which cannot know, works out addresses in the loop and not before.
        k_tile = matrix(exchange.k_tiles, own + (count >> 30))
        logits = product_transposed((k_tile,), q, count, LAYOUT)  # (keys, queries)
        logits = warpgroup_mma_wait(0, deps=[logits])
        m = keys.end - 1
        member = m * 0
        for i in range(steps):
            slot, phase = stage_of(count, STAGES)
            zero = count >> 30
            values = matrix(exchange.v_tiles, own + zero)
            mbarrier.wait(do.full.index(slot), phase)
            do_tile = matrix(do.tiles, slot)
            zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
            dweights = warpgroup_mma(values, do_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
            weights, slopes = weights_and_slopes(  # P = 2^(S − lse)
                logits, q.row_values.index(slot), m, keys, kernel.call, dtype, LAYOUT, config
            )
            factor = as_factor(weights, dtype, OUT_LAYOUT)
            dv = warpgroup_mma(factor, do_tile, dv, is_async=True)
            dweights = warpgroup_mma_wait(1, deps=[dweights])
            row_delta = do.row_values.index(slot).load(gl.SliceLayout(0, LAYOUT))
            rounded = (slopes * (dweights - row_delta[None, :])).to(dtype)
            share_dlogits(exchange, rounded, count, own)
            # The first of these products, so that it leaves beside the others.
            dq = query_gradient(exchange, count - 1, own, zero, count > start)
            dlogits = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
            dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)
            dv, factor = warpgroup_mma_wait(2, deps=[dv, factor])
            mbarrier.arrive(do.empty.index(slot))
            # Behind the last tile, that tile's again: a branch would end what is in flight.
            more = gl.minimum(steps - 1 - i, 1)
            following, phase = stage_of(count + more, STAGES)
            mbarrier.wait(q.full.index(following), phase, pred=more > 0)
            q_tile = matrix(q.tiles, following).permute([1, 0])
            k_tile = matrix(exchange.k_tiles, own + zero)
            logits = warpgroup_mma(k_tile, q_tile, zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(2, deps=[dq])
            if count > start:
                publish_part(exchange, dq, count - 1, own)
            logits, dk, dlogits = warpgroup_mma_wait(0, deps=[logits, dk, dlogits])
            mbarrier.arrive(q.empty.index(slot))
            count += 1
            member += 1
            if member == heads:
                m -= 1
                member = 0
        dq = query_gradient(exchange, count - 1, own, count >> 30, count > start)
        dq = warpgroup_mma_wait(0, deps=[dq])
        publish_part(exchange, dq, count - 1, own)
    return dk, dv, count


@gluon.jit
def compute_all(own: gl.constexpr, config: gl.constexpr, kernel):
    """Run group number ``own`` of warps of `hopper_backward_kernel`. Results leave by the buffers of its keys and values.

    What is behind the last key is zeros, and so are its logits: where all others are far below, its weight is infinite, and
    times zero it is NaN. If such a tile ``ENDS`` within, and no other mask hides that, weights there are zero.
    """
    scheduler, exchange = kernel.scheduler, kernel.exchange
    call, schedule = kernel.call, kernel.call.schedule
    D: gl.constexpr = kernel.q.tiles.shape[4]
    BLOCK_N: gl.constexpr = config.GROUPS * ROWS
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = schedule.heads // schedule.group
    count = 0
    tiles = tiles_of(schedule)
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        place = whole_loop(tile_place(work.tile, schedule, False))
        keys = own_keys(place, key_heads, own, kernel, config)
        if config.ENDS or call.seqused_k is not None:
            full = keys.full
            used = keys.seq.keys - place.block * BLOCK_N - own * ROWS
            if used < ROWS:
                if call.seqused_k is not None:
                    clear_unused(matrix(exchange.k_tiles, own), used)
                    clear_unused(matrix(exchange.v_tiles, own), used)
                    fence_async_shared()
                full = keys.high
            keys = OwnKeys(keys.seq, keys.begin, full, keys.high, keys.end, keys.first, keys.reach, used)
        dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dk, dv, count = all_gradients_loop(dk, dv, count, keys, kernel, own, config)
        # Worked out again rather than held in registers.
        place = tile_place(read(scheduler, work.slot), schedule, False)
        batch, head = place.row // key_heads, place.row % key_heads
        n = place.block * BLOCK_N + own * ROWS
        rows = call.lengths.keys
        store_tile(kernel.dv, dv, own, 0, batch, head, n, rows, OUT_LAYOUT)
        if count > 0:  # the other group has read the keys
            wait_empty(exchange.empty, count + 1)
        store_tile(kernel.dk, dk * call.grad_scale, own, 0, batch, head, n, rows, OUT_LAYOUT)
        tma.store_wait(0)
        mbarrier.arrive(scheduler.empty.index(work.slot))
        work = receive(scheduler, work.number + 1)


@gluon.jit
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, added, lse, delta, counters, tiles_added, seqused_k, units,
    lengths: SeqLens, schedule: Schedule, right: gl.int32, window: Window, scales: Scales,
    config: gl.constexpr,
):  # fmt: skip
    """All gradients with five products, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Tensors are as in `hopper_key_kernel`. The gradient of queries is ``added`` up, without the scale, in a descriptor of
    (B, H, N, D) float32, which may hold anything. ``tiles_added`` (GROUPS, B, H, N) are zero, and afterwards say at the first
    query of a tile how many tiles of keys were added there. ``PARTS`` are buffers of each group, in which its sums leave.
    ``ENDS``: see `compute_all`.

    The same inputs give the same bits: tiles of keys are added to a tile of queries in one order (`query_in_order`), and a
    warp of each group waits until those before have been added. The waiting ends:

    - Programs take every tile from one counter (`take_tile`). So tiles are taken in their order, by programs that run.
    - A program finishes its tiles in the order in which it takes them.
    - A tile waits only for tiles before it.

    So the first tile that is not finished waits for none: its program runs, and has finished all that it took before. No
    number of programs has to run at the same time, and what else runs on the GPU does not matter.
    """
    gdc_wait()
    gdc_launch_dependents()
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.STAGES
    SOFTCAP: gl.constexpr = config.SOFTCAP
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dlogits = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, BLOCK_M], swizzled)
    parts = gl.allocate_shared_memory(gl.float32, [config.PARTS * GROUPS, 1, 1, ROWS, ROWS], added.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(counters, 1, 2 * GROUPS)
    q, do = new_row_ring(q_tiles, STAGES, GROUPS, lses), new_row_ring(do_tiles, STAGES, GROUPS, deltas)
    exchange = new_exchange(dlogits, k_tiles, v_tiles, parts)
    fence_async_shared()
    call = AttentionCall(
        lengths, schedule, right, scales.logits, scales.gradients, window, seqused_k, None, SOFTCAP, None, units
    )
    kernel = KeyKernel(
        scheduler, k_tiles, v_tiles, q, do, None, exchange, Result(dk, k_tiles, None), Result(dv, v_tiles, None),
        (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, (q, do), lse, delta, None, None, added,
        tiles_added, call,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_all, (0, config, kernel)), (compute_all, (1, config, kernel)), (copy_for_keys, (config, kernel)),
         (add_query_gradients, (0, config, kernel)), (add_query_gradients, (1, config, kernel))],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip
