"""A rank's part of a sequence, cut into plain calls on the tokens of segments, and what these give put together.

For functions with a state that goes from token to token: a rank receives the one before its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.distributed.layout import chunks_of
from warploom.distributed.ranks import Bounds, gather, remember
from warploom.runtime.memory_order import empty_in_order_of

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
    passed: tuple[bool, ...]  # of every rank, whether the sequence that goes on behind it began before it
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
    return RankPart(tuple(segments), send, tuple(passed), (rows.to(device)[ended], ended))


def gather_last_states(part: RankPart, found: list[Tensor], last: Tensor, group: Any) -> Tensor:
    """Returns the last states of all sequences (S, …) on every rank.

    Args:
        part: This rank's.
        found: The last states of its segments.
        last: Those of sequences without tokens.
        group: The ranks.
    """
    ended, there = torch.zeros_like(last), torch.zeros(len(last), dtype=torch.uint8, device=last.device)
    sequences, rows = part.ended
    if len(sequences):
        ended[sequences] = torch.cat(found)[rows]
        there[sequences] = 1
    every, owners = gather(ended, group), gather(there, group)
    return torch.where(owners.bool().any(0)[:, None, None, None], every.sum(0), last)


class GradientSums:
    """Gradients of a call's tensors, from those of segments.

    Args:
        tensors: Those that have gradients: q, k, v, others, and the first state of every sequence.
        rows: Whether each has tokens, on its second axis.
    """

    def __init__(self, tensors: Sequence[Tensor | None], rows: Sequence[bool]) -> None:
        self.rows = rows
        self.found: list[Tensor | None] = [
            None if x is None else empty_in_order_of(x, x.shape[-1]) if n < 3 else torch.zeros_like(x)
            for n, x in enumerate(tensors)
        ]

    def add(self, segment: Segment, gradients: Sequence[Tensor | None]) -> None:
        """Put those of a segment in their places, or add them."""
        for number, (into, gradient) in enumerate(zip(self.found, gradients)):
            if into is None or gradient is None:
                continue
            if self.rows[number]:
                if gradient.shape == into.shape and gradient.stride() == into.stride():
                    self.found[number] = gradient
                else:
                    into[:, segment.tokens] = gradient
            elif number == len(self.found) - 1:
                into[segment.sequences] += gradient
            else:
                into += gradient

    def add_empty(self, bounds: Bounds, grad_last: Tensor | None, group: Any) -> None:
        """Add those of the states of sequences without tokens, which are returned as they come."""
        initial = self.found[-1]
        if grad_last is None or initial is None or group.rank():
            return
        empty = torch.tensor([a == b for a, b in itertools.pairwise(bounds)], device=initial.device)
        self.found[-1] = torch.where(empty[:, None, None, None], grad_last.to(initial.dtype), initial)
