"""Tiles of the Triton kernels, by kernel, GPU, dtype and features of a row; see the engineering notes."""

from __future__ import annotations

from typing import NamedTuple

import torch

WIDTHS = (16, 32, 64, 128, 256)
"""Features of a row, up to a power of two."""


class Configuration(NamedTuple):
    """Tile sizes and launch options of one kernel for every GPU."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    key_tiles: int = 1  # of a step, of few queries
    whole: bool = False  # whether loops are not split


# fmt: off
TILES: dict[tuple[str, str], tuple[tuple[int, int, int, int] | None, ...]] = {
    ("16-bit", "forward"): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    ("16-bit", "key"): ((32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
    ("16-bit", "query"): ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    ("plain", "forward"): ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 2)),
    ("plain", "key"): ((128, 64, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 2)),
    ("plain", "query"): ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 1)),
    ("float32", "forward"): ((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2), (16, 32, 4, 1), (16, 16, 8, 1)),
    ("float32", "key"): ((16, 32, 4, 2), (16, 32, 4, 2), (32, 32, 8, 2), (16, 16, 4, 1), (16, 16, 8, 1)),
    ("float32", "query"): ((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 8, 1)),
    ("tf32", "forward"): ((64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 1), (128, 32, 8, 2)),
    ("tf32", "key"): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 128, 8, 1), (16, 128, 8, 1)),
    ("tf32", "query"): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2), (128, 16, 8, 1)),
    ("3-term", "forward"): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
    ("3-term", "key"): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (16, 64, 4, 2)),
    ("3-term", "query"): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2)),
    ("3-term here", "forward"): ((16, 32, 2, 2), (16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2)),
    ("3-term here", "key"): ((64, 64, 4, 2), (32, 64, 4, 2), (32, 16, 4, 2), (32, 32, 4, 2)),
    ("3-term here", "query"): ((64, 64, 4, 2), (64, 64, 4, 2), (16, 32, 4, 2), (32, 32, 4, 1)),
    ("2-term", "forward"): (None, None, (128, 64, 8, 2), (128, 64, 8, 2)),
    ("2-term", "key"): (None, None, (64, 64, 4, 2), (32, 64, 4, 2)),
    ("2-term", "query"): (None, None, (128, 64, 8, 2), (64, 64, 4, 2)),
}
"""``block_m, block_n, warps, stages`` for each of `WIDTHS`.

``16-bit`` and ``float32`` are for any call, the others for plain ones on sm_90: ``plain`` with 16 bits, there and
on sm_100, and the rest by products of float32, see `warploom.device.product`.
"""

SMALL = {
    "forward": Configuration(64, 64, 4, 3),
}
UNALIGNED_VALUES = Configuration(32, 64, 4, 2)
"""Tiles of the forward on sm_90 where the loop itself stores tiles of at most 32 features of values in shared memory, as
rows of 16 bits begin at odd places, or tensors at addresses that are no multiples of 16 bytes: the compiler knows
no other. The assembler of CUDA 12.8 (Triton 3.6 and 3.7) loses the address from which `wgmma` reads them: see
`warploom.testing.descriptors`. For 32 queries `mma` is taken."""
TINY = {
    "forward": Configuration(16, 128, 4, 2),
    "key": Configuration(128, 16, 4, 2, whole=True),
    "query": Configuration(16, 128, 4, 2, whole=True),
}
"""Tiles with 16 bits. The backward is of 128 features; for fewer there is a kernel of its own (`SMALL_BACKWARD`)."""

SMALL_3_TERM = {"key": Configuration(32, 32, 4, 2), "query": Configuration(64, 32, 4, 2)}
"""Tiles with 64 features and three terms."""

DECODE: dict[tuple[str, int], tuple[tuple[int, int, int, int] | None, ...]] = {
    ("16-bit", 16): ((32, 4, 3, 4), (32, 4, 3, 4), (16, 4, 4, 4), (16, 4, 3, 4), (32, 4, 3, 1)),
    ("16-bit", 32): ((64, 4, 3, 1), (64, 4, 3, 1), (64, 4, 4, 1), (32, 4, 3, 1), (32, 8, 3, 1)),
    ("16-bit", 64): ((64, 4, 3, 1), (64, 4, 3, 1), (64, 4, 3, 1), (64, 8, 3, 1), None),
    ("float32", 16): ((64, 4, 3, 1), (64, 4, 3, 1), (32, 4, 3, 1), (32, 4, 3, 1), (16, 4, 2, 1)),
}
"""``block_n, warps, stages, key_tiles`` of the kernel for few queries, for each of `WIDTHS`, by rows of a tile.

Measured on an H200 with 128 features. More rows of float32, or of 256 features, do not fit in registers: there are
more tiles then, which read the same keys from the L2 cache.
"""
# fmt: on

LATENT_DECODE = {16: (64, 8, 3), 64: (64, 8, 2)}
"""``block_n, warps, stages`` of the kernel for more than 256 features, by rows of a tile: two tiles of keys fit in
shared memory. Tiles of 64 rows are for sm_90, whose matrix products read both factors in shared memory: elsewhere
queries do not fit in registers."""
LATENT_SCRATCH = 2**11
"""Bytes of shared memory for weights and maxima of a tile, beside queries and keys."""
LATENT_CHUNK = 512
"""Keys of a chunk at least, of more than 256 features: what is stored of it is as long as 28 keys of 16 heads."""
HOPPER_LATENT = Configuration(64, 64, 4, 2)
"""Tiles of the kernel for Hopper for more than 16 rows of a latent cache."""
HOPPER_LATENT_CHUNK = 1024
"""Keys of its chunks at least: what is stored of 64 rows is as long as 114 keys. 2048 are faster with 128 entries."""
LATENT_MOST_CHUNKS = 128
LATENT_SLAB = 128
"""Features of an output that a program joins."""
LATENT_FEW = 64
"""Rows of packed queries with more than 256 features that are few. They may be several tiles."""
PACKED_ROWS = 16
"""Rows of a tile of packed queries, about; sequences of more queries are for the other kernels."""

DECODE_PAGE_STAGES = 2
"""More of them where keys lie in pages, which are looked up before."""
DECODE_CHUNK = 256
"""Keys of a chunk at least."""
DECODE_MOST_CHUNKS = 64
DECODE_PROGRAMS = 128
"""Chunks of all heads of a batch entry, about: one for every multiprocessor, two where a step has one key tile."""
DECODE_START = 192
"""Cost of a program besides its loop, in keys."""
DECODE_EVEN = 1.8
"""Loops for every multiprocessor from which those of different lengths even out, and are not split."""
DECODE_AHEAD = 16
"""Chunks that are on their way from memory together, where they are joined."""


class WarpTiles(NamedTuple):
    """Parts into which the backward of small problems cuts a step of its loop."""

    warps: int  # each with a loop of its own
    block: int  # rows of a step of each
    stages: int


SMALL_BACKWARD = {16: WarpTiles(4, 64, 2), 32: WarpTiles(4, 64, 2), 64: WarpTiles(4, 32, 3)}
"""Tiles by features, measured on an H200 with bfloat16. Gradients of longer rows do not fit in a warp's registers."""


LONG: dict[str, dict[str, dict[int, int]]] = {
    "3-term": {
        "forward": {16: 2048, 32: 2048, 64: 2048, 128: 2048},
        "backward": {16: 1024, 32: 1024, 64: 1024, 128: 512},
    },
    "2-term": {"forward": {64: 4096, 128: 512}, "backward": {64: 4096, 128: 512}},
}
"""Rows from which terms of float32 are made once, before the loops, by features; of shorter tensors, where
they are used, and for ``high`` precision not at all."""


def decode_tiles(arch: int, dtype: torch.dtype, features: int, values: int, rows: int) -> Configuration:
    """Returns the pinned tiles of the kernel for few queries, for so many rows of a head of keys; see `configuration`.

    ``values``: features of values, up to the next power of two. On sm_90 up to 32 of 16 bits have no tiles of 64
    rows, whatever is known of addresses, so that these do not decide over bits: see `UNALIGNED_VALUES`.
    """
    kind, width = "float32" if dtype == torch.float32 else "16-bit", WIDTHS.index(features)
    most = 32 if arch == 90 and kind == "16-bit" and values <= 32 else 64
    fit = [
        Configuration(block_m, *tile)
        for (each, block_m), tiles in DECODE.items()
        if each == kind and block_m <= most and (tile := tiles[width]) is not None
    ]
    return next((tiles for tiles in fit if rows <= tiles.block_m), fit[-1])


def latent_tiles(
    arch: int, rows: int, query_bytes: int, key_bytes: int, memory: int, in_pages: bool
) -> Configuration:  # fmt: skip
    """Returns the tiles of the kernel for more than 256 features.

    Args:
        arch: Compute capability times ten.
        rows: Of a head of keys.
        query_bytes: Of a row of queries.
        key_bytes: Of a key, and of its value where that is not in its memory.
        memory: Bytes of shared memory that a program may take.
        in_pages: Whether keys lie in pages.
    """
    block_m = 64 if arch == 90 and rows > 16 else 16
    block_n, warps, stages = LATENT_DECODE[block_m]
    while block_n > 16 and block_m * query_bytes + 2 * block_n * key_bytes + LATENT_SCRATCH > memory:
        block_n //= 2
    return Configuration(block_m, block_n, warps, stages + (DECODE_PAGE_STAGES if in_pages else 0))


def configuration(
    kernel: str,
    arch: int,
    dtype: torch.dtype,
    features: int,
    product: str,
    plain: bool,
    small: bool = False,
    tiny: bool = False,
) -> Configuration:
    """Returns the pinned tiles of a kernel.

    Args:
        kernel: ``forward``, ``query`` (gradient of q) or ``key`` (gradients of k and v).
        arch: Compute capability times ten.
        dtype: Of the tensors.
        features: The larger of D and E, up to a power of two, 16 at least.
        product: How float32 factors are multiplied, as in `warploom.device.product`.
        plain: Whether masks are those of a causal or full attention and D and E equal powers of two: what such
            kernels save in registers, larger tiles take.
        small: Whether the problem `is_small`.
        tiny: Whether it `is_tiny`.
    """
    tuned = plain and 90 <= arch < 120
    if dtype != torch.float32:
        if small:
            return TINY[kernel] if tiny else SMALL[kernel]
        kind = "plain" if tuned else "16-bit"
        if arch >= 100:  # where the larger tiles of fewer features spill 384 bytes and more
            features = max(features, 64)
    # On Blackwell, where sums of 64 rows are in tensor memory, Triton compiles float32's larger tiles to a trap.
    elif tuned and arch < 100 and features <= 128:
        if small and product == "3-term" and (tiny or kernel == "query"):
            return SMALL_3_TERM[kernel]
        kind = product if (product, kernel) in TILES else "tf32"
    else:
        kind = "float32"
    tiles = TILES[kind, kernel][WIDTHS.index(features)]
    if tiles is None:
        raise LookupError(f"no tiles for {kind}, {kernel}, {features} features")
    return Configuration(*tiles)


def is_small(
    kernel: str, arch: int, dtype: torch.dtype, features: int, plain: bool, rows: int, loop: int, programs: int
) -> bool:
    """Returns whether loops are so few and short that small tiles are fastest, on any kernel.

    Args:
        kernel: As in `configuration`, and so are the next.
        arch: Compute capability times ten.
        dtype: Of the tensors.
        features: The larger of D and E, up to a power of two, 16 at least.
        plain: Whether masks are those of a causal or full attention.
        rows: Tiles of 64 rows, of all heads.
        loop: Rows that a loop goes over.
        programs: That run at the same time, one on each multiprocessor.
    """
    if not plain or not 90 <= arch < 120 or features > 128:
        return False
    if kernel == "forward":  # longer rows are for the tiles of Hopper's kernel sooner
        length = max(features // 64, 1)
        return dtype != torch.float32 and length * rows <= programs and length * loop <= _LONGEST
    if dtype == torch.float32:
        return features == 64 and 2 * rows <= programs and loop <= 4096
    return features == 128 and is_tiny(kernel, rows, loop, programs)


def is_tiny(kernel: str, rows: int, loop: int, programs: int) -> bool:
    """Returns whether tiles of 16 rows are few, and their loops short; for the arguments see `is_small`."""
    return 4 * rows <= programs and loop <= (512 if kernel == "forward" else 1024)


_LONGEST = 8192  # rows of 64 features
