"""Tiles of LRPE's kernels; measured on an H200 (see "How it reaches the limit" in the engineering notes)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

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
    # size, kind, backward, activation, least axes; the first row that fits holds, and None fits all
    (("tiny", "cosine", None, "softmax", 1), Tile(4, 4, 8)),  # a row in one warp
    (("tiny", "cosine", None, None, 1), Tile(4, 4, 4)),
    (("tiny", None, None, None, 1), Tile(2, 4, 4)),
    (("small", "cosine", True, None, 1), Tile(2, 2)),
    (("small", "cosine", False, None, 1), Tile(4, 2)),
    (("small", None, True, "none", 1), Tile(3, 4, 8)),
    (("small", None, False, "none", 1), Tile(4, 4, 8)),
    (("small", None, True, None, 1), Tile(2, 4, 8)),
    (("small", None, False, "softmax", 1), Tile(3, 4, 8)),
    (("small", None, False, None, 1), Tile(2, 2, 8)),
    (("large", "cosine", True, None, 3), Tile(4, 2)),
    (("large", "cosine", True, "softmax", 1), Tile(3, 1)),
    (("large", "cosine", True, None, 1), Tile(2, 1)),
    (("large", "cosine", False, "softmax", 1), Tile(4, 2)),
    (("large", "cosine", False, None, 1), Tile(3, 2)),
    (("large", None, True, "none", 3), Tile(3, 1)),
    (("large", None, None, "none", 1), Tile(2, 1)),
    (("large", None, True, "softmax", 1), Tile(2, 2)),
    (("large", None, True, None, 1), Tile(3, 2)),
    (("large", None, False, None, 2), Tile(3, 2)),
    (("large", None, False, None, 1), Tile(2, 2)),
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
    call = (size, kind, backward, activation)
    return next(
        tile
        for (*row, least), tile in _TILES
        if axes >= least and all(wanted in (None, found) for wanted, found in zip(row, call))
    )


# ----------------------------------------------------------------------------------------------------------
# Softmax over the sequence
# ----------------------------------------------------------------------------------------------------------


class SequenceTile(NamedTuple):
    """Of a kernel for every GPU."""

    numbers: int  # of x
    warps: int
    stages: int = 1  # loads under way at once in a loop over tiles


_SEQUENCE_TILES = {
    # kernel, and whether rows are wide; whether the kind is cosine, and backward
    ("strip", True): {
        (True, False): SequenceTile(1024, 4, 2), (True, True): SequenceTile(1024, 4),
        (False, False): SequenceTile(1024, 4, 2), (False, True): SequenceTile(1024, 4),
    },
    ("strip", False): {
        (True, False): SequenceTile(4096, 4), (True, True): SequenceTile(4096, 8),
        (False, False): SequenceTile(2048, 4, 5), (False, True): SequenceTile(4096, 4),
    },
    ("apply", True): dict.fromkeys(
        ((True, False), (True, True), (False, False), (False, True)), SequenceTile(2048, 4)
    ),
    ("apply", False): {
        (True, False): SequenceTile(4096, 2), (True, True): SequenceTile(1024, 1),
        (False, False): SequenceTile(1024, 1), (False, True): SequenceTile(4096, 4),
    },
    ("reduce", True): dict.fromkeys(
        ((True, False), (True, True), (False, False), (False, True)), SequenceTile(512, 4)
    ),
    ("reduce", False): {
        (True, False): SequenceTile(2048, 2, 3), (True, True): SequenceTile(2048, 2, 3),
        (False, False): SequenceTile(4096, 2, 3), (False, True): SequenceTile(2048, 2, 3),
    },
}  # fmt: skip


def sequence_tile(kernel: str, kind: str, backward: bool, wide: bool) -> SequenceTile:
    """The tile of the kernel ``strip``, ``reduce`` or ``apply``.

    ``wide``: exact, or rows that are not read in vectors. Both take more registers, and the tiles are small enough
    that none are spilled.
    """
    return _SEQUENCE_TILES[kernel, wide][kind == "cosine", backward]


def strip_tokens(backward: bool) -> int:
    """Sequences up to this long are walked over twice by one program; longer ones take three launches."""
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
