"""What launches for every GPU and for Hopper share: head factors as kernels read them, and Q formed in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.tpa.attention.kernels.backward import prepare_kernel
from warploom.ops.tpa.attention.problem import Call
from warploom.ops.tpa.kernels.factors import Features, FeatureStrides, HeadStrides
from warploom.ops.tpa.problem import Operands, feature_factors, padded, strides_of
from warploom.runtime.launch import Dense, Launch
from warploom.runtime.pytorch import view

Tensor = torch.Tensor


def row_length(tokens: int) -> int:
    """How far rows of `HeadRows` are apart, a multiple of 16."""
    return -(-tokens // 16) * 16


class HeadRows(NamedTuple):
    """Head factors, times a scale, as the kernels read them: (B, H, R, M) in float32."""

    rows: Dense
    strides: tuple[int, ...]  # of head factors like those that are given, in the order of these axes
    scale: float

    @classmethod
    def of(cls, a: Tensor, scale: float = 1.0) -> HeadRows:
        """Those of head factors like these (B, M, H, R)."""
        turned = a.permute(0, 2, 3, 1)
        _, heads, rank, tokens = shape = tuple(turned.shape)
        length = row_length(tokens)
        rows = Dense(shape, (heads * rank * length, rank * length, length, 1), torch.float32)
        return cls(rows, turned.stride(), scale)

    def __call__(self, a: Tensor) -> Tensor:
        """Those of ``a``."""
        rows = self.rows.empty(a).copy_(view(a, self.rows.shape, self.strides, 0))
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


def queries(factors: Operands) -> Dense:
    """Q (B, H, N, D), formed."""
    batch, tokens, _, features = factors.bq.shape
    return Dense.rows((batch, factors.ak.shape[2], tokens, features), factors.bq.dtype)


def plan_prepare(factors: Operands, call: Call, out: Tensor, grad: Tensor, pdl: bool) -> Launch:
    """The launch that forms Q and, if it is given gradients, δ.

    ``pdl``: the launch after it is one for Hopper, by programmatic dependent launch.
    """
    aq, ak, _, bq, _, bv = factors
    batch, tokens, rank_q, features = bq.shape
    heads, values = ak.shape[2], bv.shape[3]
    b, g = feature_factors(bq), feature_factors(out, grad)
    return Launch(
        prepare_kernel,
        batch * tokens * -(-heads // 16),
        takes=("bq", "aq", "out", "grad", "statistics", "q", "delta", "lse", "counters"),
        tokens=tokens,
        heads=heads,
        aq_strides=HeadStrides(*strides_of(aq)),
        bq_strides=FeatureStrides(*b.strides[0]),
        out_strides=FeatureStrides(*g.strides[0]),
        grad_strides=FeatureStrides(*g.strides[1]),
        scale_q=call.scale_q,
        Q=Features(rank_q, features, padded(features), b.vector, b.flag),
        G=Features(1, values, padded(values), g.vector, g.flag),
        BLOCK_H=16,
        BLOCK_R=16,
        PDL=pdl,
    )
