"""Gradients of queries, added up in device memory by all programs, always in the same order.

A counter in device memory says how many tiles of keys have been added. A program waits until all have that come before it,
adds its own, and counts it. `backward_fused.hopper_backward_kernel` says why the waiting ends.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from warploom.device.hopper import tma
from warploom.ops.flash_attention.hopper.masks import query_steps
from warploom.ops.flash_attention.hopper.tiles import ROWS
from warploom.ops.flash_attention.hopper.work import (
    Options,
    Scheduler,
    Work,
    entry_of,
    received,
    tile_place,
    tiles_of,
)


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
def tiles_before(block, m, work, options, BLOCK_N: gl.constexpr):
    """Returns how many tiles of keys are added to the queries ``m …`` before this one: those before it that these queries see."""
    first = block * 0
    if options.window is not None:
        first = gl.maximum(m + work.keys - work.tokens - options.window.left, 0) // BLOCK_N
    if options.units is not None:
        first = gl.maximum(first, work.first_key // BLOCK_N)
    return block - first


class Additions(NamedTuple):
    """Tensors of a warp that adds up gradients of queries."""

    scheduler: Scheduler
    parts: gl.shared_memory_descriptor  # as in `Exchange`
    full: gl.shared_memory_descriptor  # the `Exchange`'s ``part_full``
    empty: gl.shared_memory_descriptor  # the `Exchange`'s ``part_empty``
    added: gl.tensor  # a descriptor of (B, H, N, D) float32, with boxes of (1, 1, 64, 64)
    tiles_added: gl.tensor  # (GROUPS, B, H, N) int32: at a tile's first query, how many tiles of keys are added
    work: Work
    options: Options


@gluon.jit
def add_part(desc, batch, head, row, feature, tile, before):
    """Add a tile to device memory, or store it if it is the first."""
    if before == 0:
        tma.async_copy_shared_to_global(desc, [batch, head, row, feature], tile)
    else:
        tma.async_add(desc, [batch, head, row, feature], tile)


@gluon.jit
def add_query_gradients(own: gl.constexpr, GROUPS: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, call):
    """Run the warp that adds up the part of the gradient of queries that group number ``own`` forms.

    Only this warp waits for other programs. Its group waits for it where no buffer is free for the next part. Tiles of keys
    are added in their order. The first is stored and not added: memory may hold anything.
    """
    scheduler, parts, full, empty = call.scheduler, call.parts, call.full, call.empty
    added, tiles_added, work, options = call.added, call.tiles_added, call.work, call.options
    STAGES: gl.constexpr = full.shape[0] // GROUPS
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    key_heads = work.heads // work.group
    batch_size = work.rows // key_heads
    tiles = tiles_of(work)
    count = 0
    done = 0
    tile, slot = received(scheduler, done, 1)
    while tile < tiles:
        mbarrier.arrive(scheduler.empty.index(slot))
        block, row, _ = tile_place(tile, work, False)
        batch, key_head = row // key_heads, row % key_heads
        entry = entry_of(work, batch, block * BLOCK_N, options)
        begin, _, _, end = query_steps(block, 0, entry, options, CAUSAL, BLOCK_N, BLOCK_M)
        for i in range(work.group * (end - begin)):
            m, member = query_in_order(i, end, work.group)
            m = m * BLOCK_M
            head = key_head * work.group + member
            before = tiles_before(block, m, entry, options, BLOCK_N)
            row_of_count = (own * batch_size + batch) * work.heads + head
            counter = tiles_added + row_of_count.to(gl.int64) * work.tokens + m
            stage = count % STAGES * GROUPS + own
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            wait_until_added(counter, before)
            if BLOCK_M > ROWS:
                add_part(added, batch, head, m + own * ROWS, 0, parts.index(stage), before)
            else:
                add_part(added, batch, head, m, own * ROWS, parts.index(stage), before)
            tma.store_wait(0)
            mbarrier.arrive(empty.index(stage))
            tma.stored()
            count_added(counter)
            count += 1
        done += 1
        tile, slot = received(scheduler, done, 1)
