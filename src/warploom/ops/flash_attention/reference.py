"""The definition of flash attention in plain PyTorch: any device, any float dtype. This file is the specification.

Everything is computed in float32, or float64 when the inputs are, and rounded to the dtype of ``q`` at the end. As
everywhere in PyTorch, both factors of a matrix product have the dtype of the inputs, so the weights are rounded to
it before they multiply the values. The matrix of weights exists for a block of queries at a time; under autograd a
block is computed again in the backward, so that the truth for 65 536 tokens fits on one GPU.
Source: Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762, equation 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Bounds = Tensor | Sequence[int]
"""Offsets (S + 1,) at which packed sequences begin and end."""

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
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Bounds | None = None,
    cu_seqlens_q: Bounds | None = None,
    cu_seqlens_k: Bounds | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    float32_precision: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns softmax of ``scale · q kᵀ`` over the visible keys, times ``v``: (B, N, Hq, E) [and lse (B, Hq, N)].

    ``softcap · tanh(· / softcap)`` bends the logits, and ``sink`` (Hq,) is one more of them in every sum. Batch
    entry ``b`` has ``seqused_k[b]`` keys, which lie in pages ``block_table[b]`` if there are such. So has packed
    sequence ``b``, if there are bounds of the queries alone.

    Rows behind the last of packed sequences become 0, with an lse of −inf, and so do their gradients, whatever they
    hold. Where bounds are ints, every sequence is a call of its own, so that NaN in one reaches no other. Where
    they are tensors, whose numbers may not be known yet, a mask keeps sequences apart, which lets NaN through.

    Logits become ``z + alibi_h · (j − i − (M − N)) + bias`` behind the cap, with ``alibi`` (Hq,) or (B, Hq) and
    ``bias`` (B|1, Hq|1, N|1, M); a bias of −inf hides a key, as does a boolean ``mask`` (B|1, Hq|1, N, M) where it
    is false. Keys and values that they hide from all queries reach nothing, whatever they hold. Places in masks and
    biases are those in the tensors, over all sequences.

    For float32 inputs, a ``float32_precision`` of ``high`` drops the bits of every factor of a matrix product that
    TensorFloat-32 does not have, and ``medium`` rounds it to bfloat16.
    """
    left, right = window or (None, None)
    right = 0 if causal else right
    cu_seqlens_q = cu_seqlens_q if cu_seqlens is None else cu_seqlens
    if seqused_k is None:
        cu_seqlens_q, cu_seqlens_k = (
            cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q,
            cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        )
    masked = mask is not None or bias is not None or alibi is not None
    if (
        masked and cu_seqlens_q is not None and not isinstance(cu_seqlens_q, Tensor)
    ):  # whose places are of all sequences
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(bounds, device=q.device) for bounds in (cu_seqlens_q, cu_seqlens_k)
        )
    if cu_seqlens_q is not None and not isinstance(cu_seqlens_q, Tensor):
        attend = functools.partial(
            flash_attention, causal=causal, scale=scale, window=window, softcap=softcap, sink=sink,
            float32_precision=float32_precision, return_lse=True,
        )  # fmt: skip
        pieces = split(q, cu_seqlens_q)[:-1]
        bounds_k: Any = cu_seqlens_k
        if seqused_k is None:
            parts = [attend(*piece) for piece in zip(pieces, split(k, bounds_k), split(v, bounds_k))]
        elif block_table is None:
            entries = zip(pieces, k.split(1), v.split(1), seqused_k.split(1))
            parts = [attend(*tensors, seqused_k=used) for *tensors, used in entries]
        else:
            tables = zip(pieces, seqused_k.split(1), block_table.split(1))
            parts = [attend(piece, k, v, seqused_k=used, block_table=table) for piece, used, table in tables]
        out, lse = (
            with_tail([part[i] for part in parts], dim, q.shape[1], fill)
            for i, dim, fill in ((0, 1, 0.0), (1, 2, -torch.inf))
        )
        return (out, lse) if return_lse else out
    packed: Any = (cu_seqlens_q, cu_seqlens_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if block_table is not None:
        k, v = (_from_pages(t, block_table) for t in (k, v))
    tokens, keys = q.shape[1], k.shape[1]
    used = None if seqused_k is None else seqused_k.long()[:, None]  # (B, 1)
    if used is not None:  # a product with what lies behind them would be NaN where that is
        behind = (torch.arange(keys, device=k.device) >= used)[:, :, None, None]
        k, v = k.masked_fill(behind, 0.0), v.masked_fill(behind, 0.0)
    if cu_seqlens_q is not None:
        q = without_tail(q, packed[0])
        if used is None:
            k, v = without_tail(k, packed[1]), without_tail(v, packed[1])
    factors = (float32_precision or "highest") if q.dtype == torch.float32 else str(q.dtype).removeprefix("torch.")
    queries, wide_k, wide_v = (factor_of(t.to(dtype), factors) for t in (q, k, v))
    if used is not None and cu_seqlens_q is not None:  # the cache as one sequence of keys
        wide_k, wide_v = wide_k.flatten(0, 1)[None], wide_v.flatten(0, 1)[None]
        query_sequence, query_place = _places(q, tokens, keys, packed[0], _bounds_of(used))
        index = torch.arange(wide_k.shape[1], device=k.device)
        key_place = index % keys
        key_sequence = torch.where(key_place < used[index // keys, 0], index // keys, -1)  # those not used: of none
        used = None
    else:
        query_sequence, query_place = _places(q, tokens, keys, *packed)
        key_sequence, key_place = _places(k, keys, keys, packed[1], packed[1])

    def by_group(x: Tensor) -> Tensor:
        """Returns (B, Hq or 1, …) with an axis of key heads and one of the heads of a group."""
        return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (k.shape[2], -1))

    def attend_block(rows: slice, queries: Tensor, wide_k: Tensor, wide_v: Tensor) -> tuple[Tensor, Tensor]:
        distance = key_place[None, :] - query_place[rows, None]
        visible = key_sequence[None, :] == query_sequence[rows, None]
        if cu_seqlens_q is not None:  # those behind the last sequence are of none
            visible = visible & (query_sequence[rows, None] < cu_seqlens_q.shape[0] - 1)
        if used is not None:  # (B, N, M)
            distance = distance + (keys - used)[:, :, None]
            visible = visible & (key_place < used)[:, None, :]
        if left is not None:
            visible = visible & (distance >= -min(left, _FAR))
        if right is not None:
            visible = visible & (distance <= min(right, _FAR))
        visible = visible[None] if visible.dim() == 2 else visible
        visible = visible[:, None, None]
        added = None
        if mask is not None:
            visible = visible & by_group(mask[:, :, rows])
        if alibi is not None:
            slopes = by_group(alibi.to(dtype).view(-1, alibi.shape[-1], 1, 1))
            added = slopes * (distance[None] if distance.dim() == 2 else distance)[:, None, None]
        if bias is not None:
            some = by_group(bias if bias.shape[2] == 1 else bias[:, :, rows]).to(dtype)
            visible = visible & (some != -torch.inf)
            some = some.masked_fill(some == -torch.inf, 0.0)
            added = some if added is None else added + some
        tile = queries[:, rows]
        if masked:
            tile, wide_k, wide_v = _without_hidden(tile, wide_k, wide_v, visible)
        return _attend(tile, wide_k, wide_v, visible, scale, factors, softcap, sink, added)

    row = max(q.shape[0] * q.shape[2] * wide_k.shape[1], 1)
    # An exported program is for sizes that are not known yet, and has one block.
    if torch.compiler.is_exporting() or row * tokens <= BLOCK_WEIGHTS:
        out, lse = attend_block(slice(None), queries, wide_k, wide_v)
    else:
        size = max(BLOCK_WEIGHTS // row, 1)
        again = functools.partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
        blocks = [again(slice(i, i + size), queries, wide_k, wide_v) for i in range(0, tokens, size)]
        out, lse = (torch.cat(parts, dim) for parts, dim in zip(zip(*blocks), (1, 2)))
    out = out.to(q.dtype)
    if cu_seqlens_q is not None:
        out, lse = without_tail(out, cu_seqlens_q), without_tail(lse, cu_seqlens_q, 2, -torch.inf)
    return (out, lse) if return_lse else out


def _bounds_of(used: Tensor) -> Tensor:
    """Returns the bounds (S + 1,) of sequences with so many keys each, (S, 1)."""
    return torch.nn.functional.pad(used[:, 0].cumsum(0), (1, 0))


def split(x: Tensor, bounds: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns the rows (B, n, …) of each packed sequence, and those behind the last."""
    ends = [min(bound, x.shape[1]) for bound in bounds]
    lengths = [max(end - begin, 0) for begin, end in itertools.pairwise(ends)]
    pieces: tuple[Tensor, ...] = x.split([*lengths, x.shape[1] - ends[-1]], 1)
    return pieces


def with_tail(parts: Sequence[Tensor], dim: int, rows: int, fill: float) -> Tensor:
    """Returns the results of all packed sequences in one tensor of so many rows, the last of no sequence."""
    shape = list(parts[0].shape)
    shape[dim] = rows - sum(part.shape[dim] for part in parts)
    return torch.cat([*parts, parts[0].new_full(shape, fill)], dim)


def without_tail(x: Tensor, cu_seqlens: Tensor, dim: int = 1, fill: float = 0.0) -> Tensor:
    """Returns ``x`` with ``fill`` and no gradient in the rows behind the last sequence, which may be NaN."""
    tail = torch.arange(x.shape[dim], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(tail.view(-1, *[1] * (x.dim() - dim - 1)), fill)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    factors: str,
    softcap: float | None,
    sink: Tensor | None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention under a mask (B|1, Hkv|1, group|1, N, M): output (B, N, Hq, E), and lse (B, Hq, N).

    ``added``, broadcast as the mask is, is added to the logits.

    A hidden key has weight 0, whatever its logit is: NaN in a query or key reaches ``out`` and ``lse`` of the rows
    that see it. Products are those of matrices, in which 0 · NaN is NaN: a value reaches all rows of ``out``.
    """
    batch, tokens, heads, _ = q.shape
    keys, key_heads = k.shape[1:3]
    group = heads // max(key_heads, 1)
    queries = q.unflatten(2, (key_heads, group))  # query head h reads key head h // group
    logits = torch.einsum("bnhgd,bmhd->bhgnm", queries, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if added is not None:
        logits = logits + added
    logits = logits.masked_fill(~visible, -torch.inf)
    # The maximum is only a shift that cancels, so no gradient flows through it; a row without keys has none.
    row_max = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if keys:
        row_max = logits.detach().amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(logits.dtype).reshape(key_heads, group, 1, 1)
        row_max = torch.maximum(row_max, sink.detach())
    shift = row_max.masked_fill(row_max == -torch.inf, 0.0)
    logits = logits - shift
    weights = logits.exp()
    total = weights.sum(-1)
    if sink is not None:
        total = total + (sink - shift).exp().squeeze(-1)
    some = total != 0
    total = torch.where(some, total, 1.0)
    weights = (weights / total.unsqueeze(-1)).masked_fill(~visible, 0.0)  # also in a row of NaN
    out = torch.einsum("bhgnm,bmhe->bnhge", factor_of(weights, factors), v)
    lse = torch.where(some, total.log() + row_max.squeeze(-1), -torch.inf)
    return out.reshape(batch, tokens, heads, v.shape[-1]), lse.reshape(batch, heads, tokens)


def _without_hidden(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v with zeros in queries that see nothing, and in keys and values that no query sees."""
    blind = ~visible.any(-1).permute(0, 3, 1, 2)[..., None]  # (B, N, Hkv, group, 1)
    hidden = ~visible.any(3).any(2).transpose(1, 2)[..., None]  # (B, M, Hkv, 1)
    groups = q.unflatten(2, (k.shape[2], -1)).masked_fill(blind, 0.0)
    return groups.flatten(2, 3), k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


def _from_pages(x: Tensor, block_table: Tensor) -> Tensor:
    """Returns pages (pages, page_size, H, F) in the order of each batch entry's table: (B, P · page_size, H, F)."""
    if x.shape[0] == 0:
        return x.new_zeros(block_table.shape[0], block_table.shape[1] * x.shape[1], *x.shape[2:])
    pages = block_table.long().clamp(0, x.shape[0] - 1)  # behind the used keys there may be any number
    return x[pages].flatten(1, 2)


def factor_of(x: Tensor, factors: str) -> Tensor:
    """Returns ``x`` with the bits that take part in a matrix product, by its dtype or the precision of float32."""
    if factors in ("bfloat16", "float16", "medium"):
        return x.to(torch.float16 if factors == "float16" else torch.bfloat16).to(x.dtype)
    if factors == "high":
        kept = (x.detach().resolve_neg().view(torch.int32) & -(2**13)).view(x.dtype)  # 10 bits behind the point
        return x + (kept - x).detach()
    return x


def _places(
    x: Tensor, tokens: int, keys: int, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the packed sequence of every token, and its place among the keys; the last is at the last key."""
    index = torch.arange(tokens, device=x.device)
    if cu_seqlens is None or cu_seqlens_k is None:
        return torch.zeros_like(index), index + (keys - tokens)
    ends = cu_seqlens[1:].long()
    # The first sequence that ends behind the token; empty ones end before it. Behind the last there is none.
    sequence = torch.searchsorted(ends.contiguous(), index, right=True)
    key_ends = cu_seqlens_k[1:].long() - cu_seqlens_k[:-1].long()
    known = sequence.clamp(max=ends.shape[0] - 1)
    return sequence, index - ends[known] + key_ends[known]
