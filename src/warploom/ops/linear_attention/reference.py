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
) -> Tensor | tuple[Tensor, Tensor]:
    """``o_t = scale · φ(q_t)ᵀ S_t`` with ``S_t = λ_t S_{t−1} + φ(k_t) v_tᵀ``: (B, N, H, E) [and (S, H, F, E)]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Its gradients by queries and by keys grow with positions, and nearly cancel: they are added before rounding.
    theta = None if theta is None else theta.double()
    queries, keys = (
        features(
            x, theta=theta, encoding=encoding, activation=activation, interleaved=interleaved, offset=offset,
            cu_seqlens=cu_seqlens,
        ).to(dtype)
        for x in (q, k)
    )  # fmt: skip
    rest = (v.to(dtype), _log_decays(q, decay, dtype), initial_state, q.dtype)
    if cu_seqlens is not None:
        out, state = _in_pairs(queries, keys, *rest, causal, cu_seqlens)
    elif causal:
        out, state = _in_chunks(queries, keys, *rest)
    else:
        state = torch.einsum("bnhf,bnhe->bhfe", keys, rest[0])
        out = torch.einsum("bnhf,bhfe->bnhe", queries, _factor(state, q.dtype))
    out = (out * scale).to(q.dtype)
    return (out, state) if return_state else out


def features(
    x: Tensor, *, theta: Tensor | None, encoding: str, activation: str, interleaved: bool, offset: int | Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:  # fmt: skip
    """``φ(x)`` in the dtype of ``x``: (B, N, H, D) to (B, N, H, F)."""
    if encoding == "none" or theta is None:
        return lrpe.activate(x, activation, None).to(x.dtype)
    if encoding == "cosine":
        return lrpe.lrpe_cosine(x, theta, offset=offset, cu_seqlens=cu_seqlens, activation=activation)
    return lrpe.lrpe_rotate(
        x, theta, offset=offset, cu_seqlens=cu_seqlens, activation=activation, interleaved=interleaved
    )


def recurrence(queries: Tensor, keys: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, a token at a time, of encoded queries and keys (B, N, H, F).

    ``g`` (B, N, H) are logarithms of decays, and ``state`` (B, H, F, E) is that before the first token. Outputs
    (B, N, H, E), over the scale, and the state after the last token.
    """
    out = torch.zeros_like(v)
    for t in range(v.shape[1]):
        state = g[:, t, :, None, None].exp() * state + keys[:, t, :, :, None] * v[:, t, :, None, :]
        out[:, t] = (queries[:, t, :, :, None] * state).sum(2)
    return out, state


def _log_decays(q: Tensor, decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The logarithm of every token's decay: (B, N, H)."""
    shape = q.shape[:3]
    if decay is None:
        return q.new_zeros(shape, dtype=dtype)
    return decay.to(dtype).expand(shape)


def _factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor of a matrix product as the dtype of the inputs holds it."""
    return x.to(dtype).to(x.dtype)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, factors: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs over the scale, and the last state.

    Within a chunk every pair of tokens is taken; what came before it is in its first state, all of which are made
    of the chunks' own sums at once.
    """
    tokens = q.shape[1]
    # An exported program is for lengths that are not known yet; one chunk alone would be a case of its own.
    exporting = torch.compiler.is_exporting()
    count = (tokens + (2 if exporting else 1) * CHUNK - 1) // CHUNK
    q, k, v = (_chunks(x, count) for x in (q, k, v))  # (B, C, T, H, F)
    a = _sums(_chunks(g[..., None], count)[..., 0], 2)  # (B, C, T, H)
    total = a[:, :, -1]
    sums = torch.einsum("bcthf,bcthe->bchfe", k, _factor(v * (total[:, :, None] - a).exp()[..., None], factors))
    # From the end of chunk j to the start of chunk i: the sum of the totals in between, in float64.
    before = torch.nn.functional.pad(_sums(total.double(), 1), (0, 0, 1, 0))  # (B, C + 1, H)
    between = before[:, :, None] - before[:, None, 1:]
    chunks = torch.arange(sums.shape[1], device=q.device)
    later = torch.arange(sums.shape[1] + 1, device=q.device)[:, None] > chunks
    between = between.masked_fill(~later[None, :, :, None], -torch.inf).exp().to(q.dtype)
    states = torch.einsum("bijh,bjhfe->bihfe", between, sums)
    if initial is not None:
        states = states + before.exp().to(q.dtype)[..., None, None] * initial.to(q.dtype)[:, None]
    steps = torch.arange(CHUNK, device=q.device)
    distance = (a[:, :, :, None] - a[:, :, None]).masked_fill((steps[:, None] < steps)[:, :, None], -torch.inf)
    scores = torch.einsum("bcthf,bcshf->bctsh", q, k) * distance.exp()
    out = torch.einsum("bctsh,bcshe->bcthe", _factor(scores, factors), v)
    carried = torch.einsum("bcthf,bchfe->bcthe", q, _factor(states[:, :-1], factors))
    out = out + carried * a.exp()[..., None]
    out = out.flatten(1, 2)
    if exporting:  # that there are as many would have to be proven of a slice
        return out.index_select(1, torch.arange(tokens, device=out.device)), states[:, -1]
    return out[:, :tokens], states[:, -1]


def _sums(x: Tensor, dim: int) -> Tensor:
    """``x.cumsum(dim)``, which on a GPU has other bits in some runs if it is of one column: here are two."""
    return torch.stack((x, x), -1).cumsum(dim)[..., 0]


def _chunks(x: Tensor, count: int) -> Tensor:
    """Tokens (B, N, H, F) in so many chunks (B, C, T, H, F), with zeros behind them."""
    _, tokens, heads, features = x.shape
    padding = (count * CHUNK - tokens) * heads * features
    # Along one axis: of more, a compiler for any length mistakes the memory order of the gradient.
    chunks: Tensor = torch.nn.functional.pad(x.flatten(1), (0, padding)).unflatten(
        1, (count, CHUNK, heads, features)
    )
    return chunks


def _in_pairs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, factors: torch.dtype, causal: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same of packed sequences (1, N, H, F), with a weight for every pair of tokens."""
    q, k, v = q[0], k[0], v[0]
    index = torch.arange(q.shape[0], device=q.device)
    sequence = lrpe.sequence_of(index, cu_seqlens)
    own = (sequence[:, None] == torch.arange(cu_seqlens.shape[0] - 1, device=q.device)).to(q.dtype)  # (N, S)
    if not causal:
        state = torch.einsum("ns,nhf,nhe->shfe", own, k, v)
        return torch.einsum("ns,nhf,shfe->nhe", own, q, _factor(state, factors))[None], state
    before = torch.nn.functional.pad(_sums(g[0], 0), (0, 0, 1, 0))  # (N + 1, H)
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    a = before[1:] - before[start][sequence]
    remaining = before[end][sequence] - before[1:]
    seen = (sequence[:, None] == sequence) & (index[:, None] >= index)
    distance = (a[:, None] - a).masked_fill(~seen[..., None], -torch.inf).exp().to(q.dtype)
    scores = torch.einsum("thf,shf->tsh", q, k) * distance
    out = torch.einsum("tsh,she->the", _factor(scores, factors), v)
    decayed = _factor(v * remaining.exp().to(q.dtype)[..., None], factors)
    state = torch.einsum("ns,nhf,nhe->shfe", own, k, decayed)
    if initial is not None:
        initial = initial.to(q.dtype)
        carried = torch.einsum("ns,nhf,shfe->nhe", own, q, _factor(initial, factors))
        out = out + carried * a.exp().to(q.dtype)[..., None]
        state = state + (before[end] - before[start]).exp().to(q.dtype)[..., None, None] * initial
    return out[None], state
