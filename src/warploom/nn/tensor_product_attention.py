"""Tensor-product attention as a layer, which decodes from a cache of factors."""

from __future__ import annotations

import torch
from torch import nn

from warploom import tpa_attention, tpa_decode
from warploom.nn.cache import FactorCache
from warploom.nn.common import check_call, check_sizes, reset_linear, settle_head_dim
from warploom.nn.positions import RotaryEmbedding
from warploom.runtime.backend import Backend
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor


@name_arguments
class TensorProductAttention(nn.Module):
    """Self-attention on factored queries, keys and values, with RoPE on the feature factors.

    A token's queries are ``Q = 1/Rq · A_Q B_Q`` with ``A_Q (H, Rq)`` and ``B_Q (Rq, D)`` from linear maps of its
    features, its keys and values likewise. RoPE rotates the rows of ``B_Q`` and ``B_K``, and thereby Q and K.

    Args:
        d_model: Features of a token.
        heads: Number of heads ``H``.
        head_dim: Features ``D`` of a query and of a key, ``d_model / heads`` by default; even.
        rank_q: Rank ``Rq`` of the queries.
        rank_k: Rank ``Rk`` of the keys.
        rank_v: Rank ``Rv`` of the values.
        value_dim: Features ``E`` of a value; ``head_dim`` by default.
        causal: True for a decoder, whose tokens see themselves and those before them; needed with a cache.
        base: RoPE's frequencies are ``base ** (-2f / D)``.
        bias: True if the linear maps have a bias.
        backend: Backend of `warploom.tpa_attention`, `warploom.tpa_decode` and `warploom.lrpe_rotate`.

    State dict: ``aq, bq, ak, bk, av, bv``, each ``.weight`` of ``(H·R, d_model)`` or ``(R·features, d_model)``, and
    ``out.weight`` of ``(d_model, H·E)``; with ``bias`` also ``.bias``. Rows of an ``a`` run over heads, then ranks;
    of a ``b`` over ranks, then features.

    Raises:
        ArgumentError: A size is not positive, or ``head_dim`` is odd.

    Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.

    Example:
        ```python
        import torch
        from warploom.nn import FactorCache, TensorProductAttention

        layer = TensorProductAttention(64, heads=4, causal=True)
        x = torch.randn(2, 10, 64)
        layer(x).sum().backward()
        with torch.no_grad():
            cache = FactorCache()
            layer(x, cache)  # the prompt
            layer(x[:, :1], cache)  # one more token
        ```
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        head_dim: int | None = None,
        rank_q: int = 6,
        rank_k: int = 2,
        rank_v: int = 2,
        value_dim: int | None = None,
        causal: bool = False,
        base: float = 10000.0,
        bias: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        head_dim = settle_head_dim("TensorProductAttention", d_model, heads, head_dim)
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes("TensorProductAttention", value_dim=value_dim, rank_q=rank_q, rank_k=rank_k, rank_v=rank_v)
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.rank_q, self.rank_k, self.rank_v = rank_q, rank_k, rank_v
        self.causal, self.backend = causal, backend
        self.aq = nn.Linear(d_model, heads * rank_q, bias)
        self.bq = nn.Linear(d_model, rank_q * head_dim, bias)
        self.ak = nn.Linear(d_model, heads * rank_k, bias)
        self.bk = nn.Linear(d_model, rank_k * head_dim, bias)
        self.av = nn.Linear(d_model, heads * rank_v, bias)
        self.bv = nn.Linear(d_model, rank_v * value_dim, bias)
        self.out = nn.Linear(heads * value_dim, d_model, bias)
        self.position = RotaryEmbedding(head_dim, base=base)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that give factors of unit variance for features of unit variance; set biases to zero."""
        reset_linear(self.aq, self.bq, self.ak, self.bk, self.av, self.bv, self.out)

    def forward(self, x: Tensor, cache: FactorCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend from each token to all tokens, or if ``causal`` to itself and to those before it.

        Args:
            x: ``(B, N, d_model)``, features of the tokens.
            cache: The cache of earlier tokens, to which these are added. Needs ``torch.no_grad()``. The tokens then
                follow those that each batch entry has in the cache.
            cu_seqlens: ``(S + 1,)`` int32 or int64, packed sequences in a batch of one; not with a cache.

        Returns:
            ``(B, N, d_model)``.

        Raises:
            ArgumentError: There is a cache with ``cu_seqlens``, with gradients, or without ``causal``.
            ShapeError: ``x`` has another shape.
            DtypeError: ``cache`` has the wrong type.
        """
        check_call("TensorProductAttention", x, self.aq.in_features, cache, FactorCache, cu_seqlens, self.causal)
        aq, bq = self.aq(x).unflatten(-1, (self.heads, -1)), self.bq(x).unflatten(-1, (self.rank_q, -1))
        ak, bk = self.ak(x).unflatten(-1, (self.heads, -1)), self.bk(x).unflatten(-1, (self.rank_k, -1))
        av, bv = self.av(x).unflatten(-1, (self.heads, -1)), self.bv(x).unflatten(-1, (self.rank_v, -1))
        offset = 0 if cache is None else cache.offset
        bq, bk = (self.position(b, offset=offset, cu_seqlens=cu_seqlens, backend=self.backend) for b in (bq, bk))
        first = cache is None or cache.length == 0
        if cache is not None:
            held = cache.append(ak, av, bk, bv)
        if first:
            values = tpa_attention(
                aq, ak, av, bq, bk, bv, causal=self.causal, cu_seqlens=cu_seqlens, backend=self.backend
            )
        else:
            ak, av, bk, bv = held
            lengths = cache.seqlens  # type: ignore[union-attr]
            values = tpa_decode(aq, ak, av, bq, bk, bv, seqused_k=lengths, backend=self.backend)
        return self.out(values.flatten(2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Returns the layer's arguments that its submodules do not show."""
        sizes = f"d_model={self.aq.in_features}, heads={self.heads}, head_dim={self.head_dim}"
        sizes += f", value_dim={self.value_dim}"
        ranks = f"rank_q={self.rank_q}, rank_k={self.rank_k}, rank_v={self.rank_v}"
        return f"{sizes}, {ranks}, causal={self.causal}, backend={self.backend!r}"
