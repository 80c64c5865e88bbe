"""Strides and layouts of factors, for the kernels of decoding and of attention."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl


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


class Features(NamedTuple):
    """Layout of feature factors: strides but the last come divided by ``VEC``.

    ``UNIT``: features are adjacent, and offsets within a tile fit in 32 bits.
    """

    R: tl.constexpr
    F: tl.constexpr
    BLOCK_F: tl.constexpr
    VEC: tl.constexpr
    UNIT: tl.constexpr
