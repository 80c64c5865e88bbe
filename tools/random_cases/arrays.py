"""Tensors of any memory: permuted, sliced, stepped, unaligned, expanded, lazily negated, and NaN around them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from random_cases.choices import Choices

__all__ = ["KINDS", "Array", "Memory", "Placed", "draw_memory", "place"]

Tensor = torch.Tensor

KINDS = ("dense", "unaligned", "permuted", "sliced", "stepped", "expanded", "negated", "mixed")
"""Kinds of memory, the simplest first."""
_STRONG = (5.0, 30.0, 60.0, 90.0, 104.0, 1e4)
"""Logarithms of decays, from weak ones to those whose power is 0."""
_GAPS = (1, 2, 3, 4, 5, 7, 8)


@dataclass(frozen=True)
class Memory:
    """The places of a tensor's elements."""

    strides: tuple[int, ...]
    """In elements; 0 for an axis that is expanded."""
    offset: int
    """The place of the first element in its storage."""
    size: int
    """Elements of the storage."""
    negated: bool = False
    """True if the tensor is the imaginary part of conjugated complex numbers, which PyTorch negates lazily."""


@dataclass(frozen=True)
class Array:
    """A tensor that a call is made with."""

    shape: tuple[int, ...]
    dtype: str
    memory: Memory
    values: str = "normal"
    """``normal``; ``frequencies`` (geometric, from 1 downwards); ``uniform`` from -1 to 1; ``even`` from 0.05 to 1;
    ``shares`` from 0 to 1; ``zeros``; ``decays``, frequencies of which some are as strong as any, or ``infinite``;
    ``integers`` between bounds; or ``numbers``."""
    scale: float = 1.0
    """Factor of floating numbers."""
    numbers: tuple[int, ...] = ()
    """The bounds, or the numbers."""
    ends: tuple[int, ...] = ()
    """For a cache, how many rows of each batch entry hold numbers; NaN lies behind."""
    row_of_nan: bool = False
    """True if one row in the middle, of batch entry and token, holds a NaN."""
    grad: bool = False
    within: str = ""
    """The tensor whose first features this one is, in its memory; empty for a memory of its own."""

    @property
    def is_floating(self) -> bool:
        """True unless it holds integers."""
        return "float" in self.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape, with one element on each expanded axis."""
        return tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.memory.strides))

    def draw(self, seed: int, name: str) -> Tensor:
        """Returns the numbers, in `stored_shape`, on the CPU; the same on every machine."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        shape, dtype = self.stored_shape, getattr(torch, self.dtype)
        if self.values == "numbers":
            return torch.tensor(self.numbers, dtype=dtype).reshape(shape)
        if self.values == "integers":
            return torch.randint(self.numbers[0], self.numbers[1] + 1, shape, generator=generator).to(dtype)
        draw = torch.randn if self.values == "normal" else torch.rand
        numbers = draw(shape, generator=generator)
        if self.values == "zeros":
            numbers = torch.zeros(shape)
        elif self.values == "uniform":
            numbers = numbers * 2 - 1
        elif self.values == "even":
            numbers = 0.05 + 0.95 * numbers
        elif self.values not in ("normal", "shares"):
            numbers = 10000.0 ** (-torch.arange(shape[-1]) / max(shape[-1], 1)) * (1 + 0.1 * numbers)
        numbers = numbers * self.scale
        if self.values in ("decays", "infinite"):
            most = math.inf if self.values == "infinite" else min(torch.finfo(dtype).max, 3e38) / 8
            strong = torch.tensor([*_STRONG, most])[torch.randint(7, shape, generator=generator)]
            numbers = torch.where(torch.rand(shape, generator=generator) < 0.1, -strong, numbers)
        return self._spoil(numbers.to(dtype))

    def _spoil(self, numbers: Tensor) -> Tensor:
        if self.ends and numbers.shape[1] == self.shape[1]:
            ends = torch.tensor(self.ends)
            if numbers.shape[0] != len(ends):  # one for all entries
                ends = ends.amax(0, keepdim=True)
            numbers[torch.arange(self.shape[1]) >= ends[:, None]] = math.nan
        if self.row_of_nan and numbers.numel():
            numbers[numbers.shape[0] // 2, numbers.shape[1] // 2].view(-1)[-1:] = math.nan
        return numbers


@dataclass(frozen=True)
class Placed:
    """A tensor in its memory."""

    tensor: Tensor
    """The view that an operator gets."""
    dense: Tensor
    """A dense copy of the numbers, for the definition."""
    storage: Tensor
    """All of the memory, flat."""
    before: Tensor
    """A copy of the storage as it was."""

    def first_features(self, count: int) -> Placed:
        """Returns the tensor of so many of its first features, in the same memory."""
        return replace(self, tensor=self.tensor[..., :count], dense=self.dense[..., :count].clone())

    def changed(self) -> Tensor:
        """Returns, as a tensor of one element, if anything in the storage has been written to."""
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.storage.element_size()]
        return (self.storage.view(integer) != self.before.view(integer)).any()


def place(array: Array, name: str, seed: int, device: torch.device | str) -> Placed:
    """Returns the tensor of an array, with numbers drawn from a seed."""
    numbers, memory = array.draw(seed, name).to(device), array.memory
    filler = math.nan if array.is_floating else array.dtype == "bool" or torch.iinfo(numbers.dtype).min
    size = memory.size * (2 if memory.negated else 1)
    storage = torch.full((size,), filler, dtype=numbers.dtype, device=device)
    cells = torch.view_as_complex(storage.view(-1, 2)) if memory.negated else storage
    view = cells.as_strided(array.stored_shape, memory.strides, memory.offset)
    view = torch.conj(view).imag if memory.negated else view
    view.copy_(numbers)
    dense = numbers.expand(array.shape).clone(memory_format=torch.contiguous_format)
    tensor = view.expand(array.shape)
    return Placed(tensor.requires_grad_(array.grad), dense.requires_grad_(array.grad), storage, storage.clone())


def draw_memory(
    choices: Choices,
    name: str,
    shape: Sequence[int],
    dtype: str,
    apart: Sequence[int],
    kinds: Sequence[str] = KINDS,
) -> Memory:
    """Returns memory for a tensor of a shape.

    Floating numbers are expanded only where ``choices`` have ``numbers`` that may be equal.

    Args:
        choices: Whence the choices come.
        name: What the tensor is called; so do its choices begin.
        shape: Its sizes.
        dtype: Its dtype's name.
        apart: Axes that are not expanded.
        kinds: Those to choose from.
    """
    left_out = {"negated"} if dtype not in ("float16", "float32", "float64") else set()  # no complex numbers
    if "float" in dtype and choices.answers.get("numbers") == "usual":
        left_out.add("expanded")
    elif choices.answers.get("numbers") == "equal":
        kinds = (*kinds, *("expanded",) * (4 * ("expanded" in kinds)))
    kinds = [kind for kind in kinds if kind not in left_out]
    # Kernels are compiled for alignment, and for strides that are multiples of a vector.
    kind = choices.choice(f"{name}.memory", kinds, compiled=2 if choices.settles(f"{name}.memories", 0.3) else 1)

    def number(what: str, options: Sequence[int], low: int, high: int) -> int:
        return choices.number(f"{name}.{what}", options, low, high, compiled=1)

    def flag(what: str, share: float) -> bool:
        return choices.flag(f"{name}.{what}", share, compiled=1)

    def has(feature: str, share: float = 0.5) -> bool:
        return kind == feature or (kind == "mixed" and feature in kinds and flag(f"{feature}?", share))

    dims = len(shape)
    order, before, after, steps, expanded = list(range(dims)), [0] * dims, [0] * dims, [1] * dims, [False] * dims
    negated = has("negated", 0.2)
    edge = number("edge", (1, 2, 3, 4, 5, 7, 8, 16), 0, 64) if negated or has("unaligned") else 0
    if dims > 1 and has("permuted"):
        left = order
        order = [left.pop(number(f"order{i}", range(dims), 0, dims - 1 - i)) for i in range(dims)]
    if has("sliced"):
        for axis in range(dims):
            if flag(f"slice{axis}", 0.4):
                before[axis] = number(f"before{axis}", (0, *_GAPS), 0, 64)
                after[axis] = number(f"after{axis}", (0, *_GAPS), 0, 64)
    if dims and has("stepped"):
        steps[number("stepped", range(dims), 0, dims - 1)] = number("step", (2, 3), 1, 16)
    if has("expanded"):
        expanded = [n > 1 and i not in apart and flag(f"expand{i}", 0.5) for i, n in enumerate(shape)]
    strides, offset, span = [0] * dims, edge, 1
    for axis in reversed(order):  # the fastest in memory first
        strides[axis] = 0 if expanded[axis] else span * steps[axis]
        offset += span * before[axis]
        span *= before[axis] + max((1 if expanded[axis] else shape[axis]) * steps[axis], 1) + after[axis]
    return Memory(tuple(strides), offset, edge + span + 1, negated)
