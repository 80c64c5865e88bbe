"""Launchers of the decode kernels: sizes, strides, tiles, strategy. No validation, no autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from warploom.ops.tpa.decode.chunks import Chunks
from warploom.ops.tpa.decode.configs import (
    COMBINE_AHEAD,
    COMBINE_ROWS,
    JOIN,
    ONE_MULTIPROCESSOR,
    ONE_PROGRAM,
    SECOND_LAUNCH,
    START,
    RowTile,
    row_tile,
)
from warploom.ops.tpa.decode.hopper import launch as hopper
from warploom.ops.tpa.decode.triton.decode import (
    ChunkLengths,
    Heads,
    Scales,
    Sizes,
    Strides,
    Tile,
    combine_kernel,
    decode_kernel,
)
from warploom.ops.tpa.problem import Operands, feature_factors, head_factors, logit_unit, strides_of
from warploom.ops.tpa.triton.factors import Features, FeatureStrides, HeadStrides
from warploom.runtime.launch import Dense, Launch, are_aligned, has_pdl, multiprocessors
from warploom.runtime.layout import tile_width
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


CHUNKS = Chunks(shortest=128, longest=1024, wanted=32, widths=(1, 4))


def _microseconds(tiles: int, spans: int, entry_bytes: int, device: torch.device) -> float:
    """Estimated time: of the multiprocessor that reads most, and of the second kernel after it."""
    programs = -(-tiles * spans // multiprocessors(device))
    span = entry_bytes / spans
    reading = max(programs * span / ONE_MULTIPROCESSOR, -(-programs // 2) * span / ONE_PROGRAM) + programs * START
    return reading + (SECOND_LAUNCH + spans * JOIN if spans > 1 else 0.0)


class DecodeCall(NamedTuple):
    """What a call for decoding is about besides its factors."""

    cache_seqlens: Tensor | None
    strategy: str
    scale: float
    scale_q: float
    scale_k: float
    scale_v: float


class _Decode(NamedTuple):
    """What a call allocates and launches."""

    out: Dense
    launch: Launch
    combine: Launch | None = None  # where the cache is split
    parts: tuple[Dense, Dense] | None = None  # results and statistics of the parts


def decode(factors: Operands, call: DecodeCall, plans: Plans) -> Tensor:
    """Run the decode kernel, and where the cache is split the second one.

    ``plans`` are those of calls that are the same in all but addresses and numbers in tensors.
    """
    aq, ak, av, bq, bk, bv = factors
    plan = plans.get("decode", _plan_decode, factors, call)[are_aligned(ak, av, bk, bv)]
    out = plan.out.empty(bq)
    partial, statistics = (None, None) if plan.parts is None else (part.empty(bq) for part in plan.parts)
    plan.launch(ak, av, bk, bv, aq, bq, call.cache_seqlens, out, partial, statistics)
    if plan.combine is not None:
        plan.combine(partial, statistics, call.cache_seqlens, out)
    return out


def _plan_decode(factors: Operands, call: DecodeCall) -> tuple[_Decode, _Decode]:
    """Plans for a cache at any address, and for one at multiples of 16 bytes."""
    factors = factors.ranked()
    everywhere = _plan_kernels(factors, call, on_hopper=False)
    if call.strategy == "batch_head" or not hopper.suit(factors, call.cache_seqlens):
        return everywhere, everywhere
    return everywhere, _plan_kernels(factors, call, on_hopper=True)


def _plan_kernels(factors: Operands, call: DecodeCall, on_hopper: bool) -> _Decode:
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, keys, heads, values = *bq.shape[:2], *ak.shape[1:3], bv.shape[3]
    out = layout_of(bq if aq is None else aq, values)
    scales = call.scale * call.scale_k * logit_unit(bq.dtype), call.scale_q, call.scale_v
    lengths_stride = 0 if call.cache_seqlens is None else call.cache_seqlens.stride(0)
    entry_bytes = keys * sum(math.prod(f.shape[2:]) * f.element_size() for f in (ak, av, bk, bv))
    tile = row_tile(factors, call.strategy)
    tiles = batch if on_hopper else batch * tile.blocks(heads, tokens)
    chunks, microseconds = CHUNKS, _microseconds
    if on_hopper:
        chunks, microseconds = hopper.CHUNKS, hopper.microseconds
    levels = chunks.levels(call.strategy, keys, lambda spans: microseconds(tiles, spans, entry_bytes, bq.device))
    spans = chunks.spans(keys, levels)
    if on_hopper:
        launch = hopper.plan(factors, out, lengths_stride, spans, levels, scales)
    else:
        launch = _plan_launch(factors, out, lengths_stride, spans, levels, scales, tile)
    if spans == 1:
        return _Decode(Dense.like(out), launch)
    pdl = has_pdl(bq.device)
    combine = Launch(
        combine_kernel,
        batch * -(-tokens * heads // COMBINE_ROWS),
        takes=("partial", "statistics", "lengths", "out"),
        num_warps=2,
        pdl=pdl,
        sizes=Sizes(tokens, keys, spans, lengths_stride),
        out_strides=FeatureStrides(*strides_of(out)),
        scale_v=call.scale_v,
        H=heads, E=values, BLOCK_R=COMBINE_ROWS, BLOCK_E=tile_width(values), AHEAD=COMBINE_AHEAD,
        CHUNKS=ChunkLengths(*chunks[:3]), WIDTH=chunks.widths[levels],
        NODE=chunks.widths[-1] // chunks.widths[levels], PAIRS=on_hopper, PDL=pdl,
    )  # fmt: skip
    shapes = (batch, spans, tokens * heads, values), (batch, spans, 2, tokens * heads)
    partial, statistics = (Dense.rows(shape, torch.float32) for shape in shapes)
    return _Decode(Dense.like(out), launch, combine, (partial, statistics))


def _plan_launch(
    factors: Operands,
    out: Tensor,
    lengths_stride: int,
    spans: int,
    levels: int,
    scales: tuple[float, float, float],
    tile: RowTile,
) -> Launch:
    """The launch of the kernel for every GPU; see `hopper.plan`."""
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, rank_q, features = bq.shape
    keys, heads, rank_k = ak.shape[1:]
    rank_v, values = bv.shape[2:]
    block_rk, block_rv = triton.next_power_of_2(rank_k), triton.next_power_of_2(rank_v)
    block_m = tile.factor_rows // max(block_rk, block_rv)
    block_rv = max(block_rv, 16 // block_m)  # a matrix product adds up 16 factor rows at least
    q, a, b = feature_factors(bq), head_factors(ak, av), feature_factors(bk, bv)
    return Launch(
        decode_kernel,
        batch * tile.blocks(heads, tokens) * spans,
        takes=("ak", "av", "bk", "bv", "aq", "bq", "lengths", "out", "partial", "statistics"),
        num_warps=tile.warps,
        num_stages=tile.stages,
        sizes=Sizes(tokens, keys, spans, lengths_stride),
        strides=Strides(
            aq=HeadStrides(*strides_of(aq)),
            bq=FeatureStrides(*q.strides[0]),
            ak=HeadStrides(*a.strides[0]),
            bk=FeatureStrides(*b.strides[0]),
            av=HeadStrides(*a.strides[1]),
            bv=FeatureStrides(*b.strides[1]),
            out=FeatureStrides(*strides_of(out)),
        ),
        scales=Scales(*scales),
        H=heads,
        Q=Features(rank_q, features, tile_width(features), q.vector, q.flag),
        K=Features(rank_k, features, tile_width(features), b.vector, b.flag),
        V=Features(rank_v, values, tile_width(values), b.vector, b.flag),
        A=Heads(a.vector, a.flag),
        TILE=Tile(tile.queries, tile.heads, block_m, 16, block_rk, block_rv),
        CHUNKS=ChunkLengths(*CHUNKS[:3]),
        LEVELS=levels,
        WHOLE=spans == 1,
    )
