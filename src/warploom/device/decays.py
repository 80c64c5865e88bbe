"""Decays of states: their logarithms, and exponentials of sums of them."""

import triton
import triton.language as tl

from warploom.device.activations import exponential, exponential_float32

FORGETS = tl.constexpr(-104.0)
"""The least logarithm of a decay that counts: eˣ of all below it is 0 in float32."""


@triton.jit
def exp(x, HALF: tl.constexpr):
    """Returns eˣ, to float32's accuracy unless results are rounded to 16 bits."""
    if HALF:
        y = exponential(x)
    else:
        y = exponential_float32(x)
    return y


@triton.jit
def clamp_decay(g):
    """Returns the logarithm of a decay, from `FORGETS` on: below it eˣ is 0 in float32 anyway, and sums stay small. NaN stays."""
    return tl.where(g < FORGETS, FORGETS, g)
