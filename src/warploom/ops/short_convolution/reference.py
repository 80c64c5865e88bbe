"""The definition of the short convolution in plain PyTorch: any device, any float dtype.

Sums are in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y_n = f(b + Σ_k w_k x_{n−K+1+k})`` of every channel: (B, N, C) [and the last inputs (S, C, K − 1)].

    Inputs before the first token of a sequence are those of its state, the last one next to it.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.shape[1]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_zeros((sequences, x.shape[2], taps - 1)) if initial_state is None else initial_state
    state = state.to(dtype).mT  # (S, K − 1, C)
    rows = x.to(dtype)
    if cu_seqlens is None:
        window = torch.cat((state, rows), 1)
        shifted = [window[:, k : k + x.shape[1]] for k in range(taps)]
        last = window[:, x.shape[1] :]
    else:
        shifted, last = _of_sequences(rows[0], state, cu_seqlens.long())
    out = torch.zeros_like(rows) if bias is None else bias.to(dtype).expand_as(rows)
    for k, tap in enumerate(shifted):
        out = out + tap * weight[:, k].to(dtype)
    out = torch.nn.functional.silu(out) if activation == "silu" else out
    if cu_seqlens is not None:
        out = out.masked_fill(torch.arange(x.shape[1], device=x.device)[:, None] >= cu_seqlens[-1], 0.0)
    out = out.to(x.dtype)
    return (out, last.mT.to(x.dtype)) if return_state else out


def _of_sequences(rows: Tensor, state: Tensor, bounds: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns the inputs (1, N, C) of each tap, and the last states (S, K − 1, C), of packed rows (N, C)."""
    sequences, before, _ = state.shape
    place = torch.arange(rows.shape[0], device=rows.device)
    own = torch.searchsorted(bounds[1:].contiguous(), place, right=True)
    inside = own < sequences
    own = own.clamp(max=sequences - 1)
    start = bounds[own]
    taps = [_take(rows, state, own, start, place - j, inside)[None] for j in range(before, -1, -1)]
    ends = bounds[1:, None] + torch.arange(-before, 0, device=rows.device)  # (S, K − 1)
    own = torch.arange(sequences, device=rows.device)[:, None].expand_as(ends)
    return taps, _take(rows, state, own, bounds[:-1, None], ends, torch.ones_like(own, dtype=torch.bool))


def _take(rows: Tensor, state: Tensor, own: Tensor, start: Tensor, place: Tensor, inside: Tensor) -> Tensor:
    """Returns the inputs at places among packed rows, from the state of its own sequence before its start."""
    earlier = (place - start).clamp(-state.shape[1], -1)
    found = torch.nn.functional.pad(rows, (0, 0, 0, 1))[place.clamp(min=0)]  # a row to read where there is none
    found = torch.where((place < start)[..., None], state[own, earlier], found)
    return found.masked_fill(~inside[..., None], 0.0)
