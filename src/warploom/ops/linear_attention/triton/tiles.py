"""Tiles of linear attention: a program's place, loads and encoding of rows, decays, products, states.

Tokens come in tiles (T, features) and tiles in chunks; a program goes through the tiles of one chunk of one head. What
`φ` makes of a tile is a tuple of parts (T, F): two for ``rotate`` (both halves of the pairs) and ``cosine`` (cosines
and sines), one without an encoding.

No tile of tokens, and no piece of features that a product adds over, has more than 32 rows: products with 64 rows and
more are those of Hopper's warp groups, whose descriptors the assembler of CUDA 12.8 mixes up where the factor in shared
memory was computed in the same loop. Features of more than one piece are tuples of tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import activate, powers, reciprocal
from warploom.device.chunks import row_pointers, store_plain
from warploom.device.decays import clamp_decay, exp
from warploom.device.phase import PhaseStep, cos_sin, phase_step, wrapping_add
from warploom.device.product import dot, find_scale, round_to
from warploom.device.rotation import rotate, rotate_backward
from warploom.device.rows import load_input, store_input


class LinearSizes(NamedTuple):
    """Sizes of a call and of its chunks. Every number is a run-time value: none of them ever causes a compilation."""

    tokens: tl.int32  # of a batch entry
    heads: tl.int32
    chunks: tl.int32  # of a batch entry
    chunk: tl.int32  # tokens of a chunk
    columns: tl.int32  # blocks of a result's features
    sequences: tl.int32  # packed ones
    cu_stride: tl.int64
    theta_h: tl.int64
    theta_f: tl.int64
    offsets_b: tl.int64
    decay_b: tl.int64
    decay_n: tl.int64
    decay_h: tl.int64


class StateScales(NamedTuple):
    """Factors of what a product reads and writes."""

    scale: tl.float32  # of results
    into: tl.float32  # of the state before it
    out_of: tl.float32  # of the state behind it


class LinearConfig(NamedTuple):
    """Compile-time choices of a kernel."""

    KIND: tl.constexpr  # none, rotate, interleaved or cosine
    ACTIVATION: tl.constexpr
    DECAY: tl.constexpr  # none, head or token
    CAUSAL: tl.constexpr
    E: tl.constexpr  # features of a value
    BLOCK_T: tl.constexpr
    BLOCK_F: tl.constexpr  # angles, or features without them, of a tile
    BLOCK_E: tl.constexpr  # features of a value, of a tile
    PIECES: tl.constexpr  # tiles of the side of a state over which products with it add up
    STATE_VEC: tl.constexpr  # common divisor of states' strides, where a value's features are adjacent, or 0


# ----------------------------------------------------------------------------------------------------------
# Places and rows
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def find_tail(place, sizes):
    """Returns the first and last token, within the sequence, of the chunk's rows that lie behind all packed sequences.

    The last sequence has the chunks from its first token to the end of all rows: see `warploom.device.packed`.
    """
    first = tl.maximum(place.first, place.last)
    last = tl.minimum(place.first + sizes.chunk, sizes.tokens - place.start)
    return first, tl.where(place.sequence == sizes.sequences - 1, last, first)


@triton.jit
def zero_rows_past_end(
    out, place, sizes, strides, first, FEATURES: tl.constexpr, BLOCK: tl.constexpr, spec: tl.constexpr,
    config: tl.constexpr,
):  # fmt: skip
    """Stores zeros in the rows of `find_tail`, in BLOCK features from ``first`` on."""
    start, end = find_tail(place, sizes)
    for begin in range(start, end, config.BLOCK_T):
        n = begin + tl.arange(0, config.BLOCK_T)
        rows = row_pointers(out, n, place, strides, spec.VEC)
        zeros = tl.zeros((config.BLOCK_T, BLOCK), tl.float32)
        store_plain(rows, zeros, n < end, strides, first, FEATURES, BLOCK, spec.UNIT)


# ----------------------------------------------------------------------------------------------------------
# Encoding
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_steps(theta, place, first, PIECES: tl.constexpr, sizes, spec: tl.constexpr, config: tl.constexpr):
    """Returns the `PhaseStep` (1, F) of the head's angles, of every piece from ``first`` on."""
    steps = ()
    if config.KIND != "none":
        for i in tl.static_range(PIECES):
            f = first + i * config.BLOCK_F + tl.arange(0, config.BLOCK_F)
            ptrs = theta + place.h * sizes.theta_h + f * sizes.theta_f
            steps = steps + (phase_step(tl.load(ptrs, mask=f < spec.E, other=0.0)[None, :]),)
    return steps


@triton.jit
def step_of(steps, i: tl.constexpr):
    """Returns one of several `PhaseStep`: Triton 3.6 loses the names of fields within a tuple."""
    whole, rest, unit = steps[i]
    return PhaseStep(whole, rest, unit)


@triton.jit
def cos_sin_within(steps, config: tl.constexpr, HALF: tl.constexpr):
    """Returns cosines and sines (T, F) of a tile's tokens, counted from its first, of every piece."""
    turns = ()
    for i in tl.static_range(len(steps)):
        turns = turns + (cos_sin(tl.arange(0, config.BLOCK_T)[:, None], step_of(steps, i), HALF),)
    return turns


@triton.jit
def cos_sin_from(first, place, steps, within, HALF: tl.constexpr):
    """Returns cosines and sines of the tile whose first token is ``first``: its angle is added to those of `cos_sin_within`."""
    turns = ()
    position = wrapping_add(first, place.position) + tl.zeros((1, 1), tl.int32)
    for i in tl.static_range(len(steps)):
        cosine, sine = cos_sin(position, step_of(steps, i), HALF)
        c, s = within[i]
        turns = turns + ((tl.fma(c, cosine, -(s * sine)), tl.fma(s, cosine, c * sine)),)
    return turns


@triton.jit
def load_pieces(
    rows, mask, strides, first, PIECES: tl.constexpr, spec: tl.constexpr, config: tl.constexpr
):  # fmt: skip
    """Returns what is to be encoded, from angle ``first`` on: of every piece its features (T, F), or both of its pairs."""
    found = ()
    for i in tl.static_range(PIECES):
        one, two = load_input(rows, mask, strides.f, first + i * config.BLOCK_F, spec, config.BLOCK_F)
        if spec.KIND == "cosine":
            found = found + (one,)
        else:
            found = found + (one, two)
    return found


@triton.jit
def softmax_features(x, first, spec: tl.constexpr, config: tl.constexpr):
    """Returns softmax over the features of all tiles of `load_pieces`."""
    MEMBERS: tl.constexpr = 1 if spec.KIND == "cosine" else 2
    top = tl.full((config.BLOCK_T, 1), float("-inf"), tl.float32)
    masked = ()
    for i in tl.static_range(len(x)):
        inside = first + (i // MEMBERS) * config.BLOCK_F + tl.arange(0, config.BLOCK_F) < spec.F
        one = tl.where(inside[None, :], x[i].to(tl.float32), float("-inf"))
        top = tl.maximum(top, tl.max(one, axis=1)[:, None])
        masked = masked + (one,)
    total = tl.zeros((config.BLOCK_T,), tl.float32)
    found = ()
    for i in tl.static_range(len(x)):
        one = powers(masked[i], top)
        total += tl.sum(one, axis=1)
        found = found + (one,)
    scale = reciprocal(total)[:, None]
    scaled = ()
    for i in tl.static_range(len(x)):
        scaled = scaled + (found[i] * scale,)
    return scaled


@triton.jit
def activate_pieces(x, first, spec: tl.constexpr, config: tl.constexpr):
    """Returns tiles of `load_pieces` behind their activation, in float32; zero where there are no features."""
    found = ()
    if config.ACTIVATION == "softmax":
        found = softmax_features(x, first, spec, config)
    else:
        MEMBERS: tl.constexpr = 1 if spec.KIND == "cosine" else 2
        for i in tl.static_range(len(x)):
            one = activate(x[i].to(tl.float32), config.ACTIVATION)
            if config.ACTIVATION == "sigmoid":
                inside = first + (i // MEMBERS) * config.BLOCK_F + tl.arange(0, config.BLOCK_F) < spec.F
                one = tl.where(inside[None, :], one, 0.0)
            found = found + (one,)
    return found


@triton.jit
def encode(x, turns, first, spec: tl.constexpr, config: tl.constexpr):
    """Returns ``φ`` of the tiles of `load_pieces`, in the dtype of memory: of every piece its parts (T, F)."""
    dtype: tl.constexpr = x[0].dtype
    found = ()
    if config.KIND == "none" and config.ACTIVATION == "none":
        found = x
    else:
        y = activate_pieces(x, first, spec, config)
        if config.KIND == "none":
            for i in tl.static_range(len(y)):
                found = found + (round_to(y[i], dtype),)
        else:
            MEMBERS: tl.constexpr = 1 if spec.KIND == "cosine" else 2
            for i in tl.static_range(len(turns)):
                cosine, sine = turns[i]
                one, two = rotate(y[i * MEMBERS], y[i * MEMBERS + MEMBERS - 1], cosine, sine, spec.KIND)
                found = found + (round_to(one, dtype), round_to(two, dtype))
    return found


@triton.jit
def store_input_gradient(
    rows, grads, x, turns, mask, strides, first, spec: tl.constexpr, config: tl.constexpr, THETA: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile from those of its parts, float32; returns that of its angles (T, F)."""
    if config.KIND == "none":
        if config.ACTIVATION == "none":
            d1 = grads[0]
        else:
            one = tl.full(grads[0].shape, 1.0, tl.float32)
            zero = tl.zeros(grads[0].shape, tl.float32)
            x1 = x[0].to(tl.float32)
            d1, _, _ = rotate_backward(
                x1, x1, grads[0], zero, one, zero, spec, config.ACTIVATION, False, config.BLOCK_F
            )
        d2 = d1
        dphi = d1
    else:
        x1 = x[0]
        x2 = x[1]
        cosine, sine = turns[0]
        if config.ACTIVATION != "none" or THETA:
            x1 = x1.to(tl.float32)
            x2 = x2.to(tl.float32)
        d1, d2, dphi = rotate_backward(
            x1, x2, grads[0], grads[1], cosine, sine, spec, config.ACTIVATION, THETA, config.BLOCK_F
        )
    dtype: tl.constexpr = rows.dtype.element_ty
    store_input(rows, round_to(d1, dtype), round_to(d2, dtype), mask, strides.f, first, spec, config.BLOCK_F)
    return dphi


# ----------------------------------------------------------------------------------------------------------
# Decays
# ----------------------------------------------------------------------------------------------------------


class TileDecays(NamedTuple):
    """Sums of the logarithms of a tile's decays."""

    up_to: tl.tensor  # (T,): up to and with each token
    behind: tl.tensor  # (T,): of the tokens behind each; ``total − up_to`` would have the rounding of both
    total: tl.tensor  # of all tokens
    parts: tl.tuple  # terms of ``up_to``; see `split_decays`


@triton.jit
def sum_tile_decays(decay, first, last, place, sizes, config: tl.constexpr):
    """Returns the `TileDecays` of the tile from token ``first`` on, up to token ``last``."""
    t = tl.arange(0, config.BLOCK_T)
    count = last - first
    if config.DECAY == "none":
        a = tl.zeros((config.BLOCK_T,), tl.float32)
        behind = a
        total = 0.0
        parts = (a,)
    elif config.DECAY == "head":
        g = clamp_decay(tl.load(decay + place.h * sizes.decay_h).to(tl.float32))
        count = tl.minimum(count, config.BLOCK_T).to(tl.float32)
        until = tl.minimum((t + 1).to(tl.float32), count)
        a = g * until
        behind = g * (count - until)
        total = g * count
        parts = (a,)
    else:
        n = (place.start + first + t).to(tl.int64)
        ptrs = decay + place.b * sizes.decay_b + n * sizes.decay_n + place.h * sizes.decay_h
        g = clamp_decay(tl.load(ptrs, mask=t < count, other=0.0).to(tl.float32))
        parts = split_decays(g)
        a = parts[0] + parts[1]
        within = t + 1 < tl.minimum(count, config.BLOCK_T)
        next_one = clamp_decay(tl.load(ptrs + sizes.decay_n, mask=within, other=0.0).to(tl.float32))
        behind = tl.cumsum(next_one, axis=0, reverse=True)
        total = tl.sum(g, axis=0)
    return TileDecays(a, behind, total, parts)


@triton.jit
def split_decays(g):
    """Returns sums (T,) up to and with each token of the whole numbers in logarithms of decays, and of the fractions.

    The first are exact. So are their differences: strong decays leave no rounding in the sums of the weak ones behind
    them. Of decays that are all weaker than 1/e the first are 0.
    """
    whole = -tl.floor(-g)
    return tl.cumsum(whole, axis=0), tl.cumsum(g - whole, axis=0)


@triton.jit
def form_decays_between(parts, REVERSE: tl.constexpr):
    """Returns sums (T, T) of logarithms of decays from the column's token to the row's; the other way if ``REVERSE``."""
    between = parts[0][None, :] - parts[0][:, None] if REVERSE else parts[0][:, None] - parts[0][None, :]
    if len(parts) > 1:
        between += parts[1][None, :] - parts[1][:, None] if REVERSE else parts[1][:, None] - parts[1][None, :]
    return between


@triton.jit
def decay_scores(scores, parts, config: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """Returns scores (T, T) of pairs of a tile, times the decay between them; zero where the row's token sees not the column's.

    A token sees those before it and itself, or if ``REVERSE`` those behind it.
    """
    t = tl.arange(0, config.BLOCK_T)
    if REVERSE:
        seen = t[:, None] <= t[None, :]
    else:
        seen = t[:, None] >= t[None, :]
    if config.DECAY != "none":
        scores *= exp(tl.where(seen, form_decays_between(parts, REVERSE), 0.0), HALF)
    return tl.where(seen, scores, 0.0)


@triton.jit
def scale_rows(x, weights):
    """Returns a tile, times a weight (T,) for each of its rows, in its dtype."""
    return round_to(x.to(tl.float32) * weights[:, None], x.dtype)


# ----------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def multiply_rounding_right(a, x, acc):
    """Returns ``a · x + acc``, where ``x`` is float32 and is rounded to the dtype of ``a``."""
    if a.dtype == tl.float16:  # which does not hold every float32
        size = find_scale(x)
        acc += dot(a, round_to(x / size, a.dtype), tl.zeros(acc.shape, tl.float32)) * size
    else:
        acc = dot(a, round_to(x, a.dtype), acc)
    return acc


@triton.jit
def multiply_rounding_left(x, c, acc):
    """Returns ``x · c + acc``, where ``x`` is float32 and is rounded to the dtype of ``c``."""
    if c.dtype == tl.float16:
        size = find_scale(x)
        acc += dot(round_to(x / size, c.dtype), c, tl.zeros(acc.shape, tl.float32)) * size
    else:
        acc = dot(round_to(x, c.dtype), c, acc)
    return acc


@triton.jit
def score_pairs(a, b):
    """Returns inner products (T, T) of the rows of two tuples of tiles."""
    scores = tl.zeros((a[0].shape[0], b[0].shape[0]), tl.float32)
    for i in tl.static_range(len(a)):
        scores = dot(a[i], tl.trans(b[i]), scores)
    return scores


@triton.jit
def apply_state(a, state, RESULTS: tl.constexpr):
    """Returns ``a · state`` in float32, a tile for each of so many parts."""
    found = ()
    for p in tl.static_range(RESULTS):
        acc = tl.zeros((a[0].shape[0], state[p].shape[1]), tl.float32)
        for i in tl.static_range(len(a)):
            acc = multiply_rounding_right(a[i], state[i * RESULTS + p], acc)
        found = found + (acc,)
    return found


@triton.jit
def update_state(state, b, c, weights, total, config: tl.constexpr, HALF: tl.constexpr):
    """Returns the state behind a tile: what was there, decayed, and ``bᵀ c`` with weights (T,) of the tokens."""
    decayed = ()
    for p in tl.static_range(len(c)):
        if config.DECAY == "none":
            decayed = decayed + (c[p],)
        else:
            decayed = decayed + (scale_rows(c[p], weights),)
    found = ()
    for i in tl.static_range(len(b)):
        for p in tl.static_range(len(c)):
            one = state[i * len(c) + p]
            if config.DECAY != "none":
                one *= exp(total, False)
            found = found + (dot(tl.trans(b[i]), decayed[p], one),)
    return found


# ----------------------------------------------------------------------------------------------------------
# States
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def state_features(p: tl.constexpr, first, spec: tl.constexpr, config: tl.constexpr):
    """Returns which features (F,) of φ part ``p`` holds from ``first`` on, and which of them there are."""
    f = first + tl.arange(0, config.BLOCK_F)
    if config.KIND == "interleaved":
        rows = 2 * f + p
    else:
        rows = f + p * spec.F
    return rows, f < spec.F


@triton.jit
def state_pointers(
    ptr, index, h, first_f, first_e, p: tl.constexpr, strides, spec: tl.constexpr, config: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Returns pointers to part ``p`` of a state, (F, E) or ``TRANSPOSED`` (E, F), and which of them there are."""
    f, f_mask = state_features(p, first_f, spec, config)
    e = first_e + tl.arange(0, config.BLOCK_E)
    e_mask = e < config.E
    VEC: tl.constexpr = max(config.STATE_VEC, 1)
    head = ptr + index * (strides.s * VEC) + h * (strides.h * VEC)
    rows = f.to(tl.int64) * (strides.f * VEC)
    columns = e if config.STATE_VEC else e * strides.e
    if TRANSPOSED:
        ptrs = head + rows[None, :] + columns[:, None]
        mask = f_mask[None, :] & e_mask[:, None]
    else:
        ptrs = head + rows[:, None] + columns[None, :]
        mask = f_mask[:, None] & e_mask[None, :]
    return ptrs, mask


@triton.jit
def load_state(
    ptr, index, h, first_f, first_e, factor, strides, spec: tl.constexpr, config: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Returns the tiles of a state in float32, times a factor; zeros where there is none.

    They are those of all features of φ by ``BLOCK_E`` of a value from ``first_e`` on, of every piece its parts; or
    ``TRANSPOSED`` those of all features of a value by both parts' ``BLOCK_F`` from ``first_f`` on.
    """
    state = ()
    for i in tl.static_range(config.PIECES):
        state = state + load_state_piece(
            ptr, i, index, h, first_f, first_e, factor, strides, spec, config, TRANSPOSED
        )
    return state


@triton.jit
def load_state_piece(
    ptr, i: tl.constexpr, index, h, first_f, first_e, factor, strides, spec: tl.constexpr, config: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Returns the parts of piece ``i`` of `load_state`."""
    PARTS: tl.constexpr = 1 if config.KIND == "none" else 2
    F_STEP: tl.constexpr = 0 if TRANSPOSED else config.BLOCK_F
    E_STEP: tl.constexpr = config.BLOCK_E if TRANSPOSED else 0
    parts = ()
    for p in tl.static_range(PARTS):
        if ptr is None:
            if TRANSPOSED:
                one = tl.zeros((config.BLOCK_E, config.BLOCK_F), tl.float32)
            else:
                one = tl.zeros((config.BLOCK_F, config.BLOCK_E), tl.float32)
        else:
            ptrs, mask = state_pointers(
                ptr, index, h, first_f + i * F_STEP, first_e + i * E_STEP, p, strides, spec, config, TRANSPOSED
            )
            one = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) * factor
        parts = parts + (one,)
    return parts


@triton.jit
def apply_loaded_state(
    a, ptr, index, h, first_f, first_e, factor, strides, spec: tl.constexpr, config: tl.constexpr,
    TRANSPOSED: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Returns what `apply_state` does, with a state that is loaded piece by piece, so that only one is held."""
    ROWS: tl.constexpr = len(a) // config.PIECES
    found = ()
    for _p in tl.static_range(RESULTS):
        zeros = tl.zeros((a[0].shape[0], config.BLOCK_F if TRANSPOSED else config.BLOCK_E), tl.float32)
        found = found + (zeros,)
    for i in tl.static_range(config.PIECES):
        piece = load_state_piece(ptr, i, index, h, first_f, first_e, factor, strides, spec, config, TRANSPOSED)
        whole = ()
        for p in tl.static_range(RESULTS):
            acc = found[p]
            for j in tl.static_range(ROWS):
                acc = multiply_rounding_right(a[i * ROWS + j], piece[j * RESULTS + p], acc)
            whole = whole + (acc,)
        found = whole
    return found


@triton.jit
def store_state(
    ptr, state, index, h, first_f, first_e, factor, strides, spec: tl.constexpr, config: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Stores what `load_state` loads."""
    PARTS: tl.constexpr = 1 if config.KIND == "none" else 2
    F_STEP: tl.constexpr = 0 if TRANSPOSED else config.BLOCK_F
    E_STEP: tl.constexpr = config.BLOCK_E if TRANSPOSED else 0
    for i in tl.static_range(config.PIECES):
        for p in tl.static_range(PARTS):
            ptrs, mask = state_pointers(
                ptr, index, h, first_f + i * F_STEP, first_e + i * E_STEP, p, strides, spec, config, TRANSPOSED
            )
            tl.store(ptrs, (state[i * PARTS + p] * factor).to(ptr.dtype.element_ty), mask=mask)
