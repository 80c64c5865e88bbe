"""Strides of tensors, as kernels address them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

TILE_STRIDE_LIMIT = 2**22
"""Strides of rows and features below this keep offsets within a tile, of at most 256 rows, in 32 bits."""


class Layout(NamedTuple):
    """How kernels address a group of tensors."""

    vec: int  # common divisor of strides, which vector access rests on
    unit: bool  # whether features are adjacent everywhere
    wide: bool  # whether offsets within a tile need 64 bits
    strides: list[Any]  # of every tensor, all but those of features divided by vec

    def of(self, *names: str) -> dict[str, Any]:
        """Returns the strides by name, ``q_strides`` and so on, of tensors with these names."""
        return dict(zip((f"{name}_strides" for name in names), self.strides, strict=True))


def tile_width(features: int) -> int:
    """Returns the features of a tile: a power of two that matrix instructions take."""
    return max(1 << (features - 1).bit_length(), 16)


def strides_of(x: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of a tensor; 0 for an axis of size one, which is never taken."""
    b, n, h, f = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride()))
    return b, n, h, f


def layout_for(kind: type[Any], *tensors: Tensor) -> Layout:
    """Returns how kernels address tensors (B, N, H, F), whose strides they take as a ``kind`` of tuple."""
    strides = [strides_of(t) for t in tensors]
    unit = all(t.shape[3] == 1 or s[3] == 1 for t, s in zip(tensors, strides))
    divisors = (16, 8, 4) if unit else ()
    vec = next((d for d in divisors if all(x % d == 0 for s in strides for x in s[:3])), 1)
    wide = any(max(abs(s[1]), abs(s[3])) >= TILE_STRIDE_LIMIT for s in strides)
    return Layout(vec, unit, wide, [kind(*(x // vec for x in s[:3]), s[3]) for s in strides])
