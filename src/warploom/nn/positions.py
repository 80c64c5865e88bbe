"""Positional encodings as modules: they hold the frequencies, `lrpe_rotate` and `lrpe_cosine` do the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import nn

from warploom import lrpe_cosine, lrpe_rotate
from warploom.errors import ArgumentError, fault
from warploom.ops.lrpe.validation import Activation
from warploom.runtime.backend import Backend
from warploom.runtime.modes import is_plain_eager

Tensor = torch.Tensor


class _Frequencies(nn.Module):
    """Rows of frequencies ``theta`` (rows, F): ``base ** (-f / F)``, fixed or learnable, float32 for ever.

    Casting the module to a lower precision leaves them alone: rounded to bfloat16, a frequency of 1 is off by
    up to 0.004 radians per position, which after a thousand positions is any angle at all. Fixed ones are in no
    state dict, and so are right without one: also after ``to_empty``, and in a model of the meta device that a
    state dict was assigned to.
    """

    theta: Tensor

    def __init__(self, rows: int, features: int, base: float, learnable: bool) -> None:
        super().__init__()
        if not base > 0:
            raise fault(ArgumentError, type(self).__name__, "base", "positive", base)
        self.base = base
        theta = torch.empty(rows, features, dtype=torch.float32)
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

    def frequencies(self, x: Tensor) -> Tensor:
        """``theta``, for positions of ``x``. Fixed frequencies follow it to another device."""
        theta = self.theta
        if isinstance(theta, nn.Parameter) or not isinstance(x, torch.Tensor) or theta.device == x.device:
            return theta
        theta = theta.to(x.device)
        if is_plain_eager(x):
            self.theta = theta
        return theta

    def extra_repr(self) -> str:
        """What the frequencies were built with."""
        return f"base={self.base}, learnable={isinstance(self.theta, nn.Parameter)}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        theta, grad, was_meta = self.theta, self.theta.grad, self.theta.is_meta

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor is theta or tensor is grad:
                if moved.dtype != tensor.dtype:
                    return tensor.to(moved.device)
                if moved is not tensor and not isinstance(theta, nn.Parameter) and not was_meta:
                    moved.copy_(tensor)  # `to_empty` left it uninitialised, and no state dict will fill it
            return moved

        super()._apply(move, recurse)
        if was_meta and not self.theta.is_meta:
            self.reset_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # A state dict that is assigned leaves its own tensor here, or none.
        theta = values = self.theta
        left_out = theta.is_meta and prefix + "theta" not in state_dict and rest[0].get("assign_to_params_buffers")
        if left_out:
            device = torch.get_default_device()
            values = torch.empty_like(theta, device="cpu" if device.type == "meta" else device)
        values = values.detach().float()
        if values.device != theta.device or theta.dtype != torch.float32:
            self.theta = nn.Parameter(values, theta.requires_grad) if isinstance(theta, nn.Parameter) else values
        if left_out:
            self.reset_parameters()


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

    Example:
        ```python
        import torch
        from warploom.nn import RotaryEmbedding

        rope = RotaryEmbedding(64, base=500_000.0)
        q = rope(torch.randn(2, 128, 8, 64))
        next_q = rope(torch.randn(2, 1, 8, 64), offset=128)
        ```
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
        self.head_dim, self.rotary_dim = head_dim, turning
        self.interleaved = interleaved

    def forward(
        self,
        x: Tensor,
        *,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Encode ``x`` (B, N, H, D), any number of heads; the result has its shape, dtype and memory order.

        Positions are ``offset + n``, with ``offset`` an int or an integer tensor ``()`` or ``(B,)``, or the
        ``position_ids`` ``(N,)`` or ``(B, N)``, or start again at each packed sequence of ``cu_seqlens``. Errors
        and backends are those of `warploom.lrpe_rotate`.
        """
        return lrpe_rotate(
            x,
            self.frequencies(x),
            offset=offset,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            interleaved=self.interleaved,
            backend=backend,
        )

    def extra_repr(self) -> str:
        """What the encoding was built with."""
        sizes = f"head_dim={self.head_dim}, rotary_dim={self.rotary_dim}"
        return f"{sizes}, {super().extra_repr()}, interleaved={self.interleaved}"


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

    Example:
        ```python
        import torch
        from warploom.nn import LRPE

        encoding = LRPE(heads=4, head_dim=32, activation="silu")
        q = encoding(torch.randn(2, 128, 8, 32))  # two query heads to a row of frequencies
        print(q.shape)  # torch.Size([2, 128, 8, 64])
        ```
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kind: Literal["cosine", "rotate"] = "cosine",
        activation: Activation = "none",
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
        self.kind: Literal["cosine", "rotate"] = kind
        self.activation: Activation = activation
        self.heads, self.head_dim = heads, head_dim
        self.out_features = 2 * head_dim if kind == "cosine" else head_dim

    def forward(
        self,
        x: Tensor,
        *,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Encode ``x`` (B, N, H, D) to (B, N, H, out_features), in its dtype and memory order.

        Positions are given as for `RotaryEmbedding`. Errors and backends are those of
        `warploom.lrpe_cosine`.
        """
        encode = lrpe_cosine if self.kind == "cosine" else lrpe_rotate
        theta = self.frequencies(x)
        heads, rows = x.shape[-2], theta.shape[0]
        if heads % rows == 0 and heads > rows:
            theta = theta.repeat_interleave(heads // rows, dim=0)
        return encode(
            x,
            theta,
            offset=offset,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            backend=backend,
        )

    def extra_repr(self) -> str:
        """What the encoding was built with."""
        sizes = f"heads={self.heads}, head_dim={self.head_dim}"
        return f"{sizes}, kind={self.kind!r}, activation={self.activation!r}, {super().extra_repr()}"
