"""How far results are off where nearly equal numbers are subtracted, or logits are large: documented limits.

A gradient of softmax is ``P (dP - Σ P dP)``. Where nearly all the weight is on one key, token or feature, the
difference is nearly zero, and so may be the error of the eager reference. That of a kernel is then the rounding of
what is subtracted; see "Accuracy" in the guides. A weight of softmax is ``exp(s - max)``, off by what its logit is.
Where a call misses its budget both are estimated here, in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from random_cases.attention import ATTENTION, SUMS, attend, rounding_of_logits, signs
from random_cases.definitions import reference_of
from warploom.ops.linear_attention import reference as linear
from warploom.ops.lrpe import reference as lrpe
from warploom.testing.accuracy import as_tuple

__all__ = ["cancelling", "rounded_logits"]

Tensor = torch.Tensor

FACTORS = {"float16": 2.0**-11, "bfloat16": 2.0**-9, "high": 2.0**-11, "medium": 2.0**-9}
"""Relative rounding of a factor of a matrix product, by dtype, or by precision for float32."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DRAWS = 8
"""Of the signs of errors."""
DOUBLES = 2.0**-40
"""Relative difference of numbers in float64 that are equal."""


def cancelling(
    operator: str, given: Mapping[str, Any], incoming: Sequence[Tensor | None], wanted: Sequence[str], factors: str
) -> list[Tensor] | None:
    """What the gradients of a call may be off.

    Args:
        operator: Whose call it is.
        given: Arguments in float64; those of ``wanted`` require a gradient.
        incoming: Gradients of the results, None where there is none.
        wanted: Names of the arguments that gradients are of.
        factors: The dtype of the call, or the precision of products if that is float32.

    Returns:
        A tensor for each of ``wanted``; None where nothing cancels.
    """
    leaves = [given[name] for name in wanted]
    if operator in ("lrpe_rotate", "lrpe_cosine"):
        return _of_encoding(operator, given, incoming[0], wanted, factors)
    if operator == "linear_attention":
        return _of_linear_attention(given, incoming, wanted, factors)
    if operator not in ATTENTION or operator == "tpa_decode":
        return None
    attended = ATTENTION[operator](given)
    logits, weights, out, lse = attend(attended)
    if not logits.requires_grad:
        return None
    dlogits, off_logits = torch.zeros_like(logits), torch.zeros_like(logits)
    grad, grad_lse = (*incoming, None)[:2]
    if grad is not None:
        (dlogits,) = torch.autograd.grad(out, logits, grad, retain_graph=True)
        out = out.detach()
        terms = (grad * out).square().sum(-1).sqrt()
        off_delta = terms * SUMS * math.sqrt(out.shape[-1])
        if factors in DTYPES:  # δ is of a rounded output, whose errors may be alike
            off_delta += (grad * (out.to(DTYPES[factors]) - out)).sum(-1)
        else:
            off_delta += terms * FACTORS.get(factors, SUMS)
        off_logits = weights * off_delta.transpose(1, 2).unsqueeze(-1)
    if grad_lse is not None:
        (more,) = torch.autograd.grad(lse, logits, grad_lse, retain_graph=True)
        dlogits = dlogits + more
        off_logits = off_logits + more.abs() * SUMS
    # The gradients of logits are rounded before they multiply keys and queries. One row may be all that a block
    # has, and what one draw of signs leaves of it nothing: several draws tell how much is usual.
    rounding = FACTORS.get(factors, SUMS)
    drawn = [
        torch.autograd.grad(
            logits, leaves, off_logits.detach() + dlogits * signs(logits, draw) * rounding, retain_graph=True,
            materialize_grads=True,
        )
        for draw in range(DRAWS)
    ]  # fmt: skip
    of_logits = [torch.stack(of_one).square().mean(0).sqrt() for of_one in zip(*drawn)]
    if operator != "rotary_attention":
        return of_logits
    # Those of queries and keys are rounded before they turn back.
    turned = attended.q, attended.k
    rounded = [
        gradient * signs(gradient) * rounding
        for gradient in torch.autograd.grad(logits, turned, dlogits.abs() + off_logits.abs(), retain_graph=True)
    ]
    turned_back = torch.autograd.grad(turned, leaves, rounded, materialize_grads=True)
    return [first.abs() + second.abs() for first, second in zip(of_logits, turned_back)]


def rounded_logits(
    operator: str, given: Mapping[str, Any], incoming: Sequence[Tensor | None], wanted: Sequence[str]
) -> list[Tensor] | None:
    """What results and gradients of attention are off where logits are rounded; arguments are as in `cancelling`.

    A weight's relative error is the absolute one of its logit, which for logits in the hundreds is that of a
    float32 number of their size, whatever the order of sums. It shows where two keys share the weight of a query;
    eager arithmetic has more or less of it there by luck. It is the same in forward and backward: a backward whose
    weights are not those of its forward is off where this is nothing.
    """
    if operator not in ATTENTION:
        return None
    found = []
    for shifted in (False, True):
        attended = ATTENTION[operator](given)
        shift = rounding_of_logits(attended) if shifted else None
        _, _, out, lse = attend(attended, None if shift is None else shift * signs(shift))
        pairs = [(x, grad) for x, grad in zip((out, lse), incoming) if grad is not None and x.requires_grad]
        gradients = [torch.zeros_like(given[name]) for name in wanted]
        if pairs:
            through, grads = zip(*pairs)
            leaves = [given[name] for name in wanted]
            gradients = list(torch.autograd.grad(through, leaves, grads, materialize_grads=True))
        found.append([out.detach(), lse.detach(), *gradients])
    exact, off = found
    return [b - a for a, b in zip(exact, off)]


def _of_encoding(
    operator: str, given: Mapping[str, Any], grad: Tensor | None, wanted: Sequence[str], factors: str
) -> list[Tensor] | None:
    """Of LRPE's ``x`` and ``theta``."""
    x, theta, activation = given["x"], given["theta"].detach(), given.get("activation", "none")
    places = {name: value for name, value in given.items() if name not in ("x", "theta", "activation")}
    off = {}
    if grad is not None and "x" in wanted and activation.startswith("softmax"):
        off["x"] = _of_softmax(x, grad, given, lambda weights: reference_of(operator)(weights, theta, **places))
    if grad is not None and "theta" in wanted and operator == "lrpe_rotate" and factors != "float64":
        off["theta"] = _of_pairs(x, grad, given)
    return [off.get(name, torch.zeros(1)) for name in wanted] if off else None


def _of_linear_attention(
    given: Mapping[str, Any], incoming: Sequence[Tensor | None], wanted: Sequence[str], factors: str
) -> list[Tensor] | None:
    """Of queries, keys and ``theta``, from the gradients of what queries and keys are encoded as."""
    places: dict[str, Any] = {"encoding": "none", "activation": "none", "interleaved": False, "offset": 0}
    places |= {"theta": None, "cu_seqlens": None}
    places |= {name: given[name] for name in places if name in given}
    softmax = places["activation"] == "softmax"
    turned = places["encoding"] == "rotate" and "theta" in wanted and factors != "float64"
    if not (softmax or turned):
        return None
    encoded = {name: linear.features(given[name], **places).detach().requires_grad_() for name in "qk"}
    kept = {name: value for name, value in given.items() if name == "cu_seqlens" or name not in places}
    kept.setdefault("scale", given["q"].shape[-1] ** -0.5)
    results = as_tuple(linear.linear_attention(**kept | encoded))
    through = [result for result, grad in zip(results, incoming) if grad is not None]
    grads = [grad for grad in incoming if grad is not None]
    of_encoded = torch.autograd.grad(through, list(encoded.values()), grads, materialize_grads=True)
    encode = functools.partial(linear.features, **{**places, "activation": "none"})
    of = dict(zip("qk", of_encoded))
    off = {name: _of_softmax(given[name], of[name], given, encode) for name in "qk" if softmax and name in wanted}
    if turned:
        of_q, of_k = (_of_pairs(given[name], of[name], given) for name in "qk")
        off["theta"] = of_q.abs() + of_k.abs()
    return [off.get(name, torch.zeros(1)) for name in wanted]


def _of_pairs(x: Tensor, grad: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Of the ``theta`` that turns ``x``: what ``x̄₁ d₂ − x̄₂ d₁`` of an angle leaves, where one product is rounded.

    Both are equal where an expanded axis makes features and their gradients equal, and eager arithmetic rounds them
    alike. What is left is the same for all tokens that are, and adds up.
    """
    x, grad = (t.detach() if t.dim() == 4 else t.detach().unsqueeze(2) for t in (x, grad))
    places = [given.get(name) for name in ("position_ids", "cu_seqlens")]
    s = lrpe.coordinates(x, given.get("grid"), given.get("prefix", 0), given.get("offset", 0), *places)
    phi = lrpe.angles(s.double(), given["theta"], x.shape[-1] // 2)
    value = lrpe.activate(x, given.get("activation", "none"), given.get("cu_seqlens")).float().double()
    (x1, x2), (g1, g2) = (_pairs(t, given.get("interleaved", False)) for t in (value, grad))
    cosine, sine = phi.detach().cos(), phi.detach().sin()
    d1, d2 = g1 * cosine + g2 * sine, g2 * cosine - g1 * sine
    found = x1 * d2.float().double() - (x2 * d1.float().double()).float().double()
    equal = (x1 * g2 - x2 * g1).abs() <= DOUBLES * (x1 * g2).abs()
    left = torch.where(equal, found - (x1 * d2 - x2 * d1), 0.0).sum_to_size(phi.shape)
    off: Tensor = torch.autograd.grad(phi, given["theta"], left)[0]
    return off


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Both members of the pairs of features."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _of_softmax(x: Tensor, grad: Tensor, given: Mapping[str, Any], encode: Callable[[Tensor], Tensor]) -> Tensor:
    """Of what a softmax is of: the rounding of both terms of ``P dP - P Σ P dP``, where ``P`` is encoded."""
    heads = x if x.dim() == 4 else x.unsqueeze(2)
    softmax = lrpe.activate(heads, given["activation"], given.get("cu_seqlens")).view_as(x)
    weights = softmax.detach().requires_grad_()
    (dweights,) = torch.autograd.grad(encode(weights), weights, grad)
    (difference,) = torch.autograd.grad(softmax, x, dweights.abs())
    off: Tensor = 4 * SUMS * (2 * weights.detach() * dweights.abs() - difference)
    return off
