"""Positional encodings as modules, which hold frequencies for `lrpe_rotate` and `lrpe_cosine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn

from warploom import lrpe_cosine, lrpe_rotate
from warploom.errors import ArgumentError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.nn.common import check_ints, check_sizes
from warploom.nn.fully_shard import ShardedFrequencies, gather, is_called_by_fsdp, shard, shard_like
from warploom.nn.rope_scaling import Scaling, check_scaling, scale_frequencies
from warploom.ops.lrpe.validation import Activation
from warploom.runtime.arguments import as_python, check_number
from warploom.runtime.backend import Backend
from warploom.runtime.modes import is_plain_eager
from warploom.runtime.names import name_arguments
from warploom.runtime.sharding import is_sharded

Tensor = torch.Tensor


class _Frequencies(nn.Module):
    """Rows of frequencies ``theta`` (rows, F): ``base ** (-f / F)``, fixed or learnable, always in float32.

    They stay in float32 when the module is cast. In bfloat16 a frequency of 1 would be off by up to 0.004 radians
    per position, so that after a thousand positions the angle would be arbitrary. Fixed frequencies are in no state
    dict. They are set after ``to_empty`` too, and in a meta model that a state dict is assigned to.
    """

    theta: Tensor

    def __init__(self, rows: int, features: int, base: float, learnable: bool, persistent: bool = False) -> None:
        super().__init__()
        check_number(type(self).__name__, "base", as_python(base))
        if not base > 0:
            raise fault(ArgumentError, type(self).__name__, "base", "positive", base)
        self.base = base
        theta = torch.empty(rows, features, dtype=torch.float32)
        if learnable:
            self.theta = nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta, persistent=persistent)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the frequencies to their initial values."""
        values = self._compute_initial().expand_as(self.theta)
        self.theta.copy_(shard_like(values, self.theta) if isinstance(self, ShardedFrequencies) else values)

    def _compute_initial(self) -> Tensor:
        """Returns the initial frequencies of a row, (F,) float64."""
        features = self.theta.shape[1]
        exponent = -torch.arange(features, dtype=torch.float64, device=self.theta.device) / features
        return self.base**exponent

    def check_features(self, x: object, head_dim: int) -> None:
        """Raise unless ``x`` has heads of ``head_dim`` features. Of more, only a part would be rotated."""
        if isinstance(x, torch.Tensor) and not x.is_nested and x.shape[-1:] != (head_dim,):
            expected = f"of heads of head_dim = {head_dim} features"
            raise fault(ShapeError, type(self).__name__, "x", expected, shape_of(x))

    def frequencies(self, x: Tensor) -> Tensor:
        """Returns ``theta`` on the device of ``x``. Fixed frequencies are moved there."""
        theta = self.theta
        if isinstance(self, ShardedFrequencies):
            return gather(theta)
        if theta.itemsize < 4:
            expected = "float32: no param_dtype of FSDP beside tensor parallelism, and no cast of its data"
            raise fault(DtypeError, type(self).__name__, "theta", expected, dtype_of(theta))
        if isinstance(theta, nn.Parameter) or not isinstance(x, torch.Tensor) or theta.device == x.device:
            return theta
        theta = theta.to(x.device)
        if is_plain_eager(x):
            self.theta = theta
        return theta

    def extra_repr(self) -> str:
        """Returns the arguments of the frequencies."""
        return f"base={self.base}, learnable={isinstance(self.theta, nn.Parameter)}"

    def __setattr__(self, name: str, value: Any) -> None:
        sharded = name == "theta" and is_sharded((value,)) and is_called_by_fsdp()
        if sharded and not is_sharded((self._parameters["theta"],)):  # not yet, by tensor parallelism for one
            shard(self, value)
        else:
            super().__setattr__(name, value)

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


@name_arguments
class RotaryEmbedding(_Frequencies):
    """RoPE: each pair of features is rotated by its position times its frequency.

    Args:
        head_dim: Features ``D`` of a head; even.
        base: The frequencies are ``base ** (-f / F)`` for ``f = 0 … F − 1``; 10 000 by default.
        rotary_dim: Features that are rotated, ``2·F``: the first ``F`` pairs; all by default. The others are
            copied.
        learnable: True if ``theta`` is a parameter.
        interleaved: Pair neighbouring features ``(2f, 2f + 1)`` instead of halves ``(f, f + D/2)``.
        scaling: Scaling of frequencies for longer sequences, as ``rope_parameters`` of transformers: a
            ``rope_type`` of ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3`` or ``proportional``, with
            the entries that it needs, ``max_position_embeddings`` among them. A ``rope_theta`` is the base. The
            frequencies are then in the state dict.
        length: Tokens of the longest sequence, for ``dynamic`` and ``longrope``; by default at most the length of
            training. `set_length` changes it. Keys in a cache keep their frequencies.

    Attributes:
        theta: ``(1, F)`` float32, radians per position; one row for all heads.
        attention_factor: Factor of the rotated features, for ``yarn`` and ``longrope``; else 1.

    Raises:
        ArgumentError: ``head_dim`` or ``rotary_dim`` is odd or out of range, ``base`` is not positive, or
            ``scaling`` has unknown or missing entries.

    Sources: Su et al., "RoFormer", 2021, arXiv 2104.09864; of scaled frequencies, Chen et al., 2023, arXiv
    2306.15595; Peng et al., "YaRN", 2023, arXiv 2309.00071; Ding et al., "LongRoPE", 2024, arXiv 2402.13753; Llama
    Team, 2024, arXiv 2407.21783.

    Example:
        ```python
        import torch
        from warploom.nn import RotaryEmbedding

        rope = RotaryEmbedding(64, base=500_000.0)
        q = rope(torch.randn(2, 128, 8, 64))
        next_q = rope(torch.randn(2, 1, 8, 64), offset=128)
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        q = RotaryEmbedding(64, base=1e6, scaling=scaling)(q)
        ```
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float | None = None,
        rotary_dim: int | None = None,
        learnable: bool = False,
        interleaved: bool = False,
        scaling: Scaling | None = None,
        length: int | None = None,
    ) -> None:
        rotary = head_dim if rotary_dim is None else rotary_dim
        check_ints("RotaryEmbedding", head_dim=head_dim, rotary_dim=rotary)
        if head_dim < 2 or head_dim % 2:
            raise fault(ArgumentError, "RotaryEmbedding", "head_dim", "even and positive", head_dim)
        if rotary % 2 or not 2 <= rotary <= head_dim:
            raise fault(ArgumentError, "RotaryEmbedding", "rotary_dim", f"even, 2 … {head_dim}", rotary)
        if scaling is not None:
            check_scaling("RotaryEmbedding", scaling, rotary // 2)
        given = None if scaling is None else scaling.get("rope_theta")
        if None is not base != given is not None:
            raise fault(ArgumentError, "RotaryEmbedding", "base", f"left out, or rope_theta = {given}", base)
        base = 10000.0 if base is None else base
        self.scaling, self.length, self.attention_factor = dict(scaling or {}), length, 1.0
        super().__init__(1, rotary // 2, base if given is None else given, learnable, scaling is not None)
        self.head_dim, self.rotary_dim = head_dim, rotary
        self.interleaved = interleaved

    def _compute_initial(self) -> Tensor:
        if not self.scaling:
            return super()._compute_initial()
        features = self.theta.shape[1]
        theta, self.attention_factor = scale_frequencies(self.scaling, self.base, features, self.length)
        return theta.to(self.theta.device)

    def set_length(self, length: int | None) -> None:
        """Set the frequencies for sequences of so many tokens, for ``dynamic`` and ``longrope``."""
        self.length = length
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Encode ``x`` (B, N, H, D) with any number of heads. The result has its shape, dtype and memory order.

        Positions are ``offset + n``, with ``offset`` an int or an integer tensor ``()`` or ``(B,)``. Or they are
        the ``position_ids`` ``(N,)`` or ``(B, N)``, or start again at each packed sequence of ``cu_seqlens``.
        Errors and backends are those of `warploom.lrpe_rotate`.
        """
        self.check_features(x, self.head_dim)
        out = lrpe_rotate(
            x,
            self.frequencies(x),
            offset=offset,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            interleaved=self.interleaved,
            backend=backend,
        )
        if self.attention_factor == 1.0:
            return out
        if self.rotary_dim == self.head_dim:
            return out * self.attention_factor
        pair = torch.arange(self.head_dim, device=out.device)
        pair = pair // 2 if self.interleaved else pair % (self.head_dim // 2)
        return torch.where(pair < self.rotary_dim // 2, out * self.attention_factor, out)

    def extra_repr(self) -> str:
        """Returns the encoding's arguments."""
        sizes = f"head_dim={self.head_dim}, rotary_dim={self.rotary_dim}"
        if self.scaling:
            sizes += f", scaling={self.scaling}, length={self.length}"
        return f"{sizes}, {super().extra_repr()}, interleaved={self.interleaved}"


@name_arguments
class LRPE(_Frequencies):
    """Linearized relative positional encoding with a row of learnable frequencies for every head.

    Args:
        heads: Rows of ``theta``. ``x`` may have a multiple of them, as queries have in grouped-query attention;
            neighbouring heads then share a row.
        head_dim: Features ``D`` of a head.
        kind: ``rotate`` (pairs are rotated, ``D`` even; as many features) or ``cosine`` (``[x̄ cos φ, x̄ sin φ]``,
            twice the features).
        activation: Applied to ``x`` first, see `warploom.lrpe_cosine`. ``softmax_sequence`` depends on later tokens
            and is not for causal models.
        axes: Coordinates of a position: 1 for a sequence, 2 for the patches of an image. They share the features.
        base: The initial frequencies are ``base ** (-f / F)``, ``F = ⌈D / axes⌉`` for cosine and
            ``⌈D / (2 · axes)⌉`` for rotate.
        learnable: True if ``theta`` is a parameter.

    Attributes:
        theta: ``(heads, F)`` float32, radians per position.
        out_features: Features of a head of the result: ``D``, or ``2·D`` for cosine.

    Raises:
        ArgumentError: ``kind`` is unknown, ``head_dim`` is odd for ``rotate``, or ``axes`` or ``base`` is not
            positive.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equations 9 and 12.

    Example:
        ```python
        import torch
        from warploom.nn import LRPE

        encoding = LRPE(heads=4, head_dim=32)
        q = encoding(torch.randn(2, 128, 8, 32))  # two query heads to a row of frequencies
        print(q.shape)  # torch.Size([2, 128, 8, 32])
        cosine = LRPE(heads=4, head_dim=32, kind="cosine", activation="silu")
        print(cosine(q).shape)  # torch.Size([2, 128, 8, 64]): twice the features

        patches = LRPE(heads=8, head_dim=32, axes=2)
        q = patches(torch.randn(2, 1 + 14 * 14, 8, 32), grid=(14, 14), prefix=1)  # after a class token
        print(q.shape)  # torch.Size([2, 197, 8, 32])
        ```
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kind: Literal["rotate", "cosine"] = "rotate",
        activation: Activation = "none",
        axes: int = 1,
        base: float = 10000.0,
        learnable: bool = True,
    ) -> None:
        if kind not in ("cosine", "rotate"):
            raise fault(ArgumentError, "LRPE", "kind", "rotate or cosine", repr(kind))
        check_sizes("LRPE", heads=heads, axes=axes)
        check_ints("LRPE", head_dim=head_dim)
        if head_dim < 1 or (kind == "rotate" and head_dim % 2):
            raise fault(ArgumentError, "LRPE", "head_dim", "positive, and even for rotate", head_dim)
        angles = head_dim if kind == "cosine" else head_dim // 2
        super().__init__(heads, -(-angles // axes), base, learnable)
        self.kind: Literal["rotate", "cosine"] = kind
        self.activation: Activation = activation
        self.axes = axes
        self.heads, self.head_dim = heads, head_dim
        self.out_features = 2 * head_dim if kind == "cosine" else head_dim

    def forward(
        self,
        x: Tensor,
        *,
        grid: Sequence[int] | None = None,
        prefix: int = 0,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Encode ``x`` (B, N, H, D) to (B, N, H, out_features), in its dtype and memory order.

        Positions are given as for `warploom.lrpe_cosine`, whose errors and backends are the layer's too: of several
        ``axes``, by a ``grid`` of as many sizes or by ``position_ids`` (B, N, axes).

        Raises:
            ShapeError: Positions have another number of axes than the layer.
        """
        given = len(grid) if isinstance(grid, Sequence) else 1
        if isinstance(position_ids, torch.Tensor) and position_ids.dim() == 3:
            given = position_ids.shape[-1]
        if given != self.axes:
            expected = f"of {self.axes} axes" if self.axes > 1 else "left out, or of 1 axis"
            got = "neither" if grid is None and position_ids is None else f"{given} axes" if given > 1 else "1 axis"
            raise fault(ShapeError, "LRPE", "grid or position_ids", expected, got)
        self.check_features(x, self.head_dim)
        encode = lrpe_cosine if self.kind == "cosine" else lrpe_rotate
        theta = self.frequencies(x)
        heads, rows = x.shape[-2], theta.shape[0]
        if heads % rows == 0 and heads > rows:
            theta = theta.repeat_interleave(heads // rows, dim=0)
        return encode(
            x,
            theta,
            grid=grid,
            prefix=prefix,
            offset=offset,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            backend=backend,
        )

    def extra_repr(self) -> str:
        """Returns the encoding's arguments."""
        sizes = f"heads={self.heads}, head_dim={self.head_dim}" + (f", axes={self.axes}" if self.axes > 1 else "")
        sizes += f", kind={self.kind!r}" + (f", out_features={self.out_features}" if self.kind == "cosine" else "")
        return f"{sizes}, activation={self.activation!r}, {super().extra_repr()}"
