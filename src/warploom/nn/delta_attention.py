"""Delta rule attention as a layer, with a short convolution and gates, which decodes from states."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from warploom import delta_attention, short_convolution
from warploom.errors import ArgumentError, fault
from warploom.nn.cache import StateCache
from warploom.nn.common import check_call, check_sizes, reset_linear, settle_head_dim
from warploom.nn.positions import LRPE
from warploom.ops.delta_attention.validation import Encoding
from warploom.runtime.arguments import check_choice
from warploom.runtime.backend import Backend
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor
Decay = Literal["none", "head", "feature"]
STEPS = (0.001, 0.1)
"""The initial steps, by which decays are multiplied: between these, evenly in their logarithms."""
STRENGTHS = (1.0, 16.0)
"""The initial strengths of decays are between these."""


class _Tokens(NamedTuple):
    """Projections of tokens, of which the convolution and attention make outputs."""

    mixed: Tensor  # (B, N, C), queries, keys and values of all heads, before the convolution
    beta: Tensor  # (B, N, H)
    decay: Tensor | None  # (B, N, H) or (B, N, H, D)

    def of(self, entry: int, tokens: int) -> _Tokens:
        """Returns the first tokens of a batch entry."""
        return _Tokens(*(None if x is None else x[entry : entry + 1, :tokens] for x in self))  # type: ignore[arg-type]


@name_arguments
class DeltaAttention(nn.Module):
    """Causal self-attention by the delta rule: DeltaNet, Gated DeltaNet or Kimi Delta Attention.

    It computes ``out(norm(delta_attention(q, k, v, β, decay)) · silu(gate))``. ``q, k, v`` are a linear map of a
    token's features, mixed by a short causal convolution with SiLU; queries and keys are then normalized.
    ``β = sigmoid(beta(x))``, and a logarithm of a decay is ``−exp(A_log) · softplus(decay(x) + dt_bias)``.

    Args:
        d_model: Features of a token.
        heads: Number of heads ``H`` of values.
        key_heads: Number of heads ``Hk`` of queries and keys, a divisor of ``heads``; as many by default.
        head_dim: Features ``D`` of a query and of a key, ``d_model / heads`` by default; even for ``rotate``.
        value_dim: Features ``E`` of a value; ``head_dim`` by default.
        decay: ``head``, one for each head (Gated DeltaNet); ``feature``, one for each feature of a key (Kimi Delta
            Attention); or ``none`` (DeltaNet).
        position: ``none``, or ``rotate``: LRPE with a row of frequencies for every head of keys.
        taps: Tokens ``K`` of the convolution, at least 2.
        base: The initial frequencies are ``base ** (-f / F)`` for ``f = 0 … F − 1``.
        learnable: True if the frequencies are a parameter.
        norm_eps: Epsilon of the norm.
        bias: True if the linear maps ``qkv``, ``gate`` and ``out`` have a bias.
        backend: Backend of `warploom.delta_attention` and `warploom.short_convolution`.

    Attributes:
        attend: The function that attends, `warploom.delta_attention`; `warploom.distributed` replaces it.
        convolve: The one that mixes tokens, `warploom.short_convolution`; likewise.

    State dict: ``qkv.weight``, whose rows run over heads of queries, of keys and of values, then features;
    ``convolution`` of ``(C, K)`` in the same order; ``beta.weight``, ``gate.weight``, ``out.weight``, and
    ``norm.weight`` of ``(E,)``. With decays ``decay.weight``, for ``feature`` also ``decay_in.weight``,
    ``A_log`` of ``(H,)`` and ``dt_bias`` of ``(H,)`` or ``(H · D,)``; ``position.theta`` if ``learnable``.

    Raises:
        ArgumentError: A size is not positive or does not fit, or an option is unknown.
        DtypeError: A size is not an int.

    Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024, arXiv 2406.06484; Yang et
    al., "Gated Delta Networks", 2024, arXiv 2412.06464; Kimi Team, "Kimi Linear", 2025, arXiv 2510.26692.

    Example:
        ```python
        import torch
        from warploom.nn import DeltaAttention, StateCache

        layer = DeltaAttention(64, heads=4, decay="feature")
        x = torch.randn(2, 10, 64)
        layer(x).sum().backward()
        with torch.no_grad():
            cache = StateCache()
            layer(x, cache)  # the prompt
            layer(x[:, :1], cache)  # one more token
        ```
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        decay: Decay = "head",
        position: Encoding = "none",
        taps: int = 4,
        base: float = 10000.0,
        learnable: bool = False,
        norm_eps: float = 1e-5,
        bias: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        head_dim = settle_head_dim("DeltaAttention", d_model, heads, head_dim)
        value_dim = head_dim if value_dim is None else value_dim
        key_heads = heads if key_heads is None else key_heads
        check_sizes("DeltaAttention", value_dim=value_dim, key_heads=key_heads, taps=taps)
        if heads % key_heads:
            raise fault(ArgumentError, "DeltaAttention", "key_heads", f"a divisor of heads = {heads}", key_heads)
        if taps < 2:
            raise fault(ArgumentError, "DeltaAttention", "taps", "at least 2", taps)
        check_choice("DeltaAttention", "decay", decay, get_args(Decay))
        check_choice("DeltaAttention", "position", position, get_args(Encoding))
        self.heads, self.key_heads, self.head_dim, self.value_dim = heads, key_heads, head_dim, value_dim
        self.taps, self.backend = taps, backend
        self.attend: Callable[..., Any] = delta_attention
        self.convolve: Callable[..., Any] = short_convolution
        channels = 2 * key_heads * head_dim + heads * value_dim
        self.qkv = nn.Linear(d_model, channels, bias)
        self.convolution = nn.Parameter(torch.empty(channels, taps))
        self.beta = nn.Linear(d_model, heads, bias=False)
        self.gate = nn.Linear(d_model, heads * value_dim, bias)
        self.out = nn.Linear(heads * value_dim, d_model, bias)
        self.norm = nn.RMSNorm(value_dim, norm_eps)
        self.decay: nn.Linear | None = None
        if decay != "none":
            logits = heads if decay == "head" else heads * head_dim
            self.decay_in = nn.Linear(d_model, head_dim, bias=False) if decay == "feature" else nn.Identity()
            self.decay = nn.Linear(head_dim if decay == "feature" else d_model, logits, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(logits))
        self.position = None
        if position != "none":
            self.position = LRPE(key_heads, head_dim, kind="rotate", base=base, learnable=learnable)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights that keep the variance of features, and decays of all strengths; set biases to zero."""
        reset_linear(self.qkv, self.beta, self.gate, self.out)
        nn.init.uniform_(self.convolution, -(self.taps**-0.5), self.taps**-0.5)
        if self.decay is None:
            return
        reset_linear(self.decay, *(layer for layer in (self.decay_in,) if isinstance(layer, nn.Linear)))
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(*STRENGTHS).log())
        steps = torch.empty_like(self.dt_bias).uniform_(*map(math.log, STEPS)).exp()
        self.dt_bias.copy_(steps + (-torch.expm1(-steps)).log())  # whose softplus is the step

    def forward(self, x: Tensor, cache: StateCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend from each token to itself and to the tokens before it.

        Args:
            x: ``(B, N, d_model)``, features of the tokens.
            cache: The states after earlier tokens, to which these are added. Needs ``torch.no_grad()``. The tokens
                then follow those that each batch entry has in the cache.
            cu_seqlens: ``(S + 1,)`` int32 or int64, packed sequences in a batch of one; not with a cache.

        Returns:
            ``(B, N, d_model)``.

        Raises:
            ArgumentError: There are both a cache and ``cu_seqlens``, or a cache with gradients.
            ShapeError: ``x`` has another shape, or the cache has another batch size.
            DtypeError: ``x`` or ``cache`` has the wrong type.
        """
        check_call("DeltaAttention", x, self.qkv.in_features, cache, StateCache, cu_seqlens)
        tokens, options = self._project(x), self._options(x)
        if cache is None:
            values, *_ = _attend(tokens, cu_seqlens=cu_seqlens, **options)
        else:
            before: dict[str, Any] = {"offset": cache.offset, "state": cache.state, "inputs": cache.inputs}
            values, state, inputs = _attend(tokens, **before, **options, return_states=True)
            again = functools.partial(_states_after, tokens, before, options)
            cache.put(state, x.shape[1], again, inputs)
        values = self.norm(values.to(self.norm.weight.dtype)).flatten(2)  # which autocast would leave to 16 bits
        values = values * nn.functional.silu(self.gate(x))
        return self.out(values)  # type: ignore[no-any-return]

    def _project(self, x: Tensor) -> _Tokens:
        wide = torch.promote_types(x.dtype, torch.float32)
        beta = self.beta(x).to(wide).sigmoid()
        if self.decay is None:
            return _Tokens(self.qkv(x), beta, None)
        strength = self.A_log.to(wide).exp()
        logits = self.decay(self.decay_in(x)).to(wide) + self.dt_bias.to(wide)
        # Softplus; PyTorch's own has a gradient of other strides than its compiler believes.
        steps = torch.logaddexp(logits, logits.new_zeros(()))
        if self.decay.out_features > self.heads:
            steps, strength = steps.unflatten(-1, (self.heads, -1)), strength[:, None]
        return _Tokens(self.qkv(x), beta, -strength * steps)

    def _options(self, x: Tensor) -> dict[str, Any]:
        position = self.position
        return {
            "functions": (self.convolve, self.attend),
            "convolution": self.convolution,
            "heads": (self.key_heads, self.key_heads, self.heads),
            "features": (self.head_dim, self.head_dim, self.value_dim),
            "theta": None if position is None else position.frequencies(x),
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        """Returns the layer's arguments that its submodules do not show."""
        sizes = f"d_model={self.qkv.in_features}, heads={self.heads}, key_heads={self.key_heads}"
        sizes += f", head_dim={self.head_dim}, value_dim={self.value_dim}, taps={self.taps}"
        return f"{sizes}, backend={self.backend!r}"


def _attend(
    tokens: _Tokens,
    *,
    functions: tuple[Callable[..., Any], ...],
    convolution: Tensor,
    heads: tuple[int, ...],
    features: tuple[int, ...],
    theta: Tensor | None,
    backend: Backend,
    offset: int | Tensor = 0,
    state: Tensor | None = None,
    inputs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_states: bool = False,
) -> tuple[Tensor, Any, Any]:
    """Returns values (B, N, H, E), and the states after the last token, of attention and of the convolution."""
    convolve, attend = functions
    before = {"initial_state": inputs, "return_state": True} if return_states else {}
    mixed: Any = convolve(
        tokens.mixed, convolution, activation="silu", cu_seqlens=cu_seqlens, backend=backend, **before
    )
    mixed, inputs = mixed if return_states else (mixed, None)
    parts = mixed.split([count * size for count, size in zip(heads, features)], -1)
    q, k, v = (x.unflatten(-1, (count, -1)) for x, count in zip(parts, heads))
    found = attend(
        q, k, v, tokens.beta, decay=tokens.decay, theta=theta, encoding="none" if theta is None else "rotate",
        offset=offset, normalize=True, initial_state=state, return_state=return_states, cu_seqlens=cu_seqlens,
        backend=backend,
    )  # fmt: skip
    return (*found, inputs) if isinstance(found, tuple) else (found, None, None)


def _states_after(
    tokens: _Tokens, before: dict[str, Any], options: dict[str, Any], entry: int, count: int
) -> tuple[Tensor, ...]:
    """Returns the states of a batch entry after so many tokens of a call."""
    own: dict[str, Any] = {name: x[entry : entry + 1] if isinstance(x, Tensor) else x for name, x in before.items()}
    _, state, inputs = _attend(tokens.of(entry, count), **own, **options, return_states=True)
    return state, inputs
