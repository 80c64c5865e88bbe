"""Backward of flash attention for Hopper where two groups of warps share a tile of 64 rows.

What it computes is in `kernels.backward`. It is for two kinds of call:

- More than 128 features: a group's registers do not hold the gradients of keys and of values.
- Float32: a factor is the sum of ``TERMS`` bfloat16 tensors, which `kernels.forward.terms_kernel` makes before. Shared
  memory has no room for the rows of two groups.

One group computes weights, and the other takes them from shared memory. Each adds up one gradient, of keys or of values.
All products of terms of a tile are in flight together.
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
from warploom.device.hopper.attention import (
    Options,
    Window,
    Work,
    entry_of,
    key_steps,
    query_steps,
    tile_place,
    tiles_of,
)
from warploom.device.hopper.attention_backward.keys import KeyCopies, copy_for_keys, used_rows
from warploom.device.hopper.attention_backward.weights import load_row_values, transposed_weights_of, weights_of
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    Ring,
    RowRing,
    Scheduler,
    SplitStrides,
    as_factor,
    barriers,
    init_each,
    matrix,
    new_ring,
    new_row_ring,
    new_scheduler,
    product_layout,
    read,
    received,
    store_part,
    store_tile,
    wait_full,
)
from warploom.ops.flash_attention.kernels.hopper.forward import QueryCopies, copy_for_queries


class Weights(NamedTuple):
    """How weights go from the first group to the second.

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


@gluon.jit
def own_terms(tiles, slot, TERMS: gl.constexpr):
    """The terms of own rows, in shared memory."""
    terms = ()
    for i in gl.static_range(TERMS):
        terms += (matrix(tiles, slot * TERMS + i),)
    return terms


@gluon.jit
def own_terms_in_registers(tiles, TERMS: gl.constexpr, LAYOUT: gl.constexpr):
    """The terms of own rows, in registers."""
    terms = ()
    for i in gl.static_range(TERMS):
        terms += (matrix(tiles, i).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return terms


@gluon.jit
def product_of_terms(
    a_terms, b_tiles, slot, TERMS: gl.constexpr, LAYOUT: gl.constexpr, SWAPPED: gl.constexpr = False
):
    """Start ``a · bᵀ`` of own rows and of a tile of a ring, the smallest products first.

    ``SWAPPED``: in the order that the same products have in ``b · aᵀ``, so that the bits are the same.
    """
    N: gl.constexpr = b_tiles.shape[3]
    acc = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    for left_out in gl.static_range(TERMS):
        for i in gl.static_range(TERMS - left_out):
            if SWAPPED:
                a, of_b = a_terms[i], TERMS - 1 - left_out - i
            else:
                a, of_b = a_terms[TERMS - 1 - left_out - i], i
            b = matrix(b_tiles, slot * TERMS + of_b).permute([1, 0])
            acc = warpgroup_mma(a, b, acc, use_acc=left_out + i > 0, is_async=True)
    return acc


@gluon.jit
def add_product(acc, tile, ring, count, TERMS: gl.constexpr, LAYOUT: gl.constexpr):
    """``acc + tile · b`` with the tile number ``count`` of a ring, which is empty then.

    Of several terms, the sum is formed outside of matrix units, which drop bits where they add.
    """
    if TERMS == 1:
        factor = as_factor(tile, ring.tiles.dtype, LAYOUT)
        slot = wait_full(ring.full, count)
        acc = warpgroup_mma(factor, matrix(ring.tiles, slot), acc, is_async=True)
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
    else:
        slot = wait_full(ring.full, count)
        factors = ()
        for _ in gl.static_range(TERMS):
            term = tile.to(ring.tiles.dtype)
            factors += (gl.convert_layout(term, gl.DotOperandLayout(0, LAYOUT, 2)),)
            tile = tile - term.to(gl.float32)
        D: gl.constexpr = ring.tiles.shape[4]
        whole = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        for left_out in gl.static_range(TERMS):
            for i in gl.static_range(TERMS - left_out):
                b = matrix(ring.tiles, slot * TERMS + i)
                whole = warpgroup_mma(
                    factors[TERMS - 1 - left_out - i], b, whole, use_acc=left_out + i > 0, is_async=True
                )
        if TERMS == 3:
            whole, _, _, _ = warpgroup_mma_wait(0, deps=[whole, factors[0], factors[1], factors[2]])
        else:
            whole, _, _ = warpgroup_mma_wait(0, deps=[whole, factors[0], factors[1]])
        acc = acc + whole
    mbarrier.arrive(ring.empty.index(slot))
    return acc


class SharedKeyGradients(NamedTuple):
    """What the two groups of warps with the same 64 keys share."""

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
    acc, count, own_tiles, slot, near, far, inverses, weights, begin, end, first, reach, scale, softcap,
    VALUES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr,
    LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loop over tiles of queries ``begin … end`` of one head for one of two gradients; the other group forms the other.

    With ``VALUES`` the own tile is of keys, near tiles are queries, far tiles their gradients, and ``acc`` is the gradient
    of values. Otherwise the own tile is of values, near and far change places, and ``acc`` is the gradient of keys. Of
    several terms the last tile comes first.
    """
    BLOCK_M: gl.constexpr = near.tiles.shape[3]
    for i in range(begin if TERMS == 1 else 0, end if TERMS == 1 else end - begin):
        stage = wait_full(near.full, count)
        product = product_of_terms(own_terms(own_tiles, slot, TERMS), near.tiles, stage, TERMS, LAYOUT, VALUES)
        product = warpgroup_mma_wait(0, deps=[product])  # (keys, queries)
        row_value = near.row_values.index(stage).load(gl.SliceLayout(0, LAYOUT))
        if VALUES:
            row_inverse = None
            if TERMS > 1:
                row_inverse = inverses.index(stage).load(gl.SliceLayout(0, LAYOUT))
            mbarrier.arrive(near.empty.index(stage))
            m = (i if TERMS == 1 else end - 1 - i) * BLOCK_M
            tile, slopes = transposed_weights_of(
                product, row_value, m, first, scale, near.tiles.dtype, MASKED, LAYOUT,
                row_inverse, reach, softcap, CAUSAL,
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
    scheduler, k_tiles, v_tiles, q, do, inverses, weights, dk, dv, work, scale, grad_scale, options = call
    result, own_tiles, near, far = (dv, k_tiles, q, do) if VALUES else (dk, v_tiles, do, q)
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    D: gl.constexpr = q.tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    key_heads = work.heads // work.group
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, False)
        entry = entry_of(work, row // key_heads, options)
        begin, full, high, end = query_steps(block, split, entry, options, CAUSAL, ROWS, BLOCK_M)
        first = block * ROWS - (entry.keys - work.tokens) - work.right
        reach = None
        if options.window is not None:
            reach = work.right + options.window.left
        acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(work.group):
            if CAUSAL and TERMS == 1:
                acc, count = query_loop_for_one(
                    acc, count, own_tiles, slot, near, far, inverses, weights, begin, full, first, reach, scale,
                    options.softcap, VALUES, True, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
            acc, count = query_loop_for_one(
                acc, count, own_tiles, slot, near, far, inverses, weights, full, high, first, reach, scale,
                options.softcap, VALUES, False, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
            if options.window is not None:
                acc, count = query_loop_for_one(
                    acc, count, own_tiles, slot, near, far, inverses, weights, high, end, first, reach, scale,
                    options.softcap, VALUES, True, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
            if CAUSAL and TERMS > 1:
                acc, count = query_loop_for_one(
                    acc, count, own_tiles, slot, near, far, inverses, weights, begin, full, first, reach, scale,
                    options.softcap, VALUES, True, CAUSAL, TERMS, LAYOUT, OUT_LAYOUT,
                )  # fmt: skip
        if TERMS > 1:  # results leave through no buffer
            mbarrier.arrive(scheduler.empty.index(slot))
        if not VALUES:
            acc = acc * grad_scale
        if TERMS == 1:  # worked out again rather than held in registers
            block, row, split = tile_place(read(scheduler, slot), work, False)
        batch, head = row // key_heads, row % key_heads
        if options.seqused_k is not None:
            entry = entry_of(work, batch, options)
            acc = used_rows(acc, block * ROWS, entry.keys, OUT_LAYOUT)
        store_tile(result, acc, slot, split, batch, head, block * ROWS, work.keys, SPLIT, OUT_LAYOUT)
        if TERMS == 1:
            tma.store_wait(0)
            mbarrier.arrive(scheduler.empty.index(slot))
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def hopper_shared_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, inverse, counters, seqused_k,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32,
    dk_strides: SplitStrides, dv_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.hopper.backward.hopper_key_kernel` for tiles of 64 keys; there is no room for the next tile of them.

    With several ``TERMS``, there are no options, descriptors are of (TERMS · B, H, N, D), and ``dk`` and ``dv`` are parts, one or several.
    """
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_M, D], do_desc.layout)
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
    options = Options(window, seqused_k, None, SOFTCAP)
    copies = KeyCopies(
        scheduler, (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, q, do, lse, delta, inverse, inverses, work,
        options,
    )  # fmt: skip
    call = SharedKeyGradients(
        scheduler, k_tiles, v_tiles, q, do, inverses, weights,
        Result(dk, v_tiles, dk_strides), Result(dv, k_tiles, dv_strides), work, scale, grad_scale, options,
    )  # fmt: skip
    gl.warp_specialize(
        [(compute_for_one, (True, CAUSAL, SPLIT, TERMS, call)),
         (compute_for_one, (False, CAUSAL, SPLIT, TERMS, call)),
         (copy_for_keys, (1, CAUSAL, TERMS, copies))],
        [4, 1], [240, 24] if TERMS == 1 else [232, 40],
    )  # fmt: skip


class SharedQueryGradients(NamedTuple):
    """What the two groups of warps with the same 64 queries share."""

    scheduler: Scheduler
    q_tiles: gl.shared_memory_descriptor
    do_tiles: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    weights: Weights
    lse: gl.tensor
    delta: gl.tensor
    inverse: gl.tensor
    dq: Result
    work: Work
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient


@gluon.jit
def weigh_keys(
    count, q_terms, k, weights, row_lse, row_inverse, begin, end, first, work, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, TERMS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of tiles of keys ``end − 1 … begin``, for the other group."""
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    for i in range(end - begin):
        slot = wait_full(k.full, count)
        logits = product_of_terms(q_terms, k.tiles, slot, TERMS, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k.empty.index(slot))
        n = (end - 1 - i) * BLOCK_N
        tile = weights_of(logits, row_lse, n, first, work, Options(), scale, k.tiles.dtype, MASKED, CAUSAL, LAYOUT)
        weights.tiles.index(slot).store(tile * row_inverse[:, None])
        mbarrier.arrive(weights.full.index(slot))
        count += 1
    return count


@gluon.jit
def compute_weights(CAUSAL: gl.constexpr, TERMS: gl.constexpr, call):
    """The first of two groups of warps with the same 64 queries, whose terms it has in registers."""
    scheduler, k, weights, work, scale = call.scheduler, call.k, call.weights, call.work, call.scale
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        begin, _, full, end = key_steps(block, split, work, Options(), CAUSAL, ROWS, BLOCK_N)
        m = block * ROWS
        first = m + work.keys - work.tokens  # the last query stands at the last key
        row_lse = load_row_values(call.lse, row, m, work.tokens, float("inf"), LAYOUT)
        row_inverse = load_row_values(call.inverse, row, m, work.tokens, 0.0, LAYOUT)
        q_terms = own_terms_in_registers(call.q_tiles, TERMS, LAYOUT)
        mbarrier.arrive(scheduler.empty.index(slot))
        count = weigh_keys(
            count, q_terms, k, weights, row_lse, row_inverse, full, end, first, work, scale,
            True, CAUSAL, TERMS, LAYOUT,
        )  # fmt: skip
        count = weigh_keys(
            count, q_terms, k, weights, row_lse, row_inverse, begin, full, first, work, scale,
            False, CAUSAL, TERMS, LAYOUT,
        )  # fmt: skip
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def compute_gradient(CAUSAL: gl.constexpr, TERMS: gl.constexpr, call):
    """The second of two groups of warps with the same 64 queries: adds up their gradient."""
    scheduler, k, v, weights, work = call.scheduler, call.k, call.v, call.weights, call.work
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    D: gl.constexpr = k.tiles.shape[4]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(D)
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    while tile < tiles:
        block, row, split = tile_place(tile, work, CAUSAL)
        begin, _, _, end = key_steps(block, split, work, Options(), CAUSAL, ROWS, BLOCK_N)
        m = block * ROWS
        row_delta = load_row_values(call.delta, row, m, work.tokens, 0.0, LAYOUT)
        dq = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        for _ in range(end - begin):
            stage = wait_full(v.full, count)
            dweights = product_of_terms(own_terms(call.do_tiles, 0, TERMS), v.tiles, stage, TERMS, LAYOUT)
            dweights = warpgroup_mma_wait(0, deps=[dweights])
            mbarrier.arrive(v.empty.index(stage))
            tile_weights = weights.tiles.index(wait_full(weights.full, count)).load(LAYOUT)
            dlogits = tile_weights * (dweights - row_delta[:, None])
            dq = add_product(dq, dlogits, k, count, TERMS, OUT_LAYOUT)
            count += 1
        mbarrier.arrive(scheduler.empty.index(slot))
        batch, head = row // work.heads, row % work.heads
        store_part(call.dq, dq * call.grad_scale, split, batch, head, m, work.tokens, OUT_LAYOUT)
        done += 1
        tile, slot = received(scheduler, done)


@gluon.jit
def hopper_shared_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, inverse, counters,
    work: Work, scale: gl.float32, grad_scale: gl.float32, dq_strides: SplitStrides,
    CAUSAL: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries, for tiles of 64. Descriptors, boxes and parts are as in `hopper_shared_key_kernel`.

    ``counters[1]`` is zero. It runs beside `hopper_shared_key_kernel`, of which it reads nothing, and does not end before
    that has ended.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_N, D], v_desc.layout)
    weight_tiles = weight_buffers(STAGES, BLOCK_N)
    scheduler = new_scheduler(counters + 1, 1, 2)
    k, v = new_ring(k_tiles, STAGES, 2), new_ring(v_tiles, STAGES, 1)
    weights = new_weights(weight_tiles, barriers(STAGES))
    fence_async_shared()
    copies = QueryCopies(scheduler, (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, k, v, work, Options())
    result = Result(dq, q_tiles, dq_strides)
    call = SharedQueryGradients(
        scheduler, q_tiles, do_tiles, k, v, weights, lse, delta, inverse, result, work, scale, grad_scale
    )
    gl.warp_specialize(
        [(compute_weights, (CAUSAL, TERMS, call)), (compute_gradient, (CAUSAL, TERMS, call)),
         (copy_for_queries, (1, CAUSAL, True, TERMS, copies))],
        [4, 1], [232, 40],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
