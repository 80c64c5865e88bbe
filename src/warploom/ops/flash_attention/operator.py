"""Flash attention as PyTorch operators: ``torch.ops.warploom.flash_attention`` and its backward.

The registered operators, with fake functions and autograd, serve whatever watches a call: `torch.compile`,
`torch.func`, modes, meta and fake tensors. A plain eager call goes to the same launchers directly (`apply`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from warploom.ops.flash_attention.launches import portable as launchers
from warploom.ops.flash_attention.problem import Mask
from warploom.runtime import plans
from warploom.runtime.eager import attention_pairs, is_plain_backward, is_plain_eager, refuse, register
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans
from warploom.runtime.pytorch import apply_of

Tensor = torch.Tensor

_REST = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? left, SymInt? right, float scale, str? precision"
_library = torch.library.Library("warploom", "FRAGMENT")
_plans = Plans()
"""Of the registered operators' calls."""


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    precision: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = Mask(left, right, cu_seqlens_q, cu_seqlens_k)
    known = plans.of_registered(_plans, q, k, v, cu_seqlens_q, cu_seqlens_k, left, right, scale)
    return launchers.forward(q, k, v, mask, scale, precision, known)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    return empty_in_order_of(q, v.shape[-1]), lse, lse.new_empty((2, *lse.shape))


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    precision: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = Mask(left, right, cu_seqlens_q, cu_seqlens_k)
    known = plans.of_registered(_plans, q, k, v, cu_seqlens_q, cu_seqlens_k, left, right, scale)
    return launchers.backward(grad, grad_lse, q, k, v, out, statistics, mask, scale, precision, known)


def _backward_fake(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_in_order_of(q, q.shape[-1]), empty_in_order_of(k, k.shape[-1]), empty_in_order_of(v, v.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.rest = inputs
    out, _, statistics = output
    ctx.save_for_backward(q, k, v, out, statistics, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # lse has a gradient only where it was asked for


def _registered_backward(
    ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if grad is None and grad_lse is None:
        return (None,) * 9
    saved = ctx.saved_tensors  # once: under activation checkpointing they can be had only once
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    found = torch.ops.warploom.flash_attention_backward(grad, grad_lse, *saved, *ctx.rest)
    return *(g if wants else None for g, wants in zip(found, ctx.needs_input_grad)), *[None] * 6


def _flops(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *rest: Any, **_: Any
) -> int:
    """Two products for every query and key, hidden or not, as PyTorch counts its own attention."""
    pairs = attention_pairs(q, k, cu_seqlens_q, cu_seqlens_k)
    return 2 * pairs * q.shape[2] * (q.shape[3] + v.shape[3])


def _backward_flops(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *rest: Any, **_: Any,
) -> int:  # fmt: skip
    """Five products: of q and k anew, and for the gradients of the weights, of v, q and k."""
    pairs = attention_pairs(q, k, cu_seqlens_q, cu_seqlens_k)
    return 2 * pairs * q.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


register(
    _library, "flash_attention", f"(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor, Tensor, Tensor)",
    _forward, _forward_fake, _registered_backward, _setup_context, _flops,
)  # fmt: skip
register(
    _library,
    "flash_attention_backward",
    f"(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, {_REST}) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    refuse('flash_attention kernels have no second derivative; call with backend="torch" for one'),
    flops=_backward_flops,
)


class Call(NamedTuple):
    """What a call is besides ``q``, ``k`` and ``v``."""

    mask: Mask
    scale: float
    precision: str | None
    with_lse: bool
    plans: Plans | None = None  # of calls like this one, which is plain and eager; None of any other call


class _EagerFlashAttention(torch.autograd.Function):
    """The launchers with gradients, by the shortest way that autograd has for a plain eager call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | tuple[Tensor, Tensor]:
        out, lse, statistics = launchers.forward(q, k, v, *call[:3], call.plans or Plans())
        # The tensors of the mask are saved, so that autograd sees when one is changed in place.
        ctx.save_for_backward(q, k, v, out, statistics, *call.mask[2:])
        ctx.call = call
        if not call.with_lse:
            return out
        ctx.set_materialize_grads(False)  # either of the two may have no gradient
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 4
        call: Call = ctx.call
        saved = ctx.saved_tensors  # once: under activation checkpointing they can be had only once
        q, k, v, out, statistics, *_ = saved
        if grad is None:
            grad = torch.zeros_like(out)
        if is_plain_backward(*(g for g in (grad, grad_lse) if g is not None)):
            found = launchers.backward(grad, grad_lse, q, k, v, out, statistics, *call[:3], call.plans or Plans())
        else:
            rest = (*call.mask[:2], call.scale, call.precision)
            found = torch.ops.warploom.flash_attention_backward(grad, grad_lse, *saved, *rest)
        wants_q, wants_k, wants_v, _ = ctx.needs_input_grad
        dq, dk, dv = found
        return dq if wants_q else None, dk if wants_k else None, dv if wants_v else None, None


# `torch.autograd.Function.apply` looks for function transforms, and for tensors that outlived one, before it calls
# this. Where calls are prepared for are none of either.
_apply_prepared: Any = apply_of(_EagerFlashAttention)


def apply(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Run attention on the Triton kernels, differentiably, by the shortest way that this call allows.

    Returns:
        Attention (B, N, Hq, E); with ``call.with_lse`` also lse (B, Hq, N) in float32.
    """
    left, right, *sequences = call.mask
    if call.plans is not None or is_plain_eager(q, k, v, *(t for t in sequences if t is not None)):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _EagerFlashAttention.apply(q, k, v, call)  # type: ignore[no-any-return]
        out, lse, _ = launchers.forward(q, k, v, *call[:3], call.plans or Plans())
    else:
        rest = (*sequences, left, right, call.scale, call.precision)
        out, lse, _ = torch.ops.warploom.flash_attention(q, k, v, *rest)
    return (out, lse) if call.with_lse else out


def prepared(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """What runs calls like one that `apply` has run, as `warploom.runtime.plans.recognise` tells them.

    The ``call`` has plans, and no packed sequences.
    """
    mask, scale, precision, with_lse, known = call
    known = known or Plans()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out, lse, _ = launchers.forward(q, k, v, mask, scale, precision, known)
        return (out, lse) if with_lse else out

    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return run

    def differentiate(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return _apply_prepared(q, k, v, call) if torch.is_grad_enabled() else run(q, k, v)

    return differentiate
