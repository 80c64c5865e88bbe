"""Answer requests of different lengths from one process, in one batch that changes with every step.

python examples/serve.py --prompts "def main(" "import os" "class A:" --tokens 100
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from warploom.nn import PageTable, TransformerLM


@dataclass
class Request:
    """A prompt, and the tokens that answer it so far."""

    name: int
    prompt: list[int]
    new: int
    done: int = 0  # tokens in the cache
    answer: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The prompt and its answer."""
        return self.prompt + self.answer

    @property
    def left(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.done

    @property
    def longest(self) -> int:
        """Tokens in the cache at the end: the last one of the answer is not read."""
        return len(self.prompt) + self.new - 1


class Server:
    """A model, a cache in pages, and the requests that wait and run.

    A step is one call of the model on at most ``batch`` tokens: the newest token of each answer, and chunks of
    prompts as far as there is room. A prompt that begins like an earlier one shares its pages. Pages of answered
    requests are kept until others need them.
    """

    def __init__(self, model: TransformerLM, pages: int = 1024, page_size: int = 16, batch: int = 512) -> None:
        self.model, self.batch = model, batch
        self.device = next(model.parameters()).device
        self.table = PageTable(pages, page_size)
        self.cache = model.make_paged_cache(self.table)
        self.names = itertools.count()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.answered: deque[Request] = deque()
        self.shared = 0  # tokens of prompts that were in the cache

    def submit(self, prompt: Sequence[int], new: int) -> Request:
        """Queue a prompt, to be answered by so many tokens."""
        request = Request(next(self.names), list(prompt), new)
        if not prompt or new < 1:
            raise ValueError("a prompt and an answer have a token at least")
        if request.longest >= self.model.config.context_length:
            raise ValueError("prompt and answer are longer than the model's context")
        if -(-request.longest // self.table.page_size) > self.table.pages:
            raise ValueError("prompt and answer need more pages than there are")
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> bool:
        """Run the model once. Returns False if there is nothing to do."""
        # Not before there is room in the batch: by then a prompt may find more of its beginning in the cache.
        while self.waiting and sum(r.left for r in self.running) < self.batch and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        counts: dict[int, int] = {}
        room = self.batch
        for request in sorted(self.running, key=lambda r: r.left):  # answers before prompts
            if room:
                counts[request.name] = min(request.left, room)
                room -= counts[request.name]
        if not counts:
            return False
        batch = [request for name in counts for request in self.running if request.name == name]
        new = [token for r in batch for token in r.tokens[r.done : r.done + counts[r.name]]]
        self.table.extend(counts, self.device)
        hidden = self.model.hidden(torch.tensor([new]).to(self.device), self.cache)
        last = self.table.cu_seqlens[1:].long() - 1
        best = self.model.head(hidden[0, last]).argmax(-1).tolist()
        for request, token in zip(batch, best):
            request.done += counts[request.name]
            if not request.left:
                request.answer.append(token)
            if len(request.answer) == request.new:
                self.running.remove(request)
                self.answered.append(request)
        return True

    def admit(self, request: Request) -> bool:
        """Begin a request if there are pages for its whole answer, whatever the others still need."""
        known = [*self.running, *self.answered]
        other = max(known, key=lambda r: self.shared_tokens(request, r), default=None)
        shared = 0 if other is None else self.shared_tokens(request, other)
        self.table.add(request.name, None if other is None else (other.name, shared))
        needed = sum(self.table.count_new_pages(r.name, r.longest - r.done) for r in self.running)
        needed += self.table.count_new_pages(request.name, request.longest - shared)
        while needed > self.table.free_pages and self.answered:
            self.table.remove(self.answered.popleft().name)
        if needed > self.table.free_pages:
            self.table.remove(request.name)
            return False
        request.done = shared
        self.shared += shared
        return True

    def shared_tokens(self, request: Request, other: Request) -> int:
        """Whole pages with which two requests begin, in tokens. One token of a prompt is always left to compute."""
        most = min(len(request.prompt) - 1, other.done)
        pairs = zip(request.prompt[:most], other.tokens[:most])
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return same - same % self.table.page_size


def main(words: list[str] | None = None) -> None:
    """Read the command line, load the newest checkpoint, and answer all prompts."""
    from train_lm import autocast, last_checkpoint

    options = parse(words)
    checkpoint = last_checkpoint(options.output)
    if checkpoint is None:
        raise SystemExit(f"{options.output}: no checkpoint here; examples/train_lm.py makes one")
    device = torch.device(options.device)
    model = TransformerLM.load(checkpoint / "model.safetensors", device=device).eval()
    server = Server(model, batch=options.batch)
    requests = [server.submit(list(prompt.encode()), options.tokens) for prompt in options.prompts]
    started, steps = time.perf_counter(), 0
    with autocast(device):
        while server.step():
            steps += 1
    seconds = time.perf_counter() - started
    for request in requests:
        print(bytes(request.tokens).decode(errors="replace"), end="\n\n")
    tokens = sum(len(request.answer) for request in requests)
    print(f"[{len(requests)} requests, {tokens} bytes in {steps} steps, {tokens / seconds:,.0f} per second]")


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/lm"), help="of train_lm.py (default: runs/lm)")
    parser.add_argument("--prompts", nargs="+", default=["def ", "import ", "class "])
    parser.add_argument("--tokens", type=int, default=100, help="bytes of each answer")
    parser.add_argument("--batch", type=int, default=512, help="tokens of a step at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
