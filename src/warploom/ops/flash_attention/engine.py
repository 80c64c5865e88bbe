"""Flash attention on tensors that are checked: forward and backward, and what a call allocates and launches.

This is what other operators import. There is no validation here, and no autograd. What a call allocates and
launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans are kept by the caller
(`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.hopper import launch as hopper
from warploom.ops.flash_attention.hopper import launch_varlen as packed
from warploom.ops.flash_attention.problem import LOG2_E, PLAIN, Call, Logits, Mask, Shape
from warploom.ops.flash_attention.triton import launch as tiling
from warploom.ops.flash_attention.triton import launch_decode as decode
from warploom.ops.flash_attention.triton import launch_small as small
from warploom.ops.flash_attention.triton.backward import (
    key_kernel,
    prepare_kernel,
    query_kernel,
    round_kernel,
    sink_kernel,
    sum_kernel,
)
from warploom.ops.flash_attention.triton.forward import Packing, combine_kernel, forward_kernel
from warploom.ops.flash_attention.triton.launch import TERMS, Terms, precision_of
from warploom.ops.flash_attention.triton.tiles import PARTS_AHEAD
from warploom.runtime.launch import Dense, Launch, are_aligned, has_pdl
from warploom.runtime.layout import layout_for
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

COUNTERS = Dense.rows((2,), torch.int32)
"""By these programs take tiles on Hopper: one for each kernel of the backward, the first for the forward."""


class ForwardPlan(NamedTuple):
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
    plan: ForwardPlan, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sink: Tensor | None, counters: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns what `forward` returns."""
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
) -> ForwardPlan:
    """Plan of `forward`."""
    call = Call.of(q, k, v, mask, scale, logits.softcap)
    shape = call.shape
    out = layout_of(q, shape.value_dim) if out is None else out
    lse = (shape.batch_size, shape.heads, shape.tokens)
    plan = ForwardPlan(Dense.like(out), Dense.rows(lse, torch.float32), Dense.rows((2, *lse), torch.float32), None)
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
        layout = layout_for(Strides, *factors, out)
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
    layout = layout_for(Strides, out)
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


INPUTS = ("q", "k", "v", "grad")
RESULTS = {"key": ("dk", "dv"), "query": ("dq",), "backward": ("dk", "dv")}
"""What a backward kernel writes. What ``backward`` adds up is rounded to dq afterwards."""


class KernelPlan(NamedTuple):
    """Plan of a backward kernel."""

    kernel: str  # of `RESULTS`
    launch: Launch
    splits: int
    parts: tuple[Dense, ...] = ()  # of each result, all in one, where loops are split


class Together(NamedTuple):
    """What a kernel that forms all gradients needs besides."""

    added: Dense  # the gradient of queries, added up in device memory without the scale
    tiles_added: Dense  # of keys, at each tile of queries
    rounds: Launch  # it to dq


class Packed(NamedTuple):
    """Plan of the kernels of a backward on spread rows."""

    spread: packed.Spread
    inputs: tuple[packed.Copy, ...]  # q, k, v and the gradient
    rows: tuple[packed.Copy, ...]  # lse and δ
    results: tuple[packed.Copy, ...]  # dq, dk, dv
    plan: BackwardPlan


class Room(NamedTuple):
    """What the kernels of a backward write besides its results, allocated before the first is launched.

    With PyTorch's deterministic algorithms memory is filled as it is allocated, by a launch. A kernel that does not
    wait for the launch before it must not follow such a one: its numbers may arrive first, and be filled over.
    """

    terms: tuple[Tensor | None, ...]
    parts: tuple[tuple[Tensor, ...], ...]  # of each kernel
    added: Tensor | None

    @classmethod
    def of(cls, plan: BackwardPlan, near: Tensor) -> Room:
        """What a plan asks for."""
        return cls(
            () if plan.terms is None else plan.terms.empty(near),
            tuple(tuple(part.empty(near) for part in each.parts) for each in plan.kernels),
            None if plan.together is None else plan.together.added.empty(near),
        )


class BackwardPlan(NamedTuple):
    """Plan of a backward."""

    results: tuple[Dense, Dense, Dense]  # dq, dk, dv
    rows: Dense  # a number for each query and head
    prepare: Launch | None = None  # None where there is nothing to attend with or to
    kernels: tuple[KernelPlan, ...] = ()
    small: Launch | None = None  # of the kernel for small problems, instead of those
    terms: Terms | None = None  # of q, k, v and the gradient, where they are made before the loops
    counted: bool = False  # whether tiles are counted, with counters that the first kernel makes zero
    together: Together | None = None  # where one kernel forms all gradients
    sums: Launch | None = None  # of the parts, where loops are split
    sink: Launch | None = None  # of its gradient
    apart: bool = False  # whether gradients are made apart and copied to where they shall be
    packed: Packed | None = None  # where rows of packed sequences are spread


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    mask: Mask,
    scale: float,
    precision: str | None,
    plans: Plans,
    results: tuple[Tensor, Tensor, Tensor] | None = None,
    logits: Logits = PLAIN,
    together: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the backward kernels: gradients of ``q``, ``k`` and ``v``, each in the memory order of its tensor.

    The last gradient is that of the sink, if there is one.

    ``grad`` (B, N, Hq, E) and ``grad_lse`` (B, Hq, N), which may be None for zero, have any strides; ``out`` and
    ``statistics`` are what `forward` returned for the other arguments. ``plans``: those that `forward` took.
    ``results``: where the gradients shall be written, with any strides. ``together``: whether one kernel forms all
    gradients, where there is one that can; by default whichever is faster. They add up dq in different orders.
    """
    precision = precision_of(q, precision)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    aligned = are_aligned(q, k, v, grad, *(results or ()))
    key = (
        precision, aligned, grad.dtype, grad.stride(),
        None if grad_lse is None else (grad_lse.dtype, grad_lse.stride()),
        q.stride(), k.stride(), v.stride(), out.stride(),
        None if results is None else (results[0].stride(), results[1].stride(), results[2].stride()), together,
    )  # fmt: skip
    rest = (mask, scale, precision, aligned, results, logits, together)
    plan = plans.get(key, plan_backward, grad, grad_lse, q, k, v, out, *rest)
    if results is None or plan.apart:
        dq, dk, dv = (result.empty(q) for result in plan.results)
    else:
        dq, dk, dv = results
    sink = logits.sink
    if plan.prepare is None:
        dsink = None
        if sink is not None:  # where there are no keys, lse is the sink
            dsink = torch.zeros_like(sink)
            if grad_lse is not None:
                dsink = grad_lse.masked_fill(statistics[1] == 0, 0.0).sum((0, 2)).to(sink.dtype)
        return dq.zero_(), dk.zero_(), dv.zero_(), dsink
    delta = launch_backward(plan, grad, grad_lse, q, k, v, out, statistics, mask, (dq, dk, dv))
    if results is not None and plan.apart:
        for result, gradient in zip(results, (dq, dk, dv)):
            result.copy_(gradient)
        dq, dk, dv = results
    if plan.sink is None or sink is None:
        return dq, dk, dv, None
    dsink = torch.empty_like(sink)
    plan.sink(sink, statistics, delta, dsink)
    return dq, dk, dv, dsink


def launch_backward(
    plan: BackwardPlan,
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    mask: Mask,
    results: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Launch a planned backward on tensors that begin where those of the plan would; returns δ.

    Strides are the plan's: a tensor may stand for its first heads.
    """
    # Two tensors, not two halves of one: the second half's alignment would depend on the length.
    lse, delta = plan.rows.empty(q), plan.rows.empty(q)
    inverse = plan.rows.empty(q) if q.dtype == torch.float32 else None
    counters = COUNTERS.empty(q) if plan.counted else None
    tiles_added = None if plan.together is None else plan.together.tiles_added.empty(q)
    room = Room.of(plan, q)
    prepare: Any = plan.prepare
    prepare(out, grad, statistics, grad_lse, lse, delta, inverse, counters, tiles_added)
    if plan.small is not None:
        plan.small(q, k, v, grad, lse, delta, *results)
    elif plan.packed is not None:
        _launch_packed(plan.packed, (q, k, v, grad), lse, delta, counters, mask, results)
    else:
        _launch_kernels(plan, room, q, k, v, grad, (lse, delta, inverse), counters, tiles_added, mask, results)
    return delta


def _launch_packed(
    plan: Packed, tensors: tuple[Tensor, ...], lse: Tensor, delta: Tensor, counters: Tensor | None, mask: Mask,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Launch the kernels of a backward on spread rows."""
    places = plan.spread.places(mask, lse)
    q, k, v, grad = (copy.spread_out(x, places) for copy, x in zip(plan.inputs, tensors))
    of_lse, of_delta = (copy.spread_out(x, places) for copy, x in zip(plan.rows, (lse, delta)))
    tiles_added = None
    if plan.plan.together is not None:
        tiles_added = plan.plan.together.tiles_added.empty(q).zero_()
    wide = tuple(result.empty(q) for result in plan.plan.results)
    rows, room = (of_lse, of_delta, None), Room.of(plan.plan, q)
    _launch_kernels(plan.plan, room, q, k, v, grad, rows, counters, tiles_added, plan.spread.mask(places), wide)
    for copy, spread, result in zip(plan.results, wide, results):
        copy.pack(spread, result, places)


def _launch_kernels(
    plan: BackwardPlan, room: Room, q: Tensor, k: Tensor, v: Tensor, grad: Tensor,
    rows: tuple[Tensor, Tensor, Tensor | None],
    counters: Tensor | None, tiles_added: Tensor | None, mask: Mask, results: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Launch the kernels of a backward; ``rows`` are lse, δ and the inverse. It allocates nothing: see `Room`."""
    dq, dk, dv = results
    lse, delta, inverse = rows
    unwritten = mask.seqused_k is not None and not plan.kernels[0].launch.descriptions
    if unwritten:  # what is behind the used keys
        dk.zero_(), dv.zero_()
    factors = (q, k, v, grad) if plan.terms is None else plan.terms(q, k, v, grad, into=room.terms)
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    parts: dict[str, Tensor] = {}
    # A kernel starts where the one before leaves multiprocessors idle; parts are added up when both are done.
    for each, own_parts in zip(plan.kernels, room.parts):
        targets = [gradients[name] for name in RESULTS[each.kernel]]
        if own_parts:
            targets = list(own_parts)
            if unwritten and each.kernel == "key":
                for target in targets:
                    target.zero_()
            parts |= zip(RESULTS[each.kernel], targets)
        if plan.together is not None:
            beside = (counters, tiles_added, mask.seqused_k, mask.units_k)
            each.launch(*factors, *targets, room.added, lse, delta, *beside)
            plan.together.rounds(room.added, tiles_added, dq)
        elif each.launch.descriptions:  # a kernel for Hopper: no other takes descriptors
            row_values = (lse, delta) if inverse is None else (lse, delta, inverse)
            units = mask.units_k if each.kernel == "key" else mask.units_q
            taken = zip(("seqused_k", "units"), (mask.seqused_k, units))
            used = [x for name, x in taken if name in each.launch.takes]
            each.launch(*factors, *targets, *row_values, counters, *used)
        else:
            last = (mask.cu_seqlens_q, mask.cu_seqlens_k, mask.seqused_k)
            each.launch(*factors, lse, delta, inverse, *targets, *last)
    if plan.sums is not None:
        plan.sums(*(x for name in gradients if name in parts for x in (parts[name], gradients[name])))


def plan_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mask: Mask,
    scale: float,
    precision: str,
    aligned: bool,
    results: tuple[Tensor, Tensor, Tensor] | None,
    logits: Logits = PLAIN,
    together: bool | None = None,
) -> BackwardPlan:
    """Plan of `backward`."""
    call = Call.of(q, k, v, mask, scale, logits.softcap)
    shape = call.shape
    dq, dk, dv = results or (layout_of(t, t.shape[-1]) for t in (q, k, v))
    row_values = Dense.rows((shape.batch_size, shape.heads, shape.tokens), torch.float32)
    plan = BackwardPlan((Dense.like(dq), Dense.like(dk), Dense.like(dv)), row_values)
    if shape.empty():
        return plan
    layout = layout_for(Strides, out, grad)
    # Rows at any address have an address for each element.
    block_r = min((4096 if layout.vec > 1 else 1024) // shape.block_e, 64)
    rows = shape.batch_size * shape.heads * shape.tokens
    pdl = has_pdl(q.device)
    product = tiling.product_of("backward", call, precision)
    lse_b, lse_h, lse_n = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    prepare = Launch(
        prepare_kernel,
        -(-rows // block_r),
        takes=("out", "grad", "statistics", "dlse", "lse", "delta", "inverse", "counters", "tiles_added"),
        rows=rows, tokens=shape.tokens, heads=shape.heads, dlse_b=lse_b, dlse_h=lse_h, dlse_n=lse_n,
        VEC=layout.vec, UNIT=layout.unit, E=shape.value_dim, BLOCK_R=block_r, BLOCK_E=shape.block_e,
        PRECISION=product, PDL=pdl, **layout.of("out", "grad"),
    )  # fmt: skip
    if logits.sink is not None:
        plan = plan._replace(sink=_plan_sink(shape))
    if call.softcap is None and small.suits_backward(shape, mask, scale, q, k, v, grad, dq, dk, dv):
        launch = small.plan_backward(shape, mask, scale, q, k, v, grad, dq, dk, dv)
        return plan._replace(prepare=prepare, small=launch)
    if aligned and packed.suits("backward", call, q, k, v, grad, dq, dk, dv):
        over = _plan_packed(call, grad, q, k, v, (dq, dk, dv), logits, together)
        if over is not None:
            return plan._replace(prepare=prepare, packed=over, counted=True)
    if product in TERMS:
        plan = plan._replace(terms=tiling.plan_terms(product, shape, q, k, v, grad, pdl))
    factors = (q, k, v, grad) if plan.terms is None else plan.terms.like
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    of_all = _plan_together(call, product, aligned, factors, (dk, dv), together)
    if of_all is not None:
        added = Dense.rows((shape.batch_size, shape.heads, shape.tokens, shape.head_dim), torch.float32)
        tiles_added = Dense.rows((2, shape.batch_size, shape.heads, shape.tokens), torch.int32)
        kernels: tuple[KernelPlan, ...] = (of_all,)
        plan = plan._replace(together=Together(added, tiles_added, _plan_rounds(call, dq, pdl)))
    else:
        kernels = tuple(
            _plan_kernel(each, call, product, aligned, factors, {name: gradients[name] for name in RESULTS[each]})
            for each in ("key", "query")
        )
    sums = _plan_sums(kernels, gradients, pdl)
    if sums is not None and results is not None:  # parts are without gaps, and so is what they are added up in
        plan = plan_backward(grad, grad_lse, q, k, v, out, mask, scale, precision, aligned, None, logits, together)
        return plan._replace(apart=True)
    counted = any(each.launch.descriptions for each in kernels)  # those for Hopper
    return plan._replace(prepare=prepare, kernels=kernels, counted=counted, sums=sums)


def _plan_packed(
    call: Call,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, ...],
    logits: Logits,
    together: bool | None,
) -> Packed | None:
    """Plan of the kernels on spread rows, where those for Hopper take these."""
    spread = packed.plan(call)
    if not hopper.suit("key", spread.call.shape, spread.call.mask, call.scale, q, k, v, grad):
        return None
    given = zip((q, k, v, grad), (False, True, True, False))
    inputs = tuple(packed.plan_copy(x, spread, keys=keys) for x, keys in given)
    of_q, of_k, of_v, of_grad = (copy.spread.empty(q) for copy in inputs)
    rest = (spread.call.mask, call.scale, "highest", True, None, Logits(logits.softcap), together)
    plan = plan_backward(of_grad, None, of_q, of_k, of_v, of_grad, *rest)
    if not (plan.kernels and all(each.launch.descriptions for each in plan.kernels)):
        return None
    row = packed.of_rows(call.shape.heads, call.shape.tokens)
    rows = tuple(packed.plan_copy(row, spread, keys=False, fill=fill) for fill in (float("inf"), 0.0))
    outs = tuple(
        packed.plan_copy(x, spread, keys=keys, back_from=wide)
        for x, keys, wide in zip(results, (False, True, True), plan.results)
    )
    return Packed(spread, inputs, rows, outs, plan)


def _tiled(
    kernel: str, call: Call, product: str, aligned: bool, factors: tuple[Tensor, ...], results: dict[str, Tensor]
) -> hopper.Plan | None:
    """The launch of the kernel for Hopper, if there is one and it takes the call."""
    if product in TERMS:
        return hopper.plan_terms(kernel, call, factors, TERMS[product], results)
    if not aligned:
        return None
    return hopper.plan(kernel, call, (*factors, *results.values()))


def _plan_together(
    call: Call,
    product: str,
    aligned: bool,
    factors: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    together: bool | None,
) -> KernelPlan | None:
    """Plan of the kernel that forms all gradients, where it is the fastest or asked for."""
    if product in TERMS or not aligned:
        return None
    shape = call.shape
    added = torch.empty((shape.batch_size, shape.heads, shape.tokens, shape.head_dim), device="meta")
    tiled = hopper.plan_together(call, (*factors, *results), added, together)
    if tiled is None:
        return None
    return KernelPlan("backward", tiled.launch, tiled.splits)


def _plan_rounds(call: Call, dq: Tensor, pdl: bool) -> Launch:
    """What rounds the gradient of queries that was added up in device memory."""
    shape = call.shape
    layout = layout_for(Strides, dq)
    block_r = min(4096 // shape.block_d, 64)
    rows = shape.batch_size * shape.heads * shape.tokens
    return Launch(
        round_kernel,
        -(-rows // block_r),
        takes=("added", "tiles_added", "dq"),
        pdl=pdl,
        rows=rows, tokens=shape.tokens, heads=shape.heads, scale=call.scale,
        VEC=layout.vec, UNIT=layout.unit, D=shape.head_dim, BLOCK_R=block_r, BLOCK_D=shape.block_d,
        BLOCK_M=hopper.queries_of_a_sum(shape), PDL=pdl, **layout.of("dq"),
    )  # fmt: skip


def _plan_sink(shape: Shape) -> Launch:
    """The gradient of sinks, of one head a program."""
    in_head = shape.batch_size * shape.tokens
    return Launch(
        sink_kernel,
        shape.heads,
        takes=("sink", "statistics", "delta", "dsink"),
        num_warps=8,
        rows=in_head * shape.heads, tokens=shape.tokens, heads=shape.heads, in_head=in_head,
        BLOCK=4096,
    )  # fmt: skip


def _plan_kernel(
    kernel: str, call: Call, product: str, aligned: bool, factors: tuple[Tensor, ...], results: dict[str, Tensor]
) -> KernelPlan:
    """Plan of one of the backward kernels. Tensors may be without memory, and on no GPU."""
    sizes = [x.numel() for x in results.values()]
    tiled = _tiled(kernel, call, product, aligned, factors, results)
    if tiled is not None:
        return KernelPlan(kernel, tiled.launch, tiled.splits, _parts(sizes, tiled.splits))
    layout = layout_for(Strides, *factors, *results.values())
    grid = tiling.grid_of(kernel, call, product, sum(sizes), aligned and layout.vec > 1)
    pdl = has_pdl(call.device)
    split: dict[str, Any] = {
        f"{name}_split": x.numel() // layout.vec if grid.splits > 1 else 0 for name, x in results.items()
    }
    launch = Launch(
        key_kernel if kernel == "key" else query_kernel,
        grid.programs,
        takes=(*INPUTS, "lse", "delta", "inverse", *results, "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
        pdl=pdl,
        grad_scale=call.scale,
        SHORT=grid.short,
        PDL=pdl,
        **split,
        **tiling.arguments_of(call, grid, layout, product, 1 if kernel == "key" else call.shape.group),
        **layout.of(*INPUTS, *results),
    )
    return KernelPlan(kernel, launch, grid.splits, _parts(sizes, grid.splits))


def _parts(sizes: list[int], splits: int) -> tuple[Dense, ...]:
    """The parts of results of so many elements, all of each in one; none where loops are whole."""
    return tuple(Dense.rows((splits * size,), torch.float32) for size in sizes) if splits > 1 else ()


def _plan_sums(kernels: Sequence[KernelPlan], gradients: dict[str, Tensor], pdl: bool) -> Launch | None:
    """What sums the parts of gradients, if any of them is in parts."""
    splits = dict.fromkeys(gradients, 1) | {name: each.splits for each in kernels for name in RESULTS[each.kernel]}
    if max(splits.values()) == 1:
        return None
    programs = sum(-(-x.numel() // 1024) for name, x in gradients.items() if splits[name] > 1)
    arguments: dict[str, Any] = {}
    takes: list[str] = []
    for name, x in gradients.items():
        arguments |= {f"{name}_size": x.numel(), f"{name}_splits": splits[name]}
        if splits[name] > 1:
            takes += [f"{name}_parts", name]
        else:
            arguments |= {f"{name}_parts": None, name: None}
    return Launch(sum_kernel, programs, takes=takes, pdl=pdl, BLOCK=1024, PDL=pdl, **arguments)
