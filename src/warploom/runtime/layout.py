"""Strides of tensors, as kernels address them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

TILE_STRIDE_LIMIT = 2**22
"""The strides of rows and features below which offsets within a tile, of at most 256 rows, fit in 32 bits."""


class Layout(NamedTuple):
    """The layout of a group of tensors, by which kernels address them."""

    vec: int  # common divisor of the strides, for vector access
    unit: bool  # True if features are adjacent in all tensors
    wide: bool  # True if offsets within a tile need 64 bits
    strides: list[Any]  # strides of each tensor, divided by vec except those of features

    def of(self, *names: str) -> dict[str, Any]:
        """Returns the strides by name, ``q_strides`` and so on, of tensors with these names."""
        return dict(zip((f"{name}_strides" for name in names), self.strides, strict=True))


def tile_width(features: int) -> int:
    """Returns the features of a tile: a power of two that matrix instructions support."""
    return max(1 << (features - 1).bit_length(), 16)


def strides_of(x: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of a tensor, with 0 for an axis of size one."""
    b, n, h, f = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride()))
    return b, n, h, f


def layout_for(kind: type[Any], *tensors: Tensor) -> Layout:
    """Returns the layout of tensors (B, N, H, F), with strides as tuples of a ``kind``."""
    strides = [strides_of(t) for t in tensors]
    unit = all(t.shape[3] == 1 or s[3] == 1 for t, s in zip(tensors, strides))
    divisors = (16, 8, 4) if unit else ()
    vec = next((d for d in divisors if all(x % d == 0 for s in strides for x in s[:3])), 1)
    wide = any(max(abs(s[1]), abs(s[3])) >= TILE_STRIDE_LIMIT for s in strides)
    return Layout(vec, unit, wide, [kind(*(x // vec for x in s[:3]), s[3]) for s in strides])
