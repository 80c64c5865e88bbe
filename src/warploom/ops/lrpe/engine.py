"""Launches of LRPE's kernels: sizes, strides, tiles. No validation, no autograd.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by the caller (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from warploom.device.rows import RowSpec
from warploom.ops.lrpe.call import LrpeCall, LrpeInputs, LrpeOptions
from warploom.ops.lrpe.configs import THETA_WARPS, LrpeTile, tile_of
from warploom.ops.lrpe.triton.angles import AngleNumbers, Inverses
from warploom.ops.lrpe.triton.backward import backward_kernel, reduce_kernel
from warploom.ops.lrpe.triton.forward import forward_kernel
from warploom.ops.lrpe.triton.rows import LrpeConfig, RowSizes, RowStrides, Split
from warploom.runtime.launch import Buffer, Launch, has_pdl, multiprocessors
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


class Geometry(NamedTuple):
    """Tiles of a call, and which of batch and heads is the broadcast axis S: see `triton.rows`."""

    batch: int
    tokens: int
    heads: int
    over_heads: bool  # whether S runs over the heads, and rows over the batch; otherwise the other way round
    block_s: int
    block_r: int
    block_f: int
    warps: int

    @classmethod
    def of(cls, call: LrpeCall, tile: LrpeTile) -> Geometry:
        """Returns the tiles of a call."""
        batch, tokens = call.inputs.x.shape[:2]
        heads = call.heads
        over_heads = call.theta_rows == 1 and heads > 1
        block_f = triton.next_power_of_2(call.angles)
        block_s, warps, access = tile
        if block_f > 1024:  # long rows: more threads, fewer of them
            block_s, warps = 1, min(32, block_f // 256)
        if call.per_batch and not over_heads:
            block_s = 1  # batch entries at different positions share no angles
        block_r = max(1, warps * 32 * access // call.inputs.x.element_size() // block_f)
        return cls(batch, tokens, heads, over_heads, block_s, block_r, block_f, warps)

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
        """Returns per-axis numbers in the kernels' order (s, n, u)."""
        return (heads, tokens, batch) if self.over_heads else (batch, tokens, heads)


def strides_of(tensor: Tensor, geometry: Geometry) -> RowStrides:
    """Returns strides in elements; an axis of size one gets stride 0, since it is never taken."""
    stride = tensor.stride()
    sizes = tensor.shape
    b = stride[0] if sizes[0] > 1 else 0
    n = stride[1] if sizes[1] > 1 else 0
    h = stride[2] if len(sizes) == 4 and sizes[2] > 1 else 0
    return RowStrides(*geometry.order(b, n, h), stride[-1] if sizes[-1] > 1 else 1)


def inverse_of(d: int) -> int:
    """Returns what the kernels' ``divide`` takes for a divisor: a multiplier above five bits of shift.

    The quotient is exact below 2³¹ (Granlund and Montgomery, 1994).
    """
    d = max(d, 1)
    shift = (d - 1).bit_length()
    return ((1 << (31 + shift)) // d + 1) << 5 | shift


def row_arguments(call: LrpeCall, geometry: Geometry, **tensors: Tensor) -> tuple[RowSpec, dict[str, Any]]:
    """Returns what kernels are compiled for, and what they are given by name: numbers of angles, and strides."""
    theta, ids, offsets, cu_seqlens = call.inputs[1:]
    strides = {f"{name}_strides": strides_of(tensor, geometry) for name, tensor in tensors.items()}
    unit = all(each.f == 1 for each in strides.values())
    vec = 16 if unit and all(v % 16 == 0 for each in strides.values() for v in each[:3]) else 1
    theta_u = theta.stride(0) if call.theta_rows > 1 else 0
    theta_vec = 1
    if theta.stride(-1) == 1:
        theta_vec = 4 if theta_u % 4 == 0 else 2 if theta_u % 2 == 0 else 1
    ids_b = ids_n = ids_k = offsets_b = 0
    if ids is not None:
        ids_b = ids.stride(0) if ids.dim() > 1 and ids.shape[0] > 1 else 0
        ids_n = ids.stride(1) if ids.dim() > 1 else ids.stride(0)
        ids_k = ids.stride(2) if ids.dim() == 3 else 0
    if offsets is not None and offsets.numel() > 1:
        offsets_b = offsets.stride(0)
    ids_s, _, ids_u = geometry.order(ids_b, 0, 0)
    offsets_s, _, offsets_u = geometry.order(offsets_b, 0, 0)
    size1, size2, size3 = (*call.options.grid[1:], 1, 1, 1)[:3]
    spec = RowSpec(call.options.kind, call.axes, vec, theta_vec, unit, call.angles, theta.shape[-1])
    return spec, {
        "numbers": AngleNumbers(
            theta_u=theta_u // theta_vec, theta_f=theta.stride(-1),
            ids_s=ids_s, ids_n=ids_n, ids_u=ids_u, ids_k=ids_k, offsets_s=offsets_s, offsets_u=offsets_u,
            prefix=call.options.prefix, size1=size1, size2=size2, size3=size3,
            sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
        ),
        "inverses": Inverses(inverse_of(size1), inverse_of(size2), inverse_of(size3)),
        **{name: RowStrides(s // vec, n // vec, u // vec, f) for name, (s, n, u, f) in strides.items()},
    }  # fmt: skip


class ThetaSums(NamedTuple):
    """Plan of the sum of theta's gradient from partial sums."""

    shape: tuple[int, int, int]  # of the partial sums: (parts, rows of theta, F)
    launch: Launch

    @classmethod
    def of(cls, parts: int, theta: Tensor, angles: int, axes: int) -> ThetaSums:
        """Plans the sum of ``parts`` partial sums."""
        rows = theta.shape[0] if theta.dim() == 2 else 1
        pdl = has_pdl(theta.device)
        launch = Launch(
            reduce_kernel,
            rows * -(-theta.shape[-1] // 16),
            takes=("partial", "dtheta"),
            pdl=pdl,
            parts=parts, heads=rows, AXES=axes, F=angles, E=theta.shape[-1], BLOCK_P=64, BLOCK_E=16, PDL=pdl,
        )  # fmt: skip
        return cls((parts, rows, angles), launch)

    def empty(self, x: Tensor) -> Tensor:
        """Returns memory for the partial sums, in float64."""
        return torch.empty(self.shape, dtype=torch.float64, device=x.device)

    def reduce(self, partial: Tensor, theta: Tensor) -> Tensor:
        """Returns the gradient of theta from its partial sums, always added in the same order."""
        dtype = torch.promote_types(theta.dtype, torch.float32)
        dtheta = torch.empty(theta.shape, dtype=dtype, device=theta.device)
        self.launch(partial, dtheta)
        return dtheta.to(theta.dtype)


class LrpePlan(NamedTuple):
    """Plan of a call: what it allocates and launches."""

    result: Buffer
    launch: Launch
    theta_sums: ThetaSums | None = None  # where theta's gradient is asked for


def forward(inputs: LrpeInputs, offset: int, options: LrpeOptions, plans: Plans) -> Tensor:
    """Runs the forward kernel. ``plans``: of earlier calls that were the same in all but data and the offset."""
    plan = plans.get("forward", plan_forward, inputs, options)
    out = plan.result.empty(inputs.x)
    plan.launch(*inputs, out, offset)
    return out


def plan_forward(
    inputs: LrpeInputs, options: LrpeOptions, kernel: Any = forward_kernel, more: tuple[str, ...] = ()
) -> LrpePlan:
    """Plans `forward`, by another kernel with the same parameters and ``more`` tensors behind."""
    call = LrpeCall(inputs, options)
    geometry = Geometry.of(call, tile_of(call, False, False))
    out = layout_of(inputs.x, 2 * call.angles)
    launch = Launch(
        kernel,
        geometry.broadcast_blocks * geometry.row_blocks,
        takes=(*LrpeInputs._fields, "out", "offset", *more),
        num_warps=geometry.warps,
        **_common(call, geometry, geometry.row_blocks, x=inputs.x, out=out),
    )
    return LrpePlan(Buffer.like(out), launch)


def _common(call: LrpeCall, geometry: Geometry, row_blocks: int, **tensors: Tensor) -> dict[str, Any]:
    """Returns what both kernels are given by name."""
    blocks = geometry.broadcast_blocks if geometry.over_heads else row_blocks
    faster = geometry.tokens if geometry.over_heads else geometry.row_axis
    spec, arguments = row_arguments(call, geometry, **tensors)
    return {
        "sizes": RowSizes(geometry.tokens, geometry.row_axis, geometry.broadcast_axis),
        "split": Split(blocks, inverse_of(blocks), inverse_of(faster)),
        "config": LrpeConfig(
            spec, call.options.activation, geometry.over_heads, call.theta_rows == 1,
            geometry.block_s, geometry.block_r, geometry.block_f,
        ),
        **arguments,
    }  # fmt: skip


def backward(
    grad: Tensor,
    inputs: LrpeInputs,
    offset: int,
    options: LrpeOptions,
    theta_gradient: bool,
    plans: Plans,
    result: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the backward kernel: gradient of ``x``, and that of ``theta`` when asked for.

    ``plans``: those that `forward` took. ``result``: where the gradient of ``x`` shall be written, with any
    strides; for all kinds but cosine it may be ``grad`` itself, since a program reads what it writes over.
    Where ``x`` is not read, see `LrpeOptions.reads_x`, ``result`` may stand for it.
    """
    x, theta = inputs.x, inputs.theta
    if x.numel() == 0:
        dx = empty_in_order_of(x, x.shape[-1]) if result is None else result
        return dx, torch.zeros_like(theta) if theta_gradient else None
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = None if result is None else result.stride()
    key = (grad.dtype, grad.stride(), x.stride(), theta.stride(), theta_gradient, strides)
    plan = plans.get(key, plan_backward, grad, inputs, options, theta_gradient, result)
    dx = plan.result.empty(x) if result is None else result
    sums = plan.theta_sums
    partial = None if sums is None else sums.empty(x)
    plan.launch(*inputs, grad, dx, partial, offset)
    return dx, None if sums is None or partial is None else sums.reduce(partial, theta)


def plan_backward(
    grad: Tensor, inputs: LrpeInputs, options: LrpeOptions, theta_gradient: bool, result: Tensor | None
) -> LrpePlan:
    """Plans `backward`."""
    call, x = LrpeCall(inputs, options), inputs.x
    geometry = Geometry.of(call, tile_of(call, True, theta_gradient))
    dx = layout_of(x, x.shape[-1]) if result is None else result
    chunks = geometry.row_blocks
    sums = None
    if theta_gradient:
        chunks = _theta_chunks(geometry, call.theta_rows, x.device)
        parts = geometry.broadcast_blocks * chunks // call.theta_rows
        sums = ThetaSums.of(parts, inputs.theta, call.angles, call.axes)
    launch = Launch(
        backward_kernel,
        geometry.broadcast_blocks * chunks,
        takes=(*LrpeInputs._fields, "grad", "dx", "partial", "offset"),
        num_warps=geometry.warps,
        chunks=chunks // call.theta_rows,
        **_common(call, geometry, chunks, x=x, grad=grad, dx=dx),
    )
    return LrpePlan(Buffer.like(dx), launch, sums)


def _theta_chunks(geometry: Geometry, rows: int, device: torch.device) -> int:
    """Returns the programs that share the tiles of a block of S: enough to fill the GPU, as many for each row."""
    tiles = geometry.row_blocks if rows == 1 else -(-geometry.tokens // geometry.block_r)
    programs = max(1, THETA_WARPS // geometry.warps) * multiprocessors(device)
    wanted = max(1, programs // max(geometry.broadcast_blocks * rows, 1))
    busiest = -(-tiles // wanted)  # tiles of a program, at most
    return -(-tiles // busiest) * rows
