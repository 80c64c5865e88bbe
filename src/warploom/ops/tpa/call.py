"""Calls of tensor-product attention: their tensors and options, and strides of factors as kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from warploom.runtime.layout import TILE_STRIDE_LIMIT
from warploom.runtime.modes import count_attention_pairs

Tensor = torch.Tensor


def logit_unit(dtype: torch.dtype) -> float:
    """Returns the factor of a logit by which the kernels' `exp` gives its exponential."""
    return 1.0 if dtype == torch.float32 else math.log2(math.e)


def _vector(*strides: int) -> int:
    """Returns the largest divisor up to 8 elements that all strides share: wide loads rest on it."""
    return math.gcd(8, *strides)


def strides_of(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """Returns strides in elements; that of an axis of size one, never used, is 0, or 1 if it is the last."""
    if tensor is None:
        return 0, 0, 0, 0
    *outer, last = (stride if size > 1 else None for stride, size in zip(tensor.stride(), tensor.shape))
    return *(stride or 0 for stride in outer), 1 if last is None else last  # type: ignore[return-value]


class Factors(NamedTuple):
    """The six factors of a call. Those of keys and values may lack their rank axis, at rank one."""

    aq: Tensor | None
    ak: Tensor
    av: Tensor
    bq: Tensor
    bk: Tensor
    bv: Tensor

    def map(self, function: Callable[[Any], Any]) -> Factors:
        """Returns the results of a function of each of them; None stays."""
        return Factors(*(None if factor is None else function(factor) for factor in self))  # type: ignore[arg-type]

    def with_rank_axis(self) -> Factors:
        """Returns them with their rank axis, as plans take them: a launch reads no sizes, and takes the call's."""
        ak, av = (a if a.dim() == 4 else a.unsqueeze(-1) for a in (self.ak, self.av))
        bk, bv = (b if b.dim() == 4 else b.unsqueeze(-2) for b in (self.bk, self.bv))
        return Factors(self.aq, ak, av, self.bq, bk, bv)


class AttentionInputs(NamedTuple):
    """The tensors of a call of attention, by the same names from the public function to the launch."""

    aq: Tensor | None
    ak: Tensor
    av: Tensor
    bq: Tensor
    bk: Tensor
    bv: Tensor
    cu_seqlens: Tensor | None

    @property
    def factors(self) -> Factors:
        """The factors among them."""
        return Factors(*self[:6])


class AttentionOptions(NamedTuple):
    """The options of a call of attention."""

    causal: bool
    scale: float
    scale_q: float
    scale_k: float
    scale_v: float


class DecodeInputs(NamedTuple):
    """The tensors of a call for decoding."""

    aq: Tensor | None
    ak: Tensor
    av: Tensor
    bq: Tensor
    bk: Tensor
    bv: Tensor
    seqused_k: Tensor | None

    @property
    def factors(self) -> Factors:
        """The factors among them."""
        return Factors(*self[:6])


class DecodeOptions(NamedTuple):
    """The options of a call for decoding."""

    strategy: str
    scale: float
    scale_q: float
    scale_k: float
    scale_v: float


class FactorLayout(NamedTuple):
    """Strides of factors as the kernels take them, and the constants that go with them."""

    vector: int
    flag: bool
    """True if features, or heads and ranks, are adjacent in memory, and offsets within a tile fit in 32 bits."""
    strides: tuple[tuple[int, int, int, int], ...]


def feature_factors(*factors: Tensor) -> FactorLayout:
    """Returns strides of feature factors, and whether features are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    unit = all(s[3] == 1 and max(s[1:3]) < TILE_STRIDE_LIMIT for s in strides)
    vector = _vector(*(v for s in strides for v in s[:3])) if unit else 1
    return FactorLayout(vector, unit, tuple((b // vector, n // vector, r // vector, d) for b, n, r, d in strides))


def head_factors(*factors: Tensor) -> FactorLayout:
    """Returns strides of head factors, and whether heads and ranks are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    dense = all(
        s[3] == 1 and (f.shape[2] == 1 or s[2] == f.shape[3]) and s[1] < TILE_STRIDE_LIMIT
        for s, f in zip(strides, factors)
    )
    vector = _vector(*(v for s in strides for v in s[:2])) if dense else 1
    return FactorLayout(vector, dense, tuple((s[0] // vector, s[1] // vector, s[2], s[3]) for s in strides))


FACTORS = "Tensor? aq, Tensor ak, Tensor av, Tensor bq, Tensor bk, Tensor bv"
"""Schema of the factors of a call."""


def flops_of_products(inputs: AttentionInputs | DecodeInputs) -> int:
    """Returns the operations that form queries, keys and values of the factors."""
    pairs = ((inputs.aq, inputs.bq), (inputs.ak, inputs.bk), (inputs.av, inputs.bv))
    return sum(2 * int(a.numel() * b.shape[-1]) for a, b in pairs if a is not None)


def flops_of_pairs(
    inputs: AttentionInputs | DecodeInputs, cu_seqlens: Tensor | None, of_keys: int, of_values: int
) -> int:
    """Returns the operations of so many products for every query and key, by features of keys and of values."""
    pairs = count_attention_pairs(inputs.bq, inputs.ak, cu_seqlens, cu_seqlens)
    return int(2 * pairs * inputs.ak.shape[2] * (of_keys * inputs.bk.shape[-1] + of_values * inputs.bv.shape[-1]))
