"""Things that the warps of a product share: tiles and their barriers, angles, decays, encoded tiles, and states in registers."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from warploom.device.activations import activate, exponential
from warploom.device.chunks import ChunkPlace
from warploom.device.decays import clamp_decay
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, init_each, init_ring, matrix, wait_empty
from warploom.device.phase import PhaseStep, cos_sin, phase_step, wrapping_add
from warploom.device.rotation import rotate, rotate_pair_back
from warploom.ops.linear_attention.triton.tiles import LinearSizes, StateScales

BLOCK_T = gl.constexpr(64)  # tokens of a tile
WARPS = gl.constexpr(8)  # that multiply, where there are sines
STRIDE = gl.constexpr(8)  # rows between those of a product's result that a thread holds
PRODUCT_STAGES = gl.constexpr(3)
KEY_STAGES = gl.constexpr(2)


class Form(NamedTuple):
    """Compile-time choices of a kernel."""

    KIND: gl.constexpr  # none, rotate or cosine
    ACTIVATION: gl.constexpr
    DECAY: gl.constexpr  # none, head or token
    FREQUENCIES: gl.constexpr  # of a head, the others are zero
    GROUPS: gl.constexpr  # of warps that share the columns of a product
    ROTATES_BACK: gl.constexpr  # whether gradients of what is encoded are turned back, or LRPE's kernel does that
    ENCODERS: gl.constexpr  # warps that encode
    ENCODER_REGISTERS: gl.constexpr  # of a thread
    GROUP_REGISTERS: gl.constexpr


class HeadAngles(NamedTuple):
    """Angles of a head, in shared memory: `phase_step`, and cosines and sines of what steps add; the first position."""

    whole: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    cosine: gl.shared_memory_descriptor  # (steps, angles)
    sine: gl.shared_memory_descriptor
    position: gl.tensor


class TileRing(NamedTuple):
    """Buffers of the tiles of tensors that arrive together, and barriers for each stage."""

    tiles: gl.tuple  # (stages, 1, 1, BLOCK_T, W) each
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class ChunkCall(NamedTuple):
    """Numbers and tensors that all warps of a program share."""

    angles: HeadAngles
    place: ChunkPlace
    decay: gl.tensor  # see `point_to_decays`
    of_head: gl.tensor  # the head's decay, where it has one
    sizes: LinearSizes
    tiles: gl.int32  # how many there are
    scales: StateScales


class Encoded(NamedTuple):
    """Results of the encoding warps: a barrier for each stage, and where there are decays tiles as states take them."""

    full: gl.shared_memory_descriptor
    weighed: gl.shared_memory_descriptor  # (2, BLOCK_T, W)
    sums: gl.shared_memory_descriptor  # (2, BLOCK_T), of the decays of tokens: see `store_sums`


@gluon.jit
def map_feature(row, W: gl.constexpr, form: gl.constexpr):
    """Returns the feature of ``φ`` at a place of the order in which it is kept."""
    WIDTH: gl.constexpr = W // 2 // form.GROUPS
    if form.KIND == "rotate" and form.GROUPS > 1:
        row = row // WIDTH % 2 * (W // 2) + row // (2 * WIDTH) * WIDTH + row % WIDTH
    return row


@gluon.constexpr_function
def row_layout(W, warps):
    """Returns how warps that encode share a part of a tile (rows, W): a thread has both features of its pairs."""
    return gl.BlockedLayout([1, 8], [512 // W, W // 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def part_rows(W, warps):
    """Returns rows of a tile that such warps encode at a time."""
    return 512 // W * warps


@gluon.constexpr_function
def fits_whole(tiles, W, form):
    """Returns whether a thread has registers for its share of so many tiles and 48 more."""
    return tiles * W // form.ENCODERS + 48 <= form.ENCODER_REGISTERS


@gluon.jit
def copy_tiles(descs, ring, place, tile, count):
    """Have tile number ``tile`` copied into the ``count``-th buffers, once these are empty."""
    slot = wait_empty(ring.empty, count)
    buffers = ()
    for i in gl.static_range(len(descs)):
        buffers = buffers + (ring.tiles[i].index(slot),)
    copy_into(descs, buffers, ring.full.index(slot), place, tile)


@gluon.jit
def copy_into(descs, buffers, full, place, tile):
    """Have tile number ``tile`` of each tensor copied into a buffer."""
    mbarrier.expect(full, len(descs) * descs[0].block_type.nbytes)
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(
            descs[i],
            [place.b.to(gl.int32), place.h.to(gl.int32), place.first + tile * BLOCK_T, 0],
            full,
            buffers[i],
        )


@gluon.jit
def allocate_ring(descs, STAGES: gl.constexpr, arrivals: gl.constexpr):
    """Returns buffers for tiles, of tensors of one form."""
    dtype: gl.constexpr = descs[0].dtype
    W: gl.constexpr = descs[0].block_type.shape[3]
    tiles = ()
    for i in gl.static_range(len(descs)):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_T, W], descs[i].layout),)
    full, empty = barriers(STAGES), barriers(STAGES)
    init_ring(full, empty, arrivals)
    return TileRing(tiles, full, empty)


@gluon.jit
def load_angles(theta, place, sizes, W: gl.constexpr, steps: gl.constexpr, form: gl.constexpr):
    """Returns `HeadAngles` of the place's head."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FEATURES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    COUNT: gl.constexpr = W if form.KIND == "cosine" else W // 2
    whole_words = gl.allocate_shared_memory(gl.int32, [COUNT], WORDS)
    rest_words = gl.allocate_shared_memory(gl.float32, [COUNT], WORDS)
    cosines = gl.allocate_shared_memory(gl.float32, [len(steps), COUNT], WORDS)
    sines = gl.allocate_shared_memory(gl.float32, [len(steps), COUNT], WORDS)
    if form.KIND != "none":
        f = gl.arange(0, COUNT, FEATURES)
        ptrs = theta + place.h * sizes.theta_h + f * sizes.theta_f
        step = phase_step(gl.load(ptrs, mask=f < form.FREQUENCIES, other=0.0))
        whole_words.store(step.whole)
        rest_words.store(step.rest)
        for i in gl.static_range(len(steps)):
            cosine, sine = cos_sin(gl.full([COUNT], steps[i], gl.int32, FEATURES), step, True)
            cosines.index(i).store(cosine)
            sines.index(i).store(sine)
    return HeadAngles(whole_words, rest_words, cosines, sines, place.position)


@gluon.jit
def cos_sin_at(angles, tokens, begin: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns cosines and sines (rows, COUNT) of tokens (rows,) of the sequence, of the angles from ``begin`` on."""
    whole = angles.whole.slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    rest = angles.rest.slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    step = PhaseStep(whole, rest, 0.0)
    return cos_sin(wrapping_add(angles.position, tokens)[:, None], step, True)


@gluon.jit
def cos_sin_over(angles, step: gl.constexpr, begin: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns cosines and sines (1, COUNT) of what a step adds to the angles from ``begin`` on: see `HeadAngles`."""
    cosine = angles.cosine.index(step).slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    sine = angles.sine.index(step).slice(begin, COUNT).load(gl.SliceLayout(0, LAYOUT))[None, :]
    return cosine, sine


@gluon.jit
def add_angles(cosine, sine, by_cosine, by_sine):
    """Returns cosines and sines of the sums of two angles."""
    return gl.fma(cosine, by_cosine, -(sine * by_sine)), gl.fma(sine, by_cosine, cosine * by_sine)


@gluon.jit
def load_head_decay(decay, place, sizes, form: gl.constexpr):
    """Returns the logarithm of the head's decay, or 0."""
    g = 0.0
    if form.DECAY == "head":
        g = clamp_decay(gl.load(decay + place.h * sizes.decay_h).to(gl.float32))
    return g


@gluon.jit
def point_to_decays(decay, place, sizes, form: gl.constexpr):
    """Returns where the decays of the sequence's tokens lie, of the place's head; 0 if tokens have none."""
    ptrs = 0
    if form.DECAY == "token":
        ptrs = decay + place.b * sizes.decay_b + place.h * sizes.decay_h + place.start.to(gl.int64) * sizes.decay_n
    return ptrs


@gluon.jit
def load_call(theta, decay, place, sizes, scales, W: gl.constexpr, STEP: gl.constexpr, form: gl.constexpr):
    """Returns the `ChunkCall` of a place, with angles of steps by ``STEP`` rows and by those of an encoding part."""
    tiles = gl.maximum(place.last - place.first + BLOCK_T - 1, 0) // BLOCK_T
    angles = load_angles(theta, place, sizes, W, (STEP, part_rows(W, form.ENCODERS)), form)
    of_head = load_head_decay(decay, place, sizes, form)
    return ChunkCall(angles, place, point_to_decays(decay, place, sizes, form), of_head, sizes, tiles, scales)


@gluon.jit
def store_sums(sums, call, first, form: gl.constexpr):
    """Stores the sums of a tile's logarithms of the decays of tokens, up to and with each.

    No sum is beyond ``BLOCK_T · FORGETS``, where float32 has steps of 2⁻¹¹: an eighth of what rounding to bfloat16 is off.
    """
    if form.DECAY == "token":
        SUMS: gl.constexpr = gl.BlockedLayout([1, BLOCK_T // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
        t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, SUMS))
        ptrs = call.decay + (first + t).to(gl.int64) * call.sizes.decay_n
        g = clamp_decay(gl.load(ptrs, mask=t < call.place.last - first, other=0.0).to(gl.float32))
        last = gl.arange(0, BLOCK_T, gl.SliceLayout(1, SUMS))
        sums.store(gl.sum(gl.where(t[None, :] <= last[:, None], g[None, :], 0.0), 1))


@gluon.jit
def sum_decays(
    call, sums, first, begin: gl.constexpr, ROWS: gl.constexpr, form: gl.constexpr, LAYOUT: gl.constexpr
):
    """Returns sums of a tile's logarithms of decays up to and with tokens ``begin …`` (ROWS,), and of all of them."""
    if form.DECAY == "head":
        count = gl.minimum(call.place.last - first, BLOCK_T)
        t = begin + gl.arange(0, ROWS, LAYOUT)
        a = call.of_head * gl.minimum(t + 1, count).to(gl.float32)
        total = call.of_head * count.to(gl.float32)
    else:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        a = sums.slice(begin, ROWS).load(LAYOUT)
        total = gl.sum(sums.slice(BLOCK_T - 1, 1).load(ONE), 0)
    return a, total


@gluon.jit
def encode_tiles(tiles, encoded, count, first, call, form: gl.constexpr, REVERSE: gl.constexpr):
    """Encodes the ``count``-th tiles (BLOCK_T, W) in place, and weighs those of the first tensor by decays, for the state.

    The angles of the first rows that are encoded at a time are exact, those of others are turned on from them.
    """
    W: gl.constexpr = tiles[0].shape[4]
    ROWS: gl.constexpr = row_layout(W, form.ENCODERS)
    PART_ROWS: gl.constexpr = part_rows(W, form.ENCODERS)
    WIDTH: gl.constexpr = W // 2 // form.GROUPS
    dtype: gl.constexpr = tiles[0].dtype
    slot = count % encoded.full.shape[0]
    sums = encoded.sums.index(count % 2)
    store_sums(sums, call, first, form)
    if form.KIND == "rotate":
        t = first + gl.arange(0, PART_ROWS, gl.SliceLayout(1, ROWS))
        cosine, sine = cos_sin_at(call.angles, t, 0, W // 2, ROWS)
        by_cosine, by_sine = cos_sin_over(call.angles, 1, 0, W // 2, ROWS)
    COUNT: gl.constexpr = len(tiles)
    AHEAD: gl.constexpr = COUNT * (BLOCK_T // PART_ROWS) if fits_whole(COUNT, W, form) else 1
    for begin in gl.static_range(0, COUNT * (BLOCK_T // PART_ROWS), AHEAD):
        loaded = ()
        for j in gl.static_range(begin, begin + AHEAD):
            tile = matrix(tiles[j % COUNT], slot).slice(j // COUNT * PART_ROWS, PART_ROWS)
            loaded = loaded + (tile.load(ROWS),)
        for j in gl.static_range(begin, begin + AHEAD):
            x = loaded[j - begin]
            if form.KIND == "rotate":
                if j > 0 and j % COUNT == 0:
                    cosine, sine = add_angles(cosine, sine, by_cosine, by_sine)
                x1, x2 = x.reshape([PART_ROWS, 2, W // 2]).permute([0, 2, 1]).split()
                x1 = activate(gl.convert_layout(x1, ROWS).to(gl.float32), form.ACTIVATION)
                x2 = activate(gl.convert_layout(x2, ROWS).to(gl.float32), form.ACTIVATION)
                y1, y2 = rotate(x1, x2, cosine, sine, "rotate")
                y = gl.join(
                    y1.reshape([PART_ROWS, form.GROUPS, WIDTH]), y2.reshape([PART_ROWS, form.GROUPS, WIDTH])
                )
                y = y.permute([0, 1, 3, 2]).reshape([PART_ROWS, W])
            else:
                y = activate(x.to(gl.float32), form.ACTIVATION)
            if form.KIND != "none" or form.ACTIVATION != "none":
                matrix(tiles[j % COUNT], slot).slice(j // COUNT * PART_ROWS, PART_ROWS).store(y.to(dtype))
            if j % COUNT == 0 and form.DECAY != "none":
                a, total = sum_decays(
                    call, sums, first, j // COUNT * PART_ROWS, PART_ROWS, form, gl.SliceLayout(1, y.type.layout)
                )
                if REVERSE:
                    weights = exponential(a)
                else:
                    weights = exponential(total - a)
                encoded.weighed.index(count % 2).slice(j // COUNT * PART_ROWS, PART_ROWS).store(
                    (y * weights[:, None]).to(dtype)
                )


@gluon.jit
def encode_parts(
    tiles, sines, angles, first, step: gl.constexpr, AHEAD: gl.constexpr, COUNT: gl.constexpr, form: gl.constexpr,
    VEC: gl.constexpr = 8,
):  # fmt: skip
    """Encodes tiles (BLOCK_T, W) by COUNT warps: by cosines in place, and by sines into other buffers.

    A thread has VEC neighbouring features of a row.

    The angles of the first rows that are encoded at a time are exact, those of others are turned on from them by a
    step of `HeadAngles`. AHEAD times as many rows are loaded before the first of them are stored, since between loads and
    stores of a buffer all warps wait for each other.
    """
    ROWS: gl.constexpr = VEC // 2 * COUNT
    PIECE: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 2, 64 // VEC], [COUNT, 1], [1, 0])
    TILES: gl.constexpr = len(tiles)
    dtype: gl.constexpr = tiles[0].dtype
    for i in gl.static_range(tiles[0].shape[1] // 64):
        by_cosine, by_sine = cos_sin_over(angles, step, i * 64, 64, PIECE)
        t = first + gl.arange(0, ROWS, gl.SliceLayout(1, PIECE))
        cosine, sine = cos_sin_at(angles, t, i * 64, 64, PIECE)
        for begin in gl.static_range(0, BLOCK_T, AHEAD * ROWS):
            loaded = ()
            for j in gl.static_range(TILES * AHEAD):
                one = tiles[j % TILES].slice(begin + j // TILES * ROWS, ROWS).slice(i * 64, 64, dim=1)
                loaded = loaded + (one.load(PIECE),)
            for j in gl.static_range(TILES * AHEAD):
                if begin + j > 0 and j % TILES == 0:
                    cosine, sine = add_angles(cosine, sine, by_cosine, by_sine)
                x = activate(loaded[j].to(gl.float32), form.ACTIVATION)
                one = tiles[j % TILES].slice(begin + j // TILES * ROWS, ROWS).slice(i * 64, 64, dim=1)
                two = sines[j % TILES].slice(begin + j // TILES * ROWS, ROWS).slice(i * 64, 64, dim=1)
                one.store((x * cosine).to(dtype))
                two.store((x * sine).to(dtype))


@gluon.jit
def decay_tile(tile, encoded, count, first, call, form: gl.constexpr, REVERSE: gl.constexpr):
    """Stores the rows of the ``count``-th tile (BLOCK_T, W), which is not encoded, weighed by decays for the state."""
    if form.DECAY != "none":
        W: gl.constexpr = tile.shape[1]
        ROWS: gl.constexpr = row_layout(W, form.ENCODERS)
        PART_ROWS: gl.constexpr = part_rows(W, form.ENCODERS)
        for begin in gl.static_range(0, BLOCK_T, PART_ROWS):
            a, total = sum_decays(
                call, encoded.sums.index(count % 2), first, begin, PART_ROWS, form, gl.SliceLayout(1, ROWS)
            )
            weights = exponential(a) if REVERSE else exponential(total - a)
            rows = tile.slice(begin, PART_ROWS).load(ROWS).to(gl.float32) * weights[:, None]
            encoded.weighed.index(count % 2).slice(begin, PART_ROWS).store(rows.to(tile.dtype))


@gluon.jit
def split_rows(x):
    """Returns two halves (BLOCK_T / 2, W) of a tile of results; a thread holds rows of both that are `STRIDE` apart."""
    W: gl.constexpr = x.shape[1]
    one, two = x.reshape([BLOCK_T // 2 // STRIDE, 2, STRIDE, W]).permute([0, 2, 3, 1]).split()
    return one.reshape([BLOCK_T // 2, W]), two.reshape([BLOCK_T // 2, W])


@gluon.jit
def join_rows(one, two):
    """Returns the tile (BLOCK_T, W) of two halves of `split_rows`."""
    W: gl.constexpr = one.shape[1]
    both = gl.join(one, two).reshape([BLOCK_T // 2 // STRIDE, STRIDE, W, 2])
    return both.permute([0, 3, 1, 2]).reshape([BLOCK_T, W])


@gluon.jit
def cos_sin_of_rows(angles, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns cosines and sines for the first half of `split_rows`, and those of the angle from it to the second."""
    i = gl.arange(0, BLOCK_T // 2, gl.SliceLayout(1, LAYOUT))
    cosine, sine = cos_sin_at(angles, first + i // STRIDE * (2 * STRIDE) + i % STRIDE, 0, COUNT, LAYOUT)
    by_cosine, by_sine = cos_sin_over(angles, 0, 0, COUNT, LAYOUT)
    return cosine, sine, by_cosine, by_sine


@gluon.jit
def rotate_back(grads, angles, first, form: gl.constexpr):
    """Returns gradients (BLOCK_T, W) of what was encoded, rotated back if the form says so."""
    W: gl.constexpr = grads.shape[1]
    WIDTH: gl.constexpr = W // 2 // form.GROUPS
    if form.KIND == "rotate" and form.ROTATES_BACK:
        g1, g2 = grads.reshape([BLOCK_T, form.GROUPS, 2, WIDTH]).permute([0, 1, 3, 2]).split()
        one1, two1 = split_rows(g1.reshape([BLOCK_T, W // 2]))
        one2, two2 = split_rows(g2.reshape([BLOCK_T, W // 2]))
        HALF: gl.constexpr = one1.type.layout
        cosine, sine, by_cosine, by_sine = cos_sin_of_rows(angles, first, W // 2, HALF)
        one1, one2 = rotate_pair_back(one1, one2, cosine, sine)
        cosine, sine = add_angles(cosine, sine, by_cosine, by_sine)
        two1, two2 = rotate_pair_back(two1, two2, cosine, sine)
        d1 = join_rows(one1, two1)
        d2 = join_rows(one2, two2)
        grads = gl.join(d1, d2).permute([0, 2, 1]).reshape([BLOCK_T, W])
    return grads


@gluon.jit
def sum_over_tile(call, sums, first, form: gl.constexpr):
    """Returns the sum of logarithms of decays of the tile whose first token is ``first``; 0 if it is outside of the chunk."""
    if form.DECAY == "head":
        count = gl.minimum(call.place.last - first, BLOCK_T)
        count = gl.where(first >= call.place.first, gl.maximum(count, 0), 0)
        total = call.of_head * count.to(gl.float32)
    else:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        total = gl.sum(sums.slice(BLOCK_T - 1, 1).load(ONE), 0)
    return total


@gluon.jit
def decay_over_tile(call, sums, first, form: gl.constexpr):
    """Returns the decay over the tile whose first token is ``first``; 1 if it is outside of the chunk."""
    return exponential(sum_over_tile(call, sums, first, form))


@gluon.jit
def form_decays_between(
    call, sums, form: gl.constexpr, REVERSE: gl.constexpr, PAIRS: gl.constexpr, begin: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Returns decays (BLOCK_T, COUNT) between tokens and those from ``begin`` on, times the scale.

    They are zero where the row's token does not see the column's.
    """
    i = gl.arange(0, BLOCK_T, gl.SliceLayout(1, PAIRS))
    j = begin + gl.arange(0, COUNT, gl.SliceLayout(0, PAIRS))
    distance = j[None, :] - i[:, None] if REVERSE else i[:, None] - j[None, :]
    if form.DECAY == "head":
        between = call.of_head * distance.to(gl.float32)
    else:
        a = sums.load(gl.SliceLayout(1, PAIRS))
        b = sums.slice(begin, COUNT).load(gl.SliceLayout(0, PAIRS))
        between = b[None, :] - a[:, None] if REVERSE else a[:, None] - b[None, :]
    return gl.where(distance >= 0, exponential(between) * call.scales.scale, 0.0)


@gluon.jit
def form_head_decays(call, form: gl.constexpr, REVERSE: gl.constexpr, PAIRS: gl.constexpr):
    """Returns `form_decays_between` of a head's decay, which every tile has."""
    decays = 0.0
    if form.DECAY == "head":
        decays = form_decays_between(call, None, form, REVERSE, PAIRS, 0, BLOCK_T)
    return decays


@gluon.jit
def form_tile_decays(of_head, call, sums, form: gl.constexpr, REVERSE: gl.constexpr, PAIRS: gl.constexpr):
    """Returns `form_decays_between` of a tile, from `form_head_decays`."""
    decays = of_head
    if form.DECAY == "token":
        decays = form_decays_between(call, sums, form, REVERSE, PAIRS, 0, BLOCK_T)
    return decays


@gluon.jit
def decay_scores(scores, decays, form: gl.constexpr, REVERSE: gl.constexpr, begin: gl.constexpr = 0):
    """Returns scores (BLOCK_T, COUNT) times their decays; zero where the row's token does not see the column's."""
    PAIRS: gl.constexpr = scores.type.layout
    if form.DECAY != "none":
        scores *= decays
    else:
        i = gl.arange(0, BLOCK_T, gl.SliceLayout(1, PAIRS))[:, None]
        j = begin + gl.arange(0, scores.shape[1], gl.SliceLayout(0, PAIRS))[None, :]
        scores = gl.where(i <= j if REVERSE else i >= j, scores, 0.0)
    return scores


@gluon.jit
def state_pointers(
    ptr, place, first_f: gl.constexpr, strides, ROWS: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr,
    form: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Returns pointers to rows of the place's state (F, E), or ``TRANSPOSED`` (E, F), with F in the order of `map_feature`."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]
    head = ptr + place.slot * strides.s + place.h * strides.h + first_f * strides.f
    if TRANSPOSED:
        ptrs = head + i.to(gl.int64) * strides.e + map_feature(j, W, form).to(gl.int64) * strides.f
    else:
        ptrs = head + map_feature(i, W, form).to(gl.int64) * strides.f + j.to(gl.int64) * strides.e
    return ptrs


@gluon.jit
def load_state(
    ptr, place, first_f: gl.constexpr, factor, strides, ROWS: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr,
    form: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Returns rows of a state in float32, times a factor; zero where there is none."""
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
    """Stores what `load_state` loads."""
    if ptr is not None:
        LAYOUT: gl.constexpr = state.type.layout
        ROWS: gl.constexpr = state.shape[0]
        ptrs = state_pointers(ptr, place, first_f, strides, ROWS, W, LAYOUT, form, TRANSPOSED)
        gl.store(ptrs, (state * factor).to(ptr.dtype.element_ty))


@gluon.jit
def allocate_sums(form: gl.constexpr):
    """Returns memory for the sums (2, BLOCK_T) of two tiles' decays of tokens."""
    return gl.allocate_shared_memory(
        gl.float32, [2, BLOCK_T if form.DECAY == "token" else 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def allocate_encoded(STAGES: gl.constexpr, W: gl.constexpr, dtype: gl.constexpr, form: gl.constexpr):
    """Returns barriers of encoded tiles, and buffers for weighed ones if there are decays."""
    full = barriers(STAGES)
    init_each(full)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_T, W], dtype)
    weighed = full
    if form.DECAY != "none":
        weighed = gl.allocate_shared_memory(dtype, [2, BLOCK_T, W], TILE)
    return Encoded(full, weighed, allocate_sums(form))
