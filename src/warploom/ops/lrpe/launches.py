"""Launches of LRPE's kernels: sizes, strides, tiles. No validation, no autograd.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by the caller (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from warploom.ops.lrpe.configs import THETA_WARPS, Tile, tile_of
from warploom.ops.lrpe.kernels.angles import AngleNumbers, Inverses, Spec
from warploom.ops.lrpe.kernels.backward import backward_kernel, reduce_kernel
from warploom.ops.lrpe.kernels.forward import forward_kernel
from warploom.ops.lrpe.kernels.rows import Blocks, Sizes, Split, Strides
from warploom.ops.lrpe.problem import Positions
from warploom.runtime.launch import Dense, Launch, has_pdl, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

MAX_AXES = 4
"""Axes of a grid that the kernels unravel themselves."""


class Geometry(NamedTuple):
    """How a call is cut into tiles, and which of batch and heads is the broadcast axis S: see `kernels.rows`."""

    batch: int
    tokens: int
    heads: int
    over_heads: bool  # whether S runs over the heads, and rows over the batch; otherwise the other way round
    block_s: int
    block_r: int
    block_f: int
    warps: int
    features: int  # angles per head: D for cosine, D / 2 for rotate

    @property
    def row_axis(self) -> int:
        """Size of the row axis ``u``: heads, or batch entries where the heads share angles."""
        return self.batch if self.over_heads else self.heads

    @property
    def broadcast_axis(self) -> int:
        """Size of the broadcast axis ``s``: batch entries, or heads where those share angles."""
        return self.heads if self.over_heads else self.batch

    @property
    def row_blocks(self) -> int:
        """Tiles of rows."""
        return -(-self.tokens * self.row_axis // self.block_r)

    @property
    def broadcast_blocks(self) -> int:
        """Blocks of S."""
        return -(-self.broadcast_axis // self.block_s)

    def order(self, batch: int, tokens: int, heads: int) -> tuple[int, int, int]:
        """Per-axis numbers in the kernels' order (s, n, u)."""
        return (heads, tokens, batch) if self.over_heads else (batch, tokens, heads)


def geometry_of(
    x: torch.Tensor, theta: torch.Tensor, positions: Positions, kind: str, tile: tuple[int, ...]
) -> Geometry:
    """Sizes and tiles of a call. ``tile``: fields of a `Tile`."""
    batch, tokens = x.shape[0], x.shape[1]
    heads = x.shape[2] if x.dim() == 4 else 1
    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    per_head = theta.dim() == 2 and theta.shape[0] > 1
    over_heads = not per_head and heads > 1
    block_f = triton.next_power_of_2(features)
    block_s, warps, access = Tile(*tile)
    if block_f > 1024:  # long rows: more threads, fewer of them
        block_s, warps = 1, min(32, block_f // 256)
    if positions.per_batch() and not over_heads:
        block_s = 1  # batch entries at different positions share no angles
    block_r = max(1, warps * 32 * access // x.element_size() // block_f)
    return Geometry(batch, tokens, heads, over_heads, block_s, block_r, block_f, warps, features)


def _strides(tensor: torch.Tensor, geometry: Geometry) -> tuple[int, int, int, int]:
    """Strides (s, n, u, feature) in elements; an axis of size one gets stride 0, since it is never taken."""
    stride = tensor.stride()
    sizes = tensor.shape
    b = stride[0] if sizes[0] > 1 else 0
    n = stride[1] if sizes[1] > 1 else 0
    h = stride[2] if len(sizes) == 4 and sizes[2] > 1 else 0
    return (*geometry.order(b, n, h), stride[-1] if sizes[-1] > 1 else 1)


def packed_strides(geometry: Geometry, *tensors: torch.Tensor) -> tuple[int, bool, list[Strides]]:
    """Common divisor for vector access, whether features are adjacent everywhere, and all strides over it."""
    strides = [_strides(t, geometry) for t in tensors]
    unit = all(s[3] == 1 for s in strides)
    vec = 16 if unit and all(v % 16 == 0 for s in strides for v in s[:3]) else 1
    return vec, unit, [Strides(s // vec, n // vec, u // vec, f) for s, n, u, f in strides]


def inverse_of(d: int) -> int:
    """What the kernels' ``divide`` takes for a divisor: a multiplier above five bits of shift.

    The quotient is exact below 2³¹ (Granlund and Montgomery, 1994).
    """
    d = max(d, 1)
    shift = (d - 1).bit_length()
    return ((1 << (31 + shift)) // d + 1) << 5 | shift


def inner_sizes(positions: Positions) -> tuple[int, int, int]:
    """Sizes of the axes of a grid but the first."""
    size1, size2, size3 = (*positions.grid[1:], 1, 1, 1)[:3]
    return size1, size2, size3


def angle_numbers(
    theta: torch.Tensor, positions: Positions, geometry: Geometry, table: torch.Tensor | None
) -> tuple[int, AngleNumbers]:
    """The divisor of theta's row stride that its vector loads rest on, and what angles are made of."""
    theta_u = theta.stride(0) if theta.dim() == 2 and theta.shape[0] > 1 else 0
    theta_vec = 1
    if theta.stride(-1) == 1:
        theta_vec = 4 if theta_u % 4 == 0 else 2 if theta_u % 2 == 0 else 1
    ids, offsets = positions.ids, positions.offsets
    ids_b = ids_n = ids_k = offsets_b = 0
    if ids is not None:
        ids_b = ids.stride(0) if ids.dim() > 1 and ids.shape[0] > 1 else 0
        ids_n = ids.stride(1) if ids.dim() > 1 else ids.stride(0)
        ids_k = ids.stride(2) if ids.dim() == 3 else 0
    if offsets is not None and offsets.numel() > 1:
        offsets_b = offsets.stride(0)
    ids_s, _, ids_u = geometry.order(ids_b, 0, 0)
    offsets_s, _, offsets_u = geometry.order(offsets_b, 0, 0)
    table_n = table_u = 0
    if table is not None:
        table_n, table_u = table.stride(0), 0 if table.shape[1] == 1 else table.stride(1)
    cu_seqlens = positions.cu_seqlens
    size1, size2, size3 = inner_sizes(positions)
    return theta_vec, AngleNumbers(
        theta_u=theta_u // theta_vec, theta_f=theta.stride(-1),
        ids_s=ids_s, ids_n=ids_n, ids_u=ids_u, ids_k=ids_k, offsets_s=offsets_s, offsets_u=offsets_u,
        table_n=table_n, table_u=table_u, prefix=positions.prefix, size1=size1, size2=size2, size3=size3,
        sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
    )  # fmt: skip


def forward(
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    table: torch.Tensor | None,
    plans: Plans,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the forward kernel.

    ``table`` (N, 1 or H, 2F) float32 replaces the angles by stored cosines and sines. ``plans`` are those of
    earlier calls that were the same in all but addresses, numbers in tensors, and the offset. ``counters`` (2,)
    int32, in all such calls or in none, become zero for a kernel that is launched later.
    """
    plan = plans.get("forward", plan_forward, x, theta, positions, kind, activation, table)
    out = plan.result.empty(x)
    launch_forward(plan.launch, x, out, theta, positions, table, counters)
    return out


def launch_forward(
    launch: Launch,
    x: torch.Tensor,
    out: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    table: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> None:
    """Run the forward kernel of a plan, which writes ``out``; see `forward`."""
    ids, offsets, cu_seqlens = positions.ids, positions.offsets, positions.cu_seqlens
    launch(x, out, theta, ids, offsets, cu_seqlens, table, counters, positions.offset)


class ThetaSums(NamedTuple):
    """How theta's gradient is added up from partial sums."""

    shape: tuple[int, int, int]  # of the partial sums: (parts, rows of theta, F)
    launch: Launch

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        """The partial sums, in float64."""
        return torch.empty(self.shape, dtype=torch.float64, device=x.device)

    def reduce(self, partial: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        """Gradient of theta from its partial sums, always in the same order."""
        dtype = torch.promote_types(theta.dtype, torch.float32)
        dtheta = torch.empty(theta.shape, dtype=dtype, device=theta.device)
        self.launch(partial, dtheta)
        return dtheta.to(theta.dtype)


class Plan(NamedTuple):
    """What a call allocates and launches."""

    result: Dense
    launch: Launch
    theta_sums: ThetaSums | None = None  # where theta's gradient is asked for


def plan_forward(
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    table: torch.Tensor | None,
) -> Plan:
    """Plan of `forward`."""
    geometry = geometry_of(x, theta, positions, kind, tile_of(kind, activation, positions.axes(), False, False, x))
    out = layout_of(x, 2 * geometry.features)
    vec, unit, (x_strides, out_strides) = packed_strides(geometry, x, out)
    launch = Launch(
        forward_kernel,
        geometry.broadcast_blocks * geometry.row_blocks,
        takes=("x", "out", "theta", "ids", "offsets", "cu_seqlens", "table", "counters", "offset"),
        num_warps=geometry.warps,
        x_strides=x_strides,
        out_strides=out_strides,
        **_common(theta, positions, kind, activation, geometry, table, geometry.row_blocks, vec, unit),
    )
    return Plan(Dense.like(out), launch)


def _common(
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    geometry: Geometry,
    table: torch.Tensor | None,
    row_blocks: int,
    vec: int,
    unit: bool,
) -> dict[str, Any]:
    """What both kernels are given beside tensors and their strides."""
    theta_vec, numbers = angle_numbers(theta, positions, geometry, table)
    blocks = geometry.broadcast_blocks if geometry.over_heads else row_blocks
    faster = geometry.tokens if geometry.over_heads else geometry.row_axis
    return {
        "sizes": Sizes(geometry.tokens, geometry.row_axis, geometry.broadcast_axis),
        "numbers": numbers,
        "inverses": Inverses(*map(inverse_of, inner_sizes(positions))),
        "split": Split(blocks, inverse_of(blocks), inverse_of(faster)),
        "spec": Spec(kind, positions.axes(), vec, theta_vec, unit, geometry.features, theta.shape[-1]),
        "ACTIVATION": activation,
        "TOKENS_INNER": geometry.over_heads,
        "blocks": Blocks(geometry.block_s, geometry.block_r, geometry.block_f),
    }


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    theta_gradient: bool,
    table: torch.Tensor | None,
    plans: Plans,
    result: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the backward kernel: gradient of ``x``, and that of ``theta`` when asked for.

    ``plans``: those that `forward` took. ``result``: where the gradient of ``x`` shall be written, with any
    strides; for all kinds but cosine it may be ``grad`` itself, since a program reads what it writes over.
    Where ``x`` is not read, see `reads_x`, ``result`` may stand for it.
    """
    if x.numel() == 0:
        dx = empty_in_order_of(x, x.shape[-1]) if result is None else result
        return dx, torch.zeros_like(theta) if theta_gradient else None
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = None if result is None else result.stride()
    key = (grad.dtype, grad.stride(), x.stride(), theta.stride(), theta_gradient, strides)
    plan = plans.get(key, plan_backward, grad, x, theta, positions, kind, activation, theta_gradient, table, result)
    dx = plan.result.empty(x) if result is None else result
    sums = plan.theta_sums
    partial = None if sums is None else sums.empty(x)
    launch_backward(plan.launch, x, grad, dx, theta, positions, partial, table)
    return dx, None if sums is None or partial is None else sums.reduce(partial, theta)


def launch_backward(
    launch: Launch,
    x: torch.Tensor,
    grad: torch.Tensor,
    dx: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    partial: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """Run the backward kernel of a plan, which writes ``dx``, and ``partial`` sums of theta's gradient."""
    ids, offsets, cu_seqlens = positions.ids, positions.offsets, positions.cu_seqlens
    launch(x, grad, dx, partial, theta, ids, offsets, cu_seqlens, table, positions.offset)


def plan_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Positions,
    kind: str,
    activation: str,
    theta_gradient: bool,
    table: torch.Tensor | None,
    result: torch.Tensor | None,
) -> Plan:
    """Plan of `backward`."""
    tile = tile_of(kind, activation, positions.axes(), True, theta_gradient, x)
    geometry = geometry_of(x, theta, positions, kind, tile)
    dx = layout_of(x, x.shape[-1]) if result is None else result
    chunks = geometry.row_blocks
    theta_rows = theta.shape[0] if theta.dim() == 2 else 1
    parts = 0
    if theta_gradient:
        chunks = _theta_chunks(geometry, theta_rows, x.device)
        parts = geometry.broadcast_blocks * chunks // theta_rows
    vec, unit, (x_strides, grad_strides, dx_strides) = packed_strides(geometry, x, grad, dx)
    launch = Launch(
        backward_kernel,
        geometry.broadcast_blocks * chunks,
        takes=("x", "grad", "dx", "partial", "theta", "ids", "offsets", "cu_seqlens", "table", "offset"),
        num_warps=geometry.warps,
        chunks=chunks // theta_rows,
        x_strides=x_strides,
        grad_strides=grad_strides,
        dx_strides=dx_strides,
        ONE_THETA=theta_rows == 1,
        **_common(theta, positions, kind, activation, geometry, table, chunks, vec, unit),
    )
    sums = theta_sums(parts, theta, geometry.features, positions.axes()) if theta_gradient else None
    return Plan(Dense.like(dx), launch, sums)


def theta_sums(parts: int, theta: torch.Tensor, features: int, axes: int) -> ThetaSums:
    """Plan of the sum of ``parts`` partial sums of theta's gradient."""
    rows = theta.shape[0] if theta.dim() == 2 else 1
    pdl = has_pdl(theta.device)
    launch = Launch(
        reduce_kernel,
        rows * -(-theta.shape[-1] // 16),
        takes=("partial", "dtheta"),
        pdl=pdl,
        parts=parts,
        heads=rows,
        AXES=axes,
        F=features,
        E=theta.shape[-1],
        BLOCK_P=64,
        BLOCK_E=16,
        PDL=pdl,
    )
    return ThetaSums((parts, rows, features), launch)


def _theta_chunks(geometry: Geometry, rows: int, device: torch.device) -> int:
    """Programs that share the tiles of a block of S: enough to fill the GPU, as many for each row of theta."""
    tiles = geometry.row_blocks if rows == 1 else -(-geometry.tokens // geometry.block_r)
    programs = max(1, THETA_WARPS // geometry.warps) * multiprocessors(device)
    wanted = max(1, programs // max(geometry.broadcast_blocks * rows, 1))
    busiest = -(-tiles // wanted)  # tiles of a program, at most
    return -(-tiles // busiest) * rows
