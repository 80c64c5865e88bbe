"""A search for calls that fail: families one after the other until the time is up, in one process or several.

A process that dies or hangs costs the family that it ran, and is replaced.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch
from known_failures import entries, known_call

from random_cases.families import FAMILIES, Fault, Source, Tally, run_calls

__all__ = ["Outcome", "Plan", "search"]

LONGEST = 400.0
"""Seconds that a family may take, its kernels' compilation included."""
PAUSES = (2.0, 5.0, 10.0, 20.0, 30.0, 0.0)
"""Seconds after each run of a family that lacked memory; the last such run counts."""


@dataclass(frozen=True)
class Plan:
    """The families that are run, and where."""

    source: Source
    device: str
    backend: str | None = None
    """The backend of every call; None for its own choice."""
    seconds: float = 60.0
    workers: int = 1

    def indices(self, worker: int) -> Iterator[int]:
        """Yield the families of a process: every so many runs of `FAMILIES`."""
        for run in itertools.count(worker, self.workers):
            yield from range(run * FAMILIES, (run + 1) * FAMILIES)


@dataclass
class Outcome:
    """The results of a search."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    """By operator."""
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    def unknown(self, device: str) -> list[Fault]:
        """Returns the failures that the ledger does not know."""
        ledger, where = entries(), "gpu" if device == "cuda" else "cpu"
        calls = [fault.calls[-1] for fault in self.faults]
        return [f for f, c in zip(self.faults, calls) if known_call(ledger, c.operator, c.record, where) is None]

    def describe(self) -> str:
        """Returns one line for a person."""
        calls, cases = (sum(getattr(one, name) for one in self.tallies.values()) for name in ("calls", "cases"))
        rate = cases / max(self.seconds, 1e-9)
        return f"{calls} calls, {cases} cases compared with float64, {rate:.1f} cases/s, {len(self.faults)} failed"


def search(plan: Plan, report: Callable[[Outcome], None] = lambda outcome: None) -> Outcome:
    """Run families until the time is up.

    Args:
        plan: Which, and where.
        report: Called now and then with what was found so far.
    """
    outcome, began = Outcome(), time.monotonic()
    for index, tally, faults in _in_this_process(plan) if plan.workers == 1 else _in_processes(plan):
        outcome.tallies.setdefault(plan.source.operator(index), Tally()).add(tally)
        outcome.faults += faults
        outcome.seconds = time.monotonic() - began
        report(outcome)
    return outcome


_Result = tuple[int, Tally, list[Fault]]


def _in_this_process(plan: Plan) -> Iterator[_Result]:
    end, device = time.monotonic() + plan.seconds, torch.device(plan.device)
    for index in plan.indices(0):
        tally, faults = run_calls(plan.source.family(index), device, plan.backend)
        yield index, tally, faults
        if time.monotonic() > end or any(fault.fatal for fault in faults):
            return


class _Worker:
    """A process with some of the families, and its successors."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.indices = plan, plan.indices(number)
        self.pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare_process)

    def submit(self) -> Future[tuple[Tally, list[Fault]]]:
        """Run the next family."""
        self.index, self.began = next(self.indices), time.monotonic()
        return self.pool.submit(_run_with_memory, self.plan, self.index)

    def finish(self, future: Future[tuple[Tally, list[Fault]]]) -> _Result:
        """Returns the result of the family; a process that can run no more is replaced."""
        try:
            tally, faults = future.result(timeout=0)
        except (BrokenProcessPool, TimeoutError) as error:
            reason = "died" if isinstance(error, BrokenProcessPool) else f"was stopped after {LONGEST:.0f} s"
            detail = f"the process that ran this family {reason}"
            tally, faults = Tally(), [Fault(tuple(self.plan.source.family(self.index)), "process", detail, True)]
        if any(fault.fatal for fault in faults):
            self.stop()
            self.pool = self._new_pool()
        return self.index, tally, faults

    def stop(self) -> None:
        """End the process."""
        for process in list((self.pool._processes or {}).values()):
            process.kill()
        self.pool.shutdown(wait=True, cancel_futures=True)


def _in_processes(plan: Plan) -> Iterator[_Result]:
    end = time.monotonic() + plan.seconds
    workers = [_Worker(plan, number) for number in range(plan.workers)]
    running = {worker.submit(): worker for worker in workers}
    try:
        while running:
            done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            late = {future for future, one in running.items() if time.monotonic() - one.began > LONGEST}
            for future in done | late:
                worker = running.pop(future)
                yield worker.finish(future)
                if time.monotonic() < end:
                    running[worker.submit()] = worker
    finally:
        for worker in workers:
            worker.stop()


def _prepare_process() -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)


def _run_with_memory(plan: Plan, index: int) -> tuple[Tally, list[Fault]]:
    """Run a family, and again after a while where the processes beside this one left it no memory."""
    device = torch.device(plan.device)
    for pause in PAUSES:
        try:
            tally, faults = run_calls(plan.source.family(index), device, plan.backend)
        except Exception as error:  # of the checker itself
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            tally, faults = Tally(), [Fault(tuple(plan.source.family(index)), "checker", detail)]
        if not any("out of memory" in fault.detail for fault in faults) or any(fault.fatal for fault in faults):
            break
        _free_memory(device, most=0.0)
        time.sleep(pause)
    _free_memory(device, most=0.25 / plan.workers)
    return tally, faults


def _free_memory(device: torch.device, most: float) -> None:
    """Give memory back that nothing uses, where more than this share of a GPU's is held."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(device).total_memory
        if torch.cuda.memory_reserved(device) > most * total:
            gc.collect()
            torch.cuda.empty_cache()
