"""Records in the order of the report: a section for each bench, with a panel for each combination of parameters.

The parameter along the horizontal axis (`Bench.x`) varies inside a panel. A parameter that is the same in all cases
belongs to the section. The others distinguish the panels.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from warploom.bench.comparison import Pair
from warploom.bench.environment import device_name
from warploom.bench.records import (
    LIMIT,
    Record,
    as_option,
    load,
    load_environments,
    mark_large_hosts,
    own_provider,
    spell,
)
from warploom.ops import benches
from warploom.ops.spec import KERNELS, Bench
from warploom.report.labels import MODES, sort_xs
from warploom.report.palette import sort_providers

UNSET = "–"

STATES = ("ok", "disturbed", "incorrect", "oom", "unsupported", "error", "stale")


@dataclass(frozen=True)
class Point:
    """One record and its position in a panel."""

    record: Record
    x: Any
    """The value of the parameter along the axis."""
    state: str
    """The record's status, or ``stale`` for a record of other code."""
    earlier: tuple[Record, ...] = ()
    """The other records of the same measurement, oldest first."""

    @property
    def badge(self) -> str:
        """One of `STATES`: the state, or ``disturbed`` for a doubtful speed."""
        return "disturbed" if self.state == "ok" and self.record.disturbed else self.state

    @property
    def ms(self) -> float | None:
        """The median time in milliseconds; None if there is no speed."""
        return self.record.ms if self.state == "ok" else None

    @property
    def fraction(self) -> float | None:
        """The share of the limit that was reached."""
        return self.record.limit_fraction if self.ms and self.record.provider != LIMIT else None

    @property
    def reason(self) -> str:
        """The reason why there is no speed, or a doubtful one."""
        if self.badge == "disturbed":
            return self.record.disturbed or ""
        if self.state == "stale":
            return "measured with other code than the present, or the bench is not known here (--spec)"
        return self.record.reason or "no reason was recorded"


@dataclass(frozen=True)
class Panel:
    """The records of one combination of parameters."""

    parameters: Mapping[str, Any]
    device: str
    """The device's name if the section has several devices, else empty."""
    points: tuple[Point, ...]

    @property
    def labels(self) -> dict[str, str]:
        """The values that distinguish this panel from others, as text by name."""
        labels = {name: spell(value) for name, value in self.parameters.items()}
        return labels | ({"device": self.device} if self.device else {})

    @property
    def label(self) -> str:
        """The labels as one text."""
        return " · ".join(f"{name} = {value}" for name, value in self.labels.items()) or "all cases"

    @cached_property
    def modes(self) -> list[str]:
        """The modes, forward first."""
        found = {point.record.mode for point in self.points}
        return [*(m for m in MODES if m in found), *sorted(found - set(MODES))]

    def at(self, mode: str) -> dict[str, dict[Any, Point]]:
        """Returns the points of a mode, by provider and then by position."""
        lines: dict[str, dict[Any, Point]] = {}
        for point in self.points:
            if point.record.mode == mode:
                lines.setdefault(point.record.provider, {})[point.x] = point
        return lines

    def xs(self, mode: str) -> list[Any]:
        """Returns the positions of a mode, ascending."""
        return sort_xs(point.x for point in self.points if point.record.mode == mode)

    def limits(self, mode: str) -> dict[Any, float]:
        """Returns the measured limit in milliseconds at each position that has one."""
        limit = self.at(mode).get(LIMIT, {})
        return {x: ms for x in self.xs(mode) if x in limit and (ms := limit[x].ms)}

    def rival(self, mode: str, x: Any, section: Section) -> Pair | None:
        """Returns ours at a position as A, with the fastest correct alternative of the same run as B.

        The pair's ratio is the alternative's time over ours. None if either is missing, doubtful or of another run.
        """
        line = {name: points[x] for name, points in self.at(mode).items() if x in points}
        ours = next((line[name] for name in section.own_names if name in line and line[name].ms), None)
        if ours is None or not ours.record.run:
            return None
        others = [
            point
            for name, point in line.items()
            if name in section.rivals and point.ms and point.record.run == ours.record.run
        ]
        fastest = min(others, key=lambda point: point.ms or 0.0, default=None)
        if fastest is None or "disturbed" in (ours.badge, fastest.badge):
            return None
        return Pair(section.operator, mode, ours.record.case, ours.record, fastest.record)


@dataclass(frozen=True)
class Section:
    """One bench: the constants of its cases, and its panels."""

    operator: str
    title: str
    x: str
    constants: Mapping[str, Any]
    panels: tuple[Panel, ...]
    emphasis: str
    """The provider that is the operator itself; see `own_provider`."""
    others: tuple[str, ...] = ()
    """Providers of other functions."""
    device: str = ""
    """The device's name, if it is one."""

    @property
    def subject(self) -> str:
        """The operator's own provider in words: ``ours``, or its name where no kernel of warploom ran."""
        return "ours" if self.emphasis.startswith(KERNELS) else self.emphasis

    @property
    def definition(self) -> bool:
        """True if no kernel ran, so that PyTorch's definition stands for the operator."""
        bench = benches().get(self.operator.replace("_", "-"))
        return self.emphasis == "torch" and not (bench and bench.own)

    def is_peer(self, provider: str) -> bool:
        """Returns True for a provider that is neither the operator nor a kernel of warploom."""
        return provider != self.emphasis and not provider.startswith(KERNELS)

    @property
    def points(self) -> list[Point]:
        """Every point of the section."""
        return [point for panel in self.panels for point in panel.points]

    @cached_property
    def providers(self) -> list[str]:
        """Every provider, in the order of the report."""
        return sort_providers((point.record.provider for point in self.points), self.emphasis)

    @cached_property
    def own_names(self) -> list[str]:
        """The providers that are the operator itself, compiled in several ways. The first with a time counts."""
        if "+" not in "".join(self.providers):
            return [self.emphasis]
        return [f"{self.emphasis}{ending}" for ending in ("+graphs", "+compile", "")]

    @cached_property
    def rivals(self) -> list[str]:
        """The providers that ours is compared with: all but ours, the limit and other functions."""
        out = [self.emphasis, LIMIT, *self.others]
        if self.emphasis.startswith(KERNELS):
            out += [name for name in self.providers if name.startswith(KERNELS)]
        return [name for name in self.providers if name not in out]

    @cached_property
    def choices(self) -> dict[str, list[str]]:
        """The values that distinguish the panels, by name; `UNSET` for a panel without a value."""
        names = dict.fromkeys(name for panel in self.panels for name in panel.labels)
        return {name: list(dict.fromkeys(panel.labels.get(name, UNSET) for panel in self.panels)) for name in names}

    def command(self, panel: Panel, mode: str) -> str:
        """Returns the command line that measures a panel's mode again."""
        bench = benches().get(self.operator.replace("_", "-"))
        run = (bench and bench.command) or f"warploom bench {self.operator.replace('_', '-')}"
        if not run.startswith("warploom bench"):
            return run
        suites = Counter(point.record.suite for point in panel.points if point.record.mode == mode)
        suite = suites.most_common(1)[0][0]
        words = [*shlex.split(run), "--suite", suite]
        dtype = str(panel.parameters.get("dtype", self.constants.get("dtype", "")))
        if bench and dtype and suite in bench.suites:
            by_themselves = {case.get("dtype") for kind in ("cuda", "cpu") for case in bench.suites[suite](kind)}
            words += [] if dtype in by_themselves else ["--dtype", dtype]
        for name, value in panel.parameters.items():
            words += ["--case", f"{name}={as_option(value)}"]
        return shlex.join([*words, "--mode", mode])


_RecordState = tuple[Record, str, str, tuple[Record, ...]]
"""A record, its device, its state, and earlier records of the same."""


def load_sections(sources: Sequence[Path]) -> list[Section]:
    """Read and arrange the records of sources, which are those of `warploom.report.write_report`."""
    known = {name: value for source in sources for name, value in load_environments(source).items()}
    devices = {name: device_name(environment) for name, environment in known.items()}
    return arrange(mark_large_hosts(load(sources, every=True), known), devices)


def arrange(records: Sequence[Record], devices: Mapping[str, str] | None = None) -> list[Section]:
    """Arrange records in sections and panels.

    Of several records of the same case, mode, provider and device the last one counts, unless it is stale and an
    earlier one is not.

    Args:
        records: Records, oldest first.
        devices: Names of devices by the records' environments. None for new records, which are of one device and of
            the present code.

    Returns:
        A section for each bench: those of the registry in its order, then any others.
    """
    kept: dict[tuple[str, ...], _RecordState] = {}
    for record in records:
        device = "" if devices is None else devices.get(record.environment, device_name({}))
        key = (record.operator, json.dumps(record.case, sort_keys=True), record.provider, record.mode, device)
        state = "stale" if devices is not None and record.is_stale else record.status
        former = kept.get(key)
        if former is None:
            kept[key] = (record, device, state, ())
        elif state != "stale" or former[2] == "stale":
            kept[key] = (record, device, state, (*former[3], former[0]))
        else:
            kept[key] = (*former[:3], (*former[3], record))
    groups: dict[str, list[_RecordState]] = {}
    for entry in kept.values():
        groups.setdefault(entry[0].operator, []).append(entry)
    known = {bench.record_name: bench for bench in benches().values()}
    names = [*(name for name in known if name in groups), *(name for name in groups if name not in known)]
    return [_make_section(name, groups[name], known.get(name)) for name in names]


def _make_section(operator: str, entries: Sequence[_RecordState], bench: Bench | None) -> Section:
    cases = [record.case for record, *_ in entries]
    x = bench.x if bench else _guess_axis(cases)
    parameters = [name for name in dict.fromkeys(name for case in cases for name in case) if name != x]
    parameters = [name for name in parameters if not _is_determined(cases, name)]
    constants = {name: cases[0].get(name) for name in parameters if _count_values(cases, name) == 1}
    on = {device for _, device, *_ in entries}
    panels: dict[str, tuple[dict[str, Any], str, list[Point]]] = {}
    for record, device, state, earlier in entries:
        chosen = {
            name: record.case[name]
            for name in parameters
            if name not in constants and record.case.get(name) is not None
        }
        shown = device if len(on) > 1 else ""
        _, _, points = panels.setdefault(json.dumps([shown, chosen]), (chosen, shown, []))
        at = record.case.get(x)
        points.append(Point(record, spell(at) if isinstance(at, list | dict) else at, state, earlier))
    return Section(
        operator=operator,
        title=bench.title if bench else operator.replace("_", " "),
        x=x,
        constants={name: value for name, value in constants.items() if value is not None},
        panels=tuple(Panel(chosen, device, tuple(points)) for chosen, device, points in panels.values()),
        emphasis=own_provider((record for record, *_ in entries), bench.own if bench else ""),
        others=tuple(bench.other_names) if bench else (),
        device=on.pop() if len(on) == 1 else "",
    )


def _guess_axis(cases: Sequence[Mapping[str, Any]]) -> str:
    """Guess the parameter along the axis, for a bench that is not in the registry."""
    names = sorted({name for case in cases for name in case})
    likely = [name for name in ("n", "m") if name in names]
    return likely[0] if likely else max(names, key=lambda name: _count_values(cases, name), default="n")


def _is_determined(cases: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Returns True if a parameter is a list that the others determine, as tokens determine the sizes of a grid."""
    if not any(isinstance(case.get(name), list) for case in cases):
        return False
    whole = {json.dumps(case, sort_keys=True) for case in cases}
    return len(whole) == len({json.dumps({**json.loads(case), name: None}, sort_keys=True) for case in whole})


def _count_values(cases: Sequence[Mapping[str, Any]], name: str) -> int:
    return len({json.dumps(case.get(name), sort_keys=True) for case in cases})
