"""A call of rotary attention, and the parts of its projection to queries, keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class RotaryInputs(NamedTuple):
    """The tensors of a call."""

    qkv: Tensor  # (B, N, H + 2·Hkv, D)
    theta: Tensor  # (F,) or (1, F)


class RotaryOptions(NamedTuple):
    """The options of a call."""

    heads: int
    kind: str  # rotate or interleaved
    scale: float


def split_values(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Returns queries and keys (B, N, H + Hkv, D) and values (B, N, Hkv, D) of a projection."""
    kv_heads = (qkv.shape[2] - heads) // 2
    qk, v = torch.split_with_sizes(qkv, (heads + kv_heads, kv_heads), 2)
    return qk, v


def split_keys(qk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Returns queries (B, N, H, D) and keys (B, N, Hkv, D)."""
    q, k = torch.split_with_sizes(qk, (heads, qk.shape[2] - heads), 2)
    return q, k
