"""The definition of flash attention in plain PyTorch: any device, any float dtype. This file is the specification.

Everything is computed in float32, or float64 when the inputs are, and rounded to the dtype of ``q`` at the end. As
everywhere in PyTorch, both factors of a matrix product have the dtype of the inputs, so the weights are rounded to
it before they multiply the values. The matrix of weights exists for a block of queries at a time; under autograd a
block is computed again in the backward, so that the truth for 65 536 tokens fits on one GPU.
Source: Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762, equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor

BLOCK_WEIGHTS = 2**28
"""Weights, over all heads, that exist at a time: two gigabytes in float64."""
_FAR = 2**62  # no distance is as large, and an index tensor holds it


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    float32_precision: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax of ``scale · q kᵀ`` over the visible keys, times ``v``: (B, N, Hq, E) [and lse (B, Hq, N)].

    For float32 inputs, a ``float32_precision`` of ``high`` drops the bits of every factor of a matrix product that
    TensorFloat-32 does not have, and ``medium`` rounds it to bfloat16.
    """
    left, right = window or (None, None)
    right = 0 if causal else right
    cu_seqlens_q, cu_seqlens_k = (
        cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q,
        cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens, keys = q.shape[1], k.shape[1]
    factors = (float32_precision or "highest") if q.dtype == torch.float32 else str(q.dtype).removeprefix("torch.")
    queries, wide_k, wide_v = (_factor(t.to(dtype), factors) for t in (q, k, v))
    query_sequence, query_place = _places(q, tokens, keys, cu_seqlens_q, cu_seqlens_k)
    key_sequence, key_place = _places(k, keys, keys, cu_seqlens_k, cu_seqlens_k)

    def attend_block(rows: slice, queries: Tensor, wide_k: Tensor, wide_v: Tensor) -> tuple[Tensor, Tensor]:
        distance = key_place[None, :] - query_place[rows, None]
        visible = key_sequence[None, :] == query_sequence[rows, None]
        if left is not None:
            visible = visible & (distance >= -min(left, _FAR))
        if right is not None:
            visible = visible & (distance <= min(right, _FAR))
        return _attend(queries[:, rows], wide_k, wide_v, visible, scale, factors)

    row = max(q.shape[0] * q.shape[2] * keys, 1)
    # An exported program is for sizes that are not known yet, and has one block.
    if torch.compiler.is_exporting() or row * tokens <= BLOCK_WEIGHTS:
        out, lse = attend_block(slice(None), queries, wide_k, wide_v)
    else:
        size = max(BLOCK_WEIGHTS // row, 1)
        blocks = [
            checkpoint(attend_block, slice(i, i + size), queries, wide_k, wide_v, use_reentrant=False)
            for i in range(0, tokens, size)
        ]
        out, lse = (torch.cat(parts, dim) for parts, dim in zip(zip(*blocks), (1, 2)))
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, factors: str) -> tuple[Tensor, Tensor]:
    """Attention under a mask (N, M): output (B, N, Hq, E), and lse (B, Hq, N).

    A hidden key has weight 0, whatever its logit is: NaN in a query or key reaches ``out`` and ``lse`` of the rows
    that see it. Products are those of matrices, in which 0 · NaN is NaN: a value reaches all rows of ``out``.
    """
    batch, tokens, heads, _ = q.shape
    keys, key_heads = k.shape[1:3]
    group = heads // max(key_heads, 1)
    queries = q.unflatten(2, (key_heads, group))  # query head h reads key head h // group
    logits = torch.einsum("bnhgd,bmhd->bhgnm", queries, k) * scale
    logits = logits.masked_fill(~visible, -torch.inf)
    # The maximum is only a shift that cancels, so no gradient flows through it; a row without keys has none.
    if keys:
        top = logits.detach().amax(-1, keepdim=True)
        logits = logits - top.masked_fill(top == -torch.inf, 0.0)
    else:
        top = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    weights = logits.exp()
    total = weights.sum(-1)
    some = total != 0
    total = torch.where(some, total, 1.0)
    weights = (weights / total.unsqueeze(-1)).masked_fill(~visible, 0.0)  # also in a row of NaN
    out = torch.einsum("bhgnm,bmhe->bnhge", _factor(weights, factors), v)
    lse = torch.where(some, total.log() + top.squeeze(-1), -torch.inf)
    return out.reshape(batch, tokens, heads, v.shape[-1]), lse.reshape(batch, heads, tokens)


def _factor(x: Tensor, factors: str) -> Tensor:
    """A factor of a matrix product: ``x`` with the bits that take part, by dtype or by precision of float32."""
    if factors in ("bfloat16", "float16", "medium"):
        return x.to(torch.float16 if factors == "float16" else torch.bfloat16).to(x.dtype)
    if factors == "high":
        kept = (x.detach().resolve_neg().view(torch.int32) & -(2**13)).view(x.dtype)  # 10 bits behind the point
        return x + (kept - x).detach()
    return x


def _places(
    x: Tensor, tokens: int, keys: int, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Packed sequence of every token, and its place among the keys of it: the last token is at the last key."""
    index = torch.arange(tokens, device=x.device)
    if cu_seqlens is None or cu_seqlens_k is None:
        return torch.zeros_like(index), index + (keys - tokens)
    ends = cu_seqlens[1:].long()
    # The first sequence that ends behind the token; empty ones end before it.
    sequence = torch.searchsorted(ends.contiguous(), index, right=True)
    key_ends = cu_seqlens_k[1:].long() - cu_seqlens_k[:-1].long()
    return sequence, index - ends[sequence] + key_ends[sequence]
