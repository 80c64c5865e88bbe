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
def pieces_of(x):
    """A float32 tile as the sum of three in bfloat16, which hold all its bits; the largest first."""
    high = rounded(x, tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rounded(rest, tl.bfloat16)
    low = rounded(rest - middle.to(tl.float32), tl.bfloat16)
    return high, middle, low


@triton.jit
def dot_of_pieces(a, b, i: tl.constexpr, j: tl.constexpr, c):
    """``a[i] · b[j] + c`` of two factors in pieces."""
    if INTERPRETED:
        c = tl.dot(a[i].to(tl.float32), b[j].to(tl.float32), c)
    else:
        c = tl.dot(a[i], b[j], c)
    return c


@triton.jit
def add_outside(whole, c):
    """``whole + c`` outside of matrix units, which drop bits where they add: for sums over many tiles."""
    return tl.fma(whole, 1.0, c)  # not `+`, which the compiler turns into an accumulating product


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """``a · b + c`` in float32.

    ``PRECISION`` is about float32 factors: one of Triton's names of an ``input_precision``, ``bf16`` to round them
    to bfloat16 first, or ``pieces`` where they come as `pieces_of` makes them (``cut``, if that was just before): six
    products of nine, like ``bf16x6``, and the other three are smaller than what float32 rounds off.
    """
    if PRECISION == "pieces" or PRECISION == "cut":
        whole = dot_of_pieces(a, b, 2, 0, tl.zeros(c.shape, dtype=tl.float32))  # the smallest first
        whole = dot_of_pieces(a, b, 1, 1, whole)
        whole = dot_of_pieces(a, b, 0, 2, whole)
        whole = dot_of_pieces(a, b, 1, 0, whole)
        whole = dot_of_pieces(a, b, 0, 1, whole)
        whole = dot_of_pieces(a, b, 0, 0, whole)
        c = add_outside(whole, c)
    else:
        if PRECISION == "bf16" and a.dtype == tl.float32:
            a = rounded(a, tl.bfloat16)
            b = rounded(b, tl.bfloat16)
        if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
            c = tl.dot(a.to(tl.float32), b.to(tl.float32), c)
        elif PRECISION == "bf16x6" and a.dtype == tl.float32:
            c = add_outside(tl.dot(a, b, input_precision=PRECISION), c)
        else:
            c = tl.dot(a, b, c, input_precision="ieee" if PRECISION == "bf16" else PRECISION)
    return c


@triton.jit
def dot(a, b, acc):
    """``a · b + acc`` in float32, with all bits of float32 factors: see `product`."""
    return product(a, b, acc, "bf16x6")
