"""LRPE as PyTorch operators: ``torch.ops.warploom.lrpe`` and its backward, with fake functions and autograd.

The registered operators serve whatever watches a call: `torch.compile`, `torch.func`, modes, meta and fake
tensors. A plain eager call does not need the dispatcher's six microseconds and goes to the same launchers directly
(`apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warploom.ops.lrpe import launches as launchers
from warploom.ops.lrpe.launches import Positions
from warploom.ops.lrpe.softmax_sequence.launches import portable
from warploom.runtime import plans
from warploom.runtime.eager import is_differentiated, is_plain_backward, is_plain_eager, refuse, register
from warploom.runtime.launch import Dense
from warploom.runtime.memory_order import empty_in_order, empty_in_order_of, layout_of, memory_order
from warploom.runtime.plans import Plans
from warploom.runtime.pytorch import apply_of

Tensor = torch.Tensor

_POSITIONS = (
    "Tensor? position_ids, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, SymInt prefix, SymInt[] grid"
)
_Run = Callable[[Tensor, Tensor, int], Tensor]  # from x, theta and an offset
_library = torch.library.Library("warploom", "FRAGMENT")
_plans = Plans()
"""Of the registered operators' calls."""

_NOTHING = Dense.rows((0,), torch.float32)
"""In the place of a result that a call has not."""


class Call(NamedTuple):
    """What a call is besides its tensors ``x`` and ``theta``."""

    positions: Positions
    kind: str  # cosine, rotate or interleaved
    activation: str
    plans: Plans | None = None  # of calls like this one, which is plain and eager; None of any other call
    table: Tensor | None = None  # stored cosines and sines, from `angle_table`
    block_parallel: bool = False  # softmax over the sequence in three launches

    @property
    def over_sequence(self) -> bool:
        """Whether statistics of the sequence are taken."""
        return self.activation == "softmax_sequence"

    def is_special(self) -> bool:
        """Whether it is one that registered operators do not know."""
        return self.table is not None or self.block_parallel

    def at(self, offset: int) -> Call:
        """The same call, its first token at this offset."""
        if offset == self.positions.offset:
            return self
        return self._replace(positions=self.positions._replace(offset=offset))


def _run_forward(x: Tensor, theta: Tensor, call: Call, theta_gradient: bool) -> tuple[Tensor, Tensor | None]:
    positions, kind, activation, known, table, block_parallel = call
    known = known or Plans()
    if activation == "softmax_sequence":
        return portable.forward(x, theta, positions, kind, theta_gradient, known, block_parallel=block_parallel)
    return launchers.forward(x, theta, positions, kind, activation, table, known), None


def _run_backward(
    grad: Tensor, x: Tensor | Dense, theta: Tensor, call: Call, statistics: Tensor | None, theta_gradient: bool,
    result: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x and theta. Of an x that is not read its layout is enough, or a ``result`` to write to."""
    positions, kind, activation, known, table, block_parallel = call
    known = known or Plans()
    if isinstance(x, Dense):
        x = result = x.empty(grad)
    if activation == "softmax_sequence":
        return portable.backward(
            grad, x, theta, positions, kind, statistics, theta_gradient, known, block_parallel=block_parallel
        )
    return launchers.backward(grad, x, theta, positions, kind, activation, theta_gradient, table, known, result)


def _like(x: Tensor) -> Dense:
    """What the gradient of x is: kept in the place of an x that the backward does not read."""
    return Dense.like(layout_of(x, x.shape[-1]))


# ----------------------------------------------------------------------------------------------------------
# Registered operators
# ----------------------------------------------------------------------------------------------------------


def _forward(x: Tensor, theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *arguments, theta_gradient = rest
    out, statistics = _run_forward(x, theta, _registered_call(x, theta, *arguments), theta_gradient)
    return out, _NOTHING.empty(x) if statistics is None else statistics


def _forward_fake(x: Tensor, theta: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    ids, offsets, cu_seqlens, offset, prefix, grid, kind, activation, _ = arguments
    out = empty_in_order_of(x, 2 * x.shape[-1] if kind == "cosine" else x.shape[-1])
    shape: tuple[Any, ...] = (0,)
    if activation == "softmax_sequence":
        positions = Positions(ids, offsets, cu_seqlens, offset, prefix, tuple(grid))
        shape = portable.statistics_shape(x, positions)
    return out, x.new_empty(shape, dtype=torch.float32)


def _backward(grad: Tensor, x: Tensor | None, theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *arguments, order, statistics, theta_gradient = rest
    result = None
    if x is None:
        x = result = _empty_gradient(grad, order, arguments[-2])
    call = _registered_call(x, theta, *arguments)
    dx, dtheta = _run_backward(grad, x, theta, call, statistics, theta_gradient, result)
    return dx, _NOTHING.empty(grad) if dtheta is None else dtheta


def _backward_fake(grad: Tensor, x: Tensor | None, theta: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *_, kind, _, order, _, theta_gradient = arguments
    dx = _empty_gradient(grad, order, kind)
    return dx, theta.new_empty(theta.shape) if theta_gradient else grad.new_empty(0, dtype=torch.float32)


def _empty_gradient(grad: Tensor, order: Sequence[int], kind: str) -> Tensor:
    """Uninitialised gradient of x, from that of the result and from the order of x's axes in memory."""
    features = grad.shape[-1] // 2 if kind == "cosine" else grad.shape[-1]
    return empty_in_order(grad, (*grad.shape[:-1], features), order)


def _registered_call(x: Tensor, theta: Tensor, *arguments: Any) -> Call:
    ids, offsets, cu_seqlens, offset, prefix, grid, kind, activation = arguments
    known = plans.of_registered(_plans, x, theta, ids, offsets, cu_seqlens, prefix, grid, kind, activation)
    return Call(Positions(ids, offsets, cu_seqlens, offset, prefix, tuple(grid)), kind, activation, known)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, theta, position_ids, offsets, cu_seqlens, *rest, activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    kept = x if launchers.reads_x(activation, ctx.needs_input_grad[1]) else None
    ctx.save_for_backward(kept, theta, position_ids, offsets, cu_seqlens, output[1])
    ctx.rest = (*rest, activation, memory_order(x))


def _registered_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, theta, *tensors, statistics = ctx.saved_tensors
    wants_x, wants_theta = ctx.needs_input_grad[:2]
    dx, dtheta = torch.ops.warploom.lrpe_backward(grad, x, theta, *tensors, *ctx.rest, statistics, wants_theta)
    return (dx if wants_x else None, dtheta if wants_theta else None, *[None] * 9)


# The second result is the statistics of softmax over the sequence, which its backward takes; else it is empty.
# ``theta_gradient``: whether theta's will be asked for; ``order``: of the axes of x in memory.
_CALL = f"Tensor theta, {_POSITIONS}, str kind, str activation"
register(
    _library, "lrpe", f"(Tensor x, {_CALL}, bool theta_gradient) -> (Tensor, Tensor)",
    _forward, _forward_fake, _registered_backward, _setup_context,
)  # fmt: skip
register(
    _library, "lrpe_backward",
    f"(Tensor grad, Tensor? x, {_CALL}, int[] order, Tensor statistics, bool theta_gradient) -> (Tensor, Tensor)",
    _backward, _backward_fake,
    refuse('lrpe kernels have no second derivative; call with backend="torch" for one'),
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------
# Plain eager calls
# ----------------------------------------------------------------------------------------------------------


def _arguments(call: Call) -> tuple[Any, ...]:
    """What a registered operator takes besides ``x`` and ``theta``."""
    *positions, grid = call.positions
    return *positions, list(grid), call.kind, call.activation


def _gradients(
    grad: Tensor, x: Tensor | Dense, theta: Tensor, call: Call, statistics: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and theta, as far as they are needed. ``x``: or what it is, if it was not saved."""
    dtheta: Tensor | None
    if call.is_special() or is_plain_backward(grad):
        dx, dtheta = _run_backward(grad, x, theta, call, statistics, needed[1])
    else:
        statistics = _NOTHING.empty(grad) if statistics is None else statistics
        saved, order = (None, x.order) if isinstance(x, Dense) else (x, memory_order(x))
        dx, dtheta = torch.ops.warploom.lrpe_backward(
            grad, saved, theta, *_arguments(call), order, statistics, needed[1]
        )
    return dx if needed[0] else None, dtheta if needed[1] else None


class _EagerLrpe(torch.autograd.Function):
    """The launchers with gradients, by the shortest way that autograd has for a plain eager call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor, call: Call) -> Tensor:
        wants_theta = ctx.needs_input_grad[1]
        out, statistics = _run_forward(x, theta, call, wants_theta)
        ctx.like = None
        if not launchers.reads_x(call.activation, wants_theta):
            ctx.like = (call.plans or Plans()).get("gradient", _like, x)
        # The tensors among the positions are saved, so that autograd sees when one is changed in place.
        ctx.save_for_backward(None if ctx.like else x, theta, statistics, *call.positions[:3])
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, theta, statistics, *_ = ctx.saved_tensors
        return *_gradients(grad, ctx.like or x, theta, ctx.call, statistics, ctx.needs_input_grad), None


class _PreparedLrpe(torch.autograd.Function):
    """The same for a call whose forward is prepared. All but its tensors is one argument: each takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor, rest: tuple[_Run, Call, int, Dense | None]) -> Tensor:
        run, _, offset, like = ctx.rest = rest
        ctx.save_for_backward(None if like else x, theta)
        return run(x, theta, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, theta = ctx.saved_tensors
        _, call, offset, like = ctx.rest
        return *_gradients(grad, like or x, theta, call.at(offset), None, ctx.needs_input_grad), None


# `torch.autograd.Function.apply` looks for function transforms, and for tensors that outlived one, before it calls
# this. Where calls are prepared for are none of either.
_apply_prepared: Any = apply_of(_PreparedLrpe)


def apply(x: Tensor, theta: Tensor, call: Call) -> Tensor:
    """Run LRPE on the Triton kernels, differentiably, by the shortest way that this call allows.

    A call with a ``table`` or ``block_parallel`` must be a plain eager one, and so must its backward.
    """
    tensors = [t for t in call.positions[:3] if t is not None]
    if call.plans is not None or call.is_special() or is_plain_eager(x, theta, *tensors):
        if torch.is_grad_enabled() and (x.requires_grad or theta.requires_grad):
            return _EagerLrpe.apply(x, theta, call)  # type: ignore[no-any-return]
        return _run_forward(x, theta, call, False)[0]
    arguments = (*_arguments(call), is_differentiated(theta))
    return torch.ops.warploom.lrpe(x, theta, *arguments)[0]  # type: ignore[no-any-return]


def prepared(x: Tensor, theta: Tensor, call: Call) -> _Run:
    """What runs calls like one that `apply` has run, at any offset; see `warploom.runtime.plans.recognise`.

    The ``call`` has plans, and no tensors among its positions.
    """
    plan = None if call.plans is None else call.plans.find("forward")
    if plan is None or call.over_sequence:
        return lambda x, theta, offset: apply(x, theta, call.at(offset))
    run = launchers.prepared(plan)
    if not (x.requires_grad or theta.requires_grad):
        return run

    like = None if launchers.reads_x(call.activation, theta.requires_grad) else _like(x)

    def differentiate(x: Tensor, theta: Tensor, offset: int) -> Tensor:
        if torch.is_grad_enabled():
            return _apply_prepared(x, theta, (run, call, offset, like))  # type: ignore[no-any-return]
        return run(x, theta, offset)

    return differentiate


def angle_table(x: Tensor, theta: Tensor, positions: Positions, kind: str) -> Tensor:
    """Cosines and sines (N, 1 or H, 2·F) in float32 of every angle in a call, for positions that batches share."""
    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    heads = theta.shape[0] if theta.dim() == 2 else 1
    ones = torch.ones((1, x.shape[1], heads, features), dtype=torch.float32, device=x.device)
    return launchers.forward(ones, theta.detach(), positions, "cosine", "none", None, Plans())[0]
