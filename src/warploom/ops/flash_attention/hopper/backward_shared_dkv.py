"""Gradients of keys and values for Hopper, where two groups of warps share a tile of 64 keys.

This is for two kinds of call:

- More than 128 features: a group's registers do not hold the gradients of keys and of values.
- Float32: a factor is the sum of ``TERMS`` bfloat16 tensors, which `triton.terms.terms_kernel` makes before. Shared memory
  has no room for the rows of two groups.

One group computes weights and adds up the gradient of the values. The other takes the weights from shared memory and adds
up that of the keys. All products of terms of a tile are in flight together.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, init_each, wait_full
from warploom.ops.flash_attention.hopper.backward_dkv import KeyCopies, copy_for_keys, used_rows
from warploom.ops.flash_attention.hopper.masks import query_steps
from warploom.ops.flash_attention.hopper.terms import add_product, product_of_terms
from warploom.ops.flash_attention.hopper.tiles import (
    ROWS,
    Result,
    RowRing,
    SplitStrides,
    empty_sum,
    new_row_ring,
    pack_16bit,
    pieces_of,
    product_layout,
    product_transposed,
    store_pieces,
    store_tile,
    sum_of_pieces,
    unpack_as_operand,
)
from warploom.ops.flash_attention.hopper.weights import KeyMask, transposed_weights_of, weights_and_slopes
from warploom.ops.flash_attention.hopper.work import (
    Options,
    Scheduler,
    Window,
    Work,
    entry_of,
    new_scheduler,
    read,
    received,
    tile_place,
    tiles_of,
)


class Weights(NamedTuple):
    """Buffers by which weights go from the first group to the second.

    No group waits for such a buffer to be empty: when tiles have come into the buffers of its number, the second group had
    done with those before.
    """

    tiles: gl.shared_memory_descriptor  # (stages, 64, rows of a tile) float32
    full: gl.shared_memory_descriptor  # a barrier for each stage


@gluon.jit
def weight_buffers(STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Tiles of weights."""
    # Half a warp has 32 bytes of each of four rows: swizzled, these lie in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BLOCK], swizzled)


@gluon.jit
def new_weights(tiles, full):
    """Tiles of weights with their barriers, which are initialised."""
    init_each(full)
    return Weights(tiles, full)


class SharedKeyGradients(NamedTuple):
    """Tensors that the two groups of warps with the same 64 keys share."""

    scheduler: Scheduler
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    q: RowRing  # with the lse of each row
    do: RowRing  # with δ
    inverses: gl.shared_memory_descriptor | None  # (stages, rows), beside q's lse; of several terms
    weights: Weights
    dk: Result
    dv: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient of keys
    options: Options


@gluon.jit
def query_loop_for_one(
    acc, count, slot, begin, end, first, reach, call,
    VALUES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of queries ``begin … end`` of one head for one of two gradients; the other group forms the other.

    With ``VALUES`` the own tile is of keys, near tiles are queries, far tiles their gradients, and ``acc`` is the gradient
    of values. Otherwise the own tile is of values, near and far change places, and ``acc`` is the gradient of keys. Of
    several terms the last tile comes first.
    """
    own_tiles, near, far = (call.k_tiles, call.q, call.do) if VALUES else (call.v_tiles, call.do, call.q)
    weights = call.weights
    BLOCK_M: gl.constexpr = near.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(call.q.tiles.shape[4])
    for i in range(begin if TERMS == 1 else 0, end if TERMS == 1 else end - begin):
        stage = wait_full(near.full, count)
        product = product_of_terms(pieces_of(own_tiles, slot, TERMS), near.tiles, stage, TERMS, LAYOUT, VALUES)
        product = warpgroup_mma_wait(0, deps=[product])  # (keys, queries)
        row_value = near.row_values.index(stage).load(gl.SliceLayout(0, LAYOUT))
        if VALUES:
            row_inverse = None
            if TERMS > 1:
                row_inverse = call.inverses.index(stage).load(gl.SliceLayout(0, LAYOUT))
            mbarrier.arrive(near.empty.index(stage))
            m = (i if TERMS == 1 else end - 1 - i) * BLOCK_M
            tile, slopes = transposed_weights_of(
                product, row_value, m, first, call.scale, near.tiles.dtype, MASKED, LAYOUT,
                row_inverse, reach, call.options.softcap, CAUSAL,
            )  # fmt: skip
            weights.tiles.index(stage).store(slopes)
            mbarrier.arrive(weights.full.index(stage))
        else:
            mbarrier.arrive(near.empty.index(stage))
            tile = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
            tile = tile * (product - row_value[None, :])
        acc = add_product(acc, tile, far, count, TERMS, OUT_LAYOUT)
        count += 1
    return acc, count


@gluon.jit
def compute_for_one(VALUES: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, TERMS: gl.constexpr, call):
    """One of two groups of warps with the same 64 keys: for the gradient of their values, or for theirs.

    Its result leaves through the buffer that it alone reads: the gradient of values through that of keys, and the other
    way round.
    """
    scheduler, q, work, options = call.scheduler, call.q, call.work, call.options
    result = call.dv if VALUES else call.dk
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    D: gl.constexpr = q.tiles.shape[4]
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = work.heads // work.group
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, False)
        entry = entry_of(work, row // key_heads, block * ROWS, options)
        begin, full, high, end = query_steps(block, split, entry, options, CAUSAL, ROWS, BLOCK_M)
        first = block * ROWS - (entry.keys - entry.tokens) - work.right
        reach = None
        if options.window is not None:
            reach = work.right + options.window.left
        acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(work.group):
            if CAUSAL and TERMS == 1:
                acc, count = query_loop_for_one(
                    acc, count, slot, begin, full, first, reach, call, VALUES, True, CAUSAL, TERMS
                )
            acc, count = query_loop_for_one(
                acc, count, slot, full, high, first, reach, call, VALUES, False, CAUSAL, TERMS
            )
            if options.window is not None:
                acc, count = query_loop_for_one(
                    acc, count, slot, high, end, first, reach, call, VALUES, True, CAUSAL, TERMS
                )
            if CAUSAL and TERMS > 1:
                acc, count = query_loop_for_one(
                    acc, count, slot, begin, full, first, reach, call, VALUES, True, CAUSAL, TERMS
                )
        if TERMS > 1:  # results leave through no buffer
            mbarrier.arrive(scheduler.empty.index(slot))
        if not VALUES:
            acc = acc * call.grad_scale
        if TERMS == 1:  # worked out again rather than held in registers
            block, row, split = tile_place(read(scheduler, slot), work, False)
        batch, head = row // key_heads, row % key_heads
        if options.seqused_k is not None:
            entry = entry_of(work, batch, block * ROWS, options)
            (acc,) = used_rows((acc,), block * ROWS, entry.keys, OUT_LAYOUT)
        store_tile(result, acc, slot, split, batch, head, block * ROWS, work.keys, SPLIT, OUT_LAYOUT)
        if TERMS == 1:
            tma.store_wait(0)
            mbarrier.arrive(scheduler.empty.index(slot))
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def factor_of(product, count, m, mask, call, VALUES: gl.constexpr, CAUSAL: gl.constexpr):
    """Returns weights, or gradients of logits, from a near product of tile number ``count``, number ``m`` of its queries."""
    near, weights = call.q if VALUES else call.do, call.weights
    dtype: gl.constexpr = near.tiles.dtype
    LAYOUT: gl.constexpr = product_layout(near.tiles.shape[3])
    stage = count % near.full.shape[0]
    row_values = near.row_values.index(stage)
    if VALUES:
        tile, slopes = weights_and_slopes(
            product, row_values, m, mask, call.scale, call.options.softcap, dtype, CAUSAL, LAYOUT
        )
        mbarrier.arrive(near.empty.index(stage))
        weights.tiles.index(stage).store(slopes)
        mbarrier.arrive(weights.full.index(stage))
    else:
        row_delta = row_values.load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(near.empty.index(stage))
        slopes = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
        tile = slopes * (product - row_delta[None, :])
    return tile.to(gl.float32)


@gluon.jit
def query_loop_in_pieces(
    acc, count, slot, begin, end, mask, call, VALUES: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """`query_loop_for_one` over tiles of queries ``begin … end`` of all heads, of which one follows the other.

    The own tile is given back when the last near product is there.
    """
    own_tiles, near, far = (call.k_tiles, call.q, call.do) if VALUES else (call.v_tiles, call.do, call.q)
    own_empty, heads = call.scheduler.empty.index(slot), call.work.group
    STAGES: gl.constexpr = near.full.shape[0]
    LAYOUT: gl.constexpr = product_layout(near.tiles.shape[3])
    OUT_LAYOUT: gl.constexpr = product_layout(far.tiles.shape[4])
    NEAR: gl.constexpr = near.tiles.shape[0] // STAGES
    FAR: gl.constexpr = far.tiles.shape[0] // STAGES
    dtype: gl.constexpr = near.tiles.dtype
    steps = heads * (end - begin)
    if steps > 0:
        own = pieces_of(own_tiles, slot, NEAR)
        m = begin
        product = product_transposed(own, near, count, LAYOUT)  # (keys, queries)
        product = warpgroup_mma_wait(0, deps=[product])
        new = factor_of(product, count, m, mask, call, VALUES, CAUSAL)
        tile = pack_16bit(new, dtype)
        for _ in range(steps - 1):
            m += 1
            m = gl.where(m == end, begin, m)
            product = product_transposed(own, near, count + 1, LAYOUT)
            far_slot = wait_full(far.full, count)
            factor = unpack_as_operand(tile, dtype, OUT_LAYOUT)
            acc = sum_of_pieces(acc, factor, far.tiles, far_slot)
            product = warpgroup_mma_wait(FAR, deps=[product])
            new = factor_of(product, count + 1, m, mask, call, VALUES, CAUSAL)
            acc = warpgroup_mma_wait(0, deps=acc + (factor,))[:FAR]
            mbarrier.arrive(far.empty.index(far_slot))
            tile = pack_16bit(new, dtype)
            count += 1
        mbarrier.arrive(own_empty)
        far_slot = wait_full(far.full, count)
        factor = unpack_as_operand(tile, dtype, OUT_LAYOUT)
        acc = sum_of_pieces(acc, factor, far.tiles, far_slot)
        acc = warpgroup_mma_wait(0, deps=acc + (factor,))[:FAR]
        mbarrier.arrive(far.empty.index(far_slot))
        count += 1
    else:
        mbarrier.arrive(own_empty)
    return acc, count


@gluon.jit
def compute_in_pieces(VALUES: gl.constexpr, CAUSAL: gl.constexpr, call):
    """`compute_for_one` for keys in pieces.

    Its result leaves through no buffer: while it does, the next keys and values are copied.
    """
    scheduler, q, work, options = call.scheduler, call.q, call.work, call.options
    result, far = (call.dv, call.do) if VALUES else (call.dk, q)
    PIECES: gl.constexpr = far.tiles.shape[0] // far.full.shape[0]
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    WIDTH: gl.constexpr = far.tiles.shape[4]
    OUT_LAYOUT: gl.constexpr = product_layout(WIDTH)
    key_heads = work.heads // work.group
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, False)
        entry = entry_of(work, row // key_heads, block * ROWS, options)
        begin, full, high, end = query_steps(block, split, entry, options, CAUSAL, ROWS, BLOCK_M)
        first = block * ROWS - (entry.keys - entry.tokens) - work.right
        reach = None
        if options.window is not None:
            reach = work.right + options.window.left
        acc = empty_sum(PIECES, WIDTH, OUT_LAYOUT)
        mask = KeyMask(full, high, first, None, reach)
        acc, count = query_loop_in_pieces(acc, count, slot, begin, end, mask, call, VALUES, CAUSAL)
        batch, head = row // key_heads, row % key_heads
        if options.seqused_k is not None:
            entry = entry_of(work, batch, block * ROWS, options)
            acc = used_rows(acc, block * ROWS, entry.keys, OUT_LAYOUT)
        factor = 1.0 if VALUES else call.grad_scale
        store_pieces(result, acc, factor, split, batch, head, block * ROWS, work.keys, OUT_LAYOUT)
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def hopper_shared_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, inverse, counters, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32,
    dk_strides: SplitStrides, dv_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """`backward_dkv.hopper_key_kernel` for tiles of 64 keys; there is no room for the next tile of them.

    Boxes of queries and keys may be as wide as one of ``PIECES`` of a row. Then ``dk`` and ``dv`` are addresses, also of
    whole results, and ``SPLIT`` is set.

    With several ``TERMS``, there are no options, descriptors are of (TERMS · B, H, N, D), and ``dk`` and ``dv`` are parts, one or several.
    """
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [TERMS * PIECES, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, E], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS * PIECES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_M, E], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    inverses = None
    if TERMS > 1:
        inverses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    weight_tiles = weight_buffers(STAGES, BLOCK_M)
    weights_full = barriers(STAGES) if TERMS == 1 else None
    scheduler = new_scheduler(counters, 1, 2)
    q, do = new_row_ring(q_tiles, STAGES, 2, lses), new_row_ring(do_tiles, STAGES, 2, deltas)
    weights = new_weights(weight_tiles, weights_full if TERMS == 1 else barriers(STAGES))
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = KeyCopies(
        scheduler, (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, q, do, lse, delta, inverse, inverses, work,
        options,
    )  # fmt: skip
    call = SharedKeyGradients(
        scheduler, k_tiles, v_tiles, q, do, inverses, weights,
        Result(dk, v_tiles, dk_strides), Result(dv, k_tiles, dv_strides), work, scale, grad_scale, options,
    )  # fmt: skip
    if PIECES == 1:
        gl.warp_specialize(
            [(compute_for_one, (True, CAUSAL, SPLIT, TERMS, call)),
             (compute_for_one, (False, CAUSAL, SPLIT, TERMS, call)),
             (copy_for_keys, (1, CAUSAL, TERMS, copies))],
            [4, 1], [240, 24] if TERMS == 1 else [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_in_pieces, (True, CAUSAL, call)),
             (compute_in_pieces, (False, CAUSAL, call)),
             (copy_for_keys, (1, CAUSAL, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
