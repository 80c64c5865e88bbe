"""Triton's entry into a compiled kernel, without what it does anew on every call.

A compiled kernel's launcher is Python around a function in C. It looks whether there is scratch memory to allocate,
and encodes every tensor descriptor among the arguments, 3 µs each, whether or not it has done so before. The
function in C is no public interface. What Triton's launcher hands to it is looked up for each kernel, and the
function is called directly only if that is a launch's own values beside others that stay the same. All other
kernels are launched in the public way, ``compiled[grid](*arguments)``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class KernelEntry(NamedTuple):
    """How to launch a compiled variant."""

    enqueue: Callable[[int, int, list[Any]], None]
    """Called with programs, a stream, and all of the kernel's arguments: addresses are integers, and tensor
    descriptors encoded or as they are. The stream is the current one."""
    encode: tuple[Callable[[Any], list[Any]], ...] | None = None
    """What encodes each tensor descriptor; ``None`` where the kernel takes them as they are. The result holds an
    address, sizes and strides, and serves any tensor that has the same."""


def find_entry(compiled: Any, descriptors: Sequence[Any] = ()) -> KernelEntry:
    """The entry of a compiled variant.

    Args:
        compiled: The variant, loaded onto its device.
        descriptors: Tensor descriptors that it was launched with; what encodes them is tried on these.
    """
    entry = _find_entry(compiled)
    if entry.encode is None:
        return entry
    with contextlib.suppress(Exception):  # of a version of Triton with other insides
        if all(make(d)[1:] == [*d.shape, *d.strides] for make, d in zip(entry.encode, descriptors, strict=True)):
            return entry
    return _public_entry(compiled)


@functools.cache  # and so the variant is never unloaded
def _find_entry(compiled: Any) -> KernelEntry:
    direct = None
    with contextlib.suppress(Exception):  # of a version of Triton with other insides
        direct = _direct_entry(compiled)
    return direct or _public_entry(compiled)


def build_launcher(compiled: Any) -> None:
    """Have the launcher of a compiled variant in Triton's cache, where the C compiler makes one for each (3.6)."""
    with contextlib.suppress(Exception):  # of a version of Triton with other insides, or without a driver
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def _public_entry(compiled: Any) -> KernelEntry:
    def publicly(programs: int, stream: int, arguments: list[Any]) -> None:
        compiled[(programs, 1, 1)](*arguments)

    return KernelEntry(publicly)


def _direct_entry(compiled: Any) -> KernelEntry | None:
    """The entry past the launcher, for kernels without scratch memory, if the launcher is built as expected."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, encode = run.launch, None
    if inspect.isfunction(launch):  # it encodes descriptors, and then calls the function in C
        encode = _encoders(launch)
        if encode is None:
            return None
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    handed, again = _handed_over(compiled), _handed_over(compiled)
    if handed is None or handed != again:
        return None
    middle, are_together = handed

    def directly(programs: int, stream: int, arguments: list[Any]) -> None:
        launch(programs, 1, 1, stream, *middle, *arguments)

    def together(programs: int, stream: int, arguments: list[Any]) -> None:
        launch(programs, 1, 1, stream, *middle, arguments)

    return KernelEntry(together if are_together else directly, encode)


def _handed_over(compiled: Any) -> tuple[tuple[Any, ...], bool] | None:
    """What the launcher hands over between the stream and a kernel's arguments, and whether those are one tuple.

    A copy of the launcher is run with marks, and with something that keeps its arguments in the place of the
    function in C. ``None`` if the marks are not found as they were given: then it does more than to pass them on.
    """
    taken: list[tuple[Any, ...]] = []
    probe = copy.copy(compiled.run)
    probe.launch = lambda *arguments: taken.append(arguments)
    programs, stream, *marks = (object() for _ in range(4))
    # None: launch metadata and hooks, for Triton's profiler, which reads them from its own launcher.
    probe(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks)
    (found,) = taken
    if found[:4] != (programs, 1, 1, stream):
        return None
    if found[-1] == tuple(marks):
        return found[4:-1], True
    if found[-2:] == tuple(marks):
        return found[4:-2], False
    return None


def _encoders(launch: Any) -> tuple[Callable[[Any], list[Any]], ...] | None:
    """What encodes each descriptor of a kernel; ``None`` if descriptors were lowered to pointers."""
    around = inspect.getclosurevars(launch).nonlocals
    known = around["tensordesc_meta"]  # what the kernel expects of each descriptor
    if not known or not all(known):
        return None
    make = around.get("make_tensordesc_arg") or launch.__globals__["make_tensordesc_arg"]
    # Newer versions pass the launcher's other arguments as well, on which descriptors for NVIDIA do not depend.
    count = len(inspect.signature(make).parameters)
    if count not in (2, 3):
        return None
    unused = ((),) * (count - 2)
    return tuple(lambda descriptor, like=like: make(descriptor, like, *unused) for like in known)
