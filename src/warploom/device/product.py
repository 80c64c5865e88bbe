"""Matrix products of tiles, and how float32 factors are multiplied."""

import triton
import triton.language as tl

from warploom.device.activations import INTERPRETED


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """``a · b + c`` in float32.

    ``PRECISION`` is about float32 factors: one of Triton's names of an ``input_precision``, or ``bf16`` to round them
    to bfloat16 first.
    """
    if PRECISION == "bf16":
        a = a.to(tl.bfloat16)
        b = b.to(tl.bfloat16)
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    else:
        c = tl.dot(a, b, c, input_precision="ieee" if PRECISION == "bf16" else PRECISION)
    return c
