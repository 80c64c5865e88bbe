"""Gradients of queries, added up in device memory by all programs, always in the same order.

A counter in device memory says how many tiles of keys have been added. A program waits until all have that come before it,
adds its own, and counts it. `backward_fused.hopper_backward_kernel` says why the waiting ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from warploom.device.hopper import tma
from warploom.ops.flash_attention.hopper.masks import own_keys
from warploom.ops.flash_attention.hopper.tiles import ROWS
from warploom.ops.flash_attention.hopper.work import receive, tile_place, tiles_of, whole_loop


@gluon.jit
def wait_until_added(counter, before):
    """Wait until as many have added as come before. Copies that start afterwards find what was written until then."""
    added = _added(counter)
    while added != before:
        added = _added(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [added], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _added(counter):
    """Returns how many have added."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_added(counter):
    """Count one more that has added. What this warp wrote is in device memory (`tma.stored`)."""
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


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
def add_part(desc, batch, head, row, feature, tile, before):
    """Add a tile to device memory, or store it if it is the first."""
    if before == 0:
        tma.async_copy_shared_to_global(desc, [batch, head, row, feature], tile)
    else:
        tma.async_add(desc, [batch, head, row, feature], tile)


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
        for i in range(schedule.group * (keys.end - keys.begin)):
            m, member = query_in_order(i, keys.end, schedule.group)
            m = m * BLOCK_M
            head = key_head * schedule.group + member
            before = tiles_before(place.block, m, keys.seq, call, config)
            row_of_count = (own * batch_size + batch) * schedule.heads + head
            counter = kernel.tiles_added + row_of_count.to(gl.int64) * call.lengths.tokens + m
            stage = count % STAGES * GROUPS + own
            mbarrier.wait(exchange.part_full.index(stage), count // STAGES & 1)
            wait_until_added(counter, before)
            if BLOCK_M > ROWS:
                add_part(kernel.added, batch, head, m + own * ROWS, 0, exchange.parts.index(stage), before)
            else:
                add_part(kernel.added, batch, head, m, own * ROWS, exchange.parts.index(stage), before)
            tma.store_wait(0)
            mbarrier.arrive(exchange.part_empty.index(stage))
            tma.stored()
            count_added(counter)
            count += 1
        work = receive(scheduler, work.number + 1, 1)
