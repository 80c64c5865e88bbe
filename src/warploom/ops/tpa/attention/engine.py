"""Launches of training and prefill: queries, keys and values are formed, and flash attention's kernels attend.

To write and read keys and values costs a few percent of attention's time; to form tiles of them in every program
that attends costs more. They live as long as the call: autograd keeps factors, and the backward forms them anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.ops.flash_attention import engine as attention
from warploom.ops.flash_attention.problem import MaskSpec
from warploom.ops.tpa.attention.triton.products import (
    AttentionSizes,
    Operands,
    OperandStrides,
    ProductsConfig,
    SequenceBounds,
    factor_kernel,
    product_kernel,
)
from warploom.ops.tpa.call import AttentionInputs, AttentionOptions, Factors, feature_factors, strides_of
from warploom.ops.tpa.triton.factors import Features, FeatureStrides, HeadStrides
from warploom.runtime.launch import Buffer, Launch
from warploom.runtime.layout import tile_width
from warploom.runtime.memory_order import layout_of, reorder_like
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

HEADS = 16
"""Heads of a program, or of a step of it."""
RANKS = 16
"""Ranks of a step of a product."""
WARPS = 2
"""Warps of a program: on an H200 four took 1.1 to 1.2 times as long for products, and 1.5 times for gradients.
Those in float32, and of more ranks than one step, take four."""
_NO_HEADS, _NO_FEATURES = HeadStrides(0, 0, 0, 0), FeatureStrides(0, 0, 0, 0)


class _Products(NamedTuple):
    """Plan of the products: keys, values and queries of factors, and gradients of factors."""

    wholes: tuple[Buffer, Buffer, Buffer | None]  # keys, values, and queries unless ``bq`` holds them
    gradients: Any  # `Factors` of `Buffer`; None for what is not computed here
    form: Launch
    differentiate: Launch

    def run(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values (B, N or M, H, D or E)."""
        k, v, q = (None if like is None else like.empty(inputs.bk) for like in self.wholes)
        self.form(k, v, q, *_factors_of(inputs))
        return inputs.bq if q is None else q, k, v  # type: ignore[return-value]

    def run_backward(self, inputs: AttentionInputs, dq: Tensor, dk: Tensor, dv: Tensor) -> Factors:
        """Returns the gradients of the factors."""
        gradients: Factors = self.gradients.map(lambda like: like.empty(inputs.bk))
        whole = inputs.aq is None
        into = None if whole else dq
        self.differentiate(dk, dv, into, *_factors_of(inputs), *gradients, inputs.cu_seqlens)
        return gradients._replace(bq=dq) if whole else gradients


def _factors_of(inputs: AttentionInputs) -> Factors:
    """Returns the factors that are multiplied; ``bq`` is None if it holds whole queries."""
    factors = inputs.factors
    return factors._replace(bq=None) if inputs.aq is None else factors  # type: ignore[arg-type]


def forward(inputs: AttentionInputs, options: AttentionOptions, plans: Plans) -> tuple[Tensor, Tensor]:
    """Returns the output (B, N, H, E), and the statistics (2, B, H, N) in float32 for the backward.

    ``plans`` are those of calls that are the same in all but addresses and numbers in tensors.
    """
    q, k, v = plans.get("products", _plan, inputs, options).run(inputs)
    of_attention = plans.get("attention", Plans)
    out, _, statistics = attention.forward(
        q, k, v, _mask(inputs, options), _scale(inputs, options), "highest", of_attention
    )
    if inputs.aq is not None and q.shape[3] == 1:  # of which queries do not show where features lay in factors
        out = reorder_like(inputs.aq, out)
    return out, statistics


def backward(
    grad: Tensor, out: Tensor, statistics: Tensor, inputs: AttentionInputs, options: AttentionOptions, plans: Plans
) -> Factors:
    """Returns the gradients of the factors. ``plans`` are as in `forward`."""
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if factor is None else factor.stride() for factor in inputs[:6]])
    products = plans.get(strides, _plan, inputs, options)
    q, k, v = products.run(inputs)
    of_attention = plans.get("attention", Plans)
    mask, scale = _mask(inputs, options), _scale(inputs, options)
    dq, dk, dv, _ = attention.backward(
        grad, None, q, k, v, out, statistics, mask, scale, "highest", of_attention
    )  # fmt: skip
    return products.run_backward(inputs, dq, dk, dv)


def _mask(inputs: AttentionInputs, options: AttentionOptions) -> MaskSpec:
    """Returns which keys a query sees."""
    right = 0 if options.causal else None
    return MaskSpec(right=right, cu_seqlens_q=inputs.cu_seqlens, cu_seqlens_k=inputs.cu_seqlens)


def _scale(inputs: AttentionInputs, options: AttentionOptions) -> float:
    """Returns the scale of the logits, times that of whole queries, which are not formed."""
    return options.scale * (options.scale_q if inputs.aq is None else 1.0)


def _plan(inputs: AttentionInputs, options: AttentionOptions) -> _Products:
    factors = inputs.factors
    aq, ak, av, bq, bk, bv = factors.with_rank_axis()
    batch, tokens = bq.shape[:2]
    bounds = inputs.cu_seqlens
    keys, heads = ak.shape[1:3]
    q = None if aq is None else layout_of(aq, bq.shape[3])
    k, v = layout_of(ak, bk.shape[3]), layout_of(av, bv.shape[3])
    like = factors.map(lambda x: layout_of(x, x.shape[-1]))
    daq, dak, dav, dbq, dbk, dbv = like.with_rank_axis()
    queries = 0 if aq is None else batch * tokens
    widest = max(tile_width(bk.shape[3]), tile_width(bv.shape[3]))
    # Queries have the most ranks. A program holds all of them, of wide rows and in float32 those of one step.
    block_r = RANKS if bk.dtype == torch.float32 or widest > 128 else min(tile_width(bq.shape[2]), 64)
    shares = [-(-b.shape[2] // block_r) for b in (bq, bk, bv)]
    q_strides, q_features = _operand(aq, bq, q, daq, dbq)
    k_strides, k_features = _operand(ak, bk, k, dak, dbk)
    v_strides, v_features = _operand(av, bv, v, dav, dbv)
    arguments: dict[str, Any] = {
        "sizes": AttentionSizes(batch, tokens, keys, heads),
        "operands": Operands(
            q_strides, k_strides, v_strides, options.scale_q, options.scale_k, options.scale_v
        ),
    }  # fmt: skip
    form = Launch(
        product_kernel,
        (2 * batch * keys + queries) * -(-heads // HEADS),
        takes=("k", "v", "q", *Factors._fields),
        num_warps=WARPS,
        config=ProductsConfig(q_features, k_features, v_features, HEADS, RANKS),
        **arguments,
    )
    differentiate = Launch(
        factor_kernel,
        batch * keys * (shares[1] + shares[2]) + queries * shares[0],
        takes=("dk", "dv", "dq", *Factors._fields, *(f"d{name}" for name in Factors._fields), "cu_seqlens"),
        num_warps=4 if block_r > RANKS or bk.dtype == torch.float32 else WARPS,
        num_stages=1,
        config=ProductsConfig(q_features, k_features, v_features, HEADS, block_r),
        bounds=None if bounds is None else SequenceBounds(bounds.shape[0] - 1, bounds.stride(0)),
        **arguments,
    )
    wholes = (Buffer.like(k), Buffer.like(v), None if q is None else Buffer.like(q))
    if aq is None:  # the gradient of queries is that of ``bq``
        like = like._replace(bq=None)  # type: ignore[arg-type]
    gradients = like.map(Buffer.like)
    return _Products(wholes, gradients, form, differentiate)


def _operand(
    a: Tensor | None, b: Tensor, x: Tensor | None, da: Tensor | None, db: Tensor
) -> tuple[OperandStrides, Features]:
    """Returns strides of factors, their product and their gradients, and the layout of features.

    Those of whole queries, which are not formed, are zeros.
    """
    if a is None or x is None:
        none = OperandStrides(_NO_HEADS, _NO_FEATURES, _NO_FEATURES, _NO_HEADS, _NO_FEATURES)
        return none, Features(0, 0, 0, 0, False)
    found = feature_factors(b, x, db)
    of_b, of_x, of_db = (FeatureStrides(*strides) for strides in found.strides)
    of_a, of_da = (HeadStrides(*strides_of(factor)) for factor in (a, da))
    features = Features(b.shape[2], b.shape[3], tile_width(b.shape[3]), found.vector, found.flag)
    return OperandStrides(of_a, of_b, of_x, of_da, of_db), features
