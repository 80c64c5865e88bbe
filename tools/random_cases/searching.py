"""A search for calls that fail: families one after the other until the time is up, in one process or several.

A process that dies or hangs costs the family that it ran, and is replaced.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from known_failures import entries, known_call

from random_cases.families import FAMILIES, Fault, Source, Tally, run_family

__all__ = ["Outcome", "Plan", "search"]

LONGEST = 400.0
"""Seconds that a family may take, its kernels' compilation included."""
PAUSES = (2.0, 5.0, 10.0, 20.0, 30.0, 0.0)
"""Seconds after each run of a family that lacked memory; the last such run counts."""


@dataclass(frozen=True)
class Plan:
    """Which families are run, where."""

    source: Source
    device: str
    backend: str | None = None
    """What every call runs on; None for its own choice."""
    seconds: float = 60.0
    workers: int = 1
    shard: tuple[int, int] = (0, 1)
    """Of several machines or commands, which one this is, and how many there are."""

    def indices(self, worker: int) -> Iterator[int]:
        """The families of a process: every so many runs of `FAMILIES`."""
        index, of = self.shard
        run = index * self.workers + worker
        while True:
            yield from range(run * FAMILIES, (run + 1) * FAMILIES)
            run += of * self.workers


@dataclass
class Outcome:
    """What a search came to."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    """By operator."""
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, operator: str, tally: Tally, faults: list[Fault]) -> None:
        """Count a family."""
        self.tallies.setdefault(operator, Tally()).add(tally)
        self.faults += faults

    def unknown(self, device: str) -> list[Fault]:
        """Returns the failures that the ledger does not know."""
        ledger, where = entries(), "gpu" if device == "cuda" else "cpu"
        calls = [fault.calls[-1] for fault in self.faults]
        return [f for f, c in zip(self.faults, calls) if known_call(ledger, c.operator, c.record, where) is None]

    def describe(self) -> str:
        """One line for a person."""
        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        rate = total.cases / max(self.seconds, 1e-9)
        return (
            f"{total.calls} calls, {total.cases} cases compared with float64, {rate:.1f} cases/s, "
            f"{len(self.faults)} failed"
        )


def search(plan: Plan, report: Callable[[Outcome], None] = lambda outcome: None) -> Outcome:
    """Run families until the time is up.

    Args:
        plan: Which, and where.
        report: Called now and then with what was found so far.
    """
    outcome, began = Outcome(), time.monotonic()
    results = _in_this_process(plan) if plan.workers == 1 else _in_processes(plan)
    for operator, tally, faults in results:
        outcome.add(operator, tally, faults)
        outcome.seconds = time.monotonic() - began
        report(outcome)
    return outcome


_Result = tuple[str, Tally, list[Fault]]


def _in_this_process(plan: Plan) -> Iterator[_Result]:
    end, device = time.monotonic() + plan.seconds, torch.device(plan.device)
    for index in plan.indices(0):
        tally, faults = run_family(plan.source, index, device, plan.backend)
        yield plan.source.operator(index), tally, faults
        if time.monotonic() > end or any(fault.fatal for fault in faults):
            return


def _in_processes(plan: Plan) -> Iterator[_Result]:
    end = time.monotonic() + plan.seconds
    workers = [_Worker(plan, number, end) for number in range(plan.workers)]
    try:
        while any(worker.alive for worker in workers):
            wait([worker.pipe for worker in workers if worker.alive], timeout=1.0)
            for worker in (worker for worker in workers if worker.alive):
                yield from worker.results()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process with some of the families, and its successors."""

    def __init__(self, plan: Plan, number: int, end: float) -> None:
        self.plan, self.number, self.end = plan, number, end
        self.done = 0  # families, whatever became of them
        self.alive = True
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        arguments = (self.plan, self.number, self.done, self.end, other)
        self.process: Any = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self.running: int | None = None
        self.heard = time.monotonic()

    def results(self) -> Iterator[_Result]:
        """What has come since the last time; a process that can do no more is replaced."""
        reason = ""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                self.heard = time.monotonic()
                if isinstance(message, int):
                    self.running = message
                    continue
                self.done += 1
                self.running = None
                yield message
        except (EOFError, OSError):
            reason = "died"
        if not reason and time.monotonic() - self.heard > LONGEST:
            reason = f"was stopped after {LONGEST:.0f} s"
        if not reason:
            return
        index = self.running
        self.stop()
        if index is not None:
            source = self.plan.source
            detail = f"the process that ran this family {reason} (exit code {self.process.exitcode})"
            self.done += 1
            fault = Fault(tuple(source.family(index)), "process", detail, True, index)
            yield source.operator(index), Tally(), [fault]
        if time.monotonic() < self.end and (index is not None or self.process.exitcode == _AGAIN):
            self._start()
        else:
            self.alive = False

    def stop(self) -> None:
        """End the process."""
        self.process.join(timeout=0 if self.running is not None else 5)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.pipe.close()


_AGAIN = 75
"""Exit code of a process whose GPU runs nothing more."""


def _work(plan: Plan, number: int, skipped: int, end: float, pipe: Connection) -> None:
    """Run the families of a process but the first of them, and send what each came to."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    device = torch.device(plan.device)
    indices = plan.indices(number)
    for _ in range(skipped):
        next(indices)
    for index in indices:
        pipe.send(index)
        tally, faults = _with_room(plan, index, device)
        pipe.send((plan.source.operator(index), tally, faults))
        if any(fault.fatal for fault in faults):
            raise SystemExit(_AGAIN)
        if time.monotonic() > end:
            return


def _with_room(plan: Plan, index: int, device: torch.device) -> tuple[Tally, list[Fault]]:
    """Run a family, and again after a while where the processes beside this one left it no memory."""
    for pause in PAUSES:
        tally, faults = _run(plan, index, device)
        if not any("out of memory" in fault.detail for fault in faults) or any(fault.fatal for fault in faults):
            break
        gc.collect()
        _leave_room(device, most=0.0)
        time.sleep(pause)
    _leave_room(device, most=0.25 / plan.workers)
    return tally, faults


def _run(plan: Plan, index: int, device: torch.device) -> tuple[Tally, list[Fault]]:
    try:
        return run_family(plan.source, index, device, plan.backend)
    except Exception as error:  # of the checker itself
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return Tally(), [Fault(tuple(plan.source.family(index)), "checker", detail, index=index)]


def _leave_room(device: torch.device, most: float) -> None:
    """Give memory back that nothing uses, where more than this share of a GPU's is held."""
    if torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(device).total_memory
        if torch.cuda.memory_reserved(device) > most * total:
            torch.cuda.empty_cache()
