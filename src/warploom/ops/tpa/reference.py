"""The definition of tensor-product attention in plain PyTorch: any device, any float dtype; the specification.

Both functions are naive: they form queries, keys and values from their factors and attend. Sums are in float32, or
float64 when the factors are, and outputs are rounded once to the dtype of the factors. What matrix units take as
16-bit numbers when the factors are such has the bits of that dtype here too: queries and weights, and in
`tpa_attention` keys and values, their gradients and those of the scores. The scores themselves are not rounded, but
the output is, of which the backward takes the mean of their gradients.
Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.

Shapes: B batch, N queries, M keys, H heads, D features, E value features, R rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from warploom.ops.flash_attention.reference import Bounds, split, with_tail, without_tail

Tensor = torch.Tensor

BLOCK_SCORES = 2**28
"""Scores (B, H, N, M) that are held at a time; more queries than that are done in blocks, one after another."""


def tpa_attention(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    cu_seqlens: Bounds | None = None,
    cu_seqlens_q: Bounds | None = None,
    cu_seqlens_k: Bounds | None = None,
) -> Tensor:
    """Returns attention of Q on K and V, which are formed here: (B, N, H, E).

    Packed sequences, and rows behind the last, are as in `warploom.flash_attention`'s definition.
    """
    factors = (aq, ak, av, bq, bk, bv)
    cu_seqlens = next((bounds for bounds in (cu_seqlens, cu_seqlens_q, cu_seqlens_k) if bounds is not None), None)
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        attend_one = functools.partial(
            tpa_attention, causal=causal, scale=scale, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v
        )
        none = [None] * len(cu_seqlens)
        pieces = zip(*(none if x is None else split(x, cu_seqlens) for x in factors))
        return with_tail([attend_one(*piece) for piece in list(pieces)[:-1]], 1, bq.shape[1], 0.0)
    if cu_seqlens is not None:
        given = (None if x is None else without_tail(x, cu_seqlens) for x in factors)
        aq, ak, av, bq, bk, bv = given  # type: ignore[assignment]
    q = round_to(queries(aq, bq, scale_q), bq.dtype)
    k, v = (round_to(product(a, b, s), bq.dtype) for a, b, s in ((ak, bk, scale_k), (av, bv, scale_v)))
    out = attend(q, k, v, scale, bq.dtype, *visible_in_attention(q, k, causal, cu_seqlens)).to(bq.dtype)
    return out if cu_seqlens is None else without_tail(out, cu_seqlens)


def tpa_decode(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """Returns attention of the last N valid entries of a cache on all its valid entries: (B, N, H, E)."""
    if seqused_k is not None:
        ak, bk, av, bv = (only_valid(factor, seqused_k) for factor in (ak, bk, av, bv))
    q = round_to(queries(aq, bq, scale_q), bq.dtype)
    k, v = product(ak, bk, scale_k), product(av, bv, scale_v)
    return attend(q, k, v, scale, bq.dtype, *visible_in_decode(q, k, seqused_k)).to(bq.dtype)


# ----------------------------------------------------------------------------------------------------------
# Factors
# ----------------------------------------------------------------------------------------------------------


def with_rank_axis(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns factors with their rank axis, which may be left out at rank one: (B, M, H, R) and (B, M, R, D)."""
    return (a.unsqueeze(-1) if a.dim() == 3 else a), (b.unsqueeze(-2) if b.dim() == 3 else b)


def product(a: Tensor, b: Tensor, scale: float | None) -> Tensor:
    """Returns ``scale · A B`` of every token in float32 or better: (B, M, H, D). The scale is 1 / R by default."""
    a, b = with_rank_axis(a, b)
    dtype = torch.promote_types(b.dtype, torch.float32)
    return torch.matmul(a.to(dtype), b.to(dtype)) * (1 / a.shape[-1] if scale is None else scale)


def queries(aq: Tensor | None, bq: Tensor, scale: float | None) -> Tensor:
    """Returns Q (B, N, H, D) in float32 or better; ``bq`` is Q itself when there is no ``aq``."""
    if aq is not None:
        return product(aq, bq, scale)
    return bq.to(torch.promote_types(bq.dtype, torch.float32)) * (1.0 if scale is None else scale)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x`` with the bits that ``dtype`` has, in its own dtype."""
    return x.to(dtype).to(x.dtype)


def with_rounded_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x`` as it is; its gradient is rounded to ``dtype``, as it enters a matrix product of that."""
    through = round_to(x, dtype)
    return torch.where(through.isfinite(), through + (x - through).detach(), x)  # which may exceed all its numbers


def with_rounded_mean(out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``out`` as it is; its backward forms the mean of gradients of scores from ``out`` in ``dtype``.

    That is what a forward leaves for the backward. Where one key has all the weight, gradient and mean cancel, and
    this rounding is most of the error.
    """
    if out.dtype == dtype:
        return out
    rounding = (round_to(out, dtype) - out).detach()
    rounding = rounding.masked_fill(~rounding.isfinite(), 0.0)  # an output that overflows is no mean
    return out - (lse - lse.detach()) * rounding


def only_valid(factor: Tensor, seqused_k: Tensor) -> Tensor:
    """Returns a cache with zeros behind its valid entries, where anything may lie, NaN too."""
    entry = torch.arange(factor.shape[1], device=factor.device)
    valid = entry < seqused_k[:, None]
    return torch.where(valid.view(*valid.shape, *[1] * (factor.dim() - 2)), factor, 0)


# ----------------------------------------------------------------------------------------------------------
# Which keys a query sees: those from ``first`` to ``last`` - 1, both (1 or B, N)
# ----------------------------------------------------------------------------------------------------------


def visible_in_decode(q: Tensor, k: Tensor, seqused_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns which keys the queries see: these are the last N valid entries, and see all up to themselves.

    More than M valid entries count as M, and fewer than none as none.
    """
    tokens, keys = q.shape[1], k.shape[1]
    query = torch.arange(tokens, device=q.device)[None]
    length = keys if seqused_k is None else seqused_k[:, None].long().clamp(0, keys)
    return torch.zeros_like(query), length - tokens + query + 1


def visible_in_attention(q: Tensor, k: Tensor, causal: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns which keys of their packed sequence queries see, none ahead if ``causal``; both end together."""
    tokens, keys = q.shape[1], k.shape[1]
    query = torch.arange(tokens, device=q.device)
    first, last = torch.zeros_like(query), torch.full_like(query, keys)
    if cu_seqlens is not None:
        bounds = torch.cat((cu_seqlens, cu_seqlens[-1:])).to(query.dtype)  # behind the last sequence: no keys
        sequence = torch.searchsorted(bounds[:-1], query, right=True)
        first, last = bounds[sequence - 1], bounds[sequence]
    if causal:
        last = torch.minimum(last, query + (keys - tokens + 1))
    return first[None], last[None]


# ----------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dtype: torch.dtype, first: Tensor, last: Tensor
) -> Tensor:
    """Returns softmax attention on formed keys and values, with weights as ``dtype`` has them: (B, N, H, E)."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = k.permute(0, 2, 3, 1), v.transpose(1, 2)  # (B, H, D, M), (B, H, M, E)

    def block(q: Tensor, first: Tensor, last: Tensor) -> Tensor:
        scores = with_rounded_gradient(torch.matmul(q.transpose(1, 2), keys), dtype) * factor
        weights, lse = softmax(scores, first[:, None], last[:, None])
        out = torch.matmul(round_to(weights, dtype), values)
        return with_rounded_mean(out, lse, dtype).transpose(1, 2)

    return _in_blocks(block, q, first, last, k.shape[1])


def softmax(scores: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights of visible keys and their log-sum (…, N, 1); ``scores`` (…, N, M), bounds (…, N).

    A query that sees no key has weights of zero, and a log-sum of zero.
    """
    key = torch.arange(scores.shape[-1], device=scores.device)
    visible = (key >= first[..., None]) & (key < last[..., None])
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | blind), -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    weights = weights.masked_fill(~visible, 0.0)  # also in a row of NaN
    return weights, torch.logsumexp(scores, -1, keepdim=True).masked_fill(blind, 0.0)


def _in_blocks(
    block: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, first: Tensor, last: Tensor, keys: int
) -> Tensor:
    """Returns ``block(q, first, last)`` for all queries, as many at a time as `BLOCK_SCORES` allows.

    Where there are several blocks the backward computes each again, so that one at a time is held there too.
    """
    batch, tokens, heads = q.shape[:3]
    # An exported program is for sizes that are not known yet, and has one block.
    if torch.compiler.is_exporting() or batch * tokens * heads * keys <= BLOCK_SCORES:
        return block(q, first, last)
    size = max(1, BLOCK_SCORES // (batch * heads * keys))
    pieces = []
    for start in range(0, tokens, size):
        piece = slice(start, start + size)
        arguments = q[:, piece], first[:, piece], last[:, piece]
        if torch.is_grad_enabled():
            pieces.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(block(*arguments))
    return torch.cat(pieces, dim=1)
