"""The softmax of a group of warps: weights of a tile of keys, and the running maximum and sum of its rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.hopper.pipeline import power_of_two
from warploom.ops.flash_attention.hopper.masks import visible
from warploom.ops.flash_attention.hopper.softcap import capped

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
MOST_WEIGHT = gl.constexpr(57.0)
"""Largest weight relative to no largest logit, in powers of two: sums of values up to 2⁵⁰ stay in float32."""
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
    logits, row_sum, row_max, n, queries, call, MASKED: gl.constexpr, LAYOUT: gl.constexpr, config: gl.constexpr
):
    """Weights of a tile of keys ``n …``; row_sum and row_max with it; the factor that rescales earlier sums.

    With a base, nothing is rescaled. Otherwise ``row_max`` is kept as rounded, so that sums are rescaled by exactly 1
    where it stays the same.
    """
    BLOCK_N: gl.constexpr = logits.shape[1]
    scale = call.scale
    if MASKED and call.units is not None and call.softcap is not None:
        # How a cap is computed depends on all logits, of which those of other sequences are none.
        logits = gl.where(visible(n, queries, call, BLOCK_N, LAYOUT, config), logits, 0.0)
    if call.base is not None:
        weights = capped(logits, scale, call.softcap, call.base, True)
        if MASKED:
            weights = gl.where(visible(n, queries, call, BLOCK_N, LAYOUT, config), weights, 0.0)
        new_max = row_max
        rescale = row_max
        row_sum = row_sum + gl.sum(weights, 1)
    else:
        if call.softcap is not None:
            logits = capped(logits, scale, call.softcap, 0.0, False)
            scale = 1.0
        if MASKED:
            logits = gl.where(visible(n, queries, call, BLOCK_N, LAYOUT, config), logits, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 1) * scale)
        base = new_max
        if MASKED:  # a row that has seen no key yet: −inf − (−inf) must not become NaN
            base = gl.where(new_max == float("-inf"), 0.0, base)
        weights = power_of_two(logits * scale - base[:, None])
        rescale = power_of_two(row_max - base)
        row_sum = row_sum * rescale + gl.sum(weights, 1)
    return weights, row_sum, new_max, rescale


@gluon.jit
def with_sink(row_sum, row_max, sink):
    """row_sum and row_max, in powers of two, with one more logit; the factor that rescales sums of values."""
    logit = sink * LOG2_E
    new_max = gl.maximum(row_max, logit)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = power_of_two(row_max - base)
    return row_sum * rescale + power_of_two(logit - base), new_max, rescale
