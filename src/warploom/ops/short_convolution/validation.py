"""Validation of the arguments of the short convolution. Only `check_values` reads data of tensors."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from warploom.errors import ShapeError, fault, shape_of
from warploom.ops.short_convolution.call import ConvolutionInputs, ConvolutionOptions
from warploom.runtime.arguments import (
    FLOATS,
    check_choice,
    check_cu_seqlens,
    check_device,
    check_flags,
    check_tensor,
    is_within,
)
from warploom.runtime.dispatch import ValidatedCall
from warploom.runtime.values import check_bounds

Tensor = torch.Tensor

NAME = "short_convolution"
Activation = Literal["none", "silu"]
MAX_TAPS = 8
"""Inputs of an output that the kernels take."""
MAX_ROWS = 2**31 - 2**12
"""Rows of 64 channels, which the kernels count in 32 bits, to the end of the last tile."""


def check(name: str, inputs: ConvolutionInputs, options: tuple[Any, ...], _: int) -> ValidatedCall:
    """Validates a call.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: activation and return_state.
    """
    x, weight, bias, initial_state, cu_seqlens = inputs
    activation, return_state = options
    check_tensor(name, "x", x, FLOATS)
    _check_one(name, "weight", weight, x)
    if x.dim() != 3 or x.shape[2] == 0:
        raise fault(ShapeError, name, "x", "(B, N, C) with C ≥ 1", shape_of(x))
    channels = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 2:
        expected = f"(C, K) with C = {channels} and K ≥ 2"
        if weight.dim() == 3 and weight.shape[:2] == (channels, 1):
            expected += ", as weight[:, 0] of a Conv1d is"
        raise fault(ShapeError, name, "weight", expected, shape_of(weight))
    if bias is not None:
        _check_one(name, "bias", bias, x)
        if bias.shape != (channels,):
            raise fault(ShapeError, name, "bias", f"(C,) with C = {channels}", shape_of(bias))
    check_choice(name, "activation", activation, get_args(Activation))
    check_flags(name, return_state=return_state)
    if cu_seqlens is not None:
        check_cu_seqlens(name, "cu_seqlens", cu_seqlens, "x", x)
        if x.shape[0] != 1:
            raise fault(ShapeError, name, "x", "of batch size 1 when cu_seqlens is given", shape_of(x))
    if initial_state is not None:
        _check_one(name, "initial_state", initial_state, x)
        if tuple(initial_state.shape) != inputs.state_shape:
            expected = f"(S, C, K − 1) = {inputs.state_shape}"
            raise fault(ShapeError, name, "initial_state", expected, shape_of(initial_state))
    reason = _beyond_kernels(x, weight)
    return ValidatedCall(ConvolutionOptions(activation, return_state), reason, num_results=2 if return_state else 1)


def check_values(name: str, inputs: ConvolutionInputs) -> None:
    """Checks what tensors of a valid call hold."""
    check_bounds(name, "cu_seqlens", inputs.cu_seqlens, inputs.x.shape[1])


def _check_one(name: str, argument: str, tensor: Tensor, x: Tensor) -> None:
    check_tensor(name, argument, tensor, FLOATS)
    check_device(name, argument, tensor, "x", x)


def _beyond_kernels(x: Tensor, weight: Tensor) -> str | None:
    """Returns what the Triton kernels do not do in this call, if anything."""
    if weight.shape[1] > MAX_TAPS:
        return f"a convolution of {weight.shape[1]} tokens ({MAX_TAPS} at most)"
    rows = math.prod(x.shape[:2]) * ((x.shape[2] + 63) // 64)
    if not is_within(rows, MAX_ROWS):
        return f"x has {rows} rows of 64 channels ({MAX_ROWS} at most)"
    return None
