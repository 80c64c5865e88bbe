"""Compiles kernels in several processes, ahead of the process that measures.

Nearly every case of an operator's first run meets a kernel that has to be compiled, which takes longer than to
check and to time it. What the processes here compile lies in the compilers' caches on disk, where the process that
measures finds it. They measure nothing, and what fails in them fails again where it is put down.

Our own kernels are compiled from recorded launches, for which a process needs no GPU: meanwhile the cases whose
kernels are there are measured. What other compilers make is only found out by running it on the GPU. Where there is
much of it, it is run once before anything is measured; when the time for that is up, the processes are ended in the
middle of what they do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch

from warploom.bench.attempt import DeviceLostError, attempt
from warploom.bench.evaluate import Unit, provider_call
from warploom.bench.fingerprint import builds_of
from warploom.ops import benches
from warploom.ops.spec import Case
from warploom.testing.workers import start_workers

MOST_PROCESSES = 12
LEAST_UNITS = 8
"""The least number of units for which processes are started: fewer take less time than the processes."""
_SIZES = frozenset({"n", "m", "batch", "grid", "prefix"})
"""Parameters that mostly do not decide which kernel runs: cases that differ in these go to one process."""

Pending = Mapping[str, Sequence["Future[None]"]]


class _Work(NamedTuple):
    """A `Unit` as it can be sent to a process, and which of its providers to compile."""

    bench: str
    suite: str
    case: Case
    mode: str
    providers: tuple[str, ...]


class Ahead:
    """Kernels that other processes compile while cases are measured."""

    def __init__(self, pending: Pending | None = None) -> None:
        self.pending: Pending = pending or {}
        """Compilations that are under way, by the text of their unit."""

    def first(self, units: Sequence[Unit]) -> int:
        """Returns the index of the first unit with no compilation under way; waits until there is one."""
        while True:
            left: set[Future[None]] = set()
            for place, unit in enumerate(units):
                of_unit = {future for future in self.pending.get(str(unit), ()) if not future.done()}
                if not of_unit:
                    return place
                left |= of_unit
            wait(left, return_when=FIRST_COMPLETED)


@contextlib.contextmanager
def compile_first(
    units: Sequence[tuple[Unit, Sequence[str]]],
    seconds: float | None,
    *,
    device: torch.device,
    specs: Sequence[Path] = (),
) -> Iterator[Ahead]:
    """Compile what providers will run, where that is worth processes of its own: on a GPU, for many units.

    Args:
        units: What will be measured, each with the names of its providers.
        seconds: How long to wait for what other compilers make; None for as long as it takes.
        device: Where.
        specs: Files that describe benches of one's own; those that come from nowhere else are left out.

    Yields:
        What is still being compiled.
    """
    known = benches()
    kernels: dict[str, list[_Work]] = {}
    peers: dict[str, list[_Work]] = {}
    for unit, names in units:
        bench = unit.bench
        if known.get(bench.name) is not bench:
            continue
        kept = {name: value for name, value in unit.case.items() if name not in _SIZES}
        group = json.dumps([bench.name, unit.mode, kept], sort_keys=True)
        ours = [name for name in names if bench.runs_kernels(name) and name not in bench.precompiled]
        others = [name for name in names if name not in (*ours, *bench.precompiled)]
        for groups, wanted in ((kernels, ours), (peers, others if bench.measure is None else ())):
            if wanted:
                work = _Work(bench.name, unit.suite, dict(unit.case), unit.mode, tuple(wanted))
                groups.setdefault(group, []).append(work)
    if sum(map(len, peers.values())) < LEAST_UNITS:
        peers.clear()
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(kernels) + len(peers))
    if device.type != "cuda" or len(units) < LEAST_UNITS or processes < 2:
        yield Ahead()
        return
    not_ours = set(multiprocessing.active_children())
    pool = start_workers(processes, specs)
    try:
        pending = _submit(pool, units, kernels, device)
        late = wait([pool.submit(_call_once, group, device) for group in peers.values()], seconds).not_done
        yield Ahead() if late else Ahead(pending)
    finally:
        for process in set(multiprocessing.active_children()) - not_ours:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _submit(
    pool: ProcessPoolExecutor,
    units: Sequence[tuple[Unit, Sequence[str]]],
    kernels: Mapping[str, Sequence[_Work]],
    device: torch.device,
) -> Pending:
    """Submit kernels, those of the limits too. Returns the compilations of each unit, by its text."""
    limits: dict[tuple[int, int], Future[None]] = {}
    pending: dict[str, list[Future[None]]] = {str(unit): [] for unit, _ in units}
    for unit, _ in units:
        mix = _mix(unit)
        if mix is not None:
            if mix not in limits:
                limits[mix] = pool.submit(_compile_limit, *mix)
            pending[str(unit)].append(limits[mix])
    gpu = torch.cuda.get_device_properties(device)
    name = f"sm_{10 * gpu.major + gpu.minor}/{gpu.multi_processor_count}"
    for group in kernels.values():
        future = pool.submit(_compile_kernels, group, name)
        for work in group:
            unit = Unit(benches()[work.bench], work.suite, work.case, work.mode)
            pending[str(unit)].append(future)
    return pending


def _mix(unit: Unit) -> tuple[int, int] | None:
    """Returns the numbers of streams that the limit of a unit reads and writes, if it has such a limit."""
    if unit.bench.measure is None:
        with contextlib.suppress(Exception):  # whatever a bench of one's own may raise: it is said where it counts
            traffic = unit.bench.traffic(unit.case, unit.work)
            return traffic.reads, traffic.writes
    return None


def _compile_limit(reads: int, writes: int) -> None:
    from warploom.bench.stream_kernel import compile_only

    compile_only(reads, writes)


def _compile_kernels(work: Sequence[_Work], gpu: str) -> None:
    """Compile what our providers launch on a GPU, which this process does not use."""
    from triton.backends.compiler import GPUTarget

    from warploom.runtime.entry import build_launcher

    torch.set_num_threads(1)
    target = GPUTarget("cuda", int(gpu.partition("/")[0].removeprefix("sm_")), 32)
    known = set()
    for item in work:
        for name in item.providers:
            with contextlib.suppress(Exception):  # whatever an operator of one's own may raise
                builds = builds_of(benches()[item.bench], item.case, name, item.mode, gpu)
                # Backwards: the forward of a backward pass is mostly being compiled elsewhere.
                for key, build in reversed(builds.items()):
                    if key not in known:
                        known.add(key)
                        build_launcher(build.compile(target))


def _call_once(work: Sequence[_Work], device: torch.device) -> None:
    """Call providers as they will be called, and forget the results."""
    for item in work:
        unit = Unit(benches()[item.bench], item.suite, item.case, item.mode)
        for name in item.providers:
            try:
                attempt(name, functools.partial(_call_provider, unit, name, device))
            except DeviceLostError:
                return
        gc.collect()
        torch.cuda.empty_cache()


def _call_provider(unit: Unit, name: str, device: torch.device) -> None:
    with torch.set_grad_enabled(unit.work != "fwd"):  # as when it is timed
        provider_call(unit, name, device)()
