"""Random requests to a server: bits of each are those that it has alone.

``python tools/random_requests.py --requests 100000`` answers requests as a server does: prompts in chunks of random
sizes, single tokens, prefixes that an earlier request left in the cache, in batches of 1 to 256, on pages in random
order. `append_kv` rotates and stores new tokens, `flash_attention` attends. A finished request is answered again,
alone on other pages: in the same pieces, or with ``--bits chunks`` in one call for the whole. Requests whose bits
differ are counted. Prints a line of JSON; exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from warploom import append_kv, flash_attention
from warploom.bench.environment import describe_environment
from warploom.cli.common import add_device, the_device
from warploom.errors import WarploomError

Tensor = torch.Tensor

NOT_THERE = 10**9
"""The number of a page behind those of a sequence, which nothing may read."""

SMALL: dict[str, Any] = {
    "heads": 4, "features": 16, "page_size": 4, "pages": 40, "longest": 24, "most_tokens": 40, "most_requests": 6,
}  # fmt: skip
"""Sizes of a `Model` for Triton's interpreter."""


@dataclass
class Model:
    """Sizes of one layer of attention, and how requests are drawn."""

    device: torch.device
    generator: torch.Generator
    bits: str
    dtype: torch.dtype = torch.bfloat16
    heads: int = 8
    key_heads: int = 2
    features: int = 64
    page_size: int = 16
    pages: int = 8192
    longest: int = 1024  # tokens of a request
    most_tokens: int = 8192  # of a batch
    most_requests: int = 256
    theta: Tensor = field(init=False)

    def __post_init__(self) -> None:
        half = self.features // 2
        self.theta = 10000.0 ** -(torch.arange(half, device=self.device) / half)

    def integer(self, low: int, high: int) -> int:
        """Returns a number between two, which are possible too, most often a small one."""
        if low >= high:
            return low
        share = float(torch.rand((), generator=self.generator)) ** 2
        return min(low + int(share * (high - low + 1)), high)

    def draw_rows(self, tokens: int) -> tuple[Tensor, ...]:
        """Returns queries, keys and values (1, N, H, D) of new tokens."""
        seed = int(torch.randint(2**60, (), generator=self.generator))
        source = torch.Generator(self.device).manual_seed(seed)
        heads = self.heads + 2 * self.key_heads
        rows = torch.randn(1, tokens, heads, self.features, generator=source, device=self.device).to(self.dtype)
        return tuple(rows.split([self.heads, self.key_heads, self.key_heads], 2))


class Cache:
    """Pages of a pool, and which of them are free."""

    def __init__(self, model: Model, pages: int) -> None:
        shape = (pages, model.page_size, model.key_heads, model.features)
        nan = torch.full((2, *shape), torch.nan, device=model.device, dtype=model.dtype)
        self.k, self.v = nan
        self.model = model
        self.free = torch.randperm(pages, generator=model.generator).tolist()

    def extend(self, table: list[int], keys: int) -> bool:
        """Give a sequence pages for so many keys, and return True; return False if there are not enough."""
        missing = -(-keys // self.model.page_size) - len(table)
        if missing > len(self.free):
            return False
        table += [self.free.pop() for _ in range(missing)]
        return True


@dataclass(eq=False)
class Request:
    """A sequence of tokens, all known before, and what was answered."""

    rows: tuple[Tensor, ...]
    first: int  # tokens before it were in the cache
    done: int  # tokens whose keys are in the cache
    table: list[int]
    owned: int  # pages from this number on are its own
    pieces: list[int] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return int(self.rows[0].shape[1])


def answer(cache: Cache, requests: Sequence[Request], counts: Sequence[int]) -> list[Tensor]:
    """Append the next tokens of requests, so many of each, and return their attention."""
    model = cache.model
    parts = [[x[:, r.done : r.done + n] for x in r.rows] for r, n in zip(requests, counts)]
    q, k, v = (torch.cat(part, 1) for part in zip(*parts))
    places = max(len(r.table) for r in requests) + 1
    table = [r.table + [NOT_THERE] * (places - len(r.table)) for r in requests]

    def tensor(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=model.device)

    bounds = tensor([*itertools.accumulate(counts, initial=0)])
    used = tensor([r.done + n for r, n in zip(requests, counts)])
    where: dict[str, Any] = {"seqused_k": used, "block_table": tensor(table), "backend": "triton"}
    rotated = append_kv(k, v, cache.k, cache.v, q=q, theta=model.theta, cu_seqlens=bounds, **where)
    assert rotated is not None
    where |= {"causal": True, "bits": model.bits, "cu_seqlens_q": bounds}
    out = flash_attention(rotated, cache.k, cache.v, **where)
    for r, n in zip(requests, counts):
        r.done += n
    return list(out.split(list(counts), 1))


def answer_alone(cache: Cache, request: Request) -> Tensor:
    """Returns what `answer` gives for a request alone, from its first token that was not in the cache on."""
    again = Request(request.rows, 0, 0, [], 0)
    cache.extend(again.table, request.tokens)
    whole = cache.model.bits == "chunks"
    pieces = [request.tokens] if whole else [*filter(None, [request.first]), *request.pieces]
    found = torch.cat([answer(cache, [again], [n])[0] for n in pieces], 1)
    cache.free += again.table
    return found[:, request.first :]


def new_request(model: Model, cache: Cache, kept: Request | None) -> Request:
    """Returns a request, which may begin with whole pages of one that is kept."""
    tokens = model.integer(1, model.longest)
    rows = model.draw_rows(tokens)
    shared = 0
    if kept is not None:
        pages = min(kept.tokens, tokens - 1) // model.page_size
        shared = model.integer(0, pages) * model.page_size
        rows = tuple(torch.cat([x[:, :shared], y[:, shared:]], 1) for x, y in zip(kept.rows, rows))
    table = [] if kept is None else kept.table[: shared // model.page_size]
    return Request(rows, shared, shared, list(table), len(table))


def serve(model: Model, wanted: int) -> dict[str, int]:
    """Answer so many requests; returns what is counted."""
    cache, alone = Cache(model, model.pages), Cache(model, -(-model.longest // model.page_size) + 1)
    active: list[Request] = []
    kept: Request | None = None  # a finished request whose pages stay
    counted = {"requests": 0, "tokens": 0, "batches": 0, "with_a_prefix": 0, "requests_that_differ": 0}
    largest = 0
    while counted["requests"] < wanted:
        while len(active) < model.most_requests:
            active.append(new_request(model, cache, kept if model.integer(0, 3) == 0 else None))
        size = model.integer(1, len(active))
        order = torch.randperm(len(active), generator=model.generator).tolist()
        batch: list[Request] = []
        counts: list[int] = []
        for request in (active[i] for i in order[:size]):
            left = request.tokens - request.done
            count = (left, 1, model.integer(1, left))[int(torch.randint(3, (), generator=model.generator))]
            count = min(count, model.most_tokens - sum(counts))
            if count > 0 and cache.extend(request.table, request.done + count):
                batch.append(request)
                counts.append(count)
        if not batch:  # the cache is full of requests that have begun: the longest begins again
            longest = max(active, key=lambda r: len(r.table) - r.owned)
            cache.free += longest.table[longest.owned :]
            active.remove(longest)
            continue
        counted["batches"] += 1
        largest = max(largest, len(batch))
        for request, count, out in zip(batch, counts, answer(cache, batch, counts)):
            request.pieces.append(count)
            request.answers.append(out)
        for request in [r for r in batch if r.done == r.tokens]:
            active.remove(request)
            differs = not torch.equal(torch.cat(request.answers, 1), answer_alone(alone, request))
            counted["requests"] += 1
            counted["tokens"] += request.tokens - request.first
            counted["with_a_prefix"] += request.first > 0
            counted["requests_that_differ"] += differs
            # One request whose pages are all its own stays, as long as others use these.
            if request.owned or (kept is not None and any(r.owned for r in active)):
                cache.free += request.table[request.owned :]
            else:
                cache.free += [] if kept is None else kept.table
                kept = request
    return {**counted, "largest_batch": largest}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="random_requests.py", description=__doc__.partition("\n")[0])
    add_device(parser)
    parser.add_argument("--requests", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--bits", choices=("batch", "chunks"), default="batch", help="see flash_attention")
    parser.add_argument("--seed", type=int, help="where requests come from (default: a new one)")
    parser.add_argument("--small", action="store_true", help="sizes for Triton's interpreter")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    try:
        device = the_device(options.device)
        sizes = SMALL if options.small else {}
        dtype = torch.float32 if options.small else torch.bfloat16
        generator = torch.Generator().manual_seed(seed)
        model = Model(device, generator, options.bits, dtype, **sizes)
        begun = time.monotonic()
        with torch.no_grad():
            counted = serve(model, options.requests)
    except WarploomError as error:
        print(f"random_requests.py: {error}", file=sys.stderr)
        return 2
    line = {"environment": describe_environment(device), "bits": options.bits, "seed": seed, **counted}
    print(json.dumps(line | {"seconds": round(time.monotonic() - begun, 1)}))
    return 1 if counted["requests_that_differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
