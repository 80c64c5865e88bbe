"""The kernel that carries states through sequences on Hopper, 64 tokens at a time.

A program holds 64 columns of a head's state, transposed, in the registers of one group of warps. What a product gives
is the first factor of the next one as it lies there; second factors, which are the rows of queries and keys and the
matrices of `hopper.matrices`, are brought to shared memory by another warp.
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
    as_factor,
    barriers,
    init_ring,
    matrix,
    thread_barrier,
    wait_empty,
    wait_full,
)
from warploom.device.rows import StateStrides
from warploom.ops.delta_attention.triton.scan import find_sequence
from warploom.ops.delta_attention.triton.tiles import DeltaSizes

BLOCK_T = gl.constexpr(64)  # tokens of a chunk
BLOCK_E = gl.constexpr(64)  # columns of a state
FACTORS = gl.constexpr(256)  # numbers of a chunk in ``factors``
BACKWARD_FACTORS = gl.constexpr(512)  # for the backward
WHOLE = gl.constexpr(192)  # which of them is the decay over the chunk
SUMS = gl.constexpr(256)  # from where on sums of logarithms of decays lie, the coarse and the fine parts
STAGES = gl.constexpr(3)
VALUE_STAGES = gl.constexpr(6)  # results leave from where values came to
BACKWARD_VALUE_STAGES = gl.constexpr(4)


class ChunkRing(NamedTuple):
    """Buffers that chunks pass through."""

    q: gl.shared_memory_descriptor  # (STAGES, 1, 1, T, D), or another buffer where they are not needed
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, T, D)
    matrices: gl.shared_memory_descriptor  # (STAGES, 1, 1, 2T, T), or (STAGES, 1, 1, T, T) without queries
    factors: gl.shared_memory_descriptor  # (STAGES, FACTORS)
    full: gl.shared_memory_descriptor  # barriers of these
    empty: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor  # (VALUE_STAGES, 1, 1, T, E)
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    states: gl.shared_memory_descriptor  # (2, 1, 1, E, D), on their way out, for the backward


@gluon.jit
def copy_chunks(
    REVERSE: gl.constexpr, WIDTH: gl.constexpr, q_desc, k_desc, v_desc, matrices_desc, factors, chunks, place, sizes
):
    """Runs the warp that copies. ``WIDTH`` numbers lie in ``factors`` for each chunk."""
    ROWS: gl.constexpr = 1 if q_desc is None else 2
    b, h, slot = place.b.to(gl.int32), place.h.to(gl.int32), place.slot.to(gl.int32)
    of_group = h // sizes.group
    x = gl.arange(0, FACTORS, gl.BlockedLayout([4], [32], [1], [0]))
    count = (place.length + BLOCK_T - 1) // BLOCK_T
    for n in range(count):
        c = count - 1 - n if REVERSE else n
        given = gl.load(factors + ((place.slot + c) * sizes.heads + place.h) * WIDTH + x)
        i = wait_empty(chunks.v_empty, n)
        mbarrier.expect(chunks.v_full.index(i), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, [b, h, c * BLOCK_T, place.column * BLOCK_E], chunks.v_full.index(i), chunks.v.index(i)
        )
        i = wait_empty(chunks.empty, n)
        full = chunks.full.index(i)
        mbarrier.expect(full, ROWS * k_desc.block_type.nbytes + matrices_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, of_group, c * BLOCK_T, 0], full, chunks.k.index(i))
        if q_desc is not None:
            tma.async_copy_global_to_shared(q_desc, [b, of_group, c * BLOCK_T, 0], full, chunks.q.index(i))
        tma.async_copy_global_to_shared(matrices_desc, [slot + c, h, 0, 0], full, chunks.matrices.index(i))
        chunks.factors.index(i).store(given)
        thread_barrier()
        mbarrier.arrive(full)


@gluon.jit
def state_pointers(ptr, place, strides, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns pointers (E, D) to the program's columns of a state (S, H, D, E)."""
    e = place.column * BLOCK_E + gl.arange(0, BLOCK_E, gl.SliceLayout(1, LAYOUT))
    f = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    head = ptr + place.number * strides.s + place.h * strides.h
    return head + (f.to(gl.int64) * strides.f)[None, :] + (e.to(gl.int64) * strides.e)[:, None]


@gluon.jit
def load_initial(initial, place, strides, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the program's columns (E, D) of the state before the first chunk."""
    if initial is None:
        state = gl.zeros([BLOCK_E, D], gl.float32, LAYOUT)
    else:
        state = gl.load(state_pointers(initial, place, strides, D, LAYOUT)).to(gl.float32)
    return state


@gluon.jit
def load_whole(DECAYS: gl.constexpr, WIDTH: gl.constexpr, factors, c, place, sizes):
    """Returns the decay over a chunk."""
    whole = 1.0
    if DECAYS:
        whole = gl.load(factors + ((place.slot + c) * sizes.heads + place.h) * WIDTH + WHOLE)
    return whole


@gluon.jit
def allocate(q_desc, k_desc, v_desc, matrices_desc, states_desc):
    """Returns the buffers, with their barriers."""
    dtype: gl.constexpr = k_desc.dtype
    D: gl.constexpr = k_desc.block_type.shape[3]
    M: gl.constexpr = matrices_desc.block_type.shape[2]
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_T, D], k_desc.layout)
    matrices = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, BLOCK_T], matrices_desc.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q, states = k, k
    if q_desc is not None:
        q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_T, D], q_desc.layout)
    if states_desc is not None:
        states = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_E, D], states_desc.layout)
    full, empty = barriers(STAGES), barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # of tiles, and of factors
        mbarrier.init(empty.index(i), count=1)
    COUNT: gl.constexpr = VALUE_STAGES if states_desc is None else BACKWARD_VALUE_STAGES
    v = gl.allocate_shared_memory(dtype, [COUNT, 1, 1, BLOCK_T, BLOCK_E], v_desc.layout)
    v_full, v_empty = barriers(COUNT), barriers(COUNT)
    init_ring(v_full, v_empty, 1)
    return ChunkRing(q, k, matrices, numbers, full, empty, v, v_full, v_empty, states)


@gluon.jit
def publish(empty, number, STAGES: gl.constexpr):
    """Waits for what was stored before, after which what threads have written can be.

    The tile before tile ``number`` of a ring has left then: its place, one of ``empty``, is free.
    """
    tma.store_wait(0)
    fence_async_shared()
    thread_barrier()
    if number > 0:
        mbarrier.arrive(empty.index((number - 1) % STAGES))


@gluon.jit
def multiply_chunks(
    DECAYS: gl.constexpr, out_desc, factors, initial, final, initial_strides, final_strides, chunks, place, sizes
):  # fmt: skip
    """Runs the warps that multiply."""
    D: gl.constexpr = chunks.k.shape[4]
    dtype: gl.constexpr = chunks.k.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, RESULT)
    state = load_initial(initial, place, initial_strides, D, STATE)
    zeros = gl.zeros([BLOCK_E, BLOCK_T], gl.float32, RESULT)
    b, h = place.b.to(gl.int32), place.h.to(gl.int32)
    for c in range((place.length + BLOCK_T - 1) // BLOCK_T):
        whole = load_whole(DECAYS, FACTORS, factors, c, place, sizes)
        before = as_factor(state, dtype, RESULT)
        i = wait_full(chunks.full, c)
        q, k, both = matrix(chunks.q, i), matrix(chunks.k, i), matrix(chunks.matrices, i)
        inverse, scores = both.slice(0, BLOCK_T, dim=0), both.slice(BLOCK_T, BLOCK_T, dim=0)
        numbers = chunks.factors.index(i)
        # (1) Rᵀ = Vᵀ − Sᵀ K̃ᵀ, and Oᵀ = Sᵀ Q̃ᵀ
        known = warpgroup_mma(before, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        result = warpgroup_mma(before, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
        j = wait_full(chunks.v_full, c)
        v = matrix(chunks.v, j).permute([1, 0])
        values = gl.convert_layout(v.load(gl.DotOperandLayout(0, RESULT, 2)), RESULT).to(gl.float32)
        of_keys = numbers.slice(0, BLOCK_T).load(OF_TOKENS)
        of_queries = numbers.slice(BLOCK_T, BLOCK_T).load(OF_TOKENS)
        until_end = numbers.slice(2 * BLOCK_T, BLOCK_T).load(OF_TOKENS)
        known = warpgroup_mma_wait(1, deps=[known])
        rest = as_factor(values - known * of_keys[None, :], dtype, RESULT)
        # (2) Uᵀ = Rᵀ (T β)ᵀ
        update = warpgroup_mma(rest, inverse.permute([1, 0]), zeros, use_acc=False, is_async=True)
        update, result = warpgroup_mma_wait(0, deps=[update, result])
        # (3) Sᵀ = Sᵀ decayed + Uᵀ K̂, and Oᵀ = Oᵀ + Uᵀ Pᵀ
        given = as_factor(update * until_end[None, :], dtype, RESULT)
        if DECAYS:
            state *= whole
        state = warpgroup_mma(given, k, state, is_async=True)
        result *= of_queries[None, :]
        result = warpgroup_mma(as_factor(update, dtype, RESULT), scores.permute([1, 0]), result, is_async=True)
        state, result = warpgroup_mma_wait(0, deps=[state, result])
        # (4) results leave from the place of values; those of the chunk before have left
        v.store(result.to(dtype))
        tma.store_wait(0)
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [b, h, c * BLOCK_T, place.column * BLOCK_E], chunks.v.index(j))
        mbarrier.arrive(chunks.empty.index(i))
        if c > 0:
            mbarrier.arrive(chunks.v_empty.index((c - 1) % VALUE_STAGES))
    tma.store_wait(0)
    if final is not None:
        gl.store(state_pointers(final, place, final_strides, D, STATE), state)


@gluon.jit
def hopper_scan_kernel(
    q_desc, k_desc, v_desc, matrices_desc, out_desc, factors, initial, final, sizes: DeltaSizes,
    initial_strides: StateStrides, final_strides: StateStrides, DECAYS: gl.constexpr,
):  # fmt: skip
    """Carries 64 columns of a state through the chunks of a sequence, and writes outputs (B, N, H, E).

    Descriptors are of (B, H, N, features), that of ``matrices`` of (slots, H, 2T, T).
    """
    place = find_sequence(None, sizes)
    chunks = allocate(q_desc, k_desc, v_desc, matrices_desc, None)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [(multiply_chunks, (DECAYS, out_desc, factors, initial, final, initial_strides, final_strides, chunks, place,
                            sizes)),
         (copy_chunks, (False, FACTORS, q_desc, k_desc, v_desc, matrices_desc, factors, chunks, place, sizes))],
        [1], [24],
    )  # fmt: skip
