"""Forward of tensor-product attention for Hopper: flash attention's kernel with keys and values formed on the way.

To the groups of warps that attend (`warploom.device.hopper.attention`), keys and values are tiles in shared memory like
any others. Forming warps put them there, from tiles of feature factors that the copying warp brings:

    copying warp     bk, bv by the tensor memory accelerator, CHUNK keys at a time, all ranks
    forming warps    K[m] = Σ_r a[m, r] b[m, r], 16 keys at a time
    groups of warps  attend, as in flash attention

Every key has a head factor of its own, so this is no product of matrices; but Σ_r diag(a[:, r]) · b[:, r] is one. Beyond
rank one, zeros cost the matrix units less than the multiplications one by one cost the schedulers, for which attending
warps wait too. Sums are in float32 and rounded once.

Head factors are (B, H, R, M) in float32, and include the scales of keys and values. Matrix units take them in 16 bits,
with a scale that is no power of two (not ``EXACT``) as sums of two.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from warploom.device.hopper.attention import Forward, Options, Work, compute_tiles, key_steps, tile_place, tiles_of
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    Ring,
    Scheduler,
    barriers,
    broadcast,
    broadcast_end,
    copy_own,
    copy_tile,
    init_each,
    matrix,
    new_ring,
    new_scheduler,
    next_tile,
    received,
    wait_empty,
    wait_full,
)


class Operand(NamedTuple):
    """Keys or values that forming warps form."""

    heads: gl.tensor  # head factors (B, H, R, M), float32
    buffer: gl.shared_memory_descriptor  # (R · BLOCK_N,): those of a tile
    ring: Ring  # of tiles that are formed
    factors: Ring  # of feature factors, all ranks


class Forming(NamedTuple):
    """What forming warps work on besides their operands."""

    scheduler: Scheduler
    work: Work
    stride: gl.int32  # of ranks in head factors


class Copies(NamedTuple):
    """What the copying warp of a kernel that owns tiles of queries copies, and where to."""

    scheduler: Scheduler
    own_descs: gl.tuple
    own_tiles: gl.tuple
    k_desc: gl.tensor
    v_desc: gl.tensor
    k_factors: Ring
    v_factors: Ring
    work: Work


@gluon.jit
def copy_factors(desc, batch, n, ring, count, BLOCK_N: gl.constexpr):
    """Copy the feature factors of a tile of keys or values, the one number ``count``, all ranks."""
    CHUNK: gl.constexpr = ring.tiles.shape[3]
    for i in range(BLOCK_N // CHUNK):
        copy_tile(desc, batch, 0, n + i * CHUNK, ring, count * (BLOCK_N // CHUNK) + i)


@gluon.jit
def load_weights(a, n, keys, stride, RANK: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Head factors (RANK · BLOCK_N,) of one head and a tile of keys, zero beyond the last."""
    place = gl.arange(0, RANK * BLOCK_N, LAYOUT)
    rank, key = place // BLOCK_N, n + place % BLOCK_N
    return gl.load(a + rank * stride + key, mask=key < keys, other=0.0)


@gluon.jit
def diagonal(weights, LAYOUT: gl.constexpr):
    """Matrices (G, 16, 16) with ``weights`` (G, 16) on their diagonals, as first factors of products."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))
    k = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))
    zero = gl.zeros([weights.shape[0], 16, 16], weights.dtype, OPERAND)
    return gl.where(i[None, :, None] == k[None, None, :], weights[:, :, None], zero)


@gluon.jit
def multiply(factor, buffer, tile, place: gl.constexpr):
    """Form keys or values of rank one (CHUNK, F), from ``place`` of the tile on, without matrix units."""
    CHUNK: gl.constexpr = factor.shape[0]
    F: gl.constexpr = factor.shape[1]
    STEP: gl.constexpr = 32  # rows for whose numbers there are registers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // F, F // 8], [4, 1], [1, 0])
    for piece in gl.static_range(CHUNK // STEP):
        b = factor.slice(piece * STEP, STEP).load(LAYOUT)
        a = buffer.slice(place + piece * STEP, STEP).load(gl.SliceLayout(1, LAYOUT))
        tile.slice(place + piece * STEP, STEP).store((a[:, None] * b.to(gl.float32)).to(tile.dtype))


@gluon.jit
def sum_products(factor, rows, tile, chunk: gl.constexpr, RANK: gl.constexpr, EXACT: gl.constexpr):
    """Form keys or values (G, 16, F), part ``chunk`` of the tile, from factors (RANK · G, 16, F) and ``rows`` (…, 16)."""
    G: gl.constexpr = factor.shape[0] // RANK
    F: gl.constexpr = factor.shape[2]
    W: gl.constexpr = G if G < 4 else 4  # warps that share out the keys; the others share out features
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 4 // W], [1, 16, 8])
    A: gl.constexpr = gl.SliceLayout(2, gl.DotOperandLayout(0, LAYOUT, 2))
    total = gl.zeros([G, 16, F], gl.float32, LAYOUT)
    for r in gl.static_range(RANK):
        b = factor.slice(r * G, G).load(gl.DotOperandLayout(1, LAYOUT, 2))
        a = rows.slice(r * (rows.shape[0] // RANK) + chunk * G, G).load(A)
        high = a.to(tile.dtype)
        total = mma_v2(diagonal(high, LAYOUT), b, total)
        if not EXACT:
            total = mma_v2(diagonal((a - high.to(gl.float32)).to(tile.dtype), LAYOUT), b, total)
    tile.slice(chunk * G, G).store(total.to(tile.dtype))


@gluon.jit
def form_tile(operand, weights, count, EXACT: gl.constexpr):
    """Form the tile number ``count`` of an operand as soon as its buffer is empty, from head factors ``weights``."""
    _, buffer, ring, factors = operand
    BLOCK_N: gl.constexpr = ring.tiles.shape[3]
    F: gl.constexpr = ring.tiles.shape[4]
    RANK: gl.constexpr = factors.tiles.shape[2]
    CHUNK: gl.constexpr = factors.tiles.shape[3]
    buffer.store(weights)
    slot = wait_empty(ring.empty, count)
    for chunk in gl.static_range(BLOCK_N // CHUNK):
        f_slot = wait_full(factors.full, count * (BLOCK_N // CHUNK) + chunk)
        if RANK == 1:
            multiply(matrix(factors.tiles, f_slot), buffer, matrix(ring.tiles, slot), chunk * CHUNK)
        else:
            sum_products(
                factors.tiles.index(f_slot).reshape([RANK * CHUNK // 16, 16, F]),
                buffer.reshape([RANK * BLOCK_N // 16, 16]),
                ring.tiles.index(slot).reshape([BLOCK_N // 16, 16, F]),
                chunk,
                RANK,
                EXACT,
            )
        mbarrier.arrive(factors.empty.index(f_slot))
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot))


@gluon.jit
def copy_for_queries(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, copies):
    """The copying warp of a kernel that owns tiles of queries, and what comes with them."""
    scheduler, own_descs, own_tiles, k_desc, v_desc, k_factors, v_factors, work = copies
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    tiles = tiles_of(work)
    tile = gl.program_id(0)
    count = 0
    done = 0
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        block, row, _ = tile_place(tile, work, CAUSAL)
        batch, head = row // work.heads, row % work.heads
        _, _, _, steps = key_steps(block, 0, work, Options(), CAUSAL, BLOCK_M, BLOCK_N)
        copy_own(own_descs, own_tiles, batch, head, block * BLOCK_M, scheduler.full, slot, GROUPS)
        for i in range(steps):
            n = (steps - 1 - i) * BLOCK_N
            copy_factors(k_desc, batch, n, k_factors, count, BLOCK_N)
            copy_factors(v_desc, batch, n, v_factors, count, BLOCK_N)
            count += 1
        done += 1
        tile = next_tile(scheduler, tiles)
    broadcast_end(scheduler, tile, done)


@gluon.jit
def load_each(operands, start, n, forming, RANK: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """`load_weights` of each operand, from ``start`` on."""
    keys, stride = forming.work.keys, forming.stride
    first = load_weights(operands[0].heads + start, n, keys, stride, RANK, BLOCK_N, LAYOUT)
    if len(operands) == 1:
        return (first,)
    else:
        return first, load_weights(operands[1].heads + start, n, keys, stride, RANK, BLOCK_N, LAYOUT)


@gluon.jit
def form_tiles(GROUPS: gl.constexpr, CAUSAL: gl.constexpr, EXACT: gl.constexpr, operands, forming):
    """Forming warps. Head factors of the next step are on their way while this one's tiles are formed."""
    scheduler, work, stride = forming
    RANK: gl.constexpr = operands[0].factors.tiles.shape[2]
    BLOCK_N: gl.constexpr = operands[0].ring.tiles.shape[3]
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles = tiles_of(work)
    count = 0
    done = 0
    tile, slot = received(scheduler, done)
    mbarrier.arrive(scheduler.empty.index(slot))
    while tile < tiles:
        block, row, _ = tile_place(tile, work, CAUSAL)
        _, _, _, steps = key_steps(block, 0, work, Options(), CAUSAL, BLOCK_M, BLOCK_N)
        start = row.to(gl.int64) * (RANK * stride)
        weights = load_each(operands, start, (steps - 1) * BLOCK_N, forming, RANK, BLOCK_N, LAYOUT)
        for i in range(steps):
            present = weights
            n = gl.maximum(steps - 2 - i, 0) * BLOCK_N
            weights = load_each(operands, start, n, forming, RANK, BLOCK_N, LAYOUT)
            for o in gl.static_range(len(operands)):
                form_tile(operands[o], present[o], count, EXACT)
            count += 1
        done += 1
        tile, slot = received(scheduler, done)
        mbarrier.arrive(scheduler.empty.index(slot))


@gluon.jit
def tpa_hopper_forward_kernel(
    q_desc, bk_desc, bv_desc, out_desc, ak, av, lse, statistics, counters,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, rows: gl.int32, blocks: gl.int32,
    stride: gl.int32, scale: gl.float32,
    RANK: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, F_STAGES: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Attention for tiles of 128 queries, one after the other.

    Descriptors are of Q and results (B, H, N, D) in boxes of (1, 1, 64, D), and of feature factors (B, R, M, D) in
    boxes of (1, R, CHUNK, D). Rows of ``ak`` and ``av`` are ``stride`` apart. ``counters[0]`` is zero once the launch before
    has ended, for which this one waits before it reads.
    One group of warps forms keys and one values. Writes what flash attention's kernel for Hopper writes.
    """
    GROUPS: gl.constexpr = 2
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = bv_desc.block_type.shape[3]
    CHUNK: gl.constexpr = bk_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], out_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], q_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], q_desc.layout)
    bk_tiles = gl.allocate_shared_memory(dtype, [F_STAGES, 1, RANK, CHUNK, D], bk_desc.layout)
    bv_tiles = gl.allocate_shared_memory(dtype, [F_STAGES, 1, RANK, CHUNK, E], bv_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_weights = gl.allocate_shared_memory(gl.float32, [RANK * BLOCK_N], plain)
    v_weights = gl.allocate_shared_memory(gl.float32, [RANK * BLOCK_N], plain)
    work = Work(tokens, keys, heads, 1, rows, blocks, rows, 1, 0)
    scheduler = new_scheduler(counters, 1, GROUPS + 2)  # the groups that attend, and the two that form
    k = new_ring(k_tiles, STAGES, GROUPS)
    v = new_ring(v_tiles, STAGES, GROUPS)
    k_factors = new_ring(bk_tiles, F_STAGES, 1)
    v_factors = new_ring(bv_tiles, F_STAGES, 1)
    turns = barriers(GROUPS)
    init_each(turns)
    fence_async_shared()
    result = Result(out_desc, out_tiles, None)
    computing = Forward(scheduler, q_tiles, k, v, turns, result, lse, statistics, work, scale, Options())
    k_operand = Operand(ak, k_weights, k, k_factors)
    v_operand = Operand(av, v_weights, v, v_factors)
    forming = Forming(scheduler, work, stride)
    copies = Copies(scheduler, (q_desc,), (q_tiles,), bk_desc, bv_desc, k_factors, v_factors, work)
    gdc_wait()
    gl.warp_specialize(
        [(compute_tiles, (0, CAUSAL, False, computing)), (compute_tiles, (1, CAUSAL, False, computing)),
         (form_tiles, (GROUPS, CAUSAL, EXACT, (k_operand,), forming)),
         (form_tiles, (GROUPS, CAUSAL, EXACT, (v_operand,), forming)),
         (copy_for_queries, (GROUPS, CAUSAL, BLOCK_N, copies))],
        [4, 4, 4, 1], [160, 64, 64, 24],
    )  # fmt: skip
