"""Rotary positions and causal attention as one function, for layers."""

from __future__ import annotations

from typing import Any

import torch

from warploom.ops.rotary_attention.call import RotaryInputs, RotaryOptions
from warploom.ops.rotary_attention.operator import OPERATOR
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.sharding import Axes

Tensor = torch.Tensor


def rotary_attention(qkv: Tensor, theta: Tensor, heads: int, scale: float, *, interleaved: bool = False) -> Tensor:
    """Returns causal attention of queries and keys that are rotated by their positions, counted from zero.

    Args:
        qkv: ``(B, N, H + 2·Hkv, D)``: the heads of queries, keys and values, on a GPU; any strides.
        theta: ``(F,)`` or ``(1, F)``: frequencies in radians per position, see `warploom.lrpe_rotate`.
        heads: ``H``.
        scale: Factor of the inner products.
        interleaved: Pair neighbouring features instead of halves.

    Returns:
        ``(B, N, H, D)``.
    """
    kind = "interleaved" if interleaved else "rotate"
    options = RotaryOptions(heads, kind, scale)
    return _function("triton", RotaryInputs(qkv, theta), options)  # type: ignore[no-any-return]


def _check(name: str, inputs: RotaryInputs, options: RotaryOptions, _: int) -> ValidatedCall:
    """Takes a call as it is: layers make it of what they have checked."""
    return ValidatedCall(options)


def _run_reference(*_: Any) -> Any:
    raise NotImplementedError("rotary_attention runs on the kernels; elsewhere layers call its two parts")


def _axes(*_: Any) -> Axes:
    """Returns the axes that calls are sharded over: batch entries. Heads of q, k and v share an axis."""
    return Axes(("b...", ".."), ("b...",))


_function = Function("rotary_attention", _check, _run_reference, OPERATOR, _axes)
