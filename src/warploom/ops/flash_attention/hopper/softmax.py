"""The softmax of a group of warps.

Forward, weights of a tile of keys, and the running maximum and sum of its rows; backward, weights of tiles from their logits
and the lse of their rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.activations import power_of_two
from warploom.device.online_softmax import finite_max, update_softmax
from warploom.ops.flash_attention.hopper.bias import LEAST
from warploom.ops.flash_attention.hopper.masks import hide, hide_transposed, visible, visible_weights
from warploom.ops.flash_attention.hopper.softcap import HIDDEN, cap, cap_weights
from warploom.ops.flash_attention.hopper.tiles import ROWS
from warploom.ops.flash_attention.hopper.work import LOG2_E

LN_2 = gl.constexpr(0.6931471805599453)
MOST_WEIGHT = gl.constexpr(57.0)
"""Largest weight relative to no largest logit, in powers of two: sums of values up to 2⁵⁰ stay in float32."""
LARGE = gl.constexpr(2.0**27)
"""From here on, numbers are equal or 16 apart: of two logits, the smaller has no weight."""
MOST_SOFTCAP = gl.constexpr(75.0)
"""In powers of two, up to which no row needs its largest logit: see `exponent_base`."""


@gluon.constexpr_function
def exponent_base(softcap, dtype):
    """Returns what exponents are relative to in every row, with a small cap: else it is the row's largest logit.

    Weights then lie between 2⁻⁹³ and 2⁵⁷, which bfloat16 holds, and nothing is ever rescaled. A base near the logits keeps
    their last bits.
    """
    if softcap is None or softcap > MOST_SOFTCAP.value or dtype != gl.bfloat16:
        return None
    return max(softcap - MOST_WEIGHT.value, 0.0)


@gluon.jit
def softmax_step(
    logits, row_sum, row_max, n, queries, call, MASKED: gl.constexpr, LAYOUT: gl.constexpr, config: gl.constexpr,
    words=None, added=None,
):  # fmt: skip
    """Returns weights of a tile of keys ``n …``, row_sum and row_max with it, and the factor that rescales earlier sums.

    With a base, nothing is rescaled. ``words`` are those of a tile of a mask, or None.
    """
    BLOCK_N: gl.constexpr = logits.shape[1]
    scale = call.scale
    if MASKED and call.units is not None and call.softcap is not None:
        # How a cap is computed depends on all logits, of which those of other sequences are none.
        logits = gl.where(visible(n, queries, call, BLOCK_N, LAYOUT, config), logits, 0.0)
    if call.base is not None:
        weights = cap(logits, scale, call.softcap, call.base, True)
        if MASKED:
            weights = hide(weights, 0.0, n, words, queries, call, LAYOUT, config)
        new_max = row_max
        rescale = row_max
        row_sum = row_sum + gl.sum(weights, 1)
    else:
        if call.softcap is not None:
            logits = cap(logits, scale, call.softcap, 0.0, False)
            scale = 1.0
        if call.alibi is not None:
            key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)).to(gl.float32)
            logits = logits * scale + (key * queries.slope)[None, :]
        if call.bias is not None:  # natural: in powers of two the smallest number would be −∞
            more = added.to(gl.float32)
            logits = gl.where(more == float("-inf"), more, logits * (scale / LOG2_E) + more)
        if MASKED:
            logits = hide(logits, float("-inf"), n, words, queries, call, LAYOUT, config)
        if call.alibi is not None:
            first = queries.slope * (n - queries.first).to(gl.float32)
            weights, row_sum, new_max, rescale = update_from(logits, first, row_sum, row_max)
        elif call.bias is not None:
            weights, row_sum, new_max, rescale = update_natural(logits, row_sum, row_max)
        else:
            weights, row_sum, new_max, rescale = update_softmax(logits, scale, row_sum, row_max, MASKED)
    return weights, row_sum, new_max, rescale


@gluon.jit
def update_from(logits, first, row_sum, row_max):
    """`update_softmax` of ``logits + first``, in powers of two: one number for a tile is added to maxima alone."""
    new_max = gl.maximum(row_max, gl.max(logits, axis=1) + first)
    base = finite_max(new_max)
    weights = power_of_two(logits - (base - first)[:, None])
    rescale = power_of_two(row_max - base)
    return weights, row_sum * rescale + gl.sum(weights, axis=1), new_max, rescale


@gluon.jit
def update_natural(logits, row_sum, row_max):
    """`update_softmax` of logits that are in no powers of two, where the smallest number would be −∞."""
    new_max = gl.maximum(row_max, gl.max(logits, axis=1))
    base = finite_max(new_max)
    # Numbers as large are equal or lie far apart. Their exponents are exact: rounded products are far from fused ones.
    unit = gl.where(gl.abs(base) < LARGE, LOG2_E, 1.0)
    first = gl.maximum(base * unit, LEAST)  # rounded, as that of the rows before
    weights = power_of_two(logits * unit[:, None] - first[:, None])
    rescale = power_of_two(gl.maximum(row_max * unit, LEAST) - first)
    rescale = gl.where(row_max == float("-inf"), 0.0, rescale)
    return weights, row_sum * rescale + gl.sum(weights, axis=1), new_max, rescale


@gluon.jit
def add_row_slopes(row_max, queries, LAYOUT: gl.constexpr):
    """Returns the largest logits of 64 queries, of which `softmax_step` takes the first one's places for all."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)).to(gl.float32)
    return row_max - queries.slope * row


@gluon.jit
def in_powers(row_max):
    """Returns the largest logits in powers of two, finite where they are."""
    return gl.where(row_max == float("-inf"), row_max, gl.maximum(row_max * LOG2_E, LEAST))


@gluon.jit
def with_sink(row_sum, row_max, sink):
    """row_sum and row_max, in powers of two, with one more logit; the factor that rescales sums of values."""
    logit = sink * LOG2_E
    new_max = gl.maximum(row_max, logit)
    base = finite_max(new_max)
    rescale = power_of_two(row_max - base)
    return row_sum * rescale + power_of_two(logit - base), new_max, rescale


@gluon.jit
def load_row_values(values, row, m, tokens, other, LAYOUT: gl.constexpr):
    """One value for each of 64 queries of a head, from query ``m`` on; ``other`` behind the last query."""
    local = m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(values + row.to(gl.int64) * tokens + local, mask=local < tokens, other=other)


@gluon.jit
def weights_of(
    logits, lse, n, queries, call, dtype: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Weights of the keys ``n …`` for 64 queries.

    With a cap, times its derivative: these weights are only for gradients of logits.
    """
    if call.softcap is not None:
        logits = cap(logits, call.scale, 1.0, 0.0, False)
        if MASKED:
            logits = gl.where(visible(n, queries, call, logits.shape[1], LAYOUT, config), logits, HIDDEN)
        _, weights = cap_weights(logits, lse[:, None], call.softcap, dtype)
    else:
        weights = power_of_two(logits * call.scale - lse[:, None])
        if MASKED:
            weights = gl.where(visible(n, queries, call, logits.shape[1], LAYOUT, config), weights, 0.0)
    return weights


@gluon.jit
def transposed_weights_of(
    logits, lse, m, keys, call, dtype: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    config: gl.constexpr, inverse=None,
):  # fmt: skip
    """Weights of 64 keys for the queries ``m …``, and these times the cap's derivative.

    If there is a cap, the first are rounded.
    """
    if call.softcap is not None:
        logits = cap(logits, call.scale, 1.0, 0.0, False)
        if MASKED:
            logits = visible_weights(logits, m, keys, None, call, LAYOUT, config, HIDDEN)
        weights, slopes = cap_weights(logits, lse[None, :], call.softcap, dtype)
    else:
        weights = power_of_two(logits * call.scale - lse[None, :])
        if inverse is not None:
            weights = weights * inverse[None, :]
        if MASKED:
            weights = visible_weights(weights, m, keys, None, call, LAYOUT, config)
        slopes = weights
    return weights, slopes


@gluon.jit
def weights_and_slopes(
    logits, lses, m, keys, used, call, dtype: gl.constexpr, LAYOUT: gl.constexpr, config: gl.constexpr,
    n=None, entry=None, added=None,
):  # fmt: skip
    """`transposed_weights_of` for tile number ``m`` of queries, which may have a mask.

    ``lses`` are in shared memory: with a cap they come into registers behind its branches. ``n`` is the first key, and
    ``entry`` that of a tile of a mask, or None. ``added`` is the slope of the queries' head, a tile of a bias, or None.
    """
    BLOCK_M: gl.constexpr = logits.shape[1]
    MASKS: gl.constexpr = config.CAUSAL or call.window is not None or used is not None
    if call.softcap is not None:
        logits = cap(logits, call.scale, 1.0, 0.0, False)
        if MASKS:
            if (m < keys.full) | (m >= keys.high):
                logits = visible_weights(logits, m * BLOCK_M, keys, used, call, LAYOUT, config, HIDDEN)
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = cap_weights(logits, row_lse[None, :], call.softcap, dtype)
    else:
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        if call.alibi is not None:  # times the place of the key behind the query
            place = n - (keys.seq.keys - keys.seq.tokens) - m * BLOCK_M
            query = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT)).to(gl.float32)
            row_lse = row_lse + (query * added - added * place.to(gl.float32))
            key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)).to(gl.float32)
            weights = power_of_two(logits * call.scale + (key * added)[:, None] - row_lse[None, :])
        elif added is not None:  # large numbers are rounded otherwise than in the forward: no weight is above 1
            logits = logits * call.scale + added.to(gl.float32) * LOG2_E
            weights = power_of_two(gl.minimum(logits - row_lse[None, :], 0.0))
        else:
            weights = power_of_two(logits * call.scale - row_lse[None, :])
        if MASKS:
            if (m < keys.full) | (m >= keys.high):
                weights = visible_weights(weights, m * BLOCK_M, keys, used, call, LAYOUT, config)
        if call.tiles is not None:
            weights = hide_transposed(weights, n, m * BLOCK_M, entry, call.tiles, LAYOUT)
        slopes = weights
    return weights, slopes
