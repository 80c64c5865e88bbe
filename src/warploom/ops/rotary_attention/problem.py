"""Parts of a projection to queries, keys and values."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(B, N, H + 2·Hkv, D) to (B, N, H + Hkv, D) and (B, N, Hkv, D)."""
    kv_heads = (qkv.shape[2] - heads) // 2
    qk, v = torch.split_with_sizes(qkv, (heads + kv_heads, kv_heads), 2)
    return qk, v


def queries_and_keys(qk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(B, N, H + Hkv, D) to (B, N, H, D) and (B, N, Hkv, D)."""
    q, k = torch.split_with_sizes(qk, (heads, qk.shape[2] - heads), 2)
    return q, k
