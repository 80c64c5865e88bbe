"""The summary: ours beside the fastest correct alternative of the same run, losses included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from warploom.bench.comparison import Pair
from warploom.bench.records import spell
from warploom.ops import benches
from warploom.report.panels import STATES, Panel, Point, Section

NOT_RUN = "not in these runs"
"""The reason for a provider of the bench that a case has no record of."""


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
    def level_told(self) -> str:
        """The number of level cases; in how many an alternative's time is below ours ; the least ratio."""
        below = [pair.ratio for pair in self.pairs if pair.verdict == "same" and pair.ratio < 1]
        return f"{self.level} ({len(below)}: {format_ratio(min(below))})" if below else str(self.level)

    @property
    def peers(self) -> Counter[str]:
        """The number of cases in which each alternative was timed in the run of ours."""
        return Counter(name for case in self.cases for name, told in list_rivals(case) if not told)

    @property
    def absent(self) -> dict[str, Counter[str]]:
        """For each alternative, the reasons for which it has no time beside ours, with their numbers of cases."""
        found: dict[str, Counter[str]] = {}
        for case in self.cases:
            for name, told in list_rivals(case):
                if told:
                    found.setdefault(name, Counter())[told] += 1
        return found

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


def list_rivals(case: Case) -> list[tuple[str, str]]:
    """Returns the alternatives of a case, each with the reason why it has no time beside ours, if it has none."""
    section, found = case.section, []
    lines = case.panel.at(case.mode)
    bench = benches().get(section.operator.replace("_", "-"))
    known = [name for name in bench.providers if not bench.runs_kernels(name)] if bench else []
    out = [section.emphasis, *section.others]
    for name in dict.fromkeys([*section.rivals, *(name for name in known if name not in out)]):
        point = lines.get(name, {}).get(case.point.x)
        if point is None:
            found.append((name, NOT_RUN))
        elif not point.ms:
            found.append((name, point.reason))
        else:
            found.append((name, "" if point.record.run == case.point.record.run else "timed in another run"))
    return found


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
        shares=sorted(p.fraction for p in (case.point for case in cases) if p.fraction and p.badge == "ok"),
        cases=cases,
        counts=count_states(case.point for case in cases),
    )
