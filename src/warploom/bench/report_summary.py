"""The report's summary: one row for each bench, mode and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from warploom.bench.labels import spell
from warploom.bench.panels import STATES, Panel, Point, Section

__all__ = ["SummaryRow", "counts", "summary_rows"]


@dataclass(frozen=True)
class SummaryRow:
    """What a reader in a hurry reads about a mode of a bench; None where nothing was measured."""

    operator: str
    mode: str
    device: str
    provider: str
    median_share: float | None
    worst_share: float | None
    worst_at: str
    over_compile: float | None
    over_torch: float | None
    over_best: float | None
    """Median speed-up over the fastest, case by case, of the providers that are not ours."""
    host_us: float | None
    counts: dict[str, int]


def counts(points: Iterable[Point]) -> dict[str, int]:
    """Count points by badge; the badges that occur, in the order of `STATES`."""
    counted = Counter(point.badge for point in points)
    return {state: counted[state] for state in STATES if counted[state]}


def summary_rows(section: Section) -> list[SummaryRow]:
    """Sum up a section."""
    devices = dict.fromkeys(panel.device for panel in section.panels)
    modes = dict.fromkeys(mode for panel in section.panels for mode in panel.modes)
    rows = []
    for device in devices:
        for mode in modes:
            panels = [panel for panel in section.panels if panel.device == device and mode in panel.modes]
            if panels:
                rows.append(_row(section, panels, device, mode))
    return rows


def _row(section: Section, panels: Sequence[Panel], device: str, mode: str) -> SummaryRow:
    ours = section.emphasis
    own = [(panel, point) for panel in panels for point in panel.at(mode).get(ours, {}).values()]
    shares = [(point.fraction, panel, point) for panel, point in own if point.fraction]
    worst = min(shares, key=lambda entry: entry[0], default=None)
    gains = {
        name: [panel.speedups(mode, ours, name) for panel in panels]
        for name in section.baselines
        if not name.startswith(section.own) and name not in section.others
    }
    least: list[float] = []
    for of_one_panel in zip(*gains.values()):
        for x in {x for at in of_one_panel for x in at}:
            least.append(min(at[x] for at in of_one_panel if x in at))
    hosts = [point.record.host_us for _, point in own if point.ms and point.record.host_us]
    return SummaryRow(
        operator=section.operator,
        mode=mode,
        device=device,
        provider=ours,
        median_share=_median(share for share, _, _ in shares),
        worst_share=worst[0] if worst else None,
        worst_at=_place(section, worst[1], worst[2]) if worst else "",
        over_compile=_median(_values(gains.get(section.torch_compile, []))),
        over_torch=_median(_values(gains.get(section.torch, []))),
        over_best=_median(least),
        host_us=_median(hosts),
        counts=counts(point for _, point in own),
    )


def _values(gains: Iterable[Mapping[Any, float]]) -> Iterable[float]:
    return (value for at in gains for value in at.values())


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _place(section: Section, panel: Panel, point: Point) -> str:
    words = [f"{section.x} = {spell(point.x)}"]
    return ", ".join([*words, section.short(panel)] if len(section.panels) > 1 else words)
