"""A call that appends to a cache: its tensors and its options."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class AppendInputs(NamedTuple):
    """The tensors of a call, by the same names from the public function to the kernel."""

    k: Tensor  # (B, N, Hkv, D)
    v: Tensor  # (B, N, Hkv, E)
    q: Tensor | None  # (B, N, Hq, D)
    k_cache: Tensor  # (S, M, Hkv, D), or (pages, page_size, Hkv, D)
    v_cache: Tensor
    theta: Tensor | None  # (F,) or (1, F)
    cu_seqlens: Tensor | None  # (S + 1,)
    seqused_k: Tensor  # (S,)
    block_table: Tensor | None  # (S, P)


class AppendOptions(NamedTuple):
    """The options of a call."""

    kind: str  # none, rotate or interleaved
