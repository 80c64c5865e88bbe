"""Packed sequences balanced over ranks: as many tokens each, as much work of causal attention, few sequences cut.

Ranks are divided into two groups, and sequences between them: most go whole to one group, few are cut, of which the
longest makes up for what the others leave uneven. So are the groups, until each is one rank. A cut gives one group
both ends of what is cut, and the other the middle: the first tokens of a sequence have the least work and the last
ones the most, so that a cut can share tokens and work in any proportion.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Piece", "balance"]

UNEVEN = 0.01
"""The part of a group's work that may be missing or too much before more pieces are cut."""
MOST_UNEVEN = 1.1
"""The work of a rank over the mean of the ranks that few sequences may give."""


class Piece(NamedTuple):
    """Tokens ``low … high`` of a sequence without those of ``inner … outer`` in their middle."""

    sequence: int
    low: int
    inner: int
    outer: int
    high: int

    @property
    def tokens(self) -> int:
        """Count the tokens."""
        return self.inner - self.low + self.high - self.outer

    @property
    def work(self) -> float:
        """Count the pairs of a token and an earlier one."""
        return (self.inner**2 - self.low**2 + self.high**2 - self.outer**2) / 2

    def cut(self, tokens: int, work: float) -> tuple[Piece, Piece]:
        """Cut off so many tokens at both ends, with about so much work; returns them and the rest."""
        fewest, most = 0, tokens  # at the beginning
        if self.inner < self.outer:
            fewest, most = max(0, tokens - (self.high - self.outer)), min(tokens, self.inner - self.low)
        while fewest < most:
            front = (fewest + most) // 2
            if self._ends(tokens, front).work > work:  # the more at the beginning, the less work
                fewest = front + 1
            else:
                most = front
        ends = self._ends(tokens, most)
        if self.inner < self.outer:
            return ends, Piece(self.sequence, ends.inner, self.inner, self.outer, ends.outer)
        return ends, Piece(self.sequence, ends.inner, ends.outer, ends.outer, ends.outer)

    def _ends(self, tokens: int, front: int) -> Piece:
        return Piece(self.sequence, self.low, self.low + front, self.high - tokens + front, self.high)


Groups = tuple[list[Piece], list[Piece]]
"""The pieces of two groups of ranks."""


def balance(lengths: list[int], world: int) -> list[list[Piece]]:
    """Returns the pieces of every rank: as many tokens each, within one, but where cuts are even.

    Args:
        lengths: Of the sequences. One is cut evenly for all ranks, and so are few that give no balance.
        world: How many ranks there are.
    """
    if len(lengths) == 1:
        return _cut_evenly(lengths, world)
    found = _divide([Piece(number, 0, n, n, n) for number, n in enumerate(lengths) if n], world)
    most = max(sum(piece.work for piece in pieces) for pieces in found)
    if len(lengths) < world and most * world > MOST_UNEVEN * sum(n * n for n in lengths) / 2:
        return _cut_evenly(lengths, world)
    return found


def _cut_evenly(lengths: list[int], world: int) -> list[list[Piece]]:
    """Cut every sequence for all ranks into chunks whose lengths differ by one token at most."""
    chunks, start = 2 * world, 0
    found: list[list[Piece]] = [[] for _ in range(world)]
    for number, n in enumerate(lengths):
        # Where a length is no multiple, longer chunks are others in every sequence.
        edges = [(chunk * n + start % chunks) // chunks for chunk in range(chunks + 1)]
        start += n
        for rank, pieces in enumerate(found):
            ends = edges[rank], edges[rank + 1], edges[-2 - rank], edges[-1 - rank]
            pieces.append(Piece(number, *ends))
    return found


def _divide(pieces: list[Piece], ranks: int) -> list[list[Piece]]:
    if ranks == 1:
        return [pieces]
    pieces = sorted(pieces, key=lambda piece: -piece.work)
    half, total = ranks // 2, sum(piece.tokens for piece in pieces)
    tokens = half * (total // ranks) + min(half, total % ranks)
    best: float = math.inf
    groups: Groups = ([], [])
    for cut in range(len(pieces) + 1):  # all of them can be cut
        uneven, found = _split(pieces, cut, tokens, half / ranks)
        if uneven < best:
            best, groups = uneven, found
        if best <= UNEVEN:
            break
    return _divide(groups[0], half) + _divide(groups[1], ranks - half)


def _split(pieces: list[Piece], cut: int, tokens: int, share: float) -> tuple[float, Groups]:
    """Returns by how much the work of two groups misses this share, and their pieces, so many tokens in the first.

    The first is infinite where such groups cannot be. ``cut``: how many pieces are cut, the first of these.
    """
    total, work = sum(piece.tokens for piece in pieces), sum(piece.work for piece in pieces)
    aims = [(tokens, share * work), (total - tokens, (1 - share) * work)]
    groups: Groups = ([], [])
    have = [[0.0, 0.0], [0.0, 0.0]]

    def give(group: int, piece: Piece) -> None:
        if piece.tokens:
            groups[group].append(piece)
        have[group][0] += piece.tokens
        have[group][1] += piece.work

    for piece in pieces[1:cut]:
        # As many as the first group lacks of its share of all that has been cut.
        so_far = have[0][0] + have[1][0] + piece.tokens
        mine = min(max(round(so_far * tokens / total - have[0][0]), 0), piece.tokens)
        lacks = share * (have[0][1] + have[1][1] + piece.work) - have[0][1]
        for group, each in enumerate(piece.cut(mine, lacks)):
            give(group, each)
    for piece in pieces[cut:]:
        filled = [
            (has[0] + piece.tokens) / max(aim[0], 1) + (has[1] + piece.work) / max(aim[1], 1)
            for has, aim in zip(have, aims)
        ]
        give(int(filled[1] < filled[0]), piece)
    missing = tokens - have[0][0]
    if not 0 <= missing <= (pieces[0].tokens if cut else 0):
        return math.inf, groups
    if cut:
        for group, each in enumerate(pieces[0].cut(int(missing), aims[0][1] - have[0][1])):
            give(group, each)
    return abs(have[0][1] - aims[0][1]) / max(min(aims[0][1], aims[1][1]), 1), groups
