"""The product that makes outputs, or gradients of queries, without an encoding or with rotations."""

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
from warploom.device.hopper.pipeline import matrix, thread_barrier, wait_full
from warploom.device.rows import StateStrides
from warploom.ops.linear_attention.hopper import encoding
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales


class Product(NamedTuple):
    """Arguments of the warps that multiply in `hopper_product_kernel`."""

    rows: encoding.TileRing
    others: encoding.TileRing
    encoded: encoding.Encoded
    state_tile: gl.shared_memory_descriptor
    pair_tile: gl.shared_memory_descriptor
    out_desc: gl.tensor
    initial: gl.tensor | None
    final: gl.tensor | None
    initial_strides: StateStrides
    final_strides: StateStrides


@gluon.jit
def copy_product(row_descs, other_descs, rows, others, call):
    """Runs the copying warp of `hopper_product_kernel`."""
    for i in range(call.tiles):
        encoding.copy_tiles(other_descs, others, call.place, i, i)
        encoding.copy_tiles(row_descs, rows, call.place, i, i)


@gluon.jit
def encode_product(form: gl.constexpr, DECODED: gl.constexpr, rows, others, encoded, call):
    """Runs the encoding warps of `hopper_product_kernel`."""
    STAGES: gl.constexpr = encoded.full.shape[0]
    for i in range(call.tiles):
        slot = wait_full(others.full, i)
        if form.DECAY != "none":  # the tile before the last was multiplied, and its weighed one with it
            if i >= 2:
                mbarrier.wait(others.empty.index((i - 2) % STAGES), (i - 2) // STAGES & 1)
        if DECODED:
            tiles = (others.tiles[1],)
        else:
            wait_full(rows.full, i)
            tiles = (others.tiles[0], rows.tiles[0])
        encoding.encode_tiles(tiles, encoded, i, call.place.first + i * encoding.BLOCK_T, call, form, False)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(encoded.full.index(slot))


@gluon.jit
def multiply_product(form: gl.constexpr, DECODED: gl.constexpr, product, call):
    """Runs the warps of `hopper_product_kernel` that multiply."""
    place, first_tile = call.place, call.place.first
    rows, others, encoded, state_tile, pair_tile = (
        product.rows, product.others, product.encoded, product.state_tile, product.pair_tile,
    )  # fmt: skip
    W: gl.constexpr = state_tile.shape[0]
    STAGES: gl.constexpr = rows.full.shape[0]
    dtype: gl.constexpr = state_tile.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, encoding.BLOCK_T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    state = encoding.load_state(
        product.initial, place, 0, call.scales.into, product.initial_strides, W, W, STATE, form, DECODED
    )
    state_tile.store(state.to(dtype))
    if form.DECAY == "head":
        state *= encoding.decay_over_tile(call, None, first_tile, form)
    of_head = encoding.form_head_decays(call, form, False, PAIRS)
    for i in range(call.tiles):
        slot = i % STAGES
        first = first_tile + i * encoding.BLOCK_T
        fence_async_shared()
        thread_barrier()
        if i > 0:
            tma.async_copy_shared_to_global(
                product.out_desc, [b_entry, h, first - encoding.BLOCK_T, 0], rows.tiles[0].index((i - 1) % STAGES)
            )
            mbarrier.arrive(others.empty.index((i - 1) % STAGES))
        wait_full(rows.full, i)
        wait_full(others.full, i)
        if ENCODES:
            wait_full(encoded.full, i)
        if form.DECAY == "token":
            state *= encoding.decay_over_tile(call, encoded.sums.index(i % 2), first, form)
        a, b, c = matrix(rows.tiles[0], slot), matrix(others.tiles[0], slot), matrix(others.tiles[1], slot)
        pairs = warpgroup_mma(
            a,
            b.permute([1, 0]),
            gl.zeros([encoding.BLOCK_T, encoding.BLOCK_T], gl.float32, PAIRS),
            use_acc=False,
            is_async=True,
        )
        result = warpgroup_mma(
            a, state_tile, gl.zeros([encoding.BLOCK_T, W], gl.float32, RESULT), use_acc=False, is_async=True
        )
        if form.DECAY == "none":
            state = warpgroup_mma(b.permute([1, 0]), c, state, is_async=True)
        else:
            sums, _ = encoding.sum_decays(
                call, encoded.sums.index(i % 2), first, 0, encoding.BLOCK_T, form, gl.SliceLayout(1, RESULT)
            )
            carried = exponential(sums) * call.scales.scale
            mine = encoded.weighed.index(i % 2)
            if DECODED:
                state = warpgroup_mma(b.permute([1, 0]), mine, state, is_async=True)
            else:
                state = warpgroup_mma(mine.permute([1, 0]), c, state, is_async=True)
        decays = encoding.form_tile_decays(of_head, call, encoded.sums.index(i % 2), form, False, PAIRS)
        pairs = warpgroup_mma_wait(2, deps=[pairs])
        pair_tile.store(encoding.decay_scores(pairs, decays, form, False).to(dtype))
        tma.store_wait(0)
        fence_async_shared()
        thread_barrier()
        if i > 0:
            mbarrier.arrive(rows.empty.index((i - 1) % STAGES))
        if form.DECAY != "none":
            result = warpgroup_mma_wait(1, deps=[result])
            result *= carried[:, None]
        result = warpgroup_mma(pair_tile, c, result, is_async=True)
        state = warpgroup_mma_wait(1, deps=[state])
        state_tile.store(state.to(dtype))
        if form.DECAY == "head":  # not between products that run, which would wait for each other then
            state *= encoding.decay_over_tile(call, None, first + encoding.BLOCK_T, form)
        result = warpgroup_mma_wait(0, deps=[result])
        if form.DECAY == "none":
            result *= call.scales.scale
        if DECODED:
            result = encoding.rotate_back(result, call.angles, first, form)
        a.store(result.to(dtype))
    fence_async_shared()
    thread_barrier()
    if call.tiles > 0:
        last = call.tiles - 1
        tma.async_copy_shared_to_global(
            product.out_desc,
            [b_entry, h, first_tile + last * encoding.BLOCK_T, 0],
            rows.tiles[0].index(last % STAGES),
        )
        tma.store_wait(0)
    encoding.store_state(
        product.final, state, place, 0, call.scales.out_of, product.final_strides, W, form, DECODED
    )


@gluon.jit
def hopper_product_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    scales: StateScales, sizes: LinearSizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr, DECODED: gl.constexpr,
):  # fmt: skip
    """Computes what `triton.product` computes forwards, of a chunk of a head.

    Descriptors are of (B, H, N, W) with boxes (1, 1, BLOCK_T, W). ``a`` and ``b`` are encoded, or ``DECODED`` ``c``.
    """
    W: gl.constexpr = a_desc.block_type.shape[3]
    dtype: gl.constexpr = a_desc.dtype
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    rows = encoding.allocate_ring((a_desc,), encoding.PRODUCT_STAGES, 1)
    others = encoding.allocate_ring((b_desc, c_desc), encoding.PRODUCT_STAGES, 1)
    encoded = encoding.allocate_encoded(encoding.PRODUCT_STAGES, W, dtype, form)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    pair_tile = gl.allocate_shared_memory(
        dtype,
        [encoding.BLOCK_T, encoding.BLOCK_T],
        gl.NVMMASharedLayout.get_default_for([encoding.BLOCK_T, encoding.BLOCK_T], dtype),
    )
    call = encoding.load_call(theta, decay, place, sizes, scales, W, encoding.STRIDE, form)
    product = Product(
        rows, others, encoded, state_tile, pair_tile, out_desc, initial, final, initial_strides, final_strides,
    )  # fmt: skip
    fence_async_shared()
    thread_barrier()
    if ENCODES:
        gl.warp_specialize(
            [(multiply_product, (form, DECODED, product, call)),
             (encode_product, (form, DECODED, rows, others, encoded, call)),
             (copy_product, ((a_desc,), (b_desc, c_desc), rows, others, call))],
            [form.ENCODERS, 1], [form.ENCODER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(multiply_product, (form, DECODED, product, call)),
             (copy_product, ((a_desc,), (b_desc, c_desc), rows, others, call))],
            [1], [24],
        )  # fmt: skip
