"""Validation of the arguments of LRPE. Only `check_values` reads data of tensors."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from warploom.errors import ArgumentError, DtypeError, ShapeError, fault, shape_of
from warploom.ops.lrpe import reference
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.runtime.arguments import (
    FLOATS,
    INTEGERS,
    LARGEST,
    check_choice,
    check_cu_seqlens,
    check_device,
    check_offset,
    check_tensor,
    format_value,
    is_int,
    is_within,
)
from warploom.runtime.dispatch import ValidatedCall
from warploom.runtime.layout import warn_of_heads_first
from warploom.runtime.values import check_bounds, check_positions

Tensor = torch.Tensor

Activation = Literal["none", "relu", "sigmoid", "silu", "softmax", "softmax_sequence"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
MAX_FEATURES = 8192
"""Features of one head that the kernels hold on chip at once."""
MAX_ROWS = 2**31 - 2**12
"""Rows of features (batch · tokens · heads) that the kernels count in 32 bits, to the end of the last tile."""
MAX_SEQUENCES = 2**30
"""Packed sequences among which the kernels search."""
MOST_HEADS = 192
"""The heads of queries and keys together, in the largest models."""
MAX_AXES = 4
"""Axes of a grid that the kernels unravel themselves."""


def check(name: str, inputs: LrpeInputs, options: tuple[Any, ...], offset: Any) -> ValidatedCall:
    """Validates a call.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: kind, grid, prefix and activation.
        offset: The offset, if it is no tensor.
    """
    x, theta, position_ids, offsets, cu_seqlens = inputs
    kind, grid, prefix, activation = options
    _check_x_theta(name, x, theta)
    if kind != "cosine" and x.shape[-1] % 2:
        raise fault(ShapeError, name, "x", "of an even number of features D", shape_of(x))
    check_choice(name, "activation", activation, ACTIVATIONS)
    tokens = x.shape[1]
    if not is_int(prefix):
        raise fault(DtypeError, name, "prefix", "an int", repr(prefix))
    if prefix != 0 and not 0 <= prefix <= tokens:
        raise fault(ArgumentError, name, "prefix", f"between 0 and N = {tokens}", format_value(prefix))
    check_offset(name, offset, offsets, "x", x)
    moved = offsets is not None or offset != 0
    if position_ids is not None:
        _check_position_ids(name, x, position_ids)
        others = {"grid": grid is not None, "prefix": prefix != 0, "offset": moved}
        for argument in (argument for argument, there in others.items() if there):
            raise fault(ArgumentError, name, argument, "left out when position_ids are given", "both")
    if cu_seqlens is not None:
        check_cu_seqlens(name, "cu_seqlens", cu_seqlens, "x", x)
        if x.shape[0] != 1:
            raise fault(ShapeError, name, "x", "of batch size 1 when cu_seqlens is given", shape_of(x))
        if grid is not None:
            raise fault(ArgumentError, name, "grid", "left out when cu_seqlens is given", "both")
    if grid is not None:
        _check_grid(name, grid, prefix, tokens)
        if moved:
            raise fault(ArgumentError, name, "offset", "left out when a grid is given", "both")
    _check_frequencies(name, kind, x, theta, position_ids, grid)
    if x.dim() == 4 and grid is None and position_ids is None and theta.shape[:-1] in ((), (1,)):
        warn_of_heads_first(name, x, x, most_heads=MOST_HEADS)
    limit = _beyond_kernels(x, cu_seqlens)
    if grid is not None and len(grid) > MAX_AXES:

        def at_coordinates(x: Tensor, theta: Tensor, *_: None) -> LrpeInputs:
            ids = reference.coordinates(x, grid, prefix, 0, None, None)
            return LrpeInputs(x, theta, ids.expand(x.shape[0], -1, -1))

        return ValidatedCall(LrpeOptions(0, (), kind, activation), limit, at_coordinates)
    counted = grid is None and position_ids is None and offsets is None
    numbers = (-LARGEST, LARGEST + 1 - tokens) if counted else (0, 0)
    return ValidatedCall(LrpeOptions(prefix, grid or (), kind, activation), limit, numbers=numbers)


def check_values(name: str, inputs: LrpeInputs) -> None:
    """Checks what tensors of a valid call hold."""
    check_positions(name, "position_ids", inputs.position_ids)
    check_positions(name, "offset", inputs.offsets)
    check_bounds(name, "cu_seqlens", inputs.cu_seqlens, inputs.x.shape[1])


def _beyond_kernels(x: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Returns what the Triton kernels do not do in this call, if anything."""
    features = x.shape[-1]
    if features > MAX_FEATURES:
        return f"a row of {features} features does not fit in one tile ({MAX_FEATURES} at most)"
    rows = math.prod(x.shape[:-1])
    if not is_within(rows, MAX_ROWS):
        return f"x has {rows} rows of features ({MAX_ROWS} at most)"
    if cu_seqlens is not None and not is_within(cu_seqlens.shape[0], MAX_SEQUENCES):
        return f"cu_seqlens bounds {cu_seqlens.shape[0] - 1} sequences ({MAX_SEQUENCES - 1} at most)"
    return None


def _check_x_theta(name: str, x: Tensor, theta: Tensor) -> None:
    for argument, tensor in (("x", x), ("theta", theta)):
        check_tensor(name, argument, tensor, FLOATS)
    if x.dim() not in (3, 4) or x.shape[-1] == 0:
        raise fault(ShapeError, name, "x", "(B, N, H, D) or (B, N, D) with D ≥ 1", shape_of(x))
    heads = x.shape[2] if x.dim() == 4 else 1
    rows = theta.shape[0] if theta.dim() == 2 else 1
    if theta.dim() not in (1, 2) or theta.shape[-1] == 0 or 1 != rows != heads:
        expected = f"(H, E), (1, E) or (E,) with H = {heads} and E ≥ 1"
        raise fault(ShapeError, name, "theta", expected, shape_of(theta))
    check_device(name, "theta", theta, "x", x)


def _check_frequencies(
    name: str, kind: str, x: Tensor, theta: Tensor, ids: Tensor | None, grid: tuple[int, ...] | None
) -> None:
    """Raises if an axis has more frequencies than features take: the rest would be ignored in silence."""
    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    axes = len(grid or (0,))
    if ids is not None and ids.dim() == 3:
        axes = ids.shape[2]
    most = -(-features // axes)
    if theta.shape[-1] > most:
        expected = f"of E ≤ {most} = ⌈F/k⌉ frequencies, with F = {features} and k = {axes}"
        raise fault(ShapeError, name, "theta", expected, shape_of(theta))


def _check_position_ids(name: str, x: Tensor, position_ids: Tensor) -> None:
    check_tensor(name, "position_ids", position_ids, INTEGERS)
    batch, tokens = x.shape[:2]
    shape = tuple(position_ids.shape)
    if shape != (tokens,) and (len(shape) not in (2, 3) or shape[:2] != (batch, tokens) or 0 in shape[2:]):
        expected = f"(N,), (B, N) or (B, N, k) with B = {batch}, N = {tokens}"
        raise fault(ShapeError, name, "position_ids", expected, shape)
    check_device(name, "position_ids", position_ids, "x", x)


def _check_grid(name: str, grid: Any, prefix: int, tokens: int) -> None:
    if not isinstance(grid, tuple) or not grid or not all(is_int(size) for size in grid):
        raise fault(DtypeError, name, "grid", "a sequence of ints, one per axis", format_value(grid))
    if any(size < 1 for size in grid):
        raise fault(ArgumentError, name, "grid", "of positive sizes", format_value(tuple(grid)))
    if prefix + math.prod(grid) != tokens:
        expected, got = f"such that prefix + n₁⋯n_k = N = {tokens}", format_value(tuple(grid))
        raise fault(ShapeError, name, "grid", expected, f"{prefix} + {format_value(math.prod(grid))} for {got}")
