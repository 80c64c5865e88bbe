"""Launchers of the kernels for training and prefill: sizes, strides, tiles. No validation, no autograd."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
import triton

from warploom.ops.tpa.attention.kernels.backward import (
    factor_kernel,
    key_kernel,
    prepare_kernel,
    query_kernel,
    sum_kernel,
)
from warploom.ops.tpa.attention.kernels.forward import forward_kernel
from warploom.ops.tpa.attention.problem import PROGRAMS, Call
from warploom.ops.tpa.problem import Operands, feature_factors, named, strides_of
from warploom.runtime.launch import INTERPRETED, Launch, architecture, may_start_early, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of

Tensor = torch.Tensor


class Tiles(NamedTuple):
    """Tiles of a kernel: queries and keys, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


def _stages(features: int, rank: int, arch: int) -> int:
    """How many tiles of keys' and values' factors of 16 bits, larger with every rank, fit in shared memory."""
    available = 227 if 90 <= arch < 120 else 163 if arch == 80 else 99  # KiB
    return 2 if rank <= 8 and features * (288 + 130 * rank) <= 1024 * available else 1


def _forward_tiles(dtype: torch.dtype, features: int, rank: int, arch: int) -> Tiles:
    if dtype == torch.float32:
        tiles = _float32_tiles(features)
        return tiles._replace(stages=2) if 80 < arch < 90 and rank == 1 and features <= 16 else tiles
    if features > 128:
        return Tiles(32, 16, 8, 2)
    if rank > 2 or not 90 <= arch < 120:  # without warp-group products there are no registers for more
        return Tiles(64, 32, 8, _stages(features, rank, arch))
    return Tiles(64, 64, 4, 3) if rank == 1 else Tiles(128, 64, 8, 3)


def _query_tiles(dtype: torch.dtype, features: int, rank: int, arch: int) -> Tiles:
    blackwell = arch >= 100  # where the registers of Hopper's choices do not suffice
    if dtype == torch.float32:
        tiles = _float32_tiles(features)
        return tiles._replace(stages=2) if blackwell and rank <= 8 and features <= 32 else tiles
    if features > 128:
        return Tiles(32, 16, 8, 1)
    if rank > 2 or not 90 <= arch < 120:
        return Tiles(64, 32, 8, _stages(features, rank, arch))
    return Tiles(64, 64, 8 if blackwell and features > 64 else 4, 2) if rank == 1 else Tiles(128, 64, 8, 2)


def _key_tiles(dtype: torch.dtype, features: int, rank: int) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16, 16, 8, 1) if rank <= 2 else Tiles(16, 32, 8, 1)
    if features > 128:
        return Tiles(32, 16, 8, 1)
    if rank <= 2:
        return Tiles(32, 64, 4, 3)
    return Tiles(32, 16, 8, 2 if features > 64 else 1)


def _float32_tiles(features: int) -> Tiles:
    return Tiles(16, 16, 8, 1) if features > 64 else Tiles(32, 32, 8, 1)


def _heads_first(a: Tensor, scale: float = 1.0) -> Tensor:
    """``scale · a`` (B, M, H, R) as the kernels read it: (B, H, R, M) in float32, rows a multiple of 16 apart."""
    batch, tokens, heads, rank = a.shape
    rows = torch.empty((batch, heads, rank, -(-tokens // 16) * 16), dtype=torch.float32, device=a.device)
    rows[..., :tokens].copy_(a.permute(0, 2, 3, 1))
    return rows if scale == 1.0 else rows.mul_(scale)


def _block(features: int) -> int:
    block: int = max(16, triton.next_power_of_2(features))
    return block


def _hopper(factors: Operands, call: Call) -> ModuleType | None:
    """The launchers of the kernels for Hopper, if these take the call."""
    if INTERPRETED:
        return None
    from warploom.ops.tpa.attention.launches import hopper

    return hopper if hopper.suit(factors, call) else None


def _prepare(
    factors: Operands,
    call: Call,
    out: Tensor | None = None,
    grad: Tensor | None = None,
    statistics: Tensor | None = None,
    delta: Tensor | None = None,
    shift: Tensor | None = None,
    tickets: Tensor | None = None,
) -> Tensor:
    """Form Q (B, H, N, D); with ``grad`` write ``delta``, and ``shift`` and ``tickets`` if they are given.

    With ``tickets`` the launch after it must be one for Hopper, which may start early.
    """
    aq, ak, _, bq, _, bv = factors
    batch, tokens, rank_q, features = bq.shape
    heads = ak.shape[2]
    q = torch.empty((batch, heads, tokens, features), dtype=bq.dtype, device=bq.device)
    b, o = feature_factors(bq), feature_factors(*(bq if t is None else t for t in (out, grad)))
    given = {"bq": bq, "aq": aq, "out": out, "grad": grad, "statistics": statistics, "q": q, "delta": delta,
             "shift": shift, "tickets": tickets}  # fmt: skip
    Launch(
        prepare_kernel,
        batch * tokens * -(-heads // 16),
        takes=given,
        tokens=tokens, heads=heads, scale_q=call.scale_q,
        **named(aq_bnhr=strides_of(aq), bq_bnrd=b.strides[0], out_bnhe=o.strides[0], grad_bnhe=o.strides[1]),
        RQ=rank_q, D=features, E=bv.shape[-1], BLOCK_H=16, BLOCK_R=16, BLOCK_D=_block(features),
        BLOCK_E=_block(bv.shape[-1]), Q_VEC=b.vector, Q_UNIT=b.flag, O_VEC=o.vector, O_UNIT=o.flag,
        OVERLAP=tickets is not None,
    )(*given.values())  # fmt: skip
    return q


def forward(factors: Operands, call: Call) -> tuple[Tensor, Tensor]:
    """Run the forward kernel: the output, and maximum and denominator (B, H, 2, N) of every softmax in float32."""
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, rank_q, features = bq.shape
    keys, heads, rank_k = ak.shape[1:]
    rank_v, values = bv.shape[2:]
    out = empty_in_order_of(bq if aq is None else aq, values)
    if (hopper := _hopper(factors, call)) is not None:
        rows = _heads_first(ak, call.scale_k), _heads_first(av, call.scale_v)
        tickets = hopper.tickets(bq)
        formed = _prepare(factors, call, tickets=tickets)
        return out, hopper.forward(formed, tickets, *rows, bk, bv, out, call)
    statistics = torch.empty((batch, heads, 2, tokens), dtype=torch.float32, device=bq.device)
    block_d, block_e = _block(features), _block(values)
    tiles = _forward_tiles(bq.dtype, max(block_d, block_e), max(rank_k, rank_v), architecture(bq.device))
    q, b = feature_factors(bq), feature_factors(bk, bv)
    ak, av = _heads_first(ak), _heads_first(av)
    sequences, cu_stride = call.packed
    Launch(
        forward_kernel,
        call.tiles(tokens, tiles.queries) * batch * heads,
        takes=("bq", "aq", "ak", "bk", "av", "bv", "cu_seqlens", "out", "statistics"),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tokens=tokens, keys=keys, heads=heads, batches=batch, sequences=sequences, cu_stride=cu_stride,
        a_r=ak.shape[3] // 16,
        **named(aq_bnhr=strides_of(aq), bq_bnrd=q.strides[0], bk_bmrd=b.strides[0], bv_bmre=b.strides[1],
                out_bnhe=strides_of(out)),
        logit_scale=call.logit_scale(bq.dtype), scale_q=call.scale_q, scale_v=call.scale_v,
        CAUSAL=call.causal, RQ=rank_q, RK=rank_k, RV=rank_v, D=features, E=values, BLOCK_N=tiles.queries,
        BLOCK_M=tiles.keys, BLOCK_D=block_d, BLOCK_E=block_e,
        Q_VEC=q.vector, Q_UNIT=q.flag, B_VEC=b.vector, B_UNIT=b.flag,
    )(bq, aq, ak, bk, av, bv, call.cu_seqlens, out, statistics)  # fmt: skip
    return out, statistics


def backward(grad: Tensor, out: Tensor, statistics: Tensor, factors: Operands, call: Call) -> Operands:
    """Run the backward kernels: gradients of the factors.

    Beside them it holds Q and dQ, as large as queries of the inputs' dtype are, δ, and the sums of the gradients of
    ``bk`` and ``bv`` in float32, once for every group of heads.

    On Hopper launches overlap, and so their order matters. All but the first start early, and nothing else is
    launched between them: memory is allocated before.

        prepare   Q, δ, shift, tickets; lets `key` be put in place
        key       waits for `prepare`, and then lets `query` start wherever it leaves multiprocessors idle
        query     reads what `prepare` wrote, which is complete, and nothing of `key`; one program waits for that at
                  its end, so that it ends after `key`
        factors   waits for `query`, and with it for `key`
        sums      waits for `factors`, and with it for all before

    Elsewhere `query` comes before `key`, to which it leaves the δ of float32.
    """
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, _, features = bq.shape
    heads = ak.shape[2]
    daq = None if aq is None else empty_in_order_of(aq, aq.shape[3])
    dak, dav, dbq, dbk, dbv = (empty_in_order_of(t, t.shape[3]) for t in (ak, av, bq, bk, bv))
    delta = torch.empty((batch, heads, tokens), dtype=torch.float32, device=bq.device)
    if aq is None:
        dq, scale = dbq, call.scale_q
    else:
        dq, scale = torch.empty((batch, tokens, heads, features), dtype=bq.dtype, device=bq.device), 1.0
    hopper = _hopper(factors, call)
    if hopper is None:
        rows = _heads_first(ak), _heads_first(av)
        q = _prepare(factors, call, out, grad, statistics, delta)
        _query_gradient(q, statistics, delta, grad, *rows, bk, bv, dq, scale, call)
        sums = _key_gradients(q, statistics, delta, grad, *rows, bk, bv, dak, dav, call)
    else:
        grad = hopper.copyable(grad)
        rows = _heads_first(ak, call.scale_k), _heads_first(av, call.scale_v)
        shift, tickets = torch.empty_like(delta), hopper.tickets(bq)
        sums = hopper.key_sums(bk, bv, heads)
        q = _prepare(factors, call, out, grad, statistics, delta, shift, tickets)
        hopper.key_gradients(q, tickets, shift, delta, grad, *rows, bk, bv, dak, dav, sums, call)
        hopper.query_gradient(q, tickets, shift, delta, grad, *rows, bk, bv, dq, scale, call)
    if aq is not None and daq is not None:
        _factor_gradients(dq, aq, bq, daq, dbq, call)
    _sum_groups(*sums, dbk, dbv)
    return Operands(daq, dak, dav, dbq, dbk, dbv)


def _factor_gradients(dq: Tensor, aq: Tensor, bq: Tensor, daq: Tensor, dbq: Tensor, call: Call) -> None:
    """Write the gradients of ``aq`` and ``bq``."""
    batch, tokens, heads, features = dq.shape
    rank_q = bq.shape[2]
    block_r = min(_block(rank_q), 64)
    early = may_start_early(dq.device)
    b = feature_factors(bq, dbq)
    Launch(
        factor_kernel,
        batch * tokens * -(-rank_q // block_r),
        takes=("dq", "aq", "bq", "daq", "dbq"),
        num_warps=4 if block_r == 16 and bq.dtype != torch.float32 else 8,
        num_stages=1,
        early=early,
        tokens=tokens, heads=heads, scale_q=call.scale_q,
        **named(aq_bnhr=strides_of(aq), bq_bnrd=b.strides[0], daq_bnhr=strides_of(daq), dbq_bnrd=b.strides[1]),
        RQ=rank_q, D=features, BLOCK_H=16, BLOCK_R=block_r, BLOCK_D=_block(features), VEC=b.vector, UNIT=b.flag,
        EARLY=early,
    )(dq, aq, bq, daq, dbq)  # fmt: skip


def _sum_groups(sums_k: Tensor, sums_v: Tensor, dbk: Tensor, dbv: Tensor) -> None:
    """Write the gradients of ``bk`` and ``bv``, from those of each group of heads."""
    (batch, keys, rank_k, features), (rank_v, values) = dbk.shape, dbv.shape[2:]
    block_d, block_e = _block(features), _block(values)
    block = max(1, 1024 // max(block_d, block_e))
    k_programs, v_programs = (-(-batch * keys * rank // block) for rank in (rank_k, rank_v))
    early = may_start_early(dbk.device)
    b = feature_factors(dbk, dbv)
    Launch(
        sum_kernel,
        k_programs + v_programs,
        takes=("k_sums", "v_sums", "dbk", "dbv"),
        early=early,
        batches=batch, keys=keys, groups=sums_k.shape[0], k_programs=k_programs,
        **named(dbk_bmrd=b.strides[0], dbv_bmre=b.strides[1]),
        RK=rank_k, RV=rank_v, D=features, E=values, BLOCK=block, BLOCK_D=block_d, BLOCK_E=block_e, VEC=b.vector,
        UNIT=b.flag, EARLY=early,
    )(sums_k, sums_v, dbk, dbv)  # fmt: skip


def _query_gradient(
    q: Tensor, statistics: Tensor, delta: Tensor, grad: Tensor,
    ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor, dq: Tensor, scale: float, call: Call,
) -> None:  # fmt: skip
    """Write ``scale · dQ`` to ``dq`` (B, N, H, D); ``ak`` and ``av`` have their heads first."""
    batch, heads, tokens, features = q.shape
    rank_k, rank_v, values = ak.shape[2], av.shape[2], bv.shape[-1]
    block_d, block_e = _block(features), _block(values)
    tiles = _query_tiles(q.dtype, max(block_d, block_e), max(rank_k, rank_v), architecture(q.device))
    g, b = feature_factors(grad), feature_factors(bk, bv)
    sequences, cu_stride = call.packed
    Launch(
        query_kernel,
        call.tiles(tokens, tiles.queries) * batch * heads,
        takes=("q", "ak", "bk", "av", "bv", "grad", "statistics", "delta", "cu_seqlens", "dq"),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tokens=tokens, keys=bk.shape[1], heads=heads, batches=batch, sequences=sequences, cu_stride=cu_stride,
        a_r=ak.shape[3] // 16,
        **named(bk_bmrd=b.strides[0], bv_bmre=b.strides[1], grad_bnhe=g.strides[0], dq_bnhd=strides_of(dq)),
        logit_scale=call.logit_scale(q.dtype), dq_scale=scale * call.scale * call.scale_k, scale_v=call.scale_v,
        CAUSAL=call.causal, RK=rank_k, RV=rank_v, D=features, E=values, BLOCK_N=tiles.queries, BLOCK_M=tiles.keys,
        BLOCK_D=block_d, BLOCK_E=block_e, G_VEC=g.vector, G_UNIT=g.flag, B_VEC=b.vector, B_UNIT=b.flag,
        SUM_DELTA=q.dtype == torch.float32,
    )(q, ak, bk, av, bv, grad, statistics, delta, call.cu_seqlens, dq)  # fmt: skip


def _key_gradients(
    q: Tensor, statistics: Tensor, delta: Tensor, grad: Tensor,
    ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor, dak: Tensor, dav: Tensor, call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write ``dak``, ``dav``; return the gradients of ``bk``, ``bv`` in float32, each group of heads' own.

    ``ak`` and ``av`` have their heads first.
    """
    batch, heads, tokens, features = q.shape
    keys, rank_k, rank_v, values = bk.shape[1], ak.shape[2], av.shape[2], bv.shape[-1]
    block_d, block_e = _block(features), _block(values)
    tiles = _key_tiles(q.dtype, max(block_d, block_e), max(rank_k, rank_v))
    blocks = call.tiles(keys, tiles.keys) * batch
    groups = min(heads, max(1, PROGRAMS * multiprocessors(q.device) // max(blocks, 1)))
    sums_k = torch.empty((groups, *bk.shape), dtype=torch.float32, device=q.device)
    sums_v = torch.empty((groups, *bv.shape), dtype=torch.float32, device=q.device)
    g, b = feature_factors(grad), feature_factors(bk, bv)
    sequences, cu_stride = call.packed
    Launch(
        key_kernel,
        blocks * groups,
        takes=(
            "q", "ak", "bk", "av", "bv", "grad", "statistics", "delta", "cu_seqlens", "dak", "dav", "dbk", "dbv"
        ),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tokens=tokens, keys=keys, heads=heads, batches=batch, sequences=sequences, cu_stride=cu_stride,
        a_r=ak.shape[3] // 16,
        **named(bk_bmrd=b.strides[0], bv_bmre=b.strides[1], grad_bnhe=g.strides[0], dak_bmhr=strides_of(dak),
                dav_bmhr=strides_of(dav)),
        groups=groups, zero=0,
        logit_scale=call.logit_scale(q.dtype), dk_scale=call.scale * call.scale_k, scale_v=call.scale_v,
        CAUSAL=call.causal, RK=rank_k, RV=rank_v, D=features, E=values, BLOCK_N=tiles.queries, BLOCK_M=tiles.keys,
        BLOCK_D=block_d, BLOCK_E=block_e, G_VEC=g.vector, G_UNIT=g.flag, B_VEC=b.vector, B_UNIT=b.flag,
    )(q, ak, bk, av, bv, grad, statistics, delta, call.cu_seqlens, dak, dav, sums_k, sums_v)  # fmt: skip
    return sums_k, sums_v
