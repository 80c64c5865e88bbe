"""Linear attention as a layer, which decodes from a state of constant size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from warploom import linear_attention
from warploom.errors import ArgumentError, DtypeError, ShapeError, fault
from warploom.nn.cache import StateCache
from warploom.nn.positions import LRPE

__all__ = ["LinearAttention"]

Tensor = torch.Tensor
POSITIONS = ("rotate", "cosine", "none")


class LinearAttention(nn.Module):
    """Causal self-attention without a softmax, on queries and keys encoded by LRPE, with a gate behind it.

    ``out(norm(linear_attention(q, k, v)) · silu(gate))``, where ``q, k, v`` and ``gate`` are linear maps of a
    token's features, and the norm is over the features of each head. There is no denominator, since sums of cosines
    can be negative. A head forgets at its own rate: ``λ_h = exp(−2^(−8h / H) · (1 − layer / layers))``,
    ``h = 1 … H``.

    Args:
        dim: Features of a token.
        heads: ``H``.
        head_dim: ``D``, features of a query and of a key; even for ``rotate``.
        value_dim: ``E``, features of a value; ``head_dim`` by default.
        position: ``rotate`` or ``cosine``, LRPE of a row of frequencies for every head, or ``none``.
        activation: Of queries and keys before they are encoded, see `warploom.linear_attention`.
        base: The frequencies start as ``base ** (-f / F)``, with ``F`` of them.
        learnable: Whether they are a parameter.
        layer: The layer's place in a model of ``layers`` of them, from 0: later ones forget more slowly.
        layers: See ``layer``.
        norm_eps: Of the norm.
        bias: Whether the linear maps have one.
        backend: That of `warploom.linear_attention`.

    Attributes:
        attend: What computes it, `warploom.linear_attention`; `warploom.distributed` puts its own there.
        decay: ``(H,)``, logarithms of the ``λ_h``; a buffer, and in the state dict.

    State dict: ``q, k, v, gate, out``, each ``.weight``, with ``bias`` also ``.bias``; ``norm.weight`` of ``(E,)``,
    ``decay``, and ``position.theta`` if ``learnable``. Rows of the first four run over heads, then features.

    Raises:
        ArgumentError: A size is not positive, ``head_dim`` is odd for ``rotate``, or an option is unknown.

    Sources: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270; Qin et al., "Lightning
    Attention-2", 2024, arXiv 2401.04658; Sun et al., "Retentive Network", 2023, arXiv 2307.08621.
    """

    decay: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        position: str = "rotate",
        activation: str = "silu",
        base: float = 10000.0,
        learnable: bool = True,
        layer: int = 0,
        layers: int = 1,
        norm_eps: float = 1e-5,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"dim": dim, "heads": heads, "head_dim": head_dim, "value_dim": value_dim, "layers": layers}
        for argument, size in sizes.items():
            if size < 1:
                raise fault(ArgumentError, "LinearAttention", argument, "positive", size)
        if not 0 <= layer < layers:
            raise fault(ArgumentError, "LinearAttention", "layer", f"0 … {layers - 1}", layer)
        if position not in POSITIONS:
            expected = f"one of {', '.join(POSITIONS)}"
            raise fault(ArgumentError, "LinearAttention", "position", expected, repr(position))
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.layer, self.layers = layer, layers
        self.activation, self.backend = activation, backend
        self.attend: Callable[..., Any] = linear_attention
        self.q = nn.Linear(dim, heads * head_dim, bias)
        self.k = nn.Linear(dim, heads * head_dim, bias)
        self.v = nn.Linear(dim, heads * value_dim, bias)
        self.gate = nn.Linear(dim, heads * value_dim, bias)
        self.out = nn.Linear(heads * value_dim, dim, bias)
        self.norm = nn.RMSNorm(value_dim, norm_eps)
        self.position = (
            None if position == "none" else LRPE(heads, head_dim, kind=position, base=base, learnable=learnable)
        )
        self.register_buffer("decay", torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the decays; draw weights such that features of unit variance stay so; biases are zero."""
        head = torch.arange(1, self.heads + 1, dtype=torch.float64, device=self.decay.device)
        self.decay.copy_(-(2.0 ** (-8.0 * head / self.heads)) * (1.0 - self.layer / self.layers))
        for layer in (self.q, self.k, self.v, self.gate, self.out):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, cache: StateCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: ``(B, N, dim)``, features of the tokens.
            cache: The state behind earlier tokens, which these are added to; needs ``torch.no_grad()``. The tokens
                then stand behind the ones that each batch entry has there.
            cu_seqlens: ``(S + 1,)`` int32 or int64, packed sequences in a batch of one; not with a cache.

        Returns:
            ``(B, N, dim)``.

        Raises:
            ArgumentError: Both a cache and ``cu_seqlens``, or a cache while a gradient is wanted.
            ShapeError: ``x`` has another shape, or the cache is of another batch.
            DtypeError: ``cache`` is something else.
        """
        if x.dim() != 3 or x.shape[-1] != self.q.in_features:
            expected = f"(B, N, dim) with dim = {self.q.in_features}"
            raise fault(ShapeError, "LinearAttention", "x", expected, tuple(x.shape))
        if cache is not None and not isinstance(cache, StateCache):
            raise fault(DtypeError, "LinearAttention", "cache", "a StateCache or None", type(cache).__name__)
        if cache is not None and cu_seqlens is not None:
            raise fault(ArgumentError, "LinearAttention", "cu_seqlens", "left out with a cache", "both")
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        values = self._attend(q, k, v, cu_seqlens=cu_seqlens) if cache is None else self._continue(q, k, v, cache)
        values = self.norm(values.to(self.norm.weight.dtype)).flatten(2)  # which autocast would leave to 16 bits
        values = values * nn.functional.silu(self.gate(x))
        return self.out(values)  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **place: Any) -> Any:
        """`warploom.linear_attention` as this layer has it, at a place among tokens."""
        position = self.position
        theta = None if position is None else position.frequencies(q)
        return self.attend(
            q,
            k,
            v,
            decay=self.decay,
            theta=theta,
            encoding="none" if position is None else position.kind,
            activation=self.activation,
            backend=self.backend,
            **place,
        )

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        """Attend behind what the cache has seen, and add to it."""
        before, lengths = cache.state, cache.lengths

        def state_after(entry: int, tokens: int) -> Tensor:
            keys, values = k[entry : entry + 1, :tokens], v[entry : entry + 1, :tokens]
            start = lengths[entry] if lengths else 0
            first = None if before is None else before[entry : entry + 1]
            _, state = self._attend(keys, keys, values, offset=start, initial_state=first, return_state=True)
            return state  # type: ignore[no-any-return]

        values, state = self._attend(q, k, v, offset=cache.offset, initial_state=before, return_state=True)
        cache.put(state, q.shape[1], state_after)
        return values  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """What the sizes of the linear maps do not show."""
        return f"heads={self.heads}, head_dim={self.head_dim}, value_dim={self.value_dim}"
