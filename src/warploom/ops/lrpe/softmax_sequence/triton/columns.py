"""Columns of softmax over the sequence: powers of their entries, sums, and statistics of all parts."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.activations import LOG2_E, exponential_float32, power_of_two
from warploom.device.online_softmax import finite_max

SLOTS = tl.constexpr(32)  # read at once
MINUS_LN_2 = tl.constexpr(-0.6931471805599453)


@triton.jit
def corrected_power(x, shift, scale):
    """Returns scale · e^(x − shift), to 3 units in the last place: what rounding the exponent costs is put back."""
    x -= shift
    x = tl.where(x < -200.0, -200.0, x)  # the result is zero long before
    exponent = x * LOG2_E
    y = power_of_two(exponent) * scale
    return tl.fma(y, tl.fma(exponent, MINUS_LN_2, x), y)


@triton.jit
def power(x, shift, EXACT: tl.constexpr):
    """Returns e^(x − shift). The difference is taken first: of 16-bit numbers it is exact, however large they are."""
    if EXACT == 0:
        y = power_of_two((x - shift) * LOG2_E)
    elif EXACT == 1:
        y = corrected_power(x, shift, 1.0)
    else:
        y = exponential_float32(x - shift)
    return y


@triton.jit
def weights(x, shift, scale, EXACT: tl.constexpr):
    """Returns softmax of a tile. ``scale``: the reciprocal sum, or where not ``EXACT`` its log₂."""
    if EXACT == 0:
        y = power_of_two(tl.fma(x - shift, LOG2_E, scale))
    elif EXACT == 1:
        y = corrected_power(x, shift, scale)
    else:
        y = exponential_float32(x - shift) * scale
    return y


@triton.jit
def split_members(columns, P: tl.constexpr, W: tl.constexpr):
    """Returns columns (1, P · W) of each member, (1, W)."""
    one = columns
    two = columns
    if P == 2:
        one, two = tl.split(columns.reshape(W, 2))
        one = one[None, :]
        two = two[None, :]
    return one, two


@triton.jit
def column_sum(terms, EXACT: tl.constexpr):
    """Returns sum of a block (R, W) over its rows, float32 (1, W); ``EXACT``: rounded once."""
    if EXACT:
        terms = terms.to(tl.float64)
    return tl.sum(terms, axis=0).to(tl.float32)[None, :]


@triton.jit
def column_sums(one, two, P: tl.constexpr, EXACT: tl.constexpr):
    """Returns `column_sum` of both members, (1, P · W)."""
    c = column_sum(one, EXACT)
    if P == 2:
        c = tl.interleave(c, column_sum(two, EXACT))
    return c


@triton.jit
def combine_statistics(slots, count, C: tl.constexpr, EXACT: tl.constexpr):
    """Returns shifts and sums of powers of columns (1, C), from those of ``count`` slots, in their order."""
    top = tl.full((1, C), float("-inf"), tl.float32)
    total = tl.zeros((1, C), tl.float32)
    for first in range(0, count, SLOTS):
        slot = (first + tl.arange(0, SLOTS))[:, None]
        tops = tl.load(slots + slot * (2 * C), mask=slot < count, other=float("-inf"))
        sums = tl.load(slots + slot * (2 * C) + C, mask=slot < count, other=0.0)
        new = tl.maximum(top, tl.max(tops, axis=0)[None, :])
        shift = finite_max(new)
        total = total * power(top, shift, EXACT) + column_sum(sums * power(tops, shift, EXACT), EXACT)
        top = new
    return top, total


@triton.jit
def combine_sums(slots, count, C: tl.constexpr, EXACT: tl.constexpr):
    """Returns sums of columns (1, C) over ``count`` slots, in their order."""
    total = tl.zeros((1, C), tl.float32)
    for first in range(0, count, SLOTS):
        slot = (first + tl.arange(0, SLOTS))[:, None]
        total += column_sum(tl.load(slots + slot * C, mask=slot < count, other=0.0), EXACT)
    return total


@triton.jit
def statistics_pointers(call, group, tile, config: tl.constexpr):
    """Returns where a group's shifts are, (1, P · W), and which columns there are; reciprocal sums lie P · F behind."""
    F: tl.constexpr = config.spec.F
    c = tl.arange(0, config.P * config.W)[None, :]
    f = tile.first + c // config.P
    base = call.statistics + (group * call.sizes.heads + tile.h) * (2 * config.P * F)
    return base + (c % config.P) * F + f, f < F
