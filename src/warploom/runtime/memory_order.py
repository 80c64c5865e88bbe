"""Memory order: the order of a tensor's axes in memory. Outputs keep that of the input."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch


def memory_order(x: torch.Tensor) -> list[int]:
    """Returns the axes from the slowest to the fastest in memory, as `torch.empty_like` orders them.

    An axis of size one or stride zero has no order in memory, and keeps its position among the others. The sort
    only compares strides, which `torch.compile` supports for symbols too.
    """
    order = list(range(x.dim()))
    if x.is_contiguous():
        return order
    shape, stride = x.shape, x.stride()
    for last in range(1, x.dim()):
        moving = last
        for place in range(last - 1, -1, -1):
            a, b = order[place], order[moving]
            if shape[a] == 1 or shape[b] == 1 or stride[a] == 0 or stride[b] == 0 or stride[a] == stride[b]:
                continue
            if stride[a] > stride[b]:
                break
            order[place], order[moving] = b, a
            moving = place
    return order


def _invert(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def empty_in_order_of(x: torch.Tensor, features: int) -> torch.Tensor:
    """Returns an uninitialised dense tensor ``(*x.shape[:-1], features)`` in the memory order of ``x``."""
    shape = (*x.shape[:-1], features)
    if x.is_contiguous():
        return x.new_empty(shape)
    return empty_in_order(x, shape, memory_order(x))


def empty_in_order(near: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Returns an uninitialised dense tensor in an order from `memory_order`, like ``near``."""
    return near.new_empty([shape[axis] for axis in order]).permute(_invert(order))


def layout_of(x: torch.Tensor, features: int) -> torch.Tensor:
    """Returns the result of `empty_in_order_of` as a meta tensor, for plans."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return empty_in_order_of(like, features)


def reorder_like(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns ``out`` as a dense tensor in the memory order of ``x``; a copy if it has other strides."""
    if x.is_contiguous():
        return make_dense(out)
    order = memory_order(x)
    return make_dense(out.permute(order)).permute(_invert(order))


def make_dense(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` with the strides of a new tensor of its shape, also along axes of size one; else a copy."""
    strides = itertools.accumulate((max(n, 1) for n in reversed(x.shape[1:])), operator.mul, initial=1)
    return x if x.stride() == tuple(strides)[::-1] else x.clone(memory_format=torch.contiguous_format)
