"""Keys and values kept for decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.errors import ArgumentError, ShapeError, fault

__all__ = ["KVCache"]

Tensor = torch.Tensor


class KVCache:
    """Keys and values of the tokens that one attention layer has seen.

    Memory is allocated at the first `append`, in the dtype and on the device of what is appended. Entries of a
    batch may have different lengths: append right-padded prompts, then `truncate` each entry to its own; the next
    token of an entry overwrites its padding. Lengths are kept on the host, so nothing here waits for the GPU.

    Args:
        capacity: Tokens to allocate for, which is then also the most that fit; ``None`` to grow by doubling.

    Attributes:
        lengths: Tokens of each batch entry, as ints; empty before the first append.
    """

    _FIRST = 256  # tokens allocated at first where no capacity is given

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise fault(ArgumentError, "KVCache", "capacity", "positive", capacity)
        self.capacity = capacity
        self.lengths: list[int] = []
        self._k: Tensor | None = None  # (B, allocated, Hkv, D)
        self._v: Tensor | None = None  # (B, allocated, Hkv, E)
        self._device_lengths: Tensor | None = None

    @property
    def length(self) -> int:
        """The largest of the entries' lengths."""
        return max(self.lengths, default=0)

    @property
    def ragged(self) -> bool:
        """Whether entries differ in length."""
        return len(set(self.lengths)) > 1

    @property
    def offset(self) -> int | Tensor:
        """Position of the next token: an int where all entries agree, else an int64 tensor (B,) on the device."""
        if not self.ragged or self._k is None:
            return self.length
        if self._device_lengths is None:
            self._device_lengths = torch.tensor(self.lengths).to(self._k.device, non_blocking=True)
        return self._device_lengths

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the same number of tokens to every entry.

        Args:
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, E)``.

        Returns:
            Views ``(B, length, Hkv, D)`` and ``(B, length, Hkv, E)`` of everything so far. Where entries differ in
            length, what lies behind an entry's own length is finite but means nothing.

        Raises:
            ShapeError: The batch, heads or features are not those of earlier calls.
            ArgumentError: More tokens than the capacity, or a gradient is wanted: the cache is for inference.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise fault(ArgumentError, "KVCache.append", "k, v", "without gradient (torch.no_grad)", "one wanted")
        keys, values = self._room(k, v)
        tokens = k.shape[1]
        if self.ragged:
            start = self.offset
            where = torch.arange(tokens, device=k.device) + start[:, None]  # type: ignore[index]
            entry = torch.arange(k.shape[0], device=k.device)[:, None]
            keys[entry, where], values[entry, where] = k.to(keys.dtype), v.to(values.dtype)
        else:
            end = self.length + tokens
            keys[:, self.length : end], values[:, self.length : end] = k, v
        self._set([length + tokens for length in self.lengths])
        return keys[:, : self.length], values[:, : self.length]

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copy what is valid: ``k`` (1, ΣM, Hkv, D), ``v`` (1, ΣM, Hkv, E) and ``cu_seqlens`` (B + 1,) int32.

        Raises:
            ArgumentError: The cache is empty.
        """
        if self._k is None or self._v is None:
            raise fault(ArgumentError, "KVCache.packed", "the cache", "filled by append first", "an empty one")
        allocated = self._k.shape[1]
        rows = [torch.arange(length) + entry * allocated for entry, length in enumerate(self.lengths)]
        index = torch.cat(rows).to(self._k.device, non_blocking=True)
        starts = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        k, v = (stored.flatten(0, 1).index_select(0, index)[None] for stored in (self._k, self._v))
        return k, v, starts.to(self._k.device, non_blocking=True)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget each entry's tokens from a length on.

        Args:
            lengths: One for all entries, or one for each.

        Raises:
            ShapeError: Not as many lengths as entries.
            ArgumentError: A length is negative or beyond what the entry has.
        """
        wanted = [lengths] * len(self.lengths) if isinstance(lengths, int) else list(lengths)
        if len(wanted) != len(self.lengths):
            raise fault(
                ShapeError, "KVCache.truncate", "lengths", f"one for each of {len(self.lengths)} entries", lengths
            )
        for new, old in zip(wanted, self.lengths):
            if not 0 <= new <= old:
                raise fault(ArgumentError, "KVCache.truncate", "lengths", f"between 0 and {old}", new)
        self._set(wanted)

    def _set(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._device_lengths = None

    def _room(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The storage, large enough for ``k`` and ``v`` behind what is there."""
        if self._k is None or self._v is None:
            if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
                expected = "(B, N, Hkv, D) and (B, N, Hkv, E)"
                raise fault(ShapeError, "KVCache.append", "k, v", expected, (tuple(k.shape), tuple(v.shape)))
            self._k, self._v = (t.new_empty((t.shape[0], 0, *t.shape[2:])) for t in (k, v))
            self.lengths = [0] * k.shape[0]
        for name, new, old in (("k", k, self._k), ("v", v, self._v)):
            if new.shape[0] != old.shape[0] or new.shape[2:] != old.shape[2:] or new.shape[1] != k.shape[1]:
                batch, _, heads, features = old.shape
                expected = f"({batch}, N, {heads}, {features})"
                raise fault(ShapeError, "KVCache.append", name, expected, tuple(new.shape))
        needed = self.length + k.shape[1]
        if self.capacity is not None and needed > self.capacity:
            raise fault(
                ArgumentError, "KVCache.append", "the length", f"at most the capacity {self.capacity}", needed
            )
        allocated = self._k.shape[1]
        if needed > allocated:
            allocated = self.capacity or max(needed, 2 * allocated, self._FIRST)
            self._k, self._v = (_grown(t, allocated) for t in (self._k, self._v))
        return self._k, self._v


def _grown(stored: Tensor, tokens: int) -> Tensor:
    grown = stored.new_zeros((stored.shape[0], tokens, *stored.shape[2:]))
    grown[:, : stored.shape[1]] = stored
    return grown
