"""Walks of linear attention on Hopper, in Gluon: bfloat16, 64 or 128 features, states in registers.

Two groups of four warps hold a head's state, and tiles of 64 tokens pass through shared memory: the tensor memory
accelerator brings them, they are encoded where they lie, and results leave by way of the same buffers. While the
products of one tile run, the next is encoded.

Pairs of features that turn together must meet in a thread when gradients are turned back, and the columns of a product
are shared by the groups. So the features of ``φ`` are taken in the order (group, part, quarter): see `feature_of`.
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

from warploom.device.activations import activate, exponential
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, init_each, matrix
from warploom.device.phase import cos_sin, phase_step, wrapping_add
from warploom.ops.linear_attention.kernels.tiles import Sizes, StateStrides, locate
from warploom.ops.lrpe.kernels.backward import pair_gradient
from warploom.ops.lrpe.kernels.forward import turn

T = gl.constexpr(64)  # tokens of a tile
WARPS = gl.constexpr(8)
WALK_STAGES = gl.constexpr(3)
KEY_STAGES = gl.constexpr(2)

# Renamed in Triton 3.7.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Form(NamedTuple):
    """What a kernel is compiled for."""

    KIND: gl.constexpr  # none, rotate or cosine
    ACTIVATION: gl.constexpr
    DECAY: gl.constexpr  # none, head or token
    FREQUENCIES: gl.constexpr  # of a head, the others are zero


class Angles(NamedTuple):
    """`phase_step` of the head's angles, in shared memory, and the position of the sequence's first token."""

    whole: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    position: gl.int32


class Tiles(NamedTuple):
    """Buffers of the tiles of tensors that arrive together, and a barrier for each stage."""

    tiles: gl.tuple
    full: gl.shared_memory_descriptor


@gluon.jit
def add(a, b):
    """What sums up decays."""
    return a + b


@gluon.jit
def feature_of(row, W: gl.constexpr, form: gl.constexpr):
    """The feature of ``φ`` at a place of the order in which it is kept."""
    if form.KIND == "rotate":
        row = (row // (W // 4) % 2) * (W // 2) + row // (W // 2) * (W // 4) + row % (W // 4)
    return row


@gluon.jit
def copy_tiles(descs, ring, place, tile, count):
    """Have tile number ``tile`` copied into the buffers of the ``count``-th."""
    slot = count % ring.full.shape[0]
    mbarrier.expect(ring.full.index(slot), len(descs) * descs[0].block_type.nbytes)
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(
            descs[i],
            [place.b.to(gl.int32), place.h.to(gl.int32), place.first + tile * T, 0],
            ring.full.index(slot),
            ring.tiles[i].index(slot),
        )


@gluon.jit
def wait_for(ring, count):
    """Wait for the ``count``-th tiles."""
    mbarrier.wait(ring.full.index(count % ring.full.shape[0]), count // ring.full.shape[0] & 1)


@gluon.jit
def load_angles(theta, place, sizes, W: gl.constexpr, form: gl.constexpr):
    """Angles of the place's head."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FEATURES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    COUNT: gl.constexpr = W if form.KIND == "cosine" else W // 2
    whole_words = gl.allocate_shared_memory(gl.int32, [COUNT], WORDS)
    rest_words = gl.allocate_shared_memory(gl.float32, [COUNT], WORDS)
    if form.KIND != "none":
        f = gl.arange(0, COUNT, FEATURES)
        ptrs = theta + place.h * sizes.theta_h + f * sizes.theta_f
        whole, rest, _ = phase_step(gl.load(ptrs, mask=f < form.FREQUENCIES, other=0.0))
        whole_words.store(whole)
        rest_words.store(rest)
    return Angles(whole_words, rest_words, place.position)


@gluon.jit
def turns_of(angles, first, begin: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Cosines and sines (T, COUNT) of the tile whose first token is ``first``, from angle ``begin`` on."""
    whole = angles.whole.slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    rest = angles.rest.slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    t = gl.arange(0, T, gl.SliceLayout(1, LAYOUT))[:, None]
    return cos_sin(wrapping_add(wrapping_add(angles.position, first), t), whole, rest, 0.0, True)


@gluon.jit
def decays_of(decay, place, first, sizes, DECAY: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums (T,) of a tile's logarithms of decays up to and with each token, and of all of them."""
    TOKENS: gl.constexpr = gl.BlockedLayout([T // 32], [32], [WARPS], [0]) if DECAY == "token" else LAYOUT
    t = gl.arange(0, T, TOKENS)
    count = place.last - first
    if DECAY == "head":
        g = gl.load(decay + place.h * sizes.decay_h).to(gl.float32)
        count = gl.minimum(count, T).to(gl.float32)
        a = g * gl.minimum((t + 1).to(gl.float32), count)
        total = g * count
    else:
        ptrs = decay + place.b * sizes.decay_b + place.h * sizes.decay_h
        ptrs += (place.start + first + t).to(gl.int64) * sizes.decay_n
        g = gl.load(ptrs, mask=t < count, other=0.0).to(gl.float32)
        a = gl.convert_layout(gl.associative_scan(g, 0, add), LAYOUT)
        total = gl.sum(g, 0)
    return a, total


@gluon.jit
def encode_tiles(
    tiles, weighed, count, angles, decay, place, first, sizes, form: gl.constexpr, REVERSE: gl.constexpr
):
    """Encode tiles (T, W) where they lie, and those of the first in ``weighed`` (stages, T, W) as states take them."""
    W: gl.constexpr = tiles[0].shape[4]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // W, W // 16], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = tiles[0].dtype
    if form.KIND == "rotate":
        cosine, sine = turns_of(angles, first, 0, W // 2, ROWS)
    for i in gl.static_range(len(tiles)):
        tile = matrix(tiles[i], count % tiles[i].shape[0])
        x = tile.load(ROWS)
        if form.KIND == "rotate":
            x1, x2 = x.reshape([T, 2, W // 2]).permute([0, 2, 1]).split()
            x1 = activate(gl.convert_layout(x1, ROWS).to(gl.float32), form.ACTIVATION)
            x2 = activate(gl.convert_layout(x2, ROWS).to(gl.float32), form.ACTIVATION)
            y1, y2 = turn(x1, x2, cosine, sine, "rotate")
            y = gl.join(y1.reshape([T, 2, W // 4]), y2.reshape([T, 2, W // 4])).permute([0, 1, 3, 2])
            y = y.reshape([T, W])
        else:
            y = activate(x.to(gl.float32), form.ACTIVATION)
        if form.KIND != "none" or form.ACTIVATION != "none":
            tile.store(y.to(dtype))
        if i == 0 and form.DECAY != "none":
            Y: gl.constexpr = y.type.layout
            a, total = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, Y))
            if REVERSE:
                weights = exponential(a)
            else:
                weights = exponential(total - a)
            weighed.index(count % weighed.shape[0]).store((y * weights[:, None]).to(dtype))


@gluon.jit
def store_decoded(tile, grads, angles, first, form: gl.constexpr):
    """Turn gradients (T, W) of what was encoded back, and put them, rounded, into a buffer."""
    W: gl.constexpr = grads.shape[1]
    if form.KIND == "rotate":
        g1, g2 = grads.reshape([T, 2, 2, W // 4]).permute([0, 1, 3, 2]).split()
        g1 = g1.reshape([T, W // 2])
        g2 = g2.reshape([T, W // 2])
        HALF: gl.constexpr = g1.type.layout
        cosine, sine = turns_of(angles, first, 0, W // 2, HALF)
        d1, d2 = pair_gradient(g1, g2, cosine, sine)
        grads = gl.join(d1, d2).permute([0, 2, 1]).reshape([T, W])
    tile.store(grads.to(tile.dtype))


@gluon.jit
def weigh_pairs(scores, decay, place, first, sizes, form: gl.constexpr, REVERSE: gl.constexpr):
    """Scores (T, T) times the decay between tokens; zero where the row's token does not see the column's."""
    PAIRS: gl.constexpr = scores.type.layout
    i = gl.arange(0, T, gl.SliceLayout(1, PAIRS))
    j = gl.arange(0, T, gl.SliceLayout(0, PAIRS))
    if REVERSE:
        seen = i[:, None] <= j[None, :]
    else:
        seen = i[:, None] >= j[None, :]
    if form.DECAY != "none":
        a, _ = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, PAIRS))
        b, _ = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(0, PAIRS))
        between = b[None, :] - a[:, None] if REVERSE else a[:, None] - b[None, :]
        scores *= exponential(gl.where(seen, between, 0.0))
    return gl.where(seen, scores, 0.0)


@gluon.jit
def state_pointers(
    ptr, index, place, first_f: gl.constexpr, strides, W: gl.constexpr, LAYOUT: gl.constexpr, form: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Pointers to a state (F, E), or ``TRANSPOSED`` (E, F), in the order of `feature_of`."""
    i = gl.arange(0, W, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]
    head = ptr + index * strides.s + place.h * strides.h + first_f * strides.f
    if TRANSPOSED:
        ptrs = head + i.to(gl.int64) * strides.e + feature_of(j, W, form).to(gl.int64) * strides.f
    else:
        ptrs = head + feature_of(i, W, form).to(gl.int64) * strides.f + j.to(gl.int64) * strides.e
    return ptrs


@gluon.jit
def load_state(
    ptr, index, place, first_f: gl.constexpr, factor, strides, W: gl.constexpr, LAYOUT: gl.constexpr, form: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """A state in float32, times a factor; zero where there is none."""
    if ptr is None:
        state = gl.zeros([W, W], gl.float32, LAYOUT)
    else:
        ptrs = state_pointers(ptr, index, place, first_f, strides, W, LAYOUT, form, TRANSPOSED)
        state = gl.load(ptrs).to(gl.float32) * factor
    return state


@gluon.jit
def hopper_walk_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    scale: gl.float32, into: gl.float32, out_of: gl.float32, sizes: Sizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr, DECODED: gl.constexpr,
):  # fmt: skip
    """What `kernels.walk` computes forwards, of a chunk of a head.

    Descriptors are of (B, H, N, W) with boxes (1, 1, T, W). ``a`` and ``b`` are encoded, or ``DECODED`` ``c``.
    """
    W: gl.constexpr = a_desc.block_type.shape[3]
    STAGES: gl.constexpr = WALK_STAGES
    dtype: gl.constexpr = a_desc.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W, W], dtype)
    PAIR_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T, T], dtype)
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], c_desc.layout)
    weighed = gl.allocate_shared_memory(dtype, [2 if form.DECAY != "none" else 1, T, W], PAIR_TILE)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], MATRIX)
    pair_tile = gl.allocate_shared_memory(dtype, [T, T], PAIR_TILE)
    rows = Tiles((a_tiles,), barriers(STAGES))
    others = Tiles((b_tiles, c_tiles), barriers(STAGES))
    init_each(rows.full)
    init_each(others.full)
    angles = load_angles(theta, place, sizes, W, form)
    encoded = (c_tiles,) if DECODED else (b_tiles, a_tiles)
    fence_async_shared()
    thread_barrier()
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    for i in gl.static_range(2):
        if i < tiles:
            copy_tiles((a_desc,), rows, place, i, i)
            copy_tiles((b_desc, c_desc), others, place, i, i)
    state = load_state(initial, place.slot, place, 0, into, initial_strides, W, STATE, form, DECODED)
    state_tile.store(state.to(dtype))
    if tiles > 0:
        wait_for(rows, 0)
        wait_for(others, 0)
        if ENCODES:
            encode_tiles(encoded, weighed, 0, angles, decay, place, place.first, sizes, form, False)
    for i in range(tiles):
        slot = i % STAGES
        first = place.first + i * T
        fence_async_shared()
        thread_barrier()
        if i > 0:
            tma.async_copy_shared_to_global(
                out_desc,
                [place.b.to(gl.int32), place.h.to(gl.int32), first - T, 0],
                a_tiles.index((i - 1) % STAGES),
            )
        if i + 2 < tiles:
            copy_tiles((b_desc, c_desc), others, place, i + 2, i + 2)
        a, b, c = matrix(a_tiles, slot), matrix(b_tiles, slot), matrix(c_tiles, slot)
        pairs = warpgroup_mma(
            a, b.permute([1, 0]), gl.zeros([T, T], gl.float32, PAIRS), use_acc=False, is_async=True
        )
        result = warpgroup_mma(a, state_tile, gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True)
        if form.DECAY == "none":
            state = warpgroup_mma(b.permute([1, 0]), c, state, is_async=True)
        else:
            _, total = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, STATE))
            state *= exponential(total)
            mine = weighed.index(i % 2)
            if DECODED:
                state = warpgroup_mma(b.permute([1, 0]), mine, state, is_async=True)
            else:
                state = warpgroup_mma(mine.permute([1, 0]), c, state, is_async=True)
        if i + 1 < tiles:
            wait_for(rows, i + 1)
            wait_for(others, i + 1)
            if ENCODES:
                encode_tiles(encoded, weighed, i + 1, angles, decay, place, first + T, sizes, form, False)
        tma.store_wait(0)
        if i + 2 < tiles:
            copy_tiles((a_desc,), rows, place, i + 2, i + 2)
        pairs, result = warpgroup_mma_wait(1, deps=[pairs, result])
        pairs = weigh_pairs(pairs, decay, place, first, sizes, form, False)
        pair_tile.store(pairs.to(dtype))
        fence_async_shared()
        thread_barrier()
        if form.DECAY != "none":
            sums, _ = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, RESULT))
            result *= exponential(sums)[:, None]
        result = warpgroup_mma(pair_tile, c, result, is_async=True)
        state = warpgroup_mma_wait(1, deps=[state])
        state_tile.store(state.to(dtype))
        result = warpgroup_mma_wait(0, deps=[result]) * scale
        if DECODED:
            store_decoded(a, result, angles, first, form)
        else:
            a.store(result.to(dtype))
    fence_async_shared()
    thread_barrier()
    if tiles > 0:
        last = place.first + (tiles - 1) * T
        tma.async_copy_shared_to_global(
            out_desc, [place.b.to(gl.int32), place.h.to(gl.int32), last, 0], a_tiles.index((tiles - 1) % STAGES)
        )
        tma.store_wait(0)
    if final is not None:
        ptrs = state_pointers(final, place.slot, place, 0, final_strides, W, STATE, form, DECODED)
        gl.store(ptrs, (state * out_of).to(final.dtype.element_ty))


@gluon.jit
def encode_parts(tile, sines, angles, first, form: gl.constexpr):
    """Encode a tile (T, W) by cosines where it lies, and by sines into another buffer."""
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    for i in gl.static_range(tile.shape[1] // 64):
        one = tile.slice(i * 64, 64, dim=1)
        x = activate(one.load(PIECE).to(gl.float32), form.ACTIVATION)
        cosine, sine = turns_of(angles, first, i * 64, 64, PIECE)
        one.store((x * cosine).to(tile.dtype))
        sines.slice(i * 64, 64, dim=1).store((x * sine).to(tile.dtype))


@gluon.jit
def hopper_cosine_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    scale: gl.float32, into: gl.float32, out_of: gl.float32, sizes: Sizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr, DECODED: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """`hopper_walk_kernel` where ``φ`` has two parts, of cosines and of sines, and so has the state."""
    W: gl.constexpr = a_desc.block_type.shape[3]
    dtype: gl.constexpr = a_desc.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T, W], dtype)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // W, W // 16], [WARPS, 1], [1, 0])
    place = locate(offsets, cu_seqlens, offset, sizes)
    a_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, T, W], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, T, W], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, T, W], c_desc.layout)
    sines = gl.allocate_shared_memory(dtype, [1 if DECODED else 2, T, W], TILE)
    states = gl.allocate_shared_memory(dtype, [2, W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    weighed = gl.allocate_shared_memory(dtype, [T, W if form.DECAY != "none" else 64], TILE)
    pair_tile = gl.allocate_shared_memory(dtype, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], dtype))
    ring = Tiles((a_tiles, b_tiles, c_tiles), barriers(2))
    init_each(ring.full)
    angles = load_angles(theta, place, sizes, W, form)
    fence_async_shared()
    thread_barrier()
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    for i in gl.static_range(2):
        if i < tiles:
            copy_tiles((a_desc, b_desc, c_desc), ring, place, tiles - 1 - i if REVERSE else i, i)
    state_c = load_state(initial, place.slot, place, 0, into, initial_strides, W, STATE, form, DECODED)
    state_s = load_state(initial, place.slot, place, W, into, initial_strides, W, STATE, form, DECODED)
    for i in range(tiles):
        slot = i % 2
        tile = tiles - 1 - i if REVERSE else i
        first = place.first + tile * T
        a, b, c = matrix(a_tiles, slot), matrix(b_tiles, slot), matrix(c_tiles, slot)
        states.index(0).store(state_c.to(dtype))
        states.index(1).store(state_s.to(dtype))
        wait_for(ring, i)
        if DECODED:
            encode_parts(c, sines.index(0), angles, first, form)
        else:
            encode_parts(a, sines.index(0), angles, first, form)
            encode_parts(b, sines.index(1), angles, first, form)
        if form.DECAY != "none":
            plain = b if DECODED else c
            sums, total = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, ROWS))
            weights = exponential(sums) if REVERSE else exponential(total - sums)
            weighed.store((plain.load(ROWS).to(gl.float32) * weights[:, None]).to(dtype))
        fence_async_shared()
        thread_barrier()
        pairs = warpgroup_mma(
            a, b.permute([1, 0]), gl.zeros([T, T], gl.float32, PAIRS), use_acc=False, is_async=True
        )
        if not DECODED:
            pairs = warpgroup_mma(sines.index(0), sines.index(1).permute([1, 0]), pairs, is_async=True)
        result = warpgroup_mma(
            a, states.index(0), gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True
        )
        if DECODED:
            of_sines = warpgroup_mma(
                a, states.index(1), gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True
            )
        else:
            result = warpgroup_mma(sines.index(0), states.index(1), result, is_async=True)
        if form.DECAY != "none":
            _, total = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, STATE))
            shrink = exponential(total)
            state_c *= shrink
            state_s *= shrink
        mine = weighed if form.DECAY != "none" else (b if DECODED else c)
        if DECODED:
            state_c = warpgroup_mma(mine.permute([1, 0]), c, state_c, is_async=True)
            state_s = warpgroup_mma(mine.permute([1, 0]), sines.index(0), state_s, is_async=True)
        else:
            state_c = warpgroup_mma(b.permute([1, 0]), mine, state_c, is_async=True)
            state_s = warpgroup_mma(sines.index(1).permute([1, 0]), mine, state_s, is_async=True)
        if DECODED:
            pairs, result, of_sines = warpgroup_mma_wait(2, deps=[pairs, result, of_sines])
        else:
            pairs, result = warpgroup_mma_wait(2, deps=[pairs, result])
        pairs = weigh_pairs(pairs, decay, place, first, sizes, form, REVERSE)
        pair_tile.store(pairs.to(dtype))
        fence_async_shared()
        thread_barrier()
        if form.DECAY != "none":
            sums, total = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, RESULT))
            carried = (exponential(total - sums) if REVERSE else exponential(sums))[:, None]
            result *= carried
            if DECODED:
                of_sines *= carried
        result = warpgroup_mma(pair_tile, c, result, is_async=True)
        if DECODED:
            of_sines = warpgroup_mma(pair_tile, sines.index(0), of_sines, is_async=True)
            cosine, sine = turns_of(angles, first, 0, W, RESULT)
            result, of_sines, state_c, state_s = warpgroup_mma_wait(0, deps=[result, of_sines, state_c, state_s])
            result = gl.fma(result, cosine, of_sines * sine)
        else:
            result, state_c, state_s = warpgroup_mma_wait(0, deps=[result, state_c, state_s])
        a.store((result * scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [b_entry, h, first, 0], a_tiles.index(slot))
        tma.store_wait(0)
        if i + 2 < tiles:
            copy_tiles((a_desc, b_desc, c_desc), ring, place, tiles - 3 - i if REVERSE else i + 2, i + 2)
    if final is not None:
        ptrs = state_pointers(final, place.slot, place, 0, final_strides, W, STATE, form, DECODED)
        gl.store(ptrs, (state_c * out_of).to(final.dtype.element_ty))
        ptrs = state_pointers(final, place.slot, place, W, final_strides, W, STATE, form, DECODED)
        gl.store(ptrs, (state_s * out_of).to(final.dtype.element_ty))


@gluon.jit
def hopper_key_kernel(
    q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    scale: gl.float32, into: gl.float32, out_of: gl.float32, sizes: Sizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values of a chunk of a head, from its end to its start.

    ``initial`` and ``final`` are gradients of the states behind and before the chunk.
    """
    W: gl.constexpr = q_desc.block_type.shape[3]
    STAGES: gl.constexpr = KEY_STAGES
    dtype: gl.constexpr = q_desc.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W, W], dtype)
    PAIR_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T, T], dtype)
    ENCODES: gl.constexpr = form.KIND != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], v_desc.layout)
    grad_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], grad_desc.layout)
    weighed = gl.allocate_shared_memory(dtype, [2 if form.DECAY != "none" else 1, T, W], PAIR_TILE)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], MATRIX)
    key_pairs = gl.allocate_shared_memory(dtype, [T, T], PAIR_TILE)
    value_pairs = gl.allocate_shared_memory(dtype, [T, T], PAIR_TILE)
    kept = Tiles((k_tiles, v_tiles), barriers(STAGES))
    others = Tiles((q_tiles, grad_tiles), barriers(STAGES))
    init_each(kept.full)
    init_each(others.full)
    angles = load_angles(theta, place, sizes, W, form)
    fence_async_shared()
    thread_barrier()
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    b, h = place.b.to(gl.int32), place.h.to(gl.int32)
    if tiles > 0:
        copy_tiles((k_desc, v_desc), kept, place, tiles - 1, 0)
        copy_tiles((q_desc, grad_desc), others, place, tiles - 1, 0)
    state = load_state(initial, place.slot, place, 0, into, initial_strides, W, STATE, form, False)
    state_tile.store(state.to(dtype))
    if tiles > 0:
        wait_for(kept, 0)
        wait_for(others, 0)
        if ENCODES:
            encode_tiles(
                (q_tiles, k_tiles),
                weighed,
                0,
                angles,
                decay,
                place,
                place.first + (tiles - 1) * T,
                sizes,
                form,
                True,
            )
    for i in range(tiles):
        slot = i % STAGES
        tile = tiles - 1 - i
        first = place.first + tile * T
        fence_async_shared()
        thread_barrier()
        if i > 0:
            tma.async_copy_shared_to_global(dk_desc, [b, h, first + T, 0], k_tiles.index((i - 1) % STAGES))
            tma.async_copy_shared_to_global(dv_desc, [b, h, first + T, 0], v_tiles.index((i - 1) % STAGES))
        if i + 1 < tiles:
            copy_tiles((q_desc, grad_desc), others, place, tile - 1, i + 1)
        q, k, v, grad = (
            matrix(q_tiles, slot), matrix(k_tiles, slot), matrix(v_tiles, slot), matrix(grad_tiles, slot),
        )  # fmt: skip
        of_values = warpgroup_mma(
            k, q.permute([1, 0]), gl.zeros([T, T], gl.float32, PAIRS), use_acc=False, is_async=True
        )
        of_keys = warpgroup_mma(
            v, grad.permute([1, 0]), gl.zeros([T, T], gl.float32, PAIRS), use_acc=False, is_async=True
        )
        dv = warpgroup_mma(k, state_tile, gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True)
        dk = warpgroup_mma(
            v, state_tile.permute([1, 0]), gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True
        )
        if form.DECAY == "none":
            state = warpgroup_mma(q.permute([1, 0]), grad, state, is_async=True)
        else:
            _, total = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, STATE))
            state *= exponential(total)
            state = warpgroup_mma(weighed.index(i % 2).permute([1, 0]), grad, state, is_async=True)
        tma.store_wait(0)
        if i + 1 < tiles:
            copy_tiles((k_desc, v_desc), kept, place, tile - 1, i + 1)
        of_values, of_keys, dv, dk = warpgroup_mma_wait(1, deps=[of_values, of_keys, dv, dk])
        of_values = weigh_pairs(of_values, decay, place, first, sizes, form, True)
        of_keys = weigh_pairs(of_keys, decay, place, first, sizes, form, True)
        value_pairs.store(of_values.to(dtype))
        key_pairs.store(of_keys.to(dtype))
        fence_async_shared()
        thread_barrier()
        if form.DECAY != "none":
            sums, all_ = decays_of(decay, place, first, sizes, form.DECAY, gl.SliceLayout(1, RESULT))
            weights = exponential(all_ - sums)[:, None]
            dv *= weights
            dk *= weights
        dv = warpgroup_mma(value_pairs, grad, dv, is_async=True)
        dk = warpgroup_mma(key_pairs, q, dk, is_async=True)
        state = warpgroup_mma_wait(2, deps=[state])
        state_tile.store(state.to(dtype))
        if i + 1 < tiles:
            wait_for(others, i + 1)
            wait_for(kept, i + 1)
            if ENCODES:
                encode_tiles((q_tiles, k_tiles), weighed, i + 1, angles, decay, place, first - T, sizes, form, True)
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        v.store((dv * scale).to(dtype))
        store_decoded(k, dk * scale, angles, first, form)
    fence_async_shared()
    thread_barrier()
    if tiles > 0:
        tma.async_copy_shared_to_global(dk_desc, [b, h, place.first, 0], k_tiles.index((tiles - 1) % STAGES))
        tma.async_copy_shared_to_global(dv_desc, [b, h, place.first, 0], v_tiles.index((tiles - 1) % STAGES))
        tma.store_wait(0)
    if final is not None:
        ptrs = state_pointers(final, place.slot, place, 0, final_strides, W, STATE, form, False)
        gl.store(ptrs, (state * out_of).to(final.dtype.element_ty))
