"""Rows that travel between ranks: keys and values to the chunks that see them, gradients back to their owners."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from warploom.distributed.layout import Chunks, as_bytes, chunks_of, expanded
from warploom.distributed.ranks import Bounds

Tensor = torch.Tensor

ALIGNMENT = 128
"""Keys of a windowed chunk begin at a multiple of so many, as the tiles of one GPU's call do."""


class Call(NamedTuple):
    """One plain call of attention: queries of a rank's part on keys of a chunk, both without gaps."""

    queries: slice
    keys: slice
    """Among the keys of the chunk."""
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    left: int | None
    right: int | None
    """The window, counted from the last key."""


Slices = tuple[tuple[slice, ...], ...]
"""Of rows, by rank: pieces that travel one by one."""


class Pieces(NamedTuple):
    """Rows of a tensor that go to each rank."""

    which: Tensor | None
    """Those for other ranks, the first rank's first, int32 on the device; None where slices are of the tensor."""
    slices: Slices
    own: tuple[Tensor | slice, ...]
    """Those that stay, which are not among them."""

    def of(self, x: Tensor) -> list[list[Tensor]]:
        """By rank."""
        return _cut(x if self.which is None else x.index_select(0, self.which), self.slices)

    def keep(self, x: Tensor, places: list[Tensor]) -> None:
        """Copy those that stay."""
        for rows, place in zip(self.own, places, strict=True):
            if isinstance(rows, slice):
                place.copy_(x[rows])
            else:
                torch.index_select(x, 0, rows, out=place)


def _cut(x: Tensor, slices: Slices) -> list[list[Tensor]]:
    return [[x[piece] for piece in pieces] for pieces in slices]


class Step(NamedTuple):
    """What a rank does for one of its chunks or both, and for those that the others compute in the same step."""

    calls: tuple[Call, ...]
    keys: slice | Tensor
    """The keys of the chunk among all that arrive; of both, those of the first chunk first."""
    leaving: Pieces
    """Of this rank's part: what the ranks' chunks see, and no chunk of theirs before."""
    landing: Slices
    """Where such rows of the ranks go among all that arrive."""
    back: Pieces
    """Of the gradients of these keys: those of each rank's tokens."""
    returned: Slices
    """Where such gradients from the ranks go among all that return."""


class Plan(NamedTuple):
    """How the ranks compute attention on a layout."""

    steps: tuple[Step, ...]
    arriving: int
    """Rows that this rank sees."""
    returning: int
    """Rows of gradients for its part."""
    order: Tensor
    """For each row of this rank's part the gradients returned for it, one row after the other, in the order of
    steps and ranks."""
    ends: Tensor
    """(n + 1,), where each row's begin in ``order``; int32 on the device, as ``order``."""


@functools.lru_cache(8)  # one holds a few numbers for each token, on the device
def plan_of(
    bounds: Bounds, packed: bool, world: int, rank: int, layout: str, left: int | None, right: int | None,
    device: torch.device,
) -> Plan:  # fmt: skip
    """The plan of a call.

    Of a single sequence, rows travel from where they are to where they are needed, for one chunk after the other.
    Of packed ones, whose chunks lie apart, those for a rank are gathered first, and keys are put in order when they
    have arrived: both chunks are in one step, a call of twice as many sequences.

    Args:
        bounds: Of the sequences.
        packed: Whether calls are of packed sequences, also where there is one sequence.
        world: How many ranks there are.
        rank: This one.
        layout: Of the parts.
        left: Keys before itself that a query sees at most.
        right: Keys behind itself.
        device: Of the tensors.
    """
    chunks = chunks_of(bounds, world, layout)
    begin, end = _keys_of(chunks, left, right)
    masked = left is not None or right is not None
    owned = [chunks.owned(other) for other in range(world)]
    if not masked and len(bounds) == 2 and len(owned[0]) == 2:  # both chunks see all keys: one call
        owned = [[other] for other in range(world)]
        end = torch.tensor(chunks.lengths).clamp(max=1)[None] * bounds[-1]
        begin = torch.zeros_like(end)
    single = len(bounds) == 2
    numbers = range(len(owned[0]))
    groups = [[number] for number in numbers] if single else [[*numbers]]
    seen_before = begin * 0  # the end of what a rank's chunks before see
    travels, returns, calls = [], [], []
    for group in groups:
        fresh, every = [], []
        for number in group:
            columns = [own[number] for own in owned]
            low, high = begin[:, columns], end[:, columns]
            # A later chunk sees no keys before those of an earlier one.
            fresh.append(_travel(chunks, torch.maximum(low, seen_before[:, : len(columns)]), high, rank))
            seen_before = torch.maximum(seen_before[:, : len(columns)], high)
            every.append(_travel(chunks, low, high, rank))
        travels.append(_together(fresh))
        returns.append(_together(every))
        calls.append(_calls(chunks, begin, end, rank, group, numbers, packed, left, right, device))
    tokens = torch.cat([travel.arriving for travel in travels])
    place = torch.empty(bounds[-1], dtype=torch.int64)
    place[tokens.sort().values if single else tokens] = torch.arange(len(tokens))
    part = _Part(rank, chunks.rows(rank), place, single, device)
    steps, returned = [], 0
    for travel, gradients, of_step in zip(travels, returns, calls):
        steps.append(part.step(of_step, travel, gradients, returned))
        returned += len(gradients.leaving)
    into = torch.cat([gradients.leaving for gradients in returns])
    order = into.argsort(stable=True)
    ends = torch.zeros(len(part.tokens) + 1, dtype=torch.int64)
    ends[1:] = torch.bincount(into, minlength=len(part.tokens)).cumsum(0)
    small = (x.to(device, torch.int32) for x in (order, ends))
    return Plan(tuple(steps), len(tokens), returned, *small)


class _Part(NamedTuple):
    """What a rank knows of its tokens, and of where all that arrives goes."""

    rank: int
    tokens: Tensor
    """Of its rows."""
    place: Tensor
    """Of each token that it sees, among all that arrive."""
    single: bool
    """Whether there is one sequence."""
    device: torch.device

    def step(self, calls: tuple[Call, ...], travel: _Travel, gradients: _Travel, returned: int) -> Step:
        """A step whose fresh rows and gradients travel so; of these, so many return for earlier steps."""
        seen = torch.empty_like(gradients.arriving)
        seen[gradients.place] = gradients.arriving
        into = returned + torch.arange(len(gradients.leaving))
        return Step(
            calls=calls,
            keys=_as_slice(self.place[seen], self.device),
            leaving=self.pieces(travel.leaving, self.tokens, travel.leaving_counts),
            landing=self.slices(self.place[travel.arriving], travel.arriving, travel.arriving_counts),
            back=self.pieces(gradients.place, seen, gradients.arriving_counts),
            returned=self.slices(into, self.tokens[gradients.leaving], gradients.leaving_counts),
        )

    def pieces(self, rows: Tensor, tokens: Tensor, counts: list[int]) -> Pieces:
        """Rows of a tensor that stand for ``tokens``, so many for each rank."""
        if self.single:
            slices = self.slices(rows, tokens[rows], counts)
            return Pieces(None, (*slices[: self.rank], (), *slices[self.rank + 1 :]), slices[self.rank])
        by_rank = [*rows.split(counts)]
        own, by_rank[self.rank] = by_rank[self.rank], rows[:0]
        others = torch.cat(by_rank)
        slices = self.slices(torch.arange(len(others)), tokens[others], [*map(len, by_rank)])
        which, own = (x.to(self.device, torch.int32) for x in (others, own))
        return Pieces(which, slices, (own,) if len(own) else ())

    def slices(self, places: Tensor, tokens: Tensor, counts: list[int]) -> Slices:
        """Rows by rank, cut where tokens of a single sequence are not adjacent: sender and receiver cut alike."""
        found = []
        for own, of_tokens in zip(places.split(counts), tokens.split(counts)):
            edges = [0, len(own)] if len(own) else []
            if self.single and edges:
                edges[1:1] = (1 + (of_tokens.diff() != 1).nonzero().flatten()).tolist()
            firsts = own[edges[:-1]].tolist()
            lengths = (high - low for low, high in itertools.pairwise(edges))
            found.append(tuple(slice(first, first + length) for first, length in zip(firsts, lengths)))
        return tuple(found)


def _as_slice(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Rows as a slice, if they are adjacent."""
    if len(rows) and bool((rows.diff() != 1).any()):
        return rows.to(device, torch.int32)
    first = int(rows[0]) if len(rows) else 0
    return slice(first, first + len(rows))


def _keys_of(chunks: Chunks, left: int | None, right: int | None) -> tuple[Tensor, Tensor]:
    """The keys that every chunk of every sequence sees: the first, and behind the last, (S, C) each."""
    first, last = chunks.first, chunks.last
    begin, end = chunks.starts.expand_as(first), chunks.ends.expand_as(last)
    if left is not None:
        seen = (first - chunks.starts - left).clamp(min=0)
        begin = chunks.starts + seen // ALIGNMENT * ALIGNMENT
    if right is not None:
        end = torch.minimum(end, last + right)
    empty = first == last
    return begin.masked_fill(empty, 0), end.masked_fill(empty, 0)


class _Travel(NamedTuple):
    """What travels in one step, on the host, by rank and then by token."""

    leaving: Tensor
    """Rows of this rank's part."""
    leaving_counts: list[int]
    arriving: Tensor
    """Tokens that this rank sees."""
    arriving_counts: list[int]
    place: Tensor
    """Of each such token its number among the keys of the chunk, or of one chunk after the other."""


def _together(travels: list[_Travel]) -> _Travel:
    """What travels for several chunks at once: of each rank that of the first chunk, then of the second."""
    keys = [sum(len(travel.place) for travel in travels[:number]) for number in range(len(travels))]

    def by_rank(parts: list[Tensor], counts: list[list[int]]) -> Tensor:
        return torch.cat([x for of_rank in zip(*map(torch.split, parts, counts)) for x in of_rank])

    leaving_counts, arriving_counts = ([t.leaving_counts for t in travels], [t.arriving_counts for t in travels])
    return _Travel(
        by_rank([travel.leaving for travel in travels], leaving_counts),
        [sum(counts) for counts in zip(*leaving_counts)],
        by_rank([travel.arriving for travel in travels], arriving_counts),
        [sum(counts) for counts in zip(*arriving_counts)],
        by_rank([travel.place + first for travel, first in zip(travels, keys)], arriving_counts),
    )


def _travel(chunks: Chunks, begin: Tensor, end: Tensor, rank: int) -> _Travel:
    """What travels in a step, where rank ``r`` sees keys ``begin[:, r] … end[:, r]`` of each sequence."""
    own = chunks.owned(rank)
    # This rank's tokens, chunk by chunk: where each chunk's rows begin in its part.
    first, last = chunks.first[:, own], chunks.last[:, own]  # (S, O)
    sizes = (last - first).t().flatten()
    offsets = (sizes.cumsum(0) - sizes).view(len(own), -1).t()  # (S, O)
    leaving, leaving_counts = [], []
    for other in range(chunks.world):
        low = torch.maximum(first, begin[:, other : other + 1])
        high = torch.minimum(last, end[:, other : other + 1])
        shift = offsets - first
        rows = expanded((low + shift).flatten(), (torch.maximum(high, low) + shift).flatten())
        leaving.append(rows)
        leaving_counts.append(len(rows))
    mine = expanded(begin[:, rank], end[:, rank])  # tokens, ascending in each sequence
    owner = torch.empty(int(chunks.ends[-1]), dtype=torch.int64)
    for other in range(chunks.world):
        owner[chunks.rows(other)] = other
    place = owner[mine].argsort(stable=True)
    counts = torch.bincount(owner[mine], minlength=chunks.world).tolist()
    return _Travel(torch.cat(leaving), leaving_counts, mine[place], counts, place)


def _calls(
    chunks: Chunks, begin: Tensor, end: Tensor, rank: int, group: list[int], numbers: range, packed: bool,
    left: int | None, right: int | None, device: torch.device,
) -> tuple[Call, ...]:  # fmt: skip
    """The calls for some of a rank's chunks: one for each run of sequences whose windows end alike."""
    own = chunks.owned(rank)
    sizes = (chunks.last - chunks.first)[:, own]  # (S, O)
    if len(own) > len(numbers):  # all of the part at once
        tokens, keys = sizes.sum(1), (end - begin)[:, rank]
        start, beyond = 0, torch.zeros_like(tokens)
    else:
        columns = [own[number] for number in group]
        tokens, keys, beyond = (
            x.t().flatten()
            for x in (sizes[:, group], (end - begin)[:, columns], end[:, columns] - chunks.last[:, columns])
        )
        start = int(sizes[:, : group[0]].sum())
    if left is None and right is None:
        beyond = torch.zeros_like(tokens)
    there = tokens > 0
    tokens, keys, beyond = tokens[there], keys[there], beyond[there]
    calls, key = [], 0
    edges = [0, *(1 + (beyond.diff() != 0).nonzero().flatten()).tolist(), len(tokens)] if len(tokens) else []
    for low, high in itertools.pairwise(edges):
        run, of_keys = tokens[low:high], keys[low:high]
        queries, seen, more = int(run.sum()), int(of_keys.sum()), int(beyond[low])
        cu_q, cu_k = (_cumulative(x, device) if packed else None for x in (run, of_keys))
        window = (None if left is None else left + more, None if right is None else right - more)
        calls.append(Call(slice(start, start + queries), slice(key, key + seen), cu_q, cu_k, *window))
        start, key = start + queries, key + seen
    return tuple(calls)


def _cumulative(sizes: Tensor, device: torch.device) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(device, torch.int32)


# ----------------------------------------------------------------------------------------------------------
# Sending
# ----------------------------------------------------------------------------------------------------------


class Arriving(NamedTuple):
    """Keys and values on their way to this rank, each row once."""

    plan: Plan
    rows: list[Tensor]
    """Of each tensor those of all steps."""
    works: list[list[Any]]
    """By step."""
    sent: list[Any]
    """Whose memory is not to be used again before they have left."""

    def keys(self, number: int) -> list[Tensor]:
        """Of each tensor the rows of a step in their order; the current stream waits for them and what is sent.

        Each step once: some backends wait forever for what they have waited for.
        """
        step = self.plan.steps[number]
        for work in self.works[number]:
            work.wait()
        if isinstance(step.keys, slice):
            return [x[step.keys] for x in self.rows]
        return [x.index_select(0, step.keys) for x in self.rows]


def send_keys(plan: Plan, tensors: list[Tensor], group: Any) -> Arriving:
    """Send rows (n, …) of this rank's part to the chunks that see them.

    What the first step needs travels first: the rest arrives while it is computed. Its kernel is there before that
    of the first step, which waits for the one before: it would have to wait for multiprocessors, and the kernels of
    other ranks for it.
    """
    rows = [x.new_empty((plan.arriving, *x.shape[1:])) for x in tensors]
    works, sent = [], []
    for step in plan.steps:
        work, leaving = _send(
            [(step.leaving, x, _cut(into, step.landing)) for x, into in zip(tensors, rows)], group
        )
        works.append(work)
        sent.append(leaving)
    return Arriving(plan, rows, works, sent)


def return_gradients(
    plan: Plan, gradients: list[list[Tensor]], into: list[Tensor], group: Any, kernels: bool
) -> None:
    """Send gradients to their tokens' ranks, and add those of this rank's part up, in float32 and in a fixed order.

    They travel when all are there, in one kernel: as many arrive at the rank that waits longest as if those of the
    first step had left before, and no multiprocessors are lost to a kernel that waits for other ranks.

    Args:
        plan: Of the call.
        gradients: By step, of each tensor those of the step's keys (M, …).
        into: Of each tensor where the sums (n, …) go.
        group: The ranks.
        kernels: Whether kernels compute the call.
    """
    received = [x.new_empty((plan.returning, *x.shape[1:])) for x in gradients[0]]
    works, _sent = _send(
        [
            (step.back, x, _cut(rows, step.returned))
            for step, of_step in zip(plan.steps, gradients)
            for x, rows in zip(of_step, received)
        ],
        group,
    )
    for work in works:
        work.wait()
    for rows, sums in zip(received, into):
        sum_gradients(plan, rows, sums, kernels)


def _send(given: list[tuple[Pieces, Tensor, list[list[Tensor]]]], group: Any) -> tuple[list[Any], Any]:
    """Send pieces of tensors to every rank and receive others, in one kernel, without waiting for it.

    A second would begin when the computation that follows leaves multiprocessors to it. What stays is copied
    meanwhile. Also returns what is sent, whose memory is not to be used again before.
    """
    sends, sent = [], [pieces.of(x) for pieces, x, _ in given]
    for leaving, (_, _, landing) in zip(sent, given):
        for peer, (mine, theirs) in enumerate(zip(leaving, landing)):
            for function, each in ((dist.isend, mine), (dist.irecv, theirs)):
                if peer != group.rank():
                    sends += [
                        dist.P2POp(function, as_bytes(piece), group=group, group_peer=peer)
                        for piece in each
                        if piece.numel()
                    ]
    works = dist.batch_isend_irecv(sends) if sends else []
    for pieces, x, landing in given:
        pieces.keep(x, landing[group.rank()])
    return works, sent


def sum_gradients(plan: Plan, received: Tensor, into: Tensor, kernels: bool) -> None:
    """Add up what was received for each row of this rank's part, in float32 in the order of steps and ranks.

    Args:
        plan: Of the call.
        received: Rows (·, …), those of the first step first.
        into: ``(n, …)``, where the sums go.
        kernels: Whether kernels compute the call.
    """
    if kernels:
        from warploom.distributed.kernels import sum_rows

        sum_rows(received, plan.order, plan.ends, into)
        return
    precise = torch.promote_types(received.dtype, torch.float32)
    total = received.new_zeros(into.shape, dtype=precise)
    of_rows = plan.ends.diff()
    for number in range(int(of_rows.max()) if len(of_rows) else 0):
        there = (of_rows > number).nonzero().flatten()
        total[there] += received[plan.order[plan.ends[there] + number]].to(precise)
    into.copy_(total)
