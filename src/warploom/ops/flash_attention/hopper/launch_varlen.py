"""Packed sequences for the kernels for Hopper: where their rows are, and copies there and back; see `hopper.varlen`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.hopper.varlen import cache_units_kernel, spread_kernel, units_kernel
from warploom.ops.flash_attention.hopper.work import UNIT
from warploom.ops.flash_attention.problem import Call, MaskSpec
from warploom.runtime.launch import Buffer, Launch
from warploom.runtime.layout import layout_for
from warploom.runtime.memory_order import empty_in_order, memory_order

Tensor = torch.Tensor

_MOST_SEQUENCES = 4096
LEAST_MEAN = {"forward": {64: 512, 128: 128}, "backward": {64: 1024, 128: 256}}
"""Rows of a sequence, in the mean, from which these kernels are worth it, by features of a tile.

From packings of 32768 rows in sequences of 128 … 16384, of the forward on an H200, of the backward on an H100. For
the latter half as many are enough for grouped heads, which have fewer keys and values to copy."""
_MOST_ELEMENTS = 2**31
"""Elements of a tensor that is copied, or stored by rows, at most."""
_ELEMENTS = 8192
"""Elements that a program copies."""


class Copy(NamedTuple):
    """Plan of a copy of rows to where they are spread, or back."""

    spread: Buffer
    launch: Launch
    keys: bool  # whether rows are those of keys

    def spread_out(self, packed: Tensor, places: Places) -> Tensor:
        """The rows, spread."""
        spread = self.spread.empty(packed)
        self.launch(packed, spread, *places.of(self.keys))
        return spread

    def pack(self, spread: Tensor, packed: Tensor, places: Places) -> None:
        """Back into a tensor like that of the plan."""
        self.launch(packed, spread, *places.of(self.keys))


class Places(NamedTuple):
    """Places of rows, on the device."""

    units_q: Tensor
    units_k: Tensor
    shifts_q: Tensor
    shifts_k: Tensor

    def of(self, keys: bool) -> tuple[Tensor, Tensor]:
        """Units and shifts."""
        return (self.units_k, self.shifts_k) if keys else (self.units_q, self.shifts_q)


class Spread(NamedTuple):
    """Plan of where rows of a call are spread to."""

    call: Call
    """On spread rows."""
    nowhere: Places
    """Without memory."""
    tables: tuple[Buffer, ...]
    units: Launch

    def places(self, mask: MaskSpec, near: Tensor) -> Places:
        """Returns the places of rows."""
        places = Places(*(table.empty(near) for table in self.tables))
        self.units(mask.cu_seqlens_q, mask.cu_seqlens_k, *places)
        return places

    def mask(self, places: Places) -> MaskSpec:
        """The mask of the call on spread rows."""
        return self.call.mask._replace(units_q=places.units_q, units_k=places.units_k)

    def packed_mask(self, places: Places) -> MaskSpec:
        """The mask of the call on rows as they come."""
        return self.mask(places)._replace(shifts=places.shifts_q)


def suits(name: str, call: Call, *tensors: Tensor) -> bool:
    """Returns whether a ``forward`` or ``backward`` has packed sequences, long ones, and adjacent features everywhere."""
    mask, shape = call.mask, call.shape
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None or mask.seqused_k is not None:
        return False
    sequences = mask.cu_seqlens_q.shape[0] - 1
    few = 0 < sequences <= _MOST_SEQUENCES and all(x.stride(3) == 1 for x in tensors)
    least = next((mean for width, mean in LEAST_MEAN[name].items() if shape.width <= width), None)
    if least is None or any(x.numel() >= _MOST_ELEMENTS for x in tensors):
        return False
    least = least // 2 if shape.group > 1 and name == "backward" else least
    return few and min(shape.tokens, shape.keys) >= least * sequences


def spread_rows(rows: int, sequences: int) -> int:
    """Returns how many rows so many sequences and a tail take at most, where each begins at a unit."""
    unit: int = UNIT.value
    return (-(-rows // unit) + sequences) * unit


def plan(call: Call) -> Spread:
    """Places that the rows of a call are spread to."""
    mask, shape = call.mask, call.shape
    cu_q: Any = mask.cu_seqlens_q
    cu_k: Any = mask.cu_seqlens_k
    sequences = cu_q.shape[0] - 1
    tokens, keys = (spread_rows(rows, sequences) for rows in (shape.tokens, shape.keys))
    count_q, count_k = tokens // UNIT.value, keys // UNIT.value
    sizes = ((count_q, 4), (count_k, 4), (count_q, 2), (count_k, 2))
    units = Launch(
        units_kernel,
        count_q + count_k,
        takes=("cu_seqlens_q", "cu_seqlens_k", "units_q", "units_k", "shifts_q", "shifts_k"),
        q_stride=cu_q.stride(0), k_stride=cu_k.stride(0), sequences=sequences, count_q=count_q,
        tokens=shape.tokens, keys=shape.keys,
        BLOCK_S=max(1 << (sequences - 1).bit_length(), 16),
    )  # fmt: skip
    nowhere = Places(*(torch.empty(size, dtype=torch.int32, device="meta") for size in sizes))
    masked = MaskSpec(mask.left, mask.right, units_q=nowhere.units_q, units_k=nowhere.units_k, sequences=sequences)
    spread = shape._replace(tokens=tokens, keys=keys)
    tables = tuple(map(Buffer.like, nowhere))
    return Spread(call._replace(shape=spread, mask=masked), nowhere, tables, units)


class CacheUnits(NamedTuple):
    """Plan of where the rows of packed queries on a cache are, except those of sequences of few queries."""

    call: Call
    """On rows that have units."""
    tables: tuple[Buffer, ...]  # units, shifts, counts
    units: Launch

    def __call__(self, mask: MaskSpec, near: Tensor) -> tuple[Tensor, ...]:
        """Returns units, their shifts, and a counter of zero with the number of units."""
        tables = tuple([table.empty(near) for table in self.tables])
        self.units(mask.cu_seqlens_q, mask.seqused_k, *tables)
        return tables


def plan_cache_units(call: Call, few: int, out: Tensor) -> CacheUnits | str:
    """Returns where packed queries on a cache are, of sequences of more than ``few`` queries; or why not."""
    cu_seqlens: Any = call.mask.cu_seqlens_q
    sequences, tokens = cu_seqlens.shape[0] - 1, call.shape.tokens
    if not 0 < sequences <= _MOST_SEQUENCES:
        return f"{sequences} sequences, not 1 to {_MOST_SEQUENCES}"
    if out.numel() >= _MOST_ELEMENTS:
        return "places of results do not fit in 32 bits"
    count = tokens // UNIT.value + min(sequences, tokens // (few + 1)) + 1
    launch = Launch(
        cache_units_kernel,
        count,
        takes=("cu_seqlens_q", "seqused_k", "units", "shifts", "counts"),
        q_stride=cu_seqlens.stride(0), sequences=sequences, tokens=tokens, keys=call.shape.keys, few=few,
        BLOCK_S=max(1 << (sequences - 1).bit_length(), 16),
    )  # fmt: skip
    units, shifts = (torch.empty((count, width), dtype=torch.int32, device="meta") for width in (4, 2))
    mask = MaskSpec(call.mask.left, call.mask.right, units_q=units, shifts=shifts)
    tables = (Buffer.like(units), Buffer.like(shifts), Buffer.rows((2,), torch.int32))
    return CacheUnits(call._replace(mask=mask), tables, launch)


def plan_copy(x: Tensor, spread: Spread, *, keys: bool, fill: float = 0.0, back_from: Buffer | None = None) -> Copy:
    """Plan of the copy of a tensor (1, N, H, F), which may be without memory.

    Rows are spread in the memory order of ``x``, with ``fill`` behind sequences, or come back from where they are.
    """
    rows = spread.call.shape.keys if keys else spread.call.shape.tokens
    _, _, heads, features = x.shape
    near = torch.empty(0, dtype=x.dtype, device="meta")
    of_spread = empty_in_order(near, (1, rows, heads, features), memory_order(x))
    if back_from is not None:
        of_spread = near.new_empty_strided(back_from.shape, back_from.stride)
    block_f = 1 << (features - 1).bit_length()
    block_r = min(_ELEMENTS // block_f, UNIT.value)
    layout = layout_for(Strides, x, of_spread)
    launch = Launch(
        spread_kernel,
        rows // block_r * heads,
        takes=("packed", "spread", "units", "shifts"),
        heads=heads, KEYS=keys, BACK=back_from is not None, FILL=fill, VEC=layout.vec, F=features,
        BLOCK_R=block_r, BLOCK_F=block_f,
        **layout.of("packed", "spread"),
    )  # fmt: skip
    return Copy(Buffer.like(of_spread), launch, keys)


def of_rows(heads: int, rows: int) -> Tensor:
    """A float32 number for each query, (1, H, N), as `plan_copy` takes it, without memory."""
    return torch.empty((1, heads, rows), device="meta").transpose(1, 2)[..., None]
