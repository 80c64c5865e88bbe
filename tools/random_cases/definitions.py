"""The public functions that random calls are of, and their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["function_of", "reference_of", "rotated"]

Tensor = torch.Tensor


def function_of(operator: str) -> Callable[..., Any]:
    """The public function."""
    if operator == "rotary_attention":
        from warploom.ops.rotary_attention.api import rotary_attention

        return rotary_attention
    from warploom.ops import operators

    return operators()[operator].function


def reference_of(operator: str, whole: bool = False) -> Callable[..., Any]:
    """The definition, of the function's arguments but ``backend``.

    That of `tpa_decode` takes one batch entry after another, or with ``whole`` all at once, as PyTorch computes a
    call.
    """
    if operator == "tpa_decode" and whole:
        return _whole_decode
    return _rotary_attention if operator == "rotary_attention" else _registered(operator)


def _registered(name: str) -> Callable[..., Any]:
    from warploom.ops import operators

    return operators()[name].reference


def _whole_decode(*, strategy: str = "auto", **given: Any) -> Tensor:
    from warploom.ops.tpa import reference

    return reference.tpa_decode(**given)


def _rotary_attention(qkv: Tensor, theta: Tensor, heads: int, scale: float, interleaved: bool = False) -> Any:
    q, k, v = rotated(qkv, theta, heads, interleaved)
    return _registered("flash_attention")(q, k, v, causal=True, scale=scale)


def rotated(qkv: Tensor, theta: Tensor, heads: int, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned by their positions, and values."""
    key_heads = (qkv.shape[2] - heads) // 2
    qk, v = qkv.split((heads + key_heads, key_heads), 2)
    turned = _registered("lrpe_rotate")(qk, theta, interleaved=interleaved)
    q, k = turned.split((heads, key_heads), 2)
    return q, k, v
