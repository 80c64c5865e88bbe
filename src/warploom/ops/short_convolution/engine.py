"""The short convolution on kernels: what a call allocates and launches.

That is its plan, which depends on shapes, strides, dtypes and options alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from warploom.device.rows import Strides
from warploom.ops.short_convolution.call import ConvolutionInputs, ConvolutionOptions
from warploom.ops.short_convolution.triton import (
    ConvolutionConfig,
    ConvolutionSizes,
    TapStrides,
    forward_kernel,
    input_kernel,
    preactivation_kernel,
)
from warploom.runtime.launch import Buffer, Launch
from warploom.runtime.layout import layout_for
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

ELEMENTS = 2048
"""Elements of a tile."""
TOKENS = 32
"""Tokens of a step, unless there is one alone."""
MOST_STEPS = 16
"""Steps of a program, at most: it loads weights, and adds up their gradients, once for all."""
LEAST_PROGRAMS = 1024
"""Programs of a launch whose steps are fewer than that, where there are so many."""


class ConvolutionForward(NamedTuple):
    """Plan of a forward."""

    out: Buffer
    final: Buffer | None
    launch: Launch


class ConvolutionBackward(NamedTuple):
    """Plan of a backward."""

    dx: Buffer
    dinitial: Buffer | None
    dz: Buffer | None  # None where it is the output's gradient
    sums: Buffer | None  # (tiles, K + 1, C): shares of the gradients of weights, and last of the bias
    preactivation: Launch | None
    input: Launch


def forward(inputs: ConvolutionInputs, options: ConvolutionOptions, plans: Plans) -> tuple[Tensor, Tensor | None]:
    """Returns outputs (B, N, C), and the last states (S, C, K − 1) where they are asked for."""
    plan = plans.get("forward", plan_forward, inputs, options)
    out = plan.out.empty(inputs.x)
    final = None if plan.final is None else plan.final.empty(inputs.x)
    plan.launch(*inputs, out, final)
    return out, final


def plan_forward(inputs: ConvolutionInputs, options: ConvolutionOptions) -> ConvolutionForward:
    """Plans `forward`."""
    out = layout_of(inputs.x, inputs.x.shape[2])
    final = Buffer.rows(inputs.state_shape, inputs.x.dtype) if options.return_state else None
    programs, arguments = arguments_of(inputs, options, {"x": inputs.x, "out": out}, final, final)
    launch = Launch(forward_kernel, programs, takes=(*_TAKES, "out", "final"), **arguments)
    return ConvolutionForward(Buffer.like(out), final, launch)


def backward(
    grad: Tensor, grad_state: Tensor | None, inputs: ConvolutionInputs, options: ConvolutionOptions,
    wanted: Sequence[bool], plans: Plans,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of x, weight, bias and the first state, of those that are wanted."""
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if x is None else x.stride() for x in (grad, grad_state, *inputs)])
    plan = plans.get((grad.dtype, strides, *wanted), plan_backward, grad, grad_state, inputs, options, wanted)
    x, weight, bias, _, cu_seqlens = inputs
    dx = plan.dx.empty(x)
    dz, dinitial, sums = (None if b is None else b.empty(x) for b in (plan.dz, plan.dinitial, plan.sums))
    if plan.preactivation is not None:
        plan.preactivation(*inputs, grad, dz, sums)
    plan.input(weight, cu_seqlens, grad if dz is None else dz, grad_state, dx, dinitial)
    if sums is None:
        return dx, None, None, dinitial
    dweight = sums[:, :-1].sum(0).mT.to(weight.dtype).contiguous() if wanted[1] else None
    dbias = sums[:, -1].sum(0).to(bias.dtype) if bias is not None and wanted[2] else None
    return dx, dweight, dbias, dinitial


def plan_backward(
    grad: Tensor, grad_state: Tensor | None, inputs: ConvolutionInputs, options: ConvolutionOptions,
    wanted: Sequence[bool],
) -> ConvolutionBackward:  # fmt: skip
    """Plans `backward`."""
    x, weight, _, initial, _ = inputs
    dx = layout_of(x, x.shape[2])
    dinitial = None
    if wanted[3] and initial is not None:
        dinitial = Buffer.rows(inputs.state_shape, initial.dtype)
    dz = None if options.activation == "none" else dx
    if (
        dz is not None and dinitial is not None and dinitial.dtype != x.dtype
    ):  # a gradient that is not rounded to that
        dz = dz.to(dinitial.dtype)
    preactivation = sums = None
    if wanted[1] or wanted[2] or dz is not None:
        rows = {"x": x, "grad": grad, "dz": grad if dz is None else dz}
        programs, arguments = arguments_of(inputs, options, rows, None, None)
        preactivation = Launch(preactivation_kernel, programs, takes=(*_TAKES, "grad", "dz", "sums"), **arguments)
        if wanted[1] or wanted[2]:
            tiles = arguments["sizes"].all_tiles
            sums = Buffer.rows((tiles, weight.shape[1] + 1, x.shape[2]), torch.float32)
    rows = {"dz": grad if dz is None else dz, "dx": dx}
    programs, arguments = arguments_of(inputs, options, rows, grad_state, dinitial)
    launch = Launch(
        input_kernel,
        programs,
        takes=("weight", "cu_seqlens", "dz", "grad_final", "dx", "dinitial"),
        dinitial_strides=state_strides(dinitial),
        **arguments,
    )
    dz_buffer = None if dz is None else Buffer.like(dz)
    return ConvolutionBackward(Buffer.like(dx), dinitial, dz_buffer, sums, preactivation, launch)


_TAKES = ("x", "weight", "bias", "initial", "cu_seqlens")


def state_strides(state: Tensor | Buffer | None) -> TapStrides:
    """Returns the strides of a state, if there is one."""
    if state is None:
        return TapStrides(0, 0, 0)
    return TapStrides(*(state.stride() if isinstance(state, Tensor) else state.stride))


def arguments_of(
    inputs: ConvolutionInputs, options: ConvolutionOptions, rows: dict[str, Tensor],
    final: Tensor | Buffer | None, written: Buffer | None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Returns the programs of a launch, and what it is given by name.

    Args:
        inputs: The call's tensors.
        options: Its options.
        rows: Tensors (B, N, C) by name.
        final: The last states, or their gradient.
        written: States that are written, by programs of their own.
    """
    x, weight, bias, initial, cu_seqlens = inputs
    batch, tokens, channels = x.shape
    layout = layout_for(Strides, *(t[:, :, None] for t in rows.values()))
    axis = "c" if layout.unit else "n" if all(t.stride(1) == 1 for t in rows.values()) else ""
    block_t = 1 if tokens == 1 else TOKENS
    block_c = min(max(ELEMENTS // block_t, 64), triton.next_power_of_2(channels), 512)
    blocks, count = -(-channels // block_c), -(-tokens // block_t)
    steps = max(min(batch * count * blocks // LEAST_PROGRAMS, count, MOST_STEPS), 1)
    tiles = -(-count // steps)
    sizes = ConvolutionSizes(
        tokens=tokens,
        tiles=tiles,
        steps=steps,
        all_tiles=batch * tiles,
        blocks=blocks,
        sequences=inputs.sequences,
        cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
        weight_c=weight.stride(0),
        weight_k=weight.stride(1),
        bias_c=0 if bias is None else bias.stride(0),
        initial=state_strides(initial),
        final=state_strides(final),
    )
    config = ConvolutionConfig(
        ACTIVATION=options.activation,
        TAPS=weight.shape[1],
        CHANNELS=channels,
        VEC=layout.vec,
        AXIS=axis,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        BLOCK_K=triton.next_power_of_2(weight.shape[1] - 1),
    )
    programs = (batch * tiles + (0 if written is None else inputs.sequences)) * blocks
    return programs, {"sizes": sizes, "config": config, **layout.of(*rows)}
