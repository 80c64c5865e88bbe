"""The product that makes outputs, or gradients of queries, of cosines and sines: a state of each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.activations import activate, activate_backward, exponential
from warploom.device.chunks import locate
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import matrix, thread_barrier, wait_full
from warploom.device.rows import StateStrides
from warploom.ops.linear_attention.hopper import encoding
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales

ROWS = gl.constexpr(4 * encoding.WARPS)  # of a tile that are encoded at a time


@gluon.jit
def rotate_half_back(of_cosines, of_sines, cosine, sine, x, form: gl.constexpr, THETA: gl.constexpr):
    """Returns gradients (BLOCK_T / 2, W) of rows ``x``, or of what was encoded if nothing needs them, and of angles."""
    of_rows = gl.fma(of_cosines, cosine, of_sines * sine)
    of_angles = of_rows
    if THETA:
        of_angles = activate(x, form.ACTIVATION) * gl.fma(of_sines, cosine, -(of_cosines * sine))
    if form.ACTIVATION != "none":
        of_rows = activate_backward(x, of_rows, form.ACTIVATION)
    return of_rows, of_angles


@gluon.jit
def rotate_parts_back(of_cosines, of_sines, x_tile, angles, first, form: gl.constexpr, THETA: gl.constexpr):
    """Returns gradients (BLOCK_T, W) of the rows in ``x_tile`` from those of their parts, and if THETA of theta (W,)."""
    W: gl.constexpr = of_cosines.shape[1]
    one1, two1 = encoding.split_rows(of_cosines)
    one2, two2 = encoding.split_rows(of_sines)
    HALF: gl.constexpr = one1.type.layout
    x1, x2 = one1, two1
    if THETA or form.ACTIVATION != "none":
        x1, x2 = encoding.split_rows(x_tile.load(of_cosines.type.layout))
        x1, x2 = x1.to(gl.float32), x2.to(gl.float32)
    cosine, sine, by_cosine, by_sine = encoding.cos_sin_of_rows(angles, first, W, HALF)
    one, of_angles = rotate_half_back(one1, one2, cosine, sine, x1, form, THETA)
    cosine, sine = encoding.add_angles(cosine, sine, by_cosine, by_sine)
    two, more_angles = rotate_half_back(two1, two2, cosine, sine, x2, form, THETA)
    of_theta = 0.0
    if THETA:
        i = gl.arange(0, encoding.BLOCK_T // 2, gl.SliceLayout(1, HALF))
        i = i // encoding.STRIDE * (2 * encoding.STRIDE) + i % encoding.STRIDE
        n = angles.position.to(gl.int64) + first.to(gl.int64) + i
        of_angles *= n.to(gl.float32)[:, None]
        of_theta = gl.sum(gl.fma(more_angles, (n + encoding.STRIDE).to(gl.float32)[:, None], of_angles), 0)
    return encoding.join_rows(one, two), of_theta


@gluon.jit
def hopper_cosine_kernel(
    a_desc, b_desc, c_desc, x_desc, out_desc, initial, final, partial, theta, offsets, cu_seqlens, decay,
    offset: gl.int32, scales: StateScales, sizes: LinearSizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr, DECODED: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Computes `hopper_product_kernel` where ``φ`` has two parts, of cosines and of sines, and so has the state.

    Where there is an activation, or ``partial`` (slots, H, W) float64 for sums of theta's gradient, results if ``DECODED``
    are gradients of rows ``x``.
    """
    W: gl.constexpr = a_desc.block_type.shape[3]
    dtype: gl.constexpr = a_desc.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, encoding.BLOCK_T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([encoding.BLOCK_T, W], dtype)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [512 // W, W // 16], [encoding.WARPS, 1], [1, 0])
    place = locate(offsets, cu_seqlens, offset, sizes)
    THETA: gl.constexpr = partial is not None
    READS_X: gl.constexpr = x_desc is not None
    ANGLES: gl.constexpr = gl.BlockedLayout([1], [32], [encoding.WARPS], [0])
    descs = (a_desc, b_desc, c_desc)
    ring = encoding.allocate_ring(descs, 2, 1)
    x_ring = ring
    if READS_X:
        x_ring = encoding.allocate_ring((x_desc,), 1, 1)
    sines = gl.allocate_shared_memory(dtype, [1 if DECODED else 2, encoding.BLOCK_T, W], TILE)
    states = gl.allocate_shared_memory(dtype, [2, W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    weighed = gl.allocate_shared_memory(dtype, [encoding.BLOCK_T, W if form.DECAY != "none" else 64], TILE)
    pair_tile = gl.allocate_shared_memory(
        dtype,
        [encoding.BLOCK_T, encoding.BLOCK_T],
        gl.NVMMASharedLayout.get_default_for([encoding.BLOCK_T, encoding.BLOCK_T], dtype),
    )
    angles = encoding.load_angles(theta, place, sizes, W, (encoding.STRIDE, ROWS), form)
    fence_async_shared()
    thread_barrier()
    tiles = gl.maximum(place.last - place.first + encoding.BLOCK_T - 1, 0) // encoding.BLOCK_T
    call = encoding.ChunkCall(
        angles,
        place,
        encoding.point_to_decays(decay, place, sizes, form),
        encoding.load_head_decay(decay, place, sizes, form),
        sizes,
        tiles,
        scales,
    )
    sums_tile = encoding.allocate_sums(form).index(0)
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    for i in gl.static_range(2):
        if i < tiles:
            encoding.copy_tiles(descs, ring, place, tiles - 1 - i if REVERSE else i, i)
    state_c = encoding.load_state(initial, place, 0, scales.into, initial_strides, W, W, STATE, form, DECODED)
    state_s = encoding.load_state(initial, place, W, scales.into, initial_strides, W, W, STATE, form, DECODED)
    of_head = encoding.form_head_decays(call, form, REVERSE, PAIRS)
    theta_sum = gl.zeros([W], gl.float64, ANGLES)
    for i in range(tiles):
        slot = i % 2
        tile = tiles - 1 - i if REVERSE else i
        first = place.first + tile * encoding.BLOCK_T
        if READS_X:
            encoding.copy_tiles((x_desc,), x_ring, place, tile, i)
        a, b, c = matrix(ring.tiles[0], slot), matrix(ring.tiles[1], slot), matrix(ring.tiles[2], slot)
        states.index(0).store(state_c.to(dtype))
        states.index(1).store(state_s.to(dtype))
        wait_full(ring.full, i)
        encoding.store_sums(sums_tile, call, first, form)
        if DECODED:
            encoding.encode_parts((c,), (sines.index(0),), angles, first, 1, 1, encoding.WARPS, form)
        else:
            encoding.encode_parts(
                (a, b), (sines.index(0), sines.index(1)), angles, first, 1, 1, encoding.WARPS, form
            )
        if i > 0:  # the last result was stored from the buffers that the next tiles are copied to
            tma.store_wait(0)
            if i + 1 < tiles:
                encoding.copy_tiles(descs, ring, place, tiles - 2 - i if REVERSE else i + 1, i + 1)
        if form.DECAY != "none":
            plain = b if DECODED else c
            sums, total = encoding.sum_decays(
                call, sums_tile, first, 0, encoding.BLOCK_T, form, gl.SliceLayout(1, WIDE)
            )
            weights = exponential(sums) if REVERSE else exponential(total - sums)
            weighed.store((plain.load(WIDE).to(gl.float32) * weights[:, None]).to(dtype))
        fence_async_shared()
        thread_barrier()
        if form.DECAY != "none":
            sums, total = encoding.sum_decays(
                call, sums_tile, first, 0, encoding.BLOCK_T, form, gl.SliceLayout(1, RESULT)
            )
            carried = exponential(total - sums if REVERSE else sums) * scales.scale
            shrink = exponential(total)
            state_c *= shrink
            state_s *= shrink
        pairs = warpgroup_mma(
            a,
            b.permute([1, 0]),
            gl.zeros([encoding.BLOCK_T, encoding.BLOCK_T], gl.float32, PAIRS),
            use_acc=False,
            is_async=True,
        )
        if not DECODED:
            pairs = warpgroup_mma(sines.index(0), sines.index(1).permute([1, 0]), pairs, is_async=True)
        result = warpgroup_mma(
            a, states.index(0), gl.zeros([encoding.BLOCK_T, W], gl.float32, RESULT), use_acc=False, is_async=True
        )
        if DECODED:
            of_sines = warpgroup_mma(
                a,
                states.index(1),
                gl.zeros([encoding.BLOCK_T, W], gl.float32, RESULT),
                use_acc=False,
                is_async=True,
            )
        else:
            result = warpgroup_mma(sines.index(0), states.index(1), result, is_async=True)
        mine = weighed if form.DECAY != "none" else (b if DECODED else c)
        if DECODED:
            state_c = warpgroup_mma(mine.permute([1, 0]), c, state_c, is_async=True)
            state_s = warpgroup_mma(mine.permute([1, 0]), sines.index(0), state_s, is_async=True)
        else:
            state_c = warpgroup_mma(b.permute([1, 0]), mine, state_c, is_async=True)
            state_s = warpgroup_mma(sines.index(1).permute([1, 0]), mine, state_s, is_async=True)
        pairs = warpgroup_mma_wait(4, deps=[pairs])
        decays = encoding.form_tile_decays(of_head, call, sums_tile, form, REVERSE, PAIRS)
        pairs = encoding.decay_scores(pairs, decays, form, REVERSE)
        pair_tile.store(pairs.to(dtype))
        fence_async_shared()
        thread_barrier()
        if form.DECAY != "none":
            if DECODED:
                result, of_sines = warpgroup_mma_wait(2, deps=[result, of_sines])
                of_sines *= carried[:, None]
            else:
                result = warpgroup_mma_wait(2, deps=[result])
            result *= carried[:, None]
        result = warpgroup_mma(pair_tile, c, result, is_async=True)
        if DECODED:
            of_sines = warpgroup_mma(pair_tile, sines.index(0), of_sines, is_async=True)
            result, of_sines, state_c, state_s = warpgroup_mma_wait(0, deps=[result, of_sines, state_c, state_s])
            x_tile = a
            if READS_X:
                wait_full(x_ring.full, i)
                x_tile = matrix(x_ring.tiles[0], 0)
            result, of_theta = rotate_parts_back(result, of_sines, x_tile, angles, first, form, THETA)
            if THETA:
                theta_sum += gl.convert_layout(of_theta, ANGLES).to(gl.float64)
        else:
            result, state_c, state_s = warpgroup_mma_wait(0, deps=[result, state_c, state_s])
        if form.DECAY == "none":
            result *= scales.scale
        a.store(result.to(dtype))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [b_entry, h, first, 0], ring.tiles[0].index(slot))
        mbarrier.arrive(ring.empty.index(slot))
        if READS_X:
            mbarrier.arrive(x_ring.empty.index(0))
    tma.store_wait(0)
    encoding.store_state(final, state_c, place, 0, scales.out_of, final_strides, W, form, DECODED)
    encoding.store_state(final, state_s, place, W, scales.out_of, final_strides, W, form, DECODED)
    if THETA:
        if form.DECAY == "none":
            theta_sum *= scales.scale
        gl.store(partial + (place.slot * sizes.heads + place.h) * W + gl.arange(0, W, ANGLES), theta_sum)
