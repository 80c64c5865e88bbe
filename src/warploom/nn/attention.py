"""Attention as a layer, of a sequence to itself or to another, with a choice of implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from warploom import BlockMask, flash_attention
from warploom.errors import ArgumentError, DtypeError, ShapeError, fault
from warploom.nn.cache import KVCache
from warploom.nn.common import check_call, check_ints, check_sizes, settle_head_dim
from warploom.nn.paged_cache import PagedKVCache
from warploom.nn.positions import LRPE, RotaryEmbedding
from warploom.ops.flash_attention.validation import MAX_FEATURES
from warploom.runtime.arguments import (
    FLOATS,
    bounds_of_itself,
    check_choice,
    check_one_form,
    check_tensor,
    first_given,
)
from warploom.runtime.backend import use_triton
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor

Implementation = Literal["flash", "plain", "sdpa"]
NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys."""


@name_arguments
class Attention(nn.Module):
    """Multi-head attention with grouped queries: of a sequence to itself, or to another one.

    Every token sees all tokens by default, as in an encoder; with ``causal`` it sees itself and those before it, as
    in a decoder.

    Args:
        d_model: Features of the input and the output.
        heads: Query heads ``H``.
        kv_heads: Heads of keys and values ``Hkv``, a divisor of ``heads``; as many by default.
        head_dim: Features ``D`` of a head; ``d_model / heads`` by default.
        position: Encodes queries and keys of ``head_dim`` features: `RotaryEmbedding`, `LRPE` with ``kv_heads``
            rows or a divisor of them, or ``None``. ``RotaryEmbedding(head_dim, rotary_dim=…)`` rotates a part of
            the features. LRPE's cosine form doubles the features; the scale stays ``D^-½``.
        causal: Hide later tokens; needed with a cache.
        window: ``(left, right)``: how many keys a token sees on each side, see `warploom.flash_attention`.
        softcap: Bound of the logits, see `warploom.flash_attention`.
        sink: True for a learned logit of each head without a value, see `warploom.flash_attention`.
        qk_norm: True for an RMSNorm of each head's queries and keys, before positions.
        bias: True if the linear maps have a bias.
        context_dim: Features of the other sequence, for cross-attention: ``context`` then gives keys and values.
        implementation: ``flash`` (`warploom.flash_attention`), ``sdpa`` (PyTorch's), or ``plain`` (PyTorch
            operations that form the matrix of scores). Windows, caps, sinks, packed sequences, masks and biases are
            of ``flash``.

    Attributes:
        attend: The function of ``flash``; `warploom.distributed` replaces it.
        grouped: True if the rows of ``qkv`` are in the order of key heads, each with its queries, key and value, so
            that a shard of the rows is an attention layer of fewer heads. False if they are in the order of all
            queries, all keys, all values.

    State dict: ``qkv`` and ``out``, each ``.weight``, with ``bias`` also ``.bias``; with ``context_dim`` ``q`` and
    ``kv`` instead of ``qkv``. ``sink`` ``(H,)``; ``q_norm.weight`` and ``k_norm.weight`` ``(D,)``.

    Shapes: ``(B, N, d_model)`` to ``(B, N, d_model)``.

    Raises:
        ArgumentError: A number is not positive or does not divide another, the implementation is unknown or lacks
            an option, or the position does not fit the heads or has an activation that depends on later tokens.
        DtypeError: ``position`` has the wrong type.

    Example:
        ```python
        import torch
        from warploom.nn import Attention, KVCache, RotaryEmbedding

        layer = Attention(64, heads=4, kv_heads=2, causal=True, position=RotaryEmbedding(16))
        x = torch.randn(2, 10, 64)
        layer(x).sum().backward()
        with torch.no_grad():
            cache = KVCache()
            layer(x, cache=cache)  # the prompt
            layer(x[:, :1], cache=cache)  # one more token
        cross = Attention(64, heads=4, context_dim=32)
        print(cross(x, context=torch.randn(2, 7, 32)).shape)  # torch.Size([2, 10, 64])
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
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        softcap: float | None = None,
        sink: bool = False,
        qk_norm: bool = False,
        bias: bool = False,
        context_dim: int | None = None,
        implementation: Implementation = "flash",
    ) -> None:
        super().__init__()
        head_dim = settle_head_dim("Attention", d_model, heads, head_dim)
        kv_heads = heads if kv_heads is None else kv_heads
        check_ints("Attention", kv_heads=kv_heads)
        if kv_heads < 1 or heads % kv_heads:
            raise fault(ArgumentError, "Attention", "kv_heads", f"a divisor of heads = {heads}", kv_heads)
        _check_position(position, kv_heads, head_dim, causal)
        check_choice("Attention", "implementation", implementation, get_args(Implementation))
        self.options = {name: x for name, x in (("window", window), ("softcap", softcap)) if x is not None}
        if implementation != "flash" and (self.options or sink):
            expected = "'flash' with a window, a softcap or a sink"
            raise fault(ArgumentError, "Attention", "implementation", expected, repr(implementation))
        self.d_model, self.heads, self.kv_heads, self.head_dim = d_model, heads, kv_heads, head_dim
        self.causal, self.qk_norm, self.context_dim = causal, qk_norm, context_dim
        self.implementation = implementation
        self.position = position
        self.attend: Callable[..., Any] = flash_attention
        self.grouped = False
        rows = heads * head_dim, 2 * kv_heads * head_dim
        if context_dim is None:
            self.qkv = nn.Linear(d_model, sum(rows), bias)
        else:
            check_sizes("Attention", context_dim=context_dim)
            self.q, self.kv = nn.Linear(d_model, rows[0], bias), nn.Linear(context_dim, rows[1], bias)
        self.out = nn.Linear(rows[0], d_model, bias)
        self.sink = nn.Parameter(torch.zeros(heads)) if sink else None
        if qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim, NORM_EPS), nn.RMSNorm(head_dim, NORM_EPS)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | PagedKVCache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        mask: BlockMask | Tensor | None = None,
        bias: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """Attend from each token of ``x`` (B, N, d_model) to the tokens that it sees, of ``x`` or of ``context``.

        Args:
            x: ``(B, N, d_model)``; with a cache, the tokens that follow those in it.
            context: ``(B, M, context_dim)``, in a layer with ``context_dim``: what keys and values are of.
            position_ids: ``(N,)`` or ``(B, N)``, of ``x``; by default they continue from the cache's length, and
                start again at each packed sequence. ``(B, N, axes)`` for an `LRPE` of several axes.
            cache: The cache to which this layer's keys and values are added. Needs ``torch.no_grad()``. With a
                `PagedKVCache` ``x`` has the packed tokens of its table's step.
            cu_seqlens: ``(S + 1,)`` int32 or int64, packed sequences in a batch of one; not with a cache.
            cu_seqlens_q: Those of ``x`` alone, where ``context`` has others, see `warploom.flash_attention`.
            cu_seqlens_k: Those of ``context``.
            mask: What `warploom.block_mask` makes, or a boolean tensor ``(B or 1, H or 1, N, M)``, true where a
                token of ``x`` sees a key; a causal layer hides later ones besides. ``M`` counts the keys of
                ``context``, or those of a cache with the new ones. Not with a `PagedKVCache`, as is true of all
                three.
            bias: ``(B or 1, H or 1, N or 1, M)``: added to the logits. It has a gradient.
            alibi: ``(H,)`` or ``(B, H)``: slopes, see `warploom.flash_attention`.

        Returns:
            ``(B, N, d_model)``.

        Raises:
            ShapeError: ``x``, ``context``, a mask, a bias or slopes have another shape.
            ArgumentError: There are ``position_ids`` without an encoding of positions; a cache with gradients,
                packed sequences or a context, or in a layer that is not causal; a context too many or too few; a
                mask, a bias or slopes in another implementation than ``flash``.
            DtypeError: An argument has the wrong type.
        """
        given = {"cu_seqlens": cu_seqlens, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        if context is None:
            of_x = of_keys = bounds_of_itself("Attention", **given)
            given = {"cu_seqlens": of_x}
        else:
            check_one_form("Attention", **given)
            # With as many queries as keys, the bounds of one stand for both.
            of_x = first_given(cu_seqlens, cu_seqlens_q, cu_seqlens_k)
            of_keys = first_given(cu_seqlens, cu_seqlens_k, cu_seqlens_q)
        hiding: dict[str, Any] = {**given, "mask": mask, "bias": bias, "alibi": alibi}
        hiding = {name: value for name, value in hiding.items() if value is not None}
        self._check(x, context, position_ids, cache, of_x)
        if hiding and self.implementation != "flash":
            expected, argument = "None but with implementation 'flash'", next(iter(hiding))
            raise fault(ArgumentError, "Attention", argument, expected, f"one with {self.implementation!r}")
        if isinstance(cache, PagedKVCache) and position_ids is None:
            position_ids = cache.table.position_ids
        if position_ids is None:
            start = {"offset": 0 if cache is None else cache.offset, "cu_seqlens": of_x}  # type: ignore[union-attr]
        else:
            start = {"position_ids": position_ids}
        if context is not None:
            q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
            k, v = self.kv(context).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(2)
            q, k = self._place(q, "q_norm", start), self._place(k, "k_norm", {"cu_seqlens": of_keys})
        elif self.grouped:
            q, k, v = self._split_groups(self.qkv(x), start)
        else:
            qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
            out = self._attend_fused(qkv) if cache is None and position_ids is None and not hiding else None
            if out is not None:
                return self.out(out.flatten(2))  # type: ignore[no-any-return]
            q, k, v = self._encode(qkv, start)
        projected: Tensor = self.out(self._attend(q, k, v, cache, **hiding).flatten(2))
        return projected

    @torch.no_grad()
    def group(self, grouped: bool = True) -> None:
        """Order the rows of ``qkv`` by key heads, or by queries, keys and values."""
        if grouped != self.grouped:
            shared, order = self.heads // self.kv_heads, torch.arange(self.heads + 2 * self.kv_heads)
            queries, keys, values = order.split((self.heads, self.kv_heads, self.kv_heads))
            order = torch.cat((queries.view(-1, shared), keys[:, None], values[:, None]), 1).flatten()
            order = order if grouped else order.argsort()
            for held in self.qkv.parameters():
                rows = held.unflatten(0, (-1, self.head_dim))
                held.copy_(rows[order.to(rows.device)].flatten(0, 1))
            self.grouped = grouped

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        position_ids: Tensor | None,
        cache: KVCache | PagedKVCache | None,
        bounds: Tensor | None,
    ) -> None:
        kind = PagedKVCache if isinstance(cache, PagedKVCache) else KVCache
        check_call("Attention", x, self.d_model, cache, kind, bounds, self.causal)
        if kind is PagedKVCache and self.implementation != "flash":
            expected = "a KVCache but with implementation 'flash'"
            raise fault(
                ArgumentError, "Attention", "cache", expected, f"a PagedKVCache with {self.implementation!r}"
            )
        if (context is None) != (self.context_dim is None):
            expected = "None in a layer without context_dim" if self.context_dim is None else "(B, M, context_dim)"
            raise fault(ArgumentError, "Attention", "context", expected, "None" if context is None else "a tensor")
        if context is not None:
            check_tensor("Attention", "context", context, FLOATS)
        if context is not None and (context.dim() != 3 or context.shape[-1] != self.context_dim):
            expected = f"(B, M, context_dim) with context_dim = {self.context_dim}"
            raise fault(ShapeError, "Attention", "context", expected, tuple(context.shape))
        if context is not None and cache is not None:
            raise fault(ArgumentError, "Attention", "cache", "None with a context", "a cache")
        if position_ids is not None and self.position is None:
            raise fault(ArgumentError, "Attention", "position_ids", "None in a layer without position", "a tensor")

    def _attend_fused(self, qkv: Tensor) -> Tensor | None:
        """Returns (B, N, H, D) of the projection (B, N, H + 2·Hkv, D), by one operator for RoPE and attention.

        Returns None where that does not run the call: it has kernels only, of causal attention without options.
        """
        position = self.position
        if self.implementation != "flash" or not isinstance(position, RotaryEmbedding):
            return None
        if not self.causal or self.options or self.sink is not None or self.qk_norm:
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

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | PagedKVCache | None, **hiding: Any
    ) -> Tensor:
        """Returns (B, N, H, D) of queries (B, N, H, ·), keys (B, M, Hkv, ·) and values (B, M, Hkv, D)."""
        scale = self.head_dim**-0.5
        if isinstance(cache, PagedKVCache):
            k, v, pages = cache.append(k, v)
            options = {"causal": True, "scale": scale, "sink": self.sink, **self.options, **pages, **hiding}
            out: Tensor = flash_attention(q, k, v, **options)
            return out
        if cache is not None:
            k, v = cache.append(k, v)
        ragged = cache is not None and cache.ragged
        if self.implementation == "flash":
            options = {"causal": self.causal, "scale": scale, **self.options, **hiding}
            if self.sink is not None:
                options["sink"] = self.sink
            if ragged:
                options["seqused_k"] = cache.seqlens  # type: ignore[union-attr]
            attended: Tensor = (flash_attention if ragged else self.attend)(q, k, v, **options)
            return attended
        attend = _sdpa if self.implementation == "sdpa" else plain_attention
        if ragged:
            seqlens = cache.seqlens  # type: ignore[union-attr]
            # Masked values are multiplied by zero, and those behind an entry's length may be NaN.
            behind = torch.arange(k.shape[1], device=k.device)[:, None, None] >= seqlens[:, None, None, None]
            k, v = k.masked_fill(behind, 0.0), v.masked_fill(behind, 0.0)
            return attend(q, k, v, scale, causal_mask(q, k, seqlens))
        if self.implementation == "sdpa" and self.causal and q.shape[1] in (1, k.shape[1]):
            # `is_causal` aligns the first query with the first key, we the last with the last.
            return _sdpa(q, k, v, scale, None, is_causal=q.shape[1] == k.shape[1])
        return attend(q, k, v, scale, causal_mask(q, k) if self.causal else None)

    def _place(self, x: Tensor, norm: str, start: dict[str, Any]) -> Tensor:
        """Returns normalised and encoded queries or keys (B, N, heads, ·) of (B, N, heads, D)."""
        if self.qk_norm:
            x = self.get_submodule(norm)(x).to(x.dtype)
        return x if self.position is None else self.position(x, **start)

    def _split_groups(self, projected: Tensor, start: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as `_encode` does, of the grouped projection (B, N, (H + 2·Hkv)·D)."""
        shared = self.heads // self.kv_heads
        groups = projected.unflatten(-1, (self.kv_heads, shared + 2, self.head_dim))
        q, k, v = groups[..., :shared, :].flatten(2, 3), groups[..., shared, :], groups[..., shared + 1, :]
        return self._place(q, "q_norm", start), self._place(k, "k_norm", start), v

    def _encode(self, qkv: Tensor, start: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns encoded queries (B, N, H, ·) and keys (B, N, Hkv, ·), and values, of (B, N, H + 2·Hkv, D)."""
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if isinstance(self.position, RotaryEmbedding) and not self.qk_norm:  # frequencies of all heads: one launch
            return *self.position(qk, **start).split((self.heads, self.kv_heads), dim=2), v
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        return self._place(q, "q_norm", start), self._place(k, "k_norm", start), v

    def extra_repr(self) -> str:
        """Returns the layer's arguments."""
        given: dict[str, Any] = {
            "d_model": self.d_model,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        given |= {"causal": self.causal, **self.options, "implementation": self.implementation}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _check_position(position: object, kv_heads: int, head_dim: int, causal: bool) -> None:
    """Raise unless an encoding of positions fits the key heads and, if causal, does not depend on later tokens."""
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
    if causal and isinstance(position, LRPE) and position.activation == "softmax_sequence":
        expected = "of an activation that does not depend on later tokens in a causal layer"
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


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Returns attention (B, N, H, E) by plain operations, of (B, N, H, D), (B, M, Hkv, D) and (B, M, Hkv, E).

    The softmax is in float32, or in float64 for float64 inputs.
    """
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * scale  # (B, H, N, M)
    precise = torch.promote_types(scores.dtype, torch.float32)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(dim=-1, dtype=precise).to(v.dtype)
    out: Tensor = weights @ v.transpose(1, 2)
    return out.transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
