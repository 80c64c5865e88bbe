"""Memory order: which axis of a tensor moves fastest. Outputs keep that of the input."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch


def memory_order(x: torch.Tensor) -> list[int]:
    """Axes from the slowest to the fastest in memory, as `torch.empty_like` orders them.

    An axis of size one, or expanded to stride zero, has no place of its own in memory and stays where it is
    among the others. The sort uses comparisons alone, which `torch.compile` can follow where strides are symbols.
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


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def empty_in_order_of(x: torch.Tensor, features: int) -> torch.Tensor:
    """Uninitialised ``(*x.shape[:-1], features)``, dense, its axes in memory in the order of those of ``x``."""
    shape = (*x.shape[:-1], features)
    if x.is_contiguous():
        return x.new_empty(shape)
    return empty_in_order(x, shape, memory_order(x))


def empty_in_order(near: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Uninitialised and dense, its axes in memory in an order from `memory_order`; dtype and device of ``near``."""
    return near.new_empty([shape[axis] for axis in order]).permute(_inverse(order))


def layout_of(x: torch.Tensor, features: int) -> torch.Tensor:
    """What `empty_in_order_of` returns, without memory: for plans."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return empty_in_order_of(like, features)


def reorder_like(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` with the strides of `empty_in_order_of`: its axes in memory in the order of those of ``x``."""
    if x.is_contiguous():
        return make_dense(out)
    order = memory_order(x)
    return make_dense(out.permute(order)).permute(_inverse(order))


def make_dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the strides of a new tensor of its shape, along axes of size one too; a copy if it has others."""
    strides = itertools.accumulate((max(n, 1) for n in reversed(x.shape[1:])), operator.mul, initial=1)
    return x if x.stride() == tuple(strides)[::-1] else x.clone(memory_format=torch.contiguous_format)
