"""Rotary positions and causal attention as one function, for layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.ops.flash_attention.tangent import attend_dual
from warploom.ops.flash_attention.validation import FlashInputs, FlashOptions
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.ops.lrpe.operator import OPERATOR as LRPE
from warploom.ops.rotary_attention.call import RotaryInputs, RotaryOptions, split_keys, split_values
from warploom.ops.rotary_attention.operator import OPERATOR
from warploom.runtime.dispatch import Function, Tangent, ValidatedCall, apply_registered, differentiate_forward
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


def _differentiate(inputs: RotaryInputs, tangents: Any, _: int, options: RotaryOptions) -> Sequence[Tensor]:
    """Returns the tangent of attention, by those of its two operators."""

    def form(qkv: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        qk, v = split_values(qkv, options.heads)
        rotated = apply_registered(LRPE, LrpeInputs(qk, theta), 0, LrpeOptions(kind=options.kind))[0]
        return *split_keys(rotated, options.heads), v

    formed, dformed = differentiate_forward(form, inputs, tangents)
    of_attention = FlashOptions(None, 0, options.scale, None)
    return attend_dual(FlashInputs(*formed), FlashInputs(*dformed), 0, of_attention)[1][:1]


def _run_reference(*_: Any) -> Any:
    raise NotImplementedError("rotary_attention runs on the kernels; elsewhere layers call its two parts")


def _axes(*_: Any) -> Axes:
    """Returns the axes that calls are sharded over: batch entries. Heads of q, k and v share an axis."""
    return Axes(("b...", ".."), ("b...",))


_function = Function("rotary_attention", _check, _run_reference, OPERATOR, _axes, tangent=Tangent(_differentiate))
