"""The report's tables, as rows of cells for the template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.bench.palette import LIMIT
from warploom.bench.panels import Panel, Point, Section, mode_title, sort_xs, spell


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str
    state: str = ""
    """The badge of a result that is not a speed; empty for one that is."""
    reason: str = ""
    ours: bool = False
    share: float | None = None
    """Shades the cell, from 0 to 1."""


@dataclass(frozen=True)
class Table:
    """Column heads and rows; the first cell of a row is its head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Failure:
    """Results without a speed that share their reason."""

    state: str
    provider: str
    places: str
    reason: str


def overview(section: Section) -> Table | None:
    """Show the emphasised provider's share of the limit in every case of a section; None if there is no limit."""
    ours = section.emphasis
    xs = sort_xs(point.x for point in section.points)
    rows = []
    for panel in section.panels:
        for mode in panel.modes:
            points = panel.at(mode).get(ours, {})
            head = [mode_title(mode)] if len(section.panels) == 1 else [panel.label, mode]
            rows.append([Cell(", ".join(head)), *(_share_cell(points.get(x)) for x in xs)])
    if not any(cell.share for row in rows for cell in row):
        return None
    return Table(["", *(spell(x) for x in xs)], rows)


def time_table(section: Section, panel: Panel, mode: str) -> Table:
    """Show every provider's median, the limit, and how close the emphasised provider comes; −1 for no speed."""
    limits = panel.limits(mode)
    ours = panel.at(mode).get(section.emphasis, {})
    table = _by_provider(section, panel, mode, lambda point: _number(point.ms))
    heads = [*table.heads, "limit", f"{section.emphasis} / limit", "GB/s", "TFLOP/s"]
    rows = [
        [*row, Cell(_number(limits.get(x))), _share_cell(ours.get(x)), *_rates(ours.get(x))]
        for x, row in zip(panel.xs(mode), table.rows)
    ]
    return _without_empty(Table(heads, rows))


def memory_table(section: Section, panel: Panel, mode: str) -> Table | None:
    """Show every provider's peak memory; None if none was measured."""
    if not any(point.record.peak_memory_mib for point in panel.points if point.record.mode == mode):
        return None

    def text(point: Point) -> str:
        return f"{point.record.peak_memory_mib or 0:,.1f}" if point.ms else ""

    return _by_provider(section, panel, mode, text)


def accuracy_table(section: Section, panel: Panel, mode: str) -> Table:
    """Show each result's largest error against float64, what it may be, and the ratio of the two."""
    lines = panel.at(mode)
    rows = []
    for x in panel.xs(mode):
        for name in section.providers:
            point = lines.get(name, {}).get(x)
            if point and point.record.max_error is not None:
                error, budget = point.record.max_error, point.record.error_budget
                ratio = f"{error / budget:.2f}" if budget else ""
                texts = (name, f"{error:.2e}", f"{budget:.2e}" if budget else "", ratio)
                cells = [Cell(text, ours=name == section.emphasis) for text in texts]
                rows.append([Cell(spell(x)), *cells, Cell("", "" if point.state == "ok" else point.state)])
    return _without_empty(Table([section.x, "provider", "largest error", "budget", "error / budget", ""], rows))


def failures(panel: Panel, mode: str) -> list[Failure]:
    """List what has no speed, and why."""
    found: dict[tuple[str, str, str], list[Any]] = {}
    for point in panel.points:
        if point.record.mode == mode and point.state != "ok":
            found.setdefault((point.state, point.record.provider, point.reason), []).append(point.x)
    return [
        Failure(state, provider, ", ".join(spell(x) for x in sort_xs(places)), reason)
        for (state, provider, reason), places in found.items()
    ]


def _by_provider(section: Section, panel: Panel, mode: str, text: Callable[[Point], str]) -> Table:
    lines = panel.at(mode)
    names = [name for name in section.providers if name in lines and name != LIMIT]
    rows = []
    for x in panel.xs(mode):
        row = [Cell(spell(x))]
        for name in names:
            point = lines[name].get(x)
            ours = name == section.emphasis
            row.append(_failed(point) if point and point.state != "ok" else Cell(text(point) if point else "", ours=ours))
        rows.append(row)
    return Table([section.x, *names], rows)


def _share_cell(point: Point | None) -> Cell:
    if point is None:
        return Cell("")
    if point.state != "ok":
        return _failed(point)
    return Cell(f"{point.fraction:.0%}" if point.fraction else "", share=min(point.fraction or 0.0, 1.0))


def _failed(point: Point) -> Cell:
    return Cell("−1", point.state, point.reason)


def _rates(point: Point | None) -> tuple[Cell, Cell]:
    """Return the rates that the emphasised provider reached: the fewest bytes, and operations, over the time."""
    if point is None or not point.ms:
        return Cell(""), Cell("")
    seconds = point.ms / 1e3
    moved, done = point.record.min_bytes, point.record.flops
    return Cell(f"{moved / seconds / 1e9:,.0f}" if moved else ""), Cell(f"{done / seconds / 1e12:.3g}" if done else "")


def _without_empty(table: Table) -> Table:
    """Leave out the columns in which nothing stands."""
    keep = [i for i in range(len(table.heads)) if any(row[i].text or row[i].state for row in table.rows)]
    return Table([table.heads[i] for i in keep], [[row[i] for i in keep] for row in table.rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
