"""Tensor-product attention as PyTorch operators: ``torch.ops.warploom.tpa_attention``, backward, ``tpa_decode``.

The registered operators serve whatever watches a call: `torch.compile`, `torch.func`, modes, meta and fake tensors.
A plain eager call goes to the same launchers directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.tpa.attention.launches import portable
from warploom.ops.tpa.attention.problem import Call
from warploom.ops.tpa.decode.launches import portable as launchers
from warploom.ops.tpa.decode.launches.portable import DecodeCall
from warploom.ops.tpa.problem import Operands
from warploom.runtime import plans
from warploom.runtime.eager import attention_pairs, is_plain_backward, is_plain_eager, refuse, register
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans
from warploom.runtime.pytorch import apply_of

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

FACTORS = len(Operands._fields)
_FACTORS = "Tensor? aq, Tensor ak, Tensor av, Tensor bq, Tensor bk, Tensor bv"
_SCALES = "float scale, float scale_q, float scale_k, float scale_v"
_CALL = f"Tensor? cu_seqlens, bool causal, {_SCALES}"
_library = torch.library.Library("warploom", "FRAGMENT")
_plans = Plans()
"""Of the registered operators' calls."""


def _decode(*arguments: Any) -> Tensor:
    return _launch_decode(arguments, plans.of_registered(_plans, arguments[3], *arguments))


def _launch_decode(arguments: tuple[Any, ...], known: Plans) -> Tensor:
    return launchers.decode(Operands(*arguments[:FACTORS]), DecodeCall(*arguments[FACTORS:]), known)


def _out_fake(aq: Tensor | None, bq: Tensor, bv: Tensor) -> Tensor:
    return empty_in_order_of(bq if aq is None else aq, bv.shape[-1])


def _decode_fake(
    aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, *rest: object
) -> Tensor:
    return _out_fake(aq, bq, bv)


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Call]:
    return Operands(*arguments[:FACTORS]), Call(*arguments[FACTORS:])


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    return portable.forward(*_split(arguments))


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    aq, ak, _, bq, _, bv = arguments[:FACTORS]
    statistics = bq.new_empty((bq.shape[0], ak.shape[2], 2, bq.shape[1]), dtype=torch.float32)
    return _out_fake(aq, bq, bv), statistics


def _backward(grad: Tensor, out: Tensor, statistics: Tensor, *arguments: Any) -> Gradients:
    """Gradients of the six factors; an empty tensor for ``aq`` where there is none."""
    daq, *others = portable.backward(grad, out, statistics, *_split(arguments))
    return grad.new_empty(0) if daq is None else daq, *others  # type: ignore[return-value]


def _backward_fake(grad: Tensor, out: Tensor, statistics: Tensor, *arguments: Any) -> Gradients:
    aq, *others = arguments[:FACTORS]
    daq = others[0].new_empty(0) if aq is None else empty_in_order_of(aq, aq.shape[-1])
    return daq, *(empty_in_order_of(factor, factor.shape[-1]) for factor in others)  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    factors, (cu_seqlens, *ctx.rest) = inputs[:FACTORS], inputs[FACTORS:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*factors, cu_seqlens, *output)


def _gradients(ctx: Any, grad: Tensor, run: Callable[..., Gradients]) -> tuple[Tensor | None, ...]:
    *factors, cu_seqlens, out, statistics = ctx.saved_tensors
    gradients = run(grad, out, statistics, *factors, cu_seqlens, *ctx.rest)
    found = [g if wanted else None for g, wanted in zip(gradients, ctx.needs_input_grad)]
    return *found, *[None] * (len(ctx.needs_input_grad) - FACTORS)


def _registered_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, grad, torch.ops.warploom.tpa_attention_backward)


def _attention_flops(*arguments: Any, **_: Any) -> int:
    """Products of factors for queries, keys and values, and two of attention for every query and key."""
    return _products(arguments) + _pairs(arguments, arguments[FACTORS], 1, 1)


def _decode_flops(*arguments: Any, **_: Any) -> int:
    """The same, whatever the lengths are."""
    return _products(arguments) + _pairs(arguments, None, 1, 1)


def _backward_flops(grad: Tensor, out: Tensor, statistics: Tensor, *arguments: Any, **_: Any) -> int:
    """Two for each product of factors, and five of attention: the weights anew, and for four gradients."""
    return 2 * _products(arguments) + _pairs(arguments, arguments[FACTORS], 3, 2)


def _products(arguments: tuple[Any, ...]) -> int:
    """Operations that form queries, keys and values."""
    aq, ak, av, bq, bk, bv = arguments[:FACTORS]
    factors = ((aq, bq), (ak, bk), (av, bv))
    return int(sum(2 * a.numel() * b.shape[-1] for a, b in factors if a is not None))


def _pairs(arguments: tuple[Any, ...], cu_seqlens: Tensor | None, of_keys: int, of_values: int) -> int:
    """Operations of so many products for every query and key, by features of keys and of values."""
    _, ak, _, bq, bk, bv = arguments[:FACTORS]
    pairs = attention_pairs(bq, ak, cu_seqlens, cu_seqlens)
    return int(2 * pairs * ak.shape[2] * (of_keys * bk.shape[-1] + of_values * bv.shape[-1]))


register(
    _library, "tpa_decode", f"({_FACTORS}, Tensor? cache_seqlens, str strategy, {_SCALES}) -> Tensor",
    _decode, _decode_fake,
    refuse("tpa_decode has no gradient; tpa_attention is for training"),
    flops=_decode_flops,
)  # fmt: skip
register(
    _library, "tpa_attention", f"({_FACTORS}, {_CALL}) -> (Tensor, Tensor)",
    _attention, _attention_fake, _registered_backward, _setup_context, _attention_flops,
)  # fmt: skip
register(
    _library, "tpa_attention_backward",
    f"(Tensor grad, Tensor out, Tensor statistics, {_FACTORS}, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
    refuse('tpa_attention kernels have no second derivative; call with backend="torch" for one'),
    flops=_backward_flops,
)  # fmt: skip


class _EagerAttention(torch.autograd.Function):
    """The launchers with gradients, by the shortest way that autograd has for a plain eager call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out, statistics = _attention(*arguments)
        ctx.save_for_backward(*arguments[: FACTORS + 1], out, statistics)
        ctx.rest = arguments[FACTORS + 1 :]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain = is_plain_backward(grad)
        return _gradients(ctx, grad, _backward if plain else torch.ops.warploom.tpa_attention_backward)


# `torch.autograd.Function.apply` looks for function transforms, and for tensors that outlived one, before it calls
# this. Where calls are prepared for are none of either.
_apply_prepared: Any = apply_of(_EagerAttention)


def attention(
    aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor,
    cu_seqlens: Tensor | None, causal: bool, scale: float, scale_q: float, scale_k: float, scale_v: float,
) -> Tensor:  # fmt: skip
    """Run attention on the Triton kernels, differentiably, by the shortest way that this call allows."""
    factors = (aq, ak, av, bq, bk, bv)
    arguments = (*factors, cu_seqlens, causal, scale, scale_q, scale_k, scale_v)
    if _is_plain_eager(*factors, cu_seqlens):
        if torch.is_grad_enabled() and any(f is not None and f.requires_grad for f in factors):
            return _EagerAttention.apply(*arguments)  # type: ignore[no-any-return]
        return _attention(*arguments)[0]
    return torch.ops.warploom.tpa_attention(*arguments)[0]  # type: ignore[no-any-return]


def prepared_attention(tensors: tuple[Tensor, ...], causal: bool, *scales: float) -> Callable[..., Tensor]:
    """What runs calls like one on ``tensors`` that `attention` runs; see `warploom.runtime.plans.recognise`.

    It takes the factors and ``cu_seqlens``.
    """

    def run(*given: Tensor | None) -> Tensor:
        return _attention(*given, causal, *scales)[0]

    if not any(tensor.requires_grad for tensor in tensors):
        return run

    def differentiate(*given: Tensor | None) -> Tensor:
        return _apply_prepared(*given, causal, *scales) if torch.is_grad_enabled() else run(*given)

    return differentiate


def decode(
    aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor,
    cache_seqlens: Tensor | None, strategy: str, scale: float, scale_q: float, scale_k: float, scale_v: float,
) -> Tensor:  # fmt: skip
    """Run decoding on the Triton kernels by the shortest way that this call allows."""
    arguments = (aq, ak, av, bq, bk, bv, cache_seqlens, strategy, scale, scale_q, scale_k, scale_v)
    if _is_plain_eager(aq, ak, av, bq, bk, bv, cache_seqlens):
        return _launch_decode(arguments, Plans())
    return torch.ops.warploom.tpa_decode(*arguments)  # type: ignore[no-any-return]


def prepared_decode(strategy: str, *scales: float) -> Callable[..., Tensor]:
    """What runs plain eager calls for decoding that are the same in all but addresses and numbers in tensors.

    It takes the factors and ``cache_seqlens``; factors have their rank axis the first time.
    """
    known = Plans()

    def run(*given: Any) -> Tensor:
        *factors, cache_seqlens = given
        return launchers.decode(Operands(*factors), DecodeCall(cache_seqlens, strategy, *scales), known)

    return run


def _is_plain_eager(*tensors: Tensor | None) -> bool:
    return is_plain_eager(*(tensor for tensor in tensors if tensor is not None))
