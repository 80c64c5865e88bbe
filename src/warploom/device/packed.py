"""The packed sequence of a token, or of a tile of tokens, found on the device.

A tile holds tokens of one sequence. Sequence ``s`` has the tokens from ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]``, and
its first tile is number ``cu_seqlens[s] // BLOCK + s``. This gives every sequence the tiles that it needs, and at most
one more. A grid of ``tokens // BLOCK + sequences`` tiles holds all sequences, so the host need not know their lengths.

Tokens behind the last sequence are called the tail. Kernels that make its rows zero treat it as one more sequence, in a
grid of ``⌈tokens / BLOCK⌉ + sequences`` tiles.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(n, cu_seqlens, cu_stride, sequences):
    """Returns the packed sequence (int32, (R,)) of each token: the last whose start is not behind it. Binary search."""
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


@triton.jit
def sequence_of_tile(tile, cu_seqlens, cu_stride, sequences, BLOCK: tl.constexpr):
    """Returns the sequence of a tile, and the tile's number in it, which may be past its end. Binary search."""
    low = tile * 0
    high = low + sequences
    first = low
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens + middle * cu_stride).to(tl.int32) // BLOCK + middle
        reached = start <= tile
        low = tl.where(reached, middle, low)
        first = tl.where(reached, start, first)
        high = tl.where(reached, high, middle)
    return low, tile - first


@triton.jit
def sequence_bounds(sequence, cu_seqlens, cu_stride):
    """Returns the first row of a sequence, and its length."""
    start = tl.load(cu_seqlens + sequence * cu_stride).to(tl.int32)
    return start, tl.load(cu_seqlens + (sequence + 1) * cu_stride).to(tl.int32) - start


@triton.jit
def is_in_sequence(n, cu_seqlens, cu_stride, sequences):
    """Returns True for tokens before the end of the last sequence."""
    return n < tl.load(cu_seqlens + sequences * cu_stride).to(tl.int32)


@triton.jit
def sequence_or_tail(sequence, cu_seqlens, cu_stride, sequences, rows):
    """Returns the first row of a sequence, and its length, within ``rows``. Number ``sequences`` is the tail."""
    start = tl.load(cu_seqlens + sequence * cu_stride).to(tl.int32)
    following = tl.minimum(sequence + 1, sequences)
    end = tl.load(cu_seqlens + following * cu_stride).to(tl.int32)
    end = tl.where(sequence == sequences, rows, end)
    start = tl.minimum(tl.maximum(start, 0), rows)
    return start, tl.maximum(tl.minimum(end, rows) - start, 0)
