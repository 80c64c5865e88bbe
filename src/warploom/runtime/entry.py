"""The entry into a compiled kernel: Triton's launcher, without the work that it repeats on every call.

A compiled kernel's launcher is Python around a function in C. On every call it checks for scratch memory, and
encodes every tensor descriptor among the arguments, 3 µs each. The function in C is no public interface. So this
module runs the launcher of each kernel once, to see which arguments it passes on. It calls the function directly
only if those are the launch's own values beside others that never change. All other kernels are launched in the
public way, ``compiled[grid](*arguments)``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class KernelEntry(NamedTuple):
    """The functions that launch a compiled kernel."""

    enqueue: Callable[[int, int, list[Any]], None]
    """Launches the kernel, given the number of programs, the current stream, and all arguments. Pointers are given
    as integers, tensor descriptors encoded by ``encode``, or as they are where that is None."""
    encode: tuple[Callable[[Any], list[Any]], ...] | None = None
    """Encodes each tensor descriptor, as a list of an address, sizes and strides. The result can be used again for
    any tensor with the same. None where the kernel takes descriptors as they are."""


def find_entry(compiled: Any, descriptors: Sequence[Any] = ()) -> KernelEntry:
    """Returns the entry of a compiled kernel.

    Args:
        compiled: The kernel, loaded onto its device.
        descriptors: Tensor descriptors of a launch, to test the encoding on.
    """
    entry = _find_entry(compiled)
    if entry.encode is None:
        return entry
    with contextlib.suppress(Exception):  # from a version of Triton that is built differently
        if all(make(d)[1:] == [*d.shape, *d.strides] for make, d in zip(entry.encode, descriptors, strict=True)):
            return entry
    return _make_public_entry(compiled)


@functools.cache  # and so the kernel is never unloaded
def _find_entry(compiled: Any) -> KernelEntry:
    direct = None
    with contextlib.suppress(Exception):  # from a version of Triton that is built differently
        direct = _make_direct_entry(compiled)
    return direct or _make_public_entry(compiled)


def build_launcher(compiled: Any) -> None:
    """Put the launcher of a compiled kernel into Triton's cache, where a C compiler builds one for each (3.6)."""
    with contextlib.suppress(Exception):  # from a version of Triton that is built differently, or has no driver
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def _make_public_entry(compiled: Any) -> KernelEntry:
    def launch_publicly(programs: int, stream: int, arguments: list[Any]) -> None:
        compiled[(programs, 1, 1)](*arguments)

    return KernelEntry(launch_publicly)


def _make_direct_entry(compiled: Any) -> KernelEntry | None:
    """Returns an entry that calls the function in C, or None for a kernel or launcher that does not allow it."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, encode = run.launch, None
    if inspect.isfunction(launch):  # it encodes descriptors, and then calls the function in C
        encode = _find_encoders(launch)
        if encode is None:
            return None
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    probed, again = _probe_launcher(compiled), _probe_launcher(compiled)
    if probed is None or probed != again:
        return None
    middle, as_tuple = probed

    def launch_flat(programs: int, stream: int, arguments: list[Any]) -> None:
        launch(programs, 1, 1, stream, *middle, *arguments)

    def launch_tuple(programs: int, stream: int, arguments: list[Any]) -> None:
        launch(programs, 1, 1, stream, *middle, arguments)

    return KernelEntry(launch_tuple if as_tuple else launch_flat, encode)


def _probe_launcher(compiled: Any) -> tuple[tuple[Any, ...], bool] | None:
    """Returns what the launcher passes between the stream and the arguments, and if the arguments are one tuple.

    A copy of the launcher runs on marks instead of arguments, with a function that records its arguments in the
    place of the function in C. None if the marks do not arrive as given: this launcher changes its arguments.
    """
    recorded: list[tuple[Any, ...]] = []
    probe = copy.copy(compiled.run)
    probe.launch = lambda *arguments: recorded.append(arguments)
    programs, stream, *marks = (object() for _ in range(4))
    # None: launch metadata and hooks, for Triton's profiler, which reads them from its own launcher.
    probe(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks)
    (found,) = recorded
    if found[:4] != (programs, 1, 1, stream):
        return None
    if found[-1] == tuple(marks):
        return found[4:-1], True
    if found[-2:] == tuple(marks):
        return found[4:-2], False
    return None


def _find_encoders(launch: Any) -> tuple[Callable[[Any], list[Any]], ...] | None:
    """Returns the encoder of each descriptor of a kernel; None if descriptors were lowered to pointers."""
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
