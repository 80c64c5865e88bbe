"""Launches of decoding: sizes, strides, tiles, strategy. No validation, no autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from warploom.ops.tpa.call import (
    DecodeInputs,
    DecodeOptions,
    Factors,
    feature_factors,
    head_factors,
    logit_unit,
    strides_of,
)
from warploom.ops.tpa.decode.chunks import ChunkTree
from warploom.ops.tpa.decode.configs import (
    JOIN,
    ONE_MULTIPROCESSOR,
    ONE_PROGRAM,
    SECOND_LAUNCH,
    START,
    RowTile,
    combine_tile,
    row_tile,
)
from warploom.ops.tpa.decode.hopper import launch as hopper
from warploom.ops.tpa.decode.triton.decode import (
    ChunkLengths,
    DecodeConfig,
    DecodeScales,
    DecodeSizes,
    DecodeStrides,
    DecodeTile,
    HeadLayout,
    combine_kernel,
    decode_kernel,
)
from warploom.ops.tpa.triton.factors import Features, FeatureStrides, HeadStrides
from warploom.runtime.launch import Buffer, Launch, are_aligned, has_pdl, multiprocessors
from warploom.runtime.layout import tile_width
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


CHUNKS = ChunkTree(shortest=128, longest=1024, wanted=32, widths=(1, 4))


def _microseconds(tiles: int, splits: int, entry_bytes: int, device: torch.device) -> float:
    """Returns the estimated time: of the multiprocessor that reads most, and of the second kernel after it."""
    programs = -(-tiles * splits // multiprocessors(device))
    split = entry_bytes / splits
    reading = max(programs * split / ONE_MULTIPROCESSOR, -(-programs // 2) * split / ONE_PROGRAM) + programs * START
    return reading + (SECOND_LAUNCH + splits * JOIN if splits > 1 else 0.0)


class DecodePlan(NamedTuple):
    """Plan of a call: what it allocates and launches."""

    out: Buffer
    launch: Launch
    combine: Launch | None = None  # where the cache is split
    parts: tuple[Buffer, Buffer] | None = None  # results and statistics of the parts


def decode(inputs: DecodeInputs, options: DecodeOptions, plans: Plans) -> Tensor:
    """Runs the decode kernel, and where the cache is split the second one.

    ``plans`` are those of calls that are the same in all but addresses and numbers in tensors.
    """
    bq, lengths = inputs.bq, inputs.seqused_k
    aligned = are_aligned(inputs.ak, inputs.av, inputs.bk, inputs.bv)
    plan = plans.get("decode", plan_decode, inputs, options)[aligned]
    out = plan.out.empty(bq)
    partial, statistics = (None, None) if plan.parts is None else (part.empty(bq) for part in plan.parts)
    plan.launch(out, partial, statistics, *inputs)
    if plan.combine is not None:
        plan.combine(partial, statistics, lengths, out)
    return out


def plan_decode(inputs: DecodeInputs, options: DecodeOptions) -> tuple[DecodePlan, DecodePlan]:
    """Plans a call for a cache at any address, and for one at multiples of 16 bytes."""
    everywhere = _plan_kernels(inputs, options, on_hopper=False)
    if options.strategy == "batch_head" or not hopper.suit(inputs.factors.with_rank_axis(), inputs.seqused_k):
        return everywhere, everywhere
    return everywhere, _plan_kernels(inputs, options, on_hopper=True)


def _plan_kernels(inputs: DecodeInputs, options: DecodeOptions, on_hopper: bool) -> DecodePlan:
    factors = inputs.factors.with_rank_axis()
    aq, ak, av, bq, bk, bv = factors
    batch, tokens, keys, heads, values = *bq.shape[:2], *ak.shape[1:3], bv.shape[3]
    out = layout_of(bq if aq is None else aq, values)
    scales = options.scale * options.scale_k * logit_unit(bq.dtype), options.scale_q, options.scale_v
    lengths_stride = 0 if inputs.seqused_k is None else inputs.seqused_k.stride(0)
    entry_bytes = keys * sum(math.prod(f.shape[2:]) * f.element_size() for f in (ak, av, bk, bv))
    tile = row_tile(factors, options.strategy)
    tiles = batch if on_hopper else batch * tile.blocks(heads, tokens)
    chunks, microseconds = CHUNKS, _microseconds
    if on_hopper:
        chunks, microseconds = hopper.CHUNKS, hopper.microseconds
    levels = chunks.levels(
        options.strategy, keys, lambda splits: microseconds(tiles, splits, entry_bytes, bq.device)
    )
    splits = chunks.splits(keys, levels)
    if on_hopper:
        launch = hopper.plan(factors, out, lengths_stride, splits, levels, scales)
    else:
        launch = _plan_launch(factors, out, lengths_stride, splits, levels, scales, tile)
    if splits == 1:
        return DecodePlan(Buffer.like(out), launch)
    pdl, width = has_pdl(bq.device), chunks.widths[levels]
    group = chunks.widths[-1] // width
    joint = combine_tile(splits, group)
    combine = Launch(
        combine_kernel,
        batch * -(-tokens * heads // joint.rows),
        takes=("partial", "statistics", "seqused_k", "out"),
        num_warps=joint.warps,
        pdl=pdl,
        sizes=DecodeSizes(tokens, keys, splits, lengths_stride),
        out_strides=FeatureStrides(*strides_of(out)),
        scale_v=options.scale_v,
        H=heads, E=values, BLOCK_R=joint.rows, BLOCK_E=tile_width(values), AHEAD=joint.ahead,
        CHUNKS=ChunkLengths(*chunks[:3]), WIDTH=width, GROUP=group, PAIRS=on_hopper, BESIDE=joint.beside, PDL=pdl,
    )  # fmt: skip
    shapes = (batch, splits, tokens * heads, values), (batch, splits, 2, tokens * heads)
    partial, statistics = (Buffer.rows(shape, torch.float32) for shape in shapes)
    return DecodePlan(Buffer.like(out), launch, combine, (partial, statistics))


def _plan_launch(
    factors: Factors,
    out: Tensor,
    lengths_stride: int,
    splits: int,
    levels: int,
    scales: tuple[float, float, float],
    tile: RowTile,
) -> Launch:
    """Returns the launch of the kernel for every GPU; see `hopper.plan`."""
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
        batch * tile.blocks(heads, tokens) * splits,
        takes=("out", "partial", "statistics", *DecodeInputs._fields),
        num_warps=tile.warps,
        num_stages=tile.stages,
        sizes=DecodeSizes(tokens, keys, splits, lengths_stride),
        strides=DecodeStrides(
            aq=HeadStrides(*strides_of(aq)),
            bq=FeatureStrides(*q.strides[0]),
            ak=HeadStrides(*a.strides[0]),
            bk=FeatureStrides(*b.strides[0]),
            av=HeadStrides(*a.strides[1]),
            bv=FeatureStrides(*b.strides[1]),
            out=FeatureStrides(*strides_of(out)),
        ),
        scales=DecodeScales(*scales),
        config=DecodeConfig(
            H=heads,
            Q=Features(rank_q, features, tile_width(features), q.vector, q.flag),
            K=Features(rank_k, features, tile_width(features), b.vector, b.flag),
            V=Features(rank_v, values, tile_width(values), b.vector, b.flag),
            A=HeadLayout(a.vector, a.flag),
            TILE=DecodeTile(tile.queries, tile.heads, block_m, 16, block_rk, block_rv),
            CHUNKS=ChunkLengths(*CHUNKS[:3]),
            LEVELS=levels,
            WHOLE=splits == 1,
        ),
    )
