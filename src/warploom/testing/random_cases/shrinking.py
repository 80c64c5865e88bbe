"""Simpler calls that fail in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from warploom.testing.random_cases.calls import Call, make_call
from warploom.testing.random_cases.choices import Choices
from warploom.testing.random_cases.families import Fault, forget_plans, run_calls

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
        _, faults = run_calls(calls, device, backend)
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


def _fewer(best: Fault, again: Any, end: float) -> Fault:
    calls = _without_repetitions(best.calls)
    for call in list(calls):
        left = [other for other in calls if other is not call]
        if not left or time.monotonic() > end:
            break
        found = again(left)
        if found is not None:
            best, calls = found, left
    return replace(best, calls=tuple(calls))


def _simpler(best: Fault, again: Any, end: float) -> Fault:
    """Simplify one choice after another, of each call, as long as any can be."""
    calls = _without_repetitions(best.calls)
    tried: set[str] = set()
    changed = True
    while changed:
        changed = False
        for place, call in enumerate(calls):
            for record in _simplified(call.record):
                if time.monotonic() > end:
                    return replace(best, calls=tuple(calls))
                simpler = make_call(call.operator, Choices(given=record))
                key = f"{place} {sorted(simpler.record.items(), key=str)}"
                if key in tried or _weight(simpler) >= _weight(call):
                    continue
                tried.add(key)
                found = again([*calls[:place], simpler, *calls[place + 1 :]])
                if found is not None:
                    best, changed = found, True
                    calls[place] = simpler
                    break
            if changed:
                break
    return replace(best, calls=tuple(calls))


def _simplified(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Records with one choice the simplest, and then those with a smaller number."""
    # What belongs to a tensor goes with its memory, so that goes first.
    for name in sorted(record, key=lambda name: (not name.endswith(".memory"), name)):
        yield {other: value for other, value in record.items() if other != name}
    for name, value in record.items():
        if type(value) is int and value > 1:
            for smaller in dict.fromkeys((value // 2, value * 3 // 4, value - 2, value - 1)):
                if 0 <= smaller < value:
                    yield {**record, name: smaller}


def _weight(call: Call) -> tuple[int, int]:
    """Choices that are not the simplest, and the sum of their numbers: less is simpler."""
    return len(call.record), sum(value for value in call.record.values() if type(value) is int)
