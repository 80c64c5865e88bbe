"""The plan of a call: the rows that ranks send each other, and each rank's calls of plain attention.

Keys and values go to the chunks that see them, and gradients back to the ranks that own the tokens.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from warploom.distributed.layout import Chunks, chunks_of, expand_ranges, places
from warploom.distributed.ranks import Bounds, remember

Tensor = torch.Tensor

ALIGNMENT = 128
"""Keys of a windowed chunk begin at a multiple of so many, as the tiles of one GPU's call do."""


class PlainCall(NamedTuple):
    """A plain call of attention: queries of a rank's part on keys of chunks, both without gaps."""

    queries: slice
    keys: slice  # among all that this rank sees
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    left: int | None
    right: int | None  # the window, counted from the last key


Slices = tuple[tuple[slice, ...], ...]
"""Rows by rank: pieces that are sent or received one by one, and this rank's own, which are copied."""


class Step(NamedTuple):
    """A rank's work for one of its chunks of all sequences, and for the chunks that the others compute then."""

    calls: tuple[PlainCall, ...]
    send: Slices  # rows of this rank's part that the ranks' chunks see, and no chunk of theirs before
    recv: Slices  # where such rows of the ranks go among all that this rank sees
    copies: tuple[tuple[slice, slice], ...]
    """Rows that both chunks of a sequence see: from where and to where they are copied once they have arrived."""
    rows: slice  # which of the gradients of keys, of one call after the other, are of this chunk's keys
    grad_send: Slices  # among these, the gradients of each rank's tokens
    grad_recv: Slices  # where such gradients from the ranks go among all that this rank receives


class ContextAttentionPlan(NamedTuple):
    """The ranks' attention on a layout, as one rank computes it."""

    steps: tuple[Step, ...]
    single_call: bool
    """Ranks have whole sequences, so that a rank calls once, on all that it has, after the last step."""
    whole: int  # rows of them: the last ones of this rank's part, and of all that it sees
    shared: int  # the other rows of its part
    seen: int  # rows of keys that this rank sees
    grad_rows: int  # rows of gradients that it receives
    order: Tensor
    """For each shared row the gradients received for it, row after row, in the order of steps and ranks."""
    ends: Tensor  # (shared + 1,), where each row's begin in ``order``; int32 on the device, as ``order``


@remember(8)  # one holds a few numbers for each token, on the device
def make_plan(
    bounds: Bounds, world: int, rank: int, layout: str, left: int | None, right: int | None, device: torch.device
) -> ContextAttentionPlan:
    """Returns the plan of a call.

    Rows go from where they are to where they are needed, for one chunk of all sequences after the other. Where
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
    begin, end = _find_keys(chunks, left, right)
    masked = left is not None or right is not None
    owned = [chunks.owned(other) for other in range(world)]
    single_call = bool((chunks.last > chunks.first)[:, 2 * world :].any())  # on all ranks or none
    together = not masked and len(bounds) == 2 and len(owned[0]) == 3 and not single_call
    if together:  # both chunks see all keys: one call
        owned = [own[:1] for own in owned]
        end = torch.tensor(chunks.lengths).clamp(max=1)[None] * bounds[-1]
        begin = torch.zeros_like(end)
    transfers, returns, seen_before = [], [], begin[:, :world] * 0  # the end of what a rank's chunk before sees
    for number in range(len(owned[0][:2])):
        columns = [own[number] for own in owned]
        low, high = begin[:, columns], end[:, columns]
        # A later chunk sees no keys before those of an earlier one.
        transfers.append(_make_transfer(chunks, torch.maximum(low, seen_before), high, rank))
        seen_before = torch.maximum(seen_before, high)
        returns.append(_make_transfer(chunks, low, high, rank))
    sizes = (chunks.last - chunks.first)[:, owned[rank]]  # (S, O)
    if together:
        sizes = torch.tensor([[chunks.lengths[rank]]])
    beyond = (end - chunks.last if masked else end * 0)[:, owned[rank]]
    seen = [expand_ranges(begin[:, column], end[:, column]) for column in owned[rank]]
    key_places = _place_keys(seen, single_call, bounds[-1])
    ranges = [
        _Ranges(sizes[:, number], place[begin[:, column]], (end - begin)[:, column], beyond[:, number])
        for number, (column, place) in enumerate(zip(owned[rank], key_places))
    ]
    if single_call:
        every = _Ranges(*map(torch.cat, zip(*ranges)))
        calls = [(), _make_calls(every, 0, left, right, device)]
    else:
        starts = [0, int(sizes[:, 0].sum())]
        calls = [_make_calls(each, start, left, right, device) for each, start in zip(ranges, starts)]
    part, rows = chunks.rows(rank), places(chunks)
    steps, returned, first = [], 0, 0
    for number, (transfer, gradients) in enumerate(zip(transfers, returns)):
        place, keys = key_places[number], seen[number]
        into = returned + torch.arange(len(gradients.send))
        copies = (
            _find_copies(begin[:, owned[rank]], end[:, owned[rank]], key_places) if single_call and number else ()
        )
        step = Step(
            calls=calls[number],
            send=_cut(transfer.send, part[transfer.send], transfer.send_counts, rows),
            recv=_cut(place[transfer.recv], transfer.recv, transfer.recv_counts, rows),
            copies=copies,
            rows=slice(first, first + len(keys)),
            grad_send=_cut(gradients.place, keys[gradients.place], gradients.recv_counts, rows),
            grad_recv=_cut(into, part[gradients.send], gradients.send_counts, rows),
        )
        steps.append(step)
        returned += len(gradients.send)
        first += len(keys) if single_call else 0
    into = torch.cat([gradients.send for gradients in returns])
    whole = len(seen[2]) if single_call else 0
    ends = torch.zeros(len(part) - whole + 1, dtype=torch.int64)
    ends[1:] = torch.bincount(into, minlength=len(part) - whole).cumsum(0)
    order, ends = (x.to(device, torch.int32) for x in (into.argsort(stable=True), ends))
    all_seen = sum(map(len, seen)) if single_call else len(torch.cat(seen).unique())
    return ContextAttentionPlan(
        tuple(steps), single_call, whole, len(part) - whole, all_seen, returned, order, ends
    )


def _place_keys(seen: list[Tensor], single_call: bool, tokens: int) -> list[Tensor]:
    """Returns by token where the keys of each chunk are among all that a rank sees.

    They are there once in the order of tokens, or those of one chunk after the other.
    """
    if not single_call:
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


def _find_copies(begin: Tensor, end: Tensor, key_places: list[Tensor]) -> tuple[tuple[slice, slice], ...]:
    """Returns from where and to where rows go that both chunks of a sequence see, and that arrive for the first."""
    low, high = begin[:, 1], torch.minimum(end[:, 0], end[:, 1])
    found = []
    for token, length in zip(low.tolist(), (high - low).tolist()):
        if length > 0:
            source, place = (int(each[token]) for each in key_places[:2])
            found.append((slice(source, source + length), slice(place, place + length)))
    return tuple(found)


def _cut(own: Tensor, tokens: Tensor, counts: list[int], rows: Tensor) -> Slices:
    """Cut rows by rank where tokens, or their ``rows`` in parts, are not adjacent: both sides cut alike."""
    found = []
    for of_rank, of_tokens in zip(own.split(counts), tokens.split(counts)):
        apart = (of_tokens.diff() != 1) | (rows[of_tokens].diff() != 1)
        edges = [0, *(1 + apart.nonzero().flatten()).tolist(), len(of_rank)] if len(of_rank) else []
        firsts = of_rank[edges[:-1]].tolist()
        lengths = (high - low for low, high in itertools.pairwise(edges))
        found.append(tuple(slice(first, first + length) for first, length in zip(firsts, lengths)))
    return tuple(found)


def _find_keys(chunks: Chunks, left: int | None, right: int | None) -> tuple[Tensor, Tensor]:
    """Returns the first key that each chunk of each sequence sees, and the one behind the last, (S, C) each."""
    first, last = chunks.first, chunks.last
    begin, end = chunks.starts.expand_as(first), chunks.ends.expand_as(last)
    if left is not None:
        seen = (first - chunks.starts - left).clamp(min=0)
        begin = chunks.starts + seen // ALIGNMENT * ALIGNMENT
    if right is not None:
        end = torch.minimum(end, last + right)
    empty = first == last
    return begin.masked_fill(empty, 0), end.masked_fill(empty, 0)


class _Transfer(NamedTuple):
    """The rows of one step, on the host, by rank and then by token."""

    send: Tensor  # rows of this rank's part
    send_counts: list[int]
    recv: Tensor  # tokens that this rank sees
    recv_counts: list[int]
    place: Tensor  # their numbers among the keys of the chunk


def _make_transfer(chunks: Chunks, begin: Tensor, end: Tensor, rank: int) -> _Transfer:
    """Returns the rows of a step in which rank ``r`` sees keys ``begin[:, r] … end[:, r]`` of each sequence."""
    own = chunks.owned(rank)
    # This rank's tokens, chunk by chunk: where each chunk's rows begin in its part.
    first, last = chunks.first[:, own], chunks.last[:, own]  # (S, O)
    sizes = (last - first).t().flatten()
    offsets = (sizes.cumsum(0) - sizes).view(len(own), -1).t()  # (S, O)
    send, send_counts = [], []
    for other in range(chunks.world):
        low = torch.maximum(first, begin[:, other : other + 1])
        high = torch.minimum(last, end[:, other : other + 1])
        shift = offsets - first
        rows = expand_ranges((low + shift).flatten(), (torch.maximum(high, low) + shift).flatten())
        send.append(rows)
        send_counts.append(len(rows))
    mine = expand_ranges(begin[:, rank], end[:, rank])  # tokens, ascending in each sequence
    owner = torch.empty(int(chunks.ends[-1]), dtype=torch.int64)
    for other in range(chunks.world):
        owner[chunks.rows(other)] = other
    place = owner[mine].argsort(stable=True)
    counts = torch.bincount(owner[mine], minlength=chunks.world).tolist()
    return _Transfer(torch.cat(send), send_counts, mine[place], counts, place)


class _Ranges(NamedTuple):
    """The queries and keys of a chunk in each sequence, (S,) each."""

    queries: Tensor  # their number
    first: Tensor  # the place of the first key
    keys: Tensor  # the number of keys that they see
    beyond: Tensor  # the number of them behind the last query


def _make_calls(
    ranges: _Ranges, start: int, left: int | None, right: int | None, device: torch.device
) -> tuple[PlainCall, ...]:
    """Returns a call for each run of sequences whose keys are adjacent and whose windows end alike."""
    tokens, first, keys, beyond = (x[ranges.queries > 0] for x in ranges)
    calls = []
    apart = (beyond.diff() != 0) | (first.diff() != keys[:-1])
    edges = [0, *(1 + apart.nonzero().flatten()).tolist(), len(tokens)] if len(tokens) else []
    for low, high in itertools.pairwise(edges):
        run, key_places = tokens[low:high], keys[low:high]
        queries, seen, key, more = int(run.sum()), int(key_places.sum()), int(first[low]), int(beyond[low])
        cu_q, cu_k = (_cumulate(x, device) if high - low > 1 else None for x in (run, key_places))
        window = (None if left is None else left + more, None if right is None else right - more)
        calls.append(PlainCall(slice(start, start + queries), slice(key, key + seen), cu_q, cu_k, *window))
        start += queries
    return tuple(calls)


def _cumulate(sizes: Tensor, device: torch.device) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(device, torch.int32)
