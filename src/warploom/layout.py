"""Memory order: which axis of a tensor moves fastest. Outputs keep that of the input."""

from __future__ import annotations

import torch


def memory_order(x: torch.Tensor) -> list[int]:
    """Axes from the slowest to the fastest in memory; equal strides keep the order of the axes.

    By comparisons alone, which `torch.compile` can follow where strides are symbols.
    """
    stride = x.stride()
    order: list[int] = []
    for axis in range(x.dim()):
        place = len(order)
        while place > 0 and stride[order[place - 1]] < stride[axis]:
            place -= 1
        order.insert(place, axis)
    return order


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def empty_in_order_of(x: torch.Tensor, features: int) -> torch.Tensor:
    """Uninitialised ``(*x.shape[:-1], features)``, dense, its axes in memory in the order of those of ``x``."""
    shape = (*x.shape[:-1], features)
    if x.is_contiguous():
        return x.new_empty(shape)
    order = memory_order(x)
    return x.new_empty([shape[axis] for axis in order]).permute(_inverse(order))


def in_order_of(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` with its axes in memory in the order of those of ``x``, which has as many."""
    if x.is_contiguous():
        return out
    order = memory_order(x)
    return out.permute(order).contiguous().permute(_inverse(order))
