"""Launches of rotary attention: those of its two operators, on parts of the same tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from warploom.ops.flash_attention.launches import backward as attention_backward
from warploom.ops.flash_attention.launches import forward as attention_forward
from warploom.ops.flash_attention.launches.tiling import COUNTERS
from warploom.ops.flash_attention.problem import Mask
from warploom.ops.lrpe import launches as positions
from warploom.ops.lrpe.problem import Positions
from warploom.ops.rotary_attention.problem import queries_and_keys, split
from warploom.runtime.launch import ALIGNMENT, Dense, Launch, are_aligned
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans
from warploom.runtime.pytorch import view

Tensor = torch.Tensor

_CAUSAL = Mask(right=0)
_FROM_ZERO = Positions()


def forward(
    qkv: Tensor, theta: Tensor, heads: int, kind: str, scale: float, known: Plans
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention (B, N, H, D), the turned queries and keys (B, N, H + Hkv, D), and attention's statistics."""
    plan = known.get("forward", plan_forward, qkv, theta, heads, kind, scale)
    if plan and are_aligned(qkv):
        return plan(qkv, theta)
    of_positions, of_attention = known.get("positions", Plans), known.get("attention", Plans)
    qk, v = split(qkv, heads)
    counters = COUNTERS.empty(qkv)
    turned = positions.forward(qk, theta, _FROM_ZERO, kind, "none", None, of_positions, counters)
    q, k = queries_and_keys(turned, heads)
    out, _, statistics = attention_forward.forward(q, k, v, _CAUSAL, scale, None, of_attention, counters)
    return out, turned, statistics


def backward(
    grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, statistics: Tensor,
    heads: int, kind: str, scale: float, theta_gradient: bool, known: Plans,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of ``qkv`` and, where it is asked for, of ``theta``."""
    if not theta_gradient:
        # Strides, because what autograd saved may come back with others: from the host's memory, for one.
        key = (grad.dtype, grad.stride(), out.stride(), turned.stride())
        plan = known.get(key, plan_backward, grad, qkv, theta, out, turned, heads, kind, scale)
        if plan and are_aligned(grad, qkv, turned):
            return plan(grad, qkv, theta, out, turned, statistics), None
    of_positions, of_attention = known.get("positions", Plans), known.get("attention", Plans)
    dqkv = known.get("gradient", _like, qkv).empty(qkv)
    dqk, dv = split(dqkv, heads)
    qk, v = split(qkv, heads)
    (q, k), (dq, dk) = queries_and_keys(turned, heads), queries_and_keys(dqk, heads)
    attention_backward.backward(
        grad, None, q, k, v, out, statistics, _CAUSAL, scale, None, of_attention, (dq, dk, dv)
    )
    _, dtheta = positions.backward(
        dqk, qk, theta, _FROM_ZERO, kind, "none", theta_gradient, None, of_positions, dqk
    )
    return dqkv, dtheta


def _like(x: Tensor) -> Dense:
    return Dense.like(layout_of(x, x.shape[-1]))


class Part(NamedTuple):
    """Where some of a tensor's heads are. A kernel is told strides beforehand, so the first heads need no view."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> Part:
        """That of a view of a tensor."""
        return cls(tuple(part.shape), part.stride(), int(part.storage_offset() - whole.storage_offset()))

    def is_aligned_in(self, whole: Tensor) -> bool:
        """Whether it can have a descriptor where the whole can: the strides of a single head do not say so."""
        return self.offset * whole.element_size() % ALIGNMENT == 0


_NOTHING = (None,) * 5
"""No lengths, no packed sequences (units, shifts and results), no sink."""


class _Forward(NamedTuple):
    """What a forward allocates and launches, where attention is one launch of the kernel for Hopper."""

    turned: Dense
    out: Dense
    lse: Dense
    statistics: Dense
    turn: Launch
    attend: Launch
    k: Part  # of the turned
    v: Part  # of qkv

    def __call__(self, qkv: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned, out = self.turned.empty(qkv), self.out.empty(qkv)
        lse, statistics = self.lse.empty(qkv), self.statistics.empty(qkv)
        counters = COUNTERS.empty(qkv)
        positions.launch_forward(self.turn, qkv, turned, theta, _FROM_ZERO, counters=counters)
        k, v = view(turned, *self.k), view(qkv, *self.v)
        self.attend(turned, k, v, out, lse, statistics, counters, *_NOTHING)
        return out, turned, statistics


def plan_forward(qkv: Tensor, theta: Tensor, heads: int, kind: str, scale: float) -> _Forward | Literal[False]:
    """The plan of a forward, if it is one of those."""
    if qkv.dtype == torch.float32 or qkv.numel() == 0:
        return False
    qk, v = split(qkv, heads)
    turned = empty_in_order_of(qk, qk.shape[-1])
    q, k = queries_and_keys(turned, heads)
    turn = positions.plan_forward(qk, theta, _FROM_ZERO, kind, "none", None)
    attend = attention_forward.plan_forward(q, k, v, _CAUSAL, scale, "highest", True)
    parts = Part.of(k, turned), Part.of(v, qkv)
    if attend.launch is None or not attend.launch.descriptions or attend.combine is not None:
        return False
    if not all(part.is_aligned_in(qkv) for part in parts):
        return False
    return _Forward(
        turn.result, attend.out, attend.lse, attend.statistics, turn.launch, attend.launch, *parts
    )  # fmt: skip


class _Backward(NamedTuple):
    """The same for a backward, where attention is a launch each for keys and queries, or one for all."""

    gradient: Dense  # of qkv
    attend: attention_backward.Plan
    turn: Launch
    k: Part  # of the turned
    v: Part  # of qkv
    dk: Part  # of qkv's gradient, as is the next
    dv: Part

    def __call__(
        self, grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, statistics: Tensor
    ) -> Tensor:
        dqkv = self.gradient.empty(qkv)
        k, v, dk, dv = view(turned, *self.k), view(qkv, *self.v), view(dqkv, *self.dk), view(dqkv, *self.dv)
        attention_backward.launch_backward(
            self.attend, grad, None, turned, k, v, out, statistics, _CAUSAL, (dqkv, dk, dv)
        )
        positions.launch_backward(self.turn, qkv, dqkv, dqkv, theta, _FROM_ZERO)
        return dqkv


def plan_backward(
    grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, heads: int, kind: str, scale: float
) -> _Backward | Literal[False]:
    """The plan of a backward without theta's gradient, if it is one of those."""
    if qkv.dtype == torch.float32 or qkv.numel() == 0:
        return False
    (qk, v), (q, k) = split(qkv, heads), queries_and_keys(turned, heads)
    dqkv = empty_in_order_of(qkv, qkv.shape[-1])
    dqk, dv = split(dqkv, heads)
    dq, dk = queries_and_keys(dqk, heads)
    attend = attention_backward.plan_backward(
        grad, None, q, k, v, out, _CAUSAL, scale, "highest", True, (dq, dk, dv)
    )
    if attend.prepare is None or not attend.kernels:
        return False
    if any(not each.launch.descriptions or each.splits > 1 for each in attend.kernels):
        return False
    parts = Part.of(k, turned), Part.of(v, qkv), Part.of(dk, dqkv), Part.of(dv, dqkv)
    if attend.apart or not all(part.is_aligned_in(qkv) for part in parts):
        return False
    turn = positions.plan_backward(dqk, qk, theta, _FROM_ZERO, kind, "none", False, None, dqk)
    return _Backward(Dense.like(dqkv), attend, turn.launch, *parts)
