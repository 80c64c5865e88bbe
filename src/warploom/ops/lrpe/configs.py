"""Tiles of LRPE's kernels; measured on an H200 (see the engineering notes)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import triton

T = TypeVar("T")


def _first(table: Iterable[tuple[tuple[Any, ...], T]], *call: Any) -> T:
    """What the first row that fits a call holds; None fits all."""
    return next(found for row, found in table if all(x is None or x == y for x, y in zip(row, call, strict=True)))


# ----------------------------------------------------------------------------------------------------------
# Without softmax over the sequence
# ----------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How much a program does, and in how many threads."""

    vectors: int  # of x to a row of angles
    warps: int
    access: int = 16  # bytes of features a thread


THETA_WARPS = 12
"""Warps per multiprocessor where theta's gradient is summed: as many as fit, for a second wave would run alone."""

_SMALL = 2**23  # elements, up to which the time of a single program shows
_TINY = 2**21  # elements, up to which most of a multiprocessor is idle
_SHARING = 4  # batch entries, from which programs with more vectors are not half empty

_TILES = (
    # size, kind, backward, activation, axes (3 for more too)
    (("tiny", "cosine", None, "softmax", None), Tile(4, 4, 8)),  # a row in one warp
    (("tiny", "cosine", None, None, None), Tile(4, 4, 4)),
    (("tiny", None, None, None, None), Tile(2, 4, 4)),
    (("small", "cosine", True, None, None), Tile(2, 2)),
    (("small", "cosine", False, None, None), Tile(4, 2)),
    (("small", None, True, "none", None), Tile(3, 4, 8)),
    (("small", None, False, "none", None), Tile(4, 4, 8)),
    (("small", None, True, None, None), Tile(2, 4, 8)),
    (("small", None, False, "softmax", None), Tile(3, 4, 8)),
    (("small", None, False, None, None), Tile(2, 2, 8)),
    (("large", "cosine", True, None, 3), Tile(4, 2)),
    (("large", "cosine", True, "softmax", None), Tile(3, 1)),
    (("large", "cosine", True, None, None), Tile(2, 1)),
    (("large", "cosine", False, "softmax", None), Tile(4, 2)),
    (("large", "cosine", False, None, None), Tile(3, 2)),
    (("large", None, True, "none", 3), Tile(3, 1)),
    (("large", None, None, "none", None), Tile(2, 1)),
    (("large", None, True, "softmax", None), Tile(2, 2)),
    (("large", None, True, None, None), Tile(3, 2)),
    (("large", None, False, None, 2), Tile(3, 2)),
    (("large", None, False, None, 3), Tile(3, 2)),
    (("large", None, False, None, None), Tile(2, 2)),
)


def tile_of(kind: str, activation: str, axes: int, backward: bool, theta_gradient: bool, x: torch.Tensor) -> Tile:
    """The tile for a call on ``x``, whose tokens have so many coordinates."""
    wide = x.element_size() > 2
    if theta_gradient:  # more vectors, or more than eight angles a thread, would spill registers
        angles = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
        return Tile(2 if wide else 3, max(1, triton.next_power_of_2(angles) // 256))
    size = "large"
    if x.numel() <= _SMALL and x.shape[0] >= _SHARING and not wide and kind != "interleaved":
        size = "tiny" if x.numel() <= _TINY else "small"
    return _first(_TILES, size, kind, backward, activation, min(axes, 3))


# ----------------------------------------------------------------------------------------------------------
# Softmax over the sequence
# ----------------------------------------------------------------------------------------------------------


class SequenceTile(NamedTuple):
    """How a sequence is cut, and what a program computes at a time."""

    width: int  # angles of a slab
    tokens: int  # of a part
    numbers: int  # of x in a block
    warps: int
    stages: int  # loads under way at once in loops over blocks
    programs: int  # of a multiprocessor, at once


_SEQUENCE_TILES = (
    # whether sequences are short, backward, rows wide, theta wants a gradient, the kind is cosine
    ((None, None, True, None, None), SequenceTile(16, 256, 1024, 4, 1, 4)),
    ((None, False, None, True, True), SequenceTile(64, 256, 1024, 4, 5, 4)),
    ((None, False, None, True, False), SequenceTile(32, 512, 1024, 4, 5, 4)),
    ((None, True, None, True, True), SequenceTile(32, 512, 512, 4, 3, 4)),
    ((None, True, None, True, False), SequenceTile(32, 512, 1024, 4, 3, 4)),
    ((True, False, None, None, None), SequenceTile(32, 512, 2048, 4, 3, 4)),
    ((True, True, None, None, True), SequenceTile(32, 512, 2048, 8, 3, 2)),
    ((True, True, None, None, False), SequenceTile(32, 512, 1024, 4, 3, 4)),
    ((False, None, None, None, True), SequenceTile(64, 256, 1024, 4, 5, 4)),
    ((False, False, None, None, False), SequenceTile(32, 512, 1024, 4, 5, 6)),
    ((False, True, None, None, False), SequenceTile(32, 512, 1024, 4, 3, 6)),
)


def sequence_tile(short: bool, backward: bool, wide: bool, theta_gradient: bool, kind: str) -> SequenceTile:
    """The tile for a call.

    ``short``: of one part, and not packed. ``wide``: in float32, or rows not read in vectors. Packed and wide
    rows, and exact sums for ``theta_gradient``, take more registers.
    """
    return _first(_SEQUENCE_TILES, short, backward, wide, theta_gradient, kind == "cosine")


SHORT_TOKENS = 512
"""Sequences up to this long are one part."""

MOST_PARTS = 32
"""Parts of a sequence, at most: each program reads the sums of all."""

MOST_STEPS = 128
"""Blocks of a part whose angles are turned on from block to block, at most: errors grow with their number."""
