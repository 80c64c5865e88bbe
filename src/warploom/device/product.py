"""Matrix products of tiles, exact in their inputs and summed in float32, whatever runs the kernel."""

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
