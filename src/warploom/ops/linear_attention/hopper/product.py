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
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import matrix, thread_barrier, wait_full
from warploom.ops.linear_attention.hopper.encoding import (
    PRODUCT_STAGES,
    STRIDE,
    ChunkCall,
    Encoded,
    T,
    TileRing,
    copy_tiles,
    decay_of_head,
    decay_of_tokens,
    decay_over,
    decays_of,
    decays_of_head,
    decays_of_tile,
    decoded,
    encode_tiles,
    load_angles,
    load_state,
    new_encoded,
    new_tiles,
    part_rows,
    store_state,
    weigh_pairs,
)
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales, StateStrides, locate


class Product(NamedTuple):
    """What the warps that multiply have in `hopper_product_kernel`."""

    rows: TileRing
    others: TileRing
    encoded: Encoded
    state_tile: gl.shared_memory_descriptor
    pair_tile: gl.shared_memory_descriptor
    out_desc: gl.tensor
    initial: gl.tensor | None
    final: gl.tensor | None
    initial_strides: StateStrides
    final_strides: StateStrides


@gluon.jit
def copy_product(row_descs, other_descs, rows, others, call):
    """The copying warp of `hopper_product_kernel`."""
    for i in range(call.tiles):
        copy_tiles(other_descs, others, call.place, i, i)
        copy_tiles(row_descs, rows, call.place, i, i)


@gluon.jit
def encode_product(form: gl.constexpr, DECODED: gl.constexpr, rows, others, encoded, call):
    """The encoding warps of `hopper_product_kernel`."""
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
        encode_tiles(tiles, encoded, i, call.place.first + i * T, call, form, False)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(encoded.full.index(slot))


@gluon.jit
def multiply_product(form: gl.constexpr, DECODED: gl.constexpr, product, call):
    """The warps of `hopper_product_kernel` that multiply."""
    place, first_tile = call.place, call.place.first
    rows, others, encoded, state_tile, pair_tile = (
        product.rows, product.others, product.encoded, product.state_tile, product.pair_tile,
    )  # fmt: skip
    W: gl.constexpr = state_tile.shape[0]
    STAGES: gl.constexpr = rows.full.shape[0]
    dtype: gl.constexpr = state_tile.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    state = load_state(
        product.initial, place, 0, call.scales.into, product.initial_strides, W, W, STATE, form, DECODED
    )
    state_tile.store(state.to(dtype))
    if form.DECAY == "head":
        state *= decay_over(call, None, first_tile, form)
    of_head = decays_of_head(call, form, False, PAIRS)
    for i in range(call.tiles):
        slot = i % STAGES
        first = first_tile + i * T
        fence_async_shared()
        thread_barrier()
        if i > 0:
            tma.async_copy_shared_to_global(
                product.out_desc, [b_entry, h, first - T, 0], rows.tiles[0].index((i - 1) % STAGES)
            )
            mbarrier.arrive(others.empty.index((i - 1) % STAGES))
        wait_full(rows.full, i)
        wait_full(others.full, i)
        if ENCODES:
            wait_full(encoded.full, i)
        if form.DECAY == "token":
            state *= decay_over(call, encoded.sums.index(i % 2), first, form)
        a, b, c = matrix(rows.tiles[0], slot), matrix(others.tiles[0], slot), matrix(others.tiles[1], slot)
        pairs = warpgroup_mma(
            a, b.permute([1, 0]), gl.zeros([T, T], gl.float32, PAIRS), use_acc=False, is_async=True
        )
        result = warpgroup_mma(a, state_tile, gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True)
        if form.DECAY == "none":
            state = warpgroup_mma(b.permute([1, 0]), c, state, is_async=True)
        else:
            sums, _ = decays_of(call, encoded.sums.index(i % 2), first, 0, T, form, gl.SliceLayout(1, RESULT))
            carried = exponential(sums) * call.scales.scale
            mine = encoded.weighed.index(i % 2)
            if DECODED:
                state = warpgroup_mma(b.permute([1, 0]), mine, state, is_async=True)
            else:
                state = warpgroup_mma(mine.permute([1, 0]), c, state, is_async=True)
        decays = decays_of_tile(of_head, call, encoded.sums.index(i % 2), form, False, PAIRS)
        pairs = warpgroup_mma_wait(2, deps=[pairs])
        pair_tile.store(weigh_pairs(pairs, decays, form, False).to(dtype))
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
            state *= decay_over(call, None, first + T, form)
        result = warpgroup_mma_wait(0, deps=[result])
        if form.DECAY == "none":
            result *= call.scales.scale
        if DECODED:
            result = decoded(result, call.angles, first, form)
        a.store(result.to(dtype))
    fence_async_shared()
    thread_barrier()
    if call.tiles > 0:
        last = call.tiles - 1
        tma.async_copy_shared_to_global(
            product.out_desc, [b_entry, h, first_tile + last * T, 0], rows.tiles[0].index(last % STAGES)
        )
        tma.store_wait(0)
    store_state(product.final, state, place, 0, call.scales.out_of, product.final_strides, W, form, DECODED)


@gluon.jit
def hopper_product_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    scales: StateScales, sizes: LinearSizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr, DECODED: gl.constexpr,
):  # fmt: skip
    """What `triton.product` computes forwards, of a chunk of a head.

    Descriptors are of (B, H, N, W) with boxes (1, 1, T, W). ``a`` and ``b`` are encoded, or ``DECODED`` ``c``.
    """
    W: gl.constexpr = a_desc.block_type.shape[3]
    dtype: gl.constexpr = a_desc.dtype
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    rows = new_tiles((a_desc,), PRODUCT_STAGES, 1)
    others = new_tiles((b_desc, c_desc), PRODUCT_STAGES, 1)
    encoded = new_encoded(PRODUCT_STAGES, W, dtype, form)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    pair_tile = gl.allocate_shared_memory(dtype, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], dtype))
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    angles = load_angles(theta, place, sizes, W, (STRIDE, part_rows(W, form.ENCODERS)), form)
    of_head = decay_of_head(decay, place, sizes, form)
    call = ChunkCall(angles, place, decay_of_tokens(decay, place, sizes, form), of_head, sizes, tiles, scales)
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
