"""Matrix products of tiles, how float32 factors are multiplied, and rounding to a factor's dtype."""

import triton
import triton.language as tl

from warploom.device.activations import INTERPRETED
from warploom.device.phase import wrapping_add


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Returns a float32 tile in another dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter would drop the last 16 bits
        bits = x.to(tl.int32, bitcast=True)
        above = wrapping_add(bits, 0x7FFF + ((bits >> 16) & 1))
        nearest = (above & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)  # NaN stays
    return x.to(dtype)


@triton.jit
def round_to_tf32(x):
    """Returns a float32 tile with the bits that TensorFloat-32 has, to nearest; matrix units would drop the others."""
    if not INTERPRETED:  # whose products keep all bits
        x = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        ).to(tl.float32, bitcast=True)
    return x


@triton.jit
def terms_of(x, COUNT: tl.constexpr):
    """Returns a float32 tile as a sum of terms in bfloat16, the largest first: three hold all its bits, two 16 of them."""
    terms = ()
    for _ in tl.static_range(COUNT):
        term = round_to(x, tl.bfloat16)
        terms += (term,)
        x -= term.to(tl.float32)
    return terms


@triton.jit
def dot_of_terms(a, b, i: tl.constexpr, j: tl.constexpr, c):
    """Returns ``a[i] · b[j] + c`` of two factors in terms."""
    if INTERPRETED:
        c = tl.dot(a[i].to(tl.float32), b[j].to(tl.float32), c)
    else:
        c = tl.dot(a[i], b[j], c)
    return c


@triton.jit
def add_outside(whole, c):
    """Returns ``whole + c`` outside of matrix units, which drop bits where they add: for sums over many tiles."""
    return tl.fma(whole, 1.0, c)  # not `+`, which the compiler turns into an accumulating product


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """Returns ``a · b + c`` in float32.

    ``PRECISION`` says how float32 factors are multiplied. It is a name of Triton's ``input_precision``, or ``bf16`` to
    round them to bfloat16 first, or ``3-term`` if they come as `terms_of` makes them (``3-term here``: in this loop). Of
    the nine products of three terms six are taken, as by ``bf16x6``: the others are below what float32 rounds off.
    ``2-term`` takes three products of four.
    """
    if PRECISION == "3-term" or PRECISION == "3-term here" or PRECISION == "2-term":
        COUNT: tl.constexpr = len(a)
        whole = tl.zeros(c.shape, dtype=tl.float32)
        for left_out in tl.static_range(COUNT):  # the smallest first
            for i in tl.static_range(COUNT - left_out):
                whole = dot_of_terms(a, b, COUNT - 1 - left_out - i, i, whole)
        c = add_outside(whole, c)
    else:
        if PRECISION == "bf16" and a.dtype == tl.float32:
            a = round_to(a, tl.bfloat16)
            b = round_to(b, tl.bfloat16)
        if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
            c = tl.dot(a.to(tl.float32), b.to(tl.float32), c)
        elif PRECISION == "bf16x6" and a.dtype == tl.float32:
            c = add_outside(tl.dot(a, b, input_precision=PRECISION), c)
        else:
            c = tl.dot(a, b, c, input_precision="ieee" if PRECISION == "bf16" else PRECISION)
    return c


@triton.jit
def product_as_transposed(a, b, c, PRECISION: tl.constexpr):
    """Returns ``a · b + c``, where ``c`` is zero, with the bits of ``bᵀ · aᵀ`` as `product` forms it.

    Of terms, the products of unequal ones are added up in the order that they have there. What the compiler splits, it
    adds up in an order of its own: that product itself is transposed.
    """
    if PRECISION == "3-term" or PRECISION == "3-term here" or PRECISION == "2-term":
        COUNT: tl.constexpr = len(a)
        for left_out in tl.static_range(COUNT):
            for i in tl.static_range(COUNT - left_out):
                c = dot_of_terms(a, b, i, COUNT - 1 - left_out - i, c)
    elif PRECISION == "bf16x6" and a.dtype == tl.float32:
        c = product(b.T, a.T, c.T, PRECISION).T
    else:
        c = product(a, b, c, PRECISION)
    return c


@triton.jit
def dot(a, b, acc):
    """Returns ``a · b + acc`` in float32, with all bits of float32 factors: see `product`."""
    return product(a, b, acc, "bf16x6")


@triton.jit
def exact_dot(a, b, acc):
    """Returns ``a · b + acc`` with no errors but those of float32: not on matrix units where factors are float32.

    It takes longer than `dot`, and is for products that wait for memory anyway. It adds term after term, so over many
    terms `dot` is as exact.
    """
    return product(a, b, acc, "ieee")


@triton.jit
def find_scale(x):
    """Returns a power of two by which the finite numbers of the tile ``x`` fit float16."""
    sizes = tl.abs(x)
    largest = tl.max(tl.max(tl.where(sizes < float("inf"), sizes, 0.0), axis=1), axis=0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 140  # so that x over it is below 2¹⁴
    exponent = tl.minimum(tl.maximum(exponent, 0), 113)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
