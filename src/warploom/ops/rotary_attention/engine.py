"""Launches of rotary attention: those of its two operators, on parts of the same tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from warploom.ops.flash_attention import engine as attention
from warploom.ops.flash_attention.problem import MaskSpec
from warploom.ops.lrpe import engine as lrpe
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.ops.rotary_attention.call import RotaryInputs, RotaryOptions, split_keys, split_values
from warploom.ops.rotary_attention.triton import rotate_kernel
from warploom.runtime.launch import ALIGNMENT, Buffer, Launch, are_aligned
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans
from warploom.runtime.pytorch import view

Tensor = torch.Tensor

_CAUSAL = MaskSpec(right=0)


class RotaryResults(NamedTuple):
    """Results of a forward."""

    out: Tensor  # (B, N, H, D)
    rotated: Tensor  # rotated queries and keys (B, N, H + Hkv, D)
    statistics: Tensor  # attention's


def forward(inputs: RotaryInputs, options: RotaryOptions, known: Plans) -> RotaryResults:
    """Runs both kernels, by one plan where there is one."""
    plan = known.get("forward", plan_forward, inputs, options)
    if plan and are_aligned(inputs.qkv):
        return plan(inputs)
    of_positions, of_attention = known.get("positions", Plans), known.get("attention", Plans)
    qk, v = split_values(inputs.qkv, options.heads)
    rotated = lrpe.forward(LrpeInputs(qk, inputs.theta), 0, LrpeOptions(kind=options.kind), of_positions)
    q, k = split_keys(rotated, options.heads)
    out, _, statistics = attention.forward(q, k, v, _CAUSAL, options.scale, None, of_attention)
    return RotaryResults(out, rotated, statistics)


def backward(
    grad: Tensor, inputs: RotaryInputs, results: RotaryResults, options: RotaryOptions, theta_gradient: bool,
    known: Plans,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of ``qkv`` and, where it is asked for, of ``theta``."""
    (qkv, theta), (out, rotated, statistics), heads = inputs, results, options.heads
    if not theta_gradient:
        # Strides, because what autograd saved may come back with others: from the host's memory, for one.
        key = (grad.dtype, grad.stride(), out.stride(), rotated.stride())
        plan = known.get(key, plan_backward, grad, inputs, results, options)
        if plan and are_aligned(grad, qkv, rotated):
            return plan(grad, inputs, results), None
    of_positions, of_attention = known.get("positions", Plans), known.get("attention", Plans)
    dqkv = known.get("gradient", _like, qkv).empty(qkv)
    dqk, dv = split_values(dqkv, heads)
    qk, v = split_values(qkv, heads)
    (q, k), (dq, dk) = split_keys(rotated, heads), split_keys(dqk, heads)
    attention.backward(
        grad, None, q, k, v, out, statistics, _CAUSAL, options.scale, None, of_attention, (dq, dk, dv)
    )
    encoded = LrpeInputs(qk, theta)
    _, dtheta = lrpe.backward(dqk, encoded, 0, LrpeOptions(kind=options.kind), theta_gradient, of_positions, dqk)
    return dqkv, dtheta


def _like(x: Tensor) -> Buffer:
    return Buffer.like(layout_of(x, x.shape[-1]))


class Part(NamedTuple):
    """A part of a tensor's heads. A kernel is told strides beforehand, so the first heads need no view."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> Part:
        """Returns that of a view of a tensor."""
        return cls(tuple(part.shape), part.stride(), int(part.storage_offset() - whole.storage_offset()))

    def is_aligned_in(self, whole: Tensor) -> bool:
        """Returns whether it can have a descriptor where the whole can, as one head's strides do not say."""
        return self.offset * whole.element_size() % ALIGNMENT == 0


class _ForwardPlan(NamedTuple):
    """Plan of a forward, where attention is one launch of the kernel for Hopper."""

    rotated: Buffer
    out: Buffer
    lse: Buffer
    statistics: Buffer
    rotate: Launch
    attend: attention.HopperForward
    k: Part  # of the rotated
    v: Part  # of qkv

    def __call__(self, inputs: RotaryInputs) -> RotaryResults:
        qkv, theta = inputs
        rotated, out = self.rotated.empty(qkv), self.out.empty(qkv)
        lse, statistics = self.lse.empty(qkv), self.statistics.empty(qkv)
        counters = attention.COUNTERS.empty(qkv)
        self.rotate(*LrpeInputs(qkv, theta), rotated, 0, counters)
        k, v = view(rotated, *self.k), view(qkv, *self.v)
        given = attention.ForwardInputs(rotated, k, v, _CAUSAL, None, counters)
        self.attend(given, out, lse, statistics)
        return RotaryResults(out, rotated, statistics)


def plan_forward(inputs: RotaryInputs, options: RotaryOptions) -> _ForwardPlan | Literal[False]:
    """Plans a forward, if it is one of those."""
    (qkv, theta), heads = inputs, options.heads
    if qkv.dtype == torch.float32 or qkv.numel() == 0:
        return False
    qk, v = split_values(qkv, heads)
    rotated = empty_in_order_of(qk, qk.shape[-1])
    q, k = split_keys(rotated, heads)
    encoding = LrpeOptions(kind=options.kind)
    rotate = lrpe.plan_forward(LrpeInputs(qk, theta), encoding, rotate_kernel, ("counters",))
    attend = attention.plan_forward(q, k, v, _CAUSAL, options.scale, "highest", True)
    parts = Part.of(k, rotated), Part.of(v, qkv)
    if not isinstance(attend.variant, attention.HopperForward):
        return False
    if not all(part.is_aligned_in(qkv) for part in parts):
        return False
    return _ForwardPlan(
        rotate.result, attend.out, attend.lse, attend.statistics, rotate.launch, attend.variant, *parts
    )  # fmt: skip


class _BackwardPlan(NamedTuple):
    """Plan of a backward, where attention is a launch each for keys and queries, or one for all."""

    gradient: Buffer  # of qkv
    attend: attention.SeparateBackward | attention.FusedBackward
    rotate: Launch
    k: Part  # of the rotated
    v: Part  # of qkv
    dk: Part  # of qkv's gradient
    dv: Part

    def __call__(self, grad: Tensor, inputs: RotaryInputs, results: RotaryResults) -> Tensor:
        (qkv, theta), (out, rotated, statistics) = inputs, results
        dqkv = self.gradient.empty(qkv)
        k, v, dk, dv = view(rotated, *self.k), view(qkv, *self.v), view(dqkv, *self.dk), view(dqkv, *self.dv)
        given = attention.BackwardInputs(grad, None, rotated, k, v, out, statistics, _CAUSAL)
        self.attend(given, (dqkv, dk, dv))
        self.rotate(*LrpeInputs(qkv, theta), dqkv, dqkv, None, 0)
        return dqkv


def plan_backward(
    grad: Tensor, inputs: RotaryInputs, results: RotaryResults, options: RotaryOptions
) -> _BackwardPlan | Literal[False]:
    """Plans a backward without theta's gradient, if it is one of those."""
    (qkv, theta), rotated, heads = inputs, results.rotated, options.heads
    if qkv.dtype == torch.float32 or qkv.numel() == 0:
        return False
    (qk, v), (q, k) = split_values(qkv, heads), split_keys(rotated, heads)
    dqkv = empty_in_order_of(qkv, qkv.shape[-1])
    dqk, dv = split_values(dqkv, heads)
    dq, dk = split_keys(dqk, heads)
    attend = attention.plan_backward(
        grad, None, q, k, v, results.out, _CAUSAL, options.scale, "highest", True, (dq, dk, dv)
    ).variant
    if isinstance(attend, attention.SeparateBackward):
        if not all(isinstance(x, attention.HopperGradient) for x in (attend.key, attend.query)):
            return False
    elif not isinstance(attend, attention.FusedBackward):
        return False
    parts = Part.of(k, rotated), Part.of(v, qkv), Part.of(dk, dqkv), Part.of(dv, dqkv)
    if not all(part.is_aligned_in(qkv) for part in parts):
        return False
    rotate = lrpe.plan_backward(dqk, LrpeInputs(qk, theta), LrpeOptions(kind=options.kind), False, dqk)
    return _BackwardPlan(Buffer.like(dqkv), attend, rotate.launch, *parts)
