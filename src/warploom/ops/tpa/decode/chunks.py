"""Chunks into which decoding cuts the keys of a batch entry, and how much of their tree a program takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class ChunkTree(NamedTuple):
    """The cut of a batch entry's valid keys into chunks: the same for all kernels, since results depend on it.

    Chunks are the leaves of a tree, of whose levels a program may take as many as suits the size of the batch.
    """

    shortest: int
    longest: int
    wanted: int
    """Chunks double in length before there are more than these."""
    widths: tuple[int, ...]
    """Chunks below a node, for each level of the tree but the root, which joins all nodes of the last of them."""

    @property
    def all_levels(self) -> int:
        """The number of levels that are all keys."""
        return len(self.widths)

    def splits(self, keys: int, levels: int) -> int:
        """Returns the most splits among all lengths up to ``keys``, for so many levels of the tree a program."""
        if levels == self.all_levels:
            return 1
        chunks = max(min(-(-keys // self.shortest), self.wanted), -(-keys // self.longest), 1)
        return -(-chunks // self.widths[levels])

    def levels(self, strategy: str, keys: int, microseconds: Callable[[int], float]) -> int:
        """Returns how many levels a program takes: the fastest under a strategy, by the time for so many splits."""
        one = next(levels for levels in range(self.all_levels + 1) if self.splits(keys, levels) == 1)
        if strategy in ("batch", "batch_head") or one == 0:
            return one
        choices = range(one if strategy == "split_kv" else one + 1)
        return min(choices, key=lambda levels: microseconds(self.splits(keys, levels)))
