"""The definition of delta rule attention in plain PyTorch: any device, any float dtype.

`recurrence` is the specification, one token after the other. `delta_attention` computes the same in chunks (the
WY form), which is what runs where the kernels do not. Products take factors in the dtype of ``q`` and add up in
float32, or in float64 for float64 inputs; decays, ``beta``, states and the triangular inverse are in float32 or
float64.

Decays over several tokens are exponentials of sums of logarithms that begin with their own first token: nothing is
divided, and no sum is subtracted from another, so a decay of any strength leaves no rounding behind it.
Sources: Yang et al., "Gated Delta Networks", 2024, arXiv 2412.06464; Kimi Team, "Kimi Linear", 2025, arXiv
2510.26692.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.ops.lrpe import reference as lrpe

Tensor = torch.Tensor

CHUNK = 64
"""Tokens between two states: a power of two."""
EPSILON = 1e-6
"""Added to the sum of squares by which rows are normalized."""


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    decay: Tensor | None = None,
    theta: Tensor | None = None,
    encoding: str = "none",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``o_t = scale · q̂_tᵀ S_t``: (B, N, H, E) [and states (S, H, D, E)].

    ``S_t = (I − β_t k̂_t k̂_tᵀ) Diag(exp(g_t)) S_{t−1} + β_t k̂_t v_tᵀ`` with ``g`` the decay. Packed sequences are
    computed as a batch of sequences of the ``longest`` length, of all rows if it is not known.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, tokens, heads, _ = v.shape
    g = q.new_zeros((batch, tokens, heads, 1), dtype=dtype) if decay is None else decay.to(dtype)
    g = g[..., None] if g.dim() == 3 else g  # (B, N, H, 1 or D)
    beta = beta.to(dtype)[..., None]
    places = None
    if cu_seqlens is not None:
        rows, places = lrpe.sequence_rows(tokens, cu_seqlens, tokens if longest is None else longest)
        q, k, v, g, beta = (lrpe.take_rows(x[0], rows) for x in (q, k, v, g, beta))  # (S, L, H, F)
        offset = offset.reshape(()) if isinstance(offset, Tensor) else offset
    # Its gradients by queries and by keys grow with positions, and nearly cancel: they are added before rounding.
    theta = None if theta is None else theta.double()
    place = {"theta": theta, "encoding": encoding, "interleaved": interleaved, "offset": offset}
    queries, keys = (features(x, normalize=normalize, **place).to(dtype) for x in (q, k))  # type: ignore[arg-type]
    # (B, H, N, F), with a head of queries and keys for each of values
    queries, keys = (x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1) for x in (queries, keys))
    v, g, beta = (x.to(dtype).transpose(1, 2) for x in (v, g, beta))
    first = v.new_zeros((v.shape[0], heads, queries.shape[3], v.shape[3]))
    state = first if initial_state is None else initial_state.to(dtype)
    out, state = _in_chunks(queries, keys, v, beta, g, state, q.dtype)
    out = (out * scale).to(q.dtype).transpose(1, 2)
    if places is not None:
        out = lrpe.take_rows(out.flatten(0, 1), places)[None]
    return (out, state) if return_state else out


def features(
    x: Tensor, *, theta: Tensor | None, encoding: str, interleaved: bool, offset: int | Tensor, normalize: bool
) -> Tensor:
    """``x̂`` in the dtype of ``x``: rows (B, N, H, D) normalized, and then rotated."""
    dtype = x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    if normalize:
        x = x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    if encoding == "rotate" and theta is not None:
        x = lrpe.lrpe_rotate(x, theta, offset=offset, interleaved=interleaved)
    return x.to(dtype)


def recurrence(
    queries: Tensor, keys: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, a token at a time, of encoded queries and keys (B, H, N, D) and values (B, H, N, E).

    ``beta`` is (B, H, N, 1), ``g`` (B, H, N, 1 or D) are logarithms of decays, and ``state`` (B, H, D, E) is that
    before the first token. Outputs (B, H, N, E), over the scale, and the state after the last token.
    """
    outs = []
    for t in range(v.shape[2]):
        key = keys[:, :, t, :, None]
        state = g[:, :, t, :, None].exp() * state
        wanted = v[:, :, t, None, :] - (key * state).sum(2, keepdim=True)
        state = state + key * (beta[:, :, t, :, None] * wanted)
        outs.append((queries[:, :, t, :, None] * state).sum(2))
    return torch.stack(outs, 2) if outs else v, state


class _Chunks(NamedTuple):
    """The contents of the chunks of a call, each (B, H, C, T, …), apart from states."""

    from_start: Tensor  # queries over the decay since the chunk's first token
    until_end: Tensor  # keys over the decay until its last
    scores: Tensor  # of queries with keys up to their own, over the decay between
    corrected: Tensor  # values, corrected by those of the chunk
    predicted: Tensor  # by which the state that comes in corrects them
    kept: Tensor  # of the state that comes in: (B, H, C, 1 or D)


def _factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor of a matrix product as the dtype of the inputs holds it."""
    return x.to(dtype).to(x.dtype)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, factors: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs over the scale, and the last state: of rows (B, H, N, F)."""
    tokens = v.shape[2]
    # An exported program is for lengths that are not known yet: a loop over chunks would be for one of them.
    exporting = torch.compiler.is_exporting()
    count, size = (1, tokens) if exporting or tokens == 1 else (max((tokens + CHUNK - 1) // CHUNK, 1), CHUNK)
    padding = count * size - tokens
    q, k, v, beta, g = (
        (x if exporting else torch.nn.functional.pad(x, (0, 0, 0, padding))).unflatten(2, (count, size))
        for x in (q, k, v, beta, g)
    )
    chunks = _prepare(q, k, v, beta, g, factors)
    outs = []
    for c in range(count):
        from_start, until_end, scores, corrected, predicted, kept = (x[:, :, c] for x in chunks)
        before = _factor(state, factors)
        update = _factor(corrected - predicted @ before, factors)
        outs.append(from_start @ before + scores @ update)
        state = kept[..., None] * state + until_end.mT @ update
    out = torch.cat(outs, 2)
    return out if exporting else out[:, :, :tokens], state


def _prepare(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, factors: torch.dtype) -> _Chunks:
    """Returns what chunks (B, H, C, T, F) hold.

    Within a chunk the corrected values ``U`` obey ``(I + L) U = β (V − K̃ S)``, with ``L_tj = β_t ⟨k_t, k_j⟩`` over
    the decay between, ``j < t``, and ``K̃`` the keys over the decay since the chunk's start.
    """
    since = g.cumsum(-2).exp()
    until = _sums_behind(g)
    lower = beta * _pairs(k, k, g, factors)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower + identity, identity, upper=False, unitriangular=True)
    solved = _factor(inverse * beta.mT, factors)
    scores = _pairs(q, k, g, factors) + torch.diag_embed((q * k).sum(-1))
    return _Chunks(
        _factor(q * since, factors),
        _factor(k * until.exp(), factors),
        _factor(scores, factors),
        solved @ v,
        _factor(solved @ _factor(k * since, factors), factors),
        g.sum(-2).exp(),
    )


def _sums_behind(g: Tensor) -> Tensor:
    """The sums (…, T, F) of the logarithms behind each token of (…, T, F)."""
    behind = torch.nn.functional.pad(g, (0, 0, 0, 1))[..., 1:, :]
    return behind.flip(-2).cumsum(-2).flip(-2)


def _pairs(a: Tensor, b: Tensor, g: Tensor, factors: torch.dtype) -> Tensor:
    """Inner products (…, T, T) of each row of ``a`` with the earlier ones of ``b``, over the decay between; else 0.

    The decay between ``j < t`` is the exponential of the sum of ``g`` from ``j + 1`` to ``t``. With decays per
    feature it is in the product: halves of a chunk meet at the middle, to which both decay, then halves of halves.
    """
    tokens = a.shape[-2]
    if g.shape[-1] == 1 or torch.compiler.is_exporting():
        steps = torch.arange(tokens, device=g.device)
        later, first = steps, steps[:, None] + 1
        sums = g.mT[..., None, :].expand(*g.shape[:-2], g.shape[-1], tokens, tokens)
        sums = sums.masked_fill(later < first, 0.0).cumsum(-1)
        between = sums.masked_fill(later < first, -torch.inf).exp().mT  # (…, F, t, j)
        if g.shape[-1] == 1:
            return (a @ b.mT) * between.squeeze(-3)
        return torch.einsum("...td,...jd,...dtj->...tj", a, b, between)
    found = a.new_zeros((*a.shape[:-2], tokens, 1, 1))
    width = 1
    while width < tokens:
        early, late = (x.unflatten(-2, (-1, 2, width)) for x in (b, a))
        decays = g.unflatten(-2, (-1, 2, width))
        early = early[..., 0, :, :] * _sums_behind(decays[..., 0, :, :]).exp()
        late = late[..., 1, :, :] * decays[..., 1, :, :].cumsum(-2).exp()
        block = _factor(late, factors) @ _factor(early, factors).mT
        both = found.unflatten(-3, (-1, 2))
        upper = torch.cat((both[..., 0, :, :], torch.zeros_like(block)), -1)
        found = torch.cat((upper, torch.cat((block, both[..., 1, :, :]), -1)), -2)
        width *= 2
    return found.squeeze(-3)
