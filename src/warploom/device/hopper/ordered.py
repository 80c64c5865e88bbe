"""Programs that add to the same memory one after the other, always in the same order.

A counter in device memory says how many have added. A program waits until all have that come before it, adds, and counts
itself. Why the waiting ends is said in flash attention's `hopper_backward_kernel`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_until_added(counter, before):
    """Wait until as many have added as come before. Copies that start afterwards find what was written until then."""
    added = _added(counter)
    while added != before:
        added = _added(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [added], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _added(counter):
    """How many have added."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_added(counter):
    """Count one more that has added. What this warp wrote is in device memory (`tma.stored`)."""
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
