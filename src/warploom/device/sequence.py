"""Packed sequences: which one a token belongs to, found on the device."""

import triton
import triton.language as tl


@triton.jit
def sequence_of(n, cu_seqlens, cu_stride, sequences):
    """Packed sequence of each token (int32, (R,)): the last whose start is not behind it. Binary search."""
    low = tl.zeros_like(n)
    high = low + sequences
    width = sequences
    while width > 0:
        middle = (low + high) // 2
        reached = tl.load(cu_seqlens + middle * cu_stride).to(tl.int32) <= n
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        width = width // 2
    return low
