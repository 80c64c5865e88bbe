"""The public functions that random calls are of, and their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.ops import operators
from warploom.ops.tpa import reference as tpa

__all__ = ["function_of", "reference_of"]

Tensor = torch.Tensor


def function_of(operator: str) -> Callable[..., Any]:
    """Returns the public function."""
    if operator != "rotary_attention":
        return operators()[operator].function
    from warploom.ops.rotary_attention.api import rotary_attention  # needs Triton

    return rotary_attention


def reference_of(operator: str, whole: bool = False) -> Callable[..., Any]:
    """Returns the definition, of the function's arguments but ``backend``.

    The definition of `tpa_decode` takes one batch entry after another, or with ``whole`` all at once, as PyTorch
    computes a call.
    """
    if operator == "tpa_decode" and whole:
        return _decode_whole
    return _attend_rotated if operator == "rotary_attention" else operators()[operator].reference


def _decode_whole(*, strategy: str = "auto", **given: Any) -> Tensor:
    return tpa.tpa_decode(**given)


def _attend_rotated(qkv: Tensor, theta: Tensor, heads: int, scale: float, interleaved: bool = False) -> Any:
    key_heads = (qkv.shape[2] - heads) // 2
    qk, v = qkv.split((heads + key_heads, key_heads), 2)
    q, k = reference_of("lrpe_rotate")(qk, theta, interleaved=interleaved).split((heads, key_heads), 2)
    return reference_of("flash_attention")(q=q, k=k, v=v, causal=True, scale=scale)
