"""What a user wants to know first: ours beside the fastest correct alternative of the same run, losses included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from warploom.bench.comparison import Pair
from warploom.bench.records import spell
from warploom.report.panels import STATES, Panel, Point, Section
from warploom.report.table import Cell, Table


@dataclass(frozen=True)
class Summary:
    """A mode of a bench on a device; None where nothing was measured."""

    operator: str
    mode: str
    device: str
    shares: list[float]
    """Shares of the limit, ascending."""
    worst_at: str
    pairs: list[Pair]
    """Each case that could be compared, with the fastest alternative."""
    host_us: float | None
    counts: dict[str, int]
    """Cases by badge."""

    @property
    def lost(self) -> int:
        """Cases in which an alternative is faster by more than the spread."""
        return sum(pair.verdict == "faster" for pair in self.pairs)

    @property
    def level(self) -> int:
        """Cases in which the difference is inside the spread."""
        return sum(pair.verdict == "same" for pair in self.pairs)

    @property
    def ratios(self) -> str:
        """Median and range of the alternatives' times over ours."""
        ratios = sorted(pair.ratio for pair in self.pairs)
        if not ratios:
            return ""
        if len(ratios) == 1:
            return against(ratios[0])
        return f"{against(median(ratios))} ({against(ratios[0])} … {against(ratios[-1])})"

    @property
    def alternatives(self) -> str:
        """Who was the fastest alternative, most often first."""
        return ", ".join(name for name, _ in Counter(pair.b.provider for pair in self.pairs).most_common(2))


def against(ratio: float) -> str:
    """A ratio for a reader: two digits behind the point below ten, so that 0.95 does not become 1."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def counts(points: Iterable[Point]) -> dict[str, int]:
    """Count points by badge; the badges that occur, in the order of `STATES`."""
    counted = Counter(point.badge for point in points)
    return {state: counted[state] for state in STATES if counted[state]}


def summaries(section: Section) -> list[Summary]:
    """Sum up a section: one for each device and mode."""
    found = []
    for device in dict.fromkeys(panel.device for panel in section.panels):
        for mode in dict.fromkeys(mode for panel in section.panels for mode in panel.modes):
            panels = [panel for panel in section.panels if panel.device == device and mode in panel.modes]
            if panels:
                found.append(summary(section, panels, device, mode))
    return found


def summary(section: Section, panels: Sequence[Panel], device: str, mode: str) -> Summary:
    """Sum up a mode of some panels."""
    own: list[tuple[Panel, Point]] = []
    pairs = []
    for panel in panels:
        lines = panel.at(mode)
        for x in panel.xs(mode):
            here = [lines[name][x] for name in section.own_names if x in lines.get(name, {})]
            own += [(panel, here[0])] if here else []
            pair = panel.rival(mode, x, section)
            pairs += [] if pair is None else [pair]
    shares = [(point.fraction, panel, point) for panel, point in own if point.fraction]
    worst = min(shares, key=lambda entry: entry[0], default=None)
    worst_at = ""
    if worst is not None:
        worst_at = f"{section.x} = {spell(worst[2].x)}"
        worst_at += f", {section.short(worst[1])}" * (len(section.panels) > 1)
    hosts = [point.record.host_us for _, point in own if point.ms and point.record.host_us]
    return Summary(
        operator=section.operator,
        mode=mode,
        device=device,
        shares=sorted(share for share, _, _ in shares),
        worst_at=worst_at,
        pairs=pairs,
        host_us=median(hosts) if hosts else None,
        counts=counts(point for _, point in own),
    )


def summary_table(rows: Sequence[Summary]) -> Table:
    """Summaries as a table: share of the limit, and the alternatives' times over ours; none of the others alone."""
    heads = ["operator", "mode", "of the limit", "worst", "fastest alternative", "its time / ours"]
    heads += ["lost / level / compared", "cases"]
    found = []
    for row in (row for row in rows if row.counts):
        share = f"{median(row.shares):.0%}" if row.shares else ""
        worst = Cell(f"{row.shares[0]:.0%}" if row.shares else "", reason=row.worst_at)
        compared = f"{row.lost} / {row.level} / {len(row.pairs)}" if row.pairs else ""
        cells = [row.operator, row.mode, share]
        more = [row.alternatives or "none in the same run", row.ratios, compared]
        cases = ", ".join(f"{count} {state}" for state, count in row.counts.items())
        found.append([*map(Cell, cells), worst, *map(Cell, [*more, cases])])
    return Table(heads, found, words=2)
