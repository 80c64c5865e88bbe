"""Tensor-product attention as a layer, and the cache of factors that it decodes from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from warploom import lrpe_rotate, tpa_attention, tpa_decode
from warploom.errors import ArgumentError, ShapeError, fault

__all__ = ["FactorCache", "TensorProductAttention"]

Tensor = torch.Tensor
Factors = tuple[Tensor, Tensor, Tensor, Tensor]


class FactorCache:
    """Factors of the keys and values that one layer has seen: twice ``R·(H + D)`` numbers a token, not ``H·D``.

    Memory is allocated at the first `append`, in the dtype and on the device of what is appended. Entries of a
    batch may have different lengths: append right-padded prompts, then `truncate` each entry to its own; the next
    token of an entry overwrites its padding. Lengths are kept on the host too, so nothing here waits for the GPU.

    Args:
        capacity: Tokens to allocate for, which is then also the most that fit; ``None`` to grow by doubling.

    Attributes:
        lengths: Tokens of each batch entry, as ints; empty before the first append.

    Raises:
        ArgumentError: The capacity is not positive.
    """

    _FIRST = 256  # tokens allocated at first where no capacity is given

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise fault(ArgumentError, "FactorCache", "capacity", "positive", capacity)
        self.capacity = capacity
        self.lengths: list[int] = []
        self._factors: Factors | None = None  # (B, allocated, H or R, R or features) each
        self._seqlens: Tensor | None = None

    @property
    def seqlens(self) -> Tensor:
        """Tokens of each batch entry, (B,) int32 on the device: ``cache_seqlens`` of `warploom.tpa_decode`.

        Raises:
            ArgumentError: Nothing has been appended yet.
        """
        if self._factors is None:
            raise fault(ArgumentError, "FactorCache", "the cache", "appended to first", "an empty one")
        if self._seqlens is None:
            lengths = torch.tensor(self.lengths, dtype=torch.int32)
            self._seqlens = lengths.to(self._factors[0].device, non_blocking=True)
        return self._seqlens

    @property
    def offset(self) -> int | Tensor:
        """Position of the next token: an int where all entries agree, else `seqlens`."""
        if len(set(self.lengths)) <= 1:
            return max(self.lengths, default=0)
        return self.seqlens

    def append(self, ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor) -> Factors:
        """Add the same number of tokens to every entry.

        Args:
            ak: ``(B, N, H, Rk)``.
            av: ``(B, N, H, Rv)``.
            bk: ``(B, N, Rk, D)``.
            bv: ``(B, N, Rv, E)``.

        Returns:
            The four factors of all tokens so far, in the same order, views of the first ``max(lengths)`` tokens.
            What lies behind an entry's own length means nothing.

        Raises:
            ShapeError: A size is not that of the other factors or of earlier calls.
            ArgumentError: More tokens than the capacity, or a gradient is wanted: the cache is for inference.
        """
        new = (ak, av, bk, bv)
        if torch.is_grad_enabled() and any(factor.requires_grad for factor in new):
            raise fault(
                ArgumentError, "FactorCache.append", "factors", "without gradient (torch.no_grad)", "one wanted"
            )
        if any(factor.dim() != 4 or factor.shape[:2] != ak.shape[:2] for factor in new):
            shapes = [tuple(factor.shape) for factor in new]
            raise fault(ShapeError, "FactorCache.append", "factors", "four times (B, N, ·, ·)", shapes)
        tokens = ak.shape[1]
        held = self._room(new)
        if len(set(self.lengths)) <= 1:
            start = max(self.lengths, default=0)
            for store, factor in zip(held, new):
                store[:, start : start + tokens] = factor
        else:
            entry = torch.arange(ak.shape[0], device=ak.device)[:, None]
            place = self.seqlens[:, None] + torch.arange(tokens, device=ak.device)
            for store, factor in zip(held, new):
                store[entry, place] = factor
        self._set_lengths([length + tokens for length in self.lengths])
        longest = max(self.lengths, default=0)
        return tuple(store[:, :longest] for store in held)  # type: ignore[return-value]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of every entry.

        Args:
            lengths: Tokens to keep, one int for each batch entry, none more than there are.

        Raises:
            ArgumentError: A length is negative or more than there is, or there are not as many as batch entries.
        """
        fits = len(lengths) == len(self.lengths) and all(0 <= n <= old for n, old in zip(lengths, self.lengths))
        if not fits:
            expected = f"one int for each entry, at most {self.lengths}"
            raise fault(ArgumentError, "FactorCache.truncate", "lengths", expected, list(lengths))
        self._set_lengths(list(lengths))

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths, self._seqlens = lengths, None

    def _room(self, new: Factors) -> Factors:
        """The stores, with room for the new tokens."""
        batch, tokens = new[0].shape[:2]
        name = "FactorCache.append"
        if self._factors is None:
            self.lengths = [0] * batch
        elif any(s.shape[0] != batch or s.shape[2:] != f.shape[2:] for s, f in zip(self._factors, new)):
            expected = f"of the sizes held, {[tuple(s.shape) for s in self._factors]}, but for the tokens"
            raise fault(ShapeError, name, "factors", expected, [tuple(f.shape) for f in new])
        needed = max(self.lengths, default=0) + tokens
        if self.capacity is not None and needed > self.capacity:
            raise fault(ArgumentError, name, "tokens", f"at most the capacity, {self.capacity}", needed)
        allocated = 0 if self._factors is None else self._factors[0].shape[1]
        if needed > allocated or self._factors is None:
            size = self.capacity or max(self._FIRST, 2 * allocated, needed)
            grown = tuple(f.new_zeros((batch, size, *f.shape[2:])) for f in new)
            for store, old in zip(grown, self._factors or ()):
                store[:, :allocated] = old
            self._factors = grown  # type: ignore[assignment]
        return self._factors  # type: ignore[return-value]


class TensorProductAttention(nn.Module):
    """Causal self-attention on factored queries, keys and values, with RoPE on the feature factors.

    A token's queries are ``Q = 1/Rq · A_Q B_Q`` with ``A_Q (H, Rq)`` and ``B_Q (Rq, D)`` from linear maps of its
    features, its keys and values likewise. RoPE turns the rows of ``B_Q`` and ``B_K``, which turns Q and K.

    Args:
        dim: Features of a token.
        heads: ``H``.
        head_dim: ``D``, features of a query and of a key; even.
        rank_q: ``Rq``.
        rank_k: ``Rk``.
        rank_v: ``Rv``.
        value_dim: ``E``, features of a value; ``head_dim`` by default.
        base: RoPE's frequencies are ``base ** (-2f / D)``.
        bias: Whether the linear maps have one.
        backend: That of `warploom.tpa_attention`, `warploom.tpa_decode` and `warploom.lrpe_rotate`.

    State dict: ``aq, bq, ak, bk, av, bv``, each ``.weight`` of ``(H·R, dim)`` or ``(R·features, dim)``, and
    ``out.weight`` of ``(dim, H·E)``; with ``bias`` also ``.bias``. Rows of an ``a`` run over heads, then ranks; of
    a ``b`` over ranks, then features.

    Raises:
        ArgumentError: A size is not positive, or ``head_dim`` is odd.

    Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.
    """

    theta: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        rank_q: int = 6,
        rank_k: int = 2,
        rank_v: int = 2,
        value_dim: int | None = None,
        base: float = 10000.0,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"dim": dim, "heads": heads, "head_dim": head_dim, "value_dim": value_dim}
        sizes |= {"rank_q": rank_q, "rank_k": rank_k, "rank_v": rank_v}
        for argument, size in sizes.items():
            if size < 1:
                raise fault(ArgumentError, "TensorProductAttention", argument, "positive", size)
        if head_dim % 2:
            raise fault(ArgumentError, "TensorProductAttention", "head_dim", "even", head_dim)
        if not base > 0:
            raise fault(ArgumentError, "TensorProductAttention", "base", "positive", base)
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.rank_q, self.rank_k, self.rank_v = rank_q, rank_k, rank_v
        self.backend = backend
        self.aq = nn.Linear(dim, heads * rank_q, bias)
        self.bq = nn.Linear(dim, rank_q * head_dim, bias)
        self.ak = nn.Linear(dim, heads * rank_k, bias)
        self.bk = nn.Linear(dim, rank_k * head_dim, bias)
        self.av = nn.Linear(dim, heads * rank_v, bias)
        self.bv = nn.Linear(dim, rank_v * value_dim, bias)
        self.out = nn.Linear(heads * value_dim, dim, bias)
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("theta", base**-exponent, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights such that features of unit variance give factors of unit variance; biases are zero."""
        for layer in (self.aq, self.bq, self.ak, self.bk, self.av, self.bv, self.out):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, cache: FactorCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: ``(B, N, dim)``, features of the tokens.
            cache: Where earlier tokens are, and where these are added; needs ``torch.no_grad()``. The tokens
                then stand behind the ones that each batch entry has there.
            cu_seqlens: ``(S + 1,)`` int32 or int64, packed sequences in a batch of one; not with a cache.

        Returns:
            ``(B, N, dim)``.

        Raises:
            ArgumentError: Both a cache and ``cu_seqlens``, or a cache while a gradient is wanted.
            ShapeError: ``x`` has another shape.
        """
        if x.dim() != 3 or x.shape[-1] != self.aq.in_features:
            expected = f"(B, N, dim) with dim = {self.aq.in_features}"
            raise fault(ShapeError, "TensorProductAttention", "x", expected, tuple(x.shape))
        if cache is not None and cu_seqlens is not None:
            raise fault(ArgumentError, "TensorProductAttention", "cu_seqlens", "left out with a cache", "both")
        aq, bq = self.aq(x).unflatten(-1, (self.heads, -1)), self.bq(x).unflatten(-1, (self.rank_q, -1))
        ak, bk = self.ak(x).unflatten(-1, (self.heads, -1)), self.bk(x).unflatten(-1, (self.rank_k, -1))
        av, bv = self.av(x).unflatten(-1, (self.heads, -1)), self.bv(x).unflatten(-1, (self.rank_v, -1))
        offset = 0 if cache is None else cache.offset
        bq, bk = (
            lrpe_rotate(b, self.theta, offset=offset, cu_seqlens=cu_seqlens, backend=self.backend) for b in (bq, bk)
        )
        first = cache is None or not any(cache.lengths)
        if cache is not None:
            held = cache.append(ak, av, bk, bv)
        if first:
            values = tpa_attention(aq, ak, av, bq, bk, bv, cu_seqlens=cu_seqlens, backend=self.backend)
        else:
            ak, av, bk, bv = held
            lengths = cache.seqlens  # type: ignore[union-attr]
            values = tpa_decode(aq, ak, av, bq, bk, bv, cache_seqlens=lengths, backend=self.backend)
        return self.out(values.flatten(2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """What the sizes of the linear maps do not show."""
        ranks = f"rank_q={self.rank_q}, rank_k={self.rank_k}, rank_v={self.rank_v}"
        return f"heads={self.heads}, head_dim={self.head_dim}, value_dim={self.value_dim}, {ranks}"
