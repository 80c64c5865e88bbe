"""Tensors of any memory: permuted, sliced, stepped, unaligned, expanded, lazily negated, and NaN around them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from random_cases.choices import Choices

__all__ = ["KINDS", "STRONG", "Array", "Memory", "Placed", "dense", "draw_memory", "place", "seed_of"]

Tensor = torch.Tensor

KINDS = ("dense", "unaligned", "permuted", "sliced", "stepped", "expanded", "negated", "mixed")
"""Kinds of memory, the simplest first."""
STRONG = (5.0, 30.0, 60.0, 90.0, 104.0, 1e4)
"""Sizes of logarithms of decays, from weak ones to those whose power is 0."""
_EDGES = (1, 2, 3, 4, 5, 7, 8, 16)
_STEPS = (2, 3)
_GAPS = (1, 2, 3, 4, 5, 7, 8)


@dataclass(frozen=True)
class Memory:
    """Where the elements of a tensor lie."""

    strides: tuple[int, ...]
    """In elements; 0 for an axis that is expanded."""
    offset: int
    """Of the first element in its storage."""
    size: int
    """Elements of the storage."""
    negated: bool = False
    """Whether the storage holds the numbers with the other sign, and PyTorch negates them lazily.

    The storage is then one of complex numbers, of which the tensor is the imaginary part.
    """


@dataclass(frozen=True)
class Array:
    """A tensor that a call is made with."""

    shape: tuple[int, ...]
    dtype: str
    memory: Memory
    values: str = "normal"
    """``normal``; ``frequencies`` (geometric, from 1 downwards), ``uniform`` (from -1 to 1) or ``zeros``;
    ``decays``, frequencies of which some are as strong as any; ``integers`` between bounds; or ``numbers`` as they
    are."""
    scale: float = 1.0
    """Of floating numbers."""
    numbers: tuple[int, ...] = ()
    """The bounds, or the numbers."""
    ends: tuple[int, ...] = ()
    """For a cache, how many rows of each batch entry hold numbers; NaN lies behind."""
    row_of_nan: bool = False
    """Whether one row in the middle, of batch entry and token, holds a NaN."""
    grad: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape, with one element on each expanded axis."""
        expanded = [size > 1 and stride == 0 for size, stride in zip(self.shape, self.memory.strides)]
        return tuple(1 if is_expanded else size for size, is_expanded in zip(self.shape, expanded))

    def draw(self, seed: int, name: str) -> Tensor:
        """The numbers, in `stored_shape`, on the CPU; the same on every machine."""
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        shape, dtype = self.stored_shape, getattr(torch, self.dtype)
        match self.values:
            case "numbers":
                return torch.tensor(self.numbers, dtype=dtype).reshape(shape)
            case "integers":
                low, high = self.numbers
                return torch.randint(low, high + 1, shape, generator=generator).to(dtype)
            case "zeros":
                return torch.zeros(shape, dtype=dtype)
            case "frequencies" | "decays":
                numbers = draw_frequencies(shape, generator)
                if self.values == "decays":
                    numbers = draw_decays(numbers, dtype, self.scale, generator)
            case "uniform":
                numbers = torch.rand(shape, generator=generator) * 2 - 1
            case _:
                numbers = torch.randn(shape, generator=generator)
        return self._spoilt((numbers * self.scale).to(dtype))

    def _spoilt(self, numbers: Tensor) -> Tensor:
        if self.ends and numbers.shape[1] == self.shape[1]:
            ends = torch.tensor(self.ends)
            if numbers.shape[0] != len(ends):  # one for all entries
                ends = ends.amax(0, keepdim=True)
            behind = torch.arange(self.shape[1]) >= ends[:, None]
            numbers[behind] = math.nan
        if self.row_of_nan and numbers.numel():
            numbers[numbers.shape[0] // 2, numbers.shape[1] // 2].view(-1)[-1:] = math.nan
        return numbers


def draw_frequencies(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns frequencies that fall geometrically from about 1."""
    geometric = 10000.0 ** (-torch.arange(shape[-1]) / max(shape[-1], 1))
    return geometric * (1 + 0.1 * torch.rand(shape, generator=generator))


def draw_decays(weak: Tensor, dtype: torch.dtype, scale: float, generator: torch.Generator) -> Tensor:
    """Returns decays, of which one in ten is as strong as any of a dtype, and the others are given."""
    strong = torch.tensor([*STRONG, min(torch.finfo(dtype).max, 3e38) / 8]) / abs(scale)
    strong = strong[torch.randint(len(strong), weak.shape, generator=generator)]
    return torch.where(torch.rand(weak.shape, generator=generator) < 0.1, strong, weak)


@dataclass(frozen=True)
class Placed:
    """A tensor in its memory."""

    tensor: Tensor
    """The view that an operator gets."""
    dense: Tensor
    """The same numbers in a tensor of their own, for the definition."""
    storage: Tensor
    """All of the memory, flat."""
    before: Tensor
    """A copy of the storage as it was."""

    def changed(self) -> Tensor:
        """Whether anything in the storage has been written to, as a tensor of one element."""
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.storage.element_size()]
        return (self.storage.view(integer) != self.before.view(integer)).any()


def seed_of(seed: int, name: str) -> int:
    """The seed of one tensor's numbers, from that of a call and the tensor's name."""
    return zlib.crc32(f"{seed} {name}".encode())


def place(array: Array, name: str, seed: int, device: torch.device) -> Placed:
    """The tensor of an array, with numbers drawn from a seed."""
    numbers, memory = array.draw(seed, name).to(device), array.memory
    filler = math.nan if numbers.is_floating_point() else torch.iinfo(numbers.dtype).min
    width = 2 if memory.negated else 1
    storage = torch.full((memory.size * width,), filler, dtype=numbers.dtype, device=device)
    if memory.negated:
        cells = torch.view_as_complex(storage.view(-1, 2))
        view = torch.conj(cells.as_strided(array.stored_shape, memory.strides, memory.offset)).imag
    else:
        view = storage.as_strided(array.stored_shape, memory.strides, memory.offset)
    view.copy_(numbers)
    dense = numbers.expand(array.shape).clone(memory_format=torch.contiguous_format)
    tensor = view.expand(array.shape)
    return Placed(tensor.requires_grad_(array.grad), dense.requires_grad_(array.grad), storage, storage.clone())


def draw_memory(
    choices: Choices,
    name: str,
    shape: Sequence[int],
    dtype: str,
    fixed: Sequence[int] = (),
    kinds: Sequence[str] = KINDS,
) -> Memory:
    """Memory for a tensor of a shape.

    Args:
        choices: Whence the choices come.
        name: What the tensor is called; so do its choices begin.
        shape: Its sizes.
        dtype: Its dtype's name.
        fixed: Axes along which its numbers differ, so that none of them is expanded.
        kinds: Those to choose from.
    """
    complex_ = dtype in ("float16", "float32", "float64")  # no complex numbers are made of others
    kinds = [kind for kind in kinds if complex_ or kind != "negated"]
    # Kernels are compiled for alignment, and for whether strides are multiples of a vector.
    kind = choices.choice(f"{name}.memory", kinds, compiled=2 if choices.settles(f"{name}.memories", 0.3) else 1)
    dims, mixed = len(shape), kind == "mixed"
    order, before, after, steps = list(range(dims)), [0] * dims, [0] * dims, [1] * dims
    edge, expanded = 0, set[int]()
    negated = kind == "negated" or (
        mixed and complex_ and "negated" in kinds and choices.flag(f"{name}.negated", 0.2, compiled=1)
    )
    if kind in ("unaligned", "negated") or (mixed and choices.flag(f"{name}.edge?", compiled=1)):
        edge = choices.number(f"{name}.edge", _EDGES, 0, 64, compiled=1)
    if dims > 1 and (kind == "permuted" or (mixed and choices.flag(f"{name}.order?", compiled=1))):
        left = list(range(dims))
        order = []
        for place_ in range(dims - 1):  # rotations of what is left: zero is the order of the axes
            order.append(
                left.pop(choices.number(f"{name}.order{place_}", range(dims), 0, len(left) - 1, compiled=1))
            )
        order += left
    if kind == "sliced" or mixed:
        for axis in range(dims):
            if choices.flag(f"{name}.slice{axis}", 0.4, compiled=1):
                before[axis] = choices.number(f"{name}.before{axis}", (0, *_GAPS), 0, 64, compiled=1)
                after[axis] = choices.number(f"{name}.after{axis}", (0, *_GAPS), 0, 64, compiled=1)
    if dims and (kind == "stepped" or (mixed and choices.flag(f"{name}.step?", compiled=1))):
        axis = choices.number(f"{name}.stepped", range(dims), 0, dims - 1, compiled=1)
        steps[axis] = choices.number(f"{name}.step", _STEPS, 1, 16, compiled=1)
    if kind == "expanded" or (mixed and choices.flag(f"{name}.expand?", compiled=1)):
        for axis in (axis for axis in range(dims) if axis not in fixed):
            if choices.flag(f"{name}.expand{axis}", 0.4, compiled=1):
                expanded.add(axis)
    return _memory(shape, order, before, after, steps, edge, expanded, negated)


def _memory(
    shape: Sequence[int],
    order: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    steps: Sequence[int],
    edge: int,
    expanded: set[int],
    negated: bool,
) -> Memory:
    strides, offset, span = [0] * len(shape), edge, 1
    for axis in reversed(order):  # the fastest in memory first
        size = 1 if axis in expanded else shape[axis]
        strides[axis] = span * steps[axis] if axis not in expanded or shape[axis] == 1 else 0
        offset += span * before[axis]
        span *= before[axis] + max(size * steps[axis], 1) + after[axis]
    return Memory(tuple(strides), offset, edge + span + 1, negated)


def dense(shape: Sequence[int]) -> Memory:
    """Memory of a tensor without gaps, its last axis the fastest."""
    strides = [math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape))]
    return Memory(tuple(strides), 0, math.prod(shape))
