"""Softmax over keys that come a tile at a time: exponentials relative to the largest logit so far, in powers of two.

For kernels in Triton and in Gluon: these functions use only what both languages have.
"""

import triton
import triton.language as tl

from warploom.device.activations import exponential_float32, power_of_two


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """Returns eˣ to 1 unit in the last place if ``EXACT``, otherwise 2ˣ, which is one instruction; for x near 0 or below.

    Logits come in these units. The difference of two is exact where it matters, so it comes first.
    """
    if EXACT:
        y = exponential_float32(x)
    else:
        y = power_of_two(x)
    return y


@triton.jit
def finite_max(row_max):
    """Returns the largest logits, and 0 for a row that has seen no key yet: −inf − (−inf) must not become NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def join_maxima(a, b, EXACT: tl.constexpr = False):
    """Returns the row_max of two softmaxes together, and the factors that rescale the sums of each to it."""
    row_max = tl.maximum(a, b)
    base = finite_max(row_max)
    return row_max, exp(a - base, EXACT), exp(b - base, EXACT)


@triton.jit
def update_softmax(logits, scale, row_sum, row_max, MASKED: tl.constexpr):
    """Returns weights of a tile (rows, keys), row_sum and row_max with it, and the factor that rescales earlier sums.

    ``row_max`` is kept as rounded, so that sums are rescaled by exactly 1 where it stays the same: ``max * scale −
    row_max``, one fused operation, is the rounding of that product instead of zero.
    """
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * scale)
    base = new_max
    if MASKED:
        base = finite_max(new_max)
    weights = power_of_two(logits * scale - base[:, None])
    rescale = power_of_two(row_max - base)
    return weights, row_sum * rescale + tl.sum(weights, axis=1), new_max, rescale
