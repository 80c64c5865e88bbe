"""Causal self-attention as a layer, with a choice of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from warploom import flash_attention
from warploom.errors import ArgumentError, DtypeError, ShapeError, fault
from warploom.nn.cache import KVCache
from warploom.nn.positions import LRPE, RotaryEmbedding
from warploom.ops.flash_attention.validation import MAX_FEATURES
from warploom.runtime.backend import use_triton

Tensor = torch.Tensor

Implementation = Literal["flash", "plain", "sdpa"]


class Attention(nn.Module):
    """Causal multi-head self-attention with grouped queries.

    Args:
        d_model: Features of the input and the output.
        heads: Query heads ``H``.
        kv_heads: Heads of keys and values ``Hkv``, a divisor of ``heads``; as many by default.
        head_dim: Features ``D`` of a head; ``d_model / heads`` by default.
        position: Encodes queries and keys of ``head_dim`` features: `RotaryEmbedding`, `LRPE` with ``kv_heads``
            rows or a divisor of them, or ``None``. ``RotaryEmbedding(head_dim, rotary_dim=…)`` rotates a part of
            the features. LRPE's cosine form doubles the features; the scale stays ``D^-½``.
        implementation: ``flash`` (`warploom.flash_attention`), ``sdpa`` (PyTorch's), or ``plain`` (PyTorch
            operations that form the matrix of scores).

    Attributes:
        attend: The function of ``flash``; `warploom.distributed` replaces it.
        grouped: True if the rows of ``qkv`` are in the order of key heads, each with its queries, key and value, so
            that a shard of the rows is an attention layer of fewer heads. False if they are in the order of all
            queries, all keys, all values.

    Shapes: ``(B, N, d_model)`` to ``(B, N, d_model)``.

    Raises:
        ArgumentError: A number is not positive or does not divide another, the implementation is unknown, or the
            position does not fit the heads or has an activation that depends on later tokens.
        DtypeError: ``position`` has the wrong type.

    Example:
        ```python
        import torch
        from warploom.nn import Attention, KVCache, RotaryEmbedding

        layer = Attention(64, heads=4, kv_heads=2, position=RotaryEmbedding(16))
        x = torch.randn(2, 10, 64)
        layer(x).sum().backward()
        with torch.no_grad():
            cache = KVCache()
            layer(x, cache=cache)  # the prompt
            layer(x[:, :1], cache=cache)  # one more token
        ```
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        position: RotaryEmbedding | LRPE | None = None,
        implementation: Implementation = "flash",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if d_model < 1 or (head_dim is not None and head_dim < 1):
            name, size = ("d_model", d_model) if d_model < 1 else ("head_dim", head_dim)
            raise fault(ArgumentError, "Attention", name, "positive", size)
        if heads < 1 or (head_dim is None and d_model % heads):
            raise fault(ArgumentError, "Attention", "heads", f"a divisor of d_model = {d_model}", heads)
        if kv_heads < 1 or heads % kv_heads:
            raise fault(ArgumentError, "Attention", "kv_heads", f"a divisor of heads = {heads}", kv_heads)
        head_dim = d_model // heads if head_dim is None else head_dim
        _check_position(position, kv_heads, head_dim)
        if implementation not in get_args(Implementation):
            expected = f"one of {', '.join(get_args(Implementation))}"
            raise fault(ArgumentError, "Attention", "implementation", expected, repr(implementation))
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = head_dim
        self.implementation = implementation
        self.position = position
        self.attend: Callable[..., Any] = flash_attention
        self.grouped = False
        self.qkv = nn.Linear(d_model, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, d_model, bias=False)

    def forward(self, x: Tensor, *, position_ids: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Attend from each token of ``x`` (B, N, d_model) to itself and to the tokens before it.

        Args:
            x: ``(B, N, d_model)``; with a cache, the tokens that follow those in it.
            position_ids: ``(N,)`` or ``(B, N)``; by default they continue from the cache's length.
            cache: The cache to which this layer's keys and values are added. Needs ``torch.no_grad()``.

        Returns:
            ``(B, N, d_model)``.

        Raises:
            ShapeError: ``x`` has another shape.
            ArgumentError: There are ``position_ids`` without an encoding of positions, or a cache with gradients.
            DtypeError: An argument has the wrong type.
        """
        self._check(x, position_ids, cache)
        out = None
        if not self.grouped:
            qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
            out = self._attend_fused(qkv) if cache is None and position_ids is None else None
        if out is None:
            start = {"offset": 0 if cache is None else cache.offset}
            start = start if position_ids is None else {"position_ids": position_ids}
            q, k, v = self._split_groups(self.qkv(x), start) if self.grouped else self._encode(qkv, start)
            out = self._attend(q, k, v, cache)
        projected: Tensor = self.out(out.flatten(2))
        return projected

    @torch.no_grad()
    def group(self, grouped: bool = True) -> None:
        """Order the rows of ``qkv`` by key heads, or by queries, keys and values."""
        if grouped != self.grouped:
            shared, order = self.heads // self.kv_heads, torch.arange(self.heads + 2 * self.kv_heads)
            queries, keys, values = order.split((self.heads, self.kv_heads, self.kv_heads))
            order = torch.cat((queries.view(-1, shared), keys[:, None], values[:, None]), 1).flatten()
            order = order if grouped else order.argsort()
            rows = self.qkv.weight.unflatten(0, (-1, self.head_dim))
            self.qkv.weight.copy_(rows[order.to(rows.device)].flatten(0, 1))
            self.grouped = grouped

    def _check(self, x: Tensor, position_ids: Tensor | None, cache: KVCache | None) -> None:
        width = self.qkv.in_features
        if x.dim() != 3 or x.shape[-1] != width:
            raise fault(ShapeError, "Attention", "x", f"(B, N, d_model) with d_model = {width}", tuple(x.shape))
        if position_ids is not None and self.position is None:
            raise fault(ArgumentError, "Attention", "position_ids", "None in a layer without position", "a tensor")
        if cache is not None and not isinstance(cache, KVCache):
            raise fault(DtypeError, "Attention", "cache", "a KVCache or None", type(cache).__name__)

    def _attend_fused(self, qkv: Tensor) -> Tensor | None:
        """Returns (B, N, H, D) of the projection (B, N, H + 2·Hkv, D), by one operator for RoPE and attention.

        Returns None where that does not run the call: it has kernels only.
        """
        position = self.position
        if self.implementation != "flash" or not isinstance(position, RotaryEmbedding):
            return None
        if self.attend is not flash_attention:
            return None
        if self.head_dim > MAX_FEATURES or not use_triton("Attention", "auto", qkv):
            return None
        factor = position.attention_factor  # of queries and of keys
        if position.head_dim != self.head_dim or (factor != 1.0 and position.rotary_dim != self.head_dim):
            return None
        theta = position.frequencies(qkv)
        from warploom.ops.rotary_attention.api import rotary_attention

        scale = self.head_dim**-0.5 * factor**2
        return rotary_attention(qkv, theta, self.heads, scale, interleaved=position.interleaved)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
        """Returns (B, N, H, D) of queries (B, N, H, ·), keys (B, N, Hkv, ·) and values (B, N, Hkv, D)."""
        scale = self.head_dim**-0.5
        if cache is not None:
            k, v = cache.append(k, v)
        if cache is not None and cache.ragged:
            return self._attend_ragged(q, k, v, scale, cache)
        if self.implementation == "flash":
            attended: Tensor = self.attend(q, k, v, causal=True, scale=scale)
            return attended
        if self.implementation == "sdpa":
            # `is_causal` aligns the first query with the first key, we the last with the last.
            if q.shape[1] == k.shape[1]:
                return _sdpa(q, k, v, scale, None, is_causal=True)
            return _sdpa(q, k, v, scale, None if q.shape[1] == 1 else causal_mask(q, k))
        return plain_attention(q, k, v, scale, causal_mask(q, k))

    def _split_groups(self, projected: Tensor, start: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as `_encode` does, of the grouped projection (B, N, (H + 2·Hkv)·D)."""
        shared = self.heads // self.kv_heads
        groups = projected.unflatten(-1, (self.kv_heads, shared + 2, self.head_dim))
        q, k, v = groups[..., :shared, :].flatten(2, 3), groups[..., shared, :], groups[..., shared + 1, :]
        if self.position is not None:
            q, k = self.position(q, **start), self.position(k, **start)
        return q, k, v

    def _encode(self, qkv: Tensor, start: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns encoded queries (B, N, H, ·) and keys (B, N, Hkv, ·), and values, of (B, N, H + 2·Hkv, D)."""
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if isinstance(self.position, RotaryEmbedding):  # the same frequencies for all heads: one launch
            qk = self.position(qk, **start)
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        if isinstance(self.position, LRPE):
            q, k = self.position(q, **start), self.position(k, **start)
        return q, k, v

    def _attend_ragged(self, q: Tensor, k: Tensor, v: Tensor, scale: float, cache: KVCache) -> Tensor:
        """Returns attention where the entries of the batch have caches of different lengths."""
        if self.implementation != "flash":
            mask = causal_mask(q, k, cache.offset)
            # Masked values are multiplied by zero, and those behind an entry's length may be NaN.
            behind = torch.arange(k.shape[1], device=k.device)[:, None, None] >= cache.seqlens[:, None, None, None]
            k, v = k.masked_fill(behind, 0.0), v.masked_fill(behind, 0.0)
            attend = _sdpa if self.implementation == "sdpa" else plain_attention
            return attend(q, k, v, scale, mask)
        return flash_attention(q, k, v, causal=True, scale=scale, seqused_k=cache.seqlens)

    def extra_repr(self) -> str:
        """Returns the layer's arguments."""
        sizes = f"d_model={self.qkv.in_features}, heads={self.heads}, kv_heads={self.kv_heads}"
        return f"{sizes}, head_dim={self.head_dim}, implementation={self.implementation!r}"


def _check_position(position: object, kv_heads: int, head_dim: int) -> None:
    """Raise unless an encoding of positions fits the key heads and does not depend on later tokens."""
    if position is None:
        return
    if not isinstance(position, RotaryEmbedding | LRPE):
        expected = "a RotaryEmbedding, an LRPE or None"
        raise fault(DtypeError, "Attention", "position", expected, type(position).__name__)
    if position.head_dim != head_dim:
        expected = f"of the layer's head_dim = {head_dim}, even if rotary_dim is less"
        raise fault(ArgumentError, "Attention", "position", expected, f"head_dim = {position.head_dim}")
    if isinstance(position, LRPE) and kv_heads % position.heads:
        expected = f"of as many heads as keys have, kv_heads = {kv_heads}, or a divisor"
        raise fault(ArgumentError, "Attention", "position", expected, f"heads = {position.heads}")
    if isinstance(position, LRPE) and position.activation == "softmax_sequence":
        expected = "of an activation that does not depend on later tokens"
        raise fault(ArgumentError, "Attention", "position", expected, repr(position.activation))


def causal_mask(q: Tensor, k: Tensor, lengths: int | Tensor | None = None) -> Tensor:
    """Returns which keys each query sees, (N, M) or (B, 1, N, M) bool; the last query is aligned with the last key.

    Args:
        q: ``(B, N, H, D)``.
        k: ``(B, M, Hkv, D)``.
        lengths: ``(B,)``, valid keys of each batch entry, including those of the queries, if they differ.
    """
    queries, keys = q.shape[1], k.shape[1]
    column = torch.arange(keys, device=q.device)
    row = torch.arange(queries, device=q.device)[:, None]
    if isinstance(lengths, torch.Tensor):
        return column <= row + lengths[:, None, None, None] - queries
    return column <= row + keys - queries


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Returns attention (B, N, H, E) by plain operations, of (B, N, H, D), (B, M, Hkv, D) and (B, M, Hkv, E).

    The softmax is in float32, or in float64 for float64 inputs.
    """
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * scale  # (B, H, N, M)
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=precise).to(v.dtype)
    out: Tensor = weights @ v.transpose(1, 2)
    return out.transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
