"""The products that make gradients of keys and values, from the last tile to the first."""

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
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import as_factor, barriers, matrix, thread_barrier, wait_full
from warploom.device.rows import StateStrides
from warploom.ops.linear_attention.hopper import encoding
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales


class Keys(NamedTuple):
    """Arguments of the warps that multiply in `hopper_key_kernel`."""

    ring: encoding.TileRing
    encoded: encoding.Encoded
    state_tile: gl.shared_memory_descriptor
    state_full: (
        gl.shared_memory_descriptor
    )  # barriers: the state of the next tile is there, and that of this was read
    state_read: gl.shared_memory_descriptor
    outs: gl.shared_memory_descriptor  # (2, 1, 1, BLOCK_T, W)
    dk_desc: gl.tensor
    dv_desc: gl.tensor
    initial: gl.tensor | None
    final: gl.tensor | None
    initial_strides: StateStrides
    final_strides: StateStrides


@gluon.jit
def copy_keys(descs, ring, call):
    """Runs the copying warp of `hopper_key_kernel`."""
    for i in range(call.tiles):
        encoding.copy_tiles(descs, ring, call.place, call.tiles - 1 - i, i)


@gluon.jit
def encode_keys(form: gl.constexpr, ring, encoded, call):
    """Runs the encoding warps of `hopper_key_kernel`."""
    for i in range(call.tiles):
        slot = wait_full(ring.full, i)
        first = call.place.first + (call.tiles - 1 - i) * encoding.BLOCK_T
        encoding.encode_tiles((ring.tiles[0], ring.tiles[1]), encoded, i, first, call, form, True)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(encoded.full.index(slot))


@gluon.jit
def multiply_keys(own: gl.constexpr, form: gl.constexpr, keys, call):
    """Runs a group of warps of `hopper_key_kernel`: of the gradients of keys (0) or values (1), and 64 rows of the state."""
    place, ring, encoded, state_tile = call.place, keys.ring, keys.encoded, keys.state_tile
    W: gl.constexpr = state_tile.shape[0]
    dtype: gl.constexpr = state_tile.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, encoding.BLOCK_T, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    ENCODES: gl.constexpr = form.KIND != "none" or form.DECAY != "none"
    HOLDS: gl.constexpr = own * encoding.BLOCK_T < W  # rows of the state
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    out = keys.outs.index(own)
    if HOLDS:
        state = encoding.load_state(
            keys.initial,
            place,
            own * encoding.BLOCK_T,
            call.scales.into,
            keys.initial_strides,
            encoding.BLOCK_T,
            W,
            RESULT,
            form,
            False,
        )
        state_tile.slice(own * encoding.BLOCK_T, encoding.BLOCK_T, dim=0).store(state.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(keys.state_full)
    if HOLDS and form.DECAY == "head":
        state *= encoding.decay_over_tile(call, None, place.first + (call.tiles - 1) * encoding.BLOCK_T, form)
    of_head = encoding.form_head_decays(call, form, True, PAIRS)
    for i in range(call.tiles):
        first = place.first + (call.tiles - 1 - i) * encoding.BLOCK_T
        slot = wait_full(ring.full, i)
        if ENCODES:
            wait_full(encoded.full, i)
        q, k, v, grad = (
            matrix(ring.tiles[0], slot), matrix(ring.tiles[1], slot), matrix(ring.tiles[2], slot),
            matrix(ring.tiles[3], slot),
        )  # fmt: skip
        mbarrier.wait(keys.state_full, i & 1)
        zeros = gl.zeros([encoding.BLOCK_T, encoding.BLOCK_T], gl.float32, PAIRS)
        nothing = gl.zeros([encoding.BLOCK_T, W], gl.float32, RESULT)
        if own == 0:
            pairs = warpgroup_mma(v, grad.permute([1, 0]), zeros, use_acc=False, is_async=True)
            result = warpgroup_mma(v, state_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
        else:
            pairs = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            result = warpgroup_mma(k, state_tile, nothing, use_acc=False, is_async=True)
        pairs = warpgroup_mma_wait(1, deps=[pairs])
        decays = encoding.form_tile_decays(of_head, call, encoded.sums.index(slot), form, True, PAIRS)
        factor = as_factor(encoding.decay_scores(pairs, decays, form, True), dtype, RESULT)
        result = warpgroup_mma_wait(0, deps=[result])
        thread_barrier()
        mbarrier.arrive(keys.state_read)
        if form.DECAY != "none":
            sums, total = encoding.sum_decays(
                call, encoded.sums.index(slot), first, 0, encoding.BLOCK_T, form, gl.SliceLayout(1, RESULT)
            )
            result *= (exponential(total - sums) * call.scales.scale)[:, None]
        if HOLDS:
            given = q
            if form.DECAY != "none":
                given = encoded.weighed.index(slot)
                if form.DECAY == "token":
                    state *= exponential(total)
            state = warpgroup_mma(
                given.slice(own * encoding.BLOCK_T, encoding.BLOCK_T, dim=1).permute([1, 0]),
                grad,
                state,
                is_async=True,
            )
        if own == 0:
            result = warpgroup_mma(factor, q, result, is_async=True)
        else:
            result = warpgroup_mma(factor, grad, result, is_async=True)
        if HOLDS:
            state = warpgroup_mma_wait(1, deps=[state])
            mbarrier.wait(keys.state_read, i & 1)
            state_tile.slice(own * encoding.BLOCK_T, encoding.BLOCK_T, dim=0).store(state.to(dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(keys.state_full)
            if form.DECAY == "head":
                state *= encoding.decay_over_tile(call, None, first - encoding.BLOCK_T, form)
        result = warpgroup_mma_wait(0, deps=[result])
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(ring.empty.index(slot))
        if form.DECAY == "none":
            result *= call.scales.scale
        if own == 0:
            result = encoding.rotate_back(result, call.angles, first, form)
        matrix(keys.outs, own).store(result.to(dtype))
        fence_async_shared()
        thread_barrier()
        if own == 0:
            tma.async_copy_shared_to_global(keys.dk_desc, [b_entry, h, first, 0], out)
        else:
            tma.async_copy_shared_to_global(keys.dv_desc, [b_entry, h, first, 0], out)
    tma.store_wait(0)
    if HOLDS:
        encoding.store_state(
            keys.final, state, place, own * encoding.BLOCK_T, call.scales.out_of, keys.final_strides, W, form, False
        )


@gluon.jit
def hopper_key_kernel(
    q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, initial, final, theta, offsets, cu_seqlens, decay,
    offset: gl.int32, scales: StateScales, sizes: LinearSizes,
    initial_strides: StateStrides, final_strides: StateStrides, form: gl.constexpr,
):  # fmt: skip
    """Computes the gradients of keys and values of a chunk of a head, from its end to its start.

    ``initial`` and ``final`` are gradients of the states behind and before the chunk.
    """
    W: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    ENCODES: gl.constexpr = form.KIND != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    descs = (q_desc, k_desc, v_desc, grad_desc)
    ring = encoding.allocate_ring(descs, encoding.KEY_STAGES, 2)
    encoded = encoding.allocate_encoded(encoding.KEY_STAGES, W, dtype, form)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    outs = gl.allocate_shared_memory(dtype, [2, 1, 1, encoding.BLOCK_T, W], dk_desc.layout)
    state_full, state_read = barriers(1), barriers(1)
    mbarrier.init(state_full.index(0), count=W // encoding.BLOCK_T)
    mbarrier.init(state_read.index(0), count=2)
    call = encoding.load_call(theta, decay, place, sizes, scales, W, encoding.STRIDE, form)
    keys = Keys(
        ring, encoded, state_tile, state_full.index(0), state_read.index(0), outs, dk_desc, dv_desc, initial, final,
        initial_strides, final_strides,
    )  # fmt: skip
    fence_async_shared()
    thread_barrier()
    if ENCODES:
        gl.warp_specialize(
            [(multiply_keys, (0, form, keys, call)), (multiply_keys, (1, form, keys, call)),
             (encode_keys, (form, ring, encoded, call)), (copy_keys, (descs, ring, call))],
            [4, form.ENCODERS, 1], [form.GROUP_REGISTERS, form.ENCODER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(multiply_keys, (0, form, keys, call)), (multiply_keys, (1, form, keys, call)),
             (copy_keys, (descs, ring, call))],
            [4, 1], [form.GROUP_REGISTERS, 24],
        )  # fmt: skip
