"""Other ways to append to a cache: PyTorch's operations, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch

from warploom.ops.spec import Case, compile_at_best

Tensor = torch.Tensor
Provider = Callable[..., tuple[Tensor, ...]]


def append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, cu_seqlens: Tensor,
    block_table: Tensor, theta: Tensor, q: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Append as a careful user writes it in PyTorch: float32 angles, and rows of all tokens put at once.

    Every token must have a page, as in the cases of the bench.
    """
    index = torch.arange(k.shape[1], device=k.device)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    place = seqused_k[sequence] - cu_seqlens[sequence + 1] + index
    size = k_cache.shape[1]
    slots = (block_table[sequence, place // size].long(), place % size)
    phi = place[:, None, None].float() * theta
    cosine, sine = phi.cos(), phi.sin()

    def rotate(x: Tensor) -> Tensor:
        one, two = x.float().chunk(2, dim=-1)
        return torch.cat((one * cosine - two * sine, one * sine + two * cosine), dim=-1).to(x.dtype)

    k_cache.index_put_(slots, rotate(k)[0])
    v_cache.index_put_(slots, v[0])
    return k_cache, v_cache, rotate(q)


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: append,
    "torch_compile": lambda case: compile_at_best(append),
}
