"""Runs benches: chooses cases, leaves out those that are there already, measures and records the rest."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from warploom.bench.attempt import DeviceLostError
from warploom.bench.compile_first import Ahead
from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.evaluate import Unit, evaluate
from warploom.bench.fingerprint import fingerprint, gpu_of
from warploom.bench.graphs import GRAPH
from warploom.bench.host_code import code_of
from warploom.bench.limits import measure_fixed_us
from warploom.bench.measure import make_clock
from warploom.bench.progress import show_progress
from warploom.bench.records import LIMIT, RECORDS, Key, Record, append, load, save_environment
from warploom.bench.sensors import WatchedClock, make_reader, others_here
from warploom.bench.storage import probe
from warploom.errors import ArgumentError, WarploomError, unknown
from warploom.ops.spec import KERNELS, Bench, Case

DTYPES = ("bfloat16", "float16", "float32")
Prepare = Callable[[Sequence[tuple[Unit, Sequence[str]]], float | None], AbstractContextManager[Ahead]]


@dataclass(frozen=True)
class Selection:
    """The part of the benches to run; ``None`` and empty stand for all of it."""

    suite: str = "quick"
    modes: Sequence[str] | None = None
    """``fwd``, ``bwd``, ``fwd_bwd``, ``train``, and ``fwd_graph`` for the forward replayed from a CUDA graph."""
    providers: Sequence[str] | None = None
    case: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """For a parameter of the cases, the values that are wanted."""
    dtypes: Sequence[str] | None = None
    """Run the cases in these dtypes (``bfloat16``, ``float16``, ``float32``), not in their own."""


@dataclass
class Outcome:
    """The outcome of a run."""

    records: list[Record] = field(default_factory=list)
    """The selection's records, earlier ones that needed no repetition included."""
    left: list[str] = field(default_factory=list)
    """Units that were not reached."""
    reason: str = ""
    """The reason for which the run stopped before its end."""
    device_lost: bool = False

    def failed(self, benches: Sequence[Bench], device_type: str) -> bool:
        """Returns True if a provider that stands for its operator was wrong or failed."""
        default = KERNELS if device_type == "cuda" else "torch"
        own = {bench.record_name: bench.own or default for bench in benches}
        return any(r.provider == own.get(r.operator) and r.status in ("incorrect", "error") for r in self.records)


def plan(benches: Sequence[Bench], selection: Selection, device_type: str) -> list[Unit]:
    """Returns the cases and modes that a selection means.

    Raises:
        ArgumentError: A part of the selection fits nothing: a misspelt name, most likely.
    """
    _check_known("suite", [selection.suite], (suite for bench in benches for suite in bench.suites))
    _check_known("mode", selection.modes or (), (mode for bench in benches for mode in _modes(bench, device_type)))
    if "float64" in (selection.dtypes or ()):
        what = "float64 is what results are compared with, and allowed errors are those of rounding a lower dtype"
        raise ArgumentError(f"bench: no dtype 'float64': {what}; there are: {', '.join(DTYPES)}")
    _check_known("dtype", selection.dtypes or (), DTYPES)
    providers = (provider for bench in benches for provider in (*bench.every_provider, LIMIT))
    _check_known("provider", selection.providers or (), providers)
    cases = [
        (bench, case)
        for bench in benches
        if selection.suite in bench.suites
        for case in _cases(bench, selection, device_type)
    ]
    _check_known("case parameter", selection.case, (name for _, case in cases for name in case))
    for name, values in selection.case.items():
        known = [_as_json(case[name]) for _, case in cases if name in case]
        spelt = [value if isinstance(value, str) else json.dumps(value) for value in known]
        wanted = [value if isinstance(value, str) else json.dumps(value) for value in values if value not in known]
        _check_known(f"value of {name}", wanted if len(wanted) == len(values) else (), spelt)
    units = [
        Unit(bench, selection.suite, case, mode)
        for bench, case in cases
        if all(name in case and _as_json(case[name]) in values for name, values in selection.case.items())
        for mode in (bench.modes_of(selection.suite) if selection.modes is None else _modes(bench, device_type))
        if selection.modes is None or mode in selection.modes
    ]
    if not units:
        raise ArgumentError(f"bench: no case of suite {selection.suite} on {device_type} fits the selection")
    return units


def _modes(bench: Bench, device_type: str) -> list[str]:
    """Returns the modes of a bench that may be asked for: its own, and on a GPU the forward from a graph."""
    return [*bench.modes, *([f"fwd{GRAPH}"] if "fwd" in bench.modes and device_type == "cuda" else [])]


def _cases(bench: Bench, selection: Selection, device_type: str) -> list[Case]:
    """Returns the cases of a suite, which may be a user's: JSON values by name, once in every dtype asked for."""
    try:
        cases = list(bench.suites[selection.suite](device_type))
        json.dumps([dict(case) for case in cases], allow_nan=False)
    except Exception as error:  # whatever a user's own code may raise
        what = f"{selection.suite} of {bench.name}: {type(error).__name__}"
        raise ArgumentError(f"bench: suite {what}: {error}") from error
    if selection.dtypes is None:
        return cases
    if missing := [case for case in cases if "dtype" not in case]:
        raise ArgumentError(f"bench: no dtype to replace in the case {dict(missing[0])}")
    changed = [{**case, "dtype": dtype} for case in cases for dtype in selection.dtypes]
    return list({json.dumps(case, sort_keys=True): case for case in changed}.values())


def _check_known(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    for name in wanted:
        if name not in names:
            raise ArgumentError(f"bench: {unknown(what, name, names)}")


def _as_json(value: Any) -> Any:
    """Returns a case's value as it comes back from a file or the command line: a tuple is a list there."""
    return json.loads(json.dumps(value))


def run(
    benches: Sequence[Bench],
    selection: Selection,
    device: torch.device,
    output: Path,
    *,
    resume: bool = False,
    time_limit: float | None = None,
    prepare: Prepare | None = None,
    terminal: TextIO | None = None,
) -> Outcome:
    """Measure, and append the records of every case to ``output`` as soon as they are there.

    Args:
        benches: What to run.
        selection: Which part of it.
        device: Where.
        output: Folder for ``records.jsonl`` and ``environment.json``. What is in it already stays.
        resume: Leave out the cases of which ``output`` has every provider asked for, of one run, from the same code
            in the same environment, undisturbed. Any other case is measured anew: times of one run are compared.
        time_limit: Seconds after which no further case is begun.
        prepare: Called before anything is measured, with what will be and the seconds that it may take, half of
            all; it may go on while cases are measured: see `warploom.bench.compile_first`.
        terminal: Where progress is shown; by default standard error.

    Returns:
        The selection's records, and what is left of it.

    Raises:
        ArgumentError: The selection fits nothing.
        WarploomError: ``output`` cannot be written; mostly known, and said, before anything is measured.
    """
    units = plan(benches, selection, device.type)
    probe(output, RECORDS)
    environment = describe_environment(device)
    identifier = environment_id(environment)
    earlier = load([output]) if resume and (output / RECORDS).is_file() else []
    found = {record.key: record for record in earlier if record.environment == identifier}
    run_id = uuid.uuid4().hex[:12]
    gpu = gpu_of(environment)
    tasks = [_task(unit, selection, identifier, run_id, gpu, found) for unit in units]
    outcome = Outcome()
    if any(task.missing for task in tasks) and (others := others_here(device)):
        said = f"warploom: this machine is busy ({others}): times may be too long"
        print(said, file=terminal or sys.stderr, flush=True)
    began = time.monotonic()
    with show_progress(len(units), terminal) as progress, contextlib.ExitStack() as stack:
        ahead = Ahead()
        if prepare is not None:
            progress.begin("compiling")
            missed = [(task.unit, [n for n in task.missing if n != LIMIT]) for task in tasks if task.missing]
            ahead = stack.enter_context(prepare(missed, None if time_limit is None else time_limit / 2))
        clock = WatchedClock(make_clock(device), make_reader(device))
        save_environment(output, identifier, environment | {"fixed_us": measure_fixed_us(device, clock)}, run_id)
        if not gc.get_freeze_count():  # what the caller froze stays so
            stack.callback(gc.unfreeze)
        of_units: dict[int, list[Record]] = {}
        left = list(range(len(tasks)))
        while left:
            number = left.pop(ahead.first([tasks[n].unit for n in left]))
            unit, blank, known, missing = tasks[number]
            of_units[number] = known
            if missing and time_limit is not None and time.monotonic() - began >= time_limit:
                outcome.reason = outcome.reason or f"the time limit of {time_limit:g} s is reached"
            if missing and outcome.reason:
                outcome.left.append(str(unit))
                continue
            fresh: list[Record] = []
            if missing:
                progress.begin(str(unit))
                # A case collects garbage several times. What modules and compilers keep is looked through once.
                gc.collect()
                gc.freeze()
                prints = {name: _fingerprint(unit, name, gpu) for name in missing}
                fresh = _measure(unit, missing, device, clock, blank, outcome)
                fresh = [
                    replace(r, fingerprint=prints[r.provider], code=code_of(unit.bench, r.provider) or None)
                    for r in fresh
                ]
                try:
                    append(output, fresh)
                except WarploomError as error:
                    hint = "what was measured before is kept, and --resume goes on after it"
                    raise WarploomError(f"{error}; {hint}") from error
            of_units[number] = [r for r in known if r.provider not in {record.provider for record in fresh}] + fresh
            progress.end(str(unit), fresh)
    outcome.records = [record for number in sorted(of_units) for record in of_units[number]]
    return outcome


def _fingerprint(unit: Unit, provider: str, gpu: str) -> str:
    return fingerprint(unit.bench, unit.case, provider, unit.mode, gpu)


class _Task(NamedTuple):
    """A unit, a record of it to be filled in, what is known of it, and which providers are to be measured."""

    unit: Unit
    blank: Record
    known: list[Record]
    missing: list[str]


def _task(
    unit: Unit, selection: Selection, environment: str, run_id: str, gpu: str, found: Mapping[Key, Record]
) -> _Task:
    blank = Record(
        operator=unit.bench.record_name,
        suite=unit.suite,
        case=_as_json(dict(unit.case)),
        provider=LIMIT,
        mode=unit.mode,
        fingerprint="",
        environment=environment,
        run=run_id,
    )
    names = unit.bench.providers_of(unit.suite)
    if selection.providers is not None:
        names = [name for name in unit.bench.every_provider if name in selection.providers]
    wanted = [replace(blank, provider=name) for name in (*names, LIMIT)]
    known = [found[record.key] for record in wanted if record.key in found]
    known = [r for r in known if not r.disturbed and r.code == (code_of(unit.bench, r.provider) or None)]
    known = [r for r in known if r.fingerprint == _fingerprint(unit, r.provider, gpu)]
    missing: list[str] = []
    runs = {record.run for record in known if record.ms is not None}
    # What has a time is timed again beside the rest, so that all are of one run; what failed fails again.
    if len(known) < len(wanted) or len(runs) > 1:
        failed = {record.provider for record in known if record.ms is None}
        missing = [record.provider for record in wanted if record.provider not in failed]
    return _Task(unit, blank, known, missing)


def _measure(
    unit: Unit, missing: Sequence[str], device: torch.device, clock: WatchedClock, blank: Record, outcome: Outcome
) -> list[Record]:
    # Compiled providers specialise on the next case, as they would in a program of one shape. Otherwise the second
    # shape makes them dynamic, and the ninth meets the recompilation limit.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # importing it takes seconds, and a run without compiled providers needs none of it
        dynamo.reset()
    clock.begin()
    measure = unit.bench.measure or evaluate
    try:
        records = measure(unit, [name for name in missing if name != LIMIT], device, clock, blank)
        # The providers were interleaved, so what happened happened to all of them.
        return [replace(r, disturbed=clock.disturbance() if r.ms else None) for r in records]
    except DeviceLostError as lost:
        outcome.reason = f"the device was lost: {lost}"
        outcome.device_lost = True
        # A resumed run passes the culprit by and measures the others.
        names = [lost.name] if lost.name in missing else missing
        return [replace(blank, provider=name, status="error", reason=lost.reason) for name in names]
