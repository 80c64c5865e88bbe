"""The tokens of a sequence that each rank holds.

A layout cuts sequences into chunks. ``zigzag``: rank ``r`` of ``W`` holds chunks ``r`` and ``2W − 1 − r`` of ``2W``
whose lengths differ by one token at most: each rank then has as many pairs of a query and an earlier key as the
others. Packed sequences are divided so that this holds for all of them together, and few are cut: see `balance`.
``contiguous``: rank ``r`` holds chunk ``r`` of ``W``, of the packed tokens as they stand. A rank's part has its
first chunk of all sequences in their order, then its second, then the packed sequences that it has whole.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from warploom.distributed.balance import balance
from warploom.distributed.ranks import Bounds, format_bounds, remember
from warploom.errors import ArgumentError, fault

Tensor = torch.Tensor

Layout = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


@dataclass(frozen=True)
class Chunks:
    """``S`` sequences cut into ``C`` chunks each: int64 on the host."""

    starts: Tensor  # (S, 1), of the sequences
    ends: Tensor  # (S, 1)
    first: Tensor  # (S, C), of a chunk's tokens
    last: Tensor  # (S, C), behind them
    world: int

    def owned(self, rank: int) -> list[int]:
        """Returns the chunks of a rank, in the order of its part; the third are sequences that it has whole."""
        return [rank, 2 * self.world - 1 - rank, 2 * self.world + rank][: self.first.shape[1] // self.world]

    def rows(self, rank: int) -> Tensor:
        """Returns the tokens of a rank's part, (n,), in its order."""
        own = self.owned(rank)
        return expand_ranges(self.first[:, own].t().flatten(), self.last[:, own].t().flatten())

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Returns the lengths of the ranks' parts."""
        sizes = (self.last - self.first).sum(0)
        return [int(sizes[self.owned(rank)].sum()) for rank in range(self.world)]


def expand_ranges(first: Tensor, last: Tensor) -> Tensor:
    """Returns all integers of ranges, one range after the other."""
    sizes = (last - first).clamp(min=0)
    before = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (first - before).repeat_interleave(sizes)


@remember(64)
def chunks_of(bounds: Bounds, world: int, layout: str) -> Chunks:
    """Cut packed sequences for so many ranks."""
    cut = torch.tensor(bounds)
    starts, ends = cut[:-1, None], cut[1:, None]
    if layout == "contiguous":
        edges = torch.arange(world + 1) * bounds[-1] // world
        first = torch.maximum(starts, edges[:-1])
        last = torch.maximum(torch.minimum(ends, edges[1:]), first)
        return Chunks(starts, ends, first, last, world)
    first = starts.repeat(1, 3 * world)
    last = first.clone()
    for rank, pieces in enumerate(balance((ends - starts).flatten().tolist(), world)):
        for sequence, low, inner, outer, high in pieces:
            start, end = int(starts[sequence]), int(ends[sequence])
            cuts = [(rank, low, inner), (2 * world - 1 - rank, outer, high)]
            if inner == outer and high - low == end - start:
                cuts = [(2 * world + rank, low, high)]
            for chunk, begin, stop in cuts:
                first[sequence, chunk], last[sequence, chunk] = start + begin, start + stop
    return Chunks(starts, ends, first, last, world)


def check_layout(function: str, layout: object) -> None:
    """Raise unless there is such a layout."""
    if layout not in LAYOUTS:
        raise fault(ArgumentError, function, "layout", f"one of {', '.join(LAYOUTS)}", repr(layout))


@remember(8)
def rows_on(bounds: Bounds, world: int, layout: str, rank: int, device: torch.device) -> Tensor:
    """Returns the tokens of a rank's part, (n,), in its order."""
    return chunks_of(bounds, world, layout).rows(rank).to(device)


def places(chunks: Chunks) -> Tensor:
    """Returns for each token its row among the parts of all ranks, (N,), each filled up to the longest."""
    longest = max(chunks.lengths)
    found = torch.empty(int(chunks.ends[-1]), dtype=torch.int64)
    for rank in range(chunks.world):
        rows = chunks.rows(rank)
        found[rows] = rank * longest + torch.arange(len(rows))
    return found


def close_bounds(function: str, bounds: Bounds | None, length: int, *, tail: bool = False) -> Bounds:
    """Returns the bounds of a whole: those that were read, or of one sequence.

    With ``tail`` there may be tokens behind the last sequence, which are laid out as one more.

    Raises:
        ArgumentError: They are not those of this length.
    """
    if bounds is None:
        return (0, length)
    ends = bounds[-1] <= length if tail else bounds[-1] == length
    if bounds[0] != 0 or not ends or any(a > b for a, b in itertools.pairwise(bounds)):
        to = f"at most {length}" if tail else str(length)
        expected = f"the bounds of the whole, from 0 to {to}, the tokens of all ranks, none below the one before"
        raise fault(ArgumentError, function, "cu_seqlens", expected, format_bounds(bounds))
    return bounds if bounds[-1] == length else (*bounds, length)
