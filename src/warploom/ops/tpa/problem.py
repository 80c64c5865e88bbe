"""The factors of a call of tensor-product attention, and their strides as kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from warploom.runtime.dispatch import Tensors
from warploom.runtime.layout import TILE_STRIDE_LIMIT
from warploom.runtime.modes import count_attention_pairs

Tensor = torch.Tensor


def logit_unit(dtype: torch.dtype) -> float:
    """What a logit is multiplied by so that `exp` of the kernels is its exponential."""
    return 1.0 if dtype == torch.float32 else math.log2(math.e)


def _vector(*strides: int) -> int:
    """Largest divisor up to 8 elements that all strides share: wide loads rest on it."""
    return math.gcd(8, *strides)


def strides_of(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """Strides in elements; an axis of size one gets stride 0, since it is never taken, but 1 if it is the last."""
    if tensor is None:
        return 0, 0, 0, 0
    *outer, last = (stride if size > 1 else None for stride, size in zip(tensor.stride(), tensor.shape))
    return *(stride or 0 for stride in outer), 1 if last is None else last  # type: ignore[return-value]


def _divided(strides: tuple[int, int, int, int], vector: int) -> tuple[int, int, int, int]:
    """Feature strides with the outer three divided."""
    b, n, r, d = strides
    return b // vector, n // vector, r // vector, d


class Operands(NamedTuple):
    """The six factors of a call. Those of keys and values may lack their rank axis, at rank one."""

    aq: Tensor | None
    ak: Tensor
    av: Tensor
    bq: Tensor
    bk: Tensor
    bv: Tensor

    def map(self, function: Callable[[Any], Any]) -> Operands:
        """What a function makes of each of them; None stays."""
        return Operands(*(None if factor is None else function(factor) for factor in self))  # type: ignore[arg-type]

    def ranked(self) -> Operands:
        """With their rank axis, as plans take them. A launch reads no sizes, and takes the factors of the call."""
        ak, av = (a if a.dim() == 4 else a.unsqueeze(-1) for a in (self.ak, self.av))
        bk, bv = (b if b.dim() == 4 else b.unsqueeze(-2) for b in (self.bk, self.bv))
        return Operands(self.aq, ak, av, self.bq, bk, bv)


class FactorLayout(NamedTuple):
    """Strides of factors as the kernels take them, and the constants that go with them."""

    vector: int
    flag: bool
    """Features are adjacent in memory, or heads and ranks, and offsets within a tile fit in 32 bits."""
    strides: tuple[tuple[int, int, int, int], ...]


def feature_factors(*factors: Tensor) -> FactorLayout:
    """Strides of feature factors, and whether features are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    unit = all(s[3] == 1 and max(s[1:3]) < TILE_STRIDE_LIMIT for s in strides)
    vector = _vector(*(v for s in strides for v in s[:3])) if unit else 1
    return FactorLayout(vector, unit, tuple(_divided(s, vector) for s in strides))


def head_factors(*factors: Tensor) -> FactorLayout:
    """Strides of head factors, and whether heads and ranks are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    dense = all(
        s[3] == 1 and (f.shape[2] == 1 or s[2] == f.shape[3]) and s[1] < TILE_STRIDE_LIMIT
        for s, f in zip(strides, factors)
    )
    vector = _vector(*(v for s in strides for v in s[:2])) if dense else 1
    return FactorLayout(vector, dense, tuple((s[0] // vector, s[1] // vector, s[2], s[3]) for s in strides))


FACTORS = "Tensor? aq, Tensor ak, Tensor av, Tensor bq, Tensor bk, Tensor bv"
"""Schema of the factors of a call."""


def flops_of_products(tensors: Tensors) -> int:
    """Operations that form queries, keys and values of the factors."""
    aq, ak, av, bq, bk, bv = tensors[:6]
    pairs = ((aq, bq), (ak, bk), (av, bv))
    return sum(2 * int(a.numel() * b.shape[-1]) for a, b in pairs if a is not None)


def flops_of_pairs(tensors: Tensors, cu_seqlens: Tensor | None, of_keys: int, of_values: int) -> int:
    """Operations of so many products for every query and key, by features of keys and of values."""
    _, ak, _, bq, bk, bv = tensors[:6]
    pairs = count_attention_pairs(bq, ak, cu_seqlens, cu_seqlens)
    return int(2 * pairs * ak.shape[2] * (of_keys * bk.shape[-1] + of_values * bv.shape[-1]))
