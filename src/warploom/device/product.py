"""Matrix products of tiles: summed in float32, operands rounded to nearest, whatever runs the kernel."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """``acc + a b`` in float32. Float32 factors keep all their bits: no TensorFloat-32."""
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Float32 in another dtype, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter would drop the last 16 bits
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)
