"""Tiles of the Triton kernels: which rows they are, which keys their queries see, and loads and stores.

Positions are local to a packed sequence; without packing there is one sequence. Queries come in tiles (M, D), keys in tiles
(N, D) and values in tiles (N, E), where ``M`` and ``N`` are ``BLOCK_M`` and ``BLOCK_N``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import tanh
from warploom.device.packed import sequence_of_tile, sequence_or_tail
from warploom.device.product import round_to, round_to_tf32, terms_of
from warploom.device.rows import Strides

PARTS_AHEAD = tl.constexpr(4)
"""Parts of a result that are on their way from memory together, where parts are merged."""


class Sizes(NamedTuple):
    """Sizes of a call, and how it is cut. Every number is a run-time value: none of them ever causes a compilation."""

    tokens: tl.int32  # queries of a batch entry
    keys: tl.int32
    heads: tl.int32
    group: tl.int32  # query heads to a key head
    blocks: tl.int32  # tiles of a head
    section: tl.int32  # heads whose keys and values fit in the L2 cache together
    splits: tl.int32  # of a loop
    sequences: tl.int32  # packed ones
    cu_q_stride: tl.int64
    cu_k_stride: tl.int64  # of packed keys; how many pages there are, where keys lie in pages
    left: tl.int32  # a query sees so many keys before its place, as `TritonConfig` says
    right: tl.int32  # and so many behind it
    scale: tl.float32
    batch_size: tl.int32


class TritonConfig(NamedTuple):
    """Compile-time choices of a kernel."""

    HAS_LEFT: tl.constexpr
    HAS_RIGHT: tl.constexpr
    NEGATIVE: tl.constexpr  # scale
    VEC: tl.constexpr  # common divisor of strides
    UNIT: tl.constexpr  # whether features are adjacent
    WIDE: tl.constexpr  # whether offsets within a tile need 64 bits
    D: tl.constexpr
    E: tl.constexpr
    PRECISION: tl.constexpr  # see `warploom.device.product`
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_E: tl.constexpr
    SHORT: tl.constexpr  # whether one loop with masks takes all its keys or queries
    SOFTCAP: tl.constexpr = None  # in powers of two
    PAGE: tl.constexpr = None  # keys of a page, where they lie in pages
    FEW: tl.constexpr = None  # of packed queries on a cache, those of a sequence that `decode` takes, at most
    BIAS_UNIT: tl.constexpr = False  # whether a bias has adjacent numbers for keys
    BIAS_VEC: tl.constexpr = 1  # common divisor of its other strides


class Mask(NamedTuple):
    """Bounds of the keys that a query sees; `TritonConfig` says which of them count."""

    keys: tl.int32
    left: tl.int32
    right: tl.int32
    table: tl.tensor | None = None  # of pages of a batch entry
    pages: tl.int64 | None = None  # how many there are


class ForwardStrides(NamedTuple):
    """Strides of the tensors of a forward."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides


class BackwardStrides(NamedTuple):
    """Strides of the tensors that a backward reads."""

    q: Strides
    k: Strides
    v: Strides
    grad: Strides


class Rows(NamedTuple):
    """Tiles of one head of a tensor."""

    ptr: tl.tensor  # of row 0, feature 0
    offsets: tl.tensor  # (rows, features) within a tile
    strides: Strides
    term: tl.int64  # from a term to the next


class LseRows(NamedTuple):
    """Rows of tensors (B, N, H, F), each a (batch entry, head, token) with tokens fastest, as in ``lse``."""

    count: tl.int64
    tokens: tl.int32
    heads: tl.int32


class RowTiles(NamedTuple):
    """Compile-time choices of a kernel on `LseRows`: tiles (BLOCK_R, BLOCK_F)."""

    VEC: tl.constexpr  # as in `TritonConfig`
    UNIT: tl.constexpr
    F: tl.constexpr
    BLOCK_R: tl.constexpr
    BLOCK_F: tl.constexpr


@triton.jit
def program_order(blocks, heads, section):
    """Returns block and head of this program, from its number without the split.

    Programs that run at the same time should read the same keys and start with the longest loop. So the heads are
    taken in sections whose keys and values fit in the L2 cache together, and within a section all heads do their
    first block, then all their second.
    """
    program = tl.program_id(0)
    place = program % (section * blocks)
    first = program // (section * blocks) * section
    width = tl.minimum(section, heads - first)
    return place // width, first + place % width


class TileBounds(NamedTuple):
    """A tile in its sequence, and the sequence that it attends to or that attends to it."""

    first: tl.int32  # row of the tile, in its sequence
    start: tl.int32  # of the sequence
    length: tl.int32
    other_start: tl.int32
    other_length: tl.int32


@triton.jit
def tile_bounds(tile, cu_tile, cu_tile_stride, cu_other, cu_other_stride, length, other_length, sequences,
                BLOCK: tl.constexpr):  # fmt: skip
    """Returns the `TileBounds` of a tile. Rows behind the last sequence attend to nothing."""
    start = tile * 0
    other_start = start
    if cu_tile is not None:
        sequence, tile = sequence_of_tile(tile, cu_tile, cu_tile_stride, sequences + 1, BLOCK)
        start, length = sequence_or_tail(sequence, cu_tile, cu_tile_stride, sequences, length)
        other_start, other_length = sequence_or_tail(sequence, cu_other, cu_other_stride, sequences, other_length)
        other_length = tl.where(sequence == sequences, 0, other_length)
    return TileBounds(tile * BLOCK, start, length, other_start, other_length)


class Place(NamedTuple):
    """The tile and the part of its KV loop that a program of a kernel that owns queries takes."""

    split: tl.int32  # of the KV loop
    row: tl.int32  # batch entry times heads, and head
    batch: tl.int32
    kv_batch: tl.int32  # of keys, and of pages and lengths
    head: tl.int32
    m: tl.int32  # first query of the tile, in its sequence
    q_start: tl.int32  # first query of the sequence
    tokens: tl.int32  # of the sequence
    k_start: tl.int32  # first key of the sequence
    keys: tl.int32  # of the sequence


@triton.jit
def query_place(cu_seqlens_q, cu_seqlens_k, seqused_k, sizes, config: tl.constexpr):
    """Returns the `Place` of this program."""
    block, row = program_order(sizes.blocks * sizes.splits, sizes.batch_size * sizes.heads, sizes.section)
    split = block % sizes.splits
    block = block // sizes.splits
    if config.HAS_RIGHT:  # the last queries see the most keys
        block = sizes.blocks - 1 - block
    batch, head = row // sizes.heads, row % sizes.heads
    if config.FEW is None:
        bounds = tile_bounds(
            block, cu_seqlens_q, sizes.cu_q_stride, cu_seqlens_k, sizes.cu_k_stride, sizes.tokens, sizes.keys,
            sizes.sequences, config.BLOCK_M,
        )  # fmt: skip
        m, q_start, tokens, k_start = bounds.first, bounds.start, bounds.length, bounds.other_start
        kv_batch = batch
        keys = used_keys(seqused_k, batch, bounds.other_length)
    else:  # of each sequence an entry of a cache has the keys
        sequence, tile = sequence_of_tile(
            block, cu_seqlens_q, sizes.cu_q_stride, sizes.sequences + 1, config.BLOCK_M
        )
        q_start, tokens = sequence_or_tail(sequence, cu_seqlens_q, sizes.cu_q_stride, sizes.sequences, sizes.tokens)
        is_tail = sequence >= sizes.sequences
        tokens = tl.where((tokens <= config.FEW) & (sequence < sizes.sequences), 0, tokens)
        kv_batch = tl.minimum(sequence, sizes.sequences - 1)
        keys = tl.where(is_tail, 0, used_keys(seqused_k, kv_batch, sizes.keys))
        m = tile * config.BLOCK_M
        k_start = m * 0
    return Place(split, row, batch, kv_batch, head, m, q_start, tokens, k_start, keys)


@triton.jit
def used_keys(seqused_k, batch, keys):
    """Returns how many keys a batch entry has."""
    if seqused_k is not None:
        keys = tl.minimum(tl.maximum(tl.load(seqused_k + batch).to(tl.int32), 0), keys)
    return keys


@triton.jit
def within(page, pages):
    """Returns the number of a page, moved to the nearest of those that there are: any number may stand in a table."""
    return tl.minimum(tl.maximum(page, 0), pages - 1)


@triton.jit
def kv_rows(x, mask, n, VEC: tl.constexpr, FEATURES: tl.constexpr, config: tl.constexpr):
    """Returns the address of the tile of keys or values from number ``n`` on, and the tile as `Rows`.

    With pages, the mask's table points at those of a batch entry, and ``x.ptr`` at the first of all pages.
    """
    if config.PAGE is None:
        ptr = x.ptr + n * (x.strides.n * VEC)
    else:
        key = n + tl.arange(0, config.BLOCK_N)
        page = tl.load(mask.table + key // config.PAGE, mask=key < mask.keys, other=0).to(tl.int64)
        row = within(page, mask.pages) * (x.strides.b * VEC) + (key % config.PAGE).to(tl.int64) * (
            x.strides.n * VEC
        )
        feature = tl.arange(0, FEATURES)
        if not config.UNIT:
            feature = feature * x.strides.f
        ptr = x.ptr
        x = Rows(ptr, row[:, None] + feature[None, :], x.strides, x.term)
    return ptr, x


@triton.jit
def cap_logits(logits, scale, config: tl.constexpr):
    """Returns logits, capped where there is a cap, and their scale: ``2^(logits · scale)`` is a weight."""
    if config.NEGATIVE:
        logits = -logits
    if config.SOFTCAP is not None:
        logits = tanh(logits * scale)
        scale = config.SOFTCAP
    return logits, scale


class LoopBounds(NamedTuple):
    """A loop in three parts: with a mask, without one, and with one again."""

    begin: tl.int32
    full_begin: tl.int32
    full_end: tl.int32
    end: tl.int32


@triton.jit
def loop_bounds(first, last, low, high, length, split, splits,
                HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Returns the `LoopBounds` of one of ``splits`` of a loop, each of whole blocks.

    Items ``first … last`` see the others ``x`` with ``item − low ≤ x ≤ item + high`` and ``0 ≤ x < length``. From
    ``full_begin`` to ``full_end`` every item sees every ``x``. All bounds but ``end`` are multiples of ``BLOCK``, or
    equal to ``end``.
    """
    begin = length * 0
    full_begin = begin
    if HAS_LOW:
        begin = tl.maximum(first - low, 0) // BLOCK * BLOCK
        full_begin = tl.cdiv(tl.maximum(last - low, 0), BLOCK) * BLOCK
    end = length
    full_end = length
    if HAS_HIGH:
        end = tl.minimum(length, tl.maximum(last + high + 1, 0))
        full_end = tl.minimum(length, tl.maximum(first + high + 1, 0))
    full_end = full_end // BLOCK * BLOCK
    span = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), splits) * BLOCK
    begin += split * span
    end = tl.maximum(tl.minimum(end, begin + span), begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return LoopBounds(begin, full_begin, full_end, end)


@triton.jit
def key_bounds(first, last, mask, split, splits, config: tl.constexpr):
    """Returns the `LoopBounds` of the KV loop of queries at ``first … last``."""
    return loop_bounds(
        first, last, mask.left, mask.right, mask.keys, split, splits, config.HAS_LEFT, config.HAS_RIGHT,
        config.BLOCK_N,
    )  # fmt: skip


@triton.jit
def visible(query, key, mask, config: tl.constexpr):
    """Returns a mask of the keys that there are and that queries see; a query's position is that of the key it stands at."""
    seen = key < mask.keys
    if config.HAS_LEFT:
        seen = seen & (key >= query - mask.left)
    if config.HAS_RIGHT:
        seen = seen & (key <= query + mask.right)
    return seen


@triton.jit
def tile_offsets(strides, ROWS: tl.constexpr, FEATURES: tl.constexpr, config: tl.constexpr):
    """Returns offsets (ROWS, FEATURES) within a tile."""
    return offsets_of(strides, ROWS, FEATURES, config.VEC, config.UNIT, config.WIDE)


@triton.jit
def offsets_of(strides, ROWS: tl.constexpr, FEATURES: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """Returns offsets (ROWS, FEATURES) within a tile, in 64 bits if ``WIDE``: 32 bits take fewer registers."""
    stride_row, stride_feature = strides.n, strides.f
    row = tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    if WIDE:
        row = row.to(tl.int64)
    else:
        stride_row = stride_row.to(tl.int32)
        stride_feature = stride_feature.to(tl.int32)
    if not UNIT:
        feature = feature * stride_feature
    return (row * (stride_row * VEC))[:, None] + feature[None, :]


@triton.jit
def load_tile(pointers, row, rows, F: tl.constexpr, MASKED: tl.constexpr):
    """Returns the tile from row number ``row`` of ``rows`` on, with zeros outside. Unless ``MASKED``, all rows are there."""
    ROWS: tl.constexpr = pointers.shape[0]
    FEATURES: tl.constexpr = pointers.shape[1]
    there = (row + tl.arange(0, ROWS) < rows)[:, None]
    inside = (tl.arange(0, FEATURES) < F)[None, :]
    if MASKED and F != FEATURES:
        tile = tl.load(pointers, mask=there & inside, other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=there, other=0.0)
    elif F != FEATURES:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_factor(ptr, x, row, rows, F: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the tile at ``ptr`` of `Rows` as a factor of a `product`: one tile, or bf16 terms made before or here."""
    if PRECISION == "3-term" or PRECISION == "2-term":
        factor = ()
        for i in tl.static_range(2 if PRECISION == "2-term" else 3):
            factor += (load_tile(ptr + i * x.term + x.offsets, row, rows, F, MASKED),)
    elif PRECISION == "3-term here":
        factor = terms_of(load_tile(ptr + x.offsets, row, rows, F, MASKED), 3)
    else:
        factor = load_tile(ptr + x.offsets, row, rows, F, MASKED)
    return factor


@triton.jit
def as_factor(tile, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a float32 tile as a factor of a `product` with one in ``dtype``."""
    if PRECISION == "3-term" or PRECISION == "3-term here":
        factor = terms_of(tile, 3)
    elif PRECISION == "2-term":
        factor = terms_of(tile, 2)
    elif PRECISION == "tf32" and dtype == tl.float32:
        factor = round_to_tf32(tile)
    else:
        factor = round_to(tile, dtype)
    return factor


@triton.jit
def transpose(factor, PRECISION: tl.constexpr):
    """Returns a factor of a `product`, transposed."""
    if PRECISION == "3-term" or PRECISION == "3-term here" or PRECISION == "2-term":
        terms = ()
        for i in tl.static_range(len(factor)):
            terms += (factor[i].T,)
        factor = terms
    else:
        factor = factor.T
    return factor


@triton.jit
def store_tile(pointers, tile, row, rows, F: tl.constexpr):
    """Store the rows of a tile that are there, the first of them number ``row`` of ``rows``, in the dtype of memory."""
    ROWS: tl.constexpr = pointers.shape[0]
    FEATURES: tl.constexpr = pointers.shape[1]
    mask = (row + tl.arange(0, ROWS) < rows)[:, None]
    if F != FEATURES:
        mask = mask & (tl.arange(0, FEATURES) < F)[None, :]
    tl.store(pointers, round_to(tile, pointers.dtype.element_ty), mask=mask)


@triton.jit
def base_of(x, batch, row, head, strides, VEC: tl.constexpr):
    """Returns the address of feature 0 of a row, in 64 bits."""
    return x + batch.to(tl.int64) * (strides.b * VEC) + row.to(tl.int64) * (strides.n * VEC) \
        + head.to(tl.int64) * (strides.h * VEC)  # fmt: skip


@triton.jit
def term_stride(sizes, length, heads, F: tl.constexpr, group=1):
    """Returns the distance from a term to the next of a tensor (B, length, heads // group, F)."""
    return tl.cast(sizes.batch_size, tl.int64) * length * (heads // group) * F


@triton.jit
def part_base(x, batch, row, head, split, split_stride, strides, config: tl.constexpr):
    """Returns the address of feature 0 of a row of a result or, if it is split, of one of its parts."""
    return base_of(x, batch, row, head, strides, config.VEC) + split * (split_stride * config.VEC)


@triton.jit
def row_offsets(batch, token, head, strides, VEC: tl.constexpr):
    """Returns offsets (R,) of rows, each of any batch entry, head and token."""
    return batch * (strides.b * VEC) + token * (strides.n * VEC) + head * (strides.h * VEC)


@triton.jit
def element_offsets(batch, token, head, strides, feature, VEC: tl.constexpr, UNIT: tl.constexpr):
    """Returns offsets (R, F) of the features (F,) of rows."""
    return (
        row_offsets(batch, token, head, strides, VEC)[:, None] + (feature if UNIT else feature * strides.f)[None, :]
    )
