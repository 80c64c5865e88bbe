"""Launchers of flash attention's kernels for Hopper: which calls they take, and how these are cut into tiles.

They take 16-bit tensors whose rows the tensor memory accelerator can copy, with up to 128 features (what is missing
to 64 or 128 is filled with zeros), in causal and full attention with any number of heads to a key head. Windows to
the left, packed sequences, and long walks in problems too small to keep all multiprocessors busy, which are split,
stay with the kernels for every GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.launch import INTERPRETED, Boxes, TiledLaunch, architecture, can_be_copied, multiprocessors
from warploom.ops.flash_attention.launchers import L2_SHARE, LOG2_E, UNBOUNDED, Geometry, Mask

Tensor = torch.Tensor

_ROWS = 64  # of a tile that one group of warps owns
_LEAST_FEATURES = 32  # up to here, tiles of 64 features would be half empty
_BUSY = 0.75  # share of the multiprocessors that must have a tile, unless
_SHORT = 512  # walks are shorter than this, and would not be split anyway


class Tiles(NamedTuple):
    """How a kernel cuts its work."""

    groups: int  # of warps, with 64 rows each
    box: int  # rows of the tiles they walk over
    stages: int  # such tiles in flight


TILES = {
    "forward": {64: Tiles(3, 128, 2), 128: Tiles(2, 128, 2)},
    "key": {64: Tiles(2, 128, 2), 128: Tiles(2, 64, 3)},
    "query": {64: Tiles(3, 64, 3), 128: Tiles(2, 64, 3)},
}
"""By features of a tile; measured on an H200 (see "How it reaches the limit")."""

_SMALLER = Tiles(2, 128, 3)
"""Of the forward with 64 features where walks are short and uneven, and larger tiles would end far apart."""


def _width(geometry: Geometry) -> int:
    """Features of a tile."""
    return 64 if max(geometry.features, geometry.value_features) <= 64 else 128


def _tiles(name: str, geometry: Geometry, mask: Mask) -> Tiles:
    width = _width(geometry)
    if name == "forward" and width == 64 and mask.right is not None and geometry.keys < 4096:
        return _SMALLER
    return TILES[name][width]


def _blocks(name: str, geometry: Geometry, mask: Mask) -> tuple[int, int]:
    """Tiles of a kernel along the sequence, and along batch entries and heads."""
    block = _tiles(name, geometry, mask).groups * _ROWS
    if name == "key":
        return -(-geometry.keys // block), geometry.entries * geometry.key_heads
    return -(-geometry.tokens // block), geometry.entries * geometry.heads


def suit(name: str, geometry: Geometry, mask: Mask, scale: float, *tensors: Tensor) -> bool:
    """Whether the kernel ``name`` takes a call with these tensors, apart from their addresses."""
    first = tensors[0]
    if INTERPRETED or not 90 <= architecture(first.device) < 100:
        return False
    if mask.left is not None or mask.cu_seqlens_q is not None or scale <= 0:
        return False
    if not _LEAST_FEATURES < max(geometry.features, geometry.value_features) <= 128:
        return False
    if any(t.dtype not in (torch.float16, torch.bfloat16) or t.dtype != first.dtype for t in tensors):
        return False
    blocks, rows = _blocks(name, geometry, mask)
    long = (geometry.tokens if name == "key" else geometry.keys) >= _SHORT
    if long and blocks * rows < _BUSY * multiprocessors(first.device):
        return False
    return all(map(can_be_copied, tensors))


def plan(name: str, geometry: Geometry, mask: Mask, scale: float, tensors: tuple[Tensor, ...]) -> TiledLaunch:
    """The launch of a kernel that suits: see `TILES` for its name.

    ``tensors``, (q, k, v, out), (q, k, v, grad, dk, dv) or (q, k, v, grad, dq), are like those that it will be
    launched on. Behind them come lse and statistics, or shift and δ, and zeros to count tiles with.
    """
    from warploom.ops.flash_attention import kernels_hopper, kernels_hopper_backward

    function = {
        "forward": kernels_hopper.hopper_forward_kernel,
        "key": kernels_hopper_backward.hopper_key_kernel,
        "query": kernels_hopper_backward.hopper_query_kernel,
    }[name]
    width = _width(geometry)
    tiles = _tiles(name, geometry, mask)
    own, walked = Boxes((0, 2, 1, 3), (1, 1, _ROWS, width)), Boxes((0, 2, 1, 3), (1, 1, tiles.box, width))
    boxes = {
        "forward": (own, walked, walked, own),
        "key": (walked, own, own, walked, own, own),
        "query": (own, walked, walked, own, own),
    }[name]
    blocks, rows = _blocks(name, geometry, mask)
    # Heads are taken in sections: see `kernels.program_order`.
    length = geometry.tokens if name == "key" else geometry.keys
    head_bytes = length * (geometry.features + geometry.value_features) * tensors[0].element_size()
    section = max(L2_SHARE // head_bytes, 1) * (1 if name == "key" else geometry.group)
    numbers = (
        geometry.tokens, geometry.keys, geometry.heads, geometry.group, rows, blocks, min(section, rows),
        min(mask.right or 0, UNBOUNDED), scale * LOG2_E, *(() if name == "forward" else (scale,)),
    )  # fmt: skip
    constants = (mask.right is not None, *(() if name == "key" else (tiles.groups,)), tiles.stages)
    programs = min(multiprocessors(tensors[0].device), blocks * rows)
    return TiledLaunch(function, programs, list(zip(tensors, boxes)), numbers, constants)
