"""How one group of warps gives weights to another that shares its tile."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.hopper.pipeline import ROWS, init_each


class Weights(NamedTuple):
    """How weights go from the first group to the second.

    No group waits for such a buffer to be empty: when tiles have come into the buffers of its number, the second group had
    done with those before.
    """

    tiles: gl.shared_memory_descriptor  # (stages, 64, rows of a tile) float32
    full: gl.shared_memory_descriptor  # a barrier for each stage


@gluon.jit
def weight_buffers(STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Tiles of weights."""
    # Half a warp has 32 bytes of each of four rows: swizzled, these lie in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BLOCK], swizzled)


@gluon.jit
def new_weights(tiles, full):
    """Tiles of weights with their barriers, which are initialised."""
    init_each(full)
    return Weights(tiles, full)
