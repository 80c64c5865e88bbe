"""LRPE as PyTorch operators: ``torch.ops.warploom.lrpe`` and its backward, with fake functions and autograd.

The registered operators serve `torch.compile`, meta and fake tensors. A plain eager call does not need the
dispatcher's six microseconds and goes to the same launchers directly (`apply`), and so does `torch.func`, which
registered operators with an autograd formula do not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.eager import is_plain_eager, stack_over_batch
from warploom.layout import empty_in_order_of
from warploom.ops.lrpe import launchers
from warploom.ops.lrpe.launchers import Positions

Tensor = torch.Tensor

_POSITIONS = (
    "Tensor? position_ids, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, SymInt prefix, SymInt[] grid"
)
_library = torch.library.Library("warploom", "FRAGMENT")
_library.define(f"lrpe(Tensor x, Tensor theta, {_POSITIONS}, str kind, str activation) -> Tensor")
_library.define(
    f"lrpe_backward(Tensor grad, Tensor x, Tensor theta, {_POSITIONS}, str kind, str activation, "
    "bool theta_gradient) -> (Tensor, Tensor)"
)


def _forward(
    x: Tensor,
    theta: Tensor,
    position_ids: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    prefix: int,
    grid: Sequence[int],
    kind: str,
    activation: str,
) -> Tensor:
    positions = Positions(position_ids, offsets, cu_seqlens, offset, prefix, tuple(grid))
    return launchers.forward(x, theta, positions, kind, activation)


def _forward_fake(x: Tensor, theta: Tensor, *arguments: Any) -> Tensor:
    kind = arguments[-2]
    return empty_in_order_of(x, 2 * x.shape[-1] if kind == "cosine" else x.shape[-1])


def _backward(
    grad: Tensor,
    x: Tensor,
    theta: Tensor,
    position_ids: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    prefix: int,
    grid: Sequence[int],
    kind: str,
    activation: str,
    theta_gradient: bool,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    positions = Positions(position_ids, offsets, cu_seqlens, offset, prefix, tuple(grid))
    dx, dtheta = launchers.backward(grad, x, theta, positions, kind, activation, theta_gradient, table)
    return dx, theta.new_empty(0) if dtheta is None else dtheta


def _backward_fake(grad: Tensor, x: Tensor, theta: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    theta_gradient = arguments[-1]
    dx = empty_in_order_of(x, x.shape[-1])
    return dx, theta.new_empty(theta.shape if theta_gradient else 0)


for _device in ("CUDA", "CPU"):  # on a CPU the kernels run in Triton's interpreter
    _library.impl("lrpe", _forward, _device)
    _library.impl("lrpe_backward", _backward, _device)
torch.library.register_fake("warploom::lrpe", _forward_fake, lib=_library)
torch.library.register_fake("warploom::lrpe_backward", _backward_fake, lib=_library)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, theta, position_ids, offsets, cu_seqlens, *rest = inputs
    ctx.save_for_backward(x, theta, position_ids, offsets, cu_seqlens)
    ctx.rest = rest


def _registered_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, theta, *tensors = ctx.saved_tensors
    wants_x, wants_theta = ctx.needs_input_grad[:2]
    dx, dtheta = torch.ops.warploom.lrpe_backward(grad, x, theta, *tensors, *ctx.rest, wants_theta)
    return (dx if wants_x else None, dtheta if wants_theta else None, *[None] * 8)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError('lrpe kernels have no second derivative; call with backend="torch" for one')


torch.library.register_autograd("warploom::lrpe", _registered_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("warploom::lrpe_backward", _no_double_backward, lib=_library)


class _LrpeBackward(torch.autograd.Function):
    """The backward as a function of its own: `torch.func` unwraps its arguments, and its gradient raises."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return _backward(grad, x, theta, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass

    backward = staticmethod(_no_double_backward)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return stack_over_batch(_LrpeBackward, info, in_dims, inputs)


class _Lrpe(torch.autograd.Function):
    """The launchers with gradients and without the dispatcher in between; also what `torch.func` sees."""

    @staticmethod
    def forward(x: Tensor, theta: Tensor, *rest: Any) -> Tensor:
        *positions, kind, activation, table = rest
        return launchers.forward(x, theta, Positions(*positions), kind, activation, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, theta, position_ids, offsets, cu_seqlens, *ctx.rest, table = inputs
        ctx.save_for_backward(x, theta, position_ids, offsets, cu_seqlens, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, table = ctx.saved_tensors
        wants_x, wants_theta = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():  # someone wants a graph of this
            dx, dtheta = _LrpeBackward.apply(grad, *tensors, *ctx.rest, wants_theta, table)
        else:
            dx, dtheta = _backward(grad, *tensors, *ctx.rest, wants_theta, table)  # type: ignore[call-arg]
        return dx if wants_x else None, dtheta if wants_theta else None, *[None] * 9

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return stack_over_batch(_Lrpe, info, in_dims, inputs)


def apply(
    x: Tensor, theta: Tensor, positions: Positions, kind: str, activation: str, table: Tensor | None = None
) -> Tensor:
    """Run LRPE on the Triton kernels, differentiably, by the shortest way that this call allows.

    With ``table``, from `angle_table`, cosines and sines are read instead of computed (plain eager calls only).
    """
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return _Lrpe.apply(x, theta, *positions, kind, activation, table)  # type: ignore[no-any-return]
    if table is not None or is_plain_eager(x, theta):
        if torch.is_grad_enabled() and (x.requires_grad or theta.requires_grad):
            return _Lrpe.apply(x, theta, *positions, kind, activation, table)  # type: ignore[no-any-return]
        return launchers.forward(x, theta, positions, kind, activation, table)
    return torch.ops.warploom.lrpe(  # type: ignore[no-any-return]
        x, theta, *positions[:3], positions.offset, positions.prefix, list(positions.grid), kind, activation
    )


def angle_table(x: Tensor, theta: Tensor, positions: Positions, kind: str) -> Tensor:
    """Cosines and sines (N, 1 or H, 2·F) in float32 of every angle in a call, for positions that batches share."""
    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    heads = theta.shape[0] if theta.dim() == 2 else 1
    ones = torch.ones((1, x.shape[1], heads, features), dtype=torch.float32, device=x.device)
    return launchers.forward(ones, theta.detach(), positions, "cosine", "none")[0]
