"""How far results are off where nearly equal numbers are subtracted, or logits are large: documented limits.

A gradient of softmax is ``P (dP - Σ P dP)``. Where nearly all the weight is on one key, token or feature, the
difference is nearly zero, and so may be the error of the eager reference. That of a kernel is then the rounding of
what is subtracted; see "Accuracy" in the guides. A weight of softmax is ``exp(s - max)``, off by what its logit is.
Where tokens are equal, so are the errors of their products, and they add up. Where a call misses its budget all are
estimated here, in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from random_cases.attention import ATTENTION, SUMS, Attended, attend, rounding_of_logits, signs
from random_cases.definitions import reference_of
from warploom.ops.linear_attention import reference as linear
from warploom.ops.lrpe import reference as lrpe
from warploom.testing.accuracy import as_tuple

__all__ = ["cancelling", "rounded_decays", "rounded_logits", "rounded_rows", "rounded_states", "rounded_sums"]

Tensor = torch.Tensor

FACTORS = {"float16": 2.0**-11, "bfloat16": 2.0**-9, "high": 2.0**-11, "medium": 2.0**-9}
"""Relative rounding of a factor of a matrix product, by dtype, or by precision for float32."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DRAWS = 8
"""Of the signs of errors."""
SMALLEST = 2.0**-25
"""Half of the smallest number of float16."""
TILES = (16, 32, 64)
"""Tokens of a tile, at whose end a state of linear attention is decayed."""
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
    dlogits, off_logits, off_either_way = (torch.zeros_like(logits) for _ in range(3))
    grad, grad_lse = (*incoming, None)[:2]
    if grad is not None:
        (dlogits,) = torch.autograd.grad(out, logits, grad, retain_graph=True)
        out = out.detach()
        terms = (grad * out).square().sum(-1).sqrt()
        off_sums = terms * SUMS * math.sqrt(out.shape[-1])
        if factors in DTYPES:  # δ is of a rounded output, whose errors may be alike
            off_delta = (grad * (out.to(DTYPES[factors]) - out)).sum(-1)
            off_logits = weights * off_delta.transpose(1, 2).unsqueeze(-1)
            other = _sum_of(grad * _other_roundings(attended, logits.detach(), weights, out, factors))
        else:
            other = terms * FACTORS.get(factors, SUMS)
        off_either_way = weights * (off_sums + other).transpose(1, 2).unsqueeze(-1)
    if grad_lse is not None:
        (more,) = torch.autograd.grad(lse, logits, grad_lse, retain_graph=True)
        dlogits = dlogits + more
        off_logits = off_logits + more.abs() * SUMS
    # The gradients of logits are rounded before they multiply keys and queries. One row may be all that a block
    # has, and what one draw of signs leaves of it nothing: several draws tell how much is usual.
    drawn = [
        torch.autograd.grad(
            logits, leaves, off + _rounding_of(dlogits, factors) * signs(dlogits, draw), retain_graph=True,
            materialize_grads=True,
        )
        for draw, off in enumerate(_in_both_directions(off_logits.detach(), off_either_way))
    ]  # fmt: skip
    of_logits = [torch.stack(of_one).square().mean(0).sqrt() for of_one in zip(*drawn)]
    if operator != "rotary_attention":
        return of_logits
    # Those of queries and keys are rounded before they turn back.
    turned, most = (attended.q, attended.k), dlogits.abs() + off_logits.abs() + off_either_way
    rounded = [
        _rounding_of(gradient, factors) * signs(gradient)
        for gradient in torch.autograd.grad(logits, turned, most, retain_graph=True)
    ]
    turned_back = torch.autograd.grad(turned, leaves, rounded, materialize_grads=True)
    return [first.abs() + second.abs() for first, second in zip(of_logits, turned_back)]


def _rounding_of(x: Tensor, factors: str) -> Tensor:
    """What numbers are off, at the most, that are rounded to a factor: those of float16 have few bits near zero."""
    off = x * FACTORS.get(factors, SUMS)
    return torch.where(off.abs() < SMALLEST, x.clamp(-SMALLEST, SMALLEST), off) if factors == "float16" else off


def _in_both_directions(off: Tensor, either_way: Tensor) -> Sequence[Tensor]:
    """Draws of the errors of logits: those known with their sign, and with them those of whole rows of either sign.

    The latter are added in one draw and subtracted in the next: they do not cancel what is known in all.
    """
    rows = [signs(either_way[..., :1], draw).sign() for draw in range(DRAWS // 2)]
    return [off + way * row * either_way for row in rows for way in (1, -1)]


def _sum_of(errors: Tensor) -> Tensor:
    """What errors along the last axis add up to: as the root of their squares, or more if they are alike."""
    return torch.maximum(errors.square().sum(-1).sqrt(), errors.sum(-1).abs())


def _other_roundings(attended: Attended, logits: Tensor, weights: Tensor, out: Tensor, factors: str) -> Tensor:
    """How far apart outputs (B, N, H, E) are that 16 bits may round the sums of a forward to; mostly that is zero.

    Weights are rounded to 16 bits where they multiply values, unless they are a row's largest, which are 1; all are
    off by what logits are. A sum near the middle of two numbers is either of them then. Where two keys share the
    weight of a query and all else is exact, one such feature is most of the error of its gradient. The sum of
    weights has the largest as it is, ``exp(s - max)`` with a maximum that is rounded: half a unit in the last place
    of a logit, which in the hundreds is a twentieth of one of 16 bits.
    """
    if not weights.shape[-1]:  # without keys
        return torch.zeros_like(out)
    values = attended.v.detach().repeat_interleave(out.shape[2] // max(attended.v.shape[2], 1), 2)
    shift = rounding_of_logits(attended)
    if attended.sink is not None:
        values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 1))
        shift = torch.nn.functional.pad(shift, (0, 1))
    top = weights == weights.amax(-1, keepdim=True)
    of_top = (shift * top).amax(-1, keepdim=True)
    off = (weights * (FACTORS[factors] + 2 * (shift + of_top))).masked_fill(top, 0.0).square()
    squares = torch.einsum("bhnm,bmhe->bnhe", off, values.square())
    off_sums = off.sum(-1) + (SUMS * (logits.abs() * top).amax(-1)).square()
    squares += off_sums.transpose(1, 2).unsqueeze(-1) * out.square()
    most = squares.sqrt() + 2 * SUMS * out.abs()
    lowest, highest = ((out + way * most).to(DTYPES[factors]).double() for way in (-1, 1))
    return highest - lowest


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


def rounded_sums(operator: str, given: Mapping[str, Any]) -> Tensor | None:
    """What outputs (B, N, H, E) of attention may be off where float32 numbers are added up one after the other.

    A sum of n numbers of any sign grows as the root of n, and is rounded n times, each time by a quarter of a unit
    of the sum so far: together a root of n times as much as the sum itself. Matrix libraries add up several parts
    at a time, which is more exact where weights are alike.

    Args:
        operator: Whose call it is.
        given: Arguments in float64.
    """
    if operator not in ATTENTION:
        return None
    attended = ATTENTION[operator](given)
    weights = attend(attended)[1][..., : attended.k.shape[1]]
    v = attended.v.detach().repeat_interleave(weights.shape[1] // max(attended.v.shape[2], 1), 2)
    terms = (weights != 0).sum(-1) * (given["bv"].shape[-2] if "bv" in given and given["bv"].dim() == 4 else 1)
    squares = torch.einsum("bhnm,bmhe->bnhe", weights.square(), v.square())
    off: Tensor = SUMS / 4 * (squares * terms.transpose(1, 2).unsqueeze(-1)).sqrt()
    return off


def rounded_states(
    given: Mapping[str, Any], incoming: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """What linear attention's last state, and the gradient of its first, are off where decayed rows are rounded.

    A row is multiplied by the decay from its token to the end of its tile, or from the beginning, and rounded to
    the dtype of the call. The definition has decays of longer ways, all of which differ: where tokens and decays
    are equal, its errors are many, and those of all tiles the same. Values or keys, or for a gradient those of the
    output or queries, may be what is rounded, in tiles of any length in `TILES`: these are the errors of each.

    Args:
        given: Arguments in float64, with decays.
        incoming: Gradients of the results, None where there is none.
        dtype: Of the call, with 16 bits.
    """
    places = _places_of(given)
    exact = {name: x.detach() if torch.is_tensor(x) else x for name, x in given.items()}
    keys, queries = (linear.features(exact[name], **places).detach() for name in "kq")
    decays = exact["decay"].expand(keys.shape[:3])
    sequences = _sequences_of(places, keys.shape[1])

    def of(rows: Tensor, others: Tensor, scale: float, ahead: bool) -> list[Tensor]:
        found: list[Tensor] = []
        for size in TILES:
            parts = ((rows[:, one], others[:, one], decays[:, one]) for one in sequences)
            found += torch.cat([scale * _off_in_tiles(*part, dtype, size, ahead) for part in parts], 1).unbind()
        return found

    of_state, grad = of(keys, exact["v"], 1.0, True), incoming[0]
    scale = exact.get("scale", exact["q"].shape[-1] ** -0.5)
    return of_state, [] if grad is None else of(queries, grad, scale, False)


def rounded_decays(
    given: Mapping[str, Any], incoming: Sequence[Tensor | None], wanted: Sequence[str]
) -> dict[str, Tensor]:
    """What all results of linear attention are off, by name, where decays of tiles are rounded.

    A state is multiplied by its decay once for each tile. Where decays of tokens are equal, so are those of tiles,
    and all have the same error: after a thousand tokens 64 times that of one, a unit in the last place. Outputs and
    gradients read such states.

    Args:
        given: Arguments in float64, with decays; those of ``wanted`` require a gradient.
        incoming: Gradients of the results, None where there is none.
        wanted: Names of the arguments that gradients are of.
    """
    decay = given["decay"].detach()
    equal = torch.ones_like(decay)
    if decay.dim() == 3 and decay.shape[1]:  # of tokens
        equal *= decay.amax(1, keepdim=True) == decay.amin(1, keepdim=True)
    found = []
    for off in (0.0, SUMS / TILES[0]):
        off_by = given["decay"] + off * equal
        results = linear.linear_attention(**{**given, "decay": off_by, "return_state": True})
        pairs = [(x, grad) for x, grad in zip(results, incoming) if grad is not None and x.requires_grad]
        found.append([result.detach() for result in results])
        if pairs:
            through, grads = zip(*pairs)
            leaves = [given[name] for name in wanted]
            found[-1] += torch.autograd.grad(through, leaves, grads, materialize_grads=True)
    names = ("output", "state", *(f"gradient of {name}" for name in wanted))
    return {name: b - a for name, a, b in zip(names, *found)}


def rounded_rows(
    given: Mapping[str, Any], incoming: Sequence[Tensor | None], wanted: Sequence[str], dtype: torch.dtype
) -> list[Tensor]:
    """What linear attention's gradients of theta and decays are off where decayed rows are rounded.

    Keys or values are decayed to the end of their tile and rounded. Where features of values are equal, or entries
    of a batch, so are their errors, and these gradients add them up: over features, tokens and entries. The
    definition in 16 bits has no such products, and other errors.

    Args:
        given: Arguments in float64, with decays; those of ``wanted`` require a gradient.
        incoming: Gradients of the results, None where there is none.
        wanted: Names of the arguments that gradients are of.
        dtype: Of the call, with 16 bits.

    Returns:
        A tensor for each of ``wanted``: the most that tiles of a length in `TILES` give, zero for other arguments.
    """
    places = _places_of(given)
    total = {name: torch.zeros_like(given[name]) for name in wanted}
    summed = [name for name in wanted if name in ("theta", "decay")]
    if not summed or all(grad is None for grad in incoming):
        return list(total.values())
    encoded = {name: linear.features(given[name], **places) for name in "qk"}
    kept = {name: x for name, x in given.items() if name == "cu_seqlens" or name not in places}
    kept |= {"scale": given.get("scale", given["q"].shape[-1] ** -0.5), "return_state": True, **encoded}
    tokens = encoded["k"].shape[1]
    sequences = _sequences_of(places, tokens)
    sequences.append(slice(sequences[-1].stop, tokens))  # rows behind all of them
    decays = given["decay"].detach().expand(encoded["k"].shape[:3])

    def gradients(changed: Mapping[str, Tensor]) -> Sequence[Tensor]:
        results = linear.linear_attention(**kept | dict(changed))
        through, grads = zip(*((x, grad) for x, grad in zip(results, incoming) if grad is not None))
        leaves = [given[name] for name in summed]
        found: Sequence[Tensor] = torch.autograd.grad(
            through, leaves, grads, retain_graph=True, materialize_grads=True
        )
        return found

    usual = gradients({})
    for name, x in (("k", encoded["k"]), ("v", given["v"])):
        of_sizes = []
        for size in TILES:
            ways = [_within(_tiles_of(decays[:, one], size), True).flatten(1, 2) for one in sequences]
            parts = [way[:, : one.stop - one.start, :, None] for way, one in zip(ways, sequences)]
            way = torch.cat(parts, 1).exp()
            off = (x.detach() * way).to(dtype).double() / way - x.detach()
            found = gradients({name: x + off.masked_fill(way < torch.finfo(dtype).tiny, 0.0)})
            of_sizes.append([(b - a).abs() for a, b in zip(usual, found)])
        for each, *of_one in zip(summed, *of_sizes):
            total[each] += torch.stack(of_one).amax(0)
    return list(total.values())


def _sequences_of(places: Mapping[str, Any], tokens: int) -> list[slice]:
    """Where the packed sequences are, or the one."""
    bounds = [0, tokens] if places["cu_seqlens"] is None else places["cu_seqlens"].tolist()
    return [slice(*each) for each in itertools.pairwise(bounds)]


def _tiles_of(decays: Tensor, size: int) -> Tensor:
    """Decays of tokens (B, n, H) by tiles, filled up: (B, tiles, size, H)."""
    tiles: Tensor = torch.nn.functional.pad(decays, (0, 0, 0, -decays.shape[1] % size)).unflatten(1, (-1, size))
    return tiles


def _within(g: Tensor, ahead: bool) -> Tensor:
    """Decays of the way from each token to the end of its tile, or from the beginning."""
    return g.flip(2).cumsum(2).flip(2) - g if ahead else g.cumsum(2)


def _off_in_tiles(
    rows: Tensor, others: Tensor, decays: Tensor, dtype: torch.dtype, size: int, ahead: bool
) -> Tensor:
    """Two errors (2, B, H, F, E) of a sum over tokens whose products are decayed ``ahead``, or to the beginning."""
    g = _tiles_of(decays, size)
    totals = g.sum(2)
    beyond = totals.flip(1).cumsum(1).flip(1) - totals if ahead else totals.cumsum(1) - totals
    ways = _within(g, ahead), beyond[:, :, None].expand_as(g)
    near, far = (x.flatten(1, 2)[:, : decays.shape[1], :, None].exp() for x in ways)

    def lost(x: Tensor) -> Tensor:
        exact = x * near
        off: Tensor = (exact.to(dtype).double() - exact) * far
        return off

    pairs = (rows, lost(others)), (lost(rows), others)
    return torch.stack([torch.einsum("bnhf,bnhe->bhfe", *pair) for pair in pairs])


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
    places = _places_of(given)
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


def _places_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that say how linear attention encodes queries and keys."""
    places: dict[str, Any] = {"encoding": "none", "activation": "none", "interleaved": False, "offset": 0}
    places |= {"theta": None, "cu_seqlens": None}
    return places | {name: given[name] for name in places if name in given}


def _of_pairs(x: Tensor, grad: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Of the ``theta`` that turns ``x``: what ``x̄₁ d₂ − x̄₂ d₁`` of an angle leaves, where one product is rounded.

    Both are equal where an expanded axis makes features and their gradients equal, and eager arithmetic rounds
    them alike. What is left is the same for all tokens that are, and adds up. So do errors of a cosine and a sine,
    half a unit in the last place of 1, and of an activation, over heads and entries whose numbers and angles are.
    """
    x, grad = (t.detach() if t.dim() == 4 else t.detach().unsqueeze(2) for t in (x, grad))
    places = [given.get(name) for name in ("position_ids", "cu_seqlens")]
    s = lrpe.coordinates(x, given.get("grid"), given.get("prefix", 0), given.get("offset", 0), *places)
    phi = lrpe.angles(s.double(), given["theta"], x.shape[-1] // 2)
    value = lrpe.activate(x, given.get("activation", "none"), given.get("cu_seqlens")).float().double()
    (x1, x2), (g1, g2) = (_pairs(t, given.get("interleaved", False)) for t in (value, grad))
    cosine, sine = phi.detach().cos(), phi.detach().sin()
    d1, d2 = g1 * cosine + g2 * sine, g2 * cosine - g1 * sine
    rounded = x1 * d2.float().double() - (x2 * d1.float().double()).float().double()
    equal = (x1 * g2 - x2 * g1).abs() <= DOUBLES * (x1 * g2).abs()
    of_products = torch.where(equal, rounded - (x1 * d2 - x2 * d1), 0.0)
    of_angles = SUMS * (signs(phi) * (x1 * g2 - x2 * g1) - signs(phi, 1) * (x1 * g1 + x2 * g2))
    inexact = SUMS * (given.get("activation", "none") != "none")
    of_values = inexact * (signs(x1) * x1 * d2 - signs(x2) * x2 * d1)
    left = [each.sum_to_size(phi.shape) for each in (of_products, of_angles, of_values)]
    off = [torch.autograd.grad(phi, given["theta"], each, retain_graph=True)[0].abs() for each in left]
    return torch.stack(off).sum(0)


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
