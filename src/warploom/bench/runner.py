"""A run: which cases, in what order, what is already there, and when to stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.evaluate import Unit, evaluate
from warploom.bench.measure import DeviceLostError, make_clock
from warploom.bench.records import (
    LIMIT,
    Key,
    Record,
    append,
    current_digest,
    has_records,
    load,
    operator_name,
    save_environment,
)
from warploom.errors import ArgumentError
from warploom.ops.spec import Bench, Case

__all__ = ["Outcome", "Selection", "plan", "run"]


@dataclass(frozen=True)
class Selection:
    """Which part of the benches to run. ``None`` and empty stand for all."""

    suite: str = "quick"
    modes: Sequence[str] | None = None
    providers: Sequence[str] | None = None
    case: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Parameter to the values that are wanted."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves, earlier results that it did not need to repeat included."""

    records: list[Record]
    left: int = 0
    """Units of the selection that were not reached."""
    reason: str = ""
    """Why the run stopped before its end."""


def plan(benches: Sequence[Bench], selection: Selection, device_type: str) -> list[Unit]:
    """The cases and modes that a selection means.

    Raises:
        ArgumentError: A part of the selection fits nothing: a misspelt name, most likely.
    """
    _known("suite", [selection.suite], (name for bench in benches for name in bench.suites))
    _known("mode", selection.modes or (), (mode for bench in benches for mode in bench.modes))
    _known("provider", selection.providers or (), (LIMIT, *(p for bench in benches for p in bench.providers)))
    suites = [(bench, bench.suites[selection.suite](device_type)) for bench in benches if selection.suite in bench.suites]
    _known("case parameter", selection.case, (name for _, cases in suites for case in cases for name in case))
    units = [
        Unit(bench, selection.suite, case, mode)
        for bench, cases in suites
        for case in cases
        if all(name in case and case[name] in values for name, values in selection.case.items())
        for mode in bench.modes
        if selection.modes is None or mode in selection.modes
    ]
    if not units:
        raise ArgumentError(f"bench: no case of suite {selection.suite} on {device_type} fits the selection")
    return units


def _known(what: str, wanted: Iterator[str] | Sequence[str] | Mapping[str, Any], known: Any) -> None:
    names = list(dict.fromkeys(known))
    for name in wanted:
        if name not in names:
            raise ArgumentError(f"bench: unknown {what} {name!r}; there are: {', '.join(names)}")


def run(
    benches: Sequence[Bench],
    selection: Selection,
    device: torch.device,
    output: Path,
    *,
    resume: bool = False,
    time_limit: float | None = None,
) -> Outcome:
    """Measure, and append every record to ``output`` as soon as it is there.

    Args:
        benches: What to run.
        selection: Which part of it.
        device: Where.
        output: Folder for ``records.jsonl`` and ``environment.json``. What is in it already stays.
        resume: Leave out what ``output`` has from the same code in the same environment.
        time_limit: Seconds after which no further case is begun.

    Returns:
        The selection's records, and what is left of it.

    Raises:
        ArgumentError: The selection fits nothing.
    """
    units = plan(benches, selection, device.type)
    environment = describe_environment(device)
    identifier = environment_id(environment)
    digests = {bench.name: current_digest(bench) for bench in benches}
    save_environment(output, identifier, environment)
    found: dict[Key, Record] = {}
    if resume and has_records(output):
        found = {record.key: record for record in load([output])}

    began = time.monotonic()
    clock = make_clock(device)
    records: list[Record] = []
    with _progress(len(units)) as progress:
        for number, unit in enumerate(units):
            blank = Record(
                operator=operator_name(unit.bench),
                suite=unit.suite,
                case=dict(unit.case),
                provider=LIMIT,
                mode=unit.mode,
                source_digest=digests[unit.bench.name],
                environment=identifier,
            )
            wanted = [p for p in unit.bench.providers if selection.providers is None or p in selection.providers]
            ...
    return Outcome(records)
