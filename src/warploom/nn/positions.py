"""Positional encodings as modules: they hold the frequencies, `lrpe_rotate` and `lrpe_cosine` do the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn

from warploom import lrpe_cosine, lrpe_rotate
from warploom.errors import ArgumentError, fault

__all__ = ["LRPE", "RotaryEmbedding"]

Tensor = torch.Tensor


class _Frequencies(nn.Module):
    """Rows of frequencies ``theta`` (rows, F): ``base ** (-f / F)``, fixed or learnable, float32 for ever.

    Casting the module to a lower precision leaves them alone: rounded to bfloat16, a frequency of 1 is off by
    up to 0.004 radians per position, which after a thousand positions is any angle at all.
    """

    theta: Tensor

    def __init__(self, rows: int, features: int, base: float, learnable: bool) -> None:
        super().__init__()
        if not base > 0:
            raise fault(ArgumentError, type(self).__name__, "base", "positive", base)
        self.base = base
        theta = torch.empty(rows, features)
        if learnable:
            self.theta = nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the frequencies to what they are at the start."""
        features = self.theta.shape[1]
        exponent = -torch.arange(features, dtype=torch.float64, device=self.theta.device) / features
        self.theta.copy_((self.base**exponent).expand_as(self.theta))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.theta.detach()
        super()._apply(fn, recurse)
        if self.theta.dtype != before.dtype:
            self.theta.data = before.to(self.theta.device)
        if before.is_meta and not self.theta.is_meta:  # `to_empty` has left them uninitialised
            self.reset_parameters()
        return self


class RotaryEmbedding(_Frequencies):
    """RoPE: each pair of features turns by position times its frequency.

    Args:
        head_dim: Features ``D`` of a head; even.
        base: The frequencies are ``base ** (-f / F)`` for ``f = 0 … F − 1``.
        rotary_dim: How many leading features turn, ``2·F``; all by default. The rest pass unchanged.
        learnable: Whether ``theta`` is a parameter.
        interleaved: Pair neighbouring features ``(2f, 2f + 1)`` instead of halves ``(f, f + D/2)``.

    Attributes:
        theta: ``(1, F)`` float32, radians per position; one row for all heads.

    Raises:
        ArgumentError: ``head_dim`` or ``rotary_dim`` is odd or out of range, or ``base`` is not positive.

    Source: Su et al., "RoFormer", 2021, arXiv 2104.09864.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        learnable: bool = False,
        interleaved: bool = False,
    ) -> None:
        turning = head_dim if rotary_dim is None else rotary_dim
        if head_dim < 2 or head_dim % 2:
            raise fault(ArgumentError, "RotaryEmbedding", "head_dim", "even and positive", head_dim)
        if turning % 2 or not 2 <= turning <= head_dim:
            raise fault(ArgumentError, "RotaryEmbedding", "rotary_dim", f"even, 2 … {head_dim}", turning)
        super().__init__(1, turning // 2, base, learnable)
        self.interleaved = interleaved

    def forward(
        self,
        x: Tensor,
        *,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Encode ``x`` (B, N, H, D), any number of heads; the result has its shape, dtype and memory order.

        Positions are ``offset + n``, with ``offset`` an int or an integer tensor ``()`` or ``(B,)``, or the
        ``position_ids`` ``(N,)`` or ``(B, N)``, or start again at each packed sequence of ``cu_seqlens``. Errors
        and backends are those of `warploom.lrpe_rotate`.
        """
        return lrpe_rotate(
            x,
            self.theta,
            offset=offset,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            interleaved=self.interleaved,
            backend=backend,
        )


class LRPE(_Frequencies):
    """Linearized relative positional encoding with a row of learnable frequencies for every head.

    Args:
        heads: Rows of ``theta``. ``x`` may have a multiple of them, as queries have in grouped-query attention;
            neighbouring heads then share a row.
        head_dim: Features ``D`` of a head.
        kind: ``cosine`` (``[x̄ cos φ, x̄ sin φ]``, twice the features) or ``rotate`` (pairs turn, ``D`` even).
        activation: Applied to ``x`` first, see `warploom.lrpe_cosine`. ``softmax_sequence`` looks at later tokens
            and so has no place in a causal model.
        base: The frequencies start as ``base ** (-f / F)``, ``F = D`` for cosine and ``D / 2`` for rotate.
        learnable: Whether ``theta`` is a parameter.

    Attributes:
        theta: ``(heads, F)`` float32, radians per position.
        out_features: Features of a head of the result: ``2·D`` or ``D``.

    Raises:
        ArgumentError: An unknown kind, an odd ``head_dim`` for ``rotate``, or ``base`` is not positive.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equations 9 and 12.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kind: str = "cosine",
        activation: str = "none",
        base: float = 10000.0,
        learnable: bool = True,
    ) -> None:
        if kind not in ("cosine", "rotate"):
            raise fault(ArgumentError, "LRPE", "kind", "cosine or rotate", repr(kind))
        if heads < 1:
            raise fault(ArgumentError, "LRPE", "heads", "positive", heads)
        if head_dim < 1 or (kind == "rotate" and head_dim % 2):
            raise fault(ArgumentError, "LRPE", "head_dim", "positive, and even for rotate", head_dim)
        super().__init__(heads, head_dim if kind == "cosine" else head_dim // 2, base, learnable)
        self.kind = kind
        self.activation = activation
        self.out_features = 2 * head_dim if kind == "cosine" else head_dim

    def forward(
        self,
        x: Tensor,
        *,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Encode ``x`` (B, N, H, D) to (B, N, H, out_features), in its dtype and memory order.

        Positions are given as for `RotaryEmbedding`. Errors and backends are those of
        `warploom.lrpe_cosine`.
        """
        encode = lrpe_cosine if self.kind == "cosine" else lrpe_rotate
        groups, rest = divmod(x.shape[-2], self.theta.shape[0])
        theta = self.theta if rest or groups < 2 else self.theta.repeat_interleave(groups, dim=0)
        return encode(
            x,
            theta,
            offset=offset,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            backend=backend,
        )
