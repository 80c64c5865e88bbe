"""Tiles of the kernels for Hopper, by kernel and features of a row; see the engineering notes."""

from __future__ import annotations

from typing import NamedTuple


class HopperTiles(NamedTuple):
    """Tiles into which a kernel for Hopper cuts its work."""

    groups: int  # of 64 rows; a group of warps each, or two that share the same rows
    box: int  # rows of the tiles that loops go over
    stages: int  # such tiles in flight


HOPPER = {
    "forward": {64: HopperTiles(3, 128, 2), 128: HopperTiles(2, 128, 2), 256: HopperTiles(2, 64, 2)},
    "key": {64: HopperTiles(2, 128, 2), 128: HopperTiles(2, 64, 3), 256: HopperTiles(1, 64, 2)},
    "query": {64: HopperTiles(3, 64, 3), 128: HopperTiles(2, 64, 3), 256: HopperTiles(2, 64, 2)},
    "backward": {64: HopperTiles(2, 128, 2), 128: HopperTiles(2, 64, 2)},
}
"""Tiles by features; measured on an H200 (see the engineering notes).

For the gradient of queries with 256 features there is one stage less of values."""

HOPPER_IN_PIECES = {"forward": HopperTiles(2, 128, 2), "key": HopperTiles(1, 64, 3), "query": HopperTiles(2, 64, 3)}
"""Tiles with queries and keys of 192 features and values of 128."""

HOPPER_PARTS = {64: 2, 128: 1}
"""Buffers through which the backward's sums of a group are stored, by features."""

HOPPER_BIASED = {64: 2, 128: 4}
"""Tiles of a bias in flight in the backward, times the bytes of its numbers, by features; sums have one buffer beside them."""

HOPPER_SMALLER = {"forward": HopperTiles(2, 128, 3), "query": HopperTiles(2, 64, 3)}
"""Tiles with 64 features, where loops are short and uneven, or so few that they are split, or where larger tiles leave
too many multiprocessors idle in the last wave of a full attention."""

HOPPER_TERMS = {
    3: {64: HopperTiles(1, 64, 2), 128: HopperTiles(1, 32, 2)},
    2: {64: HopperTiles(1, 64, 3), 128: HopperTiles(1, 64, 2)},
}
"""Tiles of the backward kernels for float32, by terms of a factor and features."""
