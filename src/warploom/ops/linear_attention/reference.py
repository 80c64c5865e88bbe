"""The definition of linear attention with LRPE in plain PyTorch: any device, any float dtype.

`recurrence` is the specification, one token after the other. `linear_attention` computes the same in chunks, which
is what runs where the kernels do not. Products take factors in the dtype of ``q`` and add up in float32, or in
float64 for float64 inputs; decays and states are in float32 or float64.
Sources: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270; Qin et al., "Lightning
Attention-2", 2024, arXiv 2401.04658.
"""

from __future__ import annotations

import torch

from warploom.ops.lrpe import reference as lrpe

Tensor = torch.Tensor

CHUNK = 64
"""Tokens between two states."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    theta: Tensor | None = None,
    encoding: str = "none",
    activation: str = "none",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    causal: bool = True,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns ``o_t = scale · φ(q_t)ᵀ S_t`` with ``S_t = λ_t S_{t−1} + φ(k_t) v_tᵀ``: (B, N, H, E) [and S].

    Packed sequences are computed as a batch of sequences of the ``longest`` length, of all rows if it is not known.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = q.new_zeros((1, q.shape[1], 1), dtype=dtype) if decay is None else decay.to(dtype)
    g = g.expand(1, q.shape[1], -1) if g.dim() == 1 else g  # (B or 1, N, H or 1)
    if cu_seqlens is not None:
        rows, places = lrpe.sequence_rows(q.shape[1], cu_seqlens, q.shape[1] if longest is None else longest)
        q, k, v = (lrpe.take_rows(x[0], rows) for x in (q, k, v))  # (S, L, H, F)
        g = lrpe.take_rows(g[0], rows)
        offset = offset.reshape(()) if isinstance(offset, Tensor) else offset
    # Its gradients by queries and by keys grow with positions, and nearly cancel: they are added before rounding.
    theta = None if theta is None else theta.double()
    queries, keys = (
        features(
            x, theta=theta, encoding=encoding, activation=activation, interleaved=interleaved, offset=offset,
            cu_seqlens=None,
        ).to(dtype)
        for x in (q, k)
    )  # fmt: skip
    if causal:
        out, state = _in_chunks(queries, keys, v.to(dtype), g, initial_state, q.dtype)
    else:
        state = torch.einsum("bnhf,bnhe->bhfe", keys, v.to(dtype))
        out = torch.einsum("bnhf,bhfe->bnhe", queries, _factor(state, q.dtype))
    out = (out * scale).to(q.dtype)
    if cu_seqlens is not None:
        out = lrpe.take_rows(out.flatten(0, 1), places)[None]
    return (out, state) if return_state else out


def features(
    x: Tensor, *, theta: Tensor | None, encoding: str, activation: str, interleaved: bool, offset: int | Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns ``φ(x)`` in the dtype of ``x``: (B, N, H, D) to (B, N, H, F)."""
    if encoding == "none" or theta is None:
        return lrpe.activate(x, activation, None).to(x.dtype)
    if encoding == "cosine":
        return lrpe.lrpe_cosine(x, theta, offset=offset, cu_seqlens=cu_seqlens, activation=activation)
    return lrpe.lrpe_rotate(
        x, theta, offset=offset, cu_seqlens=cu_seqlens, activation=activation, interleaved=interleaved
    )


def recurrence(queries: Tensor, keys: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the definition, a token at a time, on encoded queries and keys (B, N, H, F).

    ``g`` (B, N, H) are logarithms of decays, and ``state`` (B, H, F, E) is that before the first token. Outputs
    (B, N, H, E), over the scale, and the state after the last token.
    """
    out = torch.zeros_like(v)
    for t in range(v.shape[1]):
        state = g[:, t, :, None, None].exp() * state + keys[:, t, :, :, None] * v[:, t, :, None, :]
        out[:, t] = (queries[:, t, :, :, None] * state).sum(2)
    return out, state


def _factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a factor of a matrix product as the dtype of the inputs holds it."""
    return x.to(dtype).to(x.dtype)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, factors: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the outputs divided by the scale, and the last state.

    Within a chunk every pair of tokens is taken; what came before it is in its first state, all of which are made
    of the chunks' own sums at once.
    """
    tokens = q.shape[1]
    # An exported program is for lengths that are not known yet; one chunk alone would be a case of its own.
    exporting = torch.compiler.is_exporting()
    count = (tokens + (2 if exporting else 1) * CHUNK - 1) // CHUNK
    q, k, v = (_chunks(x, count) for x in (q, k, v))  # (B, C, T, H, F)
    g = _chunks(g[..., None], count)[..., 0].transpose(2, 3)
    decays = _decays_over(g)  # (B, C, H, T + 1, T)
    remaining = decays[..., 1:, -1].transpose(2, 3)[..., None]
    sums = torch.einsum("bcthf,bcthe->bchfe", k, _factor(v * remaining, factors))
    # From chunk to chunk, and from the state before the first.
    over = _decays_over(g.sum(-1, dtype=torch.float64).transpose(1, 2)).to(q.dtype)  # (B, H, C + 1, C)
    first = sums.new_zeros((sums.shape[0], 1, *sums.shape[2:])) if initial is None else initial.to(q.dtype)[:, None]
    states = torch.einsum("bhji,bjhfe->bihfe", over, torch.cat((first, sums), 1))
    states = torch.cat((first, states), 1)
    scores = torch.einsum("bcthf,bcshf->bchst", q, k) * decays[..., 1:, :]
    out = torch.einsum("bchst,bcshe->bcthe", _factor(scores, factors), v)
    carried = torch.einsum("bcthf,bchfe->bcthe", q, _factor(states[:, :-1], factors))
    out = out + carried * decays[..., 0, :].transpose(2, 3)[..., None]
    out = out.flatten(1, 2)
    if exporting:  # that there are as many would have to be proven of a slice
        return out.index_select(1, torch.arange(tokens, device=out.device)), states[:, -1]
    return out[:, :tokens], states[:, -1]


def _decays_over(g: Tensor) -> Tensor:
    """Returns the decay over ``s ≤ … ≤ t`` of logarithms (…, T), for all ``s`` and ``t``: (…, T + 1, T).

    It is 1 where ``s = t + 1``, which is no token, and 0 where ``s`` is larger. Every sum begins with its own first
    token, so a strong decay leaves no rounding behind, and its gradient is a sum over the ways across it.
    """
    tokens = g.shape[-1]
    steps = torch.arange(tokens + 1, device=g.device)
    later, first = steps[:-1], steps[:, None]
    sums = g[..., None, :].expand(*g.shape[:-1], tokens + 1, tokens).masked_fill(later < first, 0.0).cumsum(-1)
    return sums.masked_fill(later + 1 < first, -torch.inf).exp()


def _chunks(x: Tensor, count: int) -> Tensor:
    """Returns tokens (B, N, H, F) in so many chunks (B, C, T, H, F), with zeros behind them."""
    _, tokens, heads, features = x.shape
    padding = (count * CHUNK - tokens) * heads * features
    # Along one axis: of more, a compiler for any length mistakes the memory order of the gradient.
    chunks: Tensor = torch.nn.functional.pad(x.flatten(1), (0, padding)).unflatten(
        1, (count, CHUNK, heads, features)
    )
    return chunks
