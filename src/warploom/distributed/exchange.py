"""Rows that travel between ranks: keys and values to the chunks that see them, gradients back to their owners."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from warploom.distributed.layout import Chunks, as_bytes, chunks_of, expanded, padded, places
from warploom.distributed.ranks import Bounds, all_gather_together

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


class Step(NamedTuple):
    """What a rank does for one of its chunks, and for those that the others compute in the same step.

    All indices are int32 on the device. Rows that go to other ranks are ordered by rank, then by token.
    """

    calls: tuple[Call, ...]
    place: Tensor
    """For each key of the chunk its row among what was received."""
    back: Tensor
    """For each row of the gradients to be sent its key."""
    sent: Tensor
    """Rows of this rank's part that the ranks' chunks see."""
    sent_counts: list[int]
    received_counts: list[int]


class Plan(NamedTuple):
    """How the ranks compute attention on a layout."""

    lengths: list[int]
    """Of the ranks' parts."""
    steps: tuple[Step, ...]
    whole: bool
    """Whether keys and values travel by one all-gather, and not to the chunks that see them alone."""
    order: Tensor
    """For each row of this rank's part the gradients received for it, one row after the other, in the order of
    steps and ranks."""
    ends: Tensor
    """(n + 1,), where each row's begin in ``order``; int32, as ``order``."""

    @property
    def longest(self) -> int:
        """Tokens of the longest part."""
        return max(self.lengths)


@functools.lru_cache(8)  # one holds a few numbers for each token, on the device
def plan_of(
    bounds: Bounds, packed: bool, world: int, rank: int, layout: str, left: int | None, right: int | None,
    device: torch.device,
) -> Plan:  # fmt: skip
    """The plan of a call.

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
    sizes = (end - begin).sum(0)
    whole = 2 * max(int(sizes[own].sum()) for own in owned) > bounds[-1]
    gathered = places(chunks) if whole else None
    count = len(owned[0])
    steps, sources = [], []
    for number in range(count):
        columns = [own[number] for own in owned]
        travel = _travel(chunks, begin[:, columns], end[:, columns], rank)
        calls = _calls(chunks, begin, end, rank, number, count, packed, left, right, device)
        rows = expanded(begin[:, columns[rank]], end[:, columns[rank]])
        place = travel.place if gathered is None else gathered[rows]
        place, back, sent = (x.to(device, torch.int32) for x in (place, travel.back, travel.sent))
        steps.append(Step(calls, place, back, sent, travel.sent_counts, travel.received_counts))
        sources.append(travel.sent)
    into = torch.cat(sources)
    order = into.argsort(stable=True)
    n = chunks.lengths[rank]
    ends = torch.zeros(n + 1, dtype=torch.int64)
    ends[1:] = torch.bincount(into, minlength=n).cumsum(0)
    small = (x.to(device, torch.int32) for x in (order, ends))
    return Plan(chunks.lengths, tuple(steps), whole, *small)


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
    """The rows of one step, on the host; see `Step`."""

    place: Tensor
    back: Tensor
    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]


def _travel(chunks: Chunks, begin: Tensor, end: Tensor, rank: int) -> _Travel:
    """What travels in a step, where rank ``r`` sees keys ``begin[:, r] … end[:, r]`` of each sequence."""
    own = chunks.owned(rank)
    # This rank's tokens, chunk by chunk: where each chunk's rows begin in its part.
    first, last = chunks.first[:, own], chunks.last[:, own]  # (S, O)
    sizes = (last - first).t().flatten()
    offsets = (sizes.cumsum(0) - sizes).view(len(own), -1).t()  # (S, O)
    sent, sent_counts = [], []
    for other in range(chunks.world):
        low = torch.maximum(first, begin[:, other : other + 1])
        high = torch.minimum(last, end[:, other : other + 1])
        shift = offsets - first
        rows = expanded((low + shift).flatten(), (torch.maximum(high, low) + shift).flatten())
        sent.append(rows)
        sent_counts.append(len(rows))
    mine = expanded(begin[:, rank], end[:, rank])  # tokens, ascending in each sequence
    owner = torch.empty(int(chunks.ends[-1]), dtype=torch.int64)
    for other in range(chunks.world):
        owner[chunks.rows(other)] = other
    back = owner[mine].argsort(stable=True)
    place = torch.empty_like(back)
    place[back] = torch.arange(len(back))
    received = torch.bincount(owner[mine], minlength=chunks.world).tolist()
    return _Travel(place, back, torch.cat(sent), sent_counts, received)


def _calls(
    chunks: Chunks, begin: Tensor, end: Tensor, rank: int, number: int, steps: int, packed: bool,
    left: int | None, right: int | None, device: torch.device,
) -> tuple[Call, ...]:  # fmt: skip
    """The calls for this rank's chunk of a step: one for each run of sequences whose windows end alike."""
    own = chunks.owned(rank)
    sizes = (chunks.last - chunks.first)[:, own]  # (S, O)
    if len(own) > steps:  # all of the part at once
        tokens, keys = sizes.sum(1), (end - begin)[:, rank]
        start, beyond = 0, torch.zeros_like(tokens)
    else:
        chunk = own[number]
        tokens, keys = sizes[:, number], (end - begin)[:, chunk]
        start, beyond = int(sizes[:, :number].sum()), end[:, chunk] - chunks.last[:, chunk]
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
    """Rows on their way: those of each tensor in each step, or all in the place of the first."""

    works: list[Any]
    rows: list[list[Tensor]]  # by step, of each tensor
    sent: list[Tensor]  # whose memory is not to be used again before

    def wait(self) -> list[list[Tensor]]:
        """Let the current stream wait for them."""
        for work in self.works:
            work.wait()
        return self.rows


def send_keys(plan: Plan, tensors: list[Tensor], group: Any) -> Arriving:
    """Send rows (n, …) of this rank's part to the chunks that see them."""
    works, rows, sent = [], [], []
    if plan.whole:
        found = [x.new_empty((plan.longest * group.size(), *x.shape[1:])) for x in tensors]
        sent = [as_bytes(padded(x, plan.longest)) for x in tensors]
        return Arriving(all_gather_together(group, [*map(as_bytes, found)], sent), [found], sent)
    for step in plan.steps:
        arriving = [x.new_empty((len(step.place), *x.shape[1:])) for x in tensors]
        leaving = [x.index_select(0, step.sent) for x in tensors]
        works += _send(leaving, arriving, step.sent_counts, step.received_counts, group)
        rows.append(arriving)
        sent += leaving
    return Arriving(works, rows, sent)


def keys_of(plan: Plan, number: int, arrived: list[list[Tensor]]) -> list[Tensor]:
    """The keys of a step in their order, from all that arrived."""
    rows = arrived[0 if plan.whole else number]
    return [x.index_select(0, plan.steps[number].place) for x in rows]


class Returning:
    """Gradients of keys and values on their way to the owners of the tokens."""

    def __init__(self, plan: Plan, like: list[Tensor], group: Any) -> None:
        """None yet.

        Args:
            plan: Of the call.
            like: Of each tensor some rows (·, …).
            group: The ranks.
        """
        self.plan, self.group = plan, group
        rows = sum(len(step.sent) for step in plan.steps)
        self.received = [x.new_empty((rows, *x.shape[1:])) for x in like]
        self.sent: list[Tensor] = []  # see `Arriving`
        self.works: list[Any] = []

    def send(self, number: int, tensors: list[Tensor]) -> None:
        """Send gradients (M, …) of a step's keys."""
        steps = self.plan.steps
        begin = sum(len(step.sent) for step in steps[:number])
        step = steps[number]
        sent = [x.index_select(0, step.back) for x in tensors]
        into = [received[begin : begin + len(step.sent)] for received in self.received]
        self.works += _send(sent, into, step.received_counts, step.sent_counts, self.group)
        self.sent += sent

    def sums(self, kernels: bool) -> list[Tensor]:
        """Of each tensor the gradients (n, …) of this rank's part, added up in float32 and in a fixed order.

        Args:
            kernels: Whether kernels compute the call.
        """
        for work in self.works:
            work.wait()
        self.sent.clear()
        return [sum_gradients(self.plan, received, kernels) for received in self.received]


def _send(
    tensors: list[Tensor], received: list[Tensor], counts: list[int], received_counts: list[int], group: Any
) -> list[Any]:
    """Send so many rows of each tensor to every rank, in one call.

    It is one kernel: a second would begin when the computation that follows leaves multiprocessors to it.
    """
    sends, rank = [], group.rank()
    for x, y in zip(tensors, received):
        for peer, (mine, theirs) in enumerate(zip(x.split(counts), y.split(received_counts))):
            if peer == rank:
                theirs.copy_(mine)
                continue
            for function, rows in ((dist.isend, mine), (dist.irecv, theirs)):
                if rows.numel():
                    sends.append(dist.P2POp(function, as_bytes(rows), group=group, group_peer=peer))
    return dist.batch_isend_irecv(sends) if sends else []


def sum_gradients(plan: Plan, received: Tensor, kernels: bool) -> Tensor:
    """What was received for each row of this rank's part, added up in float32 in the order of steps and ranks.

    Args:
        plan: Of the call.
        received: Rows (·, …), those of the first step first.
        kernels: Whether kernels compute the call.

    Returns:
        ``(n, …)`` in the dtype of what was received.
    """
    if kernels:
        from warploom.distributed.kernels import sum_rows

        return sum_rows(received, plan.order, plan.ends)
    precise = torch.promote_types(received.dtype, torch.float32)
    total = received.new_zeros((len(plan.ends) - 1, *received.shape[1:]), dtype=precise)
    counts = [count for step in plan.steps for count in step.sent_counts]
    sent = torch.cat([step.sent for step in plan.steps])
    for into, share in zip(sent.split(counts), received.split(counts)):
        total.index_add_(0, into, share.to(precise))  # no row twice
    return total.to(received.dtype)
