"""Backward of tensor-product attention for Hopper, in the manner of `attention.kernels.hopper.forward`.

The kernel for queries is flash attention's, to which tiles of keys and values come formed. That for keys forms the keys
and values it owns for one head after the other, walks over that head's queries as flash attention does, and turns the
gradients of the tile, which never leave the registers, into those of its factors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper.attention import Work, query_steps, tile_place, tiles_of
from warploom.device.hopper.attention_backward import (
    OWN_STAGES,
    KeyCopies,
    QueryGradients,
    compute_for_queries,
    copy_for_keys,
    query_loop,
)
from warploom.device.hopper.pipeline import ROWS, Result, matrix, new_ring, new_row_ring, new_scheduler, received
from warploom.ops.tpa.attention.kernels.hopper.forward import NUMBERS, copy_for_queries, form_tiles


@gluon.jit(do_not_specialize=[*NUMBERS, "slope"])
def tpa_hopper_query_kernel(
    q_desc, bk_desc, bv_desc, do_desc, dq_desc, ak, av, shift, delta, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, rows: gl.int32, blocks: gl.int32,
    stride: gl.int32, scale: gl.float32, slope: gl.float32,
    RANK: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, F_STAGES: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Gradients of Q, times ``slope``. Descriptors are as in `tpa_hopper_forward_kernel`; ``tickets[1]`` is zero.

    It runs beside `tpa_hopper_key_kernel`, of which it reads nothing, and does not end before that has ended.
    """
    GROUPS: gl.constexpr = 2
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = bv_desc.block_type.shape[3]
    CHUNK: gl.constexpr = bk_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], do_desc.layout)
    dq_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], dq_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], q_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], q_desc.layout)
    bk_tiles = gl.allocate_shared_memory(dtype, [F_STAGES, 1, RANK, CHUNK, D], bk_desc.layout)
    bv_tiles = gl.allocate_shared_memory(dtype, [F_STAGES, 1, RANK, CHUNK, E], bv_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_weights = gl.allocate_shared_memory(gl.float32, [RANK * BLOCK_N], plain)
    v_weights = gl.allocate_shared_memory(gl.float32, [RANK * BLOCK_N], plain)
    work = Work(tokens, keys, heads, 1, rows, blocks, rows, 1, 0)
    scheduler = new_scheduler(tickets + 1, 1, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, STAGES, GROUPS)
    k_factors, v_factors = new_ring(bk_tiles, F_STAGES, 1), new_ring(bv_tiles, F_STAGES, 1)
    fence_async_shared()
    result = Result(dq_desc, dq_tiles, None)
    computing = QueryGradients(scheduler, q_tiles, do_tiles, k, v, shift, delta, result, work, scale, slope)
    operands = ((ak, k_weights, k, k_factors), (av, v_weights, v, v_factors))
    forming = (scheduler, work, stride)
    copying = (
        scheduler,
        (q_desc, do_desc),
        bk_desc,
        bv_desc,
        (q_tiles, do_tiles),
        k_factors,
        v_factors,
        work,
        BLOCK_N,
    )
    gl.warp_specialize(
        [(compute_for_queries, (0, False, CAUSAL, False, computing)),
         (compute_for_queries, (1, False, CAUSAL, False, computing)),
         (form_tiles, (GROUPS, CAUSAL, EXACT, operands, forming)), (copy_for_queries, (GROUPS, CAUSAL, copying))],
        [4, 4, 1], [208, 72, 24],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def load_factor(b, n, r, keys, f, F: gl.constexpr, strides, LAYOUT: gl.constexpr):
    """Features ``f`` of the feature factors (64, …) of one rank. Strides come divided by 8, for wide loads."""
    stride_m, stride_r = strides
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    there = (n + m < keys)[:, None] & (f < F)[None, :]
    start = b + (n.to(gl.int64) * stride_m + r * stride_r) * 8
    return gl.load(start + (m * (stride_m * 8))[:, None] + f[None, :], mask=there, other=0.0)


@gluon.jit
def load_rows(a, n, r, keys, stride, LAYOUT: gl.constexpr):
    """Head factors (64,) of one head and rank."""
    m = n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(a + r * stride + m, mask=m < keys, other=0.0)


@gluon.jit
def form_own(a, b, tile, n, keys, stride, strides, RANK: gl.constexpr, F: gl.constexpr):
    """Form the keys or values that a group owns."""
    BLOCK_F: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_F, BLOCK_F // 8], [4, 1], [1, 0])
    f = gl.arange(0, BLOCK_F, gl.SliceLayout(0, LAYOUT))
    total = gl.zeros([ROWS, BLOCK_F], gl.float32, LAYOUT)
    for r in gl.static_range(RANK):
        factor = load_factor(b, n, r, keys, f, F, strides, LAYOUT)
        total += load_rows(a, n, r, keys, stride, LAYOUT)[:, None] * factor.to(gl.float32)
    tile.store(total.to(tile.dtype))


@gluon.jit
def leave_half(
    gradient, half: gl.constexpr, b, weight, sums, n, r, keys, strides, add, RANK: gl.constexpr, F: gl.constexpr
):
    """Add half of the features of a gradient, times head factors ``weight``, to ``sums``; its product with factors."""
    LAYOUT: gl.constexpr = gradient.type.layout
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    f = half * gradient.shape[1] + gl.arange(0, gradient.shape[1], gl.SliceLayout(0, LAYOUT))
    factor = load_factor(b, n, r, keys, f, F, strides, LAYOUT)
    inside = (n + m < keys)[:, None] & (f < F)[None, :]
    cells = sums + n.to(gl.int64) * (RANK * F) + r * F + (m * (RANK * F))[:, None] + f[None, :]
    before = gl.load(cells, mask=inside & add, other=0.0)
    gl.store(cells, before + gradient * gl.convert_layout(weight, gl.SliceLayout(1, LAYOUT))[:, None], mask=inside)
    return gl.sum(gradient * factor.to(gl.float32), 1)


@gluon.jit
def leave(
    gradient, a, b, da, sums, n, keys, stride, strides, da_strides, factor_scale, add,
    RANK: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """From the gradient (64, BLOCK_F) of one head's keys or values: store that of ``a``, and that of ``b`` in ``sums``.

    With ``add`` it is added to what is there, which this very thread has stored. Half of the features at a time: there
    are no registers for the factors of all beside the gradients.
    """
    da_m, da_r = da_strides
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    left, right = gradient.reshape([ROWS, 2, gradient.shape[1] // 2]).permute([0, 2, 1]).split()
    for r in gl.static_range(RANK):
        weight = load_rows(a, n, r, keys, stride, LAYOUT)
        along = leave_half(left, 0, b, weight, sums, n, r, keys, strides, add, RANK, F)
        along += leave_half(right, 1, b, weight, sums, n, r, keys, strides, add, RANK, F)
        along = gl.convert_layout(along, gl.SliceLayout(1, LAYOUT)) * factor_scale
        gl.store(da + (n + m).to(gl.int64) * da_m + r * da_r, along.to(da.dtype.element_ty), mask=n + m < keys)


@gluon.jit
def compute_for_keys(
    group: gl.constexpr, RANK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, CAUSAL: gl.constexpr, arguments
):  # fmt: skip
    """A group of warps of `tpa_hopper_key_kernel`."""
    (
        scheduler, ak, av, bk, bv, dak, dav, k_sums, v_sums, q, do, k_tiles, v_tiles,
        bk_b, bk_strides, bv_b, bv_strides, dak_b, dak_h, dak_strides, dav_b, dav_h, dav_strides,
        work, shares, stride, zero, scale, slope, k_slope, v_slope,
    ) = arguments  # fmt: skip
    tokens, keys, heads, rows = work.tokens, work.keys, work.heads, work.rows
    GROUPS: gl.constexpr = k_tiles.shape[0]
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    BLOCK_D: gl.constexpr = q.tiles.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    k_tile, v_tile = matrix(k_tiles, group), matrix(v_tiles, group)
    share_heads = heads // shares
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    mbarrier.arrive(scheduler.empty.index(slot))
    while tile < tiles:
        block, row, _ = tile_place(tile, work, False)
        entry, share = row // shares, row % shares
        begin, full, end = query_steps(block, 0, work, CAUSAL, BLOCK_N, BLOCK_M)
        n = block * BLOCK_N + group * ROWS
        first = n - (keys - tokens)
        bk_entry, bv_entry = bk + entry.to(gl.int64) * bk_b * 8, bv + entry.to(gl.int64) * bv_b * 8
        place = (share * (rows // shares) + entry).to(gl.int64) * keys
        k_places, v_places = k_sums + place * (RANK * D), v_sums + place * (RANK * E)
        for member in range(share_heads):
            head = share * share_heads + member
            # Addresses that seem to depend on the head: else those of whole tiles are held in registers over all heads.
            here = n + member * zero
            head_row = (entry * heads + head).to(gl.int64)
            ak_row, av_row = ak + head_row * (RANK * stride), av + head_row * (RANK * stride)
            form_own(ak_row, bk_entry, k_tile, here, keys, stride, bk_strides, RANK, D)
            form_own(av_row, bv_entry, v_tile, here, keys, stride, bv_strides, RANK, E)
            fence_async_shared()
            dk = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT_LAYOUT)
            dv = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT_LAYOUT)
            if CAUSAL:
                dk, dv, count = query_loop(
                    dk, dv, count, k_tile, v_tile, q, do, begin, full, first, scale, True, LAYOUT, OUT_LAYOUT
                )
            dk, dv, count = query_loop(
                dk, dv, count, k_tile, v_tile, q, do, full, end, first, scale, False, LAYOUT, OUT_LAYOUT
            )
            leave(
                dv, av_row, bv_entry, dav + entry.to(gl.int64) * dav_b + head * dav_h, v_places, here, keys, stride,
                bv_strides, dav_strides, v_slope, member > 0, RANK, E, OUT_LAYOUT,
            )  # fmt: skip
            leave(
                dk * slope, ak_row, bk_entry, dak + entry.to(gl.int64) * dak_b + head * dak_h, k_places, here, keys,
                stride, bk_strides, dak_strides, k_slope, member > 0, RANK, D, OUT_LAYOUT,
            )  # fmt: skip
        done += 1
        tile, slot = received(scheduler, done)
        mbarrier.arrive(scheduler.empty.index(slot))


KEY_NUMBERS = (
    "tokens keys heads shares rows blocks stride zero bk_b bk_m bk_r bv_b bv_m bv_r "
    "dak_b dak_m dak_h dak_r dav_b dav_m dav_h dav_r scale slope k_slope v_slope"
).split()


@gluon.jit(do_not_specialize=KEY_NUMBERS)
def tpa_hopper_key_kernel(
    q_desc, do_desc, ak, av, bk, bv, shift, delta, dak, dav, k_sums, v_sums, tickets,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, shares: gl.int32, rows: gl.int32, blocks: gl.int32,
    stride: gl.int32, zero: gl.int32,
    bk_b: gl.int32, bk_m: gl.int32, bk_r: gl.int32, bv_b: gl.int32, bv_m: gl.int32, bv_r: gl.int32,
    dak_b: gl.int32, dak_m: gl.int32, dak_h: gl.int32, dak_r: gl.int32,
    dav_b: gl.int32, dav_m: gl.int32, dav_h: gl.int32, dav_r: gl.int32,
    scale: gl.float32, slope: gl.float32, k_slope: gl.float32, v_slope: gl.float32,
    RANK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of the factors of keys and values, for tiles of 128 keys and a share of the heads.

    Descriptors are of Q and its gradients' (B, H, N, D) in boxes of (1, 1, BLOCK_M, D). ``k_sums`` (shares, B, M, R, D)
    and ``v_sums``, float32, get the sums of every share. ``tickets[0]`` is zero once the launch before has ended, for
    which this one waits before it reads. Only then may the launch after it, of `tpa_hopper_query_kernel`, start where this
    one leaves multiprocessors idle: that finds complete what both read.
    """
    GROUPS: gl.constexpr = 2
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(tickets, OWN_STAGES, GROUPS)
    q, do = new_row_ring(q_tiles, STAGES, GROUPS, shifts), new_row_ring(do_tiles, STAGES, GROUPS, deltas)
    fence_async_shared()
    work = Work(tokens, keys, heads, heads // shares, rows, blocks, rows, 1, 0)
    copying = KeyCopies(scheduler, (), (), q_desc, do_desc, q, do, shift, delta, None, None, work)
    computing = (
        scheduler, ak, av, bk, bv, dak, dav, k_sums, v_sums, q, do, k_tiles, v_tiles,
        bk_b, (bk_m, bk_r), bv_b, (bv_m, bv_r), dak_b, dak_h, (dak_m, dak_r), dav_b, dav_h, (dav_m, dav_r),
        work, shares, stride, zero, scale, slope, k_slope, v_slope,
    )  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize(
        [(compute_for_keys, (0, RANK, D, E, CAUSAL, computing)), (compute_for_keys, (1, RANK, D, E, CAUSAL, computing)),
         (copy_for_keys, (GROUPS, CAUSAL, 1, copying))],
        [4, 1], [240, 24],
    )  # fmt: skip
