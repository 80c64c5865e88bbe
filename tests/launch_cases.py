"""Kernels, launches and stand-ins that tests of launches share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from warploom.runtime import launch
from warploom.runtime.launch import Launch

Tensor = torch.Tensor

SIZE, BLOCK = 100, 64


@triton.jit
def add_kernel(x, out, number: tl.int32, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < size) + number, mask=i < size)


def adding(size: int = SIZE) -> Launch:
    return Launch(add_kernel, -(-size // BLOCK), takes=("x", "out", "number"), size=size, BLOCK=BLOCK)


def tensors(device: torch.device, first: int = 0) -> tuple[Tensor, Tensor]:
    """Where to read and to write; misaligned unless ``first`` is a multiple of four."""
    x, out = torch.randn(2, SIZE + 4, device=device).unbind()
    return x[first : first + SIZE], out[first : first + SIZE]


class Strides(NamedTuple):
    n: tl.int64
    f: tl.int32


class Sizes(NamedTuple):
    tokens: tl.int32
    scale: tl.float32
    strides: Strides


class Tile(NamedTuple):
    ROWS: int
    COLUMNS: int
    NEGATE: bool = False


@triton.jit
def scaled(pointer, at, sizes, tile: tl.constexpr):
    value = tl.load(pointer + at, mask=at < sizes.tokens * sizes.strides.n) * sizes.scale
    return -value if tile.NEGATE else value


@triton.jit
def scale_kernel(
    x, out, offset: tl.int32, sizes: Sizes, tile: tl.constexpr, bias=None, KIND: tl.constexpr = "plain"
):
    """``out = x · scale``, a row of features for each token. ``bias`` is one number."""
    n = tl.arange(0, tile.ROWS)[:, None].to(tl.int64)
    at = n * sizes.strides.n + tl.arange(0, tile.COLUMNS)[None, :] * sizes.strides.f
    value = scaled(x, at, sizes, tile) + offset
    if KIND == "biased":
        value += tl.load(bias)
    tl.store(out + at, value, mask=at < sizes.tokens * sizes.strides.n)


def scaling(**changes: Any) -> dict[str, Any]:
    sizes, tile = Sizes(3, 0.5, Strides(8, 1)), Tile(4, 8)
    given = {"takes": ("x", "out", "offset"), "sizes": sizes, "tile": tile, "bias": None, "KIND": "plain"}
    return {name: value for name, value in {**given, **changes}.items() if value is not ...}


class Stub:
    """Stands for a kernel, where there is no GPU to compile for."""

    hash = "formed"

    def __init__(self, function: Any, not_aligned: Sequence[str] = ()) -> None:
        self.fn, self.__name__, self.do_not_specialize_on_alignment = function, function.__name__, not_aligned
        self.compiled: list[list[int]] = []  # of each variant, the parameters that it takes for aligned
        self.launched: list[Any] = []

    def compile(self, found: launch.Build) -> Any:
        aligned = [i for (i,) in found.attrs]
        self.compiled.append(aligned)
        return lambda *arguments: self.launched.append((aligned, *arguments))


def add(x, out, number: tl.int32, size: tl.int32, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a stub stands for."""
