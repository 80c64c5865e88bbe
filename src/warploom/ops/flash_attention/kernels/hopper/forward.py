"""Forward of flash attention for Hopper, written for its asynchronous units in Gluon.

One warp copies tiles; groups of four warps each own 64 queries, and attend as in `warploom.device.hopper.attention`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from warploom.device.hopper.attention import compute_tiles, key_steps, tile_place
from warploom.device.hopper.pipeline import (
    NARROW,
    ROWS,
    announce,
    announce_end,
    barriers,
    copy_own,
    copy_tile,
    init_ring,
    next_tile,
)

EVEN_TURNS = gl.constexpr(6)  # tiles of a program up to which equal walks need no tickets


@gluon.jit
def copy_for_queries(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, COUNTED: gl.constexpr, arguments):
    """The copying warp of a kernel that owns tiles of queries, and what comes with them, and walks over keys.

    Unless tiles are ``COUNTED``, with tickets, walks are equal, and if they are few every program has the same share.
    """
    (
        tickets, ticket, own_descs, k_desc, v_desc, own_tiles, k_tiles, v_tiles,
        own_full, own_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    tiles = blocks * rows * parts
    tile = gl.program_id(0)
    count = 0
    done = 0
    while tile < tiles:
        slot = announce(tile, ticket, own_empty, done)
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        entry, head = row // heads, row % heads
        begin, _, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_M, BLOCK_N)
        copy_own(own_descs, own_tiles, entry, head, block * BLOCK_M, own_full, slot, GROUPS)
        for i in range(end - begin):
            n = (end - 1 - i) * BLOCK_N
            copy_tile(k_desc, entry, head // group, n, k_tiles, k_full, k_empty, count)
            copy_tile(v_desc, entry, head // group, n, v_tiles, v_full, v_empty, count)
            count += 1
        done += 1
        if COUNTED:
            tile = next_tile(tickets, tiles)
        elif tiles > EVEN_TURNS * gl.num_programs(0):
            tile = next_tile(tickets, tiles)
        else:
            tile += gl.num_programs(0)
    announce_end(tile, ticket, own_full, own_empty, done)


WALK = ("tokens", "keys", "heads", "group", "rows", "blocks", "section", "parts", "right", "scale")


def place_names(*names: str) -> list[str]:
    """Parameters that say where `store_part` puts the parts of tensors."""
    return [f"{name}_{what}" for name in names for what in ("size", "b", "n", "h", "features")]


@gluon.jit(do_not_specialize=[*WALK, *place_names("out")])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out, lse, statistics, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, group: gl.int32, rows: gl.int32, blocks: gl.int32,
    section: gl.int32, parts: gl.int32, right: gl.int32, scale: gl.float32,
    out_size: gl.int32, out_b: gl.int32, out_n: gl.int32, out_h: gl.int32, out_features: gl.int32,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention for tiles of GROUPS · 64 queries, one after the other.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, 64, D) for queries and results and (1, 1, BLOCK_N, D) for
    keys and values. ``tickets`` (1,) is zero where there are more tiles than programs and, unless
    ``CAUSAL``, more than `EVEN_TURNS` times as many. Writes what
    `kernels.forward_kernel` writes: if ``SPLIT``, ``out`` is the address of the parts, and otherwise a descriptor.
    """
    if SPLIT:  # what merges parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    # Tiles of queries: one that attends, and the next, where there is room for it.
    Q_STAGES: gl.constexpr = 2 if D <= NARROW else 1
    q_tiles = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT or D > NARROW:
        out_tiles = q_tiles  # of parts not used: they go from registers to memory
    else:
        out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], out.layout)
    ticket = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(Q_STAGES), barriers(Q_STAGES)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    v_full, v_empty = barriers(STAGES), barriers(STAGES)
    turns = barriers(GROUPS)
    init_ring(q_full, q_empty, GROUPS)
    init_ring(k_full, k_empty, GROUPS)
    init_ring(v_full, v_empty, GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    copying = (
        tickets, ticket, (q_desc,), k_desc, v_desc, (q_tiles,), k_tiles, v_tiles,
        q_full, q_empty, k_full, k_empty, v_full, v_empty,
        tokens, keys, heads, group, rows, blocks, section, parts, right,
    )  # fmt: skip
    computing = (
        ticket, out, lse, statistics, q_tiles, k_tiles, v_tiles, out_tiles,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
        tokens, keys, heads, rows, blocks, section, parts, right, scale,
        (out_size, out_b, out_n, out_h, out_features),
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, computing)), (compute_tiles, (1, CAUSAL, SPLIT, computing)),
             (copy_for_queries, (GROUPS, CAUSAL, CAUSAL, copying))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, computing)), (compute_tiles, (1, CAUSAL, SPLIT, computing)),
             (compute_tiles, (2, CAUSAL, SPLIT, computing)), (copy_for_queries, (GROUPS, CAUSAL, CAUSAL, copying))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
