"""Tiles of linear attention's kernels, as data."""

from __future__ import annotations

from typing import NamedTuple


class LinearTile(NamedTuple):
    """Tiles of a launch, and options that it is compiled with."""

    tokens: int
    columns: int  # features of a result that a program computes, of each part where there are two
    warps: int
    stages: int


class Encoder(NamedTuple):
    """Warps that encode tiles on Hopper, ahead of those that multiply."""

    warps: int
    registers: int  # of a thread
    groups: int  # registers of a thread of the other groups, where there are two kinds of them


_ENCODER = Encoder(4, 96, 0)
HOPPER = {
    "none": {"product": Encoder(4, 128, 0), "keys": Encoder(4, 88, 200)},
    "head": {"product": Encoder(4, 128, 0), "keys": Encoder(4, 72, 208)},
    "token": {"product": Encoder(8, 64, 0), "keys": Encoder(4, 72, 208)},
}
"""Encoders by decay and kernel. With 8 registers fewer for groups they spill: keys take half as long again."""
CURVED_PRODUCT = Encoder(8, 64, 0)
"""The encoder of ``product`` with an activation that takes an exponential and a quotient, with any decay."""
PARTS = Encoder(8, 48, 208)
"""The encoder of the kernel whose states of cosines and sines are transposed, with any decay."""


def encoder_of(kernel: str, decay: str, activation: str) -> Encoder:
    """Returns the encoding warps of a kernel: ``product``, ``decoded``, ``keys``, ``sums`` or ``parts``."""
    if kernel == "product" and activation in ("sigmoid", "silu"):
        return CURVED_PRODUCT
    return PARTS if kernel == "parts" else HOPPER[decay].get(kernel, _ENCODER)


LEAST = 16
"""The least size of every side of a product of tiles."""

CHUNK = 256
"""The fewest tokens of a chunk."""

CALL = 16384
"""Tokens of a call, for the choice of chunks, if its sequences are shorter: those of a usual batch."""

LEAST_CHUNKS = 4
"""The fewest chunks of a sequence that is cut, if it has the tokens: see `chunk_of`."""

DECAY_CHUNK = 32
"""Tokens of a chunk where the gradient of decays is wanted, which needs a state for each."""

STEPS = 4
"""The most tokens of a sequence that are computed one by one."""

SHORT = 16
"""The most tokens of a sequence for which tiles of `LEAST` tokens are used: steps of decoding."""

PIECE = 32
"""The most rows of a tile that products add up over: see `triton.tiles`."""

WIDE_PIECE = 128
"""Rows of a tile on Hopper and later, where gradients of encoded rows are made of numbers of 16 bits."""

# By kernel, whether numbers have 16 bits, and the features of a state's side that comes in pieces: those of φ, or
# of a value where φ's parts are the columns. What a row of the table says of wider states holds for the narrower.
_TILES: dict[tuple[str, bool], list[tuple[int, LinearTile]]] = {
    ("outputs", True): [(128, LinearTile(32, 128, 8, 3)), (256, LinearTile(16, 128, 8, 2))],
    ("outputs", False): [(256, LinearTile(16, 64, 8, 1))],
    ("wide", True): [(128, LinearTile(32, 64, 8, 2))],
    ("decoded", True): [(128, LinearTile(16, 32, 4, 1)), (256, LinearTile(16, 64, 8, 1))],
    ("decoded", False): [(256, LinearTile(16, 64, 8, 1))],
    ("sums", True): [(128, LinearTile(32, 128, 8, 2)), (256, LinearTile(16, 64, 8, 2))],
    ("sums", False): [(256, LinearTile(16, 64, 8, 1))],
    ("decays", True): [(256, LinearTile(32, 64, 8, 1))],
    ("decays", False): [(256, LinearTile(32, 32, 8, 1))],
}


def tile_of(kernel: str, half: bool, rows: int, columns: int, tokens: int) -> LinearTile:
    """Returns tiles of a launch.

    Args:
        kernel: ``outputs``, ``decoded`` (``wide`` with pieces of `WIDE_PIECE`), ``sums`` or ``decays``.
        half: Whether numbers have 16 bits.
        rows: Features of the side of a state that comes in pieces.
        columns: And of the other, of each part of it.
        tokens: Of a sequence.
    """
    tile = next(tile for most, tile in _TILES[kernel, half] if rows <= most)
    tile = tile._replace(columns=min(tile.columns, in_power_of_two(columns)))
    if tile.columns < 64 and kernel != "decays":
        tile = tile._replace(tokens=LEAST, warps=4)
    if tokens <= SHORT:
        tile = tile._replace(tokens=LEAST, stages=1)
    return tile


def is_held(numbers: int, half: bool, room: int) -> bool:
    """Returns whether a state of so many numbers fits in ``room`` bytes of shared memory.

    What all tiles multiply with, as without causality, the compiler keeps there. A float32 takes up to 6.3 bytes,
    as it comes in terms, and a number of 16 bits 2.2. Where each tile loads the state, both passes of 128 float32
    features take 1.10 times as long on an H100, and 1.34 times with cosines.
    """
    return numbers * (2.5 if half else 7) <= room


def step_tile(rows: int, columns: int) -> LinearTile:
    """Returns the tile of a step, for a state of so many rows and columns.

    In any batch: other columns would add up features in another order. On an H200, over nine sizes of 1 to 64
    entries, 16 columns took 0.95 to 1.22 times as long, 64 columns 0.97 to 1.17. Cosines of 128 features have twice
    the rows: on an H100, 64 heads and 1, 8 and 64 entries took 15.6, 71 and 506 µs with four warps and 13.3, 55 and
    369 with eight. Rotations take up to 1.04 times as long with eight.
    """
    return LinearTile(1, min(32, in_power_of_two(columns)), 8 if rows >= 256 else 4, 1)


def piece_of(features: int, wide: bool = False) -> int:
    """Returns the features of a piece of a side of a state."""
    return min(WIDE_PIECE if wide else PIECE, in_power_of_two(features))


def in_power_of_two(features: int) -> int:
    """Returns the block that holds so many features."""
    return max(LEAST, 1 << (features - 1).bit_length())


def chunk_of(tokens: int, heads: int, values: int, multiprocessors: int, summed: bool = False) -> int:
    """Returns the tokens of a chunk: all tokens, if that makes enough programs.

    It does not depend on the batch, so that a sequence has the same bits alone and among others: a call is taken to
    have `CALL` tokens in all. There are no more chunks than run at a time, and fewer than `LEAST_CHUNKS` are not
    worth their states. On an H100, with 16384 tokens and 128 features (rotate, decay of a head), one sequence of 16
    to 32 heads takes 0.29 to 0.52 of its time as a whole, two take 0.57 to 1.06, four 1.1 to 1.6.

    A sequence that is ``summed`` in any case is part of a long one that comes alone: two chunks are worth it then.
    """
    programs = max(heads * -(-values // 128), 1) * (1 if summed else max(CALL // max(tokens, 1), 1))
    wanted = multiprocessors // programs
    splits = min(wanted, tokens // CHUNK) if wanted >= LEAST_CHUNKS or summed else 1
    return max(1, -(-tokens // (max(splits, 1) * LEAST * 4)) * LEAST * 4)
