"""Matrix products of tiles, how float32 factors are multiplied, and rounding to a factor's dtype."""

import triton
import triton.language as tl

from warploom.device.activations import INTERPRETED


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A float32 tile in another dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter would drop the last 16 bits
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)  # NaN stays
    return x.to(dtype)


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """``a · b + c`` in float32.

    ``PRECISION`` is about float32 factors: one of Triton's names of an ``input_precision``, or ``bf16`` to round
    them to bfloat16 first.
    """
    if PRECISION == "bf16" and a.dtype == tl.float32:
        a = rounded(a, tl.bfloat16)
        b = rounded(b, tl.bfloat16)
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    elif PRECISION == "bf16x6" and a.dtype == tl.float32:
        # Matrix units drop bits where they add, so a sum over many tiles is formed outside them.
        whole = tl.dot(a, b, input_precision=PRECISION)
        c = tl.fma(whole, 1.0, c)  # not `+`, which the compiler turns into an accumulating product
    else:
        c = tl.dot(a, b, c, input_precision="ieee" if PRECISION == "bf16" else PRECISION)
    return c


@triton.jit
def dot(a, b, acc):
    """``a · b + acc`` in float32, with all bits of float32 factors: see `product`."""
    return product(a, b, acc, "bf16x6")
