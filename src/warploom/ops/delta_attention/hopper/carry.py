"""Kernels that carry states through chunks on Hopper, and their gradients back: what `triton.scan` does.

A program holds 64 columns of a head's state, transposed, in the registers of one group of warps. What a product gives
is the first factor of the next one as it lies there; what chunks hold is brought to shared memory by another warp.
Values and gradients of outputs lie in buffers from which results of their size leave.
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

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import (
    Ring,
    as_factor,
    barriers,
    init_ring,
    matrix,
    new_ring,
    thread_barrier,
    wait_empty,
    wait_full,
)
from warploom.device.rows import StateStrides
from warploom.ops.delta_attention.hopper.scan import BLOCK_E, publish, state_pointers
from warploom.ops.delta_attention.triton.scan import find_sequence
from warploom.ops.delta_attention.triton.tiles import DeltaSizes

BLOCK_T = gl.constexpr(32)  # tokens of a chunk
STAGES = gl.constexpr(4)
VALUE_STAGES = gl.constexpr(6)


class Held(NamedTuple):
    """Buffers that chunks pass through."""

    rows: gl.tuple  # of (STAGES, 1, 1, T, D) each
    pairs: gl.shared_memory_descriptor  # (STAGES, 1, 1, T, T)
    full: gl.shared_memory_descriptor  # barriers of both
    empty: gl.shared_memory_descriptor
    taken: Ring  # (VALUE_STAGES, 1, 1, T, E)
    states: gl.shared_memory_descriptor  # (2, 1, 1, E, D), on their way out


@gluon.jit
def allocate(row_descs, pairs_desc, values_desc, states_desc):
    """Returns the buffers, with their barriers."""
    dtype: gl.constexpr = values_desc.dtype
    D: gl.constexpr = row_descs[0].block_type.shape[3]
    rows = ()
    for i in gl.static_range(len(row_descs)):
        rows = rows + (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_T, D], row_descs[i].layout),)
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, 1)
    pairs, states = full, full
    if pairs_desc is not None:
        pairs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_T, BLOCK_T], pairs_desc.layout)
    if states_desc is not None:
        states = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_E, D], states_desc.layout)
    values = gl.allocate_shared_memory(dtype, [VALUE_STAGES, 1, 1, BLOCK_T, BLOCK_E], values_desc.layout)
    return Held(rows, pairs, full, empty, new_ring(values, VALUE_STAGES, 1), states)


@gluon.jit
def copy_chunks(
    REVERSE: gl.constexpr, OF_TOKENS: gl.constexpr, row_descs, pairs_desc, values_desc, held, place, count
):
    """Runs the warp that copies. ``OF_TOKENS``: the values are rows (B, H, N, E), not of chunks (slots, H, T, E)."""
    PAIRS: gl.constexpr = pairs_desc is not None
    b, h, first = place.b.to(gl.int32), place.h.to(gl.int32), place.slot.to(gl.int32)
    for i in range(count):
        c = count - 1 - i if REVERSE else i
        slot = wait_empty(held.empty, i)
        full = held.full.index(slot)
        mbarrier.expect(
            full, len(row_descs) * row_descs[0].block_type.nbytes + (pairs_desc.block_type.nbytes if PAIRS else 0)
        )
        for n in gl.static_range(len(row_descs)):
            tma.async_copy_global_to_shared(row_descs[n], [first + c, h, 0, 0], full, held.rows[n].index(slot))
        if PAIRS:
            tma.async_copy_global_to_shared(pairs_desc, [first + c, h, 0, 0], full, held.pairs.index(slot))
        slot = wait_empty(held.taken.empty, i)
        full = held.taken.full.index(slot)
        mbarrier.expect(full, values_desc.block_type.nbytes)
        column = place.column * BLOCK_E
        if OF_TOKENS:
            tma.async_copy_global_to_shared(
                values_desc, [b, h, c * BLOCK_T, column], full, held.taken.tiles.index(slot)
            )
        else:
            tma.async_copy_global_to_shared(
                values_desc, [first + c, h, 0, column], full, held.taken.tiles.index(slot)
            )


@gluon.jit
def load_kept(kept, c, place, sizes, D: gl.constexpr, STATE: gl.constexpr, DECAY: gl.constexpr):
    """Returns the decays over a chunk: a number of a head, (1, D) of features."""
    at = (place.slot + c) * sizes.heads + place.h
    if DECAY == "feature":
        found = gl.load(kept + at * D + gl.arange(0, D, gl.SliceLayout(0, STATE)))[None, :]
    elif DECAY == "head":
        found = gl.load(kept + at)
    else:
        found = 1.0
    return found


@gluon.jit
def carry_chunks(
    DECAY: gl.constexpr, out_desc, states_desc, updates_desc, kept, initial, final, initial_strides, final_strides, held,
    place, sizes,
):  # fmt: skip
    """Runs the warps of `hopper_carry_kernel` that multiply."""
    D: gl.constexpr = held.rows[0].shape[4]
    dtype: gl.constexpr = held.rows[0].dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    if initial is None:
        state = gl.zeros([BLOCK_E, D], gl.float32, STATE)
    else:
        state = gl.load(state_pointers(initial, place, initial_strides, D, STATE)).to(gl.float32)
    zeros = gl.zeros([BLOCK_E, BLOCK_T], gl.float32, RESULT)
    b, h, first = place.b.to(gl.int32), place.h.to(gl.int32), place.slot.to(gl.int32)
    column = place.column * BLOCK_E
    count = (place.length + BLOCK_T - 1) // BLOCK_T
    following = load_kept(kept, 0, place, sizes, D, STATE, DECAY)
    for c in range(count):
        whole = following  # loaded a chunk ahead
        following = load_kept(kept, gl.minimum(c + 1, count - 1), place, sizes, D, STATE, DECAY)
        before = as_factor(state, dtype, RESULT)
        slot = wait_full(held.full, c)
        # (1) Uᵀ = (T β V)ᵀ − Sᵀ (T β K̃)ᵀ, and Oᵀ = Sᵀ Q̃ᵀ
        update = warpgroup_mma(
            before, matrix(held.rows[0], slot).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        if out_desc is not None:
            result = warpgroup_mma(
                before, matrix(held.rows[2], slot).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
        i = wait_full(held.taken.full, c)
        values = matrix(held.taken.tiles, i).permute([1, 0])
        own = gl.convert_layout(values.load(gl.DotOperandLayout(0, RESULT, 2)), RESULT).to(gl.float32)
        if states_desc is not None:
            matrix(held.states, c % 2).store(state.to(dtype))
        update = warpgroup_mma_wait(0 if out_desc is None else 1, deps=[update])
        given = as_factor(own - update, dtype, RESULT)
        # (2) Sᵀ = Sᵀ decayed + Uᵀ K̂, and Oᵀ = Oᵀ + Uᵀ Pᵀ
        if DECAY != "none":
            state *= whole
        state = warpgroup_mma(given, matrix(held.rows[1], slot), state, is_async=True)
        if out_desc is not None:
            result = warpgroup_mma(given, matrix(held.pairs, slot).permute([1, 0]), result, is_async=True)
            state, result = warpgroup_mma_wait(0, deps=[state, result])
            values.store((result * sizes.scale).to(dtype))
        else:
            values.store((own - update).to(dtype))
            state = warpgroup_mma_wait(0, deps=[state])
        publish(held.taken.empty, c, VALUE_STAGES)
        mbarrier.arrive(held.empty.index(slot))
        if out_desc is not None:
            tma.async_copy_shared_to_global(out_desc, [b, h, c * BLOCK_T, column], held.taken.tiles.index(i))
        if states_desc is not None:
            tma.async_copy_shared_to_global(updates_desc, [first + c, h, 0, column], held.taken.tiles.index(i))
            tma.async_copy_shared_to_global(states_desc, [first + c, h, column, 0], held.states.index(c % 2))
    tma.store_wait(0)
    if final is not None:
        gl.store(state_pointers(final, place, final_strides, D, STATE), state)


@gluon.jit
def hopper_carry_kernel(
    from_start_desc, until_end_desc, scores_desc, corrected_desc, predicted_desc, kept, initial, out_desc, final,
    states_desc, updates_desc, cu_seqlens, sizes: DeltaSizes, initial_strides: StateStrides, final_strides: StateStrides,
    DECAY: gl.constexpr,
):  # fmt: skip
    """Computes what `triton.scan.scan_kernel` does: outputs, or states and updates for the backward."""
    place = find_sequence(cu_seqlens, sizes)
    count = (place.length + BLOCK_T - 1) // BLOCK_T
    descs, pairs_desc = (predicted_desc, until_end_desc), None
    if out_desc is not None:
        descs, pairs_desc = (predicted_desc, until_end_desc, from_start_desc), scores_desc
    held = allocate(descs, pairs_desc, corrected_desc, states_desc)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [(carry_chunks, (DECAY, out_desc, states_desc, updates_desc, kept, initial, final, initial_strides,
                         final_strides, held, place, sizes)),
         (copy_chunks, (False, False, descs, pairs_desc, corrected_desc, held, place, count))],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def carry_back(
    DECAY: gl.constexpr, states_desc, updates_desc, kept, last, first, last_strides, first_strides, held, place, sizes,
    count,
):  # fmt: skip
    """Runs the warps of `hopper_carry_back_kernel` that multiply."""
    D: gl.constexpr = held.rows[0].shape[4]
    dtype: gl.constexpr = held.rows[0].dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    if last is None:
        state = gl.zeros([BLOCK_E, D], gl.float32, STATE)
    else:
        state = gl.load(state_pointers(last, place, last_strides, D, STATE)).to(gl.float32) / sizes.scale
    zeros = gl.zeros([BLOCK_E, BLOCK_T], gl.float32, RESULT)
    h, of_chunks, column = place.h.to(gl.int32), place.slot.to(gl.int32), place.column * BLOCK_E
    following = load_kept(kept, count - 1, place, sizes, D, STATE, DECAY)
    for i in range(count):
        c = count - 1 - i
        whole = following  # loaded a chunk ahead
        following = load_kept(kept, gl.maximum(c - 1, 0), place, sizes, D, STATE, DECAY)
        behind = as_factor(state, dtype, RESULT)
        j = wait_full(held.taken.full, i)
        values = matrix(held.taken.tiles, j).permute([1, 0])
        given = values.load(gl.DotOperandLayout(0, RESULT, 2))
        slot = wait_full(held.full, i)
        # (1) dUᵀ = dOᵀ P + dSᵀ K̂ᵀ
        update = warpgroup_mma(given, matrix(held.pairs, slot), zeros, use_acc=False, is_async=True)
        update = warpgroup_mma(behind, matrix(held.rows[1], slot).permute([1, 0]), update, is_async=True)
        matrix(held.states, i % 2).store(state.to(dtype))
        update = warpgroup_mma_wait(0, deps=[update])
        # (2) dSᵀ = dSᵀ decayed + dOᵀ Q̃ − dUᵀ T β K̃
        if DECAY != "none":
            state *= whole
        state = warpgroup_mma(given, matrix(held.rows[2], slot), state, is_async=True)
        state = warpgroup_mma(as_factor(-update, dtype, RESULT), matrix(held.rows[0], slot), state, is_async=True)
        values.store(update.to(dtype))
        state = warpgroup_mma_wait(0, deps=[state])
        publish(held.taken.empty, i, VALUE_STAGES)
        mbarrier.arrive(held.empty.index(slot))
        tma.async_copy_shared_to_global(updates_desc, [of_chunks + c, h, 0, column], held.taken.tiles.index(j))
        tma.async_copy_shared_to_global(states_desc, [of_chunks + c, h, column, 0], held.states.index(i % 2))
    tma.store_wait(0)
    if first is not None:
        state *= sizes.scale
        gl.store(state_pointers(first, place, first_strides, D, STATE), state.to(first.dtype.element_ty))


@gluon.jit
def hopper_carry_back_kernel(
    from_start_desc, until_end_desc, scores_desc, predicted_desc, kept, grad_desc, last, first, states_desc,
    updates_desc, cu_seqlens, sizes: DeltaSizes, last_strides: StateStrides, first_strides: StateStrides, DECAY: gl.constexpr,
):  # fmt: skip
    """Computes what `triton.scan.reverse_scan_kernel` does."""
    place = find_sequence(cu_seqlens, sizes)
    count = (place.length + BLOCK_T - 1) // BLOCK_T
    descs = (predicted_desc, until_end_desc, from_start_desc)
    held = allocate(descs, scores_desc, grad_desc, states_desc)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [(carry_back, (DECAY, states_desc, updates_desc, kept, last, first, last_strides, first_strides, held, place,
                       sizes, count)),
         (copy_chunks, (True, True, descs, scores_desc, grad_desc, held, place, count))],
        [1], [24],
    )  # fmt: skip
