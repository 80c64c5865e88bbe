"""Tiles of flash attention's kernels for every GPU, by kernel, GPU, dtype and features of a row; see the README."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Configuration(NamedTuple):
    """Tile sizes and launch options of one kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    whole: bool = False  # whether walks are not cut into parts


def configuration(
    kernel: str,
    arch: int,
    dtype: torch.dtype,
    features: int,
    product: str,
    plain: bool,
    few: bool = False,
    tiny: bool = False,
) -> Configuration:
    """The pinned tiles of a kernel.

    Args:
        kernel: ``forward``, ``query`` (gradient of q) or ``key`` (gradients of k and v).
        arch: Compute capability times ten.
        dtype: Of the tensors.
        features: The larger of D and E, up to a power of two, 16 at least.
        product: How float32 factors are multiplied, as in `warploom.device.product`.
        plain: Whether masks are those of a causal or full attention and D and E equal powers of two: what such
            kernels save in registers, larger tiles take.
        few: Whether walks `are_few_and_short`.
        tiny: Whether they `are_tiny`.
    """
    tuned = plain and 90 <= arch < 120
    # On Blackwell, where sums of 64 rows are in tensor memory, Triton turns float32's larger tiles into a trap.
    if dtype == torch.float32 and tuned and arch < 100 and features <= 128:
        if few and product == "pieces" and (tiny or kernel == "query"):
            return _FEW_PIECES[kernel]
        tables = {"pieces": _PLAIN_90_PIECES, "pairs": _PLAIN_90_PAIRS, "cut": _PLAIN_90_CUT}
        return tables.get(product, _PLAIN_90_TF32)[kernel][features]
    if dtype == torch.float32:
        return _FLOAT32[kernel][features]
    if few:
        return _TINY[kernel] if tiny else _FEW[kernel]
    if tuned:
        return _PLAIN_90[kernel][features]
    return _HALF[kernel][features]


def are_few_and_short(
    kernel: str, arch: int, dtype: torch.dtype, features: int, plain: bool, rows: int, walk: int, programs: int
) -> bool:
    """Whether walks are so few and short that small tiles are fastest, on any kernel.

    Args:
        kernel: As in `configuration`, and so are the next.
        arch: Compute capability times ten.
        dtype: Of the tensors.
        features: The larger of D and E, up to a power of two, 16 at least.
        plain: Whether masks are those of a causal or full attention.
        rows: Tiles of 64 rows, of all heads.
        walk: Rows that are walked over.
        programs: That run at the same time, one on each multiprocessor.
    """
    if not plain or not 90 <= arch < 120 or features > 128:
        return False
    if kernel == "forward":  # longer rows are for the tiles of Hopper's kernel sooner
        length = max(features // 64, 1)
        return dtype != torch.float32 and length * rows <= programs and length * walk <= _LONGEST
    if kernel not in _FEW_PIECES:
        return False
    if dtype == torch.float32:
        return features == 64 and 2 * rows <= programs and walk <= 4096
    return features == 128 and are_tiny(kernel, rows, walk, programs)


def are_tiny(kernel: str, rows: int, walk: int, programs: int) -> bool:
    """Whether tiles of 16 rows are few, and their walks short; for the arguments see `are_few_and_short`."""
    return 4 * rows <= programs and walk <= (512 if kernel == "forward" else 1024)


_LONGEST = 8192  # rows of 64 features

_TINY = {
    "forward": Configuration(16, 128, 4, 2),
    "key": Configuration(128, 16, 4, 2, whole=True),
    "query": Configuration(16, 128, 4, 2, whole=True),
}
"""With 16 bits. The backward is of 128 features; of fewer it has a kernel of its own (`launches.small`)."""

_FEW = {"forward": Configuration(64, 64, 4, 3)}
_FEW_PIECES = {"key": Configuration(32, 32, 4, 2), "query": Configuration(64, 32, 4, 2)}
"""With 64 features."""

_PLAIN_90: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(64, 64, 4, 3),
        128: Configuration(128, 128, 8, 3),
        256: Configuration(128, 64, 8, 2),
    },
    "key": {
        16: Configuration(128, 64, 4, 3),
        32: Configuration(128, 64, 4, 3),
        64: Configuration(64, 64, 4, 3),
        128: Configuration(32, 64, 4, 3),
        256: Configuration(32, 32, 4, 2),
    },
    "query": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(64, 64, 4, 3),
        128: Configuration(128, 128, 8, 2),
        256: Configuration(128, 64, 8, 1),
    },
}
_PLAIN_90_CUT: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(16, 32, 2, 2),
        32: Configuration(16, 64, 4, 2),
        64: Configuration(16, 64, 4, 2),
        128: Configuration(16, 32, 4, 2),
    },
    "key": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(32, 64, 4, 2),
        64: Configuration(32, 16, 4, 2),
        128: Configuration(32, 32, 4, 2),
    },
    "query": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(16, 32, 4, 2),
        128: Configuration(32, 32, 4, 1),
    },
}
"""For few rows: with more, factors are in pieces before the walk."""

_PLAIN_90_PIECES: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(128, 64, 8, 2),
        128: Configuration(128, 32, 8, 2),
    },
    "key": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(32, 64, 4, 2),
        128: Configuration(16, 64, 4, 2),
    },
    "query": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(128, 64, 8, 2),
        128: Configuration(64, 32, 4, 2),
    },
}
_PLAIN_90_PAIRS: dict[str, dict[int, Configuration]] = {
    "forward": {
        64: Configuration(128, 64, 8, 2),
        128: Configuration(128, 64, 8, 2),
    },
    "key": {
        64: Configuration(64, 64, 4, 2),
        128: Configuration(32, 64, 4, 2),
    },
    "query": {
        64: Configuration(128, 64, 8, 2),
        128: Configuration(64, 64, 4, 2),
    },
}
_PLAIN_90_TF32: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(128, 64, 8, 1),
        128: Configuration(128, 32, 8, 2),
    },
    "key": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(32, 128, 8, 1),
        128: Configuration(16, 128, 8, 1),
    },
    "query": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(128, 32, 8, 2),
        128: Configuration(128, 16, 8, 1),
    },
}
_HALF: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(64, 64, 4, 2),
        128: Configuration(64, 64, 8, 2),
        256: Configuration(64, 32, 8, 2),
    },
    "key": {
        16: Configuration(32, 64, 4, 2),
        32: Configuration(32, 64, 4, 2),
        64: Configuration(32, 64, 4, 2),
        128: Configuration(32, 64, 8, 2),
        256: Configuration(32, 32, 8, 1),
    },
    "query": {
        16: Configuration(64, 32, 4, 2),
        32: Configuration(64, 32, 4, 2),
        64: Configuration(64, 32, 4, 2),
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 1),
    },
}
_FLOAT32: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(32, 32, 8, 2),
        32: Configuration(32, 32, 8, 2),
        64: Configuration(32, 32, 8, 2),
        128: Configuration(16, 32, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
    "key": {
        16: Configuration(16, 32, 4, 2),
        32: Configuration(16, 32, 4, 2),
        64: Configuration(32, 32, 8, 2),
        128: Configuration(16, 16, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
    "query": {
        16: Configuration(32, 32, 8, 2),
        32: Configuration(32, 32, 8, 2),
        64: Configuration(32, 32, 4, 2),
        128: Configuration(16, 32, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
}
