"""An exchange of gradients of logits between groups of warps that own keys, for the gradient of queries."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, init_each, matrix
from warploom.ops.flash_attention.hopper.tiles import ROWS, product_layout


class Exchange(NamedTuple):
    """Buffers through which groups of warps that own keys form the gradient of queries.

    A group has the gradients of the logits of its 64 keys. The gradient of queries takes those of all keys of a tile: so
    groups exchange them in shared memory, and each forms its part, 64 queries times 64 features.
    """

    dlogits: gl.shared_memory_descriptor  # (2 · GROUPS, 64, queries), transposed
    full: gl.shared_memory_descriptor  # two barriers
    empty: gl.shared_memory_descriptor  # two barriers
    k_tiles: gl.shared_memory_descriptor  # (GROUPS, 1, 1, 64, D)
    v_tiles: gl.shared_memory_descriptor  # (GROUPS, 1, 1, 64, D)
    parts: gl.shared_memory_descriptor  # (stages · GROUPS, 1, 1, 64, 64) float32
    part_full: gl.shared_memory_descriptor  # a barrier for each part
    part_empty: gl.shared_memory_descriptor  # a barrier for each part


@gluon.jit
def new_exchange(dlogits, k_tiles, v_tiles, parts):
    """An exchange through these buffers, with barriers of its own."""
    GROUPS: gl.constexpr = k_tiles.shape[0]
    full, empty = barriers(2), barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=GROUPS)
        mbarrier.init(empty.index(i), count=GROUPS)
    part_full, part_empty = barriers(parts.shape[0]), barriers(parts.shape[0])
    init_each(part_full)
    init_each(part_empty)
    return Exchange(dlogits, full, empty, k_tiles, v_tiles, parts, part_full, part_empty)


@gluon.jit
def clear_unused(tile, used):
    """Make rows of a tile in shared memory zero where keys are not used: there may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    rows = tile.load(LAYOUT)
    tile.store(gl.where((key < used)[:, None], rows, gl.zeros_like(rows)))


@gluon.constexpr_function
def swapped_layout():
    """Where a part lies in shared memory for the tensor memory accelerator, by columns as `swap_columns` leaves them."""
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    rows = [[1, 4 + 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]  # swizzled by 128 bytes, and row 1 is swapped
    return gl.SharedLinearLayout([*columns, *rows, [0, 32]])


@gluon.jit
def swap_columns(part):
    """Swap columns 0 … 15 of every 32 with the others in rows of odd number.

    Half a warp stores 8 columns of 4 rows at once. Swizzled alone, rows 0 and 1 of them share banks, and so do 2 and 3.
    """
    first, second = gl.split(part.reshape([ROWS, ROWS // 32, 2, 16]).permute([0, 1, 3, 2]))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, first.type.layout)))
    odd = (row % 2 == 1)[:, None, None]
    swapped = gl.join(gl.where(odd, second, first), gl.where(odd, first, second))
    return swapped.permute([0, 1, 3, 2]).reshape([ROWS, ROWS])


@gluon.jit
def stage_of(count, STAGES: gl.constexpr):
    """The buffer that the tile number ``count`` passes through, of one or two, and the phase of its barriers.

    Of ``count % STAGES`` the compiler makes a register for each address, which it adds to in every step.
    """
    gl.static_assert(STAGES <= 2)
    return count & (STAGES - 1), count >> (STAGES - 1) & 1


@gluon.jit
def share_dlogits(exchange, dlogits, count, own: gl.constexpr):
    """Give the gradients of a group's logits, of the tile number ``count`` of queries, to all groups."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    stage, phase = stage_of(count, 2)
    mbarrier.wait(exchange.empty.index(stage), phase ^ 1)
    exchange.dlogits.index(stage * GROUPS + own).store(dlogits)
    fence_async_shared()
    mbarrier.arrive(exchange.full.index(stage))


@gluon.jit
def query_gradient(exchange, count, own: gl.constexpr, zero, there):
    """Start to form a group's part of the gradient of queries of tile number ``count``; of anything if not ``there``."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    LAYOUT: gl.constexpr = product_layout(ROWS)
    stage, phase = stage_of(count, 2)
    mbarrier.wait(exchange.full.index(stage), phase, pred=there)
    dq = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    for group in gl.static_range(GROUPS):
        dlogits = exchange.dlogits.index(stage * GROUPS + group)
        keys = matrix(exchange.k_tiles, group + zero)
        if dlogits.shape[1] > ROWS:
            dlogits = dlogits.slice(own * ROWS, ROWS, 1)
        else:
            keys = keys.slice(own * ROWS, ROWS, 1)
        dq = warpgroup_mma(dlogits.permute([1, 0]), keys, dq, use_acc=group > 0, is_async=True)
    return dq


@gluon.jit
def publish_part(exchange, dq, count, own: gl.constexpr):
    """Give a group's part of the gradient of the tile number ``count`` of queries to the warp that adds it up."""
    GROUPS: gl.constexpr = exchange.k_tiles.shape[0]
    STAGES: gl.constexpr = exchange.parts.shape[0] // GROUPS
    mbarrier.arrive(exchange.empty.index(count & 1))
    stage, phase = stage_of(count, STAGES)
    place = stage * GROUPS + own
    mbarrier.wait(exchange.part_empty.index(place), phase ^ 1)
    tma.matrix_in(exchange.parts.index(place), swapped_layout()).store(swap_columns(dq))
    fence_async_shared()
    mbarrier.arrive(exchange.part_full.index(place))
