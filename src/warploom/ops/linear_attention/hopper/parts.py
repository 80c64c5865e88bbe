"""The product that makes outputs, or gradients of values, of cosines and sines of 128 features, a state of each."""

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

from warploom.device.activations import exponential
from warploom.device.chunks import locate
from warploom.device.decays import clamp_decay
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import (
    as_factor,
    barriers,
    init_each,
    init_ring,
    matrix,
    thread_barrier,
    wait_empty,
    wait_full,
)
from warploom.device.rows import StateStrides
from warploom.ops.linear_attention.hopper import encoding
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales

SINES = gl.constexpr(2)  # tiles whose sines and pairs there is room for
PIECE = gl.constexpr(32)  # columns of a state that become a factor at a time
AHEAD = gl.constexpr(2)  # see `encode_parts`
VEC = gl.constexpr(4)  # neighbouring features that a thread encodes


class CosineParts(NamedTuple):
    """Arguments that the warps of `hopper_parts_kernel` share."""

    descs: gl.tuple  # of a, b and c
    out_desc: gl.tensor
    tiles: gl.shared_memory_descriptor  # (3 · STAGES, 1, 1, BLOCK_T, W), of a, b and c
    rows_full: gl.shared_memory_descriptor  # a barrier for each stage: a and b are there
    c_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    sines: gl.shared_memory_descriptor  # (2 · SINES, BLOCK_T, W), of both tiles of rows
    sums: gl.shared_memory_descriptor  # (SINES, BLOCK_T), of decays: see `store_sums`
    pair_tiles: gl.shared_memory_descriptor  # (SINES, BLOCK_T, BLOCK_T)
    made: gl.shared_memory_descriptor  # barriers: each of SINES tiles is encoded; and the pairs of each are there
    initial: gl.tensor | None
    final: gl.tensor | None
    initial_strides: StateStrides
    final_strides: StateStrides


@gluon.jit
def copy_tiles_in(parts, full, first: gl.constexpr, behind: gl.constexpr, call, count, REVERSE: gl.constexpr):
    """Start to copy some of the ``count``-th tiles into their buffers."""
    slot = wait_empty(parts.empty, count)
    descs, buffers = (), ()
    for i in gl.static_range(first, behind):
        descs, buffers = descs + (parts.descs[i],), buffers + (parts.tiles.index(3 * slot + i),)
    encoding.copy_into(descs, buffers, full.index(slot), call.place, call.tiles - 1 - count if REVERSE else count)


@gluon.jit
def store_result(parts, call, count, REVERSE: gl.constexpr):
    """Waits for the ``count``-th result, and starts to copy it out of the buffer of its tile of ``c``."""
    place = call.place
    slot = wait_full(parts.empty, count)
    tile = call.tiles - 1 - count if REVERSE else count
    tma.async_copy_shared_to_global(
        parts.out_desc, [place.b.to(gl.int32), place.h.to(gl.int32), place.first + tile * encoding.BLOCK_T, 0],
        parts.tiles.index(3 * slot + 2),
    )  # fmt: skip


@gluon.jit
def encode_both(parts, call, form: gl.constexpr, BY_HEAD: gl.constexpr, REVERSE: gl.constexpr):
    """Runs the warps of `hopper_parts_kernel` that copy and encode."""
    tiles, sines, place = parts.tiles, parts.sines, call.place
    STAGES: gl.constexpr = parts.empty.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [form.ENCODERS], [0])
    for i in gl.static_range(STAGES):
        if i < call.tiles:
            copy_tiles_in(parts, parts.rows_full, 0, 2, call, i, REVERSE)
            copy_tiles_in(parts, parts.c_full, 2, 3, call, i, REVERSE)
    for i in range(call.tiles):
        slot, half = wait_full(parts.rows_full, i), i % SINES
        first = place.first + (call.tiles - 1 - i if REVERSE else i) * encoding.BLOCK_T
        if BY_HEAD:
            ends = gl.minimum(gl.arange(0, encoding.BLOCK_T, ONE) + 1, place.last - first)
            parts.sums.index(half).store(call.of_head * ends.to(gl.float32))
        else:
            encoding.store_sums(parts.sums.index(half), call, first, form)
        encoding.encode_parts(
            (matrix(tiles, 3 * slot), matrix(tiles, 3 * slot + 1)), (sines.index(2 * half), sines.index(2 * half + 1)),
            call.angles, first, 0, AHEAD, form.ENCODERS, form, VEC,
        )  # fmt: skip
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(parts.made.index(half))
        if i >= SINES:  # the result before the last is stored from its buffer
            tma.store_wait(0)
            if i + 1 < call.tiles:
                copy_tiles_in(parts, parts.c_full, 2, 3, call, i + 1, REVERSE)
        if i > 0:
            store_result(parts, call, i - 1, REVERSE)
            if i + 2 < call.tiles:
                copy_tiles_in(parts, parts.rows_full, 0, 2, call, i + 2, REVERSE)
    if call.tiles > 0:
        store_result(parts, call, call.tiles - 1, REVERSE)
        tma.store_wait(0)


@gluon.jit
def take_piece(state, number: gl.constexpr):
    """Returns PIECE columns of a state of 128: its ``number``-th quarter."""
    one, two = state.reshape([state.shape[0], 2, 2 * PIECE]).permute([0, 2, 1]).split()
    half = one if number < 2 else two
    one, two = half.reshape([state.shape[0], 2, PIECE]).permute([0, 2, 1]).split()
    return one if number % 2 == 0 else two


@gluon.jit
def multiply_parts(own: gl.constexpr, form: gl.constexpr, REVERSE: gl.constexpr, parts, call):
    """Runs a group of warps of `hopper_parts_kernel`: of half of the columns of results and states, all transposed.

    It makes the pairs of every other tile, for both groups.
    """
    tiles, place = parts.tiles, call.place
    W: gl.constexpr = parts.sines.shape[2]
    HALF: gl.constexpr = W // 2
    PIECES: gl.constexpr = W // PIECE
    dtype: gl.constexpr = parts.sines.dtype
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, encoding.BLOCK_T, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    initial, final = parts.initial, parts.final
    if initial is not None:
        initial += own * HALF * parts.initial_strides.e
    if final is not None:
        final += own * HALF * parts.final_strides.e
    state_c = encoding.load_state(
        initial, place, 0, call.scales.into, parts.initial_strides, HALF, W, STATE, form, True
    )
    state_s = encoding.load_state(
        initial, place, W, call.scales.into, parts.initial_strides, HALF, W, STATE, form, True
    )
    for i in range(call.tiles):
        slot, half = wait_full(parts.rows_full, i), i % SINES
        wait_full(parts.c_full, i)
        mbarrier.wait(parts.made.index(half), i // SINES & 1)
        a_c, b_c, c = matrix(tiles, 3 * slot), matrix(tiles, 3 * slot + 1), matrix(tiles, 3 * slot + 2)
        a_s, b_s, sums = parts.sines.index(2 * half), parts.sines.index(2 * half + 1), parts.sums.index(half)
        mine = c.slice(own * HALF, HALF, dim=1)
        if half == own:
            pairs = gl.zeros([encoding.BLOCK_T, encoding.BLOCK_T], gl.float32, RESULT)
            pairs = warpgroup_mma(a_c, b_c.permute([1, 0]), pairs, use_acc=False, is_async=True)
            pairs = warpgroup_mma(a_s, b_s.permute([1, 0]), pairs, is_async=True)
            pairs = warpgroup_mma_wait(0, deps=[pairs])
            if form.DECAY == "none":
                pairs = encoding.decay_scores(pairs, 0.0, form, REVERSE)
            else:
                pairs *= encoding.form_decays_between(call, sums, form, REVERSE, RESULT, 0, encoding.BLOCK_T)
            parts.pair_tiles.index(half).store(pairs.to(dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(parts.made.index(SINES + half))
        result = gl.zeros([HALF, encoding.BLOCK_T], gl.float32, RESULT)
        for j in gl.static_range(2 * PIECES):  # a piece at a time: there are no registers for more
            piece = take_piece(state_c if j < PIECES else state_s, j % PIECES)
            a = (a_c if j < PIECES else a_s).slice(j % PIECES * PIECE, PIECE, dim=1)
            result = warpgroup_mma(
                as_factor(piece, dtype, RESULT), a.permute([1, 0]), result, use_acc=j > 0, is_async=True
            )
            result = warpgroup_mma_wait(1, deps=[result])
        result = warpgroup_mma_wait(0, deps=[result])
        if form.DECAY != "none":
            each, total = encoding.sum_decays(call, sums, 0, 0, encoding.BLOCK_T, form, gl.SliceLayout(0, RESULT))
            result *= (exponential(total - each if REVERSE else each) * call.scales.scale)[None, :]
            shrink = exponential(total)
            state_c *= shrink
            state_s *= shrink
            each, total = encoding.sum_decays(call, sums, 0, 0, encoding.BLOCK_T, form, gl.SliceLayout(0, FACTOR))
            weights = exponential(each if REVERSE else total - each)
            given = (mine.permute([1, 0]).load(FACTOR).to(gl.float32) * weights[None, :]).to(dtype)
        mbarrier.wait(parts.made.index(SINES + half), i // SINES & 1)
        values = mine.permute([1, 0])
        if form.DECAY == "none":
            given = values.load(FACTOR)
            values = as_factor(given, dtype, RESULT)
        result = warpgroup_mma(values, parts.pair_tiles.index(half).permute([1, 0]), result, is_async=True)
        state_c = warpgroup_mma(given, b_c, state_c, is_async=True)
        state_s = warpgroup_mma(given, b_s, state_s, is_async=True)
        result, state_c, state_s = warpgroup_mma_wait(0, deps=[result, state_c, state_s])
        if form.DECAY == "none":
            result *= call.scales.scale
        mine.permute([1, 0]).store(result.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(parts.empty.index(slot))
    encoding.store_state(final, state_c, place, 0, call.scales.out_of, parts.final_strides, W, form, True)
    encoding.store_state(final, state_s, place, W, call.scales.out_of, parts.final_strides, W, form, True)


@gluon.jit
def hopper_parts_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    scales: StateScales, sizes: LinearSizes, initial_strides: StateStrides, final_strides: StateStrides, form: gl.constexpr,
    BY_HEAD: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Computes `hopper_product_kernel` where ``φ`` has two parts of 128 features, of cosines and of sines, and so has the state.

    Each of two groups of warps has half of the columns of both states, transposed: so a state becomes the first factor
    of the product with rows of ``a`` without leaving its registers. Decays are those of tokens, or all are the head's.
    """
    W: gl.constexpr = a_desc.block_type.shape[3]
    dtype: gl.constexpr = a_desc.dtype
    place = locate(offsets, cu_seqlens, offset, sizes)
    stored = gl.allocate_shared_memory(
        dtype, [3 * encoding.PRODUCT_STAGES, 1, 1, encoding.BLOCK_T, W], c_desc.layout
    )
    rows_full, c_full, empty = (
        barriers(encoding.PRODUCT_STAGES),
        barriers(encoding.PRODUCT_STAGES),
        barriers(encoding.PRODUCT_STAGES),
    )
    init_ring(rows_full, empty, 2)
    init_each(c_full)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([encoding.BLOCK_T, W], dtype)
    sines = gl.allocate_shared_memory(dtype, [2 * SINES, encoding.BLOCK_T, W], TILE)
    pair_tiles = gl.allocate_shared_memory(
        dtype,
        [SINES, encoding.BLOCK_T, encoding.BLOCK_T],
        gl.NVMMASharedLayout.get_default_for([encoding.BLOCK_T, encoding.BLOCK_T], dtype),
    )
    made = barriers(2 * SINES)
    init_each(made)
    tiles = gl.maximum(place.last - place.first + encoding.BLOCK_T - 1, 0) // encoding.BLOCK_T
    angles = encoding.load_angles(theta, place, sizes, W, (VEC // 2 * form.ENCODERS,), form)
    of_head = 0.0
    if BY_HEAD:
        of_head = clamp_decay(gl.load(decay + place.h * sizes.decay_h).to(gl.float32))
    call = encoding.ChunkCall(
        angles, place, encoding.point_to_decays(decay, place, sizes, form), of_head, sizes, tiles, scales
    )
    # What partitions are given lies in shared memory, of which there is no more: so no strides of entries and heads.
    if initial is not None:
        initial += place.slot * initial_strides.s + place.h * initial_strides.h
    if final is not None:
        final += place.slot * final_strides.s + place.h * final_strides.h
    parts = CosineParts(
        (a_desc, b_desc, c_desc), out_desc, stored, rows_full, c_full, empty, sines, encoding.allocate_sums(form),
        pair_tiles, made, initial, final, StateStrides(0, 0, initial_strides.f, initial_strides.e),
        StateStrides(0, 0, final_strides.f, final_strides.e),
    )  # fmt: skip
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [(multiply_parts, (0, form, REVERSE, parts, call)), (multiply_parts, (1, form, REVERSE, parts, call)),
         (encode_both, (parts, call, form, BY_HEAD, REVERSE))],
        [4, form.ENCODERS], [form.GROUP_REGISTERS, form.ENCODER_REGISTERS],
    )  # fmt: skip
