"""Validation of the arguments of delta rule attention. Only `check_values` reads data of tensors."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from warploom.errors import ArgumentError, ShapeError, fault, shape_of
from warploom.ops.delta_attention.call import DeltaInputs, DeltaOptions
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

NAME = "delta_attention"
Encoding = Literal["none", "rotate"]
MAX_FEATURES = 256
"""Features of a query or key, and of a value, that the kernels hold on chip at once."""
MAX_ROWS = 2**31 - 2**12
"""Rows of all heads and batch entries, which the kernels count in 32 bits, to the end of the last tile."""
SCALES = (2.0**-60, 2.0**60)
"""The least and the largest size of a scale but 0, by which the kernels can divide a gradient and multiply it."""


def check(name: str, inputs: DeltaInputs, options: tuple[Any, ...], offset: Any) -> ValidatedCall:
    """Validates a call.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: encoding, interleaved, normalize, scale and return_state.
        offset: The offset, if it is no tensor.
    """
    q, k, v, beta, decay, theta, initial_state, offsets, cu_seqlens = inputs
    encoding, interleaved, normalize, scale, return_state = options
    _check_rows(q, k, v)
    check_flags(NAME, interleaved=interleaved, normalize=normalize, return_state=return_state)
    check_choice(NAME, "encoding", encoding, get_args(Encoding))
    if interleaved and encoding != "rotate":
        raise fault(ArgumentError, NAME, "interleaved", 'left out unless encoding="rotate"', encoding)
    check_theta(NAME, theta, encoding, q, "Hk")
    check_offset(NAME, offset, offsets, "q", q)
    if cu_seqlens is not None:
        check_cu_seqlens(NAME, "cu_seqlens", cu_seqlens, "q", q)
        if q.shape[0] != 1:
            raise fault(ShapeError, NAME, "q", "of batch size 1 when cu_seqlens is given", shape_of(q))
    _check_gates(q, v, beta, decay)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
    check_state(NAME, initial_state, "(S, H, D, E)", shape, q)
    if initial_state is None:  # whose heads are those of values
        warn_of_heads_first(name, q, k, v)
    reason = _beyond_kernels(q, v, scale)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    else:
        check_number(NAME, "scale", scale)
    return ValidatedCall(
        DeltaOptions("interleaved" if interleaved else encoding, normalize, scale, return_state),
        reason,
        num_results=2 if return_state else 1,
        numbers=(-LARGEST, LARGEST + 1 - q.shape[1]) if offsets is None else (0, 0),
    )


def check_values(name: str, inputs: DeltaInputs) -> None:
    """Checks what tensors of a valid call hold."""
    check_decays(name, "decay", inputs.decay)
    check_positions(name, "offset", inputs.offsets)
    check_bounds(name, "cu_seqlens", inputs.cu_seqlens, inputs.q.shape[1])


def _beyond_kernels(q: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Returns what the Triton kernels do not do in this call, if anything."""
    for what, size in (("query or key", q.shape[-1]), ("value", v.shape[-1])):
        if size > MAX_FEATURES:
            return f"a {what} of {size} features does not fit in one tile ({MAX_FEATURES} at most)"
    if not is_within(math.prod(v.shape[:3]), MAX_ROWS):
        return f"v has {math.prod(v.shape[:3])} rows of features ({MAX_ROWS} at most)"
    if isinstance(scale, int | float) and scale != 0 and not SCALES[0] <= abs(scale) <= SCALES[1]:
        return f"a scale of {scale} is neither 0 nor between 2**-60 and 2**60 in size"
    return None


def _check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_alike(NAME, q=q, k=k, v=v)
    if q.dim() != 4 or 0 in q.shape[2:]:
        raise fault(ShapeError, NAME, "q", "(B, N, Hk, D) with Hk ≥ 1 and D ≥ 1", shape_of(q))
    if k.shape != q.shape:
        raise fault(ShapeError, NAME, "k", f"of the shape of q, {shape_of(q)}", shape_of(k))
    batch, tokens, heads, _ = q.shape
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or 0 in v.shape[2:] or v.shape[2] % heads:
        expected = f"(B, N, H, E) with B = {batch}, N = {tokens}, H a multiple of Hk = {heads}, E ≥ 1"
        raise fault(ShapeError, NAME, "v", expected, shape_of(v))


def _check_gates(q: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None) -> None:
    batch, tokens, heads, _ = v.shape
    check_tensor(NAME, "beta", beta, FLOATS)
    if beta.shape != v.shape[:3]:
        expected = f"(B, N, H) with B = {batch}, N = {tokens}, H = {heads}"
        raise fault(ShapeError, NAME, "beta", expected, shape_of(beta))
    check_device(NAME, "beta", beta, "q", q)
    if decay is None:
        return
    check_tensor(NAME, "decay", decay, FLOATS)
    if decay.shape not in (v.shape[:3], (*v.shape[:3], q.shape[3])):
        expected = f"(B, N, H) or (B, N, H, D) with B = {batch}, N = {tokens}, H = {heads}, D = {q.shape[3]}"
        raise fault(ShapeError, NAME, "decay", expected, shape_of(decay))
    check_device(NAME, "decay", decay, "q", q)
