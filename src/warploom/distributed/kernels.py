"""The kernel that adds up what ranks sent for each row, in an order that is given."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from warploom.runtime.launch import Launch

BLOCK = 1024


@triton.jit
def sum_rows_kernel(rows, order, ends, out, width: tl.int64, blocks: tl.int32, BLOCK: tl.constexpr):
    """Write ``out[i] = Σ rows[order[j]]``, ``ends[i] ≤ j < ends[i + 1]``: (n, F) from (M, F), in float32.

    A program adds up one block of a row.
    """
    i = tl.program_id(0) // blocks
    f = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(tl.load(ends + i), tl.load(ends + i + 1)):
        row = tl.load(order + j).to(tl.int64)
        total += tl.load(rows + row * width + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i.to(tl.int64) * width + f, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """Write sums of dense rows (M, …) to ``out`` (n, …), dense too, added up in float32.

    Args:
        rows: What is added up.
        order: Numbers of rows, int32: those of the first sum, then those of the second.
        ends: ``(n + 1,)`` int32, where each sum's begin in ``order``.
        out: In the dtype of the rows.
    """
    sums = len(ends) - 1
    width = out[:1].numel() if sums else 0
    _launch_of(sums, width, rows.dtype, rows.device)(rows, order, ends, out)


@functools.lru_cache(64)
def _launch_of(sums: int, width: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Returns the launch for so many sums. A new one takes 0.1 ms to find its compiled kernel."""
    blocks = triton.cdiv(width, BLOCK)
    takes = ("rows", "order", "ends", "out")
    return Launch(sum_rows_kernel, sums * blocks, takes=takes, width=width, blocks=blocks, BLOCK=BLOCK)
