"""What persistent Gluon kernels for Hopper share: rings of buffers, tiles of work, products.

A persistent program holds one multiprocessor. One warp copies tiles from device memory through the tensor memory
accelerator; groups of four warps each own 64 rows of the result. Copying and computing meet at barriers in shared
memory, two to a buffer: ``full`` when its tile has arrived, ``empty`` when all groups have read it. Tiles come in the
order in which they are used, so a count of tiles gives buffer and phase of a barrier on both sides.

Rings of tiles are (buffers, 1, 1, rows, features): a tile is a box of a tensor (B, H, N, D).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from warploom.device.hopper import tma

# ``memory, dtype, shape, layout``: shared memory, looked at otherwise. Public since Triton 3.9.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

ROWS = gl.constexpr(64)  # rows of a group of warps: what one matrix instruction takes
NARROW = gl.constexpr(128)
"""Features up to which results have buffers of their own. Wider ones leave through those of the queries."""


@gluon.jit
def barriers(count: gl.constexpr):
    """Barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def power_of_two(x):
    """2ˣ to 2 units in the last place; zero where the result would be denormal."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def init_ring(full, empty, arrivals: gl.constexpr):
    """Initialise the barriers of a ring of buffers: one arrival fills a buffer, so many empty it."""
    STAGES: gl.constexpr = full.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=arrivals)


@gluon.jit
def wait_full(full, count):
    """Wait for the tile number ``count`` of a ring of buffers; the number of its buffer."""
    slot = count % full.shape[0]
    mbarrier.wait(full.index(slot), count // full.shape[0] & 1)
    return slot


@gluon.jit
def wait_empty(empty, count):
    """Wait until there is room for the tile number ``count`` of a ring of buffers; the number of its buffer."""
    slot = count % empty.shape[0]
    mbarrier.wait(empty.index(slot), (count // empty.shape[0] & 1) ^ 1)
    return slot


@gluon.jit
def copy_tile(desc, entry, head, row, tiles, full, empty, count):
    """Copy a tile into its buffer of a ring once that is empty."""
    slot = wait_empty(empty, count)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [entry, head, row, 0], full.index(slot), tiles.index(slot))


@gluon.jit
def copy_own(descs, tiles, entry, head, row, full, slot, GROUPS: gl.constexpr):
    """Copy 64 rows of each tensor for each group into buffer number ``slot``; without tensors it is full at once."""
    if len(descs) == 0:
        mbarrier.arrive(full.index(slot))
    else:
        mbarrier.expect(full.index(slot), GROUPS * len(descs) * descs[0].block_type.nbytes)
    for group in gl.static_range(GROUPS):
        for i in gl.static_range(len(descs)):
            tma.async_copy_global_to_shared(
                descs[i],
                [entry, head, row + group * ROWS, 0],
                full.index(slot),
                tiles[i].index(slot * GROUPS + group),
            )


@gluon.jit
def matrix(tiles, slot):
    """A tile of a ring as a matrix in shared memory."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def product_transposed(a, b_tiles, full, count, LAYOUT: gl.constexpr):
    """Start ``a · bᵀ`` with the tile number ``count`` of a ring of (N, D) tiles."""
    b_tile = matrix(b_tiles, wait_full(full, count)).permute([1, 0])
    N: gl.constexpr = b_tiles.shape[3]
    zeros = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    return warpgroup_mma(a, b_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def as_factor(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of results, rounded, as the first factor of a product with results of layout ``LAYOUT``: no data moves."""
    return gl.convert_layout(tile.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def announce(tile, ticket, empty, done):
    """Tell the groups which tile comes next, once there is room for it; the number of its buffer."""
    slot = wait_empty(empty, done)
    ticket.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    return slot


@gluon.jit
def announce_end(tile, ticket, full, empty, done):
    """Tell the groups that there are no more tiles, by a number beyond the last."""
    slot = announce(tile, ticket, empty, done)
    mbarrier.arrive(full.index(slot))


@gluon.jit
def announced(ticket, full, done):
    """What `announce` told, and the number of the buffer."""
    slot = wait_full(full, done)
    return read(ticket, slot), slot


@gluon.jit
def read(ticket, slot):
    """What was announced in buffer number ``slot``."""
    return gl.max(ticket.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def next_tile(tickets, tiles):
    """A tile that no program has taken. Every program starts with the tile of its own number."""
    programs = gl.num_programs(0)
    tile = tiles
    if tiles > programs:
        tile = programs + gl.atomic_add(tickets, 1)
    return tile


@gluon.jit
def store_part(out, tile, part, entry, head, row, rows, place, LAYOUT: gl.constexpr):
    """Store rows ``row …`` of a float32 tensor in parts, whose sizes and strides ``place`` holds."""
    size, stride_b, stride_n, stride_h, features = place
    start = part.to(gl.int64) * size + entry.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    local = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    feature = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    cells = (local * stride_n)[:, None] + feature[None, :]
    gl.store(out + start + cells, tile, mask=(local < rows)[:, None] & (feature < features)[None, :])


@gluon.jit
def send_tile(
    out, tile, tiles, slot, part, entry, head, row, rows, place, SPLIT: gl.constexpr, LAYOUT: gl.constexpr
):
    """Start to write rows ``row …`` of a result: to its part, or rounded, by way of buffer number ``slot`` of ``tiles``."""
    if SPLIT:
        store_part(out, tile, part, entry, head, row, rows, place, LAYOUT)
    else:
        matrix(tiles, slot).store(tile.to(tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [entry, head, row, 0], tiles.index(slot))
