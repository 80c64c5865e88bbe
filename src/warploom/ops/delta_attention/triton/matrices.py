"""The kernel that makes the matrices of chunks of 64 tokens, from which `hopper.scan` goes on with the rows themselves.

With ``T = (1 + L)⁻¹`` as in `triton.chunks`, the corrected values are ``U = T β (V − K̃ S)``. Decays of a head and the
lengths of rows are numbers of a token, so ``K̃``, ``Q̃`` and ``K̂`` are the rows as they come, times a number each: nothing
of a row's size is written.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import locate
from warploom.device.decays import clamp_decay, exp
from warploom.device.product import dot, product, round_to
from warploom.device.rows import Strides
from warploom.ops.delta_attention.triton import tiles


class MatrixStrides(NamedTuple):
    """Strides of the kernel's rows."""

    q: Strides
    k: Strides


NUMBERS = tl.constexpr(20)
"""Numbers of a chunk in ``factors``, over half of its tokens. Behind the factors of rows lie:"""
WHOLE = tl.constexpr(6)
KEY_LENGTHS = tl.constexpr(7)  # inverse ones
KEY_WEIGHTS = tl.constexpr(9)  # these times β
QUERY_WEIGHTS = tl.constexpr(11)  # inverse lengths of queries times the scale
BETA = tl.constexpr(13)
COARSE = tl.constexpr(15)  # sums of logarithms of decays
FINE = tl.constexpr(17)


@triton.jit
def load_rows(x, n, place, sizes, strides, config: tl.constexpr):
    """Returns rows (T, D) of a head of queries or keys, zeros where there are none, and their inverse lengths (T,)."""
    f = tl.arange(0, config.BLOCK_D)
    rows = tiles.head_rows(x, n, place, place.h // sizes.group, strides, config.VEC)
    found = tiles.load_features(rows, f, n < place.last, strides.f, config.D, config.UNIT)
    if config.NORMALIZE:
        wide = found.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) + tiles.EPSILON)
    else:
        inverse = tl.full((found.shape[0],), 1.0, tl.float32)
    return found, inverse


@triton.jit
def take_one(x, number: tl.constexpr):
    """Returns the ``number``-th column (R,) of a tile (R, 4)."""
    even, odd = tl.split(x.reshape(x.shape[0], 2, 2))
    one, two = tl.split(even if number % 2 == 0 else odd)
    return one if number < 2 else two


@triton.jit
def invert_halves(one, two, scratch):
    """Returns the inverses (T, T) of ``1 + one`` and ``1 + two``, which are strictly lower triangular, in float32.

    Every column of an inverse follows from itself alone, row by row: a thread has one of them, four rows to a tile.
    ``scratch``, 2 T² float32 numbers, is what threads give each other, with rows and columns exchanged.
    """
    SIZE: tl.constexpr = one.shape[0]
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    ptrs = scratch + (column * SIZE + row)
    tl.store(ptrs, one)
    tl.store(ptrs + SIZE * SIZE, two)
    tl.debug_barrier()
    t = tl.arange(0, 2 * SIZE)[:, None]
    i = tl.arange(0, 4)[None, :]
    own = scratch + (t // SIZE * (SIZE * SIZE) + i)
    x = ()
    for first in tl.static_range(0, SIZE, 4):
        x += (tl.where(t % SIZE == first + i, 1.0, 0.0),)
    for j in tl.static_range(SIZE - 1):
        known = take_one(x[j // 4], j % 4)[:, None]
        following = ()
        for first in tl.static_range(0, SIZE, 4):
            if first + 3 > j:  # factors of rows that are not behind j are 0
                following += (x[first // 4] - tl.load(own + (j * SIZE + first)) * known,)
            else:
                following += (x[first // 4],)
        x = following
    tl.debug_barrier()
    for first in tl.static_range(0, SIZE, 4):
        tl.store(own + (t % SIZE * SIZE + first), x[first // 4])
    tl.debug_barrier()
    return tl.load(ptrs), tl.load(ptrs + SIZE * SIZE)


@triton.jit
def store_quarters(matrix, first, below, second):
    """Stores a lower triangular matrix (2T, 2T) by its quarters (T, T)."""
    SIZE: tl.constexpr = first.shape[0]
    t = tl.arange(0, SIZE)
    ptrs = matrix + (t[:, None] * (2 * SIZE) + t[None, :])
    dtype: tl.constexpr = matrix.dtype.element_ty
    tl.store(ptrs, round_to(first, dtype))
    tl.store(ptrs + SIZE, tl.zeros((SIZE, SIZE), dtype))
    tl.store(ptrs + 2 * SIZE * SIZE, round_to(below, dtype))
    tl.store(ptrs + (2 * SIZE + 1) * SIZE, round_to(second, dtype))


@triton.jit
def load_log_decays(decay, n, last, place, sizes, config: tl.constexpr):
    """Returns logarithms of the decays (T,) of tokens before ``last``, and 0."""
    if config.DECAY == "none":
        g = tl.zeros(n.shape, tl.float32)
    else:
        ptrs = decay + place.b * sizes.decay_b + place.h * sizes.decay_h + n.to(tl.int64) * sizes.decay_n
        g = clamp_decay(tl.load(ptrs, mask=n < last, other=0.0).to(tl.float32))
    return g


@triton.jit
def pairs_of(keys, queries, others, rows, columns, numbers, EARLIER: tl.constexpr, config: tl.constexpr):
    """Returns ``L`` and ``P`` (T, T), over the scale, of the tokens ``rows`` with ``columns``, which are not behind them."""
    SIZE: tl.constexpr = config.BLOCK_T
    zeros = tl.zeros((SIZE, SIZE), tl.float32)
    weights = tl.load(numbers + KEY_LENGTHS * SIZE + columns)[None, :]
    if config.DECAY == "head":
        coarse, fine = numbers + COARSE * SIZE, numbers + FINE * SIZE
        between = tl.load(coarse + rows)[:, None] - tl.load(coarse + columns)[None, :]
        between += tl.load(fine + rows)[:, None] - tl.load(fine + columns)[None, :]
        weights = exp(between, True) * weights
    of_keys = dot(keys, tl.trans(others), zeros) * weights * tl.load(numbers + KEY_WEIGHTS * SIZE + rows)[:, None]
    of_queries = dot(queries, tl.trans(others), zeros) * weights
    of_queries *= tl.load(numbers + QUERY_WEIGHTS * SIZE + rows)[:, None]
    if EARLIER:
        of_keys = tl.where(rows[:, None] > columns[None, :], of_keys, 0.0)
        of_queries = tl.where(rows[:, None] >= columns[None, :], of_queries, 0.0)
    return of_keys, of_queries


@triton.jit
def store_numbers(beta, decay, numbers, place, sizes, config: tl.constexpr):
    """Stores what a chunk's tokens have one number each of, next to the lengths that are there: see `matrix_kernel`."""
    SIZE: tl.constexpr = 2 * config.BLOCK_T
    t = tl.arange(0, SIZE)
    n = place.first + t
    ptrs = beta + place.b * sizes.beta_b + place.h * sizes.beta_h + n.to(tl.int64) * sizes.beta_n
    b = tl.load(ptrs, mask=n < place.last, other=0.0).to(tl.float32)
    g = load_log_decays(decay, n, place.last, place, sizes, config)
    following = load_log_decays(decay, n + 1, tl.minimum(place.last, place.first + SIZE), place, sizes, config)
    # Sums of multiples of 1/STEPS are exact: see `tiles.decays_between`.
    coarse = tl.floor(g * tiles.STEPS) / tiles.STEPS
    to = numbers + t
    tl.store(to + COARSE * config.BLOCK_T, tl.cumsum(coarse, axis=0))
    tl.store(to + FINE * config.BLOCK_T, tl.cumsum(g - coarse, axis=0))
    tl.store(to + BETA * config.BLOCK_T, b)
    since = exp(tl.cumsum(g, axis=0), True)
    until = exp(tl.cumsum(following, axis=0, reverse=True), True)
    whole = exp(tl.sum(g, axis=0), False) + tl.zeros((config.BLOCK_T,), tl.float32)
    tl.store(numbers + WHOLE * config.BLOCK_T + tl.arange(0, config.BLOCK_T), whole)
    tl.debug_barrier()
    lengths = tl.load(to + KEY_LENGTHS * config.BLOCK_T)
    tl.store(to + KEY_WEIGHTS * config.BLOCK_T, b * lengths)
    tl.store(to, since * lengths)
    tl.store(to + SIZE, since * tl.load(to + QUERY_WEIGHTS * config.BLOCK_T))
    tl.store(to + 2 * SIZE, until * lengths)
    tl.debug_barrier()


@triton.jit
def matrix_kernel(
    q, k, beta, decay, matrices, factors, sizes: tiles.DeltaSizes, strides: MatrixStrides, config: tl.constexpr
):
    """Writes matrices and factors of one chunk of one head, of two halves of `DeltaConfig.BLOCK_T` tokens.

    ``matrices`` (slots, H, 4T, 2T) are ``T β`` and below it ``P`` times the scale. ``factors`` (slots, H, `NUMBERS` · T)
    in float32 are those of ``K̃``, ``Q̃`` and ``K̂``, 2T each, then the decay over the chunk, and what threads give each other.
    """
    BLOCK_T: tl.constexpr = config.BLOCK_T
    place = locate(None, None, 0, sizes)
    slot = place.slot * sizes.heads + place.h
    t = tl.arange(0, BLOCK_T)
    n = place.first + t
    numbers = factors + slot * (NUMBERS * BLOCK_T)
    # (1) lengths, decays and β
    one_keys, one_length = load_rows(k, n, place, sizes, strides.k, config)
    two_keys, two_length = load_rows(k, n + BLOCK_T, place, sizes, strides.k, config)
    tl.store(numbers + KEY_LENGTHS * BLOCK_T + t, one_length)
    tl.store(numbers + (KEY_LENGTHS + 1) * BLOCK_T + t, two_length)
    one_queries, one_length = load_rows(q, n, place, sizes, strides.q, config)
    two_queries, two_length = load_rows(q, n + BLOCK_T, place, sizes, strides.q, config)
    tl.store(numbers + QUERY_WEIGHTS * BLOCK_T + t, one_length * sizes.scale)
    tl.store(numbers + (QUERY_WEIGHTS + 1) * BLOCK_T + t, two_length * sizes.scale)
    store_numbers(beta, decay, numbers, place, sizes, config)
    # (2) L = β A and P: pairs within each half, and of the second with the first
    second = BLOCK_T + t
    upper, upper_scores = pairs_of(one_keys, one_queries, one_keys, t, t, numbers, True, config)
    lower, lower_scores = pairs_of(two_keys, two_queries, two_keys, second, second, numbers, True, config)
    between, between_scores = pairs_of(two_keys, two_queries, one_keys, second, t, numbers, False, config)
    inverse = matrices + slot * (8 * BLOCK_T * BLOCK_T)
    store_quarters(inverse + 4 * BLOCK_T * BLOCK_T, upper_scores, between_scores, lower_scores)
    # (3) T = (1 + L)⁻¹ of each half, with its place for what threads give each other, and of both
    x, y = invert_halves(upper, lower, inverse.to(tl.pointer_type(tl.float32), bitcast=True))
    tl.debug_barrier()
    zeros = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    below = product(tiles.exact_terms(y), tiles.exact_terms(between), zeros, "3-term")
    below = -product(tiles.exact_terms(below), tiles.exact_terms(x), zeros, "3-term")
    b = tl.load(numbers + BETA * BLOCK_T + t)[None, :]
    store_quarters(inverse, x * b, below * b, y * tl.load(numbers + BETA * BLOCK_T + second)[None, :])
