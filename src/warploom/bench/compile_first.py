"""Kernels are compiled before anything is measured, by several processes.

Nearly every case of an operator's first run meets a kernel that has to be compiled, which takes longer than to
check and to time it. What the processes here compile lies in the compilers' caches on disk, where the process that
measures finds it. They measure nothing, and what fails in them fails again where it is put down. When the time for
it is up, they are ended in the middle of what they do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch

from warploom.bench.attempt import DeviceLostError, attempt
from warploom.bench.evaluate import Unit, provider_call
from warploom.bench.registry import benches
from warploom.ops.spec import Case
from warploom.testing.workers import workers

MOST_PROCESSES = 12
LEAST_UNITS = 16
"""Fewer units take less time than processes take to begin."""
_SIZES = frozenset({"n", "m", "batch", "grid", "prefix"})
"""Parameters that mostly do not decide which kernel runs: cases that differ in these go to one process."""


class _Work(NamedTuple):
    """A `Unit` as it can be sent to a process, and which of its providers to call."""

    bench: str
    suite: str
    case: Case
    mode: str
    providers: tuple[str, ...]


def compile_first(
    units: Sequence[tuple[Unit, Sequence[str]]],
    seconds: float | None,
    *,
    device: torch.device,
    specs: Sequence[Path] = (),
) -> bool:
    """Compile what providers will run, where that is worth processes of its own: on a GPU, for many units.

    Args:
        units: What will be measured, each with the names of its providers.
        seconds: How long it may take; None for as long as it takes.
        device: Where.
        specs: Files that describe benches of one's own; those that come from nowhere else are left out.

    Returns:
        Whether it came to an end before the time was up.
    """
    known = benches()
    groups: dict[str, list[_Work]] = {}
    for unit, names in units:
        compiled = tuple(name for name in names if name not in unit.bench.precompiled)
        if compiled and known.get(unit.bench.name) is unit.bench and unit.bench.measure is None:
            kept = {name: value for name, value in unit.case.items() if name not in _SIZES}
            group = groups.setdefault(json.dumps([unit.bench.name, unit.mode, kept], sort_keys=True), [])
            group.append(_Work(unit.bench.name, unit.suite, dict(unit.case), unit.mode, compiled))
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(groups))
    if device.type != "cuda" or sum(map(len, groups.values())) < LEAST_UNITS or processes < 2:
        return True
    not_ours = set(multiprocessing.active_children())
    # If a process dies, what it left is compiled where it is measured.
    with workers(processes, specs) as pool, contextlib.suppress(BrokenProcessPool):
        done, late = wait([pool.submit(_call_once, group, device) for group in groups.values()], seconds)
        if late:  # leaving this block takes as long as the processes live
            for process in set(multiprocessing.active_children()) - not_ours:
                process.kill()
            return False
        for future in done:
            future.result()
    return True


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
