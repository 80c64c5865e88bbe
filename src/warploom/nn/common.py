"""Checks and initialisation that several attention layers share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from warploom.errors import ArgumentError, DtypeError, ShapeError, fault
from warploom.runtime.arguments import FLOATS, as_python, check_tensor, is_int


def check_ints(layer: str, /, **numbers: object) -> None:
    """Raise unless every number is an int."""
    for argument, number in numbers.items():
        if not is_int(as_python(number)):
            raise fault(DtypeError, layer, argument, "an int", repr(number))


def check_sizes(layer: str, /, **sizes: Any) -> None:
    """Raise unless every size is a positive int."""
    check_ints(layer, **sizes)
    for argument, size in sizes.items():
        if size < 1:
            raise fault(ArgumentError, layer, argument, "positive", size)


def settle_head_dim(layer: str, d_model: int, heads: int, head_dim: int | None) -> int:
    """Returns the features of a head, ``d_model / heads`` unless they are given."""
    check_sizes(layer, d_model=d_model, heads=heads, head_dim=1 if head_dim is None else head_dim)
    if head_dim is None and d_model % heads:
        raise fault(ArgumentError, layer, "heads", f"a divisor of d_model = {d_model}", heads)
    return d_model // heads if head_dim is None else head_dim


def check_call(
    layer: str, x: Tensor, d_model: int, cache: object, kind: type, cu_seqlens: Tensor | None, causal: bool = True
) -> None:
    """Raise unless ``x`` is (B, N, d_model), and a cache fits the layer, which is causal, without sequences."""
    check_tensor(layer, "x", x, FLOATS)
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise fault(ShapeError, layer, "x", f"(B, N, d_model) with d_model = {d_model}", tuple(x.shape))
    if cache is not None and not isinstance(cache, kind):
        raise fault(DtypeError, layer, "cache", f"a {kind.__name__} or None", type(cache).__name__)
    if cache is not None and not causal:
        raise fault(ArgumentError, layer, "cache", "left out unless the layer is causal", "a cache")
    if cache is not None and cu_seqlens is not None:
        raise fault(ArgumentError, layer, "cu_seqlens", "left out with a cache", "both")


def reset_linear(*layers: nn.Linear) -> None:
    """Draw weights that keep the variance of features; set biases to zero."""
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
