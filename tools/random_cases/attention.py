"""The attention of a call, as its queries, keys and values, with its logits at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from random_cases.definitions import rotated
from warploom.ops.flash_attention.reference import without_tail
from warploom.ops.tpa import reference as tpa

__all__ = ["ATTENTION", "SUMS", "Attended", "attend", "rounding_of_logits", "signs"]

Tensor = torch.Tensor

SUMS = 2.0**-24
"""Relative rounding of a float32 number."""
_ODD = 0x2545F4914F6CDD1D


def signs(of: Tensor, draw: int = 0) -> Tensor:
    """Numbers from -1 to 1, always the same, and the same for equal sizes: equal numbers are rounded alike."""
    bits = of.detach().abs().float().contiguous().view(torch.int32).long()
    mixed = (bits + 1 + (draw << 32)) * _ODD  # modulo 2⁶⁴
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return ((mixed >> 40) & (2**24 - 1)).double() / 2**23 - 1


class Attended(NamedTuple):
    """What attention is of."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    visible: Tensor
    """(N, M), or (B, N, M)."""
    softcap: float | None = None
    sink: Tensor | None = None
    key_sizes: Tensor | None = None
    """(B, M, H) what norms of keys are at most, where keys are sums that may cancel."""


def attend(attended: Attended, shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and weights (B, H, N, M), output (B, N, H, E) and lse (B, H, N); a sink is one more key, the last.

    ``shift`` is added to logits, before they are capped.
    """
    q, k, v, scale, visible, softcap, sink, _ = attended
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if shift is not None:
        logits = logits + shift
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


def _flash_attention(given: Mapping[str, Any]) -> Attended:
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
        bounds = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in given]
        if bounds:
            q, k, v = (without_tail(x, each) for x, each in ((q, bounds[0]), (k, bounds[-1]), (v, bounds[-1])))
    return Attended(q, k, v, given.get("scale"), visible, given.get("softcap"), given.get("sink"))


def _rotary_attention(given: Mapping[str, Any]) -> Attended:
    q, k, v = rotated(given["qkv"], given["theta"], given["heads"], given.get("interleaved", False))
    return Attended(q, k, v, given["scale"], _visible(q, k, True))


def _tpa_attention(given: Mapping[str, Any]) -> Attended:
    if "cu_seqlens" in given:
        factors = [name for name in ("aq", "ak", "av", "bq", "bk", "bv") if given.get(name) is not None]
        given = {**given, **{name: without_tail(given[name], given["cu_seqlens"]) for name in factors}}
    q, k, v = (_product(given, letter) for letter in "qkv")
    visible = _visible(q, k, given.get("causal", True), cu_seqlens_q=given.get("cu_seqlens"))
    return Attended(q, k, v, given.get("scale"), visible)


def _tpa_decode(given: Mapping[str, Any]) -> Attended:
    lengths = given.get("cache_seqlens")
    if lengths is not None:
        given = {**given, **{name: tpa.only_valid(given[name], lengths) for name in ("ak", "av", "bk", "bv")}}
    q, k, v = (_product(given, letter) for letter in "qkv")
    first, last = (bound[..., None] for bound in tpa.visible_in_decode(q, k, lengths))
    key = torch.arange(k.shape[1], device=k.device)
    sizes = _product({**given, "ak": given["ak"].abs(), "bk": _norms(given["bk"])}, "k").abs().squeeze(-1)
    return Attended(q, k, v, given.get("scale"), (key >= first) & (key < last), key_sizes=sizes)


def _norms(x: Tensor) -> Tensor:
    return x.detach().square().sum(-1, keepdim=True).sqrt()


def rounding_of_logits(attended: Attended) -> Tensor:
    """What logits (B, H, N, M) of float32 may be off: half of ``2⁻²⁴ |q| |k|``, and half of their last place.

    A sum of D terms, each like ``|q| |k| / D``, is rounded D times if it is formed term after term, and its usual
    error is a third of ``2⁻²⁴ |q| |k|``; in other orders it is less.
    """
    q, k, _, scale, *_ = attended
    group = q.shape[2] // max(k.shape[2], 1)
    of_q = _norms(q)[..., 0]
    of_k = _norms(k)[..., 0] if attended.key_sizes is None else attended.key_sizes.detach()
    k, of_k = (t.detach().repeat_interleave(group, 2) for t in (k, of_k))
    size = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    logits = torch.einsum("bnhd,bmhd->bhnm", q.detach(), k).abs()
    off: Tensor = SUMS / 2 * size * (torch.einsum("bnh,bmh->bhnm", of_q, of_k) + logits)
    return off


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


ATTENTION: dict[str, Callable[[Mapping[str, Any]], Attended]] = {
    "flash_attention": _flash_attention,
    "tpa_attention": _tpa_attention,
    "tpa_decode": _tpa_decode,
    "rotary_attention": _rotary_attention,
}
