"""Triton kernels of root-mean-square normalization, and their launches. No validation, no autograd.

A tile is (R, F): R rows of all F features. A row is a token of a batch entry, tokens fastest. With
r = 1 / sqrt(mean(x²) + eps), forward is ``y = x r w``. With g = dy · w, backward is
``dx = r (g − x r² mean(g x))`` and ``dw = Σ dy x r`` over the rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from warploom.runtime.launch import Launch, multiprocessors


class Strides(NamedTuple):
    """Of a tensor (B, N, D). Numbers are run-time values of declared width: a new one compiles nothing."""

    b: tl.int64
    n: tl.int64
    f: tl.int64


class Tile(NamedTuple):
    """Compile-time constants."""

    F: int
    R: int
    BLOCK_F: int
    UNIT: bool  # whether features are adjacent, which vector loads need to know


@triton.jit
def tile_pointers(base, row, f, tokens, strides, tile: tl.constexpr):
    """Pointers (R, F) to the features ``f`` of rows, in 64 bits, whatever the strides."""
    b = (row // tokens).to(tl.int64)
    n = (row % tokens).to(tl.int64)
    return base + (b * strides.b + n * strides.n)[:, None] + (f if tile.UNIT else f * strides.f)[None, :]


@triton.jit
def forward_kernel(
    x, weight, out, rows: tl.int32, tokens: tl.int32, eps: tl.float32, x_strides: Strides, out_strides: Strides,
    tile: tl.constexpr,
):  # fmt: skip
    """One tile of rows a program."""
    row = tl.program_id(0) * tile.R + tl.arange(0, tile.R)
    f = tl.arange(0, tile.BLOCK_F)
    inside = (row < rows)[:, None] & (f < tile.F)[None, :]
    value = tl.load(tile_pointers(x, row, f, tokens, x_strides, tile), mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + f, mask=f < tile.F, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / tile.F + eps)
    result = value * r[:, None] * w[None, :]
    pointers = tile_pointers(out, row, f, tokens, out_strides, tile)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    x, weight, grad, dx, partial, rows: tl.int32, tokens: tl.int32, programs: tl.int32, eps: tl.float32,
    x_strides: Strides, grad_strides: Strides, dx_strides: Strides, tile: tl.constexpr,
):  # fmt: skip
    """A program takes every ``programs``-th tile and leaves its share of dw, (F,), in ``partial``."""
    f = tl.arange(0, tile.BLOCK_F)
    w = tl.load(weight + f, mask=f < tile.F, other=0.0).to(tl.float32)
    dw = tl.zeros([tile.BLOCK_F], tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(rows, tile.R), programs):
        row = i * tile.R + tl.arange(0, tile.R)
        inside = (row < rows)[:, None] & (f < tile.F)[None, :]
        value = tl.load(tile_pointers(x, row, f, tokens, x_strides, tile), mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(tile_pointers(grad, row, f, tokens, grad_strides, tile), mask=inside, other=0.0).to(tl.float32)
        r = (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / tile.F + eps))[:, None]
        g = dy * w[None, :]
        mean = tl.sum(g * value, axis=1)[:, None] / tile.F
        result = r * (g - value * r * r * mean)
        pointers = tile_pointers(dx, row, f, tokens, dx_strides, tile)
        tl.store(pointers, result.to(dx.dtype.element_ty), mask=inside)
        dw += tl.sum(dy * value * r, axis=0)
    tl.store(partial + tl.program_id(0) * tile.F + f, dw, mask=f < tile.F)


def _tile(*tensors: torch.Tensor) -> tuple[Tile, int]:
    """The tile of a launch, and its warps: eight elements a thread, sixteen in the longest rows."""
    features = tensors[0].shape[-1]
    block_f = triton.next_power_of_2(features)
    unit = all(tensor.stride(-1) == 1 for tensor in tensors)
    return Tile(features, max(1, 1024 // block_f), block_f, unit), min(max(block_f // 256, 4), 32)


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run the forward kernel on x (B, N, D) of any strides."""
    out = torch.empty_like(x)
    rows, (tile, warps) = x.shape[0] * x.shape[1], _tile(x, out)
    launch = Launch(
        forward_kernel,
        triton.cdiv(rows, tile.R),
        takes=("x", "weight", "out"),
        num_warps=warps,
        rows=rows,
        tokens=x.shape[1],
        eps=eps,
        x_strides=Strides(*x.stride()),
        out_strides=Strides(*out.stride()),
        tile=tile,
    )
    launch(x, weight, out)
    return out


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the backward kernel: gradients of x and of weight, the latter summed in an order that never varies."""
    dx = torch.empty_like(x)
    rows, (tile, warps) = x.shape[0] * x.shape[1], _tile(x, grad, dx)
    programs = min(triton.cdiv(rows, tile.R), 4 * multiprocessors(x.device))
    partial = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    launch = Launch(
        backward_kernel,
        programs,
        takes=("x", "weight", "grad", "dx", "partial"),
        num_warps=warps,
        rows=rows,
        tokens=x.shape[1],
        programs=programs,
        eps=eps,
        x_strides=Strides(*x.stride()),
        grad_strides=Strides(*grad.stride()),
        dx_strides=Strides(*dx.stride()),
        tile=tile,
    )
    launch(x, weight, grad, dx, partial)
    return dx, partial.sum(dim=0).to(weight.dtype)
