"""The kernel that sets the memory-bound ceiling: it streams tensors through the chip, no more."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_READS = 4
MAX_WRITES = 3

# (elements per program, warps): the ceiling is the best of these on each case. On an H200 one 16-byte access
# per thread and stream wins for large tensors, several for a few megabytes, and large programs where a
# program's only store is the sum of what it read.
CONFIGURATIONS = ((512, 4), (1024, 8), (1024, 2), (2048, 8), (4096, 8), (8192, 8))


@triton.jit
def stream_kernel(r0, r1, r2, r3, w0, w1, w2, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of READS streams of n elements to WRITES streams, or a partial sum per program to w0."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.zeros([BLOCK], tl.float32)
    if READS > 0:
        total += tl.load(r0 + offsets, mask=mask, other=0.0)
    if READS > 1:
        total += tl.load(r1 + offsets, mask=mask, other=0.0)
    if READS > 2:
        total += tl.load(r2 + offsets, mask=mask, other=0.0)
    if READS > 3:
        total += tl.load(r3 + offsets, mask=mask, other=0.0)
    if WRITES == 0:
        # Without a store the compiler would drop the loads.
        tl.store(w0 + program, tl.sum(total, axis=0))
    if WRITES > 0:
        tl.store(w0 + offsets, total, mask=mask)
    if WRITES > 1:
        tl.store(w1 + offsets, total, mask=mask)
    if WRITES > 2:
        tl.store(w2 + offsets, total, mask=mask)


def compile_only(reads: int, writes: int) -> None:
    """Compile what `stream` launches for so many inputs and outputs, and launch nothing."""
    pointers = [torch.float32] * (MAX_READS + MAX_WRITES)
    for block, warps in CONFIGURATIONS:
        stream_kernel.warmup(*pointers, block, READS=reads, WRITES=writes, BLOCK=block, num_warps=warps, grid=(1,))


def stream(
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    scratch: torch.Tensor,
    block: int,
    warps: int,
) -> None:
    """Stream ``inputs`` into ``outputs``: each output becomes the sum of the inputs.

    Args:
        inputs: Up to four float32 tensors of one size. Multiples of 16 elements move 16 bytes at a time.
        outputs: Up to three float32 tensors of that size.
        scratch: float32, one element per program; it takes the partial sums when there is no output.
        block: Elements per program, a power of two.
        warps: Warps per program.
    """
    n = (inputs + outputs)[0].numel()
    r = inputs + (scratch,) * (MAX_READS - len(inputs))
    w = outputs + (scratch,) * (MAX_WRITES - len(outputs))
    stream_kernel[(triton.cdiv(n, block),)](
        *r, *w, n, READS=len(inputs), WRITES=len(outputs), BLOCK=block, num_warps=warps
    )
