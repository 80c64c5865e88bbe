"""Triton's entry into a compiled kernel, without what it does anew on every call.

A compiled kernel's ``run`` is Python around a function in C. It looks whether there is scratch memory to allocate,
and encodes every tensor descriptor among the arguments, 3 µs each, whether or not it has done so before. The
function in C is no public interface: it is called directly in the versions of Triton whose arguments for it are
known here, for kernels without scratch memory. All others are run as Triton runs them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton

VERSION = tuple(triton.__version__.split(".")[:2])


class Entry(NamedTuple):
    """How to launch a compiled variant."""

    enqueue: Callable[[int, int, Sequence[Any], Sequence[Any]], None]
    """Called with programs, a stream, and all of the kernel's arguments in two parts: addresses are integers, and
    tensor descriptors encoded or as they are."""
    encode: tuple[Callable[[Any], list[Any]], ...] | None = None
    """What encodes each tensor descriptor; ``None`` where the kernel takes them as they are. The result holds an
    address, sizes and strides, and serves any tensor that has the same."""


@functools.cache
def entry_of(compiled: Any) -> Entry:
    """The entry of a compiled variant."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def plain(programs: int, stream: int, first: Sequence[Any], rest: Sequence[Any]) -> None:
        # None: launch metadata and hooks, for Triton's profiler, which reads them from its own launcher.
        run(programs, 1, 1, stream, function, metadata, None, None, None, *first, *rest)

    if type(run).__name__ != "CudaLauncher" or VERSION not in (("3", "6"), ("3", "7")):
        return Entry(plain)
    if run.global_scratch_size or run.profile_scratch_size:
        return Entry(plain)
    launch, encode = run.launch, None
    if inspect.isfunction(launch):  # it encodes descriptors, and then calls the function in C
        around = inspect.getclosurevars(launch).nonlocals
        if not all(around["tensordesc_meta"]):
            return Entry(plain)  # descriptors were lowered to pointers
        launch = around["launcher"]
        encode = tuple(functools.partial(_encode, like) for like in around["tensordesc_meta"])
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    if VERSION == ("3", "6"):
        middle = (function, cooperative, dependent, None, None, metadata, None, None, None)

        def directly(programs: int, stream: int, first: Sequence[Any], rest: Sequence[Any]) -> None:
            launch(programs, 1, 1, stream, *middle, *first, *rest)
    else:
        middle = (function, cooperative, dependent, metadata, None, None, None, None, None)
        annotations, signature = run.arg_annotations, run.kernel_signature

        def directly(programs: int, stream: int, first: Sequence[Any], rest: Sequence[Any]) -> None:
            launch(programs, 1, 1, stream, *middle, annotations, signature, (*first, *rest))

    return Entry(directly, encode)


def _encode(like: Any, descriptor: Any) -> list[Any]:
    """What a descriptor becomes: its encoding, sizes and strides. ``like``: what the kernel knows of it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, like)  # type: ignore[no-any-return]
