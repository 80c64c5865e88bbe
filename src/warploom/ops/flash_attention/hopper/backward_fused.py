"""All gradients in one kernel for Hopper, with five products: groups of warps own 64 keys each.

Groups exchange gradients of logits, from which each forms its part of the gradient of queries. These are added up in device
memory by all programs, always in the same order: a counter in device memory says how many tiles of keys have been added. A
program waits until all have that come before it, adds its own, and counts it. `hopper_backward_kernel` says why the waiting
ends.
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
from warploom.device.hopper.pipeline import (
    as_factor,
    barriers,
    init_each,
    matrix,
    new_ring,
    thread_barrier,
    wait_empty,
)
from warploom.ops.flash_attention.hopper.backward_dkv import KeyKernel, QueryBuffers, copy_for_keys, query_in_order
from warploom.ops.flash_attention.hopper.bias import (
    BiasSteps,
    BiasTiles,
    OwnBias,
    clear_own_hidden,
    key_bias,
    seen_words,
    store_key_sums,
    take_bias,
    write_zeros,
)
from warploom.ops.flash_attention.hopper.masks import OwnKeys, own_keys
from warploom.ops.flash_attention.hopper.softmax import weights_and_slopes
from warploom.ops.flash_attention.hopper.tile_mask import (
    TILE,
    TileMask,
    TileMaskSizes,
    clear_unseen,
    column_list,
    entry_at,
    tile_at,
    tiles_before_in_row,
)
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    product_layout,
    product_transposed,
    store_tile,
)
from warploom.ops.flash_attention.hopper.work import (
    Alibi,
    AlibiStrides,
    AttentionCall,
    Scales,
    Schedule,
    SeqLens,
    Window,
    new_scheduler,
    read,
    receive,
    slope_of,
    slopes_from,
    tile_place,
    tiles_of,
    whole_loop,
)


class Exchange(NamedTuple):
    """Buffers through which groups of warps that own keys form the gradient of queries.

    A group has the gradients of the logits of its 64 keys. The gradient of queries takes those of all keys of a tile: so
    groups exchange them in shared memory, and each forms its part, 64 queries times 64 features.
    """

    dlogits: (
        gl.shared_memory_descriptor
    )  # (2 · GROUPS, 64, queries), transposed; or (2 · GROUPS, 1, 1, queries, 64)
    full: gl.shared_memory_descriptor  # two barriers
    empty: gl.shared_memory_descriptor  # two barriers
    k_tiles: gl.shared_memory_descriptor  # (GROUPS, 1, 1, 64, D)
    v_tiles: gl.shared_memory_descriptor  # (GROUPS, 1, 1, 64, D)
    parts: gl.shared_memory_descriptor  # (stages · GROUPS, 1, 1, 64, 64) float32
    part_full: gl.shared_memory_descriptor  # a barrier for each part
    part_empty: gl.shared_memory_descriptor  # a barrier for each part


@gluon.jit
def new_exchange(dlogits, k_tiles, v_tiles, parts):
    """An exchange through these buffers, with barriers of its own."""
    GROUPS: gl.constexpr = k_tiles.shape[0]
    full, empty = barriers(2), barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=GROUPS)
        mbarrier.init(empty.index(i), count=GROUPS)
    part_full, part_empty = barriers(parts.shape[0]), barriers(parts.shape[0])
    init_each(part_full)
    init_each(part_empty)
    return Exchange(dlogits, full, empty, k_tiles, v_tiles, parts, part_full, part_empty)


@gluon.jit
def clear_unused(tile, used):
    """Make rows of a tile in shared memory zero where keys are not used: there may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    rows = tile.load(LAYOUT)
    tile.store(gl.where((key < used)[:, None], rows, gl.zeros_like(rows)))


@gluon.constexpr_function
def swapped_layout():
    """The layout of a part in shared memory for the tensor memory accelerator, in columns as `swap_columns` leaves them."""
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    rows = [[1, 4 + 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]  # swizzled by 128 bytes, and row 1 is swapped
    return gl.SharedLinearLayout([*columns, *rows, [0, 32]])


@gluon.jit
def swap_columns(part):
    """Swap columns 0 … 15 of every 32 with the others in rows of odd number.

    Half a warp stores 8 columns of 4 rows at once. Swizzled alone, rows 0 and 1 of them share banks, and so do 2 and 3.
    """
    first, second = gl.split(part.reshape([ROWS, ROWS // 32, 2, 16]).permute([0, 1, 3, 2]))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, first.type.layout)))
    odd = (row % 2 == 1)[:, None, None]
    swapped = gl.join(gl.where(odd, second, first), gl.where(odd, first, second))
    return swapped.permute([0, 1, 3, 2]).reshape([ROWS, ROWS])


@gluon.jit
def stage_of(count, STAGES: gl.constexpr):
    """The buffer that the tile number ``count`` passes through, of one or two, and the phase of its barriers.

    Of ``count % STAGES`` the compiler makes a register for each address, which it adds to in every step.
    """
    gl.static_assert(STAGES <= 2)
    return count & (STAGES - 1), count >> (STAGES - 1) & 1


@gluon.jit
def share_dlogits(exchange, dlogits, count, own: gl.constexpr):
    """Give the gradients of a group's logits, of the tile number ``count`` of queries, to all groups."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    stage, phase = stage_of(count, 2)
    mbarrier.wait(exchange.empty.index(stage), phase ^ 1)
    if len(exchange.dlogits.shape) == 3:
        exchange.dlogits.index(stage * GROUPS + own).store(dlogits)
    else:  # they are written from here: what was two tiles before has left
        tma.store_wait(1)
        thread_barrier()
        matrix(exchange.dlogits, stage * GROUPS + own).permute([1, 0]).store(dlogits)
    fence_async_shared()
    mbarrier.arrive(exchange.full.index(stage))


@gluon.jit
def query_gradient(exchange, count, own: gl.constexpr, zero, there):
    """Start to form a group's part of the gradient of queries of tile number ``count``; of anything if not ``there``."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    LAYOUT: gl.constexpr = product_layout(ROWS)
    stage, phase = stage_of(count, 2)
    mbarrier.wait(exchange.full.index(stage), phase, pred=there)
    dq = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    for group in gl.static_range(GROUPS):
        if len(exchange.dlogits.shape) == 3:
            dlogits = exchange.dlogits.index(stage * GROUPS + group)
        else:
            dlogits = matrix(exchange.dlogits, stage * GROUPS + group).permute([1, 0])
        keys = matrix(exchange.k_tiles, group + zero)
        if dlogits.shape[1] > ROWS:
            dlogits = dlogits.slice(own * ROWS, ROWS, 1)
        else:
            keys = keys.slice(own * ROWS, ROWS, 1)
        dq = warpgroup_mma(dlogits.permute([1, 0]), keys, dq, use_acc=group > 0, is_async=True)
    return dq


@gluon.jit
def publish_part(exchange, dq, count, own: gl.constexpr):
    """Give a group's part of the gradient of the tile number ``count`` of queries to the warp that adds it up."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    STAGES: gl.constexpr = exchange.parts.shape[0] // GROUPS
    mbarrier.arrive(exchange.empty.index(count & 1))
    stage, phase = stage_of(count, STAGES)
    place = stage * GROUPS + own
    mbarrier.wait(exchange.part_empty.index(place), phase ^ 1)
    tma.matrix_in(exchange.parts.index(place), swapped_layout()).store(swap_columns(dq))
    fence_async_shared()
    mbarrier.arrive(exchange.part_full.index(place))


@gluon.jit
def all_gradients_loop(
    dk, dv, count, keys, used, n, tiles, alibi, bias, kernel, own: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """Loop of group number ``own`` over tiles of queries from the last to the first, each of all heads.

    A tile's gradient of queries is formed one step later, when the other group's gradients of logits are there, and
    is stored while gradients of keys and the next logits are computed.
    """
    q, do, exchange, heads = kernel.q, kernel.do, kernel.exchange, kernel.call.schedule.group
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(q.tiles.shape[4])
    STAGES: gl.constexpr = q.tiles.shape[0]
    dtype: gl.constexpr = q.tiles.dtype
    OF_KEYS: gl.constexpr = config.BIAS == 0
    OF_TILES: gl.constexpr = config.BIAS is not None and config.BIAS != 0
    WRITES_BIAS: gl.constexpr = len(exchange.dlogits.shape) > 3
    start = count
    steps = heads * (keys.end - keys.begin)
    if steps > 0:
        # count >> 30 is zero. The compiler, which cannot know, works out addresses in the loop and not before.
        k_tile = matrix(exchange.k_tiles, own + (count >> 30))
        logits = product_transposed((k_tile,), q, count, LAYOUT)  # Sᵀ = K Qᵀ
        logits = warpgroup_mma_wait(0, deps=[logits])
        m = keys.end - 1
        member = m * 0
        entry = None
        slope = None
        if tiles is not None:
            row = tile_at(tiles, m, BLOCK_M)
            entry = entry_at(tiles, row)
            place = row // BLOCK_M
            row = tile_at(tiles, gl.maximum(m - (member + 1) // heads, keys.begin), BLOCK_M)
        if alibi is not None:
            slope = slope_of(alibi, member)
        for i in range(steps):
            slot, phase = stage_of(count, STAGES)
            zero = count >> 30
            values = matrix(exchange.v_tiles, own + zero)
            if tiles is None:
                place = m
            mbarrier.wait(do.full.index(slot), phase)
            do_tile = matrix(do.tiles, slot)
            zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
            # dPᵀ = V dOᵀ
            dweights = warpgroup_mma(values, do_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
            added = slope
            if OF_KEYS:
                added = key_bias(bias, member, n, keys.seq.keys, LAYOUT)
            if OF_TILES:
                added = take_bias(bias.tiles.ring, count, own, LAYOUT)
            weights, slopes = weights_and_slopes(  # P = 2^(S − lse)
                logits,
                kernel.lses.index(slot),
                place,
                keys,
                used,
                kernel.call,
                dtype,
                LAYOUT,
                config,
                n,
                entry,
                added,
            )
            factor = as_factor(weights, dtype, OUT_LAYOUT)
            dv = warpgroup_mma(factor, do_tile, dv, is_async=True)  # dV += Pᵀ dO
            dweights = warpgroup_mma_wait(1, deps=[dweights])
            row_delta = kernel.deltas.index(slot).load(gl.SliceLayout(0, LAYOUT))
            dlogits = slopes * (dweights - row_delta[None, :])  # dSᵀ = Pᵀ ⊙ (dPᵀ − δ)
            rounded = dlogits.to(dtype)
            share_dlogits(exchange, rounded, count, own)
            if WRITES_BIAS:
                tma.async_copy_shared_to_global(
                    bias.tiles.out,
                    [bias.batch, bias.head + member, place * BLOCK_M, n],
                    exchange.dlogits.index((count & 1) * config.GROUPS + own),
                )
            if OF_KEYS:
                store_key_sums(bias, member, place, n, dlogits, kernel.call, LAYOUT)
            # dQ = dS K, of the tile before. The first of these products, so that it is stored beside the others.
            dq = query_gradient(exchange, count - 1, own, zero, count > start)
            dlogits = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
            dk = warpgroup_mma(dlogits, matrix(q.tiles, slot), dk, is_async=True)  # dK += dSᵀ Q
            dv, factor = warpgroup_mma_wait(2, deps=[dv, factor])
            mbarrier.arrive(do.empty.index(slot))
            # Behind the last tile, that tile's again: a branch would end what is in flight.
            more = gl.minimum(steps - 1 - i, 1)
            following, phase = stage_of(count + more, STAGES)
            mbarrier.wait(q.full.index(following), phase, pred=more > 0)
            q_tile = matrix(q.tiles, following).permute([1, 0])
            k_tile = matrix(exchange.k_tiles, own + zero)
            logits = warpgroup_mma(k_tile, q_tile, zeros, use_acc=False, is_async=True)
            if (
                tiles is not None
            ):  # while products run; of the tile after that the row alone, for no load waits for another
                entry = entry_at(tiles, row)
                place = row // BLOCK_M
                row = tile_at(tiles, gl.maximum(m - (member + 2) // heads, keys.begin), BLOCK_M)
            if alibi is not None:
                slope = slope_of(alibi, (member + 1) % heads)
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
    """Run group number ``own`` of warps of `hopper_backward_kernel`. Results are stored through the buffers of its keys and values.

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
        used = None
        if config.ENDS or call.seqused_k is not None:
            full = keys.full
            used = keys.seq.keys - place.block * BLOCK_N - own * ROWS
            if used < ROWS:
                if call.seqused_k is not None:
                    clear_unused(matrix(exchange.k_tiles, own), used)
                    clear_unused(matrix(exchange.v_tiles, own), used)
                    fence_async_shared()
                full = keys.high
            keys = OwnKeys(keys.seq, keys.begin, full, keys.high, keys.end, keys.first, keys.reach)
        dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        n = place.block * BLOCK_N + own * ROWS
        tiles_of_column = call.tiles
        if call.tiles is not None:
            tiles_of_column = column_list(call.tiles, place.row // key_heads, place.row % key_heads, n // TILE)
            clear_unseen(matrix(exchange.k_tiles, own), n, tiles_of_column)
            clear_unseen(matrix(exchange.v_tiles, own), n, tiles_of_column)
        slopes = call.alibi
        if call.alibi is not None:
            first_head = place.row % key_heads * schedule.group
            slopes = slopes_from(call.alibi, place.row // key_heads, first_head)
        bias = None
        if config.BIAS is not None:
            batch, key_head = place.row // key_heads, place.row % key_heads
            words = seen_words(kernel.bias, batch, key_head, schedule, call.lengths.keys)
            clear_own_hidden(exchange, own, n, words)
            bias = OwnBias(kernel.bias, batch, key_head * schedule.group)
            if config.ZEROS:
                write_zeros(bias, exchange, count, own, n, keys.begin, schedule.group)
        dk, dv, count = all_gradients_loop(
            dk, dv, count, keys, used, n, tiles_of_column, slopes, bias, kernel, own, config
        )
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
def wait_until_added(counter, before):
    """Wait until as many have added as come before. Copies that start afterwards find what was written until then."""
    added = _read_added(counter)
    while added != before:
        added = _read_added(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [added], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _read_added(counter):
    """Returns how many have added."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_added(counter):
    """Count one more that has added. What this warp wrote is in device memory (`tma.wait_stored`)."""
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def tiles_before(block, m, seq, call, config: gl.constexpr):
    """Returns how many tiles of keys are added to the queries ``m …`` before this one: those before it that these queries see."""
    BLOCK_N: gl.constexpr = config.GROUPS * ROWS
    first = block * 0
    if call.window is not None:
        first = gl.maximum(m + seq.keys - seq.tokens - call.window.left, 0) // BLOCK_N
    if call.units is not None:
        first = gl.maximum(first, seq.first_key // BLOCK_N)
    return block - first


@gluon.jit
def add_query_gradients(own: gl.constexpr, config: gl.constexpr, kernel):
    """Run the warp that adds up the part of the gradient of queries that group number ``own`` forms.

    Only this warp waits for other programs. Its group waits for it where no buffer is free for the next part. Tiles of keys
    are added in their order. The first is stored and not added: memory may hold anything.
    """
    scheduler, exchange, call, schedule = kernel.scheduler, kernel.exchange, kernel.call, kernel.call.schedule
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.PARTS
    BLOCK_M: gl.constexpr = kernel.q.tiles.shape[3]
    key_heads = schedule.heads // schedule.group
    batch_size = schedule.rows // key_heads
    tiles = tiles_of(schedule)
    count = 0
    work = receive(scheduler, gl.to_tensor(0), 1)
    while work.tile < tiles:
        mbarrier.arrive(scheduler.empty.index(work.slot))
        place = whole_loop(tile_place(work.tile, schedule, False))
        batch, key_head = place.row // key_heads, place.row % key_heads
        keys = own_keys(place, key_heads, 0, kernel, config)
        tiles_of_column = call.tiles
        if call.tiles is not None:
            tiles_of_column = column_list(call.tiles, batch, key_head, place.block * config.GROUPS * ROWS // TILE)
        steps = schedule.group * (keys.end - keys.begin)
        if call.tiles is not None:  # of each step a step ahead, while the group computes
            next_step = gl.maximum(keys.end - 1, 0)
            next_m = tile_at(tiles_of_column, next_step, BLOCK_M)
            next_before = tiles_before_in_row(tiles_of_column, next_step, call.tiles.sizes.rows, BLOCK_M)
        for i in range(steps):
            step, member = query_in_order(i, keys.end, schedule.group)
            if call.tiles is None:
                m = step * BLOCK_M
            else:
                m = next_m
            head = key_head * schedule.group + member
            if call.tiles is None:
                before = tiles_before(place.block, m, keys.seq, call, config)
            else:
                before = next_before
                next_step, _ = query_in_order(gl.minimum(i + 1, steps - 1), keys.end, schedule.group)
                next_m = tile_at(tiles_of_column, next_step, BLOCK_M)
                next_before = tiles_before_in_row(tiles_of_column, next_step, call.tiles.sizes.rows, BLOCK_M)
            row_of_count = (own * batch_size + batch) * schedule.heads + head
            counter = kernel.tiles_added + row_of_count.to(gl.int64) * call.lengths.tokens + m
            stage = count % STAGES * GROUPS + own
            mbarrier.wait(exchange.part_full.index(stage), count // STAGES & 1)
            wait_until_added(counter, before)
            row, feature = m, own * ROWS
            if BLOCK_M > ROWS:
                row, feature = m + own * ROWS, 0
            part = exchange.parts.index(stage)
            if before == 0:
                tma.async_copy_shared_to_global(kernel.added, [batch, head, row, feature], part)
            else:
                tma.async_add(kernel.added, [batch, head, row, feature], part)
            tma.store_wait(0)
            mbarrier.arrive(exchange.part_empty.index(stage))
            tma.wait_stored()
            count_added(counter)
            count += 1
        work = receive(scheduler, work.number + 1, 1)


@gluon.jit
def run_backward(descs, results, rows, counters, tiles_added, call, of_bias, config: gl.constexpr):
    """Run `hopper_backward_kernel`; ``rows`` are lse and δ, and ``of_bias`` is a bias, or None."""
    gdc_wait()
    gdc_launch_dependents()
    q_desc, k_desc, v_desc, do_desc = descs
    dk, dv, added = results
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.STAGES
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if config.BIAS is None or config.BIAS == 0:
        dlogits = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, BLOCK_M], swizzled)
    elif of_bias.out is None:
        dlogits = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, BLOCK_M], swizzled)
    else:
        dlogits = gl.allocate_shared_memory(dtype, [2 * GROUPS, 1, 1, BLOCK_M, ROWS], of_bias.out.layout)
    parts = gl.allocate_shared_memory(gl.float32, [config.PARTS * GROUPS, 1, 1, ROWS, ROWS], added.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    bias = of_bias
    if config.BIAS is not None and config.BIAS != 0:
        desc = of_bias.start
        bias_tiles = gl.allocate_shared_memory(desc.dtype, [config.BIAS * GROUPS, 1, 1, BLOCK_M, ROWS], desc.layout)
        ring = new_ring(bias_tiles, config.BIAS, GROUPS)
        bias = BiasTiles(desc, ring, of_bias.out, of_bias.seen, of_bias.strides)
    scheduler = new_scheduler(counters, 1, 2 * GROUPS)
    q, do = new_ring(q_tiles, STAGES, GROUPS), new_ring(do_tiles, STAGES, GROUPS)
    exchange = new_exchange(dlogits, k_tiles, v_tiles, parts)
    fence_async_shared()
    kernel = KeyKernel(
        scheduler, k_tiles, v_tiles, q, lses, do, deltas, None, exchange, Result(dk, k_tiles, None), Result(dv, v_tiles, None),
        (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, QueryBuffers(q, lses, do, deltas), rows[0], rows[1], None, None,
        added, tiles_added, call, bias,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_all, (0, config, kernel)), (compute_all, (1, config, kernel)), (copy_for_keys, (config, kernel)),
         (add_query_gradients, (0, config, kernel)), (add_query_gradients, (1, config, kernel))],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip


@gluon.jit
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, added, lse, delta, counters, tiles_added, seqused_k, units,
    tiles, listed, bits, column_bits, alibi, lengths: SeqLens, schedule: Schedule, right: gl.int32,
    window: Window, scales: Scales, mask_sizes: TileMaskSizes, alibi_strides: AlibiStrides, config: gl.constexpr,
):  # fmt: skip
    """All gradients with five products, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Tensors are as in `hopper_key_kernel`. The gradient of queries is ``added`` up, without the scale, in a descriptor of
    (B, H, N, D) float32, which may hold anything. ``tiles_added`` (GROUPS, B, H, N) are zero, and afterwards say at the first
    query of a tile how many tiles of keys were added there. ``PARTS`` are buffers of each group, through which its sums are stored.
    ``ENDS``: see `compute_all`.

    The same inputs give the same bits: tiles of keys are added to a tile of queries in one order (`query_in_order`), and a
    warp of each group waits until those before have been added. The waiting ends:

    - Programs take every tile from one counter (`take_tile`). So tiles are taken in their order, by programs that run.
    - A program finishes its tiles in the order in which it takes them.
    - A tile waits only for tiles before it.

    So the first tile that is not finished waits for none: its program runs, and has finished all that it took before. No
    number of programs has to run at the same time, and what else runs on the GPU does not matter.
    """
    tile_mask = tiles
    if tiles is not None:
        tile_mask = TileMask(tiles, listed, bits, column_bits, mask_sizes)
    slopes = alibi
    if alibi is not None:
        slopes = Alibi(alibi, alibi_strides)
    call = AttentionCall(
        lengths, schedule, right, scales.logits, scales.gradients, window, seqused_k, None, config.SOFTCAP, None, units,
        None, None, tile_mask, slopes,
    )  # fmt: skip
    run_backward(
        (q_desc, k_desc, v_desc, do_desc), (dk, dv, added), (lse, delta), counters, tiles_added, call, None, config
    )  # fmt: skip


@gluon.jit
def hopper_biased_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, added, lse, delta, counters, tiles_added, bias, seen, dbias,
    lengths: SeqLens, schedule: Schedule, right: gl.int32, scales: Scales, bias_strides: BiasSteps, config: gl.constexpr,
):  # fmt: skip
    """`hopper_backward_kernel` with a bias, and its gradient, unless ``dbias`` is None: see `bias.BiasTiles`."""
    call = AttentionCall(lengths, schedule, right, scales.logits, scales.gradients)
    of_bias = BiasTiles(bias, None, dbias, seen, bias_strides)
    run_backward(
        (q_desc, k_desc, v_desc, do_desc), (dk, dv, added), (lse, delta), counters, tiles_added, call, of_bias, config
    )  # fmt: skip
