"""Device functions on numbers, against float64."""

import math
from typing import Any

import pytest
import torch

from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl

from warploom.device.activations import exponential_float32, tanh, widen
from warploom.device.product import round_to_tf32
from warploom.runtime.launch import Launch

Tensor = torch.Tensor
BLOCK = 1024


def run(kernel: Any, x: Tensor, out: Tensor, block: int = BLOCK) -> None:
    Launch(kernel, -(-len(x) // block), takes=("x", "out"), size=len(x), BLOCK=block)(x, out)


@triton.jit
def exponential_kernel(x, out, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, exponential_float32(tl.load(x + i, mask=i < size, other=0.0)), mask=i < size)


def exponential(x: Tensor) -> Tensor:
    out = torch.full_like(x, math.nan)
    run(exponential_kernel, x, out)
    return out


def test_exponential_float32_is_off_by_little_more_than_a_unit(device: torch.device) -> None:
    small = 2.0 ** -torch.arange(0.0, 150.0)
    x = torch.cat((torch.linspace(-90, 88, 60_001), -90 * torch.rand(60_000), small, -small)).to(device)
    exact = x.double().exp()
    unit = 2.0 ** (exact.log2().floor() - 23)
    normal = exact >= 2.0**-126
    found = exponential(x).double()
    assert ((found - exact) / unit)[normal].abs().max().item() <= 1.5
    assert found[~normal].max().item() <= 2.0**-126  # zero, where a rounding makes no normal number of it
    assert found[exact < 0.999 * 2.0**-126].eq(0).all()


@triton.jit
def tanh_kernel(x, out, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tanh(tl.load(x + i, mask=i < size, other=0.0)), mask=i < size)


def test_tanh_is_off_by_few_units(device: torch.device) -> None:
    small = 2.0 ** -torch.arange(0.0, 60.0)
    x = torch.cat((torch.linspace(-12, 12, 60_001), torch.linspace(-1, 1, 60_001), small, -small)).to(device)
    found = torch.full_like(x, math.nan)
    run(tanh_kernel, x, found)
    exact = x.double().tanh()
    assert ((found.double() - exact).abs() <= 2**-22 * exact.abs()).all()
    limits = torch.tensor([-math.inf, -1e30, math.nan, 0.0, 1e30, math.inf], device=device)
    found = torch.full_like(limits, 7.0)
    run(tanh_kernel, limits, found)
    torch.testing.assert_close(found, limits.tanh(), equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in Triton's interpreter
def test_exponential_float32_of_what_is_not_finite(device: torch.device) -> None:
    found = exponential(torch.tensor([-math.inf, -1e38, math.nan, 0.0, -0.0], device=device)).tolist()
    assert found[:2] == [0, 0]
    assert math.isnan(found[2])
    assert found[3:] == [1, 1]


@triton.jit
def widen_kernel(x, out, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, widen(tl.load(x + i, mask=i < size, other=0.0)), mask=i < size)


@pytest.mark.parametrize("block", [1024, 64])  # several neighbours a thread, and one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_keeps_every_number(dtype: torch.dtype, block: int, device: torch.device) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device)
    x = x[~(x.float().abs() < torch.finfo(dtype).tiny) | (x == 0)]  # Triton's interpreter loses denormal numbers
    out = torch.full(x.shape, math.inf, device=device)
    run(widen_kernel, x, out, block)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(0.0), x.float().nan_to_num(0.0))


@triton.jit
def tf32_kernel(x, out, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, round_to_tf32(tl.load(x + i, mask=i < size, other=0.0)), mask=i < size)


def test_rounding_to_tf32_is_to_nearest(device: torch.device) -> None:
    x = torch.cat((torch.randn(60_000), torch.tensor([0.0, 1.0, 1 + 2.0**-11, -math.inf, math.nan]))).to(device)
    out = torch.full_like(x, math.nan)
    run(tf32_kernel, x, out)
    assert torch.equal(out[-5:-1].abs().cpu(), torch.tensor([0.0, 1.0, out[-3].item(), math.inf]))
    assert math.isnan(out[-1].item())
    if device.type != "cuda":
        assert torch.equal(out[:-1], x[:-1])  # products in the interpreter keep all bits
        return
    x, out = x[:-2], out[:-2]
    assert out.view(torch.int32).bitwise_and(2**13 - 1).eq(0).all()
    assert (out.double() - x.double()).abs().le(x.double().abs() * 2.0**-11).all()
