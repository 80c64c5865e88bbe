"""Forward of flash attention for Hopper, written for its asynchronous units in Gluon.

A persistent program holds one multiprocessor. One warp copies tiles from device memory through the tensor memory
accelerator; groups of four warps each own 64 queries, and attend. Copying and computing meet at barriers in shared
memory, two to a buffer: ``full`` when its tile has arrived, ``empty`` when all groups have read it. Tiles come in the
order in which they are used, so a count of tiles gives buffer and phase of a barrier on both sides.

A group keeps two products in flight: while the logits of one tile of keys become weights, the weights of the tile
before are multiplied with their values. Keys are walked from the last to the first, so that the masked tiles come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # queries of a group of warps: what one matrix instruction takes


@gluon.jit
def power_of_two(x):
    """2ˣ to 2 units in the last place; zero where the result would be denormal."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tile_place(tile, blocks, rows, section, parts, CAUSAL: gl.constexpr):
    """Block, row (of batch entries and heads) and part of a tile's walk, in the order of `kernels.program_order`."""
    place = tile % (section * blocks * parts)
    first = tile // (section * blocks * parts) * section
    width = gl.minimum(section, rows - first)
    block = place // width // parts
    part = place // width % parts
    if CAUSAL:  # the last queries see the most keys
        block = blocks - 1 - block
    return block, first + place % width, part


@gluon.jit
def init_ring(full, empty, arrivals: gl.constexpr):
    """Initialise the barriers of a ring of buffers: one arrival fills a buffer, so many empty it."""
    STAGES: gl.constexpr = full.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=arrivals)


@gluon.jit
def wait_full(full, count):
    """Wait for the tile number ``count`` of a ring of buffers; the number of its buffer."""
    slot = count % full.shape[0]
    mbarrier.wait(full.index(slot), count // full.shape[0] & 1)
    return slot


@gluon.jit
def wait_empty(empty, count):
    """Wait until there is room for the tile number ``count`` of a ring of buffers; the number of its buffer."""
    slot = count % empty.shape[0]
    mbarrier.wait(empty.index(slot), (count // empty.shape[0] & 1) ^ 1)
    return slot


@gluon.jit
def copy_tile(desc, entry, head, row, tiles, full, empty, count):
    """Copy a tile into its buffer of a ring once that is empty."""
    slot = wait_empty(empty, count)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [entry, head, row, 0], full.index(slot), tiles.index(slot))


@gluon.jit
def matrix(tiles, slot):
    """A tile of a ring as a matrix in shared memory."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def product_transposed(a, b_tiles, full, count, LAYOUT: gl.constexpr):
    """Start ``a · bᵀ`` with the tile number ``count`` of a ring of (N, D) tiles."""
    b_tile = matrix(b_tiles, wait_full(full, count)).permute([1, 0])
    N: gl.constexpr = b_tiles.shape[3]
    zeros = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    return warpgroup_mma(a, b_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def as_factor(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of results, rounded, as the first factor of a product with results of layout ``LAYOUT``: no data moves."""
    return gl.convert_layout(tile.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def announce(tile, ticket, empty, done):
    """Tell the groups which tile comes next, once there is room for it; the number of its buffer."""
    slot = wait_empty(empty, done)
    ticket.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    return slot


@gluon.jit
def announced(ticket, full, done):
    """What `announce` told, and the number of the buffer."""
    slot = wait_full(full, done)
    return read(ticket, slot), slot


@gluon.jit
def read(ticket, slot):
    """What was announced in buffer number ``slot``."""
    return gl.max(ticket.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def next_tile(tickets, tiles):
    """A tile that no program has taken. Every program starts with the tile of its own number."""
    programs = gl.num_programs(0)
    tile = tiles
    if tiles > programs:
        tile = programs + gl.atomic_add(tickets, 1)
    return tile


@gluon.jit
def copy_own(descs, tiles, entry, head, row, full, slot, GROUPS: gl.constexpr):
    """Copy 64 rows of each tensor for each group into buffer number ``slot``; without tensors it is full at once."""
    if len(descs) == 0:
        mbarrier.arrive(full.index(slot))
    else:
        mbarrier.expect(full.index(slot), GROUPS * len(descs) * descs[0].block_type.nbytes)
    for group in gl.static_range(GROUPS):
        for i in gl.static_range(len(descs)):
            tma.async_copy_global_to_shared(
                descs[i],
                [entry, head, row + group * ROWS, 0],
                full.index(slot),
                tiles[i].index(slot * GROUPS + group),
            )


@gluon.jit
def key_steps(
    block, part, parts, tokens, keys, right, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Of the tiles of keys that part of a walk goes over: the first, the first with a mask, and the end.

    There is at least one, since a group starts its pipeline with it: for an empty part one that nobody sees.
    """
    end = keys
    full = keys
    if CAUSAL:
        first = block * BLOCK_M + keys - tokens
        end = gl.minimum(keys, first + BLOCK_M + right)
        full = gl.minimum(keys, gl.maximum(first + right + 1, 0))
    steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
    span = (steps + parts - 1) // parts
    begin = gl.minimum(part * span, steps)
    end = gl.maximum(gl.minimum(begin + span, steps), begin + 1)
    return begin, gl.minimum(gl.maximum(full // BLOCK_N, begin), end - 1), end


@gluon.jit
def copy_for_queries(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, arguments):
    """The copying warp of a kernel that owns tiles of queries, and what comes with them, and walks over keys."""
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
        tile = next_tile(tickets, tiles)
    slot = announce(tile, ticket, own_empty, done)
    mbarrier.arrive(own_full.index(slot))


@gluon.jit
def store_part(out, tile, part, entry, head, row, rows, place, LAYOUT: gl.constexpr):
    """Store rows ``row …`` of a float32 tensor in parts, whose sizes and strides ``place`` holds."""
    size, stride_b, stride_n, stride_h, features = place
    start = part.to(gl.int64) * size + entry.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    local = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    feature = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    cells = (local * stride_n)[:, None] + feature[None, :]
    gl.store(out + start + cells, tile, mask=(local < rows)[:, None] & (feature < features)[None, :])


@gluon.jit
def weigh(logits, total, top, first, n, keys, right, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
          LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """Weights of a tile; sums of exponentials and largest logits with it; by how much earlier sums shrink.

    ``first`` is the position of the first query, where it stands among the keys.
    """
    if MASKED:
        key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = (key < keys)[None, :]
        if CAUSAL:
            query = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            seen = seen & (key[None, :] <= (query + right)[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1))
    shift = new_top * scale
    if MASKED:  # a row that has seen no key yet: −inf − (−inf) must not become NaN
        shift = gl.where(new_top == float("-inf"), 0.0, shift)
    weights = power_of_two(logits * scale - shift[:, None])
    shrink = power_of_two(top * scale - shift)
    return weights, total * shrink + gl.sum(weights, 1), new_top, shrink


@gluon.jit
def attend(
    acc, weights, total, top, count, turn, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    begin, end, first, keys, right, scale,
    own: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over tiles of keys ``end − 1 … begin``, with the weights of the tile before, whose number is ``count``."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    GROUPS: gl.constexpr = turns.shape[0]
    for i in range(end - begin):
        if GROUPS > 2:
            mbarrier.wait(turns.index(own), turn & 1)
            turn += 1
        logits = product_transposed(q_tile, k_tiles, k_full, count + 1, LAYOUT)
        slot = wait_full(v_full, count)
        acc = warpgroup_mma(weights, matrix(v_tiles, slot), acc, is_async=True)
        if GROUPS > 2:
            mbarrier.arrive(turns.index((own + 1) % GROUPS))
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k_empty.index((count + 1) % STAGES))
        n = (end - 1 - i) * BLOCK_N
        new, total, top, shrink = weigh(
            logits, total, top, first, n, keys, right, scale, MASKED, CAUSAL, LAYOUT, BLOCK_N
        )
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(slot))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        weights = as_factor(new, v_tiles.dtype, OUT_LAYOUT)
        count += 1
    return acc, weights, total, top, count, turn


@gluon.jit
def compute_tiles(own: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, arguments):
    """Group number ``own`` of warps."""
    (
        ticket, out, lse, statistics, q_tiles, k_tiles, v_tiles, out_tiles,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
        tokens, keys, heads, rows, blocks, section, parts, right, scale, place,
    ) = arguments  # fmt: skip
    GROUPS: gl.constexpr = turns.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    E: gl.constexpr = v_tiles.shape[4]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if own == GROUPS - 1:  # the first turn is that of group 0
        mbarrier.arrive(turns.index(0))
    tiles = blocks * rows * parts
    count = 0
    turn = 0
    done = 0
    tile, q_slot = announced(ticket, q_full, done)
    while tile < tiles:
        block, row, part = tile_place(tile, blocks, rows, section, parts, CAUSAL)
        entry, head = row // heads, row % heads
        begin, full, end = key_steps(block, part, parts, tokens, keys, right, CAUSAL, BLOCK_M, BLOCK_N)
        m = block * BLOCK_M + own * ROWS
        first = m + keys - tokens  # the last query stands at the last key
        q_tile = matrix(q_tiles, q_slot * GROUPS + own)
        acc = gl.zeros([ROWS, E], gl.float32, OUT_LAYOUT)
        total = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)

        logits = product_transposed(q_tile, k_tiles, k_full, count, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k_empty.index(count % STAGES))
        new, total, top, _ = weigh(
            logits, total, top, first, (end - 1) * BLOCK_N, keys, right, scale, True, CAUSAL, LAYOUT, BLOCK_N
        )
        weights = as_factor(new, v_tiles.dtype, OUT_LAYOUT)
        acc, weights, total, top, count, turn = attend(
            acc, weights, total, top, count, turn, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
            full, end - 1, first, keys, right, scale, own, True, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        acc, weights, total, top, count, turn = attend(
            acc, weights, total, top, count, turn, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
            begin, full, first, keys, right, scale, own, False, CAUSAL, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(q_slot))
        slot = wait_full(v_full, count)
        acc = warpgroup_mma(weights, matrix(v_tiles, slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot))
        count += 1

        some = gl.where(total == 0.0, 1.0, total)  # where no key was seen: 0 / 1, and lse −inf + 0
        acc = acc * gl.convert_layout(1.0 / some, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if SPLIT:
            store_part(out, acc, part, entry, head, m, tokens, place, OUT_LAYOUT)
        else:
            tma.store_wait(0)  # until the tile before has left its buffer
            matrix(out_tiles, own).store(acc.to(out_tiles.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [entry, head, m, 0], out_tiles.index(own))

        local = gl.arange(0, ROWS, ROW_LAYOUT)
        there = m + local < tokens
        cells = row.to(gl.int64) * tokens + m + local
        size = rows.to(gl.int64) * tokens
        top = top * scale
        gl.store(statistics + part * 2 * size + cells, top, mask=there)
        gl.store(statistics + (part * 2 + 1) * size + cells, total, mask=there)
        if not SPLIT:
            gl.store(lse + cells, (top + gl.log2(some)) * LN_2, mask=there)
        done += 1
        tile, q_slot = announced(ticket, q_full, done)
    if not SPLIT:
        tma.store_wait(0)


@gluon.jit
def barriers(count: gl.constexpr):
    """Barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


WALK = ("tokens", "keys", "heads", "group", "rows", "blocks", "section", "parts", "right", "scale")


def place_names(*names: str) -> list[str]:
    """Parameters that say where `store_part` puts the parts of tensors."""
    return [f"{name}_{what}" for name in names for what in ("size", "b", "n", "h", "features")]


Q_STAGES = gl.constexpr(2)  # tiles of queries: one that attends, and the next


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
    keys and values. ``tickets`` (1,) is zero, unless every program has one tile. Writes what `kernels.forward_kernel`
    writes: if ``SPLIT``, ``out`` is the address of the parts, and otherwise a descriptor.
    """
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT:
        out_tiles = q_tiles  # not used: parts go from registers to memory
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
             (copy_for_queries, (GROUPS, CAUSAL, copying))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_tiles, (0, CAUSAL, SPLIT, computing)), (compute_tiles, (1, CAUSAL, SPLIT, computing)),
             (compute_tiles, (2, CAUSAL, SPLIT, computing)), (copy_for_queries, (GROUPS, CAUSAL, copying))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
