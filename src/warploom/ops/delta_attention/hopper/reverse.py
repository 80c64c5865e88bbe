"""Scans of the backward on Hopper, 64 tokens at a time: the states before chunks, and back, their gradients.

They go on from `hopper.matrices` as `hopper.scan` does. States, corrected values and gradients of both are written for
`hopper.gradients`. Queries and keys are encoded, and all gradients are over the scale.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import as_factor, matrix, thread_barrier, wait_full
from warploom.device.rows import StateStrides
from warploom.ops.delta_attention.hopper.scan import (
    BACKWARD_FACTORS,
    BACKWARD_VALUE_STAGES,
    BLOCK_E,
    BLOCK_T,
    allocate,
    copy_chunks,
    load_initial,
    load_whole,
    publish,
    state_pointers,
)
from warploom.ops.delta_attention.triton.scan import find_sequence
from warploom.ops.delta_attention.triton.tiles import DeltaSizes


@gluon.jit
def store_out(states_desc, rows_desc, chunks, number, c, place):
    """Starts to store the state of chunk ``c`` and its rows, which are in the place of the values of ``number``."""
    h, slot, column = place.h.to(gl.int32), place.slot.to(gl.int32) + c, place.column * BLOCK_E
    tma.async_copy_shared_to_global(rows_desc, [slot, h, 0, column], chunks.v.index(number % BACKWARD_VALUE_STAGES))
    tma.async_copy_shared_to_global(states_desc, [slot, h, column, 0], chunks.states.index(number % 2))


@gluon.jit
def find_states(
    DECAYS: gl.constexpr, factors, initial, states_desc, updates_desc, initial_strides, chunks, place, sizes
):
    """Runs the warps of `hopper_states_kernel` that multiply."""
    D: gl.constexpr = chunks.k.shape[4]
    dtype: gl.constexpr = chunks.k.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, RESULT)
    state = load_initial(initial, place, initial_strides, D, STATE)
    zeros = gl.zeros([BLOCK_E, BLOCK_T], gl.float32, RESULT)
    for c in range((place.length + BLOCK_T - 1) // BLOCK_T):
        whole = load_whole(DECAYS, BACKWARD_FACTORS, factors, c, place, sizes)
        before = as_factor(state, dtype, RESULT)
        i = wait_full(chunks.full, c)
        k, inverse, numbers = matrix(chunks.k, i), matrix(chunks.matrices, i), chunks.factors.index(i)
        # (1) Rᵀ = (Vᵀ − Sᵀ K̃ᵀ) β
        known = warpgroup_mma(before, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        j = wait_full(chunks.v_full, c)
        v = matrix(chunks.v, j).permute([1, 0])
        values = gl.convert_layout(v.load(gl.DotOperandLayout(0, RESULT, 2)), RESULT).to(gl.float32)
        of_keys = numbers.slice(0, BLOCK_T).load(OF_TOKENS)
        beta = numbers.slice(BLOCK_T, BLOCK_T).load(OF_TOKENS)
        until_end = numbers.slice(2 * BLOCK_T, BLOCK_T).load(OF_TOKENS)
        matrix(chunks.states, c % 2).store(state.to(dtype))
        known = warpgroup_mma_wait(0, deps=[known])
        rest = as_factor((values - known * of_keys[None, :]) * beta[None, :], dtype, RESULT)
        # (2) Uᵀ = Rᵀ Tᵀ
        update = warpgroup_mma(rest, inverse.permute([1, 0]), zeros, use_acc=False, is_async=True)
        update = warpgroup_mma_wait(0, deps=[update])
        # (3) Sᵀ = Sᵀ decayed + Uᵀ K̂
        if DECAYS:
            state *= whole
        given = as_factor(update * until_end[None, :], dtype, RESULT)
        state = warpgroup_mma(given, k, state, is_async=True)
        v.store(update.to(dtype))
        state = warpgroup_mma_wait(0, deps=[state])
        publish(chunks.v_empty, c, BACKWARD_VALUE_STAGES)
        mbarrier.arrive(chunks.empty.index(i))
        store_out(states_desc, updates_desc, chunks, c, c, place)
    tma.store_wait(0)


@gluon.jit
def hopper_states_kernel(
    k_desc, v_desc, matrices_desc, factors, initial, states_desc, updates_desc, sizes: DeltaSizes,
    initial_strides: StateStrides, DECAYS: gl.constexpr,
):  # fmt: skip
    """Writes the states (slots, H, E, D) before chunks, and corrected values (slots, H, T, E)."""
    place = find_sequence(None, sizes)
    chunks = allocate(None, k_desc, v_desc, matrices_desc, states_desc)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [(find_states, (DECAYS, factors, initial, states_desc, updates_desc, initial_strides, chunks, place, sizes)),
         (copy_chunks, (False, BACKWARD_FACTORS, None, k_desc, v_desc, matrices_desc, factors, chunks, place, sizes))],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def find_state_gradients(
    DECAYS: gl.constexpr, factors, last, first, states_desc, rests_desc, last_strides, first_strides, chunks, place,
    sizes,
):  # fmt: skip
    """Runs the warps of `hopper_reverse_kernel` that multiply."""
    D: gl.constexpr = chunks.k.shape[4]
    dtype: gl.constexpr = chunks.k.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, RESULT)
    state = load_initial(last, place, last_strides, D, STATE)
    if last is not None:
        state = state / sizes.scale
    zeros = gl.zeros([BLOCK_E, BLOCK_T], gl.float32, RESULT)
    count = (place.length + BLOCK_T - 1) // BLOCK_T
    for n in range(count):
        c = count - 1 - n
        whole = load_whole(DECAYS, BACKWARD_FACTORS, factors, c, place, sizes)
        behind = as_factor(state, dtype, RESULT)
        i = wait_full(chunks.full, n)
        q, k, both = matrix(chunks.q, i), matrix(chunks.k, i), matrix(chunks.matrices, i)
        inverse, scores = both.slice(0, BLOCK_T, dim=0), both.slice(BLOCK_T, BLOCK_T, dim=0)
        numbers = chunks.factors.index(i)
        # (1) dUᵀ = dSᵀ K̂ᵀ + dOᵀ P
        update = warpgroup_mma(behind, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        j = wait_full(chunks.v_full, n)
        grads = matrix(chunks.v, j).permute([1, 0])
        given = grads.load(gl.DotOperandLayout(0, RESULT, 2))
        since = numbers.slice(0, BLOCK_T).load(OF_TOKENS)
        beta = numbers.slice(BLOCK_T, BLOCK_T).load(OF_TOKENS)
        until_end = numbers.slice(2 * BLOCK_T, BLOCK_T).load(OF_TOKENS)
        matrix(chunks.states, n % 2).store(state.to(dtype))
        update = warpgroup_mma_wait(0, deps=[update])
        update *= until_end[None, :]
        update = warpgroup_mma(given, scores, update, is_async=True)
        wide = gl.convert_layout(given, RESULT).to(gl.float32)
        asked = as_factor(wide * since[None, :], dtype, RESULT)
        update = warpgroup_mma_wait(0, deps=[update])
        # (2) dRᵀ = dUᵀ T
        rest = warpgroup_mma(as_factor(update, dtype, RESULT), inverse, zeros, use_acc=False, is_async=True)
        # (3) dSᵀ = dSᵀ decayed + dOᵀ Q̃ − (β dR)ᵀ K̃
        if DECAYS:
            state *= whole
        state = warpgroup_mma(asked, q, state, is_async=True)
        rest, state = warpgroup_mma_wait(0, deps=[rest, state])
        corrections = as_factor(rest * -(beta * since)[None, :], dtype, RESULT)
        state = warpgroup_mma(corrections, k, state, is_async=True)
        grads.store(rest.to(dtype))
        state = warpgroup_mma_wait(0, deps=[state])
        publish(chunks.v_empty, n, BACKWARD_VALUE_STAGES)
        mbarrier.arrive(chunks.empty.index(i))
        store_out(states_desc, rests_desc, chunks, n, c, place)
    tma.store_wait(0)
    if first is not None:
        state *= sizes.scale
        gl.store(state_pointers(first, place, first_strides, D, STATE), state.to(first.dtype.element_ty))


@gluon.jit
def hopper_reverse_kernel(
    q_desc, k_desc, grad_desc, matrices_desc, factors, last, first, states_desc, rests_desc, sizes: DeltaSizes,
    last_strides: StateStrides, first_strides: StateStrides, DECAYS: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of the states behind chunks, (slots, H, E, D), and ``dR = Tᵀ dU``, (slots, H, T, E)."""
    place = find_sequence(None, sizes)
    chunks = allocate(q_desc, k_desc, grad_desc, matrices_desc, states_desc)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [(find_state_gradients, (DECAYS, factors, last, first, states_desc, rests_desc, last_strides, first_strides,
                                 chunks, place, sizes)),
         (copy_chunks, (True, BACKWARD_FACTORS, q_desc, k_desc, grad_desc, matrices_desc, factors, chunks, place,
                        sizes))],
        [1], [24],
    )  # fmt: skip
