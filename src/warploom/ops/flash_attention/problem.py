"""Calls of flash attention, how long the loops of their tiles are, and how many splits these have."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.runtime.layout import tile_width

Tensor = torch.Tensor

HOPPER_MULTIPROCESSORS = 132  # of an H100 or H200
L2_SHARE = 2**25
"""Bytes of keys and values that programs running together may read again and again from the L2 cache."""
LOG2_E = 1.4426950408889634
WIDEST = 256
"""Features of rows that all kernels take."""
_TINY = torch.finfo(torch.float32).tiny


class MaskSpec(NamedTuple):
    """A mask: the keys that a query sees, in the terms that all kernels use."""

    left: int | None = None
    right: int | None = None  # 0 for causal
    cu_seqlens_q: Tensor | None = None  # (S + 1,)
    cu_seqlens_k: Tensor | None = None  # (S + 1,)
    seqused_k: Tensor | None = None  # (B,), of adjacent numbers
    block_table: Tensor | None = None  # (B, P), of adjacent numbers
    units_q: Tensor | None = None  # of packed queries: see `hopper.varlen`
    units_k: Tensor | None = None  # of packed keys
    shifts: Tensor | None = None  # of units of queries, where rows are not spread
    sequences: int = 1  # how many they are

    @property
    def on_cache(self) -> bool:
        """Returns whether queries are packed, and every sequence has its keys in a cache."""
        return self.cu_seqlens_q is not None and self.cu_seqlens_k is None and self.seqused_k is not None

    def keys_of(self, k: Tensor) -> int:
        """Returns the keys of a batch entry, those in pages included that it does not use."""
        return int(k.shape[1]) * (1 if self.block_table is None else int(self.block_table.shape[1]))


class Logits(NamedTuple):
    """A cap of the logits, and a sink beside them."""

    softcap: float | None = None
    sink: Tensor | None = None  # (Hq,), of adjacent numbers


PLAIN = Logits()


class Masking(NamedTuple):
    """A call's means, beside bounds, to say what is seen: a bias, slopes, and the tensors of a `BlockMask`."""

    bias: Tensor | None = None  # (B|1, Hq|1, N|1, M)
    alibi: Tensor | None = None  # (Hq,) or (B, Hq)
    tiles: Tensor | None = None
    row_lists: Tensor | None = None
    column_lists: Tensor | None = None
    bits: Tensor | None = None
    column_bits: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor | None, ...]:
        """Arguments of kernels that own queries: with lists of columns."""
        return self.tiles, self.row_lists, self.bits, self.column_bits, self.bias, self.alibi

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """Arguments of kernels that own keys: with lists of rows."""
        return self.tiles, self.column_lists, self.bits, self.bias, self.alibi

    @property
    def of_rows_alone(self) -> tuple[Tensor | None, ...]:
        """Arguments of a kernel for Hopper that owns queries: slopes, a bias, or a mask's."""
        return self.rows[:4] if self.tiles is not None else (self.bias if self.alibi is None else self.alibi,)

    @property
    def of_columns_alone(self) -> tuple[Tensor | None, ...]:
        """Arguments of a kernel for Hopper that owns keys."""
        return (*self.columns[:3], self.column_bits) if self.tiles is not None else (self.alibi,)


class Shape(NamedTuple):
    """Sizes of a call."""

    batch_size: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int  # D
    value_dim: int  # E

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // max(self.key_heads, 1)

    @property
    def block_d(self) -> int:
        """Features of a tile of queries or keys; of more than `WIDEST`, those of its first part."""
        return tile_width(self.head_dim) if self.head_dim <= WIDEST else 1 << (self.head_dim.bit_length() - 1)

    @property
    def rest_d(self) -> int:
        """Features of the second part of a tile of queries or keys, where it has two, or 0."""
        rest = self.head_dim - self.block_d
        return tile_width(rest) if rest > 0 else 0

    @property
    def block_e(self) -> int:
        """Features of a tile of values."""
        return tile_width(self.value_dim)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        """Returns the sizes of a call on these tensors; of keys in pages, those of one page."""
        batch_size, tokens, heads, head_dim = q.shape
        return cls(batch_size, tokens, k.shape[1], heads, k.shape[2], head_dim, v.shape[3])

    @property
    def width(self) -> int:
        """The wider of both tiles."""
        return max(self.block_d, self.block_e)

    @property
    def is_latent(self) -> bool:
        """Returns whether rows are so long that only the kernel for a latent cache takes them."""
        return max(self.head_dim, self.value_dim) > WIDEST

    def empty(self) -> bool:
        """Returns whether there is nothing to attend with or to."""
        return 0 in (self.batch_size, self.tokens, self.keys, self.heads)


def begins_with(k: Tensor, v: Tensor) -> bool:
    """Returns whether values are the first features of keys, in their memory, as those of a latent cache are."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()


def is_plain(shape: Shape, mask: MaskSpec, scale: float) -> bool:
    """Returns whether a call is causal or full attention of all keys, with 2ⁿ features everywhere."""
    plain = mask.left is None and mask.cu_seqlens_q is None and mask.seqused_k is None and scale >= 0
    return plain and shape.head_dim == shape.value_dim == shape.block_d


def bounds(shape: Shape, mask: MaskSpec) -> tuple[int, int]:
    """Returns how many keys to the left and right of a query's place are seen, where that is bounded.

    No more than there are: kernels add these bounds to places, in 32 bits.
    """
    return min(mask.left or 0, shape.keys), min(mask.right or 0, shape.tokens)


def in_powers_of_two(scale: float) -> float:
    """Returns the size of ``scale`` for exponents of two; never zero, so that a hidden key's logit stays −inf."""
    return max(abs(scale), _TINY) * LOG2_E


def programs_at_once(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU; elsewhere, where builds are recorded, those of an H100 or H200."""
    if device.type == "cpu":
        return HOPPER_MULTIPROCESSORS
    from warploom.runtime.launch import multiprocessors  # imports Triton

    return multiprocessors(device)


class Costs(NamedTuple):
    """Costs of loops besides their steps, in the time of a step."""

    start: float  # to start and to end one
    merge: float  # to launch the kernels that merge parts
    merged: float  # elements of parts that are written, read and merged in the time of a step


def loop_steps(kernel: str, shape: Shape, mask: MaskSpec, block: int, step: int) -> list[int]:
    """Returns the steps of the loop of each tile of a head, for tiles of ``block`` rows and steps of ``step``."""
    offset = shape.keys - shape.tokens  # the last query stands at the last key
    own, other, behind, ahead, times = shape.tokens, shape.keys, mask.left, mask.right, 1
    if kernel == "key":
        offset = -offset
        own, other, behind, ahead, times = other, own, ahead, behind, shape.group
    steps = []
    for first in range(0, own, block):
        last = min(first + block, own) - 1
        begin = 0 if behind is None else max(first + offset - behind, 0)
        end = other if ahead is None else min(max(last + offset + ahead + 1, 0), other)
        steps.append(times * max(-(-end // step) - begin // step, 0))
    return steps


def heads_of_section(heads: int, head_bytes: int, least: int = 1) -> int:
    """Returns how many heads are taken together: as many as share the L2 cache, in ``least`` sections or more.

    Sections are equally large: in a smaller last one, long loops would begin when few are left beside them.
    """
    sections = max(-(-heads // max(L2_SHARE // head_bytes, 1)), least)
    return -(-heads // sections)


def best_splits(steps: list[int], rows: int, programs: int, elements: int, costs: Costs) -> int:
    """Returns the number of splits of each loop that makes the whole fastest, by an estimate in steps.

    Args:
        steps: Of the loop of each tile of a head.
        rows: Heads of all batch entries.
        programs: That run at the same time.
        elements: Of the results of all loops.
        costs: Of loops.
    """
    units, longest, total = len(steps) * rows, max(steps), sum(steps) * rows
    if units >= _EVEN_ENOUGH * programs:
        return 1
    best, chosen = float("inf"), 1
    for splits in _SPLITS:
        if splits > 1 and (splits > longest or splits * elements >= _MOST_ELEMENTS):
            break
        unit = -(-longest // splits) + costs.start
        even = (total + units * splits * costs.start) / programs
        if min(steps) == longest:  # all loops are equal: whole waves
            even = -(-units * splits // programs) * unit
        cost = max(unit, even)
        if splits > 1:
            cost += costs.merge + splits * elements / costs.merged
        if cost < best:
            best, chosen = cost, splits
    return chosen


_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_EVEN_ENOUGH = 4  # so many tiles for every multiprocessor are even enough, and are not split
_MOST_ELEMENTS = 2**31  # of all parts together: their sizes and strides travel in 32 bits


class Call(NamedTuple):
    """A call of flash attention, apart from its tensors."""

    shape: Shape
    mask: MaskSpec
    scale: float
    dtype: torch.dtype
    device: torch.device
    softcap: float | None = None
    precision: str = "highest"  # of products of float32
    aligned: bool = True  # whether all addresses are multiples of 16 bytes
    has_sink: bool = False
    fused: bool | None = None  # whether one kernel forms all gradients; None: whichever is faster
    chunks: bool = False  # whether a query's bits must not depend on how many others of its sequence there are
    shared: bool = False  # whether rows are wide, and values the first features of keys, in their memory

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, softcap: float | None = None
    ) -> Call:
        """Returns the call on these tensors."""
        shape = Shape.of(q, k, v)._replace(keys=mask.keys_of(k))
        return cls(shape, mask, scale, q.dtype, q.device, softcap)

    @property
    def plain(self) -> bool:
        """True if logits have no cap, and the rest is plain; see `is_plain`."""
        return self.softcap is None and is_plain(self.shape, self.mask, self.scale)
