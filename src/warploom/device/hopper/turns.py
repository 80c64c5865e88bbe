"""Programs that add to the same memory one after the other, always in the same order.

A counter in device memory says whose turn it is. A program waits for its turn, adds, and gives the turn to the next. Its
turn may come only after programs that run already: see `warploom.device.hopper.pipeline.take_tile`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_turn(counter, turn):
    """Wait until so many turns have been given on. Copies that start afterwards find what was written before."""
    seen = _turns_before(counter)
    while seen != turn:
        seen = _turns_before(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [seen], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _turns_before(counter):
    """How many turns have been given on."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(counter):
    """Give the turn to the next. What this warp wrote is in device memory (`tma.stored`)."""
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
