"""Launches of training and prefill: what a call plans and runs, and the launches of the kernels for every GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.ops.tpa.attention.configs import (
    COPIED,
    PROGRAMS,
    WIDE,
    Tiles,
    forward_tiles,
    key_tiles,
    query_tiles,
)
from warploom.ops.tpa.attention.kernels.backward import (
    KeyScales,
    KeyStrides,
    factor_kernel,
    key_kernel,
    query_kernel,
    sum_kernel,
)
from warploom.ops.tpa.attention.kernels.forward import Sizes, forward_kernel
from warploom.ops.tpa.attention.launches import hopper
from warploom.ops.tpa.attention.launches.common import HeadRows, plan_prepare, queries, row_length
from warploom.ops.tpa.attention.problem import Call
from warploom.ops.tpa.kernels.factors import Features, FeatureStrides, HeadStrides
from warploom.ops.tpa.problem import Factors, Operands, feature_factors, padded, strides_of
from warploom.runtime.launch import Dense, Launch, architecture, are_aligned, has_pdl, multiprocessors
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans, metadata

Tensor = torch.Tensor


class _Forward(NamedTuple):
    """What a forward allocates and launches."""

    out: Dense
    statistics: Dense
    ak: HeadRows
    av: HeadRows
    launch: Launch

    def run(self, factors: Operands, call: Call) -> tuple[Tensor, Tensor]:
        """The output, and the statistics of every softmax."""
        aq, ak, av, bq, bk, bv = factors
        out, statistics = self.out.empty(bq), self.statistics.empty(bq)
        self.launch(bq, aq, self.ak(ak), bk, self.av(av), bv, call.cu_seqlens, out, statistics)
        return out, statistics


class _Backward(NamedTuple):
    """What a backward allocates and launches."""

    gradients: Any  # `Operands` of `Dense`
    ak: HeadRows
    av: HeadRows
    delta: Dense
    q: Dense
    dq: Dense | None  # None: it is the gradient of ``bq``
    sums: tuple[Dense, Dense]  # gradients of ``bk`` and ``bv`` in float32, each group of heads' own
    prepare: Launch
    query: Launch
    key: Launch
    factors: Launch | None
    sum: Launch
    on_hopper: bool
    copies: bool  # the gradient of the output, before anything else


def forward(factors: Operands, call: Call, plans: Plans) -> tuple[Tensor, Tensor]:
    """Run the forward kernel: the output, and maximum and denominator (B, H, 2, N) of every softmax in float32.

    The statistics are of any strides. ``plans`` are those of calls that are the same in all but addresses and
    numbers in tensors.
    """
    plan = plans.get(("forward", are_aligned(factors.bk, factors.bv)), _plan_forward, factors, call)
    return plan.run(factors, call)


def _sizes(factors: Operands, call: Call) -> Sizes:
    """Of a call, as the kernels take them."""
    _, ak, _, bq, _, _ = factors
    batch, keys, heads, _ = ak.shape
    return Sizes(bq.shape[1], keys, heads, batch, *call.packed, row_length(keys) // 16)


def _features(factors: Operands, vector: int, unit: bool) -> tuple[Features, Features]:
    """What kernels know of the feature factors of keys and of values."""
    _, _, _, _, bk, bv = factors
    k, v = (Features(b.shape[2], b.shape[3], padded(b.shape[3]), vector, unit) for b in (bk, bv))
    return k, v


def _arguments(factors: Operands, call: Call, b: Factors, tiles: Tiles) -> dict[str, Any]:
    """What the kernels that loop over keys, or over the queries of keys, have in common."""
    k_features, v_features = _features(factors, b.vector, b.flag)
    return {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "sizes": _sizes(factors, call),
        "CAUSAL": call.causal,
        "K": k_features,
        "V": v_features,
        "BLOCK_N": tiles.queries,
        "BLOCK_M": tiles.keys,
    }


def _largest(factors: Operands) -> tuple[int, int]:
    """The larger of D and E, padded, and of both ranks."""
    _, _, _, bq, bk, bv = factors
    return max(padded(bq.shape[3]), padded(bv.shape[3])), max(bk.shape[2], bv.shape[2])


def _narrow_stored(factors: Operands, b: Factors) -> bool:
    """Whether loops over keys store narrow tiles of keys or values in shared memory themselves: `NARROW_STORED`."""
    _, _, _, _, bk, bv = factors
    copied = bk.shape[2] == bv.shape[2] == 1 and b.vector * bk.element_size() >= COPIED
    return not copied and min(padded(bk.shape[3]), padded(bv.shape[3])) < WIDE


def _plan_forward(factors: Operands, call: Call) -> _Forward | hopper.Forward:
    factors = factors.ranked()
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, rank_q, features = bq.shape
    out = layout_of(bq if aq is None else aq, bv.shape[3])
    if hopper.suit(factors, call):
        return hopper.plan_forward(factors, call, out)
    q, b = feature_factors(bq), feature_factors(bk, bv)
    tiles = forward_tiles(bq.dtype, *_largest(factors), architecture(bq.device), _narrow_stored(factors, b))
    launch = Launch(
        forward_kernel,
        call.tiles(tokens, tiles.queries) * batch * ak.shape[2],
        takes=("bq", "aq", "ak", "bk", "av", "bv", "cu_seqlens", "out", "statistics"),
        aq_strides=HeadStrides(*strides_of(aq)),
        bq_strides=FeatureStrides(*q.strides[0]),
        bk_strides=FeatureStrides(*b.strides[0]),
        bv_strides=FeatureStrides(*b.strides[1]),
        out_strides=FeatureStrides(*strides_of(out)),
        logit_scale=call.logit_scale(bq.dtype),
        scale_q=call.scale_q,
        scale_v=call.scale_v,
        Q=Features(rank_q, features, padded(features), q.vector, q.flag),
        **_arguments(factors, call, b, tiles),
    )
    statistics = Dense.rows((batch, ak.shape[2], 2, tokens), torch.float32)
    return _Forward(Dense.like(out), statistics, HeadRows.of(ak), HeadRows.of(av), launch)


def backward(
    grad: Tensor, out: Tensor, statistics: Tensor, factors: Operands, call: Call, plans: Plans
) -> Operands:
    """Run the backward kernels: gradients of the factors. ``plans`` are as in `forward`.

    Beside them it holds Q and dQ, as large as queries of the inputs' dtype are, δ, and the sums of the gradients of
    ``bk`` and ``bv`` in float32, once for every group of heads.

    On Hopper launches overlap, and so their order matters. All but the first start early, and nothing else is
    launched between them: memory is allocated before.

        prepare   Q, δ, lse, counters; lets `key` be put in place
        key       waits for `prepare`, and then lets `query` start wherever it leaves multiprocessors idle
        query     reads what `prepare` wrote, which is complete, and nothing of `key`; one program waits for that at
                  its end, so that it ends after `key`
        factors   waits for `query`, and with it for `key`
        sums      waits for `factors`, and with it for all before

    Elsewhere `query` comes before `key`, to which it leaves the δ of float32.
    """
    aq, ak, av, bq, bk, bv = factors
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = [None if x is None else x.stride() for x in factors]
    key = ("backward", metadata(grad), metadata(out), are_aligned(grad), are_aligned(bk, bv), *strides)
    plan = plans.get(key, _plan_backward, factors, call, out, grad)
    gradients: Operands = plan.gradients.map(lambda like: like.empty(bq))
    daq, dak, dav, dbq, dbk, dbv = gradients
    delta, q = plan.delta.empty(bq), plan.q.empty(bq)
    dq = dbq if plan.dq is None else plan.dq.empty(bq)
    sums = tuple(like.empty(bq) for like in plan.sums)
    ak_rows, av_rows = plan.ak(ak), plan.av(av)
    if plan.on_hopper:
        if plan.copies:
            grad = grad.clone(memory_format=torch.contiguous_format)
        lse, counters = plan.delta.empty(bq), hopper.COUNTERS.empty(bq)
        plan.prepare(bq, aq, out, grad, statistics, q, delta, lse, counters)
        plan.key(q, grad, ak_rows, av_rows, bk, bv, lse, delta, dak, dav, *sums, counters)
        plan.query(q, bk, bv, grad, dq, ak_rows, av_rows, lse, delta, counters)
    else:
        plan.prepare(bq, aq, out, grad, statistics, q, delta, None, None)
        cache = (q, ak_rows, bk, av_rows, bv, grad, statistics, delta, call.cu_seqlens)
        plan.query(*cache, dq)
        plan.key(*cache, dak, dav, *sums)
    if plan.factors is not None:
        plan.factors(dq, aq, bq, daq, dbq)
    plan.sum(*sums, dbk, dbv)
    return gradients


def _plan_backward(factors: Operands, call: Call, out: Tensor, grad: Tensor) -> _Backward:
    gradients = factors.map(lambda x: layout_of(x, x.shape[-1]))
    factors, like = factors.ranked(), gradients.ranked()
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, _, features = bq.shape
    heads = ak.shape[2]
    on_hopper = hopper.suit(factors, call)
    copies = on_hopper and not hopper.can_read(grad)
    if copies:
        grad = torch.empty(grad.shape, dtype=grad.dtype, device="meta")
    if aq is None:
        dq, scale = like.bq, call.scale_q
    else:
        dq, scale = torch.empty((batch, tokens, heads, features), dtype=bq.dtype, device="meta"), 1.0
    if on_hopper:
        groups = hopper.groups(factors)
        query = hopper.plan_query(factors, call, grad, dq, scale)
        key = hopper.plan_key(factors, call, grad, like, groups)
    else:
        tiles = key_tiles(bq.dtype, *_largest(factors))
        tiles_of_keys = call.tiles(bk.shape[1], tiles.keys) * batch
        groups = min(heads, max(1, PROGRAMS * multiprocessors(bq.device) // max(tiles_of_keys, 1)))
        query = _plan_query(factors, call, grad, dq, scale)
        key = _plan_key(factors, call, grad, like, tiles, groups)
    return _Backward(
        gradients=gradients.map(Dense.like),
        ak=HeadRows.of(ak, call.scale_k if on_hopper else 1.0),
        av=HeadRows.of(av, call.scale_v if on_hopper else 1.0),
        delta=Dense.rows((batch, heads, tokens), torch.float32),
        q=queries(factors),
        dq=None if aq is None else Dense.like(dq),
        sums=(Dense.rows((groups, *bk.shape), torch.float32), Dense.rows((groups, *bv.shape), torch.float32)),
        prepare=plan_prepare(factors, call, out, grad, on_hopper),
        query=query,
        key=key,
        factors=None if aq is None else _plan_factors(factors, call, like),
        sum=_plan_sum(factors, like, groups),
        on_hopper=on_hopper,
        copies=copies,
    )


def _plan_query(factors: Operands, call: Call, grad: Tensor, dq: Tensor, scale: float) -> Launch:
    """The launch that writes ``scale · dQ`` to ``dq`` (B, N, H, D)."""
    _, ak, _, bq, bk, bv = factors
    g, b = feature_factors(grad), feature_factors(bk, bv)
    tiles = query_tiles(bq.dtype, *_largest(factors), architecture(bq.device), _narrow_stored(factors, b))
    arguments = _arguments(factors, call, b, tiles)
    return Launch(
        query_kernel,
        call.tiles(bq.shape[1], tiles.queries) * bq.shape[0] * ak.shape[2],
        takes=("q", "ak", "bk", "av", "bv", "grad", "statistics", "delta", "cu_seqlens", "dq"),
        bk_strides=FeatureStrides(*b.strides[0]),
        bv_strides=FeatureStrides(*b.strides[1]),
        grad_strides=FeatureStrides(*g.strides[0]),
        dq_strides=FeatureStrides(*strides_of(dq)),
        logit_scale=call.logit_scale(bq.dtype),
        dq_scale=scale * call.scale * call.scale_k,
        scale_v=call.scale_v,
        G=arguments["V"]._replace(R=1, VEC=g.vector, UNIT=g.flag),
        SUM_DELTA=bq.dtype == torch.float32,
        **arguments,
    )


def _plan_key(factors: Operands, call: Call, grad: Tensor, like: Operands, tiles: Tiles, groups: int) -> Launch:
    """The launch that writes gradients of head factors, and for each group of heads those of feature factors."""
    _, _, _, bq, bk, bv = factors
    g, b = feature_factors(grad), feature_factors(bk, bv)
    arguments = _arguments(factors, call, b, tiles)
    return Launch(
        key_kernel,
        call.tiles(bk.shape[1], tiles.keys) * bk.shape[0] * groups,
        takes=(
            *("q", "ak", "bk", "av", "bv", "grad", "statistics", "delta", "cu_seqlens"),
            *("dak", "dav", "dbk", "dbv"),
        ),
        strides=KeyStrides(
            bk=FeatureStrides(*b.strides[0]),
            bv=FeatureStrides(*b.strides[1]),
            grad=FeatureStrides(*g.strides[0]),
            dak=HeadStrides(*strides_of(like.ak)),
            dav=HeadStrides(*strides_of(like.av)),
        ),
        groups=groups,
        zero=0,
        scales=KeyScales(call.logit_scale(bq.dtype), call.scale * call.scale_k, call.scale_v),
        G=arguments["V"]._replace(R=1, VEC=g.vector, UNIT=g.flag),
        **arguments,
    )


def _plan_factors(factors: Operands, call: Call, like: Operands) -> Launch:
    """The launch that writes the gradients of ``aq`` and ``bq`` from dQ."""
    aq, ak, _, bq, _, _ = factors
    batch, tokens, rank_q, features = bq.shape
    block_r = min(padded(rank_q), 64)
    pdl = has_pdl(bq.device)
    b = feature_factors(bq, like.bq)
    return Launch(
        factor_kernel,
        batch * tokens * -(-rank_q // block_r),
        takes=("dq", "aq", "bq", "daq", "dbq"),
        num_warps=4 if block_r == 16 and bq.dtype != torch.float32 else 8,
        num_stages=1,
        pdl=pdl,
        tokens=tokens,
        heads=ak.shape[2],
        aq_strides=HeadStrides(*strides_of(aq)),
        bq_strides=FeatureStrides(*b.strides[0]),
        daq_strides=HeadStrides(*strides_of(like.aq)),
        dbq_strides=FeatureStrides(*b.strides[1]),
        scale_q=call.scale_q,
        Q=Features(rank_q, features, padded(features), b.vector, b.flag),
        BLOCK_H=16,
        BLOCK_R=block_r,
        PDL=pdl,
    )


def _plan_sum(factors: Operands, like: Operands, groups: int) -> Launch:
    """The launch that writes the gradients of ``bk`` and ``bv``, from those of each group of heads."""
    bk = factors.bk
    batch, keys = bk.shape[:2]
    b = feature_factors(like.bk, like.bv)
    k_features, v_features = _features(factors, b.vector, b.flag)
    rows = max(1, 1024 // max(k_features.BLOCK_F, v_features.BLOCK_F))
    k_programs, v_programs = (-(-batch * keys * x.R // rows) for x in (k_features, v_features))
    pdl = has_pdl(bk.device)
    return Launch(
        sum_kernel,
        k_programs + v_programs,
        takes=("k_sums", "v_sums", "dbk", "dbv"),
        pdl=pdl,
        batches=batch,
        keys=keys,
        groups=groups,
        k_programs=k_programs,
        dbk_strides=FeatureStrides(*b.strides[0]),
        dbv_strides=FeatureStrides(*b.strides[1]),
        K=k_features,
        V=v_features,
        BLOCK=rows,
        PDL=pdl,
    )
