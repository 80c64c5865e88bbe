"""The summary: ours beside the fastest correct alternative of the same run, losses included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from warploom.bench.comparison import Pair
from warploom.bench.records import spell
from warploom.report.panels import STATES, Panel, Point, Section


@dataclass(frozen=True)
class Case:
    """A case in one mode with a result of the operator itself."""

    section: Section
    panel: Panel
    mode: str
    point: Point
    pair: Pair | None
    """Ours and the fastest alternative, if they can be compared."""

    @property
    def words(self) -> str:
        """The parameters that distinguish it."""
        named = {name: spell(value) for name, value in self.panel.parameters.items()}
        return " ".join(f"{name}={value}" for name, value in {self.section.x: self.point.x, **named}.items())


@dataclass(frozen=True)
class Summary:
    """The summary of one mode of a bench on one device."""

    operator: str
    mode: str
    device: str
    shares: list[float]
    """The shares of the limit, ascending."""
    cases: list[Case]
    counts: dict[str, int]
    """The number of cases by badge."""

    @property
    def pairs(self) -> list[Pair]:
        """Ours and the fastest alternative, for each case that can be compared."""
        return [case.pair for case in self.cases if case.pair is not None]

    @property
    def lost(self) -> int:
        """The number of cases in which an alternative is faster by more than the spread."""
        return sum(pair.verdict == "faster" for pair in self.pairs)

    @property
    def level(self) -> int:
        """The number of cases in which the difference is inside the spread."""
        return sum(pair.verdict == "same" for pair in self.pairs)

    @property
    def ratios(self) -> str:
        """The median and range of the alternatives' times over ours, as text."""
        ratios = sorted(pair.ratio for pair in self.pairs)
        if not ratios:
            return ""
        if len(ratios) == 1:
            return format_ratio(ratios[0])
        return f"{format_ratio(median(ratios))} ({format_ratio(ratios[0])} … {format_ratio(ratios[-1])})"

    @property
    def alternatives(self) -> str:
        """The two providers that were most often the fastest alternative."""
        return ", ".join(name for name, _ in Counter(pair.b.provider for pair in self.pairs).most_common(2))


def format_ratio(ratio: float) -> str:
    """Returns a ratio as text, with two decimals below ten, so that 0.95 does not become 1."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def count_states(points: Iterable[Point]) -> dict[str, int]:
    """Count points by badge, in the order of `STATES`. Badges without points are left out."""
    counted = Counter(point.badge for point in points)
    return {state: counted[state] for state in STATES if counted[state]}


def summarize(section: Section) -> list[Summary]:
    """Summarize each mode of a section on each device."""
    found = []
    for device in dict.fromkeys(panel.device for panel in section.panels):
        for mode in dict.fromkeys(mode for panel in section.panels for mode in panel.modes):
            panels = [panel for panel in section.panels if panel.device == device and mode in panel.modes]
            if panels:
                found.append(summarize_mode(section, panels, device or section.device, mode))
    return found


def list_cases(section: Section, panels: Sequence[Panel], mode: str) -> list[Case]:
    """Returns the cases of a mode that have a result of the operator itself."""
    found = []
    for panel in panels:
        lines = panel.at(mode)
        for x in panel.xs(mode):
            here = [lines[name][x] for name in section.own_names if x in lines.get(name, {})]
            found += [Case(section, panel, mode, here[0], panel.rival(mode, x, section))] if here else []
    return found


def summarize_mode(section: Section, panels: Sequence[Panel], device: str, mode: str) -> Summary:
    """Summarize a mode of some panels."""
    cases = list_cases(section, panels, mode)
    return Summary(
        operator=section.operator,
        mode=mode,
        device=device,
        shares=sorted(case.point.fraction for case in cases if case.point.fraction),
        cases=cases,
        counts=count_states(case.point for case in cases),
    )
