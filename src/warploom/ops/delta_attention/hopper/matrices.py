"""The kernel that makes the matrices of chunks of 64 tokens on Hopper, from which `hopper.scan` goes on with the rows.

With ``T = (1 + L)⁻¹`` as in `triton.chunks`, the corrected values are ``U = T β (V − K̃ S)``. Decays of a head and the
lengths of rows are numbers of a token, so ``K̃``, ``Q̃`` and ``K̂`` are the rows as they come, times a number each: nothing
of a row's size is written.

A program takes a chunk and heads of values that share a head of keys. The inner products of its rows are formed once,
and stay in registers; heads are taken two at a time, since both halves of two inverses have a column for each thread,
or one at a time where keys have no more. So many are ``HEADS``.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warploom.device.decays import clamp_decay, exp
from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers, matrix, thread_barrier
from warploom.ops.delta_attention.hopper.scan import (
    BACKWARD_FACTORS,
    BLOCK_T,
    FACTORS,
    SUMS,
    WHOLE,
)
from warploom.ops.delta_attention.triton.tiles import EPSILON, STEPS, DeltaSizes, exact_terms

HALF = gl.constexpr(32)  # tokens of half a chunk
LENGTHS = gl.constexpr(2)  # which numbers of tokens there are: of keys, and of queries times the scale
COARSE = gl.constexpr(0)  # sums of logarithms of decays
FINE = gl.constexpr(1)
BETA = gl.constexpr(2)

PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of a chunk's tokens
HALF_PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))  # with half of its tokens
NUMBERS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))  # of tokens, of two heads
# Tiles (halves of heads, rows, columns): a thread has a column, and four of its rows, or what all of a warp read.
COLUMN = gl.constexpr(gl.BlockedLayout([1, 4, 1], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
READ = gl.constexpr(gl.SliceLayout(3, gl.BlockedLayout([1, 4, 32, 1], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0])))
QUARTERS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8]))  # (heads, rows, columns)
OUT = gl.constexpr(gl.BlockedLayout([4, 4], [4, 8], [4, 1], [1, 0]))


class MatrixPlace(NamedTuple):
    """The chunk and the heads that a program takes."""

    b: gl.tensor  # batch entry
    slot: gl.tensor  # number of the chunk among all
    token: gl.tensor  # its first one
    keys: gl.tensor  # head of keys
    head: gl.tensor  # the first of values
    end: gl.tensor  # one past the last of these


class MatrixBuffers(NamedTuple):
    """Shared memory of a program."""

    lengths: gl.shared_memory_descriptor  # (2, T): see LENGTHS
    numbers: gl.shared_memory_descriptor  # (4 · HEADS · T), of which the last are not used
    halves: gl.shared_memory_descriptor  # (2 · HEADS, HALF, HALF): L of each half, then its inverse
    below: gl.shared_memory_descriptor  # the same of the second half with the first, behind what is not used
    out: gl.shared_memory_descriptor  # (HEADS, 1, 1, 2T, T): T β, and P below it


@gluon.constexpr_function
def heads_in(halves):
    """Returns how many heads are taken at a time."""
    return halves.shape[0] // 2


@gluon.jit
def add(x, y):
    """Returns the sum of two numbers, for scans."""
    return x + y


@gluon.jit
def find_chunk(sizes):
    """Returns this program's place. Programs that read the same rows lie next to each other."""
    program = gl.program_id(0)
    part = program % sizes.columns
    program = program // sizes.columns
    key_heads = sizes.heads // sizes.group
    keys = program % key_heads
    slot = program // key_heads
    b = slot // sizes.chunks
    of_part = (sizes.group + sizes.columns - 1) // sizes.columns
    head = keys * sizes.group + part * of_part
    end = gl.minimum(head + of_part, (keys + 1) * sizes.group)
    return MatrixPlace(b, slot, (slot - b * sizes.chunks) * BLOCK_T, keys, head, end)


@gluon.jit
def inverse_lengths(rows):
    """Returns the inverse lengths (T,) of rows (T, D) in shared memory."""
    D: gl.constexpr = rows.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    wide = rows.load(ROWS).to(gl.float32)
    return gl.rsqrt(gl.sum(wide * wide, 1) + EPSILON)


@gluon.jit
def load_gates(beta, decay, h, n, place, sizes, DECAYS: gl.constexpr):
    """Returns β and the logarithms of decays (HEADS, T) of heads ``h`` and tokens ``n``, 0 where there are none."""
    heads, tokens, b = h.to(gl.int64)[:, None], n.to(gl.int64)[None, :], place.b.to(gl.int64)
    mask = (n < sizes.tokens)[None, :] & (h < place.end)[:, None]
    ptrs = beta + (b * sizes.beta_b + heads * sizes.beta_h + tokens * sizes.beta_n)
    own = gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    g = own
    if DECAYS:
        ptrs = decay + (b * sizes.decay_b + heads * sizes.decay_h + tokens * sizes.decay_n)
        g = clamp_decay(gl.load(ptrs, mask=mask, other=0.0).to(gl.float32))
    return own, g


@gluon.jit
def store_numbers(own, g, factors, h, place, buffers, sizes, DECAYS: gl.constexpr, BACKWARD: gl.constexpr):
    """Stores what tokens have one number each of: for this program, and in ``factors`` for the scan.

    Sums of multiples of 1/STEPS are exact, and so are their differences: see `tiles.decays_between`.
    """
    TOKENS: gl.constexpr = gl.SliceLayout(0, NUMBERS)
    t = gl.arange(0, BLOCK_T, TOKENS)
    HEADS: gl.constexpr = heads_in(buffers.halves)
    keys = buffers.lengths.index(0).load(TOKENS)[None, :] + gl.zeros([HEADS, BLOCK_T], gl.float32, NUMBERS)
    queries = buffers.lengths.index(1).load(TOKENS)[None, :] + gl.zeros([HEADS, BLOCK_T], gl.float32, NUMBERS)
    slot = place.slot.to(gl.int64) * sizes.heads
    WIDTH: gl.constexpr = BACKWARD_FACTORS if BACKWARD else FACTORS
    to = factors + ((slot + h)[:, None] * WIDTH + t[None, :])
    mask = (h < place.end)[:, None] & (t >= 0)[None, :]
    buffers.numbers.slice(BETA * HEADS * BLOCK_T, HEADS * BLOCK_T).store(own.reshape([HEADS * BLOCK_T]))
    until = keys
    if DECAYS:
        coarse = gl.floor(g * STEPS) / STEPS
        fine = g - coarse
        coarse_sums, fine_sums = gl.associative_scan(coarse, 1, add), gl.associative_scan(fine, 1, add)
        all_coarse, all_fine = gl.sum(coarse, 1), gl.sum(fine, 1)
        buffers.numbers.slice(COARSE * HEADS * BLOCK_T, HEADS * BLOCK_T).store(
            coarse_sums.reshape([HEADS * BLOCK_T])
        )
        buffers.numbers.slice(FINE * HEADS * BLOCK_T, HEADS * BLOCK_T).store(fine_sums.reshape([HEADS * BLOCK_T]))
        since = exp(coarse_sums + fine_sums, True)
        until = exp((all_coarse[:, None] - coarse_sums) + (all_fine[:, None] - fine_sums), True) * keys
        keys *= since
        queries *= since
        whole = exp(all_coarse + all_fine, False)
        gl.store(factors + ((slot + h) * WIDTH + WHOLE), whole, mask=h < place.end)
        if BACKWARD:
            gl.store(to + SUMS, coarse_sums, mask=mask)
            gl.store(to + (SUMS + BLOCK_T), fine_sums, mask=mask)
    gl.store(to, keys, mask=mask)
    gl.store(to + BLOCK_T, own if BACKWARD else queries, mask=mask)
    gl.store(to + 2 * BLOCK_T, until, mask=mask)


@gluon.jit
def numbers_of(buffers, kind: gl.constexpr, own: gl.constexpr):
    """Returns the numbers (T,) of a head's tokens in shared memory."""
    return buffers.numbers.slice((kind * heads_in(buffers.halves) + own) * BLOCK_T, BLOCK_T)


@gluon.jit
def head_of(tiles, own: gl.constexpr):
    """Returns the tiles (2, 1, HALF, HALF) of a head in shared memory."""
    HEADS: gl.constexpr = tiles.shape[0] // 2
    return tiles.reshape([2, HEADS, HALF, HALF]).slice(own, 1, dim=1)


@gluon.jit
def weigh_pairs(keys, queries, own: gl.constexpr, buffers, DECAYS: gl.constexpr):
    """Stores ``L`` of a head by its quarters, and its ``P``, from the inner products (T, T) of rows."""
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    row, column = gl.arange(0, BLOCK_T, ROWS)[:, None], gl.arange(0, BLOCK_T, COLUMNS)[None, :]
    if DECAYS:
        coarse, fine = numbers_of(buffers, COARSE, own), numbers_of(buffers, FINE, own)
        between = coarse.load(ROWS)[:, None] - coarse.load(COLUMNS)[None, :]
        between += fine.load(ROWS)[:, None] - fine.load(COLUMNS)[None, :]
        weights = exp(between, True)
        keys = keys * weights
        queries = queries * weights
    lower = gl.where(row > column, keys * numbers_of(buffers, BETA, own).load(ROWS)[:, None], 0.0)
    scores = gl.where(row >= column, queries, 0.0).to(buffers.out.dtype)
    matrix(buffers.out, own).slice(BLOCK_T, BLOCK_T, dim=0).store(scores)
    left, right = gl.split(lower.reshape([BLOCK_T, 2, HALF]).permute([0, 2, 1]))
    left, right = gl.convert_layout(left, HALF_PAIRS), gl.convert_layout(right, HALF_PAIRS)
    first = gl.arange(0, BLOCK_T, gl.SliceLayout(1, HALF_PAIRS))[:, None] < HALF
    halves = gl.where(first, left, right)
    head_of(buffers.halves, own).store(halves.reshape([2, 1, HALF, HALF]))
    head_of(buffers.below, own).store(left.reshape([2, 1, HALF, HALF]))


@gluon.jit
def columns_of(x):
    """Returns the columns (2 · HEADS, 4) of a tile (2 · HEADS, 4, HALF), in the order of their bits reversed."""
    COUNT: gl.constexpr = x.shape[0]
    parts = (x,)
    for level in gl.static_range(5):
        following = ()
        for i in gl.static_range(2**level):
            even, odd = gl.split(parts[i].reshape([COUNT, 4, HALF >> (level + 1), 2]))
            following = following + (even, odd)
        parts = following
    columns = ()
    for i in gl.static_range(HALF):
        columns = columns + (
            gl.convert_layout(parts[i].reshape([COUNT, 4]), gl.SliceLayout(2, COLUMN), assert_trivial=True),
        )
    return columns


@gluon.constexpr_function
def reversed_bits(j):
    """Returns a number of five bits with their order reversed."""
    return int(f"{j:05b}"[::-1], 2)


@gluon.jit
def take_row(x, i: gl.constexpr):
    """Returns row ``i`` (2 · HEADS, HALF) of a tile (2 · HEADS, 4, HALF)."""
    COUNT: gl.constexpr = x.shape[0]
    even, odd = gl.split(x.permute([0, 2, 1]).reshape([COUNT, HALF, 2, 2]))
    one, two = gl.split(even if i % 2 == 0 else odd)
    return gl.convert_layout(one if i < 2 else two, gl.SliceLayout(1, COLUMN), assert_trivial=True)


@gluon.jit
def invert_halves(halves):
    """Replaces ``L`` (2 · HEADS, HALF, HALF), strictly lower triangular, by ``(1 + L)⁻¹``, in float32.

    Every column of an inverse follows from itself alone, row by row: a thread has one of them, four rows to a tile.
    """
    COUNT: gl.constexpr = halves.shape[0]
    row = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    column = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    zeros = gl.zeros([COUNT, 4, HALF], gl.float32, COLUMN)
    known = ()
    tiles = ()
    for first in gl.static_range(0, HALF, 4):
        own = columns_of(halves.slice(first, 4, dim=1).load(READ))
        x = gl.where(row + first == column, 1.0, zeros)
        for j in gl.static_range(first):
            x -= own[reversed_bits(j)][:, :, None] * known[j][:, None, :]
        for j in gl.static_range(4):
            found = take_row(x, j)
            known = known + (found,)
            if j < 3:  # factors of rows that are not behind j are 0
                x -= own[reversed_bits(first + j)][:, :, None] * found[:, None, :]
        tiles = tiles + (x,)
    thread_barrier()
    for i in gl.static_range(HALF // 4):
        halves.slice(4 * i, 4, dim=1).store(tiles[i])


@gluon.jit
def multiply_terms(a, b):
    """Returns ``a · b`` of float32 factors in three terms each, to float32's accuracy: see `device.product.product`."""
    HEADS: gl.constexpr = a[0].shape[0]
    total = gl.zeros([HEADS, HALF, HALF], gl.float32, QUARTERS)
    for left_out in gl.static_range(3):  # the smallest first
        for i in gl.static_range(3 - left_out):
            total = mma_v2(a[2 - left_out - i], b[i], total)
    return total


@gluon.jit
def merge_halves(buffers):
    """Replaces ``L`` of the second half with the first by what lies there in the inverse, ``−T₂ L T₁``."""
    HEADS: gl.constexpr = heads_in(buffers.halves)
    A: gl.constexpr = gl.DotOperandLayout(0, QUARTERS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, QUARTERS, 2)
    second = exact_terms(buffers.halves.slice(HEADS, HEADS).load(A))
    product = multiply_terms(second, exact_terms(buffers.below.slice(HEADS, HEADS).load(B)))
    first = exact_terms(buffers.halves.slice(0, HEADS).load(B))
    product = multiply_terms(exact_terms(gl.convert_layout(-product, A)), first)
    buffers.below.slice(HEADS, HEADS).store(product)


@gluon.jit
def store_inverse(own: gl.constexpr, buffers, BACKWARD: gl.constexpr):
    """Stores ``T β`` of a head where it leaves from, or ``T`` for the backward."""
    FOUR: gl.constexpr = gl.BlockedLayout([1, 1, 4, 4], [1, 1, 4, 8], [2, 1, 2, 1], [3, 2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, OUT)
    halves = head_of(buffers.halves, own).load(FOUR).reshape([BLOCK_T, HALF])
    below = head_of(buffers.below, own).load(FOUR).reshape([BLOCK_T, HALF])
    halves, below = gl.convert_layout(halves, OUT), gl.convert_layout(below, OUT)
    first = gl.arange(0, BLOCK_T, gl.SliceLayout(1, OUT))[:, None] < HALF
    left, right = gl.where(first, halves, below), gl.where(first, 0.0, halves)
    if not BACKWARD:
        numbers = numbers_of(buffers, BETA, own)
        left *= numbers.slice(0, HALF).load(COLUMNS)[None, :]
        right *= numbers.slice(HALF, HALF).load(COLUMNS)[None, :]
    dtype: gl.constexpr = buffers.out.dtype
    both = gl.join(left.to(dtype), right.to(dtype)).permute([0, 2, 1]).reshape([BLOCK_T, BLOCK_T])
    matrix(buffers.out, own).slice(0, BLOCK_T, dim=0).store(both)


@gluon.jit
def hopper_matrix_kernel(
    q_desc, k_desc, beta, decay, matrices_desc, factors, sizes: DeltaSizes, NORMALIZE: gl.constexpr, DECAYS: gl.constexpr,
    HEADS: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """Writes matrices and factors of one chunk, for ``group / columns`` heads of values that share one of keys.

    ``matrices`` (slots, H, 2T, T) are ``T β`` and below it ``P`` times the scale. ``factors`` (slots, H, `FACTORS`) in
    float32 are those of ``K̃``, ``Q̃`` and ``K̂``, T each, then the decay over the chunk. For the backward, ``T`` stands in
    the place of ``T β``, and β in that of ``Q̃``'s; `BACKWARD_FACTORS` numbers have the sums of logarithms of decays too.
    """
    dtype: gl.constexpr = k_desc.dtype
    D: gl.constexpr = k_desc.block_type.shape[3]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    QUARTER: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    place = find_chunk(sizes)
    # (1) rows, their lengths, and their inner products
    q = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_T, D], k_desc.layout)
    full = barriers(1)
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(full.index(0), 2 * k_desc.block_type.nbytes)
    at = [place.b, place.keys, place.token, 0]
    tma.async_copy_global_to_shared(k_desc, at, full.index(0), k.index(0))
    tma.async_copy_global_to_shared(q_desc, at, full.index(0), q.index(0))
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, NUMBERS))
    n = place.token + gl.arange(0, BLOCK_T, gl.SliceLayout(0, NUMBERS))
    own, g = load_gates(beta, decay, place.head + heads, n, place, sizes, DECAYS)
    mbarrier.wait(full.index(0), 0)
    keys, queries = matrix(k, 0), matrix(q, 0)
    zeros = gl.zeros([BLOCK_T, BLOCK_T], gl.float32, PAIRS)
    of_keys = warpgroup_mma(keys, keys.permute([1, 0]), zeros, use_acc=False, is_async=True)
    of_queries = warpgroup_mma(queries, keys.permute([1, 0]), zeros, use_acc=False, is_async=True)
    lengths = gl.allocate_shared_memory(gl.float32, [LENGTHS, BLOCK_T], FLAT)
    if NORMALIZE:
        lengths.index(0).store(inverse_lengths(keys))
        lengths.index(1).store(inverse_lengths(queries) * sizes.scale)
    else:
        TOKENS: gl.constexpr = gl.SliceLayout(0, NUMBERS)
        lengths.index(0).store(gl.full([BLOCK_T], 1.0, gl.float32, TOKENS))
        lengths.index(1).store(gl.full([BLOCK_T], 1.0, gl.float32, TOKENS) * sizes.scale)
    thread_barrier()
    of_columns = lengths.index(0).load(COLUMNS)[None, :]
    of_keys, of_queries = warpgroup_mma_wait(0, deps=[of_keys, of_queries])
    of_keys *= lengths.index(0).load(ROWS)[:, None] * of_columns
    of_queries *= lengths.index(1).load(ROWS)[:, None] * of_columns
    numbers = gl.allocate_shared_memory(gl.float32, [4 * HEADS * BLOCK_T], FLAT)
    halves = gl.allocate_shared_memory(gl.float32, [2 * HEADS, HALF, HALF], QUARTER)
    below = gl.allocate_shared_memory(gl.float32, [2 * HEADS, HALF, HALF], QUARTER)
    out = gl.allocate_shared_memory(dtype, [HEADS, 1, 1, 2 * BLOCK_T, BLOCK_T], matrices_desc.layout)
    buffers = MatrixBuffers(lengths, numbers, halves, below, out)
    for head in range(place.head, place.end, HEADS):
        store_numbers(own, g, factors, head + heads, place, buffers, sizes, DECAYS, BACKWARD)
        own, g = load_gates(beta, decay, head + HEADS + heads, n, place, sizes, DECAYS)
        tma.store_wait(0)
        thread_barrier()
        # (2) L = β A, and P
        for i in gl.static_range(HEADS):
            weigh_pairs(of_keys, of_queries, i, buffers, DECAYS)
        thread_barrier()
        # (3) T = (1 + L)⁻¹ of each half, and of both
        invert_halves(halves)
        thread_barrier()
        merge_halves(buffers)
        thread_barrier()
        for i in gl.static_range(HEADS):
            store_inverse(i, buffers, BACKWARD)
        fence_async_shared()
        thread_barrier()
        for i in gl.static_range(HEADS):
            if head + i < place.end:
                tma.async_copy_shared_to_global(matrices_desc, [place.slot, head + i, 0, 0], out.index(i))
    tma.store_wait(0)
