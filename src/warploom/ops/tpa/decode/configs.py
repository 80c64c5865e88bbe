"""Tiles and costs of the decode kernels for every GPU. Measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from warploom.ops.tpa.call import Factors
from warploom.runtime.layout import tile_width


class RowTile(NamedTuple):
    """A tile of rows (query, head) of the decode kernel, and how its KV loop is cut and compiled."""

    queries: int
    heads: int
    factor_rows: int
    """Rows of feature factors in a block of keys: keys times rank."""
    warps: int
    stages: int

    def blocks(self, heads: int, tokens: int) -> int:
        """Returns the number of tiles of a batch entry."""
        return -(-heads // self.heads) * -(-tokens // self.queries)


class CombineTile(NamedTuple):
    """A tile of the second kernel: rows and parts that a program combines at once."""

    rows: int
    ahead: int
    """Parts whose loads it starts at once; groups of parts, where these are joined beside each other."""
    beside: int
    """Groups that are joined beside each other, or 0."""
    warps: int


HEADS_OF_BATCH_HEAD = 16
"""Rows of a tile under the strategy ``batch_head``."""
COMBINE_FEW = CombineTile(rows=2, ahead=16, beside=0, warps=2)
COMBINE_MANY = CombineTile(rows=1, ahead=8, beside=8, warps=8)
"""Tiles for as many parts of a batch entry as are under way at once, and for more."""
LOOPS_ROWS = 32
"""Rows of factors at most where there are two loops. With 64 of more than 128 features registers spill. Where tiles
lie at odd addresses, the assembler of CUDA 12.8 computes addresses of the second loop from what the first leaves,
also where that has nothing to do: see `warploom.testing.descriptors`."""
ONE_PROGRAM = 21e3
"""Bytes of the cache that a program reads in a microsecond, alone on its multiprocessor. This and the next four
come from 86 cases on an H200, one to 128 batch entries, 256 to 524288 keys, ranks 1, 2 and 4: what they choose took
at most 1.02 times as long as the best choice."""
ONE_MULTIPROCESSOR = 22.5e3
"""Bytes of the cache that a multiprocessor with two programs reads in a microsecond."""
START = 0.6
"""Microseconds that a program costs its multiprocessor besides."""
SECOND_LAUNCH = 3.5
"""Microseconds that a second kernel costs."""
JOIN = 0.06
"""Microseconds that each part of a batch entry costs the second kernel."""


def combine_tile(splits: int, group: int) -> CombineTile:
    """Returns the tile for so many parts of a batch entry, of which groups of ``group`` are joined first."""
    return COMBINE_MANY if splits > COMBINE_FEW.ahead and group > 1 else COMBINE_FEW


def row_tile(factors: Factors, strategy: str) -> RowTile:
    """Returns the tile for the larger of both ranks and of D and E, and as many rows as there are.

    64 rows are what a warp group takes, 16 what a warp takes. Never for the batch: results must not depend on it.
    """
    tokens, heads = max(factors.bq.shape[1], 1), triton.next_power_of_2(factors.ak.shape[2])
    features = max(map(tile_width, (factors.bq.shape[3], factors.bv.shape[3])))
    rank = max(factors.bk.shape[2], factors.bv.shape[2])
    rows = triton.next_power_of_2(max(factors.ak.shape[2] * tokens, 1))
    least_rows, most_rows = 16, 64
    if factors.bq.dtype == torch.float32:
        most_rows, factor_rows = 16, 32 if features <= 128 else 16
        warps, stages = 4 if features <= 64 else 8, 1
    elif features <= 128:
        factor_rows, stages = (16, 4) if rank == 2 else (32, 3)
        warps = 8 if rows > 32 else 4
    else:
        factor_rows, most_rows, warps, stages = 64, 32, 8, 2
    if strategy == "batch_head":
        least_rows = most_rows = HEADS_OF_BATCH_HEAD
    block_h = min(heads, most_rows)
    block_n = min(triton.next_power_of_2(tokens), most_rows // block_h)
    if block_n > 1:  # a second loop, over keys that some rows see, forms two products
        factor_rows = min(factor_rows, LOOPS_ROWS)
    return RowTile(block_n, max(block_h, least_rows // block_n), factor_rows, warps, stages)
