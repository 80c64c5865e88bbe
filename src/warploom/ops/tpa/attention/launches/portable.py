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
from warploom.ops.tpa.problem import Operands, feature_factors, strides_of
from warploom.runtime.launch import INTERPRETED, Kernel, architecture, may_start_early, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of

Tensor = torch.Tensor

forward_launch = Kernel(forward_kernel)
prepare_launch = Kernel(prepare_kernel)
query_launch = Kernel(query_kernel)
key_launch = Kernel(key_kernel)
factor_launch = Kernel(factor_kernel)
sum_launch = Kernel(sum_kernel)


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
    prepare_launch(
        batch * tokens * -(-heads // 16),
        (aq, bq, out, grad, statistics, q, delta, shift, tickets),
        (tokens, heads, *strides_of(aq), *b.strides[0], *o.strides[0], *o.strides[1], call.scale_q),
        (
            rank_q, features, bv.shape[-1], 16, 16, _block(features), _block(bv.shape[-1]),
            b.vector, b.flag, o.vector, o.flag, tickets is not None,
        ),
        4,
    )  # fmt: skip
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
    forward_launch(
        call.tiles(tokens, tiles.queries) * batch * heads,
        (aq, bq, ak, bk, av, bv, call.cu_seqlens, out, statistics),
        (
            tokens, keys, heads, batch, *call.packed, ak.shape[3] // 16, *strides_of(aq), *q.strides[0],
            *b.strides[0], *b.strides[1], *strides_of(out),
            call.logit_scale(bq.dtype), call.scale_q, call.scale_v,
        ),
        (
            call.causal, rank_q, rank_k, rank_v, features, values, tiles.queries, tiles.keys, block_d, block_e,
            q.vector, q.flag, b.vector, b.flag,
        ),
        tiles.warps,
        tiles.stages,
    )  # fmt: skip
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
    factor_launch(
        batch * tokens * -(-rank_q // block_r),
        (dq, aq, bq, daq, dbq),
        (
            tokens, heads, *strides_of(aq), *b.strides[0], *strides_of(daq), *b.strides[1], call.scale_q,
        ),
        (rank_q, features, 16, block_r, _block(features), b.vector, b.flag, early),
        4 if block_r == 16 and bq.dtype != torch.float32 else 8,
        1,
        early,
    )  # fmt: skip


def _sum_groups(sums_k: Tensor, sums_v: Tensor, dbk: Tensor, dbv: Tensor) -> None:
    """Write the gradients of ``bk`` and ``bv``, from those of each group of heads."""
    (batch, keys, rank_k, features), (rank_v, values) = dbk.shape, dbv.shape[2:]
    block_d, block_e = _block(features), _block(values)
    block = max(1, 1024 // max(block_d, block_e))
    k_programs, v_programs = (-(-batch * keys * rank // block) for rank in (rank_k, rank_v))
    early = may_start_early(dbk.device)
    b = feature_factors(dbk, dbv)
    sum_launch(
        k_programs + v_programs,
        (sums_k, sums_v, dbk, dbv),
        (batch, keys, sums_k.shape[0], k_programs, *b.strides[0], *b.strides[1]),
        (rank_k, rank_v, features, values, block, block_d, block_e, b.vector, b.flag, early),
        early=early,
    )


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
    query_launch(
        call.tiles(tokens, tiles.queries) * batch * heads,
        (q, ak, bk, av, bv, grad, statistics, delta, call.cu_seqlens, dq),
        (
            tokens, bk.shape[1], heads, batch, *call.packed, ak.shape[3] // 16,
            *b.strides[0], *b.strides[1], *g.strides[0], *strides_of(dq),
            call.logit_scale(q.dtype), scale * call.scale * call.scale_k, call.scale_v,
        ),
        (
            call.causal, rank_k, rank_v, features, values, tiles.queries, tiles.keys, block_d, block_e,
            g.vector, g.flag, b.vector, b.flag, q.dtype == torch.float32,
        ),
        tiles.warps,
        tiles.stages,
    )  # fmt: skip


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
    key_launch(
        blocks * groups,
        (q, ak, bk, av, bv, grad, statistics, delta, call.cu_seqlens, dak, dav, sums_k, sums_v),
        (
            tokens, keys, heads, batch, *call.packed, ak.shape[3] // 16,
            *b.strides[0], *b.strides[1], *g.strides[0],
            *strides_of(dak), *strides_of(dav), groups, 0,
            call.logit_scale(q.dtype), call.scale * call.scale_k, call.scale_v,
        ),
        (
            call.causal, rank_k, rank_v, features, values, tiles.queries, tiles.keys, block_d, block_e,
            g.vector, g.flag, b.vector, b.flag,
        ),
        tiles.warps,
        tiles.stages,
    )  # fmt: skip
    return sums_k, sums_v
