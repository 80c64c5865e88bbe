"""Linear attention as a layer, which decodes from a state of constant size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn

from warploom import linear_attention
from warploom.errors import ArgumentError, fault
from warploom.nn.cache import StateCache
from warploom.nn.common import check_call, check_ints, check_sizes, reset_linear, settle_head_dim
from warploom.nn.positions import LRPE
from warploom.ops.linear_attention.validation import Activation, Encoding
from warploom.runtime.arguments import check_choice
from warploom.runtime.backend import Backend
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor


@name_arguments
class LinearAttention(nn.Module):
    """Causal self-attention without a softmax, with LRPE of queries and keys, and a gate on the output.

    It computes ``out(norm(linear_attention(q, k, v)) · silu(gate))``. ``q, k, v`` and ``gate`` are linear maps of a
    token's features, and the norm is over the features of each head. There is no denominator, since sums of cosines
    can be negative. Each head has its own decay: ``λ_h = exp(−2^(−8h / H) · (1 − layer / layers))``, ``h = 1 … H``.

    Args:
        d_model: Features of a token.
        heads: Number of heads ``H``.
        head_dim: Features ``D`` of a query and of a key, ``d_model / heads`` by default; even for ``rotate``.
        value_dim: Features ``E`` of a value; ``head_dim`` by default.
        position: ``rotate`` or ``cosine``, LRPE with a row of frequencies for every head, or ``none``.
        activation: Applied to queries and keys before they are encoded, see `warploom.linear_attention`.
        base: The initial frequencies are ``base ** (-f / F)`` for ``f = 0 … F − 1``.
        learnable: True if the frequencies are a parameter.
        layer: Index of the layer in the model, from 0. Later layers decay more slowly.
        layers: Number of layers in the model.
        norm_eps: Epsilon of the norm.
        bias: True if the linear maps have a bias.
        backend: Backend of `warploom.linear_attention`.

    Attributes:
        attend: The function that attends, `warploom.linear_attention`; `warploom.distributed` replaces it.
        decay: ``(H,)``, logarithms of the ``λ_h``: a buffer, in the state dict.

    State dict: ``q, k, v, gate, out``, each ``.weight``, with ``bias`` also ``.bias``; ``norm.weight`` of ``(E,)``,
    ``decay``, and ``position.theta`` if ``learnable``. Rows of the first four run over heads, then features.

    Raises:
        ArgumentError: A size is not positive, ``head_dim`` is odd for ``rotate``, or an option is unknown.

    Sources: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270; Qin et al., "Lightning
    Attention-2", 2024, arXiv 2401.04658; Sun et al., "Retentive Network", 2023, arXiv 2307.08621.

    Example:
        ```python
        import torch
        from warploom.nn import LinearAttention, StateCache

        layer = LinearAttention(64, heads=4, position="cosine")
        x = torch.randn(2, 10, 64)
        layer(x).sum().backward()
        with torch.no_grad():
            cache = StateCache()
            layer(x, cache)  # the prompt
            layer(x[:, :1], cache)  # one more token
        ```
    """

    decay: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        position: Encoding = "rotate",
        activation: Activation = "silu",
        base: float = 10000.0,
        learnable: bool = True,
        layer: int = 0,
        layers: int = 1,
        norm_eps: float = 1e-5,
        bias: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        head_dim = settle_head_dim("LinearAttention", d_model, heads, head_dim)
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes("LinearAttention", value_dim=value_dim, layers=layers)
        check_ints("LinearAttention", layer=layer)
        if not 0 <= layer < layers:
            raise fault(ArgumentError, "LinearAttention", "layer", f"0 … {layers - 1}", layer)
        check_choice("LinearAttention", "position", position, get_args(Encoding))
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.layer, self.layers = layer, layers
        self.activation, self.backend = activation, backend
        self.attend: Callable[..., Any] = linear_attention
        self.q = nn.Linear(d_model, heads * head_dim, bias)
        self.k = nn.Linear(d_model, heads * head_dim, bias)
        self.v = nn.Linear(d_model, heads * value_dim, bias)
        self.gate = nn.Linear(d_model, heads * value_dim, bias)
        self.out = nn.Linear(heads * value_dim, d_model, bias)
        self.norm = nn.RMSNorm(value_dim, norm_eps)
        self.position = (
            None if position == "none" else LRPE(heads, head_dim, kind=position, base=base, learnable=learnable)
        )
        self.register_buffer("decay", torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the decays, draw weights that keep the variance of features, and set biases to zero."""
        head = torch.arange(1, self.heads + 1, dtype=torch.float64, device=self.decay.device)
        self.decay.copy_(-(2.0 ** (-8.0 * head / self.heads)) * (1.0 - self.layer / self.layers))
        reset_linear(self.q, self.k, self.v, self.gate, self.out)

    def forward(self, x: Tensor, cache: StateCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend from each token to itself and to the tokens before it.

        Args:
            x: ``(B, N, d_model)``, features of the tokens.
            cache: The state after earlier tokens, to which these are added. Needs ``torch.no_grad()``. The tokens
                then follow those that each batch entry has in the cache.
            cu_seqlens: ``(S + 1,)`` int32 or int64, packed sequences in a batch of one; not with a cache.

        Returns:
            ``(B, N, d_model)``.

        Raises:
            ArgumentError: There are both a cache and ``cu_seqlens``, or a cache with gradients.
            ShapeError: ``x`` has another shape, or the cache has another batch size.
            DtypeError: ``cache`` has the wrong type.
        """
        check_call("LinearAttention", x, self.q.in_features, cache, StateCache, cu_seqlens)
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        values = self._attend(q, k, v, cu_seqlens=cu_seqlens) if cache is None else self._continue(q, k, v, cache)
        values = self.norm(values.to(self.norm.weight.dtype)).flatten(2)  # which autocast would leave to 16 bits
        values = values * nn.functional.silu(self.gate(x))
        return self.out(values)  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **place: Any) -> Any:
        """Call the layer's attention with its options, and those of the tokens' place."""
        return self.attend(q, k, v, **self._options(q), **place)

    def _options(self, q: Tensor) -> dict[str, Any]:
        position = self.position
        return {
            "decay": self.decay,
            "theta": None if position is None else position.frequencies(q),
            "encoding": "none" if position is None else position.kind,
            "activation": self.activation,
            "backend": self.backend,
        }

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        """Attend after the tokens of the cache, and add the new ones to it."""
        before, start, options = cache.state, cache.offset, self._options(q)
        values, state = self.attend(q, k, v, **options, offset=start, initial_state=before, return_state=True)
        again = functools.partial(self.attend, **options)
        cache.put(state, q.shape[1], functools.partial(_state_after, again, k, v, start, before))
        return values  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Returns the layer's arguments that its submodules do not show."""
        sizes = f"d_model={self.q.in_features}, heads={self.heads}, head_dim={self.head_dim}"
        sizes += f", value_dim={self.value_dim}"
        place = f"layer={self.layer}, layers={self.layers}"
        return f"{sizes}, activation={self.activation!r}, {place}, backend={self.backend!r}"


def _state_after(
    attend: Callable[..., Any],
    k: Tensor,
    v: Tensor,
    start: int | Tensor,
    before: Tensor | None,
    entry: int,
    tokens: int,
) -> Tensor:
    """Returns the state (1, H, F, E) of a batch entry after so many tokens of a call."""
    own = slice(entry, entry + 1)
    keys, values, first = k[own, :tokens], v[own, :tokens], None if before is None else before[own]
    offset = start[own] if isinstance(start, Tensor) else start
    _, state = attend(keys, keys, values, offset=offset, initial_state=first, return_state=True)
    return state  # type: ignore[no-any-return]
