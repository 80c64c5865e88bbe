"""The definition in plain PyTorch: any device, any float dtype. This file is the specification.

The caches are written in place. Angles are formed in float64 whatever the dtype, as for LRPE.
"""

from __future__ import annotations

import torch

from warploom.ops.lrpe import reference as lrpe

Tensor = torch.Tensor


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqused_k: Tensor,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    theta: Tensor | None = None,
    interleaved: bool = False,
    q: Tensor | None = None,
) -> Tensor | None:
    """Rotate new keys at their places, write keys and values there, and return queries rotated at the same places.

    Token ``i`` of the ``n`` new ones of sequence ``s`` has place ``seqused_k[s] − n + i``. A token whose place is
    not in the cache is not written.
    """
    sequence, place, exists = places(k, seqused_k, cu_seqlens)
    if theta is not None:
        k = rotate(k, theta, place, exists, interleaved)
        q = None if q is None else rotate(q, theta, place, exists, interleaved)
    row, column, inside = sequence, place, exists & (place >= 0)
    if block_table is None:
        inside = inside & (place < k_cache.shape[1])
    else:
        size = k_cache.shape[1]
        page = torch.div(place, size, rounding_mode="floor")
        inside = inside & (page < block_table.shape[1])
        row, column = torch.zeros_like(page), place % size
        if block_table.numel():
            entry = sequence.clamp(max=block_table.shape[0] - 1)
            row = block_table[entry, page.clamp(0, block_table.shape[1] - 1)].long()
        inside = inside & (row >= 0) & (row < k_cache.shape[0])
    for cache, new in ((k_cache, k), (v_cache, v)):
        write(cache, row, column, new, inside)
    return q


def places(k: Tensor, seqused_k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sequence and place of every token, and whether it is one of a sequence: (B, N) each."""
    batch, tokens = k.shape[:2]
    index = torch.arange(tokens, device=k.device)
    if cu_seqlens is None:
        place = seqused_k.long()[:, None] - tokens + index
        return torch.arange(batch, device=k.device)[:, None].expand_as(place), place, torch.ones_like(place).bool()
    sequence = lrpe.sequence_of(index, cu_seqlens)
    exists = index < cu_seqlens[-1]
    sequence = torch.where(exists, sequence, 0)
    place = seqused_k.long()[sequence] - cu_seqlens[sequence + 1] + index
    return sequence[None], place[None], exists[None]


def rotate(x: Tensor, theta: Tensor, place: Tensor, exists: Tensor, interleaved: bool) -> Tensor:
    """Returns ``x`` rotated at its tokens' places; zero in rows that are of no sequence."""
    x = x.masked_fill(~exists[:, :, None, None], 0.0)
    return lrpe.lrpe_rotate(x, theta, position_ids=place, interleaved=interleaved)


def write(cache: Tensor, row: Tensor, column: Tensor, x: Tensor, inside: Tensor) -> None:
    """Write the tokens of ``x`` that are ``inside`` to rows and columns of the cache."""
    if type(inside) is Tensor and not inside.is_meta and not torch.compiler.is_compiling():
        cache[row[inside], column[inside]] = x[inside]
        return
    # Without values, as a compiler has none, no tensor's size can depend on them: the others go to one more row.
    longer = torch.cat((cache, cache.new_zeros((1, *cache.shape[1:]))))
    longer[torch.where(inside, row, cache.shape[0]), torch.where(inside, column, 0)] = x
    cache.copy_(longer[:-1])
