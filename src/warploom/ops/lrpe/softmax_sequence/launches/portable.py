"""Launchers of LRPE with softmax over the sequence: which of the ways through the cache, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from warploom.ops.lrpe.configs import (
    BLOCK_P,
    CHUNKS,
    MAX_CHUNK_ROWS,
    STRIP_BYTES,
    sequence_tile,
    strip_tokens,
)
from warploom.ops.lrpe.kernels.angles import Spec
from warploom.ops.lrpe.launches import (
    Positions,
    ThetaSums,
    angle_numbers,
    geometry_of,
    packed_strides,
    theta_sums,
)
from warploom.ops.lrpe.softmax_sequence.kernels.portable import (
    Sizes,
    Tile,
    apply_kernel,
    combine_kernel,
    reduce_chunk_kernel,
    strip_kernel,
)
from warploom.runtime.launch import ALIGNMENT, INTERPRETED, Launch, architecture, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:  # Gluon is imported where it is used
    from warploom.ops.lrpe.softmax_sequence.launches import hopper


MOST_POSITION = 2**31 - 2**10
"""Positions to which kernels for Hopper count."""


def statistics_shape(x: torch.Tensor, positions: Positions) -> tuple[int, int, int, int]:
    """Of the columns' statistics: (groups, H, 2, D) with the features in the kernels' order."""
    groups = x.shape[0] if positions.cu_seqlens is None else positions.cu_seqlens.shape[0] - 1
    return groups, x.shape[2] if x.dim() == 4 else 1, 2, x.shape[-1]


class _Plan(NamedTuple):
    shape: tuple[int, ...]  # of the result
    stride: tuple[int, ...]
    statistics: tuple[int, int, int, int]  # their shape
    launches: tuple[Launch, ...] = ()  # of the strip kernel; or to reduce, combine and apply
    partial: int = 0  # float32 numbers of partial columns
    theta_sums: ThetaSums | None = None  # where theta's gradient is asked for
    tiled: hopper.Plan | None = None  # in the place of launches, on a Hopper GPU


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

    ``theta_gradient``: whether the backward may be asked for it. ``block_parallel``: reduce, combine and apply in
    three launches, whatever the sizes. ``plans`` as in `launches.forward`.
    """
    # A gradient of theta will be in float32, and is no better than the statistics that its backward rests on.
    exact = x.dtype == torch.float32 or theta_gradient
    aligned = not block_parallel and _are_in_reach(positions, x, theta)
    plan = plans.get(
        ("forward", exact, block_parallel, aligned),
        lambda: _Planner(None, x, theta, positions, kind, exact, block_parallel, False, aligned).plan(),
    )
    out = x.new_empty_strided(plan.shape, plan.stride)
    statistics = x.new_empty(plan.statistics, dtype=torch.float32)
    if x.numel():
        _run(plan, x, None, out, statistics, None, theta, positions, None)
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
    exact = x.dtype == torch.float32 or theta_gradient
    # Strides: see `launches.backward`.
    aligned = not block_parallel and _are_in_reach(positions, x, theta, grad)
    plan = plans.get(
        (grad.dtype, grad.stride(), x.stride(), theta.stride(), theta_gradient, block_parallel, aligned),
        lambda: _Planner(grad, x, theta, positions, kind, exact, block_parallel, theta_gradient, aligned).plan(),
    )
    dx = x.new_empty_strided(plan.shape, plan.stride)
    sums = None
    if plan.partial:
        groups, heads, _, features = plan.statistics
        sums = x.new_empty((groups, heads, features), dtype=torch.float32)
    theta_parts = None if plan.theta_sums is None else plan.theta_sums.empty(x)
    _run(plan, x, grad, dx, statistics, sums, theta, positions, theta_parts)
    if plan.theta_sums is None or theta_parts is None:
        return dx, None
    return dx, plan.theta_sums.reduce(theta_parts, theta)


def _are_in_reach(positions: Positions, x: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Whether the offset and the tensors' addresses suit kernels for Hopper, which is asked where those might run.

    They count positions to the end of a tile past the last token, in 32 bits, and from before a prefix.
    """
    if INTERPRETED or x.dtype == torch.float32 or architecture(x.device) != 90:
        return False
    first = positions.offset - positions.prefix
    bits = x.data_ptr()
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNMENT == 0 and -MOST_POSITION <= first <= MOST_POSITION - x.shape[1]


def _run(
    plan: _Plan,
    x: torch.Tensor,
    grad: torch.Tensor | None,
    out: torch.Tensor,
    statistics: torch.Tensor | None,
    sums: torch.Tensor | None,
    theta: torch.Tensor,
    positions: Positions,
    dtheta: torch.Tensor | None,
) -> None:
    ids, offsets, cu_seqlens = positions.ids, positions.offsets, positions.cu_seqlens
    if plan.tiled is not None and statistics is not None:
        plan.tiled((x,) if grad is None else (x, grad), out, statistics, theta, positions.offset, dtheta)
        return
    if not plan.partial:
        plan.launches[0](x, grad, out, statistics, dtheta, theta, ids, offsets, positions.offset)
        return
    partial = x.new_empty((plan.partial,), dtype=torch.float32)
    reduce, combine, apply = plan.launches
    reduce(x, grad, statistics, partial, theta, ids, offsets, cu_seqlens, positions.offset)
    combine(partial, statistics if sums is None else sums, cu_seqlens)
    apply(x, grad, out, statistics, sums, dtheta, theta, ids, offsets, cu_seqlens, positions.offset)


@dataclass
class _Planner:
    """Makes the plan of a call."""

    grad: torch.Tensor | None  # in a backward
    x: torch.Tensor
    theta: torch.Tensor
    positions: Positions
    kind: str
    exact: bool  # float32 arithmetic that is good enough for results in float32
    block_parallel: bool
    theta_gradient: bool
    aligned: bool  # whether addresses and offset suit the kernels for Hopper

    def plan(self) -> _Plan:
        """Choose the way, and its sizes."""
        x, theta, positions, kind, grad = self.x, self.theta, self.positions, self.kind, self.grad
        # Here S runs over the batch even where all heads share their angles: softmax is by head.
        geometry = geometry_of(x, theta, positions, kind, (1, 1))._replace(heads_shared=False)
        batch, tokens, heads, features = geometry.batch, geometry.tokens, geometry.heads, geometry.features
        out = layout_of(x, 2 * features if kind == "cosine" and grad is None else x.shape[-1])
        vec, unit, strides = packed_strides(geometry, x, x if grad is None else grad, out)
        theta_vec, numbers = angle_numbers(theta, positions, geometry, None)
        common: dict[str, Any] = {
            "sizes": Sizes(tokens, heads, batch),
            "numbers": numbers,
            **dict(zip(("x_strides", "grad_strides", "out_strides"), strides)),
            "spec": Spec(kind, positions.axes(), vec, theta_vec, unit, features, theta.shape[-1]),
            "BACKWARD": grad is not None,
            "EXACT": self.exact,
        }
        members = 1 if kind == "cosine" else 2
        rows = max(theta.shape[0], 1) if theta.dim() == 2 else 1
        backward = grad is not None

        def sums_of(parts: int) -> ThetaSums | None:
            return theta_sums(parts, theta, features, positions.axes()) if self.theta_gradient else None

        wide = self.exact or vec == 1
        plan = _Plan(tuple(out.shape), out.stride(), statistics_shape(x, positions))
        if self.aligned:
            from warploom.ops.lrpe.softmax_sequence.launches import hopper

            tile = hopper.suits(kind, positions, self.exact, features, x, theta, grad, out)
            if tile is not None:
                tiled = hopper.plan(tile, kind, positions, self.exact, features, x, theta, grad, out)
                parts = -(-tokens // tile.tokens)
                return plan._replace(tiled=tiled, theta_sums=sums_of(batch * parts * heads // rows))
        if positions.cu_seqlens is None and tokens <= strip_tokens(backward) and not self.block_parallel:
            tiles = sequence_tile("strip", kind, backward, wide)
            block_f = min(geometry.block_f, STRIP_BYTES // x.element_size())
            block_r = max(1, tiles.numbers // (block_f * members))
            launch = Launch(
                strip_kernel,
                batch * heads * -(-features // block_f),
                takes=("x", "grad", "out", "statistics", "dtheta", "theta", "ids", "offsets", "offset"),
                num_warps=tiles.warps,
                tile=Tile(block_r, block_f, tiles.stages),
                **common,
            )
            return plan._replace(launches=(launch,), theta_sums=sums_of(batch * heads // rows))
        tiles, applied = (sequence_tile(name, kind, backward, wide) for name in ("reduce", "apply"))
        block_r, apply_r = (max(1, t.numbers // (geometry.block_f * members)) for t in (tiles, applied))
        # Long chunks leave few partial columns, short ones leave no multiprocessor without work.
        share = batch * heads * tokens // (CHUNKS * multiprocessors(x.device))
        chunk_rows = triton.cdiv(min(max(share, block_r), MAX_CHUNK_ROWS), block_r) * block_r
        chunks, parts = triton.cdiv(tokens, chunk_rows), triton.cdiv(tokens, apply_r)
        sets = 1 if backward else 2
        groups = plan.statistics[0]
        slots = batch * chunks + (0 if positions.cu_seqlens is None else groups)
        reduce = Launch(
            reduce_chunk_kernel,
            batch * heads * chunks,
            takes=("x", "grad", "statistics", "partial", "theta", "ids", "offsets", "cu_seqlens", "offset"),
            num_warps=tiles.warps,
            chunks=chunks,
            chunk_rows=chunk_rows,
            tile=Tile(block_r, geometry.block_f, tiles.stages),
            **common,
        )
        combine = Launch(
            combine_kernel,
            groups * heads * members,
            takes=("partial", "columns", "cu_seqlens"),
            heads=heads,
            chunk_rows=chunk_rows,
            cu_stride=numbers.cu_stride,
            slots=chunks,
            BACKWARD=backward,
            F=features,
            BLOCK_F=geometry.block_f,
            P=members,
            BLOCK_P=BLOCK_P,
        )
        apply = Launch(
            apply_kernel,
            batch * heads * parts,
            takes=(
                "x", "grad", "out", "statistics", "sums", "dtheta", "theta", "ids", "offsets", "cu_seqlens",
                "offset",
            ),
            num_warps=applied.warps,
            tiles=parts,
            tile=Tile(apply_r, geometry.block_f),
            **common,
        )  # fmt: skip
        return plan._replace(
            launches=(reduce, combine, apply),
            partial=slots * heads * sets * x.shape[-1],
            theta_sums=sums_of(batch * parts * heads // rows),
        )
