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

_Again = Callable[[Sequence[Call]], Fault | None]


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
        found = next((found for found in faults if found.kind == fault.kind), None)
        return found and replace(found, calls=tuple(calls))

    best = again(fault.calls[-1:]) or again(fault.distinct)
    if best is None:
        return fault
    for call in best.calls:
        left = [other for other in best.calls if other is not call]
        if left and time.monotonic() < end:
            best = again(left) or best
    return _simplify(best, again, end)


def _simplify(best: Fault, again: _Again, end: float) -> Fault:
    """Simplify the choices of each call as long as any can be."""
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for place in range(len(best.calls)):
            for change in _changes(best.calls[place].record):
                if time.monotonic() > end:
                    break
                call = best.calls[place]
                if any(call.record.get(name) != before for name, (before, _) in change.items()):
                    continue  # an earlier change took it
                record = call.record | {name: after for name, (_, after) in change.items()}
                simpler = make_call(call.operator, Choices(given=record))
                if _weight(simpler) < _weight(call):
                    found = again([*best.calls[:place], simpler, *best.calls[place + 1 :]])
                    best, changed = found or best, changed or found is not None
    return best


def _changes(record: dict[str, Any]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Yield changes, as values before and after: many choices at once, ever fewer, then smaller numbers."""
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
    """Returns the number of choices that are not the simplest, and the sum of their numbers: less is simpler."""
    return len(call.record), sum(value for value in call.record.values() if type(value) is int)
