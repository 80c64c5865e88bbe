"""What kernels of decoding and of attention share: factors in memory, the scale and the exponential of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import exponential_float32, power_of_two


class HeadStrides(NamedTuple):
    """Strides of head factors (B, N, H, R)."""

    b: tl.int64
    n: tl.int64
    h: tl.int64
    r: tl.int64


class FeatureStrides(NamedTuple):
    """Strides of feature factors (B, N, R, F). Outputs and whole queries (B, N, H, F) have their heads for ranks."""

    b: tl.int64
    n: tl.int64
    r: tl.int64
    f: tl.int64


class Factors(NamedTuple):
    """Factors in memory; none where ``ptr`` is None. Strides come divided by the ``VEC`` of `Heads` or `Features`."""

    ptr: Any
    strides: Any


class Heads(NamedTuple):
    """What the compiler knows of head factors: the strides of batch and tokens come divided by ``VEC``.

    ``DENSE``: heads and ranks are adjacent, which wide loads need, and offsets within a tile fit in 32 bits.
    """

    VEC: tl.constexpr
    DENSE: tl.constexpr


class Features(NamedTuple):
    """What the compiler knows of feature factors: strides but the last come divided by ``VEC``.

    ``UNIT``: features are adjacent, and offsets within a tile fit in 32 bits.
    """

    R: tl.constexpr
    F: tl.constexpr
    BLOCK_F: tl.constexpr
    VEC: tl.constexpr
    UNIT: tl.constexpr


@triton.jit
def scaled(x, factor, dtype: tl.constexpr):
    """``x · factor``, for results in ``dtype``.

    In float32 the product is rounded by itself. Fused with the subtraction that follows, it would keep bits that what
    is subtracted, once such a product too, has lost: the difference of equals would not be zero.
    """
    if dtype == tl.float32:
        y = tl.fma(x, tl.broadcast_to(factor, x.shape), 0.0)
    else:
        y = x * factor
    return y


@triton.jit
def exp(x, dtype: tl.constexpr):
    """eˣ for results in float32, otherwise 2ˣ, which is one instruction; for x near 0 or below.

    Logits come in these units. The difference of two is exact where it matters, so it comes first.
    """
    if dtype == tl.float32:
        y = exponential_float32(x)
    else:
        y = power_of_two(x)
    return y
