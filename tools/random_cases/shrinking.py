"""Simpler calls that fail in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from random_cases.calls import Call, make_call
from random_cases.choices import Choices
from random_cases.families import Fault, forget_plans, run_calls

__all__ = ["shrink"]


def shrink(fault: Fault, device: torch.device, backend: str | None, seconds: float) -> Fault:
    """Make the calls of a fault fewer and simpler while the last of them still fails in the same way.

    Args:
        fault: What was found.
        device: Where it was.
        backend: What every call runs on; None for its own choice.
        seconds: When to stop, with the simplest so far.

    Returns:
        A fault of the same kind; the same one where it does not happen again in calls on their own.
    """
    if fault.fatal:  # the GPU runs nothing more in this process
        return replace(fault, calls=fault.calls[-1:])
    end = time.monotonic() + seconds

    def again(calls: Sequence[Call]) -> Fault | None:
        forget_plans()
        _, faults = run_calls(calls, device, backend, rounds=fault.rounds)
        return next((found for found in faults if found.kind == fault.kind), None)

    best = again(fault.calls[-1:])
    if best is None:
        best = again(_without_repetitions(fault.calls))
        if best is None:
            return fault
        best = _fewer(best, again, end)
    return _simpler(best, again, end)


def _without_repetitions(calls: Sequence[Call]) -> list[Call]:
    kept: list[Call] = []
    for call in calls:
        if call not in kept:
            kept.append(call)
    return kept


def _fewer(best: Fault, again: Callable[[Sequence[Call]], Fault | None], end: float) -> Fault:
    calls = _without_repetitions(best.calls)
    for call in list(calls):
        left = [other for other in calls if other is not call]
        if not left or time.monotonic() > end:
            break
        found = again(left)
        if found is not None:
            best, calls = found, left
    return replace(best, calls=tuple(calls))


def _simpler(best: Fault, again: Callable[[Sequence[Call]], Fault | None], end: float) -> Fault:
    """Simplify the choices of each call as long as any can be."""
    calls = _without_repetitions(best.calls)
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for place in range(len(calls)):
            for change in _changes(calls[place].record):
                if time.monotonic() > end:
                    break
                record = dict(calls[place].record)
                if any(record.get(name) != before for name, (before, _) in change.items()):
                    continue  # an earlier change took it
                record.update({name: after for name, (_, after) in change.items()})
                simpler = make_call(calls[place].operator, Choices(given=record))
                if _weight(simpler) >= _weight(calls[place]):
                    continue
                found = again([*calls[:place], simpler, *calls[place + 1 :]])
                if found is not None:
                    best, changed = found, True
                    calls[place] = simpler
    return replace(best, calls=tuple(calls))


def _changes(record: dict[str, Any]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Changes to a record, as values before and after: many choices at once, ever fewer, then smaller numbers."""
    # What belongs to a tensor goes with its memory, so that goes first.
    names = sorted(record, key=lambda name: (not name.endswith(".memory"), name))
    size = -(-len(names) // 2)
    while size:
        for start in range(0, len(names), size):
            yield {name: (record[name], None) for name in names[start : start + size]}  # None fits no choice
        size = size // 2 if size > 1 else 0
    for name, value in record.items():
        if type(value) is int and value > 1:
            for smaller in dict.fromkeys((value // 2, value * 3 // 4, value - 2, value - 1)):
                if 0 <= smaller < value:
                    yield {name: (value, smaller)}


def _weight(call: Call) -> tuple[int, int]:
    """Choices that are not the simplest, and the sum of their numbers: less is simpler."""
    return len(call.record), sum(value for value in call.record.values() if type(value) is int)
