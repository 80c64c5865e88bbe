"""Launchers of flash attention's kernels for Hopper: which calls they take, and how these are cut into tiles.

They take 16-bit tensors whose rows the tensor memory accelerator can copy, with up to 256 features (what is
missing to 64, 128 or 256 is filled with zeros), in causal and full attention with any number of heads to a key
head. Windows to the left and packed sequences stay with the kernels for every GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.device.hopper.pipeline import NARROW, ROWS
from warploom.ops.flash_attention.kernels.hopper import backward, forward, shared_rows
from warploom.ops.flash_attention.problem import (
    HOPPER_MULTIPROCESSORS,
    L2_SHARE,
    LOG2_E,
    Costs,
    Geometry,
    Mask,
    best_parts,
    bounds,
    in_powers_of_two,
    programs_at_once,
    walks,
)
from warploom.runtime.launch import INTERPRETED, Boxes, Launch, architecture, can_be_copied

Tensor = torch.Tensor

_ROWS = ROWS.value
_LEAST_FEATURES = 32  # up to here, tiles of 64 features would be half empty


class Tiles(NamedTuple):
    """How a kernel cuts its work."""

    groups: int  # of 64 rows; a group of warps each, or two with both gradients of wide keys
    box: int  # rows of the tiles they walk over
    stages: int  # such tiles in flight


TILES = {
    "forward": {64: Tiles(3, 128, 2), 128: Tiles(2, 128, 2), 256: Tiles(2, 64, 2)},
    "key": {64: Tiles(2, 128, 2), 128: Tiles(2, 64, 3), 256: Tiles(1, 64, 2)},
    "query": {64: Tiles(3, 64, 3), 128: Tiles(2, 64, 3), 256: Tiles(2, 64, 2)},
}
"""By features of a tile; measured on an H200 (see "How it reaches the limit").

For the gradient of queries with 256 features there is one stage less of values."""

_SMALLER = {"forward": Tiles(2, 128, 3), "query": Tiles(2, 64, 3)}
"""With 64 features, where walks are short and uneven, or so few that they are split, or where larger tiles leave
too many multiprocessors idle in the last turn of a full attention."""

_SMALLER_STEP = 0.81
"""Of the time of a step with three groups, whose tiles take the time of one more step to start; from 2 and 4 × 16
heads of 1024 and 2048 tokens on an H200."""

COSTS = {"forward": Costs(6, 5, 5e5), "key": Costs(1.5, 2, 2e5), "query": Costs(0.5, 3, 3e5)}
"""Fitted to one head of 1024 … 65536 tokens on an H200: what they choose takes at most 1.06 times as long as the
best number of parts, for the gradient of queries 1.17."""

_SHORT = 2048  # backward walks that would be split and are shorter than this stay with the kernels for every GPU


def _width(geometry: Geometry) -> int:
    """Features of a tile."""
    features = max(geometry.features, geometry.value_features)
    return next(width for width in (64, 128, 256) if features <= width)


def _tiles(name: str, geometry: Geometry, mask: Mask) -> Tiles:
    width = _width(geometry)
    tiles = TILES[name][width]
    if width != 64 or name not in _SMALLER:
        return tiles
    smaller, programs = _SMALLER[name], HOPPER_MULTIPROCESSORS
    count, more = (
        -(-geometry.tokens // (x.groups * _ROWS)) * geometry.entries * geometry.heads for x in (tiles, smaller)
    )
    if mask.right is None:  # walks are equal, and so is every program's share: turns of whole tiles
        steps = -(-geometry.keys // tiles.box)
        time = -(-count // programs) * (steps + 1)
        shorter = -(-more // programs) * steps * _SMALLER_STEP
        whole = name == "forward" and _best_parts(name, geometry, mask, tiles, programs) == 1
        return smaller if whole and shorter < time else tiles
    few = 2 * programs if name == "forward" else programs // 2
    return smaller if count < few or (name == "forward" and geometry.keys < 4096) else tiles


def _blocks(name: str, geometry: Geometry, mask: Mask) -> tuple[int, int]:
    """Tiles of a kernel along the sequence, and along batch entries and heads."""
    block = _tiles(name, geometry, mask).groups * _ROWS
    if name == "key":
        return -(-geometry.keys // block), geometry.entries * geometry.key_heads
    return -(-geometry.tokens // block), geometry.entries * geometry.heads


def suit(name: str, geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> bool:
    """Whether the kernel ``name`` takes a call with these tensors, apart from their addresses."""
    first = tensors[0]
    if INTERPRETED or architecture(first.device) != 90:
        return False
    if mask.left is not None or mask.cu_seqlens_q is not None or scale <= 0:
        return False
    if not _LEAST_FEATURES < max(geometry.features, geometry.value_features) <= max(TILES[name]):
        return False
    if any(t.dtype not in (torch.float16, torch.bfloat16) or t.dtype != first.dtype for t in tensors):
        return False
    blocks, rows = _blocks(name, geometry, mask)
    walked = geometry.tokens if name == "key" else geometry.keys
    if name != "forward" and walked < _SHORT and blocks * rows < programs_at_once(first.device) // 2:
        return False
    return all(map(can_be_copied, tensors))


class Plan(NamedTuple):
    """A launch of a kernel, and into how many parts it cuts walks."""

    launch: Launch
    parts: int
    counted: bool  # whether its tiles are counted, with tickets that must be zero


def _parts(name: str, geometry: Geometry, mask: Mask, device: torch.device) -> int:
    """Into how many parts walks are cut."""
    return _best_parts(name, geometry, mask, _tiles(name, geometry, mask), programs_at_once(device))


def _best_parts(name: str, geometry: Geometry, mask: Mask, tiles: Tiles, programs: int) -> int:
    """Into how many parts walks are best cut with such tiles."""
    steps = walks(name, geometry, mask, tiles.groups * _ROWS, tiles.box)
    rows = geometry.entries * (geometry.key_heads if name == "key" else geometry.heads)
    elements = geometry.entries * max(
        geometry.tokens * geometry.heads * (geometry.value_features if name == "forward" else geometry.features),
        geometry.keys * geometry.key_heads * (geometry.features + geometry.value_features),
    )
    return best_parts(steps, rows, programs, elements, COSTS[name])


def plan(name: str, geometry: Geometry, mask: Mask, scale: float, tensors: tuple[Tensor, ...]) -> Plan:
    """The launch of a kernel that suits: see `TILES` for its name.

    ``tensors``, (q, k, v, out), (q, k, v, grad, dk, dv) or (q, k, v, grad, dq), are like those that it will be
    launched on; if walks are cut, results will be parts, as many in one float32 tensor, each in its result's memory
    order. Behind them come lse and statistics, or shift and δ, and tickets.
    """
    width = _width(geometry)
    wide = shared_rows.hopper_wide_key_kernel
    function = {
        "forward": forward.hopper_forward_kernel,
        "key": wide if width > NARROW.value else backward.hopper_key_kernel,
        "query": backward.hopper_query_kernel,
    }[name]
    tiles = _tiles(name, geometry, mask)
    own, walked = (1, 1, _ROWS, width), (1, 1, tiles.box, width)
    boxes = {
        "forward": {"q_desc": own, "k_desc": walked, "v_desc": walked, "out": own},
        "key": {"q_desc": walked, "k_desc": own, "v_desc": own, "do_desc": walked, "dk": own, "dv": own},
        "query": {"q_desc": own, "k_desc": walked, "v_desc": walked, "do_desc": own, "dq": own},
    }[name]
    inputs = 3 if name == "forward" else 4
    results = dict(list(zip(boxes, tensors))[inputs:])
    blocks, rows = _blocks(name, geometry, mask)
    parts = _parts(name, geometry, mask, tensors[0].device)
    described: dict[str, Any] = {
        name: Boxes(tensor, (0, 2, 1, 3), tile)
        for (name, tile), tensor in zip(boxes.items(), tensors)
        if parts == 1 or name not in results
    }
    # Heads are taken in sections: see `kernels.program_order`.
    length = geometry.tokens if name == "key" else geometry.keys
    head_bytes = length * (geometry.features + geometry.value_features) * tensors[0].element_size()
    section = max(L2_SHARE // head_bytes, 1) * (1 if name == "key" else geometry.group)
    slope: dict[str, Any] = {} if name == "forward" else {"slope": scale}
    count = blocks * rows * parts
    programs = min(programs_at_once(tensors[0].device), count)
    launch = Launch(
        function,
        programs,
        takes=(*boxes, *(("lse", "statistics") if name == "forward" else ("shift", "delta")), "tickets"),
        early=name != "forward",
        tokens=geometry.tokens, keys=geometry.keys, heads=geometry.heads, group=geometry.group, rows=rows,
        blocks=blocks, section=min(section, rows), parts=parts, right=bounds(geometry, mask)[1],
        scale=scale * LOG2_E, **slope,
        CAUSAL=mask.right is not None, SPLIT=parts > 1, GROUPS=tiles.groups, STAGES=tiles.stages,
        **described, **_places(results, parts),
    )  # fmt: skip
    shared = name == "forward" and mask.right is None and count <= forward.EVEN_TURNS.value * programs
    return Plan(launch, parts, programs < count and not shared)


_PLACE = ("size", "b", "n", "h", "features")


def _places(results: dict[str, Tensor], parts: int) -> dict[str, Any]:
    """Size, strides and features of each of the parts of results, where there are several."""
    return {
        f"{name}_{field}": number
        for name, x in results.items()
        for field, number in zip(_PLACE, (x.numel(), *x.stride()[:3], x.shape[3]) if parts > 1 else (0,) * 5)
    }


PIECES_TILES = {3: {64: Tiles(1, 64, 2), 128: Tiles(1, 32, 2)}, 2: {64: Tiles(1, 64, 3), 128: Tiles(1, 64, 2)}}
"""Of the backward kernels for float32, by pieces of a factor and features."""

_MOST_STRIDE = 2**31  # strides and places of rows in results travel in 32 bits

PIECES_COSTS = Costs(1, 2, 1e5)
_PIECES_PARTS = (2, 3, 4, 6)
_PIECES_LEAST = 128
"""Fitted to one head of 512 … 8192 tokens with 64 and 128 features on an H200: where two parts of every walk or
more run at the same time, as many as do, up to six, of so many rows at least of the longest walk."""


def suit_pieces(geometry: Geometry, pieces: int, device: torch.device, results: Sequence[Tensor]) -> bool:
    """Whether the backward kernels for factors in pieces take a call that is plain otherwise."""
    if INTERPRETED or architecture(device) != 90 or geometry.block_d not in PIECES_TILES[pieces]:
        return False
    strides = [_strides(x) for x in results]
    rows = max(geometry.tokens, geometry.keys)
    return all(f == 1 and max(b, rows * n, h) < _MOST_STRIDE for b, n, h, f in strides)


def _strides(x: Tensor) -> list[int]:
    """Strides; 0 for an axis of size one, which is never taken."""
    return [s if n > 1 else 0 for n, s in zip(x.shape, x.stride())]


def _parts_in_pieces(steps: list[int], step: int, rows: int, programs: int, elements: int) -> int:
    """Into how many parts walks with steps of ``step`` rows are cut; see `problem.best_parts`."""
    most = min(programs // (len(steps) * rows), max(steps) * step // _PIECES_LEAST)
    fit = [parts for parts in _PIECES_PARTS if parts <= most]
    return max(fit) if fit else best_parts(steps, rows, programs, elements, PIECES_COSTS)


def plan_pieces(
    name: str,
    geometry: Geometry,
    mask: Mask,
    scale: float,
    factors: tuple[Tensor, ...],
    pieces: int,
    results: Sequence[Tensor],
    device: torch.device,
) -> Plan:
    """The launch of a backward kernel, ``key`` or ``query``, on pieces of q, k, v and the gradient.

    ``factors`` are like one piece of each. Behind all pieces come the results, in float32, or their parts, then
    shift, δ, inverse and tickets.
    """
    tiles = PIECES_TILES[pieces][geometry.block_d]
    own, length, heads = geometry.tokens, geometry.keys, geometry.heads
    if name == "key":
        own, length, heads = geometry.keys, geometry.tokens, geometry.key_heads
    blocks, rows = -(-own // _ROWS), geometry.entries * heads
    programs = programs_at_once(device)
    steps = walks(name, geometry, mask, _ROWS, tiles.box)
    parts = _parts_in_pieces(steps, tiles.box, rows, programs, sum(x.numel() for x in results))
    held, walked = ((1, 1, size, geometry.block_d) for size in (_ROWS, tiles.box))
    boxes = (walked, held, held, walked) if name == "key" else (held, walked, walked, held)
    head_bytes = 2 * pieces * length * (geometry.features + geometry.value_features)
    section = max(L2_SHARE // head_bytes, 1) * (1 if name == "key" else geometry.group)
    names = ("dk", "dv") if name == "key" else ("dq",)
    places = {
        f"{name}_{field}": number
        for name, x in zip(names, results)
        for field, number in zip(_PLACE, (x.numel() if parts > 1 else 0, *_strides(x)[:3], x.shape[3]))
    }
    function = {
        "key": shared_rows.hopper_terms_key_kernel,
        "query": shared_rows.hopper_terms_query_kernel,
    }[name]
    described: dict[str, Any] = {
        name: Boxes(x.repeat(pieces, 1, 1, 1), (0, 2, 1, 3), tile)
        for name, x, tile in zip(("q_desc", "k_desc", "v_desc", "do_desc"), factors, boxes)
    }
    count = blocks * rows * parts
    launch = Launch(
        function,
        min(programs, count),
        takes=(*described, *names, "shift", "delta", "inverse", "tickets"),
        early=True,
        tokens=geometry.tokens, keys=geometry.keys, heads=geometry.heads, group=geometry.group, rows=rows,
        blocks=blocks, section=min(section, rows), parts=parts, right=bounds(geometry, mask)[1],
        scale=in_powers_of_two(scale), slope=scale,
        CAUSAL=mask.right is not None, PIECES=pieces, STAGES=tiles.stages, **described, **places,
    )  # fmt: skip
    return Plan(launch, parts, programs < count)
