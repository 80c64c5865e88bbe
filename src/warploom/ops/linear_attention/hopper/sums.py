"""The sums of chunks, from which a scan makes the states before or behind them: see `triton.states`."""

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
from warploom.device.hopper.pipeline import matrix, thread_barrier, wait_full
from warploom.device.rows import StateStrides
from warploom.ops.linear_attention.hopper import encoding
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales

STAGES = gl.constexpr(4)


class Sums(NamedTuple):
    """Arguments that the warps of `hopper_sums_kernel` share."""

    ring: encoding.TileRing  # of b and c
    encoded: encoding.Encoded
    sines: gl.shared_memory_descriptor  # (2, BLOCK_T, W)
    states: gl.tensor
    totals: gl.tensor | None
    strides: StateStrides


@gluon.jit
def tile_number(call, i, REVERSE: gl.constexpr):
    """Returns the tile that is the ``i``-th in the loop."""
    return call.tiles - 1 - i if REVERSE else i


@gluon.jit
def copy_rows(descs, sums, call, REVERSE: gl.constexpr):
    """Runs the copying warp of `hopper_sums_kernel`."""
    for i in range(call.tiles):
        encoding.copy_tiles(descs, sums.ring, call.place, tile_number(call, i, REVERSE), i)


@gluon.jit
def encode_rows(form: gl.constexpr, REVERSE: gl.constexpr, sums, call):
    """Runs the encoding warps of `hopper_sums_kernel`."""
    ring, encoded = sums.ring, sums.encoded
    for i in range(call.tiles):
        slot = wait_full(ring.full, i)
        first = call.place.first + tile_number(call, i, REVERSE) * encoding.BLOCK_T
        if form.DECAY != "none" or form.KIND == "cosine":  # of weighed tiles and sines there are two
            if i >= 2:
                mbarrier.wait(ring.empty.index((i - 2) % STAGES), (i - 2) // STAGES & 1)
        if form.KIND == "cosine":
            b, c = matrix(ring.tiles[0], slot), matrix(ring.tiles[1], slot)
            encoding.store_sums(encoded.sums.index(i % 2), call, first, form)
            encoding.encode_parts((b,), (sums.sines.index(i % 2),), call.angles, first, 0, 2, form.ENCODERS, form)
            encoding.decay_tile(c, encoded, i, first, call, form, REVERSE)
        else:
            encoding.encode_tiles((ring.tiles[0],), encoded, i, first, call, form, REVERSE)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(encoded.full.index(slot))


@gluon.jit
def sum_rows(form: gl.constexpr, REVERSE: gl.constexpr, sums, call):
    """Runs the warps of `hopper_sums_kernel` that multiply."""
    ring, encoded, place = sums.ring, sums.encoded, call.place
    W: gl.constexpr = ring.tiles[0].shape[4]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    state = gl.zeros([W, W], gl.float32, STATE)
    if form.KIND == "cosine":
        of_sines = gl.zeros([W, W], gl.float32, STATE)
    chunk_total = 0.0
    for i in range(call.tiles):
        slot = wait_full(ring.full, i)
        if form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none":
            wait_full(encoded.full, i)
        b, c = matrix(ring.tiles[0], slot), matrix(ring.tiles[1], slot)
        if form.DECAY != "none":
            first = place.first + tile_number(call, i, REVERSE) * encoding.BLOCK_T
            total = encoding.sum_over_tile(call, encoded.sums.index(i % 2), first, form)
            chunk_total += total
            shrink = exponential(total)
            state *= shrink
            if form.KIND == "cosine":
                of_sines *= shrink
                c = encoded.weighed.index(i % 2)
            else:
                b = encoded.weighed.index(i % 2)
        state = warpgroup_mma(b.permute([1, 0]), c, state, is_async=True)
        if form.KIND == "cosine":
            of_sines = warpgroup_mma(sums.sines.index(i % 2).permute([1, 0]), c, of_sines, is_async=True)
            state, of_sines = warpgroup_mma_wait(0, deps=[state, of_sines])
        else:
            state = warpgroup_mma_wait(0, deps=[state])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(slot))
    encoding.store_state(sums.states, state, place, 0, 1.0, sums.strides, W, form, False)
    if form.KIND == "cosine":
        encoding.store_state(sums.states, of_sines, place, W, 1.0, sums.strides, W, form, False)
    if sums.totals is not None:
        gl.store(sums.totals + place.slot * call.sizes.heads + place.h, chunk_total)


@gluon.jit
def hopper_sums_kernel(
    b_desc, c_desc, states, totals, theta, offsets, cu_seqlens, decay, offset: gl.int32, sizes: LinearSizes,
    states_strides: StateStrides, form: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Computes what `sums_kernel` computes, of a chunk of a head: φ(b)ᵀ c with decays, from b and c (B, N, H, W).

    Descriptors are of (B, H, N, W) with boxes (1, 1, BLOCK_T, W). Of ``cosine`` the state has two parts.
    """
    W: gl.constexpr = b_desc.block_type.shape[3]
    dtype: gl.constexpr = b_desc.dtype
    place = locate(offsets, cu_seqlens, offset, sizes)
    ring = encoding.allocate_ring((b_desc, c_desc), STAGES, 1)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([encoding.BLOCK_T, W], dtype)
    sines = gl.allocate_shared_memory(dtype, [2, encoding.BLOCK_T, W if form.KIND == "cosine" else 64], TILE)
    sums = Sums(ring, encoding.allocate_encoded(STAGES, W, dtype, form), sines, states, totals, states_strides)
    scales = StateScales(1.0, 1.0, 1.0)
    call = encoding.load_call(theta, decay, place, sizes, scales, W, 4 * form.ENCODERS, form)
    fence_async_shared()
    thread_barrier()
    if form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none":
        gl.warp_specialize(
            [(sum_rows, (form, REVERSE, sums, call)), (encode_rows, (form, REVERSE, sums, call)),
             (copy_rows, ((b_desc, c_desc), sums, call, REVERSE))],
            [form.ENCODERS, 1], [form.ENCODER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(sum_rows, (form, REVERSE, sums, call)), (copy_rows, ((b_desc, c_desc), sums, call, REVERSE))],
            [1], [24],
        )  # fmt: skip
