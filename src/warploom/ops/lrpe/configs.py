"""Tiles of LRPE's kernels; measured on an H200 (see "How it reaches the limit" in the engineering notes)."""

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
    """Of a kernel for every GPU."""

    numbers: int  # of x
    warps: int
    stages: int = 1  # loads under way at once in a loop over tiles


_SEQUENCE_TILES = (
    # kernel, whether rows are wide, whether the kind is cosine, backward
    (("strip", True, None, False), SequenceTile(1024, 4, 2)),
    (("strip", True, None, True), SequenceTile(1024, 4)),
    (("strip", False, True, True), SequenceTile(4096, 8)),
    (("strip", False, False, False), SequenceTile(2048, 4, 5)),
    (("strip", False, None, None), SequenceTile(4096, 4)),
    (("apply", True, None, None), SequenceTile(2048, 4)),
    (("apply", False, True, False), SequenceTile(4096, 2)),
    (("apply", False, False, True), SequenceTile(4096, 4)),
    (("apply", False, None, None), SequenceTile(1024, 1)),
    (("reduce", True, None, None), SequenceTile(512, 4)),
    (("reduce", False, False, False), SequenceTile(4096, 2, 3)),
    (("reduce", False, None, None), SequenceTile(2048, 2, 3)),
)


def sequence_tile(kernel: str, kind: str, backward: bool, wide: bool) -> SequenceTile:
    """The tile of the kernel ``strip``, ``reduce`` or ``apply``.

    ``wide``: exact, or rows that are not read in vectors. Both take more registers, and the tiles are small enough
    that none are spilled.
    """
    return _first(_SEQUENCE_TILES, kernel, wide, kind == "cosine", backward)


def strip_tokens(backward: bool) -> int:
    """Sequences up to this long are read twice by one program; longer ones take three launches."""
    return 512 if backward else 2048


CHUNKS = 16
"""Chunks to reduce per multiprocessor, at least."""

MAX_CHUNK_ROWS = 512
"""Tokens of a chunk, at most."""

STRIP_BYTES = 64
"""Bytes of a row that a strip takes from each member of its pairs."""

BLOCK_P = 16
"""Partial results combined at once."""


class HopperTile(NamedTuple):
    """What a program of a kernel for Hopper keeps, and how it goes down it."""

    width: int  # angles, of both members of their pairs
    tokens: int
    piece: int  # tokens of a turn of its loops
    warps: int = 4
    vec: int = 4  # adjacent features of a thread
    registers: int = 80  # of a thread, at most
    parts_first: bool = False  # whether neighbouring programs take parts of one strip, or strips of the same tokens


_ANY = 2**31  # more tokens than there are

_HOPPER_TILES = {
    ("rotate", False): {
        256: HopperTile(16, 256, 64),
        2048: HopperTile(32, 256, 64),
        _ANY: HopperTile(32, 512, 64, 8),
    },
    ("cosine", False): {
        256: HopperTile(32, 256, 64),
        1024: HopperTile(32, 512, 64),
        2048: HopperTile(64, 256, 32),
        _ANY: HopperTile(64, 512, 32, 8),
    },
    ("rotate", True): {
        1024: HopperTile(32, 256, 32, 8, 2),
        8192: HopperTile(32, 256, 64, registers=128, parts_first=True),
        _ANY: HopperTile(32, 256, 32, 8, 2, parts_first=True),
    },
    ("cosine", True): {
        8448: HopperTile(32, 256, 64, registers=128, parts_first=True),
        _ANY: HopperTile(32, 512, 64, registers=128, parts_first=True),
    },
}
"""By kind, forward or backward, and the most tokens that they are for."""


def hopper_tile(kind: str, backward: bool, tokens: int, axes: int = 1, exact: bool = False) -> HopperTile | None:
    """The tile for so many tokens in so many axes; None where the kernels for every GPU may be faster.

    ``exact``: for theta's gradient, which a grid's backward leaves to those.
    """
    least, most = 64 if axes == 1 else 256, _ANY
    if backward and axes == 1:
        most = 33_024 if exact else 16_640
    elif backward and exact:
        return None
    if not least <= tokens <= most:
        return None
    return next(tile for most, tile in _HOPPER_TILES[kind, backward].items() if tokens <= most)
