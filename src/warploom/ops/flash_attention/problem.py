"""What a call of flash attention is, how long the walks of its tiles are, and into how many parts these are cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.runtime.launch import multiprocessors

Tensor = torch.Tensor

HOPPER_MULTIPROCESSORS = 132  # of an H100 or H200
L2_SHARE = 2**25
"""Bytes of keys and values that programs running together may read again and again from the L2 cache."""

LOG2_E = 1.4426950408889634
_NARROW = 2**22  # strides of rows and features below this keep a tile within 32 bits
_TINY = torch.finfo(torch.float32).tiny


class Mask(NamedTuple):
    """Which keys a query sees: what the public arguments come down to."""

    left: int | None = None
    right: int | None = None  # 0 for causal
    cu_seqlens_q: Tensor | None = None  # (S + 1,), as is the next
    cu_seqlens_k: Tensor | None = None


def tile_features(features: int) -> int:
    """Features of a tile: a power of two that matrix instructions take."""
    return max(1 << (features - 1).bit_length(), 16)


class Geometry(NamedTuple):
    """Sizes of a call."""

    entries: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    features: int  # D
    value_features: int  # E

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // max(self.key_heads, 1)

    @property
    def block_d(self) -> int:
        """Features of a tile of queries or keys."""
        return tile_features(self.features)

    @property
    def block_e(self) -> int:
        """Features of a tile of values."""
        return tile_features(self.value_features)

    def empty(self) -> bool:
        """Whether there is nothing to attend with or to."""
        return 0 in (self.entries, self.tokens, self.keys, self.heads)


def is_plain(geometry: Geometry, mask: Mask, scale: float) -> bool:
    """Whether a call is causal or full attention with features that are one power of two for keys and values."""
    plain = mask.left is None and mask.cu_seqlens_q is None and scale >= 0
    return plain and geometry.features == geometry.value_features == geometry.block_d


def bounds(geometry: Geometry, mask: Mask) -> tuple[int, int]:
    """How many keys to the left and right of a query's place are seen, where that is bounded.

    No more than there are: kernels add these bounds to places, in 32 bits.
    """
    return min(mask.left or 0, geometry.keys), min(mask.right or 0, geometry.tokens)


def in_powers_of_two(scale: float) -> float:
    """The size of ``scale`` for exponents of two; never zero, so that a hidden key's logit stays −inf."""
    return max(abs(scale), _TINY) * LOG2_E


def programs_at_once(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere, where builds are recorded, those of an H100 or H200."""
    return HOPPER_MULTIPROCESSORS if device.type == "cpu" else multiprocessors(device)


class Access(NamedTuple):
    """How kernels address a group of tensors."""

    vec: int  # common divisor of strides, which vector access rests on
    unit: bool  # whether features are adjacent everywhere
    wide: bool  # whether offsets within a tile need 64 bits
    strides: list[int]  # of every tensor, all but those of features divided by vec

    def of(self, *names: str) -> dict[str, Any]:
        """The strides by name, ``q_b`` and so on, of tensors with these names."""
        return dict(zip((f"{name}_{axis}" for name in names for axis in "bnhf"), self.strides, strict=True))


def access_to(*tensors: Tensor) -> Access:
    """Strides as the kernels take them. An axis of size one gets stride 0, since it is never taken."""
    strides = [[s if n > 1 else 0 for n, s in zip(t.shape, t.stride())] for t in tensors]
    unit = all(t.shape[3] == 1 or s[3] == 1 for t, s in zip(tensors, strides))
    divisors = (16, 8, 4) if unit else ()
    vec = next((d for d in divisors if all(s % d == 0 for b, n, h, _ in strides for s in (b, n, h))), 1)
    wide = any(max(abs(n), abs(f)) >= _NARROW for _, n, _, f in strides)
    return Access(vec, unit, wide, [s for b, n, h, f in strides for s in (b // vec, n // vec, h // vec, f)])


class Costs(NamedTuple):
    """What walks cost besides their steps, in steps."""

    start: float  # to start and to end one
    merge: float  # to launch the kernels that merge parts
    merged: float  # elements of parts that are written, read and merged in the time of a step


def walks(kernel: str, geometry: Geometry, mask: Mask, block: int, step: int) -> list[int]:
    """Steps of the walk of each tile of a head, for tiles of ``block`` rows and steps of ``step``."""
    offset = geometry.keys - geometry.tokens  # the last query stands at the last key
    own, walked, behind, ahead, times = geometry.tokens, geometry.keys, mask.left, mask.right, 1
    if kernel == "key":
        offset = -offset
        own, walked, behind, ahead, times = walked, own, ahead, behind, geometry.group
    steps = []
    for first in range(0, own, block):
        last = min(first + block, own) - 1
        begin = 0 if behind is None else max(first + offset - behind, 0)
        end = walked if ahead is None else min(max(last + offset + ahead + 1, 0), walked)
        steps.append(times * max(-(-end // step) - begin // step, 0))
    return steps


def best_parts(steps: list[int], rows: int, programs: int, elements: int, costs: Costs) -> int:
    """Into how many parts walks are cut: as many as make the whole shortest, by an estimate in steps.

    Args:
        steps: Of the walk of each tile of a head.
        rows: Heads of all batch entries.
        programs: That run at the same time.
        elements: Of the results of all walks.
        costs: Of walks.
    """
    units, longest, total = len(steps) * rows, max(steps), sum(steps) * rows
    if units >= _TURNS * programs:
        return 1
    best, chosen = float("inf"), 1
    for parts in _PARTS:
        if parts > 1 and (parts > longest or parts * elements >= _MOST_ELEMENTS):
            break
        unit = -(-longest // parts) + costs.start
        even = (total + units * parts * costs.start) / programs
        if min(steps) == longest:  # all walks are equal: whole turns
            even = -(-units * parts // programs) * unit
        cost = max(unit, even)
        if parts > 1:
            cost += costs.merge + parts * elements / costs.merged
        if cost < best:
            best, chosen = cost, parts
    return chosen


_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TURNS = 4  # so many tiles for every multiprocessor are even enough, and are not split
_MOST_ELEMENTS = 2**31  # of all parts together: their sizes and strides travel in 32 bits
