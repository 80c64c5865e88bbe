"""Rows that travel between ranks: keys and values to the chunks that see them, gradients back to their owners."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from warploom.distributed.layout import Chunks, chunks_of, expanded, places
from warploom.distributed.ranks import Bounds, as_bytes, remembered

Tensor = torch.Tensor

ALIGNMENT = 128
"""Keys of a windowed chunk begin at a multiple of so many, as the tiles of one GPU's call do."""


class Call(NamedTuple):
    """One plain call of attention: queries of a rank's part on keys of chunks, both without gaps."""

    queries: slice
    keys: slice
    """Among all that this rank sees."""
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    left: int | None
    right: int | None
    """The window, counted from the last key."""


Slices = tuple[tuple[slice, ...], ...]
"""Of rows, by rank: pieces that travel one by one, and this rank's own, which are copied."""


class Step(NamedTuple):
    """What a rank does for one of its chunks of all sequences, and for those that the others compute then."""

    calls: tuple[Call, ...]
    leaving: Slices
    """Of this rank's part: what the ranks' chunks see, and no chunk of theirs before."""
    landing: Slices
    """Where such rows of the ranks go among all that this rank sees."""
    copies: tuple[tuple[slice, slice], ...]
    """From where and to where rows go besides, when they are there: both chunks of a sequence see them."""
    rows: slice
    """Which of the gradients of keys, of one call after the other, are of this chunk's keys."""
    back: Slices
    """Of these: the gradients of each rank's tokens."""
    returned: Slices
    """Where such gradients from the ranks go among all that return."""


class Plan(NamedTuple):
    """How the ranks compute attention on a layout."""

    steps: tuple[Step, ...]
    at_once: bool
    """Whether ranks have whole sequences. Then a rank's calls are of all that it has, after the last step."""
    whole: int
    """Rows of them: the last ones of this rank's part, and of all that it sees."""
    shared: int
    """The other rows of its part."""
    seen: int
    """Rows of keys that this rank sees."""
    returning: int
    """Rows of gradients for its part."""
    order: Tensor
    """For each shared row the gradients returned for it, row after row, in the order of steps and ranks."""
    ends: Tensor
    """(shared + 1,), where each row's begin in ``order``; int32 on the device, as ``order``."""


@remembered(8)  # one holds a few numbers for each token, on the device
def plan_of(
    bounds: Bounds, world: int, rank: int, layout: str, left: int | None, right: int | None, device: torch.device
) -> Plan:
    """The plan of a call.

    Rows travel from where they are to where they are needed, for one chunk of all sequences after the other. Where
    ranks have whole sequences, rows are there in the order of one call of all chunks, and those that two chunks of
    a sequence see are there twice.

    Args:
        bounds: Of the sequences.
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
    at_once = bool((chunks.last > chunks.first)[:, 2 * world :].any())  # on all ranks or none
    together = not masked and len(bounds) == 2 and len(owned[0]) == 3 and not at_once
    if together:  # both chunks see all keys: one call
        owned = [own[:1] for own in owned]
        end = torch.tensor(chunks.lengths).clamp(max=1)[None] * bounds[-1]
        begin = torch.zeros_like(end)
    travels, returns, seen_before = [], [], begin[:, :world] * 0  # the end of what a rank's chunk before sees
    for number in range(len(owned[0][:2])):
        columns = [own[number] for own in owned]
        low, high = begin[:, columns], end[:, columns]
        # A later chunk sees no keys before those of an earlier one.
        travels.append(_travel(chunks, torch.maximum(low, seen_before), high, rank))
        seen_before = torch.maximum(seen_before, high)
        returns.append(_travel(chunks, low, high, rank))
    sizes = (chunks.last - chunks.first)[:, owned[rank]]  # (S, O)
    if together:
        sizes = torch.tensor([[chunks.lengths[rank]]])
    beyond = (end - chunks.last if masked else end * 0)[:, owned[rank]]
    seen = [expanded(begin[:, column], end[:, column]) for column in owned[rank]]
    of_keys = _places_of_keys(seen, at_once, bounds[-1])
    ranges = [
        _Ranges(sizes[:, number], place[begin[:, column]], (end - begin)[:, column], beyond[:, number])
        for number, (column, place) in enumerate(zip(owned[rank], of_keys))
    ]
    if at_once:
        every = _Ranges(*map(torch.cat, zip(*ranges)))
        calls = [(), _calls(every, 0, left, right, device)]
    else:
        starts = [0, int(sizes[:, 0].sum())]
        calls = [_calls(each, start, left, right, device) for each, start in zip(ranges, starts)]
    part, rows = chunks.rows(rank), places(chunks)
    steps, returned, first = [], 0, 0
    for number, (travel, gradients) in enumerate(zip(travels, returns)):
        place, keys = of_keys[number], seen[number]
        into = returned + torch.arange(len(gradients.leaving))
        copies = _copies(begin[:, owned[rank]], end[:, owned[rank]], of_keys) if at_once and number else ()
        step = Step(
            calls=calls[number],
            leaving=_slices(travel.leaving, part[travel.leaving], travel.leaving_counts, rows),
            landing=_slices(place[travel.arriving], travel.arriving, travel.arriving_counts, rows),
            copies=copies,
            rows=slice(first, first + len(keys)),
            back=_slices(gradients.place, keys[gradients.place], gradients.arriving_counts, rows),
            returned=_slices(into, part[gradients.leaving], gradients.leaving_counts, rows),
        )
        steps.append(step)
        returned += len(gradients.leaving)
        first += len(keys) if at_once else 0
    into = torch.cat([gradients.leaving for gradients in returns])
    whole = len(seen[2]) if at_once else 0
    ends = torch.zeros(len(part) - whole + 1, dtype=torch.int64)
    ends[1:] = torch.bincount(into, minlength=len(part) - whole).cumsum(0)
    order, ends = (x.to(device, torch.int32) for x in (into.argsort(stable=True), ends))
    all_seen = sum(map(len, seen)) if at_once else len(torch.cat(seen).unique())
    return Plan(tuple(steps), at_once, whole, len(part) - whole, all_seen, returned, order, ends)


def _places_of_keys(seen: list[Tensor], at_once: bool, tokens: int) -> list[Tensor]:
    """Where the keys of each chunk are among all that a rank sees, by token.

    Once each in the order of tokens, or those of one chunk after the other.
    """
    if not at_once:
        every = torch.cat(seen).unique()
        place = torch.empty(tokens + 1, dtype=torch.int64)
        place[every] = torch.arange(len(every))
        return [place] * len(seen)
    found, first = [], 0
    for keys in seen:
        place = torch.zeros(tokens + 1, dtype=torch.int64)
        place[keys] = torch.arange(first, first + len(keys))
        found.append(place)
        first += len(keys)
    return found


def _copies(begin: Tensor, end: Tensor, of_keys: list[Tensor]) -> tuple[tuple[slice, slice], ...]:
    """What the second chunk of a sequence sees and the first one too, which arrives for the first."""
    low, high = begin[:, 1], torch.minimum(end[:, 0], end[:, 1])
    found = []
    for token, length in zip(low.tolist(), (high - low).tolist()):
        if length > 0:
            source, place = (int(each[token]) for each in of_keys[:2])
            found.append((slice(source, source + length), slice(place, place + length)))
    return tuple(found)


def _slices(own: Tensor, tokens: Tensor, counts: list[int], rows: Tensor) -> Slices:
    """Rows by rank, cut where tokens, or their ``rows`` in parts, are not adjacent: both sides cut alike."""
    found = []
    for of_rank, of_tokens in zip(own.split(counts), tokens.split(counts)):
        apart = (of_tokens.diff() != 1) | (rows[of_tokens].diff() != 1)
        edges = [0, *(1 + apart.nonzero().flatten()).tolist(), len(of_rank)] if len(of_rank) else []
        firsts = of_rank[edges[:-1]].tolist()
        lengths = (high - low for low, high in itertools.pairwise(edges))
        found.append(tuple(slice(first, first + length) for first, length in zip(firsts, lengths)))
    return tuple(found)


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
    """Of each such token its number among the keys of the chunk."""


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


class _Ranges(NamedTuple):
    """What a chunk has of each sequence, (S,) each."""

    queries: Tensor
    """How many."""
    first: Tensor
    """The place of the first key."""
    keys: Tensor
    """How many it sees."""
    beyond: Tensor
    """How many of them are behind the last query."""


def _calls(
    ranges: _Ranges, start: int, left: int | None, right: int | None, device: torch.device
) -> tuple[Call, ...]:
    """The calls for chunks: one for each run of sequences whose keys are adjacent and whose windows end alike."""
    tokens, first, keys, beyond = (x[ranges.queries > 0] for x in ranges)
    calls = []
    apart = (beyond.diff() != 0) | (first.diff() != keys[:-1])
    edges = [0, *(1 + apart.nonzero().flatten()).tolist(), len(tokens)] if len(tokens) else []
    for low, high in itertools.pairwise(edges):
        run, of_keys = tokens[low:high], keys[low:high]
        queries, seen, key, more = int(run.sum()), int(of_keys.sum()), int(first[low]), int(beyond[low])
        cu_q, cu_k = (_cumulative(x, device) if high - low > 1 else None for x in (run, of_keys))
        window = (None if left is None else left + more, None if right is None else right - more)
        calls.append(Call(slice(start, start + queries), slice(key, key + seen), cu_q, cu_k, *window))
        start += queries
    return tuple(calls)


def _cumulative(sizes: Tensor, device: torch.device) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(device, torch.int32)


# ----------------------------------------------------------------------------------------------------------
# Sending
# ----------------------------------------------------------------------------------------------------------


class Arriving(NamedTuple):
    """Keys and values on their way to this rank."""

    plan: Plan
    sent: list[Tensor]
    """Whose memory is not to be used again before they have left."""
    rows: list[Tensor]
    """Of each tensor all that this rank sees."""
    works: list[list[Any]]
    """By step."""

    def wait(self, number: int) -> None:
        """Let the current stream wait for the rows of a step.

        Each step once: some backends wait forever for what they have waited for.
        """
        for work in self.works[number]:
            work.wait()
        for source, place in self.plan.steps[number].copies:
            for x in self.rows:
                x[place].copy_(x[source])


def send_keys(plan: Plan, tensors: list[Tensor], group: Any) -> Arriving:
    """Send rows (n, …) of this rank's part to the chunks that see them.

    What the first step needs travels first: the rest arrives while it is computed. Its kernel is there before that
    of the first step, which waits for the one before: it would have to wait for multiprocessors, and the kernels of
    other ranks for it. Where nothing is computed before all is there, all travels in one kernel.
    """
    rows = [x.new_empty((plan.seen, *x.shape[1:])) for x in tensors]
    moves = [[(x, step.leaving, into, step.landing) for x, into in zip(tensors, rows)] for step in plan.steps]
    if plan.at_once:
        moves = [[*itertools.chain(*moves)], *[[] for _ in moves[1:]]]
    works = [_send(each, group) for each in moves]
    if plan.whole:
        for x, into in zip(tensors, rows):
            into[-plan.whole :].copy_(x[-plan.whole :])
    return Arriving(plan, tensors, rows, works)


def return_gradients(
    plan: Plan, gradients: list[list[Tensor]], into: list[Tensor], group: Any, kernels: bool
) -> None:
    """Send gradients to their tokens' ranks, and add those of this rank's part up, in float32 and in a fixed order.

    They travel when all are there, in one kernel: as many arrive at the rank that waits longest as if those of the
    first step had left before, and no multiprocessors are lost to a kernel that waits for other ranks.

    Args:
        plan: Of the call.
        gradients: By step, of each tensor those of its chunk's keys (M, …).
        into: Of each tensor where the sums of shared rows go.
        group: The ranks.
        kernels: Whether kernels compute the call.
    """
    received = [x.new_empty((plan.returning, *x.shape[1:])) for x in gradients[0]]
    works = _send(
        [
            (x, step.back, rows, step.returned)
            for step, of_step in zip(plan.steps, gradients)
            for x, rows in zip(of_step, received)
        ],
        group,
    )
    for work in works:
        work.wait()
    for rows, sums in zip(received, into if plan.shared else ()):
        sum_gradients(plan, rows, sums, kernels)


def _send(given: list[tuple[Tensor, Slices, Tensor, Slices]], group: Any) -> list[Any]:
    """Send slices of tensors to every rank and receive others, in one kernel, without waiting for it.

    A second would begin when the computation that follows leaves multiprocessors to it. What stays is copied
    meanwhile. The memory of what is sent is not to be used again before the works are waited for.
    """
    sends = []
    for x, leaving, into, landing in given:
        for peer, (mine, theirs) in enumerate(zip(leaving, landing)):
            if peer != group.rank() and 0 not in x.shape[1:]:
                for function, tensor, pieces in ((dist.isend, x, mine), (dist.irecv, into, theirs)):
                    sends += [
                        dist.P2POp(function, as_bytes(tensor[piece]), group=group, group_peer=peer)
                        for piece in pieces
                    ]
    works = dist.batch_isend_irecv(sends) if sends else []
    for x, leaving, into, landing in given:
        for rows, place in zip(leaving[group.rank()], landing[group.rank()], strict=True):
            into[place].copy_(x[rows])
    return works


def sum_gradients(plan: Plan, received: Tensor, into: Tensor, kernels: bool) -> None:
    """Add up what was received for each shared row, in float32 in the order of steps and ranks.

    Args:
        plan: Of the call.
        received: Rows (·, …), those of the first step first.
        into: ``(shared, …)``, where the sums go.
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
