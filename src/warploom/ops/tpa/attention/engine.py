"""Launches of training and prefill: queries, keys and values are formed, and flash attention's kernels attend.

To write and read keys and values costs a few percent of attention's time; to form tiles of them in every program
that attends costs more. They live as long as the call: autograd keeps factors, and the backward forms them anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.ops.flash_attention import engine as attention
from warploom.ops.tpa.attention.problem import Call
from warploom.ops.tpa.attention.triton.products import (
    Packing,
    Scales,
    Sizes,
    Strides,
    factor_kernel,
    product_kernel,
)
from warploom.ops.tpa.problem import Operands, feature_factors, strides_of
from warploom.ops.tpa.triton.factors import Features, FeatureStrides, HeadStrides
from warploom.runtime.launch import Dense, Launch
from warploom.runtime.layout import tile_width
from warploom.runtime.memory_order import layout_of, reorder_like
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

HEADS = 16
"""Heads of a program, or of a step of it."""
RANKS = 16
"""Ranks of a step of a product."""
WARPS = 2
"""Of a program: on an H200 four took 1.1 to 1.2 times as long for products, and 1.5 times for gradients. Those in
float32, and of more ranks than one step, take four."""
ORDER = ("ak", "av", "aq", "bk", "bv", "bq")
"""In the order in which the kernels' launches take them."""


class _Products(NamedTuple):
    """What forms keys, values and queries, and gradients of factors from theirs."""

    wholes: tuple[Dense, Dense, Dense | None]  # no queries where ``bq`` holds them
    gradients: Any  # `Operands` of `Dense`; None for what is not computed here
    form: Launch
    differentiate: Launch

    def run(self, factors: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, N or M, H, D or E)."""
        k, v, q = (None if like is None else like.empty(factors.bk) for like in self.wholes)
        self.form(*_in_order(factors), k, v, q)
        return factors.bq if q is None else q, k, v  # type: ignore[return-value]

    def run_backward(
        self, factors: Operands, dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens: Tensor | None
    ) -> Operands:
        """Gradients of the factors."""
        gradients: Operands = self.gradients.map(lambda like: like.empty(factors.bk))
        whole = factors.aq is None
        self.differentiate(dk, dv, None if whole else dq, *_in_order(factors), *_in_order(gradients), cu_seqlens)
        return gradients._replace(bq=dq) if whole else gradients


def _in_order(factors: Operands) -> tuple[Tensor | None, ...]:
    """As the launches take them; ``bq`` is no factor where it holds whole queries."""
    aq, ak, av, bq, bk, bv = factors
    return ak, av, aq, bk, bv, None if aq is None else bq


def forward(factors: Operands, call: Call, plans: Plans) -> tuple[Tensor, Tensor]:
    """The output (B, N, H, E), and what the backward computes the weights again from, (2, B, H, N) in float32.

    ``plans`` are those of calls that are the same in all but addresses and numbers in tensors.
    """
    q, k, v = plans.get("products", _plan, factors, call).run(factors)
    of_attention = plans.get("attention", Plans)
    out, _, statistics = attention.forward(q, k, v, call.mask, _scale(factors, call), "highest", of_attention)
    if factors.aq is not None and q.shape[3] == 1:  # of which queries do not show where features lay in factors
        out = reorder_like(factors.aq, out)
    return out, statistics


def backward(
    grad: Tensor, out: Tensor, statistics: Tensor, factors: Operands, call: Call, plans: Plans
) -> Operands:
    """Gradients of the factors. ``plans`` are as in `forward`."""
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if factor is None else factor.stride() for factor in factors])
    products = plans.get(strides, _plan, factors, call)
    q, k, v = products.run(factors)
    of_attention = plans.get("attention", Plans)
    dq, dk, dv, _ = attention.backward(
        grad, None, q, k, v, out, statistics, call.mask, _scale(factors, call), "highest", of_attention
    )
    return products.run_backward(factors, dq, dk, dv, call.cu_seqlens)


def _scale(factors: Operands, call: Call) -> float:
    """Of the logits: that of whole queries too, which are read as they are."""
    return call.scale * (call.scale_q if factors.aq is None else 1.0)


def _plan(factors: Operands, call: Call) -> _Products:
    aq, ak, av, bq, bk, bv = factors.ranked()
    batch, tokens = bq.shape[:2]
    bounds = call.cu_seqlens
    keys, heads = ak.shape[1:3]
    q = None if aq is None else layout_of(aq, bq.shape[3])
    k, v = layout_of(ak, bk.shape[3]), layout_of(av, bv.shape[3])
    like = factors.map(lambda x: layout_of(x, x.shape[-1]))
    daq, dak, dav, dbq, dbk, dbv = like.ranked()
    queries = 0 if aq is None else batch * tokens
    widest = max(tile_width(bk.shape[3]), tile_width(bv.shape[3]))
    # Queries have the most ranks. A program holds all of them, of wide rows and in float32 those of one step.
    block_r = RANKS if bk.dtype == torch.float32 or widest > 128 else min(tile_width(bq.shape[2]), 64)
    blocks = -(-heads // HEADS)
    shares = [-(-b.shape[2] // block_r) for b in (bq, bk, bv)]
    q_strides, q_features = _operand(aq, bq, q, daq, dbq)
    k_strides, k_features = _operand(ak, bk, k, dak, dbk)
    v_strides, v_features = _operand(av, bv, v, dav, dbv)
    arguments: dict[str, Any] = {
        "sizes": Sizes(batch, tokens, keys, heads),
        "q_strides": q_strides,
        "k_strides": k_strides,
        "v_strides": v_strides,
        "scales": Scales(call.scale_q, call.scale_k, call.scale_v),
        "Q": q_features,
        "K": k_features,
        "V": v_features,
        "BLOCK_H": HEADS,
    }
    form = Launch(
        product_kernel,
        (2 * batch * keys + queries) * blocks,
        takes=(*ORDER, "k", "v", "q"),
        num_warps=WARPS,
        BLOCK_R=RANKS,
        **arguments,
    )
    differentiate = Launch(
        factor_kernel,
        batch * keys * (shares[1] + shares[2]) + queries * shares[0],
        takes=("dk", "dv", "dq", *ORDER, *(f"d{name}" for name in ORDER), "cu_seqlens"),
        num_warps=4 if block_r > RANKS or bk.dtype == torch.float32 else WARPS,
        num_stages=1,
        BLOCK_R=block_r,
        packing=None if bounds is None else Packing(bounds.shape[0] - 1, bounds.stride(0)),
        **arguments,
    )
    wholes = (Dense.like(k), Dense.like(v), None if q is None else Dense.like(q))
    if aq is None:  # the gradient of queries is that of ``bq``
        like = like._replace(bq=None)  # type: ignore[arg-type]
    gradients = like.map(Dense.like)
    return _Products(wholes, gradients, form, differentiate)


def _operand(
    a: Tensor | None, b: Tensor, x: Tensor | None, da: Tensor | None, db: Tensor
) -> tuple[Strides | None, Features | None]:
    """Strides of factors, of their product, and of their gradients, and what the compiler knows of features."""
    if a is None or x is None:
        return None, None
    found = feature_factors(b, x, db)
    of_b, of_x, of_db = (FeatureStrides(*strides) for strides in found.strides)
    of_a, of_da = (HeadStrides(*strides_of(factor)) for factor in (a, da))
    features = Features(b.shape[2], b.shape[3], tile_width(b.shape[3]), found.vector, found.flag)
    return Strides(of_a, of_b, of_x, of_da, of_db), features
