"""Triton kernels of root-mean-square normalization, and their launchers. No validation, no autograd.

A tile is (R, F): R rows of all F features. A row is a token of a batch entry, tokens fastest. With
r = 1 / sqrt(mean(x²) + eps), forward is ``y = x r w``. With g = dy · w, backward is
``dx = r (g − x r² mean(g x))`` and ``dw = Σ dy x r`` over the rows.
"""

import torch
import triton
import triton.language as tl

from warploom.runtime.launch import Launch, multiprocessors


@triton.jit
def tile_pointers(base, row, f, tokens, stride_b, stride_n, stride_f, UNIT: tl.constexpr):
    """Pointers (R, F) to the features ``f`` of rows, in 64 bits, whatever the strides."""
    b = (row // tokens).to(tl.int64)
    n = (row % tokens).to(tl.int64)
    return base + (b * stride_b + n * stride_n)[:, None] + (f if UNIT else f * stride_f)[None, :]


# Numbers are run-time values of declared width, excluded from specialisation: a new length, stride or eps compiles
# nothing. What vector loads need to know of a stride, that features are adjacent, is the constant UNIT.
BACKWARD_NUMBERS = [
    *("rows", "tokens", "programs", "eps", "x_b", "x_n", "x_f"),
    *("grad_b", "grad_n", "grad_f", "dx_b", "dx_n", "dx_f"),
]


@triton.jit(do_not_specialize=["rows", "tokens", "eps", "x_b", "x_n", "x_f", "out_b", "out_n", "out_f"])
def forward_kernel(
    x, weight, out,
    rows: tl.int32, tokens: tl.int32, eps: tl.float32,
    x_b: tl.int64, x_n: tl.int64, x_f: tl.int64, out_b: tl.int64, out_n: tl.int64, out_f: tl.int64,
    UNIT: tl.constexpr, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One tile of rows a program."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    f = tl.arange(0, BLOCK_F)
    inside = (row < rows)[:, None] & (f < F)[None, :]
    value = tl.load(tile_pointers(x, row, f, tokens, x_b, x_n, x_f, UNIT), mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + f, mask=f < F, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / F + eps)
    result = value * r[:, None] * w[None, :]
    pointers = tile_pointers(out, row, f, tokens, out_b, out_n, out_f, UNIT)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=BACKWARD_NUMBERS)
def backward_kernel(
    x, weight, grad, dx, partial,
    rows: tl.int32, tokens: tl.int32, programs: tl.int32, eps: tl.float32,
    x_b: tl.int64, x_n: tl.int64, x_f: tl.int64, grad_b: tl.int64, grad_n: tl.int64, grad_f: tl.int64,
    dx_b: tl.int64, dx_n: tl.int64, dx_f: tl.int64,
    UNIT: tl.constexpr, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """A program walks over every ``programs``-th tile and leaves its share of dw, (F,), in ``partial``."""
    f = tl.arange(0, BLOCK_F)
    w = tl.load(weight + f, mask=f < F, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_F], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), programs):
        row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (row < rows)[:, None] & (f < F)[None, :]
        value = tl.load(tile_pointers(x, row, f, tokens, x_b, x_n, x_f, UNIT), mask=inside, other=0.0).to(
            tl.float32
        )
        dy = tl.load(tile_pointers(grad, row, f, tokens, grad_b, grad_n, grad_f, UNIT), mask=inside, other=0.0)
        dy = dy.to(tl.float32)
        r = (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / F + eps))[:, None]
        g = dy * w[None, :]
        mean = tl.sum(g * value, axis=1)[:, None] / F
        result = r * (g - value * r * r * mean)
        pointers = tile_pointers(dx, row, f, tokens, dx_b, dx_n, dx_f, UNIT)
        tl.store(pointers, result.to(dx.dtype.element_ty), mask=inside)
        dw += tl.sum(dy * value * r, axis=0)
    tl.store(partial + tl.program_id(0) * F + f, dw, mask=f < F)


def _sizes(**tensors: torch.Tensor) -> dict[str, int]:
    """What both kernels are given but tensors: eight elements a thread, sixteen in the longest rows."""
    batch, tokens, features = tensors["x"].shape
    block_f = triton.next_power_of_2(features)
    strides = {f"{name}_{axis}": s for name, t in tensors.items() for axis, s in zip("bnf", t.stride())}
    return strides | {
        "rows": batch * tokens, "tokens": tokens,
        "UNIT": all(tensor.stride(-1) == 1 for tensor in tensors.values()), "F": features,
        "BLOCK_R": max(1, 1024 // block_f), "BLOCK_F": block_f, "num_warps": min(max(block_f // 256, 4), 32),
    }  # fmt: skip


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run the forward kernel on x (B, N, D) of any strides."""
    out = torch.empty_like(x)
    sizes = _sizes(x=x, out=out)
    programs = triton.cdiv(sizes["rows"], sizes["BLOCK_R"])
    Launch(forward_kernel, programs, takes=("x", "weight", "out"), eps=eps, **sizes)(x, weight, out)
    return out


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the backward kernel: gradients of x and of weight, the latter summed in an order that never varies."""
    dx = torch.empty_like(x)
    sizes = _sizes(x=x, grad=grad, dx=dx)
    programs = min(triton.cdiv(sizes["rows"], sizes["BLOCK_R"]), 4 * multiprocessors(x.device))
    partial = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    takes = ("x", "weight", "grad", "dx", "partial")
    Launch(backward_kernel, programs, takes=takes, programs=programs, eps=eps, **sizes)(
        x, weight, grad, dx, partial
    )
    return dx, partial.sum(dim=0).to(weight.dtype)
