"""The kernel of rotary attention that is no other operator's: LRPE's, with a store for the attention behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.ops.lrpe.triton.angles import AngleNumbers, Inverses
from warploom.ops.lrpe.triton.forward import forward_kernel
from warploom.ops.lrpe.triton.rows import RowSizes, RowStrides, Split


@triton.jit
def rotate_kernel(
    x, out, theta, position_ids, offsets, cu_seqlens, offset: tl.int32, sizes: RowSizes, numbers: AngleNumbers,
    inverses: Inverses, split: Split, x_strides: RowStrides, out_strides: RowStrides, config: tl.constexpr,
    counters,
):  # fmt: skip
    """Runs LRPE's forward, and sets ``counters`` (2,) to zero for the kernel behind it, which counts tiles."""
    if tl.program_id(0) == 0:
        tl.store(counters + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))
    forward_kernel(
        x, out, theta, position_ids, offsets, cu_seqlens, offset, sizes, numbers, inverses, split, x_strides,
        out_strides, config,
    )  # fmt: skip
