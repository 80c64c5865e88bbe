"""Validation of the arguments of linear attention. Only `check_values` reads data of tensors."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from warploom.errors import ArgumentError, ShapeError, fault, shape_of
from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
from warploom.runtime.arguments import (
    FLOATS,
    LARGEST,
    check_alike,
    check_choice,
    check_cu_seqlens,
    check_device,
    check_flags,
    check_number,
    check_offset,
    check_state,
    check_tensor,
    check_theta,
    is_within,
)
from warploom.runtime.dispatch import ValidatedCall
from warploom.runtime.layout import warn_of_heads_first
from warploom.runtime.values import check_bounds, check_decays, check_positions

Tensor = torch.Tensor

NAME = "linear_attention"
Encoding = Literal["none", "rotate", "cosine"]
Activation = Literal["none", "relu", "sigmoid", "silu", "softmax"]
MAX_FEATURES = 256
"""Features of an encoded query or key, and of a value, that the kernels hold on chip at once."""
LARGE = 2**29
"""Rows · F · E from which on PyTorch's products are faster than the kernels, in float32 without causality.

On an H200, without an encoding, 2³¹ with 128 features take the kernels 1.29 ms forwards and 3.03 backwards, and
PyTorch 0.56 and 0.91. 2²⁹ with 64 features take 0.71 and 1.68, and 0.45 and 0.59.
"""
MAX_TOKENS = 2**31 - 2**12
"""Tokens of all heads and batch entries, which the kernels count in 32 bits, to the end of the last tile."""
SCALES = (2.0**-60, 2.0**60)
"""The least and the largest absolute scale, 0 excepted, by which the kernels can divide and multiply a gradient."""


def check(name: str, inputs: LinearInputs, options: tuple[Any, ...], offset: Any) -> ValidatedCall:
    """Validates a call.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: encoding, activation, interleaved, causal, scale and return_state.
        offset: The offset, if it is no tensor.
    """
    q, k, v, theta, decay, initial_state, offsets, cu_seqlens = inputs
    encoding, activation, interleaved, causal, scale, return_state = options
    _check_qkv(q, k, v)
    check_flags(NAME, interleaved=interleaved, causal=causal, return_state=return_state)
    check_choice(NAME, "encoding", encoding, get_args(Encoding))
    check_choice(NAME, "activation", activation, get_args(Activation))
    if interleaved and encoding != "rotate":
        raise fault(ArgumentError, NAME, "interleaved", 'left out unless encoding="rotate"', encoding)
    check_theta(NAME, theta, encoding, q)
    check_offset(NAME, offset, offsets, "q", q)
    if cu_seqlens is not None:
        check_cu_seqlens(NAME, "cu_seqlens", cu_seqlens, "q", q)
        if q.shape[0] != 1:
            raise fault(ShapeError, NAME, "q", "of batch size 1 when cu_seqlens is given", shape_of(q))
    _check_decay(q, decay)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    features = q.shape[-1] * (2 if encoding == "cosine" else 1)
    shape = (sequences, q.shape[2], features, v.shape[-1])
    check_state(NAME, initial_state, "(S, H, F, E)", shape, q)
    if not causal:
        given = {
            "decay": decay is not None,
            "initial_state": initial_state is not None,
            "return_state": return_state,
        }
        for argument in (argument for argument, there in given.items() if there):
            raise fault(ArgumentError, NAME, argument, "left out when causal=False", "both")
    if initial_state is None:  # whose heads are those of queries
        warn_of_heads_first(name, q, k, v)
    reason = _beyond_kernels(q, v, features, scale)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    else:
        check_number(NAME, "scale", scale)
    kind = "interleaved" if interleaved else encoding
    counted = offsets is None
    return ValidatedCall(
        LinearOptions(kind, activation, causal, scale, return_state),
        reason,
        num_results=2 if return_state else 1,
        numbers=(-LARGEST, LARGEST + 1 - q.shape[1]) if counted else (0, 0),
        prefers_torch=not causal and q.dtype == torch.float32 and _is_large(q, v, features) and cu_seqlens is None,
    )


def check_values(name: str, inputs: LinearInputs) -> None:
    """Checks what tensors of a valid call hold."""
    check_decays(name, "decay", inputs.decay)
    check_positions(name, "offset", inputs.offsets)
    check_bounds(name, "cu_seqlens", inputs.cu_seqlens, inputs.q.shape[1])


def _beyond_kernels(q: Tensor, v: Tensor, features: int, scale: float | None) -> str | None:
    """Returns why the Triton kernels do not take this call, or None."""
    for what, size in (("query or key", features), ("value", v.shape[-1])):
        if size > MAX_FEATURES:
            return f"a {what} of {size} features does not fit in one tile ({MAX_FEATURES} at most)"
    if not is_within(math.prod(q.shape[:3]), MAX_TOKENS):
        return f"q has {math.prod(q.shape[:3])} rows of features ({MAX_TOKENS} at most)"
    if isinstance(scale, int | float) and scale != 0 and not SCALES[0] <= abs(scale) <= SCALES[1]:
        return f"a scale of {scale} is neither 0 nor between 2**-60 and 2**60 in size"
    return None


def _is_large(q: Tensor, v: Tensor, features: int) -> bool:
    """Returns whether a call is so large that a few launches more do not matter."""
    return not is_within(math.prod(q.shape[:3]) * features * v.shape[-1], LARGE - 1)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_alike(NAME, q=q, k=k, v=v)
    if q.dim() != 4 or q.shape[-1] == 0:
        raise fault(ShapeError, NAME, "q", "(B, N, H, D) with D ≥ 1", shape_of(q))
    if k.shape != q.shape:
        raise fault(ShapeError, NAME, "k", f"of the shape of q, {shape_of(q)}", shape_of(k))
    if v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.shape[3] == 0:
        batch, tokens, heads, _ = q.shape
        expected = f"(B, N, H, E) with B = {batch}, N = {tokens}, H = {heads}, E ≥ 1"
        raise fault(ShapeError, NAME, "v", expected, shape_of(v))


def _check_decay(q: Tensor, decay: Tensor | None) -> None:
    if decay is None:
        return
    check_tensor(NAME, "decay", decay, FLOATS)
    if decay.shape not in (q.shape[2:3], q.shape[:3]):
        batch, tokens, heads, _ = q.shape
        expected = f"(H,) or (B, N, H) with B = {batch}, N = {tokens}, H = {heads}"
        raise fault(ShapeError, NAME, "decay", expected, shape_of(decay))
    check_device(NAME, "decay", decay, "q", q)
