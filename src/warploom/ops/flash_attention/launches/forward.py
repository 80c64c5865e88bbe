"""The forward of flash attention: what a call allocates and launches. No validation, no autograd.

That is its plan, which depends on shapes, strides, dtypes and options alone. Plans are kept by the caller
(`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.flash_attention.kernels.forward import PARTS_AHEAD, Packing, combine_kernel, forward_kernel
from warploom.ops.flash_attention.launches import decode, hopper, packed, tiling
from warploom.ops.flash_attention.launches.tiling import (
    COUNTERS,
    TERMS,
    Call,
    Terms,
    layout_for,
    precision_of,
)
from warploom.ops.flash_attention.problem import LOG2_E, PLAIN, Logits, Mask
from warploom.runtime.launch import Dense, Launch, are_aligned, has_pdl
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


class Plan(NamedTuple):
    """Plan of a forward."""

    out: Dense
    lse: Dense
    statistics: Dense
    launch: Launch | None  # None where there is nothing to attend with or to
    combine: Launch | None = None  # of the parts, where KV loops are split
    parts: tuple[Dense, ...] = ()  # of the output, all in one, and of the statistics
    counted: bool = False  # whether tiles are counted, with counters that must be zero
    terms: Terms | None = None  # of q, k and v, where they are made before the loops
    few: bool = False  # whether there are few queries, and the kernel for these
    spread: packed.Spread | None = None  # of packed sequences, where the launch is for Hopper


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    precision: str | None,
    plans: Plans,
    counters: Tensor | None = None,
    logits: Logits = PLAIN,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    ``plans`` are those of earlier calls that were the same in all but addresses, what ``cu_seqlens`` hold, and
    precision. ``counters``: `COUNTERS` that are zero, if there are any already. ``out``: where attention shall be
    written, with any strides.

    Returns:
        Attention (B, N, Hq, E); lse (B, Hq, N) in float32; and what the backward computes the weights again from,
        (2, B, Hq, N) in float32.
    """
    precision = precision_of(q, precision)
    aligned = are_aligned(q, k, v) if out is None else are_aligned(q, k, v, out)
    key = (precision, aligned, None if out is None else out.stride())
    plan = plans.get(key, plan_forward, q, k, v, mask, scale, precision, aligned, logits, out)
    if out is None:
        out = plan.out.empty(q)
    if plan.spread is not None:
        mask = plan.spread.packed_mask(plan.spread.places(mask, q))
    return _run(plan, q, k, v, mask, logits.sink, counters, out)


def _run(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sink: Tensor | None, counters: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `forward` returns."""
    lse, statistics = plan.lse.empty(q), plan.statistics.empty(q)
    if plan.launch is None and sink is not None:
        lse.copy_(sink[:, None])
        statistics[0], statistics[1] = lse * LOG2_E, 1.0
        if mask.cu_seqlens_q is not None:
            tail = torch.arange(q.shape[1], device=q.device) >= mask.cu_seqlens_q[-1]
            lse.masked_fill_(tail, -torch.inf)
            statistics[1].masked_fill_(tail, 0.0)
        return out.zero_(), lse, statistics
    if plan.launch is None:
        return out.zero_(), lse.fill_(-torch.inf), statistics.zero_()
    target, target_statistics = out, statistics
    if plan.combine is not None:
        target, target_statistics = (part.empty(q) for part in plan.parts)
    if plan.terms:
        q, k, v = plan.terms(q, k, v, None, into=plan.terms.empty(q))
    own_sink = sink if plan.combine is None else None  # otherwise it is added where parts are merged
    if plan.launch.descriptions:  # a kernel for Hopper: no other takes descriptors
        if counters is None:
            counters = COUNTERS.empty(q)
            if plan.counted:
                counters.zero_()
        of_packed = (mask.units_q, mask.shifts, None if mask.shifts is None else out)
        plan.launch(q, k, v, target, lse, target_statistics, counters, mask.seqused_k, *of_packed, own_sink)
    else:
        written = lse if plan.combine is None else None
        bounds = () if plan.few else (mask.cu_seqlens_q, mask.cu_seqlens_k)
        last = (*bounds, mask.seqused_k, mask.block_table)
        plan.launch(q, k, v, target, written, target_statistics, own_sink, *last)
    if plan.combine is not None:
        of_sink = () if plan.few else (None if sink is None else mask.cu_seqlens_q,)
        plan.combine(target, target_statistics, out, lse, statistics, sink, *of_sink)
    return out, lse, statistics


def _is_decoding(call: Call, logits: Logits) -> bool:
    """Whether a call has options, and so few queries that the kernels for every GPU are faster."""
    options = (logits.softcap, logits.sink, call.mask.left, call.mask.seqused_k)
    return call.shape.tokens * call.shape.group <= hopper.FEW and any(x is not None for x in options)


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    precision: str,
    aligned: bool,
    logits: Logits = PLAIN,
    out: Tensor | None = None,
) -> Plan:
    """Plan of `forward`."""
    call = Call.of(q, k, v, mask, scale, logits.softcap)
    shape = call.shape
    out = layout_of(q, shape.value_dim) if out is None else out
    lse = (shape.batch_size, shape.heads, shape.tokens)
    plan = Plan(Dense.like(out), Dense.rows(lse, torch.float32), Dense.rows((2, *lse), torch.float32), None)
    if shape.empty() or 0 in k.shape:
        return plan
    pages = 0 if mask.block_table is None else k.shape[0]
    pdl = has_pdl(q.device)
    few = decode.plan(call, precision, (q, k, v, out), pdl) if decode.suits(call) else None
    tiled, spread = None, None
    large = few is None and not tiling.is_small_for("forward", call) and not _is_decoding(call, logits)
    if large and aligned:
        of_hopper = call
        if packed.suits("forward", call, q, k, v, out):
            spread = packed.plan(call)
            of_hopper = call._replace(mask=spread.packed_mask(spread.nowhere))
        tiled = hopper.plan("forward", of_hopper, (q, k, v, out))
    if few is not None:
        plan = plan._replace(launch=few.launch, few=True)
        splits = few.parts
    elif tiled is not None:
        plan = plan._replace(launch=tiled.launch, counted=tiled.counted, spread=spread)
        splits = tiled.splits
    else:
        product = tiling.product_of("forward", call, precision)
        factors: tuple[Tensor, ...] = (q, k, v)
        if product in TERMS:
            terms = tiling.plan_terms(product, shape, q, k, v, None, False)
            plan, factors = plan._replace(terms=terms), terms.like
        layout = layout_for(*factors, out)
        grid = tiling.grid_of("forward", call, product, out.numel(), aligned and layout.vec > 1)
        splits = grid.splits
        launch = Launch(
            forward_kernel,
            grid.programs,
            takes=(
                *("q", "k", "v", "out", "lse", "statistics", "sink"),
                *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
            ),
            out_split=out.numel() // layout.vec if splits > 1 else 0,  # from one part to the next
            SHORT=grid.short,
            PDL=pdl,
            **tiling.arguments_of(call, grid, layout, product, shape.group, pages),
            **layout.of("q", "k", "v", "out"),
        )
        plan = plan._replace(launch=launch)
    if splits == 1:
        return plan
    sizes = ((splits * out.numel(),), (splits, 2, *lse))
    plan = plan._replace(parts=tuple(Dense.rows(size, torch.float32) for size in sizes))
    if few is not None:
        return plan._replace(combine=few.combine)
    block_r = max(1024 // shape.block_e, 1)
    rows = shape.batch_size * shape.heads * shape.tokens
    layout = layout_for(out)
    cu_q = None if logits.sink is None else mask.cu_seqlens_q
    packing = None if cu_q is None else Packing(cu_q.shape[0] - 1, cu_q.stride(0))
    combine = Launch(
        combine_kernel,
        -(-rows // block_r),
        takes=("part", "part_statistics", "out", "lse", "statistics", "sink", "cu_seqlens_q"),
        pdl=pdl,
        rows=rows, tokens=shape.tokens, heads=shape.heads, splits=splits, out_split=out.numel() // layout.vec,
        packing=packing, VEC=layout.vec, UNIT=layout.unit, E=shape.value_dim,
        BLOCK_R=block_r, BLOCK_E=shape.block_e, AHEAD=PARTS_AHEAD.value, PDL=pdl,
        **layout.of("out"),
    )  # fmt: skip
    return plan._replace(combine=combine)
