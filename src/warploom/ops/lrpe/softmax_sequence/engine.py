"""Launchers of LRPE with softmax over the sequence: how sequences are cut, and how many programs share the work."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from warploom.ops.lrpe.call import LrpeCall, LrpeInputs, LrpeOptions
from warploom.ops.lrpe.configs import MOST_PARTS, MOST_STEPS, SHORT_TOKENS, LrpeTile, sequence_tile
from warploom.ops.lrpe.engine import Geometry, ThetaSums, inverse_of, row_arguments
from warploom.ops.lrpe.softmax_sequence.hopper.launch import plan_slabs, takes_call
from warploom.ops.lrpe.softmax_sequence.triton.rounds import sequence_backward_kernel, sequence_forward_kernel
from warploom.ops.lrpe.softmax_sequence.triton.tiles import SequenceConfig, SequenceSizes
from warploom.runtime.launch import INTERPRETED, Buffer, Launch, are_aligned, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

_REGISTERS = 65_536  # of a multiprocessor of any GPU


class SequencePlan(NamedTuple):
    """Plan of a call: what it allocates and launches."""

    result: Buffer
    statistics: Buffer
    launch: Launch
    partial: Buffer | None  # partial sums that programs publish, unless a part has all tokens
    arrived: Buffer | None  # zeros: counts of a slab's parts, or on Hopper what programs publish
    theta_sums: ThetaSums | None = None  # where theta's gradient is asked for

    def allocate_shared(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns memory for what programs publish: partial sums, and what is zero before."""
        partial = None if self.partial is None else self.partial.empty(x)
        if self.arrived is None:
            return partial, None
        return partial, torch.zeros(self.arrived.shape, dtype=self.arrived.dtype, device=x.device)


def forward(inputs: LrpeInputs, offset: int, options: LrpeOptions, plans: Plans) -> tuple[Tensor, Tensor]:
    """Returns the output, and the columns' statistics (groups, H, 2, D) in float32, which the backward takes.

    ``plans`` as in `lrpe.engine.forward`.
    """
    x = inputs.x
    if x.numel() == 0:
        out = empty_in_order_of(x, (2 if options.kind == "cosine" else 1) * x.shape[-1])
        return out, x.new_zeros(LrpeCall(inputs, options).statistics_shape, dtype=torch.float32)
    plan = plans.get(("forward", options.theta_gradient, are_aligned(x)), plan_sequence, None, inputs, options)
    out, statistics = plan.result.empty(x), plan.statistics.empty(x)
    if inputs.cu_seqlens is not None:
        statistics.zero_()  # some sequences may be empty, and no program writes theirs
    plan.launch(*inputs, out, statistics, *plan.allocate_shared(x), offset)
    return out, statistics


def backward(
    grad: Tensor, inputs: LrpeInputs, offset: int, options: LrpeOptions, statistics: Tensor | None,
    theta_gradient: bool, plans: Plans,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of ``x``, and of ``theta`` when asked for, with the statistics of `forward`."""
    x, theta = inputs.x, inputs.theta
    if x.numel() == 0:
        dx = empty_in_order_of(x, x.shape[-1])
        return dx, torch.zeros_like(theta) if theta_gradient else None
    # Strides: see `lrpe.engine.backward`.
    key = (grad.dtype, grad.stride(), x.stride(), theta.stride(), theta_gradient, are_aligned(x, grad))
    plan = plans.get(key, plan_sequence, grad, inputs, options._replace(theta_gradient=theta_gradient))
    dx = plan.result.empty(x)
    sums = plan.theta_sums
    dtheta = None if sums is None else sums.empty(x)
    plan.launch(*inputs, grad, dx, statistics, *plan.allocate_shared(x), dtheta, offset)
    return dx, None if sums is None or dtheta is None else sums.reduce(dtheta, theta)


def plan_sequence(grad: Tensor | None, inputs: LrpeInputs, options: LrpeOptions) -> SequencePlan:
    """Plans `forward`, or with a gradient `backward`."""
    call, x, kind, backward = LrpeCall(inputs, options), inputs.x, options.kind, grad is not None
    # Here S runs over the batch even where all heads share their angles: softmax is by head.
    geometry = Geometry.of(call, LrpeTile(1, 1))._replace(over_heads=False)
    batch, tokens, heads = geometry.batch, geometry.tokens, geometry.heads
    result = layout_of(x, 2 * call.angles if kind == "cosine" and not backward else x.shape[-1])
    tensors = {"x": x, "out": result} if grad is None else {"x": x, "dx": result, "grad": grad}
    spec, arguments = row_arguments(call, geometry, **tensors)
    result_buffer, statistics = Buffer.like(result), Buffer.rows(call.statistics_shape, torch.float32)
    slabs_plan = plan_slabs(call, grad, spec, arguments, inverse_of) if takes_call(call, grad) else None
    if slabs_plan is not None:
        return SequencePlan(result_buffer, statistics, slabs_plan[0], None, slabs_plan[1])
    exact = x.dtype == torch.float32
    packed = inputs.cu_seqlens is not None
    short = tokens <= SHORT_TOKENS
    tile = sequence_tile(short and not packed, backward, exact or spec.VEC == 1, options.theta_gradient, kind)
    width = min(tile.width, geometry.block_f)
    slabs = -(-call.angles // width)
    rows = max(1, tile.numbers // (width * call.members))
    part_tokens = tokens if short else max(tile.tokens, triton.cdiv(tokens, MOST_PARTS))
    part_tokens = triton.cdiv(part_tokens, rows) * rows
    parts = triton.cdiv(tokens, part_tokens)
    tiles = batch * heads * parts * slabs
    programs, lag = tiles, 0
    if parts > 1:
        # All of them run at once: none takes more than its share of registers, or of the smallest shared memory.
        programs = 1 if INTERPRETED else min(tiles, tile.programs * multiprocessors(x.device))
        lag = triton.cdiv(parts * slabs, programs)
    # Rows of a block are a constant angle from those of the one before.
    stepped = not exact and call.axes == 1 and inputs.position_ids is None and not options.prefix
    stepped = stepped and part_tokens <= MOST_STEPS * rows
    slots = parts + (call.statistics_shape[0] if packed else 0)
    takes = ("grad", "dx", "statistics", "partial", "arrived", "dtheta", "offset")
    launch = Launch(
        sequence_backward_kernel if backward else sequence_forward_kernel,
        programs,
        takes=(*LrpeInputs._fields, *(takes if backward else ("out", *takes[2:5], "offset"))),
        num_warps=tile.warps,
        registers=_REGISTERS // (tile.programs * tile.warps * 32) // 8 * 8,
        cooperative=parts > 1,
        sizes=SequenceSizes(
            tokens, heads, inverse_of(heads), parts, inverse_of(parts), part_tokens, slots, tiles,
            triton.cdiv(tiles, programs), lag,
        ),
        config=SequenceConfig(
            spec, call.members, EXACT=2 * exact, EXACT_SUMS=2 if exact else int(options.theta_gradient),
            STEPPED=stepped, R=rows, W=width, STAGES=tile.stages,
        ),
        **arguments,
    )  # fmt: skip
    sums = None
    if options.theta_gradient and backward:
        sums = ThetaSums.of(batch * parts * heads // max(call.theta_rows, 1), inputs.theta, call.angles, call.axes)
    partial = (batch * heads * slabs * slots * (1 if backward else 2) * call.members * width,)
    return SequencePlan(
        result_buffer, statistics, launch,
        None if parts == 1 else Buffer.rows(partial, torch.float32),
        None if parts == 1 else Buffer.rows((batch * heads * slabs,), torch.int32), sums,
    )  # fmt: skip
