"""A cache in pages, for servers: sequences come, grow by any number of tokens in a step, and go."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from warploom import append_kv
from warploom.errors import ArgumentError, fault
from warploom.nn.common import check_sizes
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor


@name_arguments
class PageTable:
    """The pages of each sequence that a server answers, shared by the caches of all layers of a model.

    It is kept on the host. `extend` says which sequences a step has, with how many new tokens each, and makes the
    tensors that layers read: nothing waits for the device.

    Args:
        pages: Pages in the pool of each layer.
        page_size: Tokens of a page.

    Attributes:
        lengths: Tokens of each sequence, by its name.
        cu_seqlens: ``(S + 1,)`` int32, bounds of the new tokens of the step.
        seqused_k: ``(S,)`` int32, lengths with the new tokens.
        block_table: ``(S, P)`` int32, the pages of each sequence.
        position_ids: ``(1, N)`` int64, places of the new tokens.

    Raises:
        ArgumentError: A size is not positive.

    Example:
        ```python
        from warploom.nn import PageTable

        table = PageTable(pages=8, page_size=4)
        table.add("a")
        table.extend({"a": 6})
        table.add("b", prefix=("a", 4))  # begins with a page of the other
        table.extend({"a": 1, "b": 3})
        print(table.lengths, table.free_pages)  # {'a': 7, 'b': 7} 5
        ```
    """

    cu_seqlens: Tensor
    seqused_k: Tensor
    block_table: Tensor
    position_ids: Tensor

    def __init__(self, pages: int, page_size: int = 16) -> None:
        check_sizes("PageTable", pages=pages, page_size=page_size)
        self.pages, self.page_size = pages, page_size
        self.lengths: dict[Hashable, int] = {}
        self._pages: dict[Hashable, list[int]] = {}
        self._free = list(range(pages))
        self._users = [0] * pages

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence has."""
        return len(self._free)

    def add(self, sequence: Hashable, prefix: tuple[Hashable, int] | None = None) -> None:
        """Begin a sequence.

        Args:
            sequence: Its name.
            prefix: A sequence of the table and a number of its tokens, a multiple of the page size, with which this
                one begins too. Their pages are shared.

        Raises:
            ArgumentError: There is such a sequence already, or no such prefix.
        """
        if sequence in self.lengths:
            raise fault(ArgumentError, "PageTable.add", "sequence", "a new name", repr(sequence))
        pages, tokens = [], 0
        if prefix is not None:
            other, tokens = prefix
            if not 0 <= tokens <= self.lengths.get(other, -1) or tokens % self.page_size:
                expected = f"a sequence and a multiple of {self.page_size} of its tokens"
                raise fault(ArgumentError, "PageTable.add", "prefix", expected, prefix)
            pages = self._pages[other][: tokens // self.page_size]
        for page in pages:
            self._users[page] += 1
        self.lengths[sequence], self._pages[sequence] = tokens, pages

    def remove(self, sequence: Hashable) -> None:
        """Forget a sequence. Pages that no other one shares are free.

        Raises:
            ArgumentError: There is no such sequence.
        """
        self._check("remove", sequence)
        del self.lengths[sequence]
        for page in self._pages.pop(sequence):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def count_new_pages(self, sequence: Hashable, tokens: int) -> int:
        """Returns the number of pages that a sequence needs for more tokens.

        Raises:
            ArgumentError: There is no such sequence.
        """
        self._check("count_new_pages", sequence)
        return -(-(self.lengths[sequence] + tokens) // self.page_size) - len(self._pages[sequence])

    def extend(self, tokens: Mapping[Any, int], device: torch.device | str = "cpu") -> None:
        """Begin a step, in which sequences grow by so many tokens each, packed in this order.

        Args:
            tokens: The number of new tokens of each sequence, by name.
            device: The device of the model.

        Raises:
            ArgumentError: There is no such sequence, a number is negative, or there are not enough pages. Nothing
                has changed then.
        """
        for count in tokens.values():
            if count < 0:
                raise fault(ArgumentError, "PageTable.extend", "tokens", "at least 0", count)
        needed = {sequence: self.count_new_pages(sequence, count) for sequence, count in tokens.items()}
        if sum(needed.values()) > len(self._free):
            expected = f"such that {len(self._free)} free pages hold them"
            raise fault(ArgumentError, "PageTable.extend", "tokens", expected, f"{sum(needed.values())} pages")
        places: list[int] = []
        for sequence, count in tokens.items():
            taken = [self._free.pop() for _ in range(needed[sequence])]
            for page in taken:
                self._users[page] = 1
            self._pages[sequence] = self._pages[sequence] + taken
            places += range(self.lengths[sequence], self.lengths[sequence] + count)
            self.lengths[sequence] += count
        most = max((len(self._pages[sequence]) for sequence in tokens), default=0)
        rows = [self._pages[sequence] + [0] * (most - len(self._pages[sequence])) for sequence in tokens]

        def tensor(numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)

        self.cu_seqlens = tensor([*itertools.accumulate(tokens.values(), initial=0)])
        self.seqused_k = tensor([self.lengths[sequence] for sequence in tokens])
        self.block_table = tensor(rows).view(len(rows), most)
        self.position_ids = tensor([places], torch.int64)

    def _check(self, what: str, sequence: Hashable) -> None:
        if sequence not in self.lengths:
            raise fault(ArgumentError, f"PageTable.{what}", "sequence", "one of the table", repr(sequence))


@name_arguments
class PagedKVCache:
    """Keys and values that an `Attention` layer has seen, in pages of sequences of any lengths.

    The layer is called with the new tokens of all sequences of a step, packed as `PageTable.extend` says,
    ``(1, N, d_model)``.

    Args:
        table: Which pages are whose. Several layers share it.

    Example:
        ```python
        import torch
        from warploom.nn import Attention, PagedKVCache, PageTable, RotaryEmbedding

        layer = Attention(64, 4, position=RotaryEmbedding(16), causal=True)
        table = PageTable(pages=8)
        cache = PagedKVCache(table)
        for name in ("a", "b"):
            table.add(name)
        with torch.no_grad():
            table.extend({"a": 20, "b": 5})
            layer(torch.randn(1, 25, 64), cache=cache)  # two prompts
            table.extend({"a": 1, "b": 1})
            print(layer(torch.randn(1, 2, 64), cache=cache).shape)  # torch.Size([1, 2, 64])
        ```
    """

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self._pools: tuple[Tensor, Tensor] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the table, with those of the step."""
        return max(self.table.lengths.values(), default=0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Write the keys and values of a step's tokens.

        Args:
            k: ``(1, N, Hkv, D)``.
            v: ``(1, N, Hkv, E)``.

        Returns:
            The pools ``(pages, page_size, Hkv, ·)``, and the arguments of `warploom.flash_attention` that say whose
            they are.

        Raises:
            WarploomError: As of `warploom.append_kv`.
        """
        table = self.table
        if self._pools is None:
            shape = (table.pages, table.page_size)
            # Outside of inference mode, as a later step may be.
            with torch.inference_mode(False):
                self._pools = (
                    torch.zeros(*shape, *k.shape[2:], dtype=k.dtype, device=k.device),
                    torch.zeros(*shape, *v.shape[2:], dtype=v.dtype, device=v.device),
                )
        bounds, used, pages = table.cu_seqlens, table.seqused_k, table.block_table
        append_kv(k, v, *self._pools, cu_seqlens=bounds, seqused_k=used, block_table=pages)
        return *self._pools, {"cu_seqlens_q": bounds, "seqused_k": used, "block_table": pages}
