"""A rank's part of a sequence, in plain calls of linear attention, and how states pass from rank to rank."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from warploom.distributed.layout import chunks_of
from warploom.distributed.ranks import Bounds, remembered
from warploom.ops.linear_attention.call import LinearInputs
from warploom.runtime.dispatch import Tensors

Tensor = torch.Tensor

LAYOUT = "contiguous"


class Segment(NamedTuple):
    """Tokens of a part for one plain call."""

    tokens: slice
    start: int
    """How far into its sequence the first token is."""
    sequences: Tensor
    """Numbers of the sequences, int64."""
    cu_seqlens: Tensor | None
    continued: bool
    """Whether its one sequence began on an earlier rank."""
    goes_on: bool
    """Whether its last sequence goes on on the next rank."""

    def of(self, tensors: Tensors, initial: Tensor | None) -> LinearInputs:
        """Its inputs, from those of the part. The number among its positions is ``start`` more."""
        q, k, v, theta, decay, _, offsets, _ = tensors
        q, k, v = (x[:, self.tokens] for x in (q, k, v))
        decay = decay if decay is None or decay.dim() == 1 else decay[:, self.tokens]
        moved = None if offsets is None else offsets.long() + self.start
        return LinearInputs(q, k, v, theta, decay, initial, moved, self.cu_seqlens)


class Part(NamedTuple):
    """This rank's tokens, and how states pass from rank to rank."""

    lengths: list[int]
    segments: tuple[Segment, ...]
    crosses: tuple[bool, ...]
    """Of each rank: whether a sequence goes on behind its last token."""
    spans: tuple[bool, ...]
    """Whether that sequence began on an earlier rank."""
    passed: Tensor
    """The same on the device, (W, 1, 1)."""
    leaving: tuple[slice, int, Tensor] | None
    """Of the sequence that goes on: its tokens here, how far into it they begin, and its number."""
    ended: tuple[Tensor, Tensor]
    """Numbers of the sequences that end here, and of their rows among the segments' last states."""

    @property
    def alone(self) -> Segment | None:
        """The segment of a part that has no other, in one sequence."""
        return self.segments[0] if len(self.segments) == 1 and self.segments[0].cu_seqlens is None else None


@remembered(64)
def part_of(bounds: Bounds, packed: bool, batch: int, world: int, rank: int, device: torch.device) -> Part:
    """The part of a rank. Where sequences are not packed, all batch entries are cut alike."""
    chunks = chunks_of(bounds, world, LAYOUT)
    edges = [rank * bounds[-1] // world for rank in range(world + 1)]
    crossing = [next((s for s, e in itertools.pairwise(bounds) if s < edge < e), None) for edge in edges[1:]]
    spans = tuple(start is not None and start < edge for start, edge in zip(crossing, edges))
    first, last = chunks.first[:, rank].tolist(), chunks.last[:, rank].tolist()
    pieces = [(n, a, b) for n, (a, b) in enumerate(zip(first, last)) if a < b]
    every = torch.arange(batch)
    segments, begin, goes_on = [], edges[rank], crossing[rank] is not None
    if pieces and pieces[0][1] > bounds[pieces[0][0]]:
        number, a, b = pieces.pop(0)
        of_segment = torch.tensor([number]) if packed else every
        alone = goes_on and not pieces
        segments.append(Segment(slice(0, b - a), a - bounds[number], of_segment.to(device), None, True, alone))
    if pieces:
        cu = torch.tensor([pieces[0][1], *(b for _, _, b in pieces)]) - pieces[0][1]
        of_segment = torch.tensor([n for n, _, _ in pieces]) if packed else every
        tokens = slice(pieces[0][1] - begin, pieces[-1][2] - begin)
        local = cu.to(device, torch.int32) if packed else None
        segments.append(Segment(tokens, 0, of_segment.to(device), local, False, goes_on))
    leaving = None
    if goes_on and segments:
        number = next(n for n, start in enumerate(bounds[:-1]) if start == crossing[rank] and bounds[n + 1] > start)
        a = max(bounds[number], begin)
        of_segment = torch.tensor([number]) if packed else every
        leaving = (slice(a - begin, edges[rank + 1] - begin), a - bounds[number], of_segment.to(device))
    rows = torch.cat([segment.sequences for segment in segments]) if segments else torch.zeros(0, dtype=torch.int64)
    kept = torch.arange(len(rows))
    if goes_on and segments:
        kept = kept[: len(rows) - len(segments[-1].sequences)] if not packed else kept[:-1]
    kept = kept.to(device)
    return Part(
        chunks.lengths,
        tuple(segments),
        tuple(c is not None for c in crossing),
        spans,
        torch.tensor(spans, device=device)[:, None, None],
        leaving,
        (rows.to(device)[kept], kept),
    )
