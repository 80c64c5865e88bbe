"""How far gradients are off where numbers are subtracted that are nearly equal: a documented limit.

A gradient of softmax is ``P (dP - Σ P dP)``. Where nearly all the weight is on one key, token or feature, the
difference is nearly zero, and so may be the error of the eager reference. That of a kernel is then the rounding of
what is subtracted; see "Accuracy" in the guides. Where a call misses its budget it is estimated here, in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from random_cases.definitions import reference_of, rotated
from warploom.ops.linear_attention import reference as linear
from warploom.ops.lrpe import reference as lrpe
from warploom.testing.accuracy import as_tuple

__all__ = ["cancelling"]

Tensor = torch.Tensor

FACTORS = {"float16": 2.0**-11, "bfloat16": 2.0**-9, "high": 2.0**-11, "medium": 2.0**-9}
"""Relative rounding of a factor of a matrix product, by dtype, or by precision for float32."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SUMS = 2.0**-24
"""That of a float32 number."""
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
    if operator not in _ATTENTION:
        return None
    attended = _ATTENTION[operator](given)
    logits, weights, out, lse = _attention(attended)
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
    # The gradients of logits are rounded before they multiply keys and queries.
    rounding = FACTORS.get(factors, SUMS)
    off_logits = off_logits.detach() + dlogits * _signs(logits) * rounding
    of_logits = torch.autograd.grad(logits, leaves, off_logits, retain_graph=True, materialize_grads=True)
    if operator != "rotary_attention":
        return list(of_logits)
    # Those of queries and keys are rounded before they turn back.
    turned = attended.q, attended.k
    rounded = [
        gradient * _signs(gradient) * rounding
        for gradient in torch.autograd.grad(logits, turned, dlogits.abs() + off_logits.abs(), retain_graph=True)
    ]
    turned_back = torch.autograd.grad(turned, leaves, rounded, materialize_grads=True)
    return [first.abs() + second.abs() for first, second in zip(of_logits, turned_back)]


def _signs(like: Tensor) -> Tensor:
    """Numbers from -1 to 1, always the same."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(like.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(like.device)


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


class _Attended(NamedTuple):
    """What attention is of."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    visible: Tensor
    """(N, M), or (B, N, M)."""
    softcap: float | None = None
    sink: Tensor | None = None


def _attention(attended: _Attended) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and weights (B, H, N, M), output (B, N, H, E) and lse (B, H, N); a sink is one more key, the last."""
    q, k, v, scale, visible, softcap, sink = attended
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = visible[:, None] if visible.dim() == 3 else visible
    if sink is not None:
        logits = torch.cat((logits, sink[:, None, None].expand(*logits.shape[:3], 1)), -1)
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
        v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1))
    hidden = logits.masked_fill(~visible, -torch.inf)
    some = visible.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(some, hidden, 0.0), -1) * some
    lse = torch.logsumexp(torch.where(some, hidden, 0.0), -1)
    return logits, weights.detach(), torch.einsum("bhnm,bmhe->bnhe", weights, v), lse * some.squeeze(-1)


def _visible(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: Sequence[int | None] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Which keys a query sees: (N, M)."""
    tokens, keys = q.shape[1], k.shape[1]
    whole = [torch.tensor([0, length]) for length in (tokens, keys)]
    bounds_q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
    bounds_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    left, right = window or (None, None)
    visible = torch.zeros(tokens, keys, dtype=torch.bool)
    ends = [(bounds if given is None else given).tolist() for bounds, given in zip(whole, (bounds_q, bounds_k))]
    for first, last, first_key, last_key in zip(ends[0], ends[0][1:], ends[1], ends[1][1:]):
        query, key = torch.arange(last - first)[:, None], torch.arange(last_key - first_key)
        distance = key - (query + (last_key - first_key) - (last - first))
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= distance >= -left if left is not None else seen
        seen &= distance <= right if right is not None else seen
        seen &= distance <= 0 if causal else seen
        visible[first:last, first_key:last_key] = seen
    return visible.to(q.device)


def _flash_attention(given: Mapping[str, Any]) -> _Attended:
    q, k, v = (given[name] for name in "qkv")
    if "block_table" in given:
        k, v = (x[given["block_table"].long()].flatten(1, 2) for x in (k, v))
    names = ("window", "cu_seqlens_q", "cu_seqlens_k")
    masks = {name: given[name] for name in names if name in given}
    causal = given.get("causal", False)
    if "seqused_k" in given:
        used = given["seqused_k"].tolist()
        visible = q.new_zeros(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool)
        for entry, keys in enumerate(used):
            visible[entry, :, :keys] = _visible(q, k[:, :keys], causal, **masks)
        behind = torch.arange(k.shape[1], device=k.device) >= given["seqused_k"][:, None]
        k, v = (x.masked_fill(behind[:, :, None, None], 0.0) for x in (k, v))
    else:
        visible = _visible(q, k, causal, **masks)
    return _Attended(q, k, v, given.get("scale"), visible, given.get("softcap"), given.get("sink"))


def _rotary_attention(given: Mapping[str, Any]) -> _Attended:
    q, k, v = rotated(given["qkv"], given["theta"], given["heads"], given.get("interleaved", False))
    return _Attended(q, k, v, given["scale"], _visible(q, k, True))


def _tpa_attention(given: Mapping[str, Any]) -> _Attended:
    q, k, v = (_product(given, letter) for letter in "qkv")
    visible = _visible(q, k, given.get("causal", True), cu_seqlens_q=given.get("cu_seqlens"))
    return _Attended(q, k, v, given.get("scale"), visible)


def _product(given: Mapping[str, Any], letter: str) -> Tensor:
    """``scale · A B`` of every token; ``scale · B`` where there is no ``A``."""
    a, b, scale = given[f"a{letter}"], given[f"b{letter}"], given.get(f"scale_{letter}")
    if a is None:
        product, usual = b, 1.0
    else:
        a = a.unsqueeze(-1) if a.dim() == 3 else a
        product, usual = a @ (b.unsqueeze(-2) if b.dim() == 3 else b), 1 / a.shape[-1]
    scaled: Tensor = product * (usual if scale is None else scale)
    return scaled


_ATTENTION: dict[str, Callable[[Mapping[str, Any]], _Attended]] = {
    "flash_attention": _flash_attention,
    "tpa_attention": _tpa_attention,
    "rotary_attention": _rotary_attention,
}
