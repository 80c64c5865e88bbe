"""Matrix products of tiles in a kernel, on numbers."""

import pytest
import torch

from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl

from warploom.device.product import product, product_as_transposed, terms_of
from warploom.runtime.launch import Launch

ROWS, FEATURES = 32, 64


@triton.jit
def both_ways_kernel(
    x, y, product_xy, product_yx, PRECISION: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr
):
    """``x yᵀ`` and ``y xᵀ`` (ROWS, ROWS)."""
    row = tl.arange(0, ROWS)[:, None]
    feature = tl.arange(0, FEATURES)[None, :]
    a = tl.load(x + row * FEATURES + feature)
    b = tl.load(y + row * FEATURES + feature)
    at, bt = a.T, b.T
    if PRECISION == "3-term here":
        a, at, b, bt = terms_of(a, 3), terms_of(at, 3), terms_of(b, 3), terms_of(bt, 3)
    elif PRECISION == "2-term":
        a, at, b, bt = terms_of(a, 2), terms_of(at, 2), terms_of(b, 2), terms_of(bt, 2)
    zeros = tl.zeros((ROWS, ROWS), tl.float32)
    place = row * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(product_xy + place, product(a, bt, zeros, PRECISION))
    tl.store(product_yx + place, product_as_transposed(b, at, zeros, PRECISION))


ERRORS = {"bf16x6": 3e-6, "3-term here": 3e-6, "2-term": 1e-4, "ieee": 3e-6, "tf32": 8e-3, "bf16": 3e-2}
"""Root mean squares allowed, of products of size 8: less than the smallest term that belongs to the sum.

A GPU cuts numbers to tf32 (6e-3), where the interpreter rounds them.
"""


@pytest.mark.parametrize("precision", ERRORS)
def test_a_transposed_product_has_the_same_bits(precision: str, device: torch.device) -> None:
    x, y = (torch.randn(ROWS, FEATURES, device=device) for _ in range(2))
    found, transposed = (torch.empty(ROWS, ROWS, device=device) for _ in range(2))
    launch = Launch(
        both_ways_kernel,
        1,
        takes=("x", "y", "product_xy", "product_yx"),
        PRECISION=precision, ROWS=ROWS, FEATURES=FEATURES,
    )  # fmt: skip
    launch(x, y, found, transposed)
    error = found.double() - x.double() @ y.double().mT
    assert error.square().mean().sqrt() < ERRORS[precision]
    assert torch.equal(found, transposed.mT)
