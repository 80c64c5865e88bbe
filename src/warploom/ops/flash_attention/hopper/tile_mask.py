"""Masks by tiles of 128 queries by 128 keys, of which kernels go over those that see something.

A kernel that owns queries has lists of the columns of tiles that a row of them sees, one that owns keys has lists of the
rows. Steps of a loop are numbered along a list; a tile of the mask is some steps where a kernel's tiles are smaller.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.ops.flash_attention.hopper.tiles import ROWS, clear_hidden_rows

TILE = gl.constexpr(128)
EVERYTHING = gl.constexpr(-1)
"""Entry of a tile that sees all keys; below it, that of one that sees none."""


class TileMaskSizes(NamedTuple):
    """Sizes of a mask, and how many masks of a head lie between those of entries and of heads, 0 for one for all."""

    rows: gl.int32  # of tiles
    columns: gl.int32
    of_entry: gl.int32
    of_head: gl.int32


class TileMask(NamedTuple):
    """Tensors of a `BlockMask`, with the lists that a kernel goes over."""

    tiles: gl.tensor  # (B, H, R, C)
    listed: gl.tensor  # (B, H, R, 2 + 2 C), or (B, H, C, 1 + 2 R) where groups of warps own keys
    bits: gl.tensor  # (P, 128, 4)
    column_bits: gl.tensor  # (B, H, C, 4)
    sizes: TileMaskSizes


class TileList(NamedTuple):
    """The tiles of a row, or of a column, that see something. Of a row, those that see everything come first."""

    listed: gl.tensor
    entries: gl.tensor  # those of all tiles of the row or column
    stride: gl.int32  # from one of them to the next
    count: gl.int32
    whole: gl.int32  # of a row: how many see everything
    column_bits: gl.tensor  # of all columns of the head


@gluon.jit
def row_list(mask, batch, head, row):
    """Returns the list of a row of tiles."""
    sizes = mask.sizes
    of_head = (batch * sizes.of_entry + head * sizes.of_head).to(gl.int64)
    at = of_head * sizes.rows + row
    first = at * sizes.columns
    seen = mask.column_bits + of_head * (sizes.columns * 4)
    listed = mask.listed + at * (2 * sizes.columns + 2)
    whole = listed + sizes.columns + 1
    return TileList(whole + 1, mask.tiles + first, row * 0 + 1, gl.load(listed), gl.load(whole), seen)


@gluon.jit
def column_list(mask, batch, head, column):
    """Returns the list of a column of tiles."""
    sizes = mask.sizes
    of_head = (batch * sizes.of_entry + head * sizes.of_head).to(gl.int64)
    at = of_head * sizes.columns + column
    first = of_head * sizes.rows * sizes.columns + column
    seen = mask.column_bits + of_head * (sizes.columns * 4)
    listed = mask.listed + at * (2 * sizes.rows + 1)
    return TileList(listed + 1, mask.tiles + first, sizes.columns, gl.load(listed), column * 0, seen)


@gluon.jit
def place_in_list(listed, count, tile):
    """Returns how many of a list's tiles, which are in order, come before a tile."""
    low = count * 0
    while low < count:
        middle = (low + count) // 2
        before = gl.load(listed + middle) < tile
        low = gl.where(before, middle + 1, low)
        count = gl.where(before, count, middle)
    return low


@gluon.jit
def tiles_before_in_row(tiles, step, rows, BLOCK: gl.constexpr):
    """Returns how many tiles that see something come before that of a column's step in its row."""
    return gl.load(tiles.listed + rows + step // (TILE // BLOCK))


@gluon.jit
def key_at(tiles, step, queries, BLOCK: gl.constexpr):
    """Returns the first key of a step of a row's list, in blocks."""
    STEPS: gl.constexpr = TILE // BLOCK
    place = step // STEPS
    place += gl.where(place >= queries.whole, queries.skipped, 0)
    return gl.load(tiles.listed + place) * TILE + step % STEPS * BLOCK


@gluon.jit
def tile_at(tiles, step, BLOCK: gl.constexpr):
    """Returns the first row of a step of a list, in blocks."""
    STEPS: gl.constexpr = TILE // BLOCK
    return gl.load(tiles.listed + step // STEPS) * TILE + step % STEPS * BLOCK


@gluon.jit
def entry_at(tiles, row):
    """Returns the entry of the tile that a row is of: see `BlockMask.tiles`."""
    return gl.load(tiles.entries + row // TILE * tiles.stride)


@gluon.jit
def clear_unseen(tile, n, tiles):
    """Make rows of keys or values ``n …`` in shared memory zero that no query sees: NaN there times 0 is NaN."""
    WORDS: gl.constexpr = tile.shape[0] // 32
    words = tiles.column_bits + n // 32
    all_seen = gl.load(words)
    for i in gl.static_range(1, WORDS):
        all_seen = all_seen & gl.load(words + i)
    if all_seen != -1:
        clear_hidden_rows(tile, words)


@gluon.jit
def load_words(tiles, mask, m, n, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the words that say which keys ``n …`` the 64 queries ``m …`` see."""
    entry = entry_at(tiles, n)
    query = m % TILE + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    words = mask.bits + gl.maximum(entry, 0).to(gl.int64) * (TILE * 4) + n % TILE // 32
    there = (query >= 0) & (entry >= 0)
    without = gl.where(entry == EVERYTHING, -1, 0) + query * 0
    found = ()
    for i in gl.static_range(BLOCK_N // 32):
        found += (gl.load(words + query * 4 + i, mask=there, other=without),)
    return found


@gluon.jit
def are_seen(words, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns which keys of a tile 64 queries see by these words."""
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
    found = words[0][:, None] + gl.zeros_like(key)
    for i in gl.static_range(1, BLOCK_N // 32):  # of each element the compiler knows which word it is of
        found = gl.where(key // 32 == i, words[i][:, None], found)
    return ((found >> (key % 32)) & 1) != 0


@gluon.jit
def are_seen_transposed(mask, entry, n, m, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns which of the 64 keys ``n …`` the queries ``m …`` see in a tile with bits."""
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    query = m % TILE + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    words = mask.bits + entry.to(gl.int64) * (TILE * 4) + n % TILE // 32 + query * 4
    found = gl.where(key < 32, gl.load(words)[None, :], gl.load(words + 1)[None, :])
    return ((found >> (key % 32)) & 1) != 0
