"""A rank's part of a sequence, cut into plain calls of linear attention."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from warploom.distributed.layout import chunks_of
from warploom.distributed.ranks import Bounds, remember

Tensor = torch.Tensor

LAYOUT = "contiguous"


class Segment(NamedTuple):
    """Tokens of a part for one plain call."""

    tokens: slice
    start: int  # place of the first token in its sequence
    sequences: Tensor  # numbers of the sequences, int64
    cu_seqlens: Tensor | None
    continued: bool  # its one sequence began on an earlier rank
    goes_on: bool  # its last sequence goes on on the next rank


class RankPart(NamedTuple):
    """This rank's tokens."""

    segments: tuple[Segment, ...]
    """At most two: the rest of a sequence that began on an earlier rank, and what begins here."""
    send: Segment | None  # the tokens of the sequence that goes on on the next rank
    passed: Tensor  # (W, 1, 1), whether the sequence that goes on behind a rank began before it
    ended: tuple[Tensor, Tensor]
    """Numbers of the sequences that end here, and of their rows among the segments' last states."""

    @property
    def single(self) -> Segment | None:
        """Returns the segment of a part that has no other, if it is in one sequence."""
        return self.segments[0] if len(self.segments) == 1 and self.segments[0].cu_seqlens is None else None


@remember(64)
def make_part(bounds: Bounds, packed: bool, batch: int, world: int, rank: int, device: torch.device) -> RankPart:
    """Returns the part of a rank. Where sequences are not packed, all batch entries are cut alike."""
    chunks = chunks_of(bounds, world, LAYOUT)
    edges = [each * bounds[-1] // world for each in range(world + 1)]
    # The beginning of the sequence that goes on behind each rank.
    crossing = [next((s for s, e in itertools.pairwise(bounds) if s < edge < e), None) for edge in edges[1:]]
    passed = [start is not None and start < edge for start, edge in zip(crossing, edges)]
    first, last = chunks.first[:, rank].tolist(), chunks.last[:, rank].tolist()
    pieces = [(number, a, b) for number, (a, b) in enumerate(zip(first, last)) if a < b]
    goes_on = crossing[rank] is not None

    def make_segment(pieces: list[tuple[int, int, int]], continued: bool, goes_on: bool) -> Segment:
        number, begin, end = pieces[0][0], pieces[0][1], pieces[-1][2]
        sequences = torch.tensor([each for each, _, _ in pieces]) if packed else torch.arange(batch)
        local = torch.tensor([begin, *(b for _, _, b in pieces)]) - begin
        cu_seqlens = None if continued or not packed else local.to(device, torch.int32)
        tokens, start = slice(begin - edges[rank], end - edges[rank]), begin - bounds[number]
        return Segment(tokens, start, sequences.to(device), cu_seqlens, continued, goes_on)

    segments, send = [], None
    if pieces and goes_on:
        send = make_segment(pieces[-1:], passed[rank], True)._replace(cu_seqlens=None)
    rest = pieces
    if pieces and pieces[0][1] > bounds[pieces[0][0]]:
        rest = pieces[1:]
        segments.append(make_segment(pieces[:1], True, goes_on and not rest))
    if rest:
        segments.append(make_segment(rest, False, goes_on))
    rows = torch.cat([each.sequences for each in segments]) if segments else torch.zeros(0, dtype=torch.int64)
    ended = torch.arange(len(rows) - (batch if goes_on and segments else 0), device=device)
    went_on = torch.tensor(passed, device=device)[:, None, None]
    return RankPart(tuple(segments), send, went_on, (rows.to(device)[ended], ended))
