"""Walks of linear attention on Hopper, in Gluon: bfloat16, 64 or 128 features, states in registers.

Two groups of four warps hold a head's state, and tiles of 64 tokens pass through shared memory: one warp has the
tensor memory accelerator bring them, a third group encodes them where they lie while the products of earlier tiles run.

Pairs of features that turn together must meet in a thread when gradients are turned back. Where groups share the
columns of a product, features of ``φ`` are taken in the order (group, part, features): see `feature_of`.
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
from warploom.device.hopper.pipeline import as_factor, barriers, init_each, init_ring, matrix, wait_empty, wait_full
from warploom.device.phase import cos_sin, phase_step, wrapping_add
from warploom.ops.linear_attention.kernels.tiles import Factors, Place, Sizes, StateStrides, locate
from warploom.ops.lrpe.kernels.backward import pair_gradient
from warploom.ops.lrpe.kernels.forward import turn

T = gl.constexpr(64)  # tokens of a tile
WARPS = gl.constexpr(8)  # that multiply
ENCODERS = gl.constexpr(4)
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
    GROUPS: gl.constexpr  # of warps that share the columns of a product
    PART: gl.constexpr  # numbers of a tile that are encoded at a time
    ENCODER_REGISTERS: gl.constexpr  # of a thread
    GROUP_REGISTERS: gl.constexpr


class Angles(NamedTuple):
    """`phase_step` of the head's angles, in shared memory, and the position of the sequence's first token."""

    whole: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    position: gl.int32


class Tiles(NamedTuple):
    """Buffers of the tiles of tensors that arrive together, and barriers for each stage."""

    tiles: gl.tuple  # (stages, 1, 1, T, W) each
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Call(NamedTuple):
    """What all warps of a program know."""

    angles: Angles
    place: Place
    decay: gl.tensor | None
    sizes: Sizes
    tiles: gl.int32  # how many there are
    factors: Factors


class Encoded(NamedTuple):
    """What the encoding warps tell: a barrier for each stage, and tiles as states take them, where there are decays."""

    full: gl.shared_memory_descriptor
    weighed: gl.shared_memory_descriptor  # (2, T, W)


class Walk(NamedTuple):
    """What the warps that multiply have in `hopper_walk_kernel`."""

    rows: Tiles
    others: Tiles
    encoded: Encoded
    state_tile: gl.shared_memory_descriptor
    pair_tile: gl.shared_memory_descriptor
    out_desc: gl.tensor
    initial: gl.tensor | None
    final: gl.tensor | None
    initial_strides: StateStrides
    final_strides: StateStrides


class Keys(NamedTuple):
    """And in `hopper_key_kernel`."""

    ring: Tiles
    encoded: Encoded
    state_tile: gl.shared_memory_descriptor
    state_full: (
        gl.shared_memory_descriptor
    )  # barriers: the state of the next tile is there, and that of this was read
    state_read: gl.shared_memory_descriptor
    outs: gl.shared_memory_descriptor  # (2, 1, 1, T, W)
    dk_desc: gl.tensor
    dv_desc: gl.tensor
    initial: gl.tensor | None
    final: gl.tensor | None
    initial_strides: StateStrides
    final_strides: StateStrides


@gluon.jit
def feature_of(row, W: gl.constexpr, form: gl.constexpr):
    """The feature of ``φ`` at a place of the order in which it is kept."""
    WIDTH: gl.constexpr = W // 2 // form.GROUPS
    if form.KIND == "rotate" and form.GROUPS > 1:
        row = row // WIDTH % 2 * (W // 2) + row // (2 * WIDTH) * WIDTH + row % WIDTH
    return row


@gluon.jit
def copy_tiles(descs, ring, place, tile, count):
    """Have tile number ``tile`` copied into the ``count``-th buffers, once these are empty."""
    slot = wait_empty(ring.empty, count)
    mbarrier.expect(ring.full.index(slot), len(descs) * descs[0].block_type.nbytes)
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(
            descs[i],
            [place.b.to(gl.int32), place.h.to(gl.int32), place.first + tile * T, 0],
            ring.full.index(slot),
            ring.tiles[i].index(slot),
        )


@gluon.jit
def new_tiles(descs, STAGES: gl.constexpr, arrivals: gl.constexpr):
    """Buffers for tiles, of tensors of one form."""
    dtype: gl.constexpr = descs[0].dtype
    W: gl.constexpr = descs[0].block_type.shape[3]
    tiles = ()
    for i in gl.static_range(len(descs)):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, T, W], descs[i].layout),)
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, arrivals)
    return Tiles(tiles, full, empty)


@gluon.jit
def load_angles(theta, place, sizes, W: gl.constexpr, form: gl.constexpr):
    """Angles of the place's head."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FEATURES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
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
def turns_of(angles, first, ROWS: gl.constexpr, begin: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Cosines and sines (ROWS, COUNT) of the tokens from ``first`` on, of the angles from ``begin`` on."""
    whole = angles.whole.slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    rest = angles.rest.slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    t = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    return cos_sin(wrapping_add(wrapping_add(angles.position, first), t), whole, rest, 0.0, True)


@gluon.jit
def decays_of(call, first, begin: gl.constexpr, ROWS: gl.constexpr, DECAY: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums of a tile's logarithms of decays up to and with tokens ``begin …`` (ROWS,), and of all of them."""
    decay, place, sizes = call.decay, call.place, call.sizes
    count = place.last - first
    if DECAY == "head":
        t = begin + gl.arange(0, ROWS, LAYOUT)
        g = gl.load(decay + place.h * sizes.decay_h).to(gl.float32)
        count = gl.minimum(count, T).to(gl.float32)
        a = g * gl.minimum((t + 1).to(gl.float32), count)
        total = g * count
    else:
        SUMS: gl.constexpr = gl.BlockedLayout([1, T // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
        t = gl.arange(0, T, gl.SliceLayout(0, SUMS))
        ptrs = decay + place.b * sizes.decay_b + place.h * sizes.decay_h
        ptrs += (place.start + first + t).to(gl.int64) * sizes.decay_n
        g = gl.load(ptrs, mask=t < count, other=0.0).to(gl.float32)
        last = begin + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        a = gl.sum(gl.where(t[None, :] <= last[:, None], g[None, :], 0.0), 1)
        a = gl.convert_layout(a, LAYOUT)
        total = gl.sum(g, 0)
    return a, total


@gluon.jit
def encode_tiles(tiles, encoded, count, first, call, form: gl.constexpr, REVERSE: gl.constexpr):
    """Encode the ``count``-th tiles (T, W) where they lie, and weigh those of the first as states take them."""
    W: gl.constexpr = tiles[0].shape[4]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // W, W // 16], [ENCODERS, 1], [1, 0])
    PART_ROWS: gl.constexpr = form.PART // W
    WIDTH: gl.constexpr = W // 2 // form.GROUPS
    dtype: gl.constexpr = tiles[0].dtype
    slot = count % encoded.full.shape[0]
    for part in gl.static_range(T // PART_ROWS):
        if form.KIND == "rotate":
            cosine, sine = turns_of(call.angles, first + part * PART_ROWS, PART_ROWS, 0, W // 2, ROWS)
        for i in gl.static_range(len(tiles)):
            tile = matrix(tiles[i], slot).slice(part * PART_ROWS, PART_ROWS)
            x = tile.load(ROWS)
            if form.KIND == "rotate":
                x1, x2 = x.reshape([PART_ROWS, 2, W // 2]).permute([0, 2, 1]).split()
                x1 = activate(gl.convert_layout(x1, ROWS).to(gl.float32), form.ACTIVATION)
                x2 = activate(gl.convert_layout(x2, ROWS).to(gl.float32), form.ACTIVATION)
                y1, y2 = turn(x1, x2, cosine, sine, "rotate")
                y = gl.join(
                    y1.reshape([PART_ROWS, form.GROUPS, WIDTH]), y2.reshape([PART_ROWS, form.GROUPS, WIDTH])
                )
                y = y.permute([0, 1, 3, 2]).reshape([PART_ROWS, W])
            else:
                y = activate(x.to(gl.float32), form.ACTIVATION)
            if form.KIND != "none" or form.ACTIVATION != "none":
                tile.store(y.to(dtype))
            if i == 0 and form.DECAY != "none":
                a, total = decays_of(
                    call, first, part * PART_ROWS, PART_ROWS, form.DECAY, gl.SliceLayout(1, y.type.layout)
                )
                if REVERSE:
                    weights = exponential(a)
                else:
                    weights = exponential(total - a)
                encoded.weighed.index(count % 2).slice(part * PART_ROWS, PART_ROWS).store(
                    (y * weights[:, None]).to(dtype)
                )


@gluon.jit
def decoded(grads, angles, first, form: gl.constexpr):
    """Gradients (T, W) of what was encoded, turned back."""
    W: gl.constexpr = grads.shape[1]
    WIDTH: gl.constexpr = W // 2 // form.GROUPS
    if form.KIND == "rotate":
        g1, g2 = grads.reshape([T, form.GROUPS, 2, WIDTH]).permute([0, 1, 3, 2]).split()
        g1 = g1.reshape([T, W // 2])
        g2 = g2.reshape([T, W // 2])
        HALF: gl.constexpr = g1.type.layout
        cosine, sine = turns_of(angles, first, T, 0, W // 2, HALF)
        d1, d2 = pair_gradient(g1, g2, cosine, sine)
        grads = gl.join(d1, d2).permute([0, 2, 1]).reshape([T, W])
    return grads


@gluon.jit
def weigh_pairs(scores, call, first, form: gl.constexpr, REVERSE: gl.constexpr):
    """Scores (T, T) times the decay between tokens; zero where the row's token does not see the column's."""
    PAIRS: gl.constexpr = scores.type.layout
    i = gl.arange(0, T, gl.SliceLayout(1, PAIRS))
    j = gl.arange(0, T, gl.SliceLayout(0, PAIRS))
    if REVERSE:
        seen = i[:, None] <= j[None, :]
    else:
        seen = i[:, None] >= j[None, :]
    if form.DECAY != "none":
        a, _ = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, PAIRS))
        b, _ = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(0, PAIRS))
        between = b[None, :] - a[:, None] if REVERSE else a[:, None] - b[None, :]
        scores *= exponential(gl.where(seen, between, 0.0))
    return gl.where(seen, scores, 0.0)


@gluon.jit
def state_pointers(
    ptr, place, first_f: gl.constexpr, strides, ROWS: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr,
    form: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Pointers to rows of the place's state (F, E), or ``TRANSPOSED`` (E, F), with F in the order of `feature_of`."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]
    head = ptr + place.slot * strides.s + place.h * strides.h + first_f * strides.f
    if TRANSPOSED:
        ptrs = head + i.to(gl.int64) * strides.e + feature_of(j, W, form).to(gl.int64) * strides.f
    else:
        ptrs = head + feature_of(i, W, form).to(gl.int64) * strides.f + j.to(gl.int64) * strides.e
    return ptrs


@gluon.jit
def load_state(
    ptr, place, first_f: gl.constexpr, factor, strides, ROWS: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr,
    form: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Rows of a state in float32, times a factor; zero where there is none."""
    if ptr is None:
        state = gl.zeros([ROWS, W], gl.float32, LAYOUT)
    else:
        ptrs = state_pointers(ptr, place, first_f, strides, ROWS, W, LAYOUT, form, TRANSPOSED)
        state = gl.load(ptrs).to(gl.float32) * factor
    return state


@gluon.jit
def store_state(
    ptr, state, place, first_f: gl.constexpr, factor, strides, W: gl.constexpr, form: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The inverse of `load_state`."""
    if ptr is not None:
        LAYOUT: gl.constexpr = state.type.layout
        ROWS: gl.constexpr = state.shape[0]
        ptrs = state_pointers(ptr, place, first_f, strides, ROWS, W, LAYOUT, form, TRANSPOSED)
        gl.store(ptrs, (state * factor).to(ptr.dtype.element_ty))


@gluon.jit
def new_encoded(STAGES: gl.constexpr, W: gl.constexpr, dtype: gl.constexpr, form: gl.constexpr):
    """Barriers of encoded tiles, and buffers for weighed ones if there are decays."""
    full = barriers(STAGES)
    init_each(full)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T, W], dtype)
    weighed = full
    if form.DECAY != "none":
        weighed = gl.allocate_shared_memory(dtype, [2, T, W], TILE)
    return Encoded(full, weighed)


@gluon.jit
def copy_walk(row_descs, other_descs, rows, others, call):
    """The copying warp of `hopper_walk_kernel`."""
    for i in range(call.tiles):
        copy_tiles(row_descs, rows, call.place, i, i)
        copy_tiles(other_descs, others, call.place, i, i)


@gluon.jit
def encode_walk(form: gl.constexpr, DECODED: gl.constexpr, rows, others, encoded, call):
    """The encoding warps of `hopper_walk_kernel`."""
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
def multiply_walk(form: gl.constexpr, DECODED: gl.constexpr, walk, call):
    """The warps of `hopper_walk_kernel` that multiply."""
    place, first_tile = call.place, call.place.first
    rows, others, encoded, state_tile, pair_tile = (
        walk.rows, walk.others, walk.encoded, walk.state_tile, walk.pair_tile,
    )  # fmt: skip
    W: gl.constexpr = state_tile.shape[0]
    STAGES: gl.constexpr = rows.full.shape[0]
    dtype: gl.constexpr = state_tile.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W // 16, 128 // W], [16, W * W // 128, 16])
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    state = load_state(walk.initial, place, 0, call.factors.into, walk.initial_strides, W, W, STATE, form, DECODED)
    state_tile.store(state.to(dtype))
    for i in range(call.tiles):
        slot = i % STAGES
        first = first_tile + i * T
        fence_async_shared()
        thread_barrier()
        if i > 0:
            tma.async_copy_shared_to_global(
                walk.out_desc, [b_entry, h, first - T, 0], rows.tiles[0].index((i - 1) % STAGES)
            )
            mbarrier.arrive(others.empty.index((i - 1) % STAGES))
        wait_full(rows.full, i)
        wait_full(others.full, i)
        if ENCODES:
            wait_full(encoded.full, i)
        a, b, c = matrix(rows.tiles[0], slot), matrix(others.tiles[0], slot), matrix(others.tiles[1], slot)
        pairs = warpgroup_mma(
            a, b.permute([1, 0]), gl.zeros([T, T], gl.float32, PAIRS), use_acc=False, is_async=True
        )
        result = warpgroup_mma(a, state_tile, gl.zeros([T, W], gl.float32, RESULT), use_acc=False, is_async=True)
        if form.DECAY == "none":
            state = warpgroup_mma(b.permute([1, 0]), c, state, is_async=True)
        else:
            _, total = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, STATE))
            state *= exponential(total)
            mine = encoded.weighed.index(i % 2)
            if DECODED:
                state = warpgroup_mma(b.permute([1, 0]), mine, state, is_async=True)
            else:
                state = warpgroup_mma(mine.permute([1, 0]), c, state, is_async=True)
        pairs, result = warpgroup_mma_wait(1, deps=[pairs, result])
        pair_tile.store(weigh_pairs(pairs, call, first, form, False).to(dtype))
        tma.store_wait(0)
        fence_async_shared()
        thread_barrier()
        if i > 0:
            mbarrier.arrive(rows.empty.index((i - 1) % STAGES))
        if form.DECAY != "none":
            sums, _ = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, RESULT))
            result *= exponential(sums)[:, None]
        result = warpgroup_mma(pair_tile, c, result, is_async=True)
        state = warpgroup_mma_wait(1, deps=[state])
        state_tile.store(state.to(dtype))
        result = warpgroup_mma_wait(0, deps=[result]) * call.factors.scale
        if DECODED:
            result = decoded(result, call.angles, first, form)
        a.store(result.to(dtype))
    fence_async_shared()
    thread_barrier()
    if call.tiles > 0:
        last = call.tiles - 1
        tma.async_copy_shared_to_global(
            walk.out_desc, [b_entry, h, first_tile + last * T, 0], rows.tiles[0].index(last % STAGES)
        )
        tma.store_wait(0)
    store_state(walk.final, state, place, 0, call.factors.out_of, walk.final_strides, W, form, DECODED)


@gluon.jit
def hopper_walk_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    factors: Factors, sizes: Sizes, initial_strides: StateStrides,
    final_strides: StateStrides, form: gl.constexpr, DECODED: gl.constexpr,
):  # fmt: skip
    """What `kernels.walk` computes forwards, of a chunk of a head.

    Descriptors are of (B, H, N, W) with boxes (1, 1, T, W). ``a`` and ``b`` are encoded, or ``DECODED`` ``c``.
    """
    W: gl.constexpr = a_desc.block_type.shape[3]
    dtype: gl.constexpr = a_desc.dtype
    ENCODES: gl.constexpr = form.KIND != "none" or form.ACTIVATION != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    rows = new_tiles((a_desc,), WALK_STAGES, 1)
    others = new_tiles((b_desc, c_desc), WALK_STAGES, 1)
    encoded = new_encoded(WALK_STAGES, W, dtype, form)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    pair_tile = gl.allocate_shared_memory(dtype, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], dtype))
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    call = Call(load_angles(theta, place, sizes, W, form), place, decay, sizes, tiles, factors)
    walk = Walk(
        rows, others, encoded, state_tile, pair_tile, out_desc, initial, final, initial_strides, final_strides,
    )  # fmt: skip
    fence_async_shared()
    thread_barrier()
    if ENCODES:
        gl.warp_specialize(
            [(multiply_walk, (form, DECODED, walk, call)),
             (encode_walk, (form, DECODED, rows, others, encoded, call)),
             (copy_walk, ((a_desc,), (b_desc, c_desc), rows, others, call))],
            [ENCODERS, 1], [form.ENCODER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(multiply_walk, (form, DECODED, walk, call)),
             (copy_walk, ((a_desc,), (b_desc, c_desc), rows, others, call))],
            [1], [24],
        )  # fmt: skip


@gluon.jit
def encode_parts(tile, sines, angles, first, form: gl.constexpr):
    """Encode a tile (T, W) by cosines where it lies, and by sines into another buffer."""
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    for i in gl.static_range(tile.shape[1] // 64):
        one = tile.slice(i * 64, 64, dim=1)
        x = activate(one.load(PIECE).to(gl.float32), form.ACTIVATION)
        cosine, sine = turns_of(angles, first, T, i * 64, 64, PIECE)
        one.store((x * cosine).to(tile.dtype))
        sines.slice(i * 64, 64, dim=1).store((x * sine).to(tile.dtype))


@gluon.jit
def hopper_cosine_kernel(
    a_desc, b_desc, c_desc, out_desc, initial, final, theta, offsets, cu_seqlens, decay, offset: gl.int32,
    factors: Factors, sizes: Sizes, initial_strides: StateStrides,
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
    descs = (a_desc, b_desc, c_desc)
    ring = new_tiles(descs, 2, 1)
    a_tiles, b_tiles, c_tiles = ring.tiles
    sines = gl.allocate_shared_memory(dtype, [1 if DECODED else 2, T, W], TILE)
    states = gl.allocate_shared_memory(dtype, [2, W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    weighed = gl.allocate_shared_memory(dtype, [T, W if form.DECAY != "none" else 64], TILE)
    pair_tile = gl.allocate_shared_memory(dtype, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], dtype))
    angles = load_angles(theta, place, sizes, W, form)
    fence_async_shared()
    thread_barrier()
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    call = Call(angles, place, decay, sizes, tiles, factors)
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    for i in gl.static_range(2):
        if i < tiles:
            copy_tiles(descs, ring, place, tiles - 1 - i if REVERSE else i, i)
    state_c = load_state(initial, place, 0, factors.into, initial_strides, W, W, STATE, form, DECODED)
    state_s = load_state(initial, place, W, factors.into, initial_strides, W, W, STATE, form, DECODED)
    for i in range(tiles):
        slot = i % 2
        tile = tiles - 1 - i if REVERSE else i
        first = place.first + tile * T
        a, b, c = matrix(a_tiles, slot), matrix(b_tiles, slot), matrix(c_tiles, slot)
        states.index(0).store(state_c.to(dtype))
        states.index(1).store(state_s.to(dtype))
        wait_full(ring.full, i)
        if DECODED:
            encode_parts(c, sines.index(0), angles, first, form)
        else:
            encode_parts(a, sines.index(0), angles, first, form)
            encode_parts(b, sines.index(1), angles, first, form)
        if form.DECAY != "none":
            plain = b if DECODED else c
            sums, total = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, ROWS))
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
            _, total = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, STATE))
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
        pairs = weigh_pairs(pairs, call, first, form, REVERSE)
        pair_tile.store(pairs.to(dtype))
        fence_async_shared()
        thread_barrier()
        if form.DECAY != "none":
            sums, total = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, RESULT))
            carried = (exponential(total - sums) if REVERSE else exponential(sums))[:, None]
            result *= carried
            if DECODED:
                of_sines *= carried
        result = warpgroup_mma(pair_tile, c, result, is_async=True)
        if DECODED:
            of_sines = warpgroup_mma(pair_tile, sines.index(0), of_sines, is_async=True)
            cosine, sine = turns_of(angles, first, T, 0, W, RESULT)
            result, of_sines, state_c, state_s = warpgroup_mma_wait(0, deps=[result, of_sines, state_c, state_s])
            result = gl.fma(result, cosine, of_sines * sine)
        else:
            result, state_c, state_s = warpgroup_mma_wait(0, deps=[result, state_c, state_s])
        a.store((result * factors.scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [b_entry, h, first, 0], a_tiles.index(slot))
        mbarrier.arrive(ring.empty.index(slot))
        tma.store_wait(0)
        if i + 2 < tiles:
            copy_tiles(descs, ring, place, tiles - 3 - i if REVERSE else i + 2, i + 2)
    store_state(final, state_c, place, 0, factors.out_of, final_strides, W, form, DECODED)
    store_state(final, state_s, place, W, factors.out_of, final_strides, W, form, DECODED)


@gluon.jit
def copy_keys(descs, ring, call):
    """The copying warp of `hopper_key_kernel`."""
    for i in range(call.tiles):
        copy_tiles(descs, ring, call.place, call.tiles - 1 - i, i)


@gluon.jit
def encode_keys(form: gl.constexpr, ring, encoded, call):
    """The encoding warps of `hopper_key_kernel`."""
    for i in range(call.tiles):
        slot = wait_full(ring.full, i)
        first = call.place.first + (call.tiles - 1 - i) * T
        encode_tiles((ring.tiles[0], ring.tiles[1]), encoded, i, first, call, form, True)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(encoded.full.index(slot))


@gluon.jit
def multiply_keys(own: gl.constexpr, form: gl.constexpr, keys, call):
    """A group of warps of `hopper_key_kernel`: of the gradients of keys (0) or values (1), and 64 rows of the state."""
    place, ring, encoded, state_tile = call.place, keys.ring, keys.encoded, keys.state_tile
    W: gl.constexpr = state_tile.shape[0]
    dtype: gl.constexpr = state_tile.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    ENCODES: gl.constexpr = form.KIND != "none" or form.DECAY != "none"
    HOLDS: gl.constexpr = own * T < W  # rows of the state
    b_entry, h = place.b.to(gl.int32), place.h.to(gl.int32)
    out = keys.outs.index(own)
    if HOLDS:
        state = load_state(
            keys.initial, place, own * T, call.factors.into, keys.initial_strides, T, W, RESULT, form, False
        )
        state_tile.slice(own * T, T, dim=0).store(state.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(keys.state_full)
    for i in range(call.tiles):
        first = place.first + (call.tiles - 1 - i) * T
        slot = wait_full(ring.full, i)
        if ENCODES:
            wait_full(encoded.full, i)
        q, k, v, grad = (
            matrix(ring.tiles[0], slot), matrix(ring.tiles[1], slot), matrix(ring.tiles[2], slot),
            matrix(ring.tiles[3], slot),
        )  # fmt: skip
        mbarrier.wait(keys.state_full, i & 1)
        zeros = gl.zeros([T, T], gl.float32, PAIRS)
        nothing = gl.zeros([T, W], gl.float32, RESULT)
        if own == 0:
            pairs = warpgroup_mma(v, grad.permute([1, 0]), zeros, use_acc=False, is_async=True)
            result = warpgroup_mma(v, state_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
        else:
            pairs = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            result = warpgroup_mma(k, state_tile, nothing, use_acc=False, is_async=True)
        pairs = warpgroup_mma_wait(1, deps=[pairs])
        factor = as_factor(weigh_pairs(pairs, call, first, form, True), dtype, RESULT)
        result = warpgroup_mma_wait(0, deps=[result])
        thread_barrier()
        mbarrier.arrive(keys.state_read)
        if form.DECAY != "none":
            sums, all_ = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, RESULT))
            result *= exponential(all_ - sums)[:, None]
        if HOLDS:
            given = q
            if form.DECAY != "none":
                given = encoded.weighed.index(slot)
                _, total = decays_of(call, first, 0, T, form.DECAY, gl.SliceLayout(1, RESULT))
                state *= exponential(total)
            state = warpgroup_mma(given.slice(own * T, T, dim=1).permute([1, 0]), grad, state, is_async=True)
        if own == 0:
            result = warpgroup_mma(factor, q, result, is_async=True)
        else:
            result = warpgroup_mma(factor, grad, result, is_async=True)
        if HOLDS:
            state = warpgroup_mma_wait(1, deps=[state])
            mbarrier.wait(keys.state_read, i & 1)
            state_tile.slice(own * T, T, dim=0).store(state.to(dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(keys.state_full)
        result = warpgroup_mma_wait(0, deps=[result])
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(ring.empty.index(slot))
        result *= call.factors.scale
        if own == 0:
            result = decoded(result, call.angles, first, form)
        matrix(keys.outs, own).store(result.to(dtype))
        fence_async_shared()
        thread_barrier()
        if own == 0:
            tma.async_copy_shared_to_global(keys.dk_desc, [b_entry, h, first, 0], out)
        else:
            tma.async_copy_shared_to_global(keys.dv_desc, [b_entry, h, first, 0], out)
    tma.store_wait(0)
    if HOLDS:
        store_state(keys.final, state, place, own * T, call.factors.out_of, keys.final_strides, W, form, False)


@gluon.jit
def hopper_key_kernel(
    q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, initial, final, theta, offsets, cu_seqlens, decay,
    offset: gl.int32, factors: Factors, sizes: Sizes,
    initial_strides: StateStrides, final_strides: StateStrides, form: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values of a chunk of a head, from its end to its start.

    ``initial`` and ``final`` are gradients of the states behind and before the chunk.
    """
    W: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    ENCODES: gl.constexpr = form.KIND != "none" or form.DECAY != "none"
    place = locate(offsets, cu_seqlens, offset, sizes)
    descs = (q_desc, k_desc, v_desc, grad_desc)
    ring = new_tiles(descs, KEY_STAGES, 2)
    encoded = new_encoded(KEY_STAGES, W, dtype, form)
    state_tile = gl.allocate_shared_memory(dtype, [W, W], gl.NVMMASharedLayout.get_default_for([W, W], dtype))
    outs = gl.allocate_shared_memory(dtype, [2, 1, 1, T, W], dk_desc.layout)
    state_full, state_read = barriers(1), barriers(1)
    mbarrier.init(state_full.index(0), count=W // T)
    mbarrier.init(state_read.index(0), count=2)
    tiles = gl.maximum(place.last - place.first + T - 1, 0) // T
    call = Call(load_angles(theta, place, sizes, W, form), place, decay, sizes, tiles, factors)
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
            [4, ENCODERS, 1], [form.GROUP_REGISTERS, form.ENCODER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(multiply_keys, (0, form, keys, call)), (multiply_keys, (1, form, keys, call)),
             (copy_keys, (descs, ring, call))],
            [4, 1], [form.GROUP_REGISTERS, 24],
        )  # fmt: skip
