"""Records arranged for a reader: a section for each bench, in it a panel for each combination of parameters.

The parameter that runs along the axis (`Bench.x`) varies inside a panel; a parameter that is the same everywhere
belongs to the section; the others tell the panels apart.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warploom.bench.palette import LIMIT, ordered
from warploom.bench.records import Record, is_stale
from warploom.ops import benches

STATES = ("ok", "incorrect", "oom", "unsupported", "error", "stale")

_MODES = {"fwd": "Forward", "bwd": "Backward", "fwd_bwd": "Forward and backward"}


@dataclass(frozen=True)
class Point:
    """One record and where it stands."""

    record: Record
    x: Any
    """Its value of the parameter along the axis."""
    state: str
    """One of `STATES`: the record's status, or ``stale`` for any record of other code."""

    @property
    def ms(self) -> float | None:
        """Median milliseconds; None for whatever is not a speed."""
        return self.record.ms if self.state == "ok" else None

    @property
    def fraction(self) -> float | None:
        """Share of the limit that was reached."""
        record = self.record
        if not self.ms or record.provider == LIMIT:
            return None
        return record.limit_fraction or (record.limit_ms / self.ms if record.limit_ms else None)

    @property
    def reason(self) -> str:
        """Why there is no speed."""
        if self.state == "stale":
            return "measured with other code than the present one; run it again"
        return self.record.reason or "no reason was recorded"


@dataclass(frozen=True)
class Panel:
    """The records of one combination of parameters."""

    parameters: Mapping[str, Any]
    device: str
    """The device's name where a section has several, else empty."""
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """The combination in words."""
        words = [f"{name} = {spell(value)}" for name, value in self.parameters.items()]
        return " · ".join([*words, self.device] if self.device else words) or "all cases"

    @cached_property
    def modes(self) -> list[str]:
        """The modes, forward first."""
        found = {point.record.mode for point in self.points}
        return [*(m for m in _MODES if m in found), *sorted(found - set(_MODES))]

    def at(self, mode: str) -> dict[str, dict[Any, Point]]:
        """Return the points of a mode, by provider and then by position, both in reading order."""
        chosen = [point for point in self.points if point.record.mode == mode]
        return {
            name: {p.x: p for p in chosen if p.record.provider == name}
            for name in {p.record.provider: None for p in chosen}
        }

    def xs(self, mode: str) -> list[Any]:
        """Return the positions of a mode, ascending."""
        return sort_xs(point.x for point in self.points if point.record.mode == mode)

    def limits(self, mode: str) -> dict[Any, float]:
        """Return the measured limit in ms at each position that has one."""
        chosen = [p for p in self.points if p.record.mode == mode and p.state in ("ok", "incorrect")]
        found = {p.x: p.record.limit_ms for p in chosen if p.record.limit_ms}
        found |= {p.x: p.ms for p in chosen if p.record.provider == LIMIT and p.ms}
        return {x: found[x] for x in self.xs(mode) if x in found}

    def speedups(self, mode: str, ours: str, baseline: str) -> dict[Any, float]:
        """Return how many times faster ``ours`` is than ``baseline``, at each position where both have a speed."""
        lines = self.at(mode)
        mine, theirs = lines.get(ours, {}), lines.get(baseline, {})
        pairs = {x: (point.ms, theirs[x].ms) for x, point in mine.items() if x in theirs}
        return {x: other / own for x, (own, other) in pairs.items() if own and other}


@dataclass(frozen=True)
class Section:
    """One bench: what its cases share, and its panels."""

    operator: str
    title: str
    x: str
    constants: Mapping[str, Any]
    panels: tuple[Panel, ...]
    emphasis: str
    """The provider the section is about: ``triton`` where it has a speed, else ``torch``."""

    @property
    def points(self) -> list[Point]:
        """Every point of the section."""
        return [point for panel in self.panels for point in panel.points]

    @cached_property
    def providers(self) -> list[str]:
        """Every provider, in reading order."""
        return ordered((point.record.provider for point in self.points), self.emphasis)

    def baselines(self) -> list[str]:
        """Return the providers that the emphasised one is compared with."""
        return [name for name in self.providers if name not in (self.emphasis, LIMIT)]

    def command(self, panel: Panel, mode: str) -> str:
        """Return the command line that measures a panel's mode again."""
        suite = next(p.record.suite for p in reversed(panel.points) if p.record.mode == mode)
        words = ["warploom", "bench", self.operator.replace("_", "-"), "--suite", suite]
        for name, value in panel.parameters.items():
            words += ["--case", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join([*words, "--mode", mode])


def sections(records: Sequence[tuple[Record, str]]) -> list[Section]:
    """Arrange records.

    Args:
        records: Each record with the name of the device it was measured on, oldest first. Of several records of the
            same case, mode, provider and device the last one counts, and a stale one never before a fresh one.

    Returns:
        A section for each bench: those of the registry in its order, then any others.
    """
    kept: dict[tuple[str, ...], tuple[Record, str, str]] = {}
    for record, device in records:
        case = json.dumps(record.case, sort_keys=True, default=str)
        key = (record.operator, case, record.provider, record.mode, device)
        state = "stale" if is_stale(record) else record.status
        if key not in kept or state != "stale" or kept[key][2] == "stale":
            kept[key] = (record, device, state)
    names = {record.operator: None for record, _, _ in kept.values()}
    known = [name.replace("-", "_") for name in benches()]
    names_in_order = [*(n for n in known if n in names), *(n for n in names if n not in known)]
    return [_section(name, [entry for entry in kept.values() if entry[0].operator == name]) for name in names_in_order]


def _section(name: str, entries: list[tuple[Record, str, str]]) -> Section:
    cases = [record.case for record, _, _ in entries]
    bench = benches().get(name.replace("_", "-"))
    x = bench.x if bench else _axis(cases)
    parameters = {key: None for case in cases for key in case if key != x}
    constants = {key: cases[0].get(key) for key in parameters if _count(cases, key) == 1}
    varying = [key for key in parameters if key not in constants and not any(_is_list(case.get(key)) for case in cases)]
    several = len({device for _, device, _ in entries}) > 1
    groups: dict[str, tuple[dict[str, Any], str, list[Point]]] = {}
    for record, device, state in entries:
        chosen = {key: record.case[key] for key in varying if key in record.case}
        shown = device if several else ""
        group = groups.setdefault(json.dumps([shown, chosen], sort_keys=True, default=str), (chosen, shown, []))
        group[2].append(Point(record, record.case.get(x), state))
    fast = {record.provider for record, _, state in entries if state == "ok"}
    return Section(
        operator=name,
        title=bench.title if bench else name.replace("_", " "),
        x=x,
        constants=constants,
        panels=tuple(Panel(chosen, device, tuple(points)) for chosen, device, points in groups.values()),
        emphasis="torch" if "triton" not in fast and "torch" in fast else "triton",
    )


def _axis(cases: Sequence[Mapping[str, Any]]) -> str:
    """Guess the parameter along the axis of a bench that the registry does not know."""
    names = sorted({name for case in cases for name in case})
    return next((name for name in ("n", "m") if name in names), max(names, key=lambda n: _count(cases, n), default="n"))


def _count(cases: Sequence[Mapping[str, Any]], name: str) -> int:
    return len({json.dumps(case.get(name), sort_keys=True, default=str) for case in cases})


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def sort_xs(values: Any) -> list[Any]:
    """Sort positions: numbers by size, other values by name behind them."""
    return sorted(set(values), key=lambda x: (0, x, "") if isinstance(x, (int, float)) else (1, 0, str(x)))


def spell(value: Any) -> str:
    """Write a parameter's value for a reader."""
    return value if isinstance(value, str) else json.dumps(value, default=str).strip("[]").replace(", ", "×")


def mode_title(mode: str) -> str:
    """Write a mode for a reader."""
    return _MODES.get(mode, mode)
