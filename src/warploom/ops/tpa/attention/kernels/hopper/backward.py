"""Backward of tensor-product attention for Hopper, in the manner of `attention.kernels.hopper.forward`.

The kernel for queries is flash attention's, to which tiles of keys and values come formed. That for keys forms the keys
and values it owns for one head after the other, goes over that head's queries as flash attention does, and turns the
gradients of the tile, which never leave the registers, into those of its factors.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper.attention import Options, Work, query_steps, tile_place, tiles_of
from warploom.device.hopper.attention_backward import (
    OWN_STAGES,
    KeyCopies,
    QueryGradients,
    compute_for_queries,
    copy_for_keys,
    query_loop,
)
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    RowRing,
    Scheduler,
    matrix,
    new_ring,
    new_row_ring,
    new_scheduler,
    received,
)
from warploom.ops.tpa.attention.kernels.hopper.forward import Copies, Forming, Operand, copy_for_queries, form_tiles


class KeySizes(NamedTuple):
    """Sizes of a call, as `tpa_hopper_key_kernel` takes them."""

    tokens: gl.int32
    keys: gl.int32
    heads: gl.int32
    groups: gl.int32  # of heads
    rows: gl.int32  # batch entries times groups
    blocks: gl.int32  # tiles of keys
    stride: gl.int32  # of ranks in head factors
    zero: gl.int32


class FactorStrides(NamedTuple):
    """Strides of feature factors (B, M, R, F), divided by 8 for wide loads."""

    b: gl.int32
    m: gl.int32
    r: gl.int32


class GradientStrides(NamedTuple):
    """Strides of the gradient (B, M, H, R) of head factors."""

    b: gl.int32
    m: gl.int32
    h: gl.int32
    r: gl.int32


class KeyScales(NamedTuple):
    """What `tpa_hopper_key_kernel` multiplies."""

    logits: gl.float32  # also by what makes powers of two of them
    dk: gl.float32
    k: gl.float32
    v: gl.float32


class Factors(NamedTuple):
    """Keys or values as factors in memory, with where their gradients go; of all heads, or at those of one head."""

    a: gl.tensor  # head factors (B, H, R, M), float32
    b: gl.tensor  # feature factors
    da: gl.tensor
    sums: gl.tensor  # gradient of b, float32, each group of heads' own
    strides: FactorStrides
    da_strides: GradientStrides
    scale: gl.float32  # of keys or values


class KeyGradients(NamedTuple):
    """What groups of warps that own keys share."""

    scheduler: Scheduler
    k: Factors
    v: Factors
    q: RowRing
    do: RowRing
    k_tiles: gl.shared_memory_descriptor  # one for each group of warps, as is the next
    v_tiles: gl.shared_memory_descriptor
    work: Work
    sizes: KeySizes
    scale: gl.float32  # of the logits, in powers of two
    grad_scale: gl.float32  # of the gradient of keys


@gluon.jit
def tpa_hopper_query_kernel(
    q_desc, bk_desc, bv_desc, do_desc, dq_desc, ak, av, lse, delta, counters,
    tokens: gl.int32, keys: gl.int32, heads: gl.int32, rows: gl.int32, blocks: gl.int32,
    stride: gl.int32, scale: gl.float32, grad_scale: gl.float32,
    RANK: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, F_STAGES: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Gradients of Q, times ``grad_scale``. Descriptors are as in `tpa_hopper_forward_kernel`; ``counters[1]`` is zero.

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
    scheduler = new_scheduler(counters + 1, 1, GROUPS + 1)  # the groups that compute, and the one that forms
    k = new_ring(k_tiles, STAGES, GROUPS)
    v = new_ring(v_tiles, STAGES, GROUPS)
    k_factors = new_ring(bk_tiles, F_STAGES, 1)
    v_factors = new_ring(bv_tiles, F_STAGES, 1)
    fence_async_shared()
    result = Result(dq_desc, dq_tiles, None)
    computing = QueryGradients(
        scheduler, q_tiles, do_tiles, k, v, lse, delta, result, work, scale, grad_scale, Options()
    )
    operands = (Operand(ak, k_weights, k, k_factors), Operand(av, v_weights, v, v_factors))
    forming = Forming(scheduler, work, stride)
    copies = Copies(scheduler, (q_desc, do_desc), (q_tiles, do_tiles), bk_desc, bv_desc, k_factors, v_factors, work)
    gl.warp_specialize(
        [(compute_for_queries, (0, False, CAUSAL, False, computing)),
         (compute_for_queries, (1, False, CAUSAL, False, computing)),
         (form_tiles, (GROUPS, CAUSAL, EXACT, operands, forming)),
         (copy_for_queries, (GROUPS, CAUSAL, BLOCK_N, copies))],
        [4, 4, 1], [208, 72, 24],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def load_features(x, n, r, keys, f, F: gl.constexpr, LAYOUT: gl.constexpr):
    """Features ``f`` of the feature factors (64, …) of one rank."""
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    mask = (n + m < keys)[:, None] & (f < F)[None, :]
    start = x.b + (n.to(gl.int64) * x.strides.m + r * x.strides.r) * 8
    return gl.load(start + (m * (x.strides.m * 8))[:, None] + f[None, :], mask=mask, other=0.0)


@gluon.jit
def load_heads(x, n, r, keys, stride, LAYOUT: gl.constexpr):
    """Head factors (64,) of one rank."""
    m = n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(x.a + r * stride + m, mask=m < keys, other=0.0)


@gluon.jit
def form_own(x, tile, n, keys, stride, RANK: gl.constexpr, F: gl.constexpr):
    """Form the keys or values that a group owns."""
    BLOCK_F: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_F, BLOCK_F // 8], [4, 1], [1, 0])
    f = gl.arange(0, BLOCK_F, gl.SliceLayout(0, LAYOUT))
    total = gl.zeros([ROWS, BLOCK_F], gl.float32, LAYOUT)
    for r in gl.static_range(RANK):
        factor = load_features(x, n, r, keys, f, F, LAYOUT)
        total += load_heads(x, n, r, keys, stride, LAYOUT)[:, None] * factor.to(gl.float32)
    tile.store(total.to(tile.dtype))


@gluon.jit
def add_half(gradient, half: gl.constexpr, x, weight, n, r, keys, add, RANK: gl.constexpr, F: gl.constexpr):
    """Add half of the features of a gradient, times head factors ``weight``, to the sums; its product with factors."""
    LAYOUT: gl.constexpr = gradient.type.layout
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    f = half * gradient.shape[1] + gl.arange(0, gradient.shape[1], gl.SliceLayout(0, LAYOUT))
    factor = load_features(x, n, r, keys, f, F, LAYOUT)
    mask = (n + m < keys)[:, None] & (f < F)[None, :]
    ptrs = x.sums + n.to(gl.int64) * (RANK * F) + r * F + (m * (RANK * F))[:, None] + f[None, :]
    before = gl.load(ptrs, mask=mask & add, other=0.0)
    gl.store(ptrs, before + gradient * gl.convert_layout(weight, gl.SliceLayout(1, LAYOUT))[:, None], mask=mask)
    return gl.sum(gradient * factor.to(gl.float32), 1)


@gluon.jit
def store_gradients(
    gradient, x, da, n, keys, stride, add, RANK: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr
):
    """From the gradient (64, BLOCK_F) of one head's keys or values: store that of head factors, add up that of features.

    With ``add`` it is added to what is there, which this very thread has stored. Half of the features at a time: there
    are no registers for the factors of all beside the gradients.
    """
    m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    left, right = gradient.reshape([ROWS, 2, gradient.shape[1] // 2]).permute([0, 2, 1]).split()
    for r in gl.static_range(RANK):
        weight = load_heads(x, n, r, keys, stride, LAYOUT)
        along = add_half(left, 0, x, weight, n, r, keys, add, RANK, F)
        along += add_half(right, 1, x, weight, n, r, keys, add, RANK, F)
        along = gl.convert_layout(along, gl.SliceLayout(1, LAYOUT)) * x.scale
        ptrs = da + (n + m).to(gl.int64) * x.da_strides.m + r * x.da_strides.r
        gl.store(ptrs, along.to(da.dtype.element_ty), mask=n + m < keys)


@gluon.jit
def compute_for_keys(
    own: gl.constexpr, RANK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, CAUSAL: gl.constexpr, call
):  # fmt: skip
    """Group number ``own`` of warps of `KeyGradients`."""
    scheduler, k, v, q, do, k_tiles, v_tiles, work, sizes, scale, grad_scale = call
    tokens, keys, heads, groups, rows, _, stride, zero = sizes
    GROUPS: gl.constexpr = k_tiles.shape[0]
    BLOCK_M: gl.constexpr = q.tiles.shape[3]
    BLOCK_D: gl.constexpr = q.tiles.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    k_tile, v_tile = matrix(k_tiles, own), matrix(v_tiles, own)
    group_heads = heads // groups
    count = 0
    done = 0
    tiles = tiles_of(work)
    tile, slot = received(scheduler, done)
    mbarrier.arrive(scheduler.empty.index(slot))
    while tile < tiles:
        block, row, _ = tile_place(tile, work, False)
        batch, group = row // groups, row % groups
        begin, full, _, end = query_steps(block, 0, work, Options(), CAUSAL, BLOCK_N, BLOCK_M)
        n = block * BLOCK_N + own * ROWS
        first = n - (keys - tokens)
        bk, bv = k.b + batch.to(gl.int64) * k.strides.b * 8, v.b + batch.to(gl.int64) * v.strides.b * 8
        offset = (group * (rows // groups) + batch).to(gl.int64) * keys
        k_sums, v_sums = k.sums + offset * (RANK * D), v.sums + offset * (RANK * E)
        for member in range(group_heads):
            head = group * group_heads + member
            # Addresses that seem to depend on the head: else those of whole tiles are held in registers over all heads.
            here = n + member * zero
            head_row = (batch * heads + head).to(gl.int64)
            ak, av = k.a + head_row * (RANK * stride), v.a + head_row * (RANK * stride)
            own_k = Factors(ak, bk, k.da, k_sums, k.strides, k.da_strides, k.scale)
            own_v = Factors(av, bv, v.da, v_sums, v.strides, v.da_strides, v.scale)
            form_own(own_k, k_tile, here, keys, stride, RANK, D)
            form_own(own_v, v_tile, here, keys, stride, RANK, E)
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
            dav = v.da + batch.to(gl.int64) * v.da_strides.b + head * v.da_strides.h
            store_gradients(dv, own_v, dav, here, keys, stride, member > 0, RANK, E, OUT_LAYOUT)
            dk = dk * grad_scale
            dak = k.da + batch.to(gl.int64) * k.da_strides.b + head * k.da_strides.h
            store_gradients(dk, own_k, dak, here, keys, stride, member > 0, RANK, D, OUT_LAYOUT)
        done += 1
        tile, slot = received(scheduler, done)
        mbarrier.arrive(scheduler.empty.index(slot))


@gluon.jit
def tpa_hopper_key_kernel(
    q_desc, do_desc, ak, av, bk, bv, lse, delta, dak, dav, k_sums, v_sums, counters,
    sizes: KeySizes, bk_strides: FactorStrides, bv_strides: FactorStrides,
    dak_strides: GradientStrides, dav_strides: GradientStrides,
    scales: KeyScales,
    RANK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of the factors of keys and values, for tiles of 128 keys and a group of heads.

    Descriptors are of Q and its gradients' (B, H, N, D) in boxes of (1, 1, BLOCK_M, D). ``k_sums`` (groups, B, M, R, D)
    and ``v_sums``, float32, get the sums of every group. ``counters[0]`` is zero once the launch before has ended, for
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
    row_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    row_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(counters, OWN_STAGES, GROUPS)
    q = new_row_ring(q_tiles, STAGES, GROUPS, row_lse)
    do = new_row_ring(do_tiles, STAGES, GROUPS, row_delta)
    fence_async_shared()
    rows, heads = sizes.rows, sizes.heads
    work = Work(sizes.tokens, sizes.keys, heads, heads // sizes.groups, rows, sizes.blocks, rows, 1, 0)
    copies = KeyCopies(scheduler, (), (), q_desc, do_desc, q, do, lse, delta, None, None, work, Options())
    k = Factors(ak, bk, dak, k_sums, bk_strides, dak_strides, scales.k)
    v = Factors(av, bv, dav, v_sums, bv_strides, dav_strides, scales.v)
    computing = KeyGradients(scheduler, k, v, q, do, k_tiles, v_tiles, work, sizes, scales.logits, scales.dk)
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize(
        [(compute_for_keys, (0, RANK, D, E, CAUSAL, computing)), (compute_for_keys, (1, RANK, D, E, CAUSAL, computing)),
         (copy_for_keys, (GROUPS, CAUSAL, 1, copies))],
        [4, 1], [240, 24],
    )  # fmt: skip
