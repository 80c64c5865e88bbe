"""Forward of flash attention for Hopper, written for its asynchronous units in Gluon.

One warp copies tiles; groups of four warps each own 64 queries, and attend as in `warploom.device.hopper.attention`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents

from warploom.device.hopper import tma
from warploom.device.hopper.attention import (
    Forward,
    Options,
    Window,
    Work,
    compute_tiles,
    entry_of,
    exponent_base,
    first_key,
    key_steps,
    tile_of_step,
    tile_place,
    tiles_of,
)
from warploom.device.hopper.pipeline import (
    NARROW_HEAD,
    ROWS,
    Result,
    Ring,
    Scheduler,
    SplitStrides,
    barriers,
    broadcast,
    broadcast_end,
    copy_own,
    copy_tile,
    init_each,
    new_ring,
    new_scheduler,
    next_tile,
)

MOST_FIXED_TILES = gl.constexpr(6)  # of a program; see `are_counted`


@gluon.constexpr_function
def loops_are_even(causal, has_window, has_lengths, is_packed):
    """Whether the KV loops of all tiles are equally long."""
    return not (causal or has_window or has_lengths or is_packed)


@gluon.jit
def are_counted(tiles, programs):
    """Whether programs take tiles from a counter though loops are even: otherwise each has a fixed share of them.

    Few even tiles gain nothing by a counter, which costs a launch that makes it zero.
    """
    return tiles > MOST_FIXED_TILES * programs


class QueryCopies(NamedTuple):
    """What the copying warp of a kernel that owns tiles of queries copies, and where to."""

    scheduler: Scheduler
    own_descs: gl.tuple  # of the queries, and what comes with them
    own_tiles: gl.tuple
    k_desc: gl.tensor
    v_desc: gl.tensor
    k: Ring
    v: Ring
    work: Work
    options: Options


@gluon.jit
def copy_for_queries(
    GROUPS: gl.constexpr, CAUSAL: gl.constexpr, COUNTED: gl.constexpr, TERMS: gl.constexpr, copies
):
    """The copying warp of a kernel that owns tiles of queries and has a KV loop.

    Its tiles are ``COUNTED``, or loops are even and `are_counted` says whether they are.
    """
    scheduler, own_descs, own_tiles, k_desc, v_desc, k, v, work, options = copies
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    batch_size = work.rows // work.heads
    tiles = tiles_of(work)
    tile = gl.program_id(0)
    count = 0
    done = 0
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        block, row, split = tile_place(tile, work, CAUSAL)
        batch, head = row // work.heads, row % work.heads
        entry = entry_of(work, batch, block * BLOCK_M, options)
        begin, _, _, end = key_steps(block, split, entry, options, CAUSAL, BLOCK_M, BLOCK_N)
        query_shift, key_shift = 0, 0
        if options.units is not None:
            query_shift, key_shift = entry.query_shift, entry.key_shift
        m = block * BLOCK_M - query_shift
        copy_own(own_descs, own_tiles, batch, head, m, scheduler.full, slot, GROUPS, batch_size, TERMS)
        for i in range(end - begin):
            n = first_key(tile_of_step(i, begin, end, options), entry, options, BLOCK_N)
            n -= key_shift
            copy_tile(k_desc, batch, head // work.group, n, k, count, batch_size, TERMS)
            copy_tile(v_desc, batch, head // work.group, n, v, count, batch_size, TERMS)
            count += 1
        done += 1
        if COUNTED:
            tile = next_tile(scheduler, tiles)
        elif are_counted(tiles, gl.num_programs(0)):
            tile = next_tile(scheduler, tiles)
        else:
            tile += gl.num_programs(0)
    broadcast_end(scheduler, tile, done)


@gluon.jit
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out, lse, statistics, counter, seqused_k, units, shifts, out_rows, sink,
    work: Work, window: Window, scale: gl.float32, out_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Attention for tiles of GROUPS · 64 queries, one after the other.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, 64, D) for queries and results and (1, 1, BLOCK_N, D) for
    keys and values; those of queries and keys may be as wide as one of ``PIECES`` of a row. ``counter`` (1,) is zero
    where there are more tiles than programs, unless these have fixed shares (`are_counted`). With ``units`` and
    ``shifts`` sequences are packed, and ``out_rows`` is the address of ``out``. The sink (H,) comes with one split
    alone. Writes what `kernels.forward.forward_kernel` writes: if ``SPLIT``, ``out`` is the address of the parts, and
    otherwise a descriptor.
    """
    if SPLIT:  # what merges parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    # Tiles of queries: one that attends, and the next, where there is room for it.
    Q_STAGES: gl.constexpr = 2 if PIECES * D <= NARROW_HEAD else 1
    q_tiles = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS * PIECES, 1, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT:
        out_tiles = q_tiles  # not used: parts go from registers to memory
    elif PIECES * D > NARROW_HEAD:
        out_tiles = tma.tiles_in(q_tiles, E, out.layout)
    else:
        out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], out.layout)
    scheduler = new_scheduler(counter, Q_STAGES, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, STAGES, GROUPS)
    go = barriers(GROUPS)
    init_each(go)
    fence_async_shared()
    options = Options(window, seqused_k, sink, SOFTCAP, exponent_base(SOFTCAP, dtype), units, shifts)
    UNEVEN: gl.constexpr = not loops_are_even(CAUSAL, window is not None, seqused_k is not None, units is not None)
    copies = QueryCopies(scheduler, (q_desc,), (q_tiles,), k_desc, v_desc, k, v, work, options)
    result = Result(out, out_tiles, out_strides, out_rows)
    call = Forward(scheduler, q_tiles, k, v, go, result, lse, statistics, work, scale, options)
    if GROUPS == 2:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, call)), (compute_tiles, (1, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, UNEVEN, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, call)), (compute_tiles, (1, CAUSAL, SPLIT, call)),
             (compute_tiles, (2, CAUSAL, SPLIT, call)), (copy_for_queries, (GROUPS, CAUSAL, UNEVEN, 1, copies))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
