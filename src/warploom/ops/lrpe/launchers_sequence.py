"""Launchers of LRPE with softmax over the sequence: which of the ways through the cache, and its sizes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from warploom.launch import Kernel, Launch
from warploom.layout import empty_in_order_of
from warploom.ops.lrpe.kernels_sequence import chunk_kernel, combine_kernel, strip_kernel
from warploom.ops.lrpe.launchers import (
    Plans,
    Positions,
    angle_numbers,
    geometry_of,
    layout_of,
    packed_strides,
    reduce_theta,
)

_chunk_kernel = Kernel(chunk_kernel)
_combine_kernel = Kernel(combine_kernel)
_strip_kernel = Kernel(strip_kernel)


class Tiles(NamedTuple):
    """Block sizes of a kernel."""

    numbers: int  # of x in a tile
    warps: int
    stages: int = 1  # loads under way at once in a loop over tiles


def strip_tokens(backward: bool) -> int:
    """Sequences up to this long are walked over twice by one program; longer ones take three launches.

    These and the tiles are measured on an H200 (see "How it reaches the limit").
    """
    return 512 if backward else 2048


def strip_tiles(kind: str, backward: bool) -> Tiles:
    """For `strip_kernel`."""
    if kind == "cosine":
        return Tiles(2048, 4, 3)
    return Tiles(4096, 4, 1) if backward else Tiles(2048, 4, 5)


def chunk_tiles(kind: str, backward: bool) -> Tiles:
    """For `chunk_kernel`."""
    if kind == "cosine":
        return Tiles(2048, 1) if backward else Tiles(4096, 4)
    return Tiles(4096, 1)


STRIP_BYTES = 64
"""Bytes of a row that a strip takes from each member of its pairs."""

BLOCK_P = 64
"""Partial results combined at once."""


def statistics_shape(x: torch.Tensor, positions: Positions) -> tuple[int, int, int, int]:
    """Of the columns' statistics: (groups, H, 2, D) with the features in the kernels' order."""
    groups = x.shape[0] if positions.cu_seqlens is None else positions.cu_seqlens.shape[0] - 1
    return groups, x.shape[2] if x.dim() == 4 else 1, 2, x.shape[-1]


class _Plan(NamedTuple):
    shape: tuple[int, ...]  # of the result
    stride: tuple[int, ...]
    statistics: tuple[int, int, int, int]  # their shape
    launches: tuple[Launch, ...]  # of the strip kernel; or to reduce, combine and apply
    partial: int = 0  # float32 numbers of partial columns
    parts: tuple[int, int, int] = (0, 0, 0)  # (parts, rows of theta, F): sums for theta's gradient


_plans = Plans()


def forward(
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    key: Hashable | None = None,
    *,
    block_parallel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the columns' statistics (groups, H, 2, D) in float32, which the backward wants back.

    ``block_parallel``: reduce, combine and apply in three launches, whatever the sizes. ``key`` as in
    `launchers.forward`.
    """
    make = _Planner(None, x, theta, positions, kind, block_parallel).plan
    plan: _Plan = _plans.get(None if key is None else (key, block_parallel), make)
    out = torch.empty_strided(plan.shape, plan.stride, dtype=x.dtype, device=x.device)
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
    key: Hashable | None = None,
    *,
    block_parallel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``x``, and of ``theta`` when asked for, with the statistics that `forward` returned."""
    if x.numel() == 0:
        dx = empty_in_order_of(x, x.shape[-1])
        return dx, torch.zeros_like(theta) if theta_gradient else None
    make = _Planner(grad, x, theta, positions, kind, block_parallel).plan
    if key is not None:
        key = (key, grad.shape, grad.stride(), grad.dtype, theta_gradient, block_parallel)
    plan: _Plan = _plans.get(key, make)
    dx = torch.empty_strided(plan.shape, plan.stride, dtype=x.dtype, device=x.device)
    sums = None
    if plan.partial:
        groups, heads, _, features = plan.statistics
        sums = x.new_empty((groups, heads, features), dtype=torch.float32)
    dtheta = torch.empty(plan.parts, dtype=torch.float64, device=x.device) if theta_gradient else None
    _run(plan, x, grad, dx, statistics, sums, theta, positions, dtheta)
    return dx, None if dtheta is None else reduce_theta(dtheta, theta, positions.axes())


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
    if not plan.partial:
        tensors = (x, grad, out, statistics, dtheta, theta, ids, offsets)
        plan.launches[0](tensors, positions.offset)
        return
    partial = x.new_empty((plan.partial,), dtype=torch.float32)
    reduce, combine, apply = plan.launches
    reduce((x, grad, out, statistics, sums, partial, None, theta, ids, offsets, cu_seqlens), positions.offset)
    combine((partial, statistics if sums is None else sums, cu_seqlens), plan.statistics[1])
    apply((x, grad, out, statistics, sums, partial, dtheta, theta, ids, offsets, cu_seqlens), positions.offset)


@dataclass
class _Planner:
    """Makes the plan of a call."""

    grad: torch.Tensor | None  # in a backward
    x: torch.Tensor
    theta: torch.Tensor
    positions: Positions
    kind: str
    block_parallel: bool

    def plan(self) -> _Plan:
        """Choose the way, and its sizes."""
        x, theta, positions, kind, grad = self.x, self.theta, self.positions, self.kind, self.grad
        # Here S runs over the batch even where all heads share their angles: softmax is by head.
        geometry = geometry_of(x, theta, positions, kind, (1, 1))._replace(heads_shared=False)
        batch, tokens, heads, features = geometry.batch, geometry.tokens, geometry.heads, geometry.features
        out = layout_of(x, 2 * features if kind == "cosine" and grad is None else x.shape[-1])
        tensors = (x, x if grad is None else grad, out)
        vec, unit, strides = packed_strides(tensors, geometry)
        theta_vec, numbers = angle_numbers(theta, positions, geometry, None)
        members = 1 if kind == "cosine" else 2
        rows = theta.shape[0] if theta.dim() == 2 else 1
        backward = grad is not None
        plan = _Plan(tuple(out.shape), out.stride(), statistics_shape(x, positions), ())
        angles = (positions.axes(), vec, theta_vec, unit, features, theta.shape[-1])
        if positions.cu_seqlens is None and tokens <= strip_tokens(backward) and not self.block_parallel:
            tiles = strip_tiles(kind, backward)
            block_f = min(geometry.block_f, STRIP_BYTES // x.element_size())
            block_r = max(1, tiles.numbers // (block_f * members))
            launch = Launch(
                _strip_kernel,
                batch * heads * -(-features // block_f),
                (*numbers, *strides),
                (kind, backward, *angles, block_r, block_f, tiles.stages),
                tiles.warps,
            )
            return plan._replace(launches=(launch,), parts=(batch * heads // rows, rows, features))
        tiles = chunk_tiles(kind, backward)
        block_r = max(1, tiles.numbers // (geometry.block_f * members))
        chunks = triton.cdiv(tokens, block_r)
        parts = (batch * chunks * heads // rows, rows, features)
        sets = 1 if backward else 2
        groups = plan.statistics[0]
        slots = batch * chunks + (0 if positions.cu_seqlens is None else groups)
        reduce, apply = (
            Launch(
                _chunk_kernel,
                batch * heads * chunks,
                (*numbers, *strides, chunks),
                (kind, reduces, backward, *angles, block_r, geometry.block_f),
                tiles.warps,
            )
            for reduces in (True, False)
        )
        combine = Launch(
            _combine_kernel,
            groups * heads,
            (block_r, 0 if positions.cu_seqlens is None else positions.cu_seqlens.stride(0), chunks),
            (backward, features, geometry.block_f, members, BLOCK_P),
        )
        partial = slots * heads * sets * x.shape[-1]
        return plan._replace(launches=(reduce, combine, apply), partial=partial, parts=parts)
