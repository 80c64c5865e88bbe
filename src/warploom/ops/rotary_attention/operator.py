"""Rotary positions and causal attention, from one projection to queries, keys and values, as a single operator.

It runs the kernels of `warploom.lrpe_rotate` and `warploom.flash_attention`. One after the other, these leave the
gradients of queries, keys and values in tensors of their own, which autograd then copies side by side, once for the
positions and once for the projection. Here the kernels write them where they belong, and a layer enters PyTorch's
dispatcher once in each direction, where a small model waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from warploom.ops.flash_attention.launches import portable as attention
from warploom.ops.flash_attention.launches.order import launch_forward, launch_prepare, launch_walk
from warploom.ops.flash_attention.problem import Mask
from warploom.ops.lrpe import launches as positions
from warploom.runtime import plans
from warploom.runtime.eager import attention_pairs, is_plain_backward, is_plain_eager, refuse, register
from warploom.runtime.launch import ALIGNMENT, Dense, Launch
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.plans import Plans
from warploom.runtime.pytorch import view

__all__ = ["rotary_attention"]

Tensor = torch.Tensor

_CAUSAL = Mask(right=0)
_FROM_ZERO = positions.Positions()
_NOTHING = Dense.rows((0,), torch.float32)
_library = torch.library.Library("warploom", "FRAGMENT")
_plans = Plans()


def _forward(qkv: Tensor, theta: Tensor, heads: int, kind: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention (B, N, H, D), the turned queries and keys (B, N, H + Hkv, D), and attention's statistics."""
    known = plans.of_registered(_plans, qkv, theta, heads, kind, scale)
    plan = known.get("forward", _plan_forward, qkv, theta, heads, kind, scale)
    if plan and qkv.data_ptr() % ALIGNMENT == 0:
        return plan(qkv, theta)
    of_positions, of_attention = known.get("positions", Plans), known.get("attention", Plans)
    qk, v = _split(qkv, heads)
    tickets = attention.TICKETS.empty(qkv)
    turned = positions.forward(qk, theta, _FROM_ZERO, kind, "none", None, of_positions, tickets)
    q, k = _queries_and_keys(turned, heads)
    out, _, statistics = attention.forward(q, k, v, _CAUSAL, scale, None, of_attention, tickets)
    return out, turned, statistics


def _backward(
    grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, statistics: Tensor,
    heads: int, kind: str, scale: float, theta_gradient: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of ``qkv`` and, where it is asked for, of ``theta``."""
    known = plans.of_registered(_plans, qkv, theta, heads, kind, scale)
    if not theta_gradient:
        # Strides, because what autograd saved may come back with others: from the host's memory, for one.
        key = (grad.dtype, grad.stride(), out.stride(), turned.stride())
        plan = known.get(key, _plan_backward, grad, qkv, theta, out, turned, heads, kind, scale)
        if plan and (grad.data_ptr() | qkv.data_ptr() | turned.data_ptr()) % ALIGNMENT == 0:
            return plan(grad, qkv, theta, out, turned, statistics), None
    of_positions, of_attention = known.get("positions", Plans), known.get("attention", Plans)
    dqkv = known.get("gradient", _like, qkv).empty(qkv)
    dqk, dv = _split(dqkv, heads)
    qk, v = _split(qkv, heads)
    (q, k), (dq, dk) = _queries_and_keys(turned, heads), _queries_and_keys(dqk, heads)
    attention.backward(grad, None, q, k, v, out, statistics, _CAUSAL, scale, None, of_attention, (dq, dk, dv))
    _, dtheta = positions.backward(
        dqk, qk, theta, _FROM_ZERO, kind, "none", theta_gradient, None, of_positions, dqk
    )
    return dqkv, dtheta


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(B, N, H + 2·Hkv, D) to (B, N, H + Hkv, D) and (B, N, Hkv, D)."""
    kv_heads = (qkv.shape[2] - heads) // 2
    qk, v = torch.split_with_sizes(qkv, (heads + kv_heads, kv_heads), 2)
    return qk, v


def _queries_and_keys(qk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(B, N, H + Hkv, D) to (B, N, H, D) and (B, N, Hkv, D)."""
    q, k = torch.split_with_sizes(qk, (heads, qk.shape[2] - heads), 2)
    return q, k


def _like(x: Tensor) -> Dense:
    return Dense.like(layout_of(x, x.shape[-1]))


class _Part(NamedTuple):
    """Where some of a tensor's heads are. A kernel is told strides beforehand, so the first heads need no view."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> _Part:
        return cls(tuple(part.shape), part.stride(), int(part.storage_offset() - whole.storage_offset()))

    def is_aligned_in(self, whole: Tensor) -> bool:
        """Whether it can have a descriptor where the whole can: the strides of a single head do not say so."""
        return self.offset * whole.element_size() % ALIGNMENT == 0


class _Forward(NamedTuple):
    """What a forward allocates and launches, where attention is one launch of the kernel for Hopper."""

    turned: Dense
    out: Dense
    lse: Dense
    statistics: Dense
    turn: Launch
    attend: Launch
    k: _Part  # of the turned
    v: _Part  # of qkv

    def __call__(self, qkv: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned, out = self.turned.empty(qkv), self.out.empty(qkv)
        lse, statistics = self.lse.empty(qkv), self.statistics.empty(qkv)
        tickets = attention.TICKETS.empty(qkv)
        positions.launch_forward(self.turn, qkv, turned, theta, _FROM_ZERO, tickets=tickets)
        k, v = view(turned, *self.k), view(qkv, *self.v)
        launch_forward(self.attend, turned, k, v, out, lse, statistics, tickets)
        return out, turned, statistics


def _plan_forward(qkv: Tensor, theta: Tensor, heads: int, kind: str, scale: float) -> _Forward | Literal[False]:
    """The plan of a forward, if it is one of those."""
    if qkv.dtype == torch.float32 or qkv.numel() == 0:
        return False
    qk, v = _split(qkv, heads)
    turned = empty_in_order_of(qk, qk.shape[-1])
    q, k = _queries_and_keys(turned, heads)
    turn = positions.plan_forward(qk, theta, _FROM_ZERO, kind, "none", None)
    attend = attention.plan_forward(q, k, v, _CAUSAL, scale, "highest", True)
    parts = _Part.of(k, turned), _Part.of(v, qkv)
    if attend.launch is None or not attend.launch.descriptions or attend.combine is not None:
        return False
    if not all(part.is_aligned_in(qkv) for part in parts):
        return False
    return _Forward(
        turn.result, attend.out, attend.lse, attend.statistics, turn.launch, attend.launch, *parts
    )  # fmt: skip


class _Backward(NamedTuple):
    """The same for a backward, where attention is one launch each for keys with values and for queries."""

    gradient: Dense  # of qkv
    rows: Dense
    prepare: Launch
    key: Launch
    query: Launch
    turn: Launch
    k: _Part  # of the turned
    v: _Part  # of qkv
    dk: _Part  # of qkv's gradient, as is the next
    dv: _Part

    def __call__(
        self, grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, statistics: Tensor
    ) -> Tensor:
        dqkv, shift, delta = self.gradient.empty(qkv), self.rows.empty(qkv), self.rows.empty(qkv)
        tickets = attention.TICKETS.empty(qkv)
        launch_prepare(self.prepare, out, grad, statistics, None, shift, delta, None, tickets)
        k, v, dk, dv = view(turned, *self.k), view(qkv, *self.v), view(dqkv, *self.dk), view(dqkv, *self.dv)
        tensors, numbers = (turned, k, v, grad), (shift, delta)
        launch_walk(self.key, tensors, (dk, dv), numbers, tickets)
        launch_walk(self.query, tensors, (dqkv,), numbers, tickets)
        positions.launch_backward(self.turn, qkv, dqkv, dqkv, theta, _FROM_ZERO)
        return dqkv


def _plan_backward(
    grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, heads: int, kind: str, scale: float
) -> _Backward | Literal[False]:
    """The plan of a backward without theta's gradient, if it is one of those."""
    if qkv.dtype == torch.float32 or qkv.numel() == 0:
        return False
    (qk, v), (q, k) = _split(qkv, heads), _queries_and_keys(turned, heads)
    dqkv = empty_in_order_of(qkv, qkv.shape[-1])
    dqk, dv = _split(dqkv, heads)
    dq, dk = _queries_and_keys(dqk, heads)
    attend = attention.plan_backward(grad, None, q, k, v, out, _CAUSAL, scale, "highest", True, (dq, dk, dv))
    whole = [walk.launch for walk in attend.walks if walk.launch.descriptions and walk.splits == 1]
    if attend.prepare is None or [walk.kernel for walk in attend.walks] != ["key", "query"] or len(whole) != 2:
        return False
    parts = _Part.of(k, turned), _Part.of(v, qkv), _Part.of(dk, dqkv), _Part.of(dv, dqkv)
    if attend.apart or not all(part.is_aligned_in(qkv) for part in parts):
        return False
    turn = positions.plan_backward(dqk, qk, theta, _FROM_ZERO, kind, "none", False, None, dqk)
    return _Backward(
        Dense.like(dqkv), attend.rows, attend.prepare, whole[0], whole[1], turn.launch, *parts
    )  # fmt: skip


def _registered_backward(grad: Tensor, qkv: Tensor, theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dqkv, dtheta = _backward(grad, qkv, theta, *rest)
    return dqkv, _NOTHING.empty(qkv) if dtheta is None else dtheta


def _forward_fake(qkv: Tensor, theta: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _, features = qkv.shape
    turned = empty_in_order_of(_split(qkv, heads)[0], features)
    out = empty_in_order_of(_queries_and_keys(turned, heads)[0], features)
    return out, turned, qkv.new_empty((2, batch, heads, tokens), dtype=torch.float32)


def _backward_fake(grad: Tensor, qkv: Tensor, theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    theta_gradient = rest[-1]
    dtheta = theta.new_empty(theta.shape) if theta_gradient else qkv.new_empty(0, dtype=torch.float32)
    return empty_in_order_of(qkv, qkv.shape[-1]), dtheta


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, theta, *ctx.rest = inputs
    ctx.save_for_backward(qkv, theta, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, run: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    wants_qkv, wants_theta = ctx.needs_input_grad[:2]
    dqkv, dtheta = run(grad, *ctx.saved_tensors, *ctx.rest, wants_theta)
    return dqkv if wants_qkv else None, dtheta if wants_theta else None, None, None, None


def _of_registered(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return _gradients(ctx, grad, torch.ops.warploom.rotary_attention_backward)


def _flops(qkv: Tensor, theta: Tensor, heads: int, *rest: Any, **_: Any) -> int:
    """Those of attention: two products for every query and key, hidden or not."""
    return 4 * attention_pairs(qkv, qkv, None, None) * heads * qkv.shape[3]


def _backward_flops(
    grad: Tensor, qkv: Tensor, theta: Tensor, out: Tensor, turned: Tensor, statistics: Tensor, heads: int,
    *rest: Any, **_: Any,
) -> int:  # fmt: skip
    """Five products."""
    return _flops(qkv, theta, heads) // 2 * 5


register(
    _library,
    "rotary_attention",
    "(Tensor qkv, Tensor theta, int heads, str kind, float scale) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _of_registered,
    _setup_context,
    _flops,
)
register(
    _library,
    "rotary_attention_backward",
    "(Tensor grad, Tensor qkv, Tensor theta, Tensor out, Tensor turned, Tensor statistics, "
    "int heads, str kind, float scale, bool theta_gradient) -> (Tensor, Tensor)",
    _registered_backward,
    _backward_fake,
    refuse("attention on the kernels has no second derivative"),
    flops=_backward_flops,
)


class _Eager(torch.autograd.Function):
    """The launchers with gradients, by the shortest way that autograd has for a plain eager call."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, theta: Tensor, heads: int, kind: str, scale: float) -> Tensor:
        out, turned, statistics = _forward(qkv, theta, heads, kind, scale)
        ctx.save_for_backward(qkv, theta, out, turned, statistics)
        ctx.rest = (heads, kind, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain = is_plain_backward(grad)
        return _gradients(ctx, grad, _backward if plain else torch.ops.warploom.rotary_attention_backward)


def rotary_attention(qkv: Tensor, theta: Tensor, heads: int, scale: float, *, interleaved: bool = False) -> Tensor:
    """Causal attention of queries and keys that are turned by their positions, counted from zero.

    Args:
        qkv: ``(B, N, H + 2·Hkv, D)``: the heads of queries, keys and values, on a GPU; any strides.
        theta: ``(F,)`` or ``(1, F)``: frequencies in radians per position, see `warploom.lrpe_rotate`.
        heads: ``H``.
        scale: Factor of the inner products.
        interleaved: Pair neighbouring features instead of halves.

    Returns:
        ``(B, N, H, D)``.
    """
    kind = "interleaved" if interleaved else "rotate"
    if not is_plain_eager(qkv, theta):
        return torch.ops.warploom.rotary_attention(qkv, theta, heads, kind, scale)[0]  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and (qkv.requires_grad or theta.requires_grad):
        return _Eager.apply(qkv, theta, heads, kind, scale)  # type: ignore[no-any-return]
    return _forward(qkv, theta, heads, kind, scale)[0]
