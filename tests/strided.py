"""Tensors of any strides, surrounded by NaN: what a kernel reads or writes around them shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Surrounded:
    """A strided tensor and the larger buffer it lies in, whose other elements hold NaN (the least integer)."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    """The whole storage, flat."""

    def surroundings_untouched(self) -> bool:
        """Whether every cell around the tensor still holds what it was filled with."""
        outside = torch.ones_like(self.buffer, dtype=torch.bool)
        outside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(False)
        others = self.buffer[outside]
        filled = others.isnan() if others.is_floating_point() else others == _filler(others.dtype)
        return bool(filled.all())


def strided_view(tensor: torch.Tensor, generator: torch.Generator) -> Surrounded:
    """An equal tensor inside a larger buffer, its axes in random order in memory, with gaps on every axis.

    Args:
        tensor: Any shape and dtype; floating or integer.
        generator: CPU generator that draws the order of the axes and the widths of the gaps.

    Returns:
        The view, a leaf that requires a gradient if ``tensor`` does, and its buffer.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    order = torch.randperm(tensor.dim(), generator=generator).tolist()
    spans, cuts = [], []
    for axis in order:
        before, step, after = draw(1, 3), draw(1, 2), draw(1, 3)
        end = before + step * tensor.shape[axis]
        spans.append(end + after)
        cuts.append(slice(before, end, step))
    elements = math.prod(spans)
    edge = draw(1, 7)  # before the first cell, so that no address is aligned by luck
    buffer = torch.full((elements + 2 * edge,), _filler(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    inverse = [order.index(axis) for axis in range(tensor.dim())]
    view = buffer[edge : edge + elements].view(spans)[tuple(cuts)].permute(inverse)
    view.copy_(tensor.detach())
    return Surrounded(view.requires_grad_(tensor.requires_grad), buffer)


def _filler(dtype: torch.dtype) -> float | int:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
