"""Copies through the tensor memory accelerator, by the same names in every version of Triton."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# `async_load` and `async_store` are their names since Triton 3.8, and their only names since 3.9.
async_copy_global_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_copy_shared_to_global = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    """Start to add a tile in shared memory to what is in device memory."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def matrix_in(tile, layout, _semantic=None):
    """Returns a tile (1, 1, rows, columns) in shared memory as a matrix. Triton's method for that has two names."""
    return _semantic.memdesc_reinterpret(tile, tile.dtype, tile.shape[2:], getattr(layout, "value", layout))


@builtin
def tiles_in(tiles, width, layout, _semantic=None):
    """Returns buffers (count, 1, 1, rows, columns) in shared memory as fewer of ``width`` columns; see `matrix_in`."""
    count, _, _, rows, columns = tiles.shape
    width = getattr(width, "value", width)
    shape = [count * columns // width, 1, 1, rows, width]
    return _semantic.memdesc_reinterpret(tiles, tiles.dtype, shape, getattr(layout, "value", layout))


@builtin
def boxes_in(tiles, desc, _semantic=None):
    """Buffers (count, 1, 1, rows, columns) in shared memory as the boxes of a descriptor: see `matrix_in`.

    The boxes of a buffer come one below the other, then beside these. They have 64 columns of 16 bits, as wide as
    the swizzled columns that a buffer's memory consists of, and a multiple of 8 rows.
    """
    rows, columns = desc.block_type.shape[2:]
    count = math.prod(tiles.shape) // (rows * columns)
    return _semantic.memdesc_reinterpret(tiles, tiles.dtype, [count, 1, 1, rows, columns], desc.layout)


async_add = getattr(tma, "async_atomic_add", None) or _async_add


@gluon.jit
def wait_stored():
    """Wait until what this warp has stored or added is in device memory; `store_wait` waits until it has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
