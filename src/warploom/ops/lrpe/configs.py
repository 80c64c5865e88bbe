"""Tiles of LRPE's kernels; measured on an H200 (see the engineering notes)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import triton

from warploom.ops.lrpe.call import LrpeCall

T = TypeVar("T")


def _first(table: Iterable[tuple[tuple[Any, ...], T]], *call: Any) -> T:
    """Returns what the first row that fits a call holds; None fits all."""
    return next(found for row, found in table if all(x is None or x == y for x, y in zip(row, call, strict=True)))


# ----------------------------------------------------------------------------------------------------------
# Without softmax over the sequence
# ----------------------------------------------------------------------------------------------------------


class LrpeTile(NamedTuple):
    """Work and threads of a program."""

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
    (("tiny", "cosine", None, "softmax", None), LrpeTile(4, 4, 8)),  # a row in one warp
    (("tiny", "cosine", None, None, None), LrpeTile(4, 4, 4)),
    (("tiny", None, None, None, None), LrpeTile(2, 4, 4)),
    (("small", "cosine", True, None, None), LrpeTile(2, 2)),
    (("small", "cosine", False, None, None), LrpeTile(4, 2)),
    (("small", None, True, "none", None), LrpeTile(3, 4, 8)),
    (("small", None, False, "none", None), LrpeTile(4, 4, 8)),
    (("small", None, True, None, None), LrpeTile(2, 4, 8)),
    (("small", None, False, "softmax", None), LrpeTile(3, 4, 8)),
    (("small", None, False, None, None), LrpeTile(2, 2, 8)),
    (("large", "cosine", True, None, 3), LrpeTile(4, 2)),
    (("large", "cosine", True, "softmax", None), LrpeTile(3, 1)),
    (("large", "cosine", True, None, None), LrpeTile(2, 1)),
    (("large", "cosine", False, "softmax", None), LrpeTile(4, 2)),
    (("large", "cosine", False, None, None), LrpeTile(3, 2)),
    (("large", None, True, "none", 3), LrpeTile(3, 1)),
    (("large", None, None, "none", None), LrpeTile(2, 1)),
    (("large", None, True, "softmax", None), LrpeTile(2, 2)),
    (("large", None, True, None, None), LrpeTile(3, 2)),
    (("large", None, False, None, 2), LrpeTile(3, 2)),
    (("large", None, False, None, 3), LrpeTile(3, 2)),
    (("large", None, False, None, None), LrpeTile(2, 2)),
)


def tile_of(call: LrpeCall, backward: bool, theta_gradient: bool) -> LrpeTile:
    """Returns the tile for a call."""
    x, kind = call.inputs.x, call.options.kind
    wide = x.element_size() > 2
    if theta_gradient:  # more vectors, or more than eight angles a thread, would spill registers
        return LrpeTile(2 if wide else 3, max(1, triton.next_power_of_2(call.angles) // 256))
    size = "large"
    if x.numel() <= _SMALL and x.shape[0] >= _SHARING and not wide and kind != "interleaved":
        size = "tiny" if x.numel() <= _TINY else "small"
    return _first(_TILES, size, kind, backward, call.options.activation, min(call.axes, 3))


# ----------------------------------------------------------------------------------------------------------
# Softmax over the sequence
# ----------------------------------------------------------------------------------------------------------


class SequenceTile(NamedTuple):
    """Cuts of a sequence, and what a program computes at a time."""

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
    """Returns the tile for a call.

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


class SlabShape(NamedTuple):
    """Tiles of softmax over the sequence for Hopper."""

    width: int  # angles
    tokens: int
    programs: int  # of a multiprocessor, at once


_SLAB_SHAPES = (
    # kind, backward, tokens up to 512, up to 1024
    (("cosine", True, None, None), SlabShape(32, 256, 4)),
    (("rotate", True, None, None), SlabShape(32, 256, 3)),
    (("cosine", False, True, None), SlabShape(32, 512, 6)),
    (("rotate", False, True, None), SlabShape(16, 512, 6)),
    (("cosine", False, None, True), SlabShape(64, 256, 5)),
    (("rotate", False, None, True), SlabShape(32, 256, 5)),
    (("cosine", False, None, None), SlabShape(64, 256, 6)),
    (("rotate", False, None, None), SlabShape(32, 512, 3)),
)


def slab_shape(kind: str, backward: bool, tokens: int) -> SlabShape:
    """Returns the tiles of a call on Hopper's kernels."""
    return _first(_SLAB_SHAPES, kind, backward, tokens <= 512, tokens <= 1024)
