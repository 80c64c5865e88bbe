"""Launchers of LRPE with softmax over the sequence: how sequences are cut, and how many programs share the work."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from warploom.ops.lrpe.configs import MOST_PARTS, MOST_STEPS, SHORT_TOKENS, sequence_tile
from warploom.ops.lrpe.kernels.angles import Inverses, Spec
from warploom.ops.lrpe.launches import (
    ThetaSums,
    angle_numbers,
    geometry_of,
    inner_sizes,
    inverse_of,
    packed_strides,
    theta_sums,
)
from warploom.ops.lrpe.problem import Positions, statistics_shape
from warploom.ops.lrpe.softmax_sequence.kernels.rounds import sequence_backward_kernel, sequence_forward_kernel
from warploom.ops.lrpe.softmax_sequence.kernels.tiles import Sizes, Variant
from warploom.runtime.launch import INTERPRETED, Dense, Launch, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

_REGISTERS = 65_536  # of a multiprocessor of any GPU


class _Plan(NamedTuple):
    result: Dense
    statistics: Dense
    launch: Launch
    partial: Dense | None  # partial sums that programs publish, unless a part has all tokens
    slabs: int  # of all heads
    theta_sums: ThetaSums | None  # where theta's gradient is asked for

    def shared(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Memory for what programs publish: partial sums, and a count of parts for each slab."""
        if self.partial is None:
            return None, None
        return self.partial.empty(x), torch.zeros(self.slabs, dtype=torch.int32, device=x.device)


def forward(
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    theta_gradient: bool,
    plans: Plans,
    *,
    block_parallel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the columns' statistics (groups, H, 2, D) in float32, which the backward wants back.

    ``theta_gradient``: whether the backward may be asked for it. ``block_parallel``: cut short sequences too.
    ``plans`` as in `launches.forward`.
    """
    if x.numel() == 0:
        out = empty_in_order_of(x, (2 if kind == "cosine" else 1) * x.shape[-1])
        return out, x.new_zeros(statistics_shape(x, positions), dtype=torch.float32)
    key = ("forward", theta_gradient, block_parallel)
    plan = plans.get(key, _plan, None, x, theta, positions, kind, theta_gradient, block_parallel)
    out, statistics = plan.result.empty(x), plan.statistics.empty(x)
    ids, offsets, cu_seqlens = positions.ids, positions.offsets, positions.cu_seqlens
    if cu_seqlens is not None:
        statistics.zero_()  # some sequences may be empty, and no program writes theirs
    plan.launch(x, out, statistics, *plan.shared(x), theta, ids, offsets, cu_seqlens, positions.offset)
    return out, statistics


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    statistics: torch.Tensor | None,
    theta_gradient: bool,
    plans: Plans,
    *,
    block_parallel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``x``, and of ``theta`` when asked for, with the statistics that `forward` returned."""
    if x.numel() == 0:
        dx = empty_in_order_of(x, x.shape[-1])
        return dx, torch.zeros_like(theta) if theta_gradient else None
    # Strides: see `launches.backward`.
    key = (grad.dtype, grad.stride(), x.stride(), theta.stride(), theta_gradient, block_parallel)
    plan = plans.get(key, _plan, grad, x, theta, positions, kind, theta_gradient, block_parallel)
    dx = plan.result.empty(x)
    sums = plan.theta_sums
    dtheta = None if sums is None else sums.empty(x)
    ids, offsets, cu_seqlens = positions.ids, positions.offsets, positions.cu_seqlens
    plan.launch(x, grad, dx, statistics, *plan.shared(x), dtheta, theta, ids, offsets, cu_seqlens, positions.offset)
    return dx, None if sums is None or dtheta is None else sums.reduce(dtheta, theta)


def _plan(
    grad: torch.Tensor | None,
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    theta_gradient: bool,
    block_parallel: bool,
) -> _Plan:
    """Plan of `forward`, or with a gradient of `backward`."""
    backward = grad is not None
    # Here S runs over the batch even where all heads share their angles: softmax is by head.
    geometry = geometry_of(x, theta, positions, kind, (1, 1))._replace(over_heads=False)
    batch, tokens, heads, features = geometry.batch, geometry.tokens, geometry.heads, geometry.features
    result = layout_of(x, 2 * features if kind == "cosine" and not backward else x.shape[-1])
    tensors = {"x": x, "dx": result} if backward else {"x": x, "out": result}
    if grad is not None:
        tensors["grad"] = grad
    vec, unit, strides = packed_strides(geometry, *tensors.values())
    theta_vec, numbers = angle_numbers(theta, positions, geometry, None)
    exact = x.dtype == torch.float32
    packed = positions.cu_seqlens is not None
    short = tokens <= SHORT_TOKENS and not block_parallel
    tile = sequence_tile(short and not packed, backward, exact or vec == 1, theta_gradient, kind)
    width = min(tile.width, geometry.block_f)
    slabs = -(-features // width)
    members = 1 if kind == "cosine" else 2
    rows = max(1, tile.numbers // (width * members))
    part_tokens = tokens if short else max(tile.tokens, triton.cdiv(tokens, MOST_PARTS))
    part_tokens = triton.cdiv(part_tokens, rows) * rows
    parts = triton.cdiv(tokens, part_tokens)
    tiles = batch * heads * parts * slabs
    programs, lag = tiles, 0
    alone = parts == 1 and not block_parallel
    if not alone:
        # All of them run at once: none takes more than its share of registers, or of the smallest shared memory.
        programs = 1 if INTERPRETED else min(tiles, tile.programs * multiprocessors(x.device))
        lag = triton.cdiv(parts * slabs, programs)
    # Rows of a block are a constant angle from those of the one before.
    stepped = not exact and positions.axes() == 1 and positions.ids is None and not positions.prefix
    stepped = stepped and part_tokens <= MOST_STEPS * rows
    named_strides: dict[str, Any] = {f"{name}_strides": stride for name, stride in zip(tensors, strides)}
    statistics = statistics_shape(x, positions)
    groups = statistics[0]
    slots = parts + (groups if packed else 0)
    takes = ("statistics", "partial", "arrived", "theta", "ids", "offsets", "cu_seqlens", "offset")
    launch = Launch(
        sequence_backward_kernel if backward else sequence_forward_kernel,
        programs,
        takes=("x", "grad", "dx", *takes[:3], "dtheta", *takes[3:]) if backward else ("x", "out", *takes),
        num_warps=tile.warps,
        registers=_REGISTERS // (tile.programs * tile.warps * 32) // 8 * 8,
        cooperative=not alone,
        sizes=Sizes(
            tokens, heads, inverse_of(heads), parts, inverse_of(parts), part_tokens, slots, tiles,
            triton.cdiv(tiles, programs), lag,
        ),
        numbers=numbers,
        inverses=Inverses(*map(inverse_of, inner_sizes(positions))),
        variant=Variant(
            Spec(kind, positions.axes(), vec, theta_vec, unit, features, theta.shape[-1]), members, EXACT=2 * exact,
            EXACT_SUMS=2 if exact else int(theta_gradient), STEPPED=stepped, R=rows, W=width, STAGES=tile.stages,
        ),
        **named_strides,
    )  # fmt: skip
    sums = None
    if theta_gradient and backward:
        theta_rows = max(theta.shape[0], 1) if theta.dim() == 2 else 1
        sums = theta_sums(batch * parts * heads // theta_rows, theta, features, positions.axes())
    kinds = 1 if backward else 2
    partial = (batch * heads * slabs * slots * kinds * members * width,)
    return _Plan(
        Dense.like(result), Dense.rows(statistics, torch.float32), launch,
        None if alone else Dense.rows(partial, torch.float32), batch * heads * slabs, sums,
    )  # fmt: skip
