"""Tiles of the attention kernels, by GPU, dtype, features and rank: measured on an H200, compiled for others."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Tiles of a kernel for every GPU: queries and keys, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class HopperTiles(NamedTuple):
    """Tiles of a kernel for Hopper that loops over keys."""

    keys: int
    stages: int
    """Tiles of keys, and as many of values."""
    factor_stages: int
    """Tiles of feature factors of each."""


PROGRAMS = 4
"""Programs per multiprocessor among which the keys and groups of heads of the backward are shared, at most."""
HOPPER = HopperTiles(64, 2, 2)
"""Of the forward and the query kernel."""
HOPPER_KEY_STAGES = 3
"""Of the key kernel: tiles of 64 queries."""
HOPPER_RANKS = (1, 2, 4)
HOPPER_FEATURES = range(33, 129)
"""Fewer would leave tiles of 64 half empty."""
HOPPER_FACTOR_ROWS = 64
"""Rows of a tile of feature factors, all ranks together."""


COPIED = 4
"""Bytes that must lie together in memory, wherever a row begins, for a load to run ahead through shared memory. The
compiler knows that of tensors that begin at multiples of 16 bytes."""
WIDE = 64
"""Features of a tile that is not narrow."""
NARROW_STORED = Tiles(32, 64, 4, 2)
"""Of the forward and query kernels for 16 bits where a loop itself stores narrow tiles in shared memory. The
assembler of CUDA 12.8 (Triton 3.6 and 3.7) may lose the address from which `wgmma` reads them: see
`warploom.testing.descriptors`. For 32 queries `mma` is taken."""


def forward_tiles(dtype: torch.dtype, features: int, rank: int, arch: int, narrow_stored: bool) -> Tiles:
    """Of the forward kernel, for the larger of D and E, padded, and the larger rank."""
    if dtype == torch.float32:
        return _float32_tiles(features, 2 if 80 < arch < 90 and rank == 1 and features <= 16 else 1)
    if features > 128:
        return Tiles(32, 16, 8, 2)
    if rank > 2 or not 90 <= arch < 120:  # without warp-group products there are no registers for more
        return Tiles(64, 32, 8, _stages(features, rank, arch))
    if narrow_stored:
        return NARROW_STORED
    return Tiles(64, 64, 4, 3) if rank == 1 else Tiles(128, 64, 8, 3)


def query_tiles(dtype: torch.dtype, features: int, rank: int, arch: int, narrow_stored: bool) -> Tiles:
    """Of the query kernel."""
    blackwell = arch >= 100  # where the registers of Hopper's choices do not suffice
    if dtype == torch.float32:
        return _float32_tiles(features, 2 if blackwell and rank <= 8 and features <= 32 else 1)
    if features > 128:
        return Tiles(32, 16, 8, 1)
    if rank > 2 or not 90 <= arch < 120:
        return Tiles(64, 32, 8, _stages(features, rank, arch))
    if narrow_stored:
        return NARROW_STORED
    return Tiles(64, 64, 8 if blackwell and features > 64 else 4, 2) if rank == 1 else Tiles(128, 64, 8, 2)


def key_tiles(dtype: torch.dtype, features: int, rank: int) -> Tiles:
    """Of the key kernel."""
    if dtype == torch.float32:
        return Tiles(16, 16, 8, 1) if rank <= 2 else Tiles(16, 32, 8, 1)
    if features > 128:
        return Tiles(32, 16, 8, 1)
    if rank <= 2:
        return Tiles(32, 64, 4, 3)
    return Tiles(32, 16, 8, 2 if features > 64 else 1)


def _float32_tiles(features: int, stages: int) -> Tiles:
    return Tiles(16, 16, 8, stages) if features > 64 else Tiles(32, 32, 8, stages)


def _stages(features: int, rank: int, arch: int) -> int:
    """How many tiles of keys' and values' factors of 16 bits, larger with every rank, fit in shared memory."""
    available = 227 if 90 <= arch < 120 else 163 if arch == 80 else 99  # KiB
    return 2 if rank <= 8 and features * (288 + 130 * rank) <= 1024 * available else 1
