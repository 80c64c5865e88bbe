"""The definition of LRPE in plain PyTorch: any device, any float dtype. This file is the specification.

Angles are formed in float64 whatever the dtype of ``x``, so that positions of any size are exact; values are
computed in float32, or float64 when ``x`` is, and rounded once to the dtype of ``x``.
Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equations 8 to 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def lrpe_cosine(
    x: Tensor,
    theta: Tensor,
    *,
    grid: Sequence[int] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Returns ``[x̄ cos φ, x̄ sin φ]``: (B, N, H, D) to (B, N, H, 2·D).

    ``theta`` has E frequencies for each of k axes, at most ``⌈D/k⌉``: cut to D, angles lose less than one an axis.
    """
    s = coordinates(x, grid, prefix, offset, position_ids, cu_seqlens)
    return encode_cosine(x, angles(s.double(), theta.double(), x.shape[-1]), activation, cu_seqlens)


def lrpe_rotate(
    x: Tensor,
    theta: Tensor,
    *,
    grid: Sequence[int] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "none",
    interleaved: bool = False,
) -> Tensor:
    """Returns pairs of features rotated by φ: (B, N, H, D). ``theta`` is as in `lrpe_cosine`, with D/2 for D."""
    s = coordinates(x, grid, prefix, offset, position_ids, cu_seqlens)
    phi = angles(s.double(), theta.double(), x.shape[-1] // 2)
    return encode_rotate(x, phi, activation, cu_seqlens, interleaved)


def encode_cosine(x: Tensor, phi: Tensor, activation: str, cu_seqlens: Tensor | None) -> Tensor:
    """Returns ``[x̄ cos φ, x̄ sin φ]`` for given angles (1 or B, N, 1 or H, D)."""
    value = activate(_with_heads(x), activation, cu_seqlens)
    cosine, sine = phi.cos().to(value.dtype), phi.sin().to(value.dtype)
    out = without_tail(torch.cat((value * cosine, value * sine), dim=-1).to(x.dtype), cu_seqlens)
    return out if x.dim() == 4 else out.squeeze(2)


def encode_rotate(x: Tensor, phi: Tensor, activation: str, cu_seqlens: Tensor | None, interleaved: bool) -> Tensor:
    """Returns pairs of features rotated by given angles (1 or B, N, 1 or H, D / 2)."""
    value = activate(_with_heads(x), activation, cu_seqlens)
    cosine, sine = phi.cos().to(value.dtype), phi.sin().to(value.dtype)
    if interleaved:
        first, second = value[..., 0::2], value[..., 1::2]
    else:
        first, second = value.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    out = without_tail(out.to(x.dtype), cu_seqlens)
    return out if x.dim() == 4 else out.squeeze(2)


def angles(s: Tensor, theta: Tensor, features: int) -> Tensor:
    """Returns φ of coordinates (1 or B, N, k): (1 or B, N, 1 or H, features); 0 where a feature is not rotated."""
    frequency = theta if theta.dim() == 2 else theta[None]  # (1 or H, E)
    phi = s[:, :, None, :, None] * frequency[None, None, :, None, :]  # (1 or B, N, 1 or H, k, E)
    phi = phi.flatten(-2)[..., :features]
    return torch.nn.functional.pad(phi, (0, features - phi.shape[-1]))


def coordinates(
    x: Tensor,
    grid: Sequence[int] | None,
    prefix: int,
    offset: int | Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Returns integer coordinates of every token: (1 or B, N, k)."""
    length = x.shape[1]
    if position_ids is not None:
        s = position_ids if position_ids.dim() > 1 else position_ids[None]
        return s if s.dim() == 3 else s[..., None]
    index = torch.arange(length, device=x.device)
    if cu_seqlens is not None:
        index = index - cu_seqlens[sequence_of(index, cu_seqlens)]
    index = index - prefix
    turned = index >= 0
    if grid is not None:
        axes = []
        for size in reversed(grid):  # the last axis moves fastest
            axes.append(index % size)
            index = index // size
        return (torch.stack(axes[::-1], dim=-1) * turned[:, None])[None]
    start = offset.reshape(-1, 1) if isinstance(offset, Tensor) else offset
    return ((start + index[None]) * turned)[..., None]


def sequence_of(index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the packed sequence that each token belongs to, (N,): behind the last it is their number."""
    return torch.searchsorted(cu_seqlens.to(index.dtype), index, right=True) - 1


def sequence_rows(tokens: int, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Returns rows of packed sequences, as a batch, and places in that batch of rows: ``(S, L)`` and ``(N,)``.

    ``N`` stands for no row and ``S · L`` for no place, as of rows behind the last sequence.
    """
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    steps = torch.arange(longest, device=cu_seqlens.device)
    rows = start[:, None] + steps
    rows = torch.where(rows < end[:, None].clamp(max=tokens), rows, tokens)
    index = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(end, index, right=True)
    inside = sequence < end.shape[0]
    sequence = sequence.clamp(max=end.shape[0] - 1)
    places = torch.where(inside, sequence * longest + index - start[sequence], end.shape[0] * longest)
    return rows, places


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns rows of ``x`` (N, …), and zeros for row ``N``."""
    return torch.cat((x, x.new_zeros((1, *x.shape[1:]))))[rows]


def without_tail(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns ``x`` (B, N, H, D) with zeros, and no gradient, in the rows behind the last packed sequence."""
    if cu_seqlens is None:
        return x
    tail = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(tail[:, None, None], 0.0)


def activate(x: Tensor, activation: str, cu_seqlens: Tensor | None) -> Tensor:
    """Returns x̄ in float32, or float64 when ``x`` is."""
    x = without_tail(x, cu_seqlens)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    match activation:
        case "none":
            return x
        case "relu":
            return torch.relu(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "silu":
            return torch.nn.functional.silu(x)
        case "softmax":
            return torch.softmax(x, dim=-1)
        case "softmax_sequence":
            return torch.softmax(x, dim=1) if cu_seqlens is None else _packed_softmax(x, cu_seqlens)
        case _:
            raise ValueError(f"unknown activation {activation!r}")


def _packed_softmax(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns softmax over the tokens of each packed sequence; ``x`` is (1, N, H, D)."""
    index = torch.arange(x.shape[1], device=x.device)
    sequence = sequence_of(index, cu_seqlens)
    statistics = (cu_seqlens.numel(), *x.shape[2:])  # the last of rows behind all sequences
    # The maximum is only a shift that cancels, so no gradient flows through it. Sums are formed by indexing, which
    # gives the same bits every time, unlike scatter and gather on a GPU.
    places = sequence[:, None, None].expand_as(x[0])
    row_max = x.new_full(statistics, -torch.inf).scatter_reduce(0, places, x[0].detach(), "amax")
    weight = (x[0] - row_max[sequence]).exp()
    total = x.new_zeros(statistics).index_put((sequence,), weight, accumulate=True)
    return (weight / total[sequence])[None]


def _with_heads(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(2)
