"""Tiles of the delta rule's kernels, as data."""

from __future__ import annotations

from typing import NamedTuple

LEAST = 16
"""The least size of every side of a product of tiles."""

CHUNKS = {True: 32, False: 16}
"""Tokens of a chunk, by whether numbers have 16 bits: the most rows of a product are 32 (`triton.tiles`), and tiles
of float32 factors, which come in three terms, have to fit in registers."""

SHORT = 512
"""Tokens of a sequence, at most, whose states are in float32 where the gradient of decays is wanted.

In a short sequence that gradient comes from states for the most part, and their rounding to bfloat16 would be seen.
"""

MOST_BYTES = 2**33
"""Bytes of buffers between launches, at most, unless a single batch entry has more."""

STEPS = 4
"""Tokens of a sequence, at most, that are taken one by one."""


class DeltaTile(NamedTuple):
    """Tile of a launch, and options that it is compiled with."""

    features: int  # of a query or key, at most
    columns: int  # features of a value, at most
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most: fewer let more programs run beside each other


FEATURE_DECAYS = " with decays of features"
"""Behind the name of a kernel, where such decays have tiles of their own."""

# By kernel, whether numbers have 16 bits, and the most features of a query or key.
_TILES: dict[tuple[str, bool], list[tuple[int, DeltaTile]]] = {
    ("chunk", True): [(256, DeltaTile(128, 64, 2, 1))],
    ("chunk" + FEATURE_DECAYS, True): [(256, DeltaTile(32, 64, 2, 1, 168))],
    ("chunk", False): [(256, DeltaTile(32, 32, 4, 1))],
    ("scan", True): [(128, DeltaTile(256, 32, 4, 3)), (256, DeltaTile(256, 32, 4, 1))],
    ("scan", False): [(128, DeltaTile(256, 32, 8, 1)), (256, DeltaTile(256, 16, 8, 1))],
    ("pair", True): [(256, DeltaTile(64, 64, 4, 1))],
    ("pair", False): [(256, DeltaTile(32, 32, 4, 1))],
    ("feature", True): [(256, DeltaTile(64, 32, 2, 1))],
    ("feature" + FEATURE_DECAYS, True): [(256, DeltaTile(64, 32, 4, 1))],
    ("feature", False): [(256, DeltaTile(32, 16, 4, 1))],
    ("encoding", True): [(256, DeltaTile(256, 16, 4, 1))],
    ("encoding", False): [(256, DeltaTile(256, 16, 4, 1))],
    ("step", True): [(256, DeltaTile(256, 32, 4, 1))],
    ("step", False): [(256, DeltaTile(256, 32, 4, 1))],
}


def tile_of(kernel: str, decay: str, half: bool, features: int, values: int) -> DeltaTile:
    """Returns the tile of a launch, by kernel, decay, whether numbers have 16 bits, and features."""
    tiles = _TILES.get((kernel + FEATURE_DECAYS, half)) if decay == "feature" else None
    tile = next(tile for most, tile in tiles or _TILES[kernel, half] if features <= most)
    return tile._replace(
        features=min(tile.features, in_power_of_two(features)), columns=min(tile.columns, in_power_of_two(values))
    )


def in_power_of_two(features: int) -> int:
    """Returns the block that holds so many features."""
    return max(LEAST, 1 << (features - 1).bit_length())
